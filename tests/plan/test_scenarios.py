"""Time and money of a run, and the choice among several machines, by hand."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from lightning_topt.basics.units import format_seconds
from lightning_topt.costs.cluster import Cluster, Device, Failures, Link
from lightning_topt.costs.optimizer import read_optimizer
from lightning_topt.graph.capture import capture
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.choose import NoPlanFitsError
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, StepEstimate
from lightning_topt.plan.plan_frontier import (
    ModelFacts,
    PlanFrontier,
    PlanPoint,
    of_steps,
    step_of_microbatches,
)
from lightning_topt.plan.plan_search import SearchRequest
from lightning_topt.plan.scenarios import (
    Estimate,
    Limits,
    Scenario,
    Workload,
    check_asked,
    choose_estimate,
    default_objective,
    estimate,
    print_scenarios,
    search_scenario,
)
from tests.models import GPT

FACTS = ModelFacts(checkpoint_bytes=1e10, update_seconds={"": 0.0, "a": 0.2})


def cluster(
    name: str = "c", *, price: float | None = 2.0, failures: Failures | None = None
) -> Cluster:
    device = Device("d", 10**9, {"float32": 1e12}, 1e11, price_per_hour=price)
    return Cluster(name, device, 8, 16, Link(1e-5, 1e9), Link(1e-5, 1e9), failures=failures)


def point(
    seconds: float, *, level: int = 0, devices: int = 4, peak: float = 1e8, exposed: float = 0.1
) -> PlanPoint:
    blocks = [BlockPlan(name, OpConfig.zero(level)) for name in ("", "a")]
    predicted = StepEstimate(seconds, peak, seconds - exposed, exposed)
    plan = ParallelPlan.of_blocks(
        blocks, mesh=data_mesh(devices), batch_size=8, predicted=predicted
    )
    return PlanPoint(seconds, peak, devices, plan)


def of(seconds: float, scenario: Scenario, work: Workload | None = None, **given) -> Estimate:
    return estimate(
        scenario, point(seconds, devices=scenario.devices, **given), facts=FACTS, work=work
    )


def test_a_run_and_its_price() -> None:
    scenario = Scenario(cluster(), 4, batch_size=32, seq_len=100)
    found = of(0.5, scenario, Workload(tokens=32 * 100 * 7200))
    assert (
        found.run is not None
        and found.run.seconds == pytest.approx(3600)
        and found.money == pytest.approx(8.0)
    )
    assert found.samples_per_second == 64
    assert found.money_per_sample == pytest.approx(8.0 / (32 * 7200))
    assert of(0.5, scenario, Workload(samples=32)).run.seconds == pytest.approx(0.5)
    assert of(0.5, scenario, Workload(steps=10)).run.seconds == pytest.approx(5)


def test_failures_cost_time_and_money() -> None:
    failures = Failures(1e-4, restart_seconds=300, checkpoint_bandwidth=1e9)
    found = of(0.5, Scenario(cluster(failures=failures), 4, 32), Workload(steps=1e6))
    assert 5e5 < found.run.seconds < 6e5
    assert found.money == pytest.approx(found.run.seconds / 3600 * 4 * 2.0)


def test_micro_batches_exchange_and_update_once_where_gradients_are_whole() -> None:
    whole, sharded = point(1.0), point(1.0, level=3)
    assert step_of_microbatches(whole, accumulate=1, facts=FACTS) is whole
    steps = [step_of_microbatches(each, accumulate=4, facts=FACTS) for each in (whole, sharded)]
    assert [each.step_seconds for each in steps] == pytest.approx(
        [4 - 3 * (0.2 + 0.1), 4 - 3 * 0.05]
    )
    # in a step an exchange waits once, or once for each micro-batch
    waits = [each.plan.predicted.exposed_communication_seconds for each in steps]
    assert waits == pytest.approx([0.1, 4 * 0.1])
    for each in steps:
        predicted = each.plan.predicted
        assert ParallelPlan.from_yaml(each.plan.to_yaml()).accumulate == 4
        assert predicted.step_seconds == each.step_seconds
        assert predicted.compute_seconds == pytest.approx(
            each.step_seconds - predicted.exposed_communication_seconds
        )
    # a plan that loses by a micro-batch may win by a step: what was left out was not looked at
    exact = PlanFrontier.of([whole])
    assert of_steps(exact, accumulate=1, facts=FACTS) is exact and exact.exact
    several = of_steps(exact, accumulate=4, facts=FACTS)
    assert not several.exact and several.error_bound == 3 and several.points == (steps[0],)
    assert FACTS.update_of(whole.plan) == pytest.approx(0.2)
    assert FACTS.update_of(sharded.plan) == pytest.approx(0.2 / 4), (
        "each of 4 ranks updates its share"
    )


def three() -> list[Estimate]:
    """Slow and cheap, fast and dear, in between."""
    work = Workload(steps=36000)
    slow, fast, middle = (
        cluster("slow", price=1.0),
        cluster("fast", price=9.0),
        cluster("middle", price=3.0),
    )
    return [
        of(2.0, Scenario(slow, 4, 32), work, peak=3e8),  # 20 h, 80
        of(0.5, Scenario(fast, 4, 32), work, peak=2e8),  # 5 h, 180
        of(1.0, Scenario(middle, 2, 32), work, peak=1e8),  # 10 h, 60
    ]


@pytest.mark.parametrize(
    ("objective", "limits", "best"),
    [
        ("money", Limits(), "middle"),
        ("money", Limits(deadline=6 * 3600), "fast"),
        ("duration", Limits(), "fast"),
        ("duration", Limits(budget=100), "middle"),
        ("time", Limits(), "fast"),
        ("memory", Limits(), "middle"),
        ("throughput", Limits(), "fast"),
        ("throughput", Limits(budget=100), "middle"),
        ("devices", Limits(), "middle"),
    ],
)
def test_the_best_within_the_limits(objective: str, limits: Limits, best: str) -> None:
    chosen, reason = choose_estimate(three(), objective=objective, limits=limits)
    assert chosen.scenario.cluster.name == best
    assert (
        reason.startswith(f"{chosen.scenario.devices} x {best}")
        and "times may be off by 15 %" in reason
    )


def many() -> list[Estimate]:
    """256 and 512 devices of a cluster with a long name, some beyond the deadline of 10 h."""
    machines = [cluster("a_cluster_with_a_long_name_128x8"), cluster("fast", price=9.0)]
    return [
        of(seconds, Scenario(each, devices, 1024, 8192), Workload(steps=36000), peak=7e10)
        for each in machines
        for devices, seconds in ((256, 2.0), (512, 0.9))
    ]


def test_the_table_marks_the_choice_and_the_limits() -> None:
    limits = Limits(deadline=36000, budget=1e9)
    estimates = many()
    console = Console(width=80, record=True, quiet=False, file=io.StringIO())
    print_scenarios(estimates, estimates[1], limits=limits, console=console)
    text = console.export_text()
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines) and "…" not in text
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    assert [(row[0], row[2]) for row in rows if len(row) > 2 and row[2].isdigit()] == [
        ("!", "256"),
        ("*", "512"),
        ("!", "256"),
        ("", "512"),
    ]
    assert "! not within 10.0 h" in text


def test_what_is_asked_where_nothing_is_said() -> None:
    run, no_run = three(), [replace(each, run=None, money=None) for each in three()]
    assert default_objective(run, Limits(), given="time") == "money"
    assert default_objective(run, Limits(budget=10), given="time") == "duration"
    assert default_objective(no_run, Limits(), given="time") == "throughput"
    assert default_objective(no_run, Limits(), given="memory") == "memory"
    assert default_objective(no_run[:1], Limits(), given="time") == "time"
    for asked in (("time", Limits(deadline=1.0)), ("duration", Limits())):
        with pytest.raises(ValueError, match="whole run"):
            check_asked(*asked, has_work=False)
    with pytest.raises(ValueError, match="objective"):
        check_asked("speed", Limits(), has_work=True)


def test_more_micro_batches_where_memory_is_short() -> None:
    module, tokens = GPT(layers=2, width=32, context=32), torch.zeros(2, 32, dtype=torch.long)
    graph = capture(module, (tokens, tokens))
    optimizer = read_optimizer(
        [module.configure_optimizers()], named_parameters=module.named_parameters()
    )
    machines = Cluster("c", Device("d", 10**9, {"float32": 1e12}, 1e11), 2, 1, Link(1e-5, 1e9))
    request, scenario = (
        SearchRequest(graph, machines, optimizer, (2,), 64),
        Scenario(machines, 2, 64),
    )
    free = search_scenario(request, scenario)
    assert free.chosen.point.plan.accumulate == 1
    least = min(p.peak_bytes for p in free.frontier.candidates)
    short = search_scenario(request, scenario, memory_limit=0.8 * least)
    assert short.chosen.point.plan.accumulate > 1 and short.chosen.peak_bytes * 1.05 <= 0.8 * least
    assert short.chosen.point.plan.batch_size * 2 * short.chosen.point.plan.accumulate == 64
    assert short.chosen.step_seconds > free.chosen.step_seconds
    # the frontier, the plan and its reason speak of steps, not of micro-batches
    predicted = short.chosen.point.plan.predicted
    assert predicted.step_seconds == short.chosen.step_seconds
    assert min(p.step_seconds for p in short.frontier.points) > 0.9 * free.chosen.step_seconds
    assert f": {format_seconds(predicted.step_seconds)} and" in short.chosen.point.plan.reason
    with pytest.raises(NoPlanFitsError):
        search_scenario(request, scenario, memory_limit=0.8 * least, accumulate=(1,))
    with pytest.raises(ValueError, match="cannot be cut into 3 equal micro-batches"):
        search_scenario(request, scenario, accumulate=(3,))
