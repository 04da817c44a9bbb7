"""Plans with stages in the search of plans."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_topt.communication import TopK
from lightning_topt.costs import communication
from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.costs.communication import Group, estimate_collective_seconds
from lightning_topt.costs.optimizer import read_optimizer
from lightning_topt.costs.sizes import gradient_bytes, parameter_bytes
from lightning_topt.frontier.stage_search import StagePoint
from lightning_topt.graph.capture import capture
from lightning_topt.plan.choose import choose
from lightning_topt.plan.explanation import explain_stages, price_plan
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.plan.pipeline_search import PipelineRequest, pipeline_shapes
from lightning_topt.plan.plan_frontier import PlanPoint
from lightning_topt.plan.plan_search import SearchRequest, search_plans, stage_blocks
from lightning_topt.plan.stage_simulation import stage_seconds, step_seconds_of
from lightning_topt.plan.stage_tables import PipelineShape, stage_table
from lightning_topt.plan.staged_plans import search_stages_for, staged_points
from lightning_topt.techniques.registry import check_runs
from tests.frontier.brute_force import stage_costs
from tests.models import GPT
from tests.plan.pruned_pipelines import check_that_none_is_dropped

DEVICE = Device(
    "accelerator", 10**10, {"float32": 1e12}, memory_bandwidth=1e12, op_overhead_seconds=1e-6
)
NODES = Cluster(
    "nodes", DEVICE, devices_per_node=2, num_nodes=4, intra=Link(1e-6, 1e11), inter=Link(1e-5, 1e8)
)


def make_request(
    *, layers: int = 6, tied: bool = False, context: Any = nullcontext
) -> SearchRequest:
    module, batch = (
        GPT(layers, 256, 8, vocab=512, context=128, tied=tied),
        (torch.zeros(4, 128, dtype=torch.long),) * 2,
    )
    optimizer = read_optimizer(
        [module.configure_optimizers()], named_parameters=module.named_parameters()
    )
    graph = capture(module, batch, forward_context=context)
    return SearchRequest(graph, NODES, optimizer, (8,), 32, pipelines=PipelineRequest())


@pytest.fixture(scope="module")
def request_of_gpt() -> SearchRequest:
    return make_request()


def staged(points: Iterable[PlanPoint]) -> list[PlanPoint]:
    return [point for point in points if point.plan.schedule is not None]


def test_a_slow_network_decides_on_a_pipeline(request_of_gpt: SearchRequest) -> None:
    slow, fast = Link(1e-5, 1e8), Link(1e-6, 1e11)
    best, without = (
        search_plans(request_of_gpt),
        search_plans(replace(request_of_gpt, pipelines=None)),
    )
    assert not staged(without.candidates)
    assert best.points[-1].step_seconds < without.points[-1].step_seconds
    chosen = choose(best.candidates).plan
    assert chosen.schedule is not None and "stages" in chosen.reason
    quick = replace(
        request_of_gpt,
        cluster=replace(NODES, devices_per_node=8, num_nodes=1, intra=fast, inter=None),
    )
    assert choose(search_plans(quick).candidates).plan.schedule is None
    assert slow != fast
    for point in staged(best.points):
        assert ParallelPlan.from_yaml(point.plan.to_yaml()) == point.plan
        configs = {block.block: block.config for block in point.plan.blocks}
        check_runs(point.plan.mesh, configs)
        names = [
            block.block for stage in point.plan.stages for block in stage.blocks if block.block
        ]
        assert names == [f"blocks.{n}" for n in range(6)]
        assert point.plan.fingerprint == request_of_gpt.graph.fingerprint


def test_what_is_given_is_kept_and_the_rest_searched(request_of_gpt: SearchRequest) -> None:
    def plans(**wanted: object) -> list[ParallelPlan]:
        request = replace(request_of_gpt, pipelines=PipelineRequest(**wanted))  # type: ignore[arg-type]
        return [point.plan for point in search_plans(request).candidates]

    assert {plan.schedule for plan in plans(schedule="gpipe")} == {"gpipe"}
    assert {len(plan.stages) for plan in plans(stages=4)} == {4}
    assert {plan.mesh.pipeline_size for plan in plans(stages=4)} >= {4}
    assert {plan.num_microbatches for plan in plans(microbatches=8)} == {8}
    (shape,) = {
        (plan.mesh.shape, plan.schedule, len(plan.stages), plan.num_microbatches, plan.batch_size)
        for plan in plans(stages=4, schedule="looped_bfs", microbatches=4)
    }
    assert shape == ((2, 4), "looped_bfs", 4, 4, 8)
    with pytest.raises(
        PlanError, match="no pipeline of 8 ranks has 7 stages: the model has 6 blocks"
    ):
        plans(stages=7)


def shapes_of(request: SearchRequest) -> list[PipelineShape]:
    return [
        *pipeline_shapes(stage_blocks(request), 8, request.global_batch_size, PipelineRequest())
    ]


def test_no_pipeline_is_dropped_that_would_have_a_plan(
    request_of_gpt: SearchRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_that_none_is_dropped(request_of_gpt, NODES, monkeypatch)


def test_stages_keep_their_parameters_and_the_microbatches_in_flight(
    request_of_gpt: SearchRequest,
) -> None:
    graph, blocks = request_of_gpt.graph, stage_blocks(request_of_gpt)
    table = stage_table(blocks, PipelineShape(2, 4, "1f1b", 1, 4, 2.0))
    cut = (3, 6), (0,) * 6
    passes, once = blocks.passes(2.0), blocks.once(PipelineShape(2, 4, "1f1b", 1, 4, 2.0).rows, 0)
    state = sum(request_of_gpt.optimizer.state_bytes(p.name) for p in graph.parameters)
    held = sum(parameter_bytes(p) + gradient_bytes(p) for p in graph.parameters) + state
    assert once.static.sum() == pytest.approx(held)
    first = once.static[:3].sum() + max(
        2 * passes.kept[:3].sum() + passes.hump[:3].max(), once.update[:3].sum()
    )
    received = 2 * 128 * 256 * 4
    last = once.static[3:].sum() + passes.kept[3:].sum() + received + passes.hump[3:].max()
    last = max(last, once.static[3:].sum() + once.update[3:].sum())
    assert stage_costs(table, *cut)[1] - table.fixed_bytes == pytest.approx(
        max(first, last), rel=1e-6
    )
    assert table.fixed_bytes == pytest.approx(graph.buffer_bytes + graph.input_bytes.at(8))


def test_tied_weights_are_kept_by_both_stages_and_cost_an_exchange() -> None:
    blocks = stage_blocks(make_request(layers=4, tied=True))
    once = blocks.once(PipelineShape(2, 4, "1f1b", 1, 4, 2.0).rows, 0)
    assert once.shared is not None and blocks.uses["tokens.weight"] == (0, 3)
    assert (once.shared[:, 0, 4] == 0).all()  # all on one stage
    # the first reader's stage has it anyway
    assert once.shared[0, 0, 2] > 0 and once.shared[1, 0, 2] == 0
    assert (once.shared[:, 2, 4] > 0).all() and (once.shared[:, 1, 3] == 0).all()
    held = 512 * 256 * 4
    # itself, its gradient, two states
    assert once.shared[1, 2, 4] == pytest.approx(4 * held, rel=0.01)


def test_stages_are_priced_with_the_exchange_of_their_plan(
    request_of_gpt: SearchRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block takes what it takes in a plan without stages, with nothing to hide it."""
    # there with a bucket of its own, too
    monkeypatch.setattr(communication, "FIRST_BUCKET_BYTES", 0)
    monkeypatch.setattr(communication, "BUCKET_BYTES", 1)
    blocks, method = stage_blocks(request_of_gpt), TopK(density=0.01, hierarchical=False)
    plain = PipelineShape(2, 4, "1f1b", 1, 4, 2.0, rows_apart=True)
    sparse = replace(plain, exchange=method)
    place = blocks.names.index("blocks.2")
    model = replace(blocks.step, mesh=plain.rows, exchange=method).exchange_model
    assert model is not None
    alone = model.worker_seconds("blocks.2") + model.device_seconds("blocks.2")
    size = sum(map(gradient_bytes, blocks.owned[place]))
    dense = estimate_collective_seconds(NODES, op="all_reduce", size=size, group=Group(4, 2))
    once = [shape.once(blocks) for shape in (plain, sparse)]
    assert once[0].seconds[place] - once[1].seconds[place] == pytest.approx(dense - alone)
    work = model.work["blocks.2"]
    assert once[1].static[place] - once[0].static[place] == pytest.approx(
        work.kept_bytes + work.buffer_bytes
    )
    cut = StagePoint(0.0, 0.0, (3, 6), (0,) * 6)
    found = staged_points(blocks, plain, [cut], batch_size=8)[0].plan
    exact, sent = (
        price_plan(request_of_gpt, plan).predicted.step_seconds
        for plan in (found, replace(found, gradient_exchange=method))
    )
    assert sent < exact - 0.5 * 3 * (dense - alone)


def test_stages_that_flush_compress_their_gradients_where_that_is_allowed(
    request_of_gpt: SearchRequest,
) -> None:
    """A look at all cuts of all shapes finds nothing faster, and 1F1B stays as it is beside it."""
    blocks = stage_blocks(request_of_gpt)
    wanted, method = PipelineRequest(ranks=2, schedule="1f1b", microbatches=4), TopK(density=0.01)
    shapes = [*pipeline_shapes(blocks, 8, 32, wanted, exchanges=[method])]
    assert {(each.rows_apart, each.level) for each in shapes if each.exchange} == {
        (False, 0),
        (True, 0),
    }
    count = len(blocks.names)
    cuts = [StagePoint(0.0, 0.0, (first, count), (0,) * count) for first in range(1, count)]
    least = {}
    for shape in shapes:
        seconds = step_seconds_of(stage_seconds(blocks, shape, cuts), shape)
        assert seconds is not None
        least[shape] = float(seconds.min())
    assert min(least, key=least.__getitem__).exchange is not None
    dense, _, _ = search_stages_for(blocks, 8, wanted, (), global_batch_size=32)
    sent, plain, _ = search_stages_for(
        blocks, 8, wanted, (), global_batch_size=32, exchanges=[method]
    )
    assert min(p.step_seconds for p in sent) == pytest.approx(min(least.values()))
    quickest = min(p.step_seconds for p in dense)
    assert quickest in [p.step_seconds for p in (*sent, *plain) if not p.plan.gradient_exchange]


def test_stages_are_explained_by_what_they_take(request_of_gpt: SearchRequest) -> None:
    found = search_plans(replace(request_of_gpt, pipelines=PipelineRequest(schedule="1f1b")))
    point = found.points[-1]
    stages = explain_stages(request_of_gpt, point.plan)
    assert [name for stage in stages for name in stage.blocks] == [f"blocks.{n}" for n in range(6)]
    assert [stage.rank for stage in stages] == [*range(point.plan.mesh.pipeline_size)]
    assert stages[0].seconds["receive"] == 0 < stages[1].seconds["receive"]
    assert all(
        0 <= stage.bubble < 1 and stage.seconds["backward"] > stage.seconds["forward"]
        for stage in stages
    )
    parts = [stage.peak_parts for stage in stages]
    most = max(p["static"] + max(p["activations"] + p["running"], p["update"]) for p in parts)
    graph = request_of_gpt.graph
    fixed = graph.buffer_bytes + graph.input_bytes.at(point.plan.batch_size)
    assert most + fixed == pytest.approx(point.peak_bytes, rel=1e-5)
    with pytest.raises(PlanError, match="use explain_plan"):
        explain_stages(
            request_of_gpt, search_plans(replace(request_of_gpt, pipelines=None)).points[0].plan
        )
