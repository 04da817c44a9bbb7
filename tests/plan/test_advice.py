"""Advice by hand: formulas, the machine's resources one at a time, and what the files say."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from lightning_topt.communication import BF16, TopK
from lightning_topt.costs.cluster import (
    Accuracy,
    Cluster,
    Device,
    ErrorFigure,
    Link,
    NodeType,
)
from lightning_topt.costs.optimizer import read_optimizer
from lightning_topt.data.stalls.model import SetUp, StallCosts
from lightning_topt.graph.capture import capture
from lightning_topt.plan.advice import (
    Advice,
    advise_batch,
    advise_bounded_loss,
    advise_compression,
    advise_devices,
    advise_servers,
    efficiency,
    largest_overhead,
    most_devices,
    overhead_ratio,
    parameter_servers,
    save_advice,
    to_markdown,
)
from lightning_topt.plan.advice_bottlenecks import (
    RESOURCES,
    MeasuredStalls,
    advise_bottleneck,
    advise_data,
    gains,
    least_share,
    seconds_on,
)
from lightning_topt.plan.pipeline_search import PipelineRequest
from lightning_topt.plan.plan_search import SearchRequest, search_plans
from lightning_topt.plan.scenarios import (
    Scenario,
    ScenarioResult,
    of_microbatches,
    search_scenario,
)
from tests.models import GPT
from tests.plan.test_scenarios import cluster, of


def test_efficiency_is_that_of_the_guidelines() -> None:
    assert largest_overhead(0.8, devices=4) == pytest.approx(0.0909, abs=1e-4)
    assert largest_overhead(0.8, devices=8) == pytest.approx(0.0370, abs=1e-4)
    for ratio in (0.01, 0.2):
        most = most_devices(0.7, overhead_ratio=ratio)
        assert efficiency(most, overhead_ratio=ratio) == pytest.approx(0.7)
        assert largest_overhead(0.7, devices=round(most)) == pytest.approx(ratio, rel=0.2)
    assert (
        most_devices(0.8, overhead_ratio=0.0) == math.inf
        and largest_overhead(0.5, devices=2) == math.inf
    )
    # G devices take T_c / G + T_o for what one does in T_c + T_o.
    compute, overhead, devices = 8.0, 0.5, 4
    speed = (compute + overhead) / (compute / devices + overhead)
    assert efficiency(devices, overhead_ratio=overhead / compute) == pytest.approx(speed / devices)


def test_devices_worth_having() -> None:
    """Steps of 1 s of which 0.1 s are no computation: R = 0.1 / (4 x 0.9)."""
    at, fewer = of(1.0, Scenario(cluster(), 4, 32)), of(1.6, Scenario(cluster(), 2, 32))
    assert overhead_ratio(at) == pytest.approx(0.1 / 3.6)
    by_ratio, searched = advise_devices([at, fewer], at=at, wanted=0.8)
    assert by_ratio.value == pytest.approx((1 + 0.1 / 3.6 - 0.8) / (0.8 * 0.1 / 3.6))
    assert [row["efficiency"] for row in searched.table] == pytest.approx(
        [1.0, 0.8]
    ) and searched.value == 4
    assert advise_devices([at, fewer], at=at, wanted=0.9)[1].value == 2


def test_the_smallest_batch_that_is_nearly_as_fast_and_the_one_that_learns_soonest() -> None:
    found = [
        of(seconds, Scenario(cluster(), 4, batch))
        for batch, seconds in ((16, 1.0), (32, 1.1), (64, 2.1))
    ]
    enough, noise = advise_batch(found)
    assert enough.value == 32 and len(enough.table) == 3
    assert noise.value is None and "give log=" in noise.advice
    for scale, best in ((1.0, 16), (40.0, 32), (1e6, 64)):
        times = {
            each.scenario.batch_size: each.step_seconds * (1 + scale / each.scenario.batch_size)
            for each in found
        }
        assert (
            advise_batch(found, noise_scale=scale)[1].value
            == best
            == min(times, key=lambda size: times[size])
        )


def test_parameter_servers() -> None:
    assert parameter_servers(1e9, workers=8, bandwidth=1e9, compute=4.0) == 4
    assert parameter_servers(1e9, workers=8, bandwidth=1e9, compute=3.9) == 5
    at = of(1.0, Scenario(cluster(), 4, 32))
    # a node's network: 8 x 1 GB/s; 0.9 s of computation
    advice = advise_servers(at, parameter_bytes=9e9)
    assert advice.value == math.ceil(2 * 9e9 * 4 / (8e9 * 0.9)) and advice.inputs["N_w"] == 4


def test_a_transport_that_may_lose_brings_at_most_the_tail() -> None:
    at = of(1.0, Scenario(cluster(), 4, 32))  # 0.1 s of exchange in the way
    assert advise_bounded_loss(at, tail=None).value == pytest.approx(1 / 0.9 - 1)
    assert advise_bounded_loss(at, tail=2.0).value == pytest.approx(1 / 0.95 - 1)
    # 11 %: within the 15 % that are assumed, more than what pairs of plans have shown, or users say
    assumed = advise_bounded_loss(at, tail=1000.0)
    assert "not worth it, which it is from 15 % on (assumed" in assumed.advice
    figure = ErrorFigure(0.06, 0.27, 161)
    known = replace(at.scenario.cluster, accuracy=Accuracy(figure, difference=figure))
    measured = replace(at, scenario=replace(at.scenario, cluster=known))
    found = advise_bounded_loss(measured, tail=1000.0)
    assert "allow_compression=[bounded_loss]" in found.advice
    assert found.inputs["worth it from"] == 0.06 and "161 pairs" in found.inputs["which is from"]
    said = advise_bounded_loss(measured, tail=1000.0, equal_within=0.2)
    assert "from 20 % on (as equal_within says)" in said.advice
    assert (
        advise_bounded_loss(at, tail=1.0).value == 0
        and "not worth it" in advise_bounded_loss(at, tail=1.0).advice
    )


def costs(**changes) -> StallCosts:
    given = {
        "batch_size": 8,
        "num_items": 1000,
        "step_seconds": 0.08,
        "step_core_seconds": 0.0,
        "latency_seconds": 0.0,
    }
    given |= {
        "source_bytes": 1e6,
        "link_bytes_per_second": 5e7,
        "prepare_seconds": 1e-4,
        "hit_seconds": 1e-5,
    }
    given |= {
        "collate_seconds": 0.0,
        "worker_seconds": 0.0,
        "receive_seconds": 0.0,
        "entry_bytes": 1e6,
    }
    return StallCosts(**{**given, **changes})


def test_data_and_the_least_cache() -> None:
    """A link of 50 samples per second; ranks that take 100 need half of the samples in memory."""
    assert least_share(1e9, source=5e7, cache=1e12, samples=1000, rate=100) == pytest.approx(
        0.5, abs=1e-3
    )
    assert least_share(1e9, source=5e7, cache=1e12, samples=1000, rate=40) == 0
    stalls = MeasuredStalls(costs(), SetUp(num_workers=4, cores=4))
    # 100 and 10 samples/s a rank
    fast, slow = (of(seconds, Scenario(cluster(), 4, 32)) for seconds in (0.08, 0.8))
    loader, cache = advise_data(fast, stalls)
    assert loader.value == pytest.approx(2.0, rel=0.1) and "is too slow" in loader.advice
    assert cache.value == pytest.approx(0.5e9, rel=0.15) and cache.inputs[
        "x* by the formula"
    ] == pytest.approx(0.5, abs=0.01)
    loader, cache = advise_data(slow, stalls)
    assert loader.value == 1.0 and "is fast enough" in loader.advice and cache.value == 0
    assert [each.value for each in advise_data(fast, None)] == [None, None]
    with pytest.raises(ValueError, match=r"stalls is a stalls\.json"):
        MeasuredStalls.read({"costs": {}})


def searched(
    machines: Cluster,
    *,
    pipelines: PipelineRequest | None = None,
    count: int = 4,
    accumulate: int = 1,
) -> tuple[ScenarioResult, SearchRequest]:
    module, tokens = GPT(layers=4, width=64, context=32), torch.zeros(2, 32, dtype=torch.long)
    optimizer = read_optimizer(
        [module.configure_optimizers()], named_parameters=module.named_parameters()
    )
    graph = capture(module, (tokens, tokens))
    request = SearchRequest(graph, machines, optimizer, (count,), 16, pipelines=pipelines)
    return search_scenario(
        request, Scenario(machines, count, 16), accumulate=(accumulate,), memory_limit=1e12
    ), of_microbatches(request, accumulate)


MACHINES = Cluster(
    "c",
    Device("d", 2**30, {"float32": 1e12}, 1e12, 1e-7, launch_seconds=1e-7),
    2,
    2,
    Link(1e-6, 1e10),
    Link(1e-6, 1e10),
)
SLOW = {
    "arithmetic of the device": replace(
        MACHINES, device=replace(MACHINES.device, flops={"float32": 1e8})
    ),
    "memory bandwidth of the device": replace(
        MACHINES, device=replace(MACHINES.device, memory_bandwidth=1e8)
    ),
    "host (launching kernels)": replace(
        MACHINES, device=replace(MACHINES.device, launch_seconds=1e-2)
    ),
    "network between nodes": replace(MACHINES, inter=Link(1e-6, 1e5)),
}


@pytest.mark.parametrize("resource", SLOW)
def test_the_slow_resource_is_the_bottleneck(resource: str) -> None:
    found, search = searched(SLOW[resource])
    speed, memory = advise_bottleneck(search, found.chosen, found.frontier, limit=1e12)
    assert speed.advice.startswith(f"The {resource}") and 0.3 < speed.value <= 1.01
    assert speed.table[0]["twice as fast"] == resource and memory.value == 0


@pytest.mark.parametrize("accumulate", [1, 4])
def test_gains_are_those_of_a_step_of_the_same_plan_on_faster_machines(accumulate: int) -> None:
    found, search = searched(SLOW["network between nodes"], accumulate=accumulate)
    assert found.chosen.accumulate == accumulate
    plan, machines = found.chosen.point.plan, search.cluster
    faster = RESOURCES["network between nodes"](machines)
    assert faster.inter == Link(5e-7, 2e5)
    now, then = (seconds_on(search, plan, each) for each in (machines, faster))
    assert now == pytest.approx(found.chosen.step_seconds)
    assert gains(search, plan, machines)["network between nodes"] == pytest.approx(now / then - 1)


def test_pipelines_and_several_kinds_of_nodes_have_bottlenecks_too() -> None:
    nodes = [
        NodeType(MACHINES.device, 2),
        NodeType(replace(MACHINES.device, flops={"float32": 1e9}), 2),
    ]
    mixed = Cluster.of_nodes(nodes, intra=MACHINES.intra, name="mixed", inter=MACHINES.inter)
    found, search = searched(mixed, pipelines=PipelineRequest(ranks=4, microbatches=4))
    plan = found.chosen.point.plan
    assert plan.schedule is not None
    assert seconds_on(search, plan, mixed) == pytest.approx(found.chosen.step_seconds)
    assert max(gains(search, plan, mixed).values()) > 0.2


def test_compression_is_worth_it_on_a_slow_network_alone() -> None:
    slow = replace(MACHINES.device, flops={"float32": 1e8})
    fast = replace(MACHINES, device=slow)
    for machines, worth in ((SLOW["network between nodes"], True), (fast, False)):
        found, search = searched(machines)
        request = replace(search, exchanges=(BF16(), TopK(density=0.01)))
        points = [p for p in search_plans(request).candidates if p.plan.keeps_gradients_whole]
        advice = advise_compression(points, at=found.chosen)
        assert ("worth allowing (strategy.allow_compression=true)" in advice.advice) == worth, (
            advice
        )
        assert {row["exchange"] for row in advice.table} >= {"all-reduce"}
    none = advise_compression([], at=found.chosen, why_none="nothing fits")
    assert none.value is None and none.advice.endswith("nothing fits.")


def test_files_say_formula_inputs_and_source(tmp_path) -> None:
    advice = [
        Advice(
            "batch size",
            "Take 8.",
            8.0,
            "samples",
            "B",
            {"N": 3.14159, "q": None},
            "a paper",
            [{"a": 1, "b": math.inf}],
        ),
        Advice("data", "Not known.", source="a paper"),
    ]
    text = save_advice(tmp_path, advice, title="Advice on X", notes=["A note."])
    assert (
        text
        == (tmp_path / "advice.md").read_text()
        == to_markdown(advice, title="Advice on X", notes=["A note."])
    )
    assert "# Advice on X\n\nA note.\n\n## Batch size\n\n**Take 8.**" in text
    assert (
        "- formula: `B`\n- inputs: N = 3.14, q = \n- source: a paper" in text
        and "| 1 | inf |" in text
    )
    record = json.loads((tmp_path / "advice.json").read_text())
    assert record["advice"][0]["value"] == 8.0 and record["advice"][0]["table"] == [
        {"a": 1, "b": None}
    ]
    assert record["advice"][1]["value"] is None and record["schema_version"] == 1
