"""Choosing from hand-made frontiers, with the sentences that users read."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from benchmarks.prediction.saved_frontier import frontier_of_json
from lightning_topt.communication import Dense, TopK
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.choose import NoPlanFitsError, choose
from lightning_topt.plan.parallel_plan import (
    BlockPlan,
    ParallelPlan,
    StagePlan,
    StepEstimate,
    uniform_plan,
)
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint

MIB = 2.0**20


def point(seconds: float, mib: float, devices: int = 2, stage: int = 0) -> PlanPoint:
    return PlanPoint(seconds, mib * MIB, devices, uniform_plan(stage, data_parallel_size=devices))


POINTS = [
    point(1.0, 1000, stage=0),
    point(1.5, 600, stage=2),
    point(2.0, 400, stage=3),
    point(0.6, 900, devices=4),
]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 3),
        ({"devices": 2}, 0),
        ({"memory_limit": 1050 * MIB, "devices": 2}, 0),  # 1000 + 5 % is exactly the limit
        ({"memory_limit": 1049 * MIB, "devices": 2}, 1),
        ({"memory_limit": 1049 * MIB, "devices": 2, "memory_margin": 0.0}, 0),
        ({"objective": "memory"}, 2),
        ({"objective": "memory", "devices": 4}, 3),
        ({"objective": "devices"}, 0),
        ({"objective": "devices", "memory_limit": 500 * MIB}, 2),
    ],
)
def test_choice(options: dict[str, float], expected: int) -> None:
    assert choose(POINTS, **options) == POINTS[expected]


def test_choice_is_the_best_of_all_that_fit() -> None:
    generator = random.Random(0)
    for _ in range(200):
        points = [
            point(generator.random(), 1 + 99 * generator.random(), generator.choice([1, 2]))
            for _ in range(6)
        ]
        limit = 110 * generator.random() * MIB
        fitting = [p for p in points if p.peak_bytes * 1.05 <= limit]
        if fitting:
            assert choose(points, memory_limit=limit) == min(fitting, key=lambda p: p.step_seconds)
            assert choose(points, memory_limit=limit, objective="memory") == min(
                fitting, key=lambda p: p.peak_bytes
            )
        else:
            with pytest.raises(NoPlanFitsError):
                choose(points, memory_limit=limit)


# ---- the simplest of those that are as good
# ---------------------------------------------------------------------------


def mixed(
    seconds: float,
    mib: float,
    *configs: tuple[int, bool],
    root: int | None = None,
    lossy: bool = False,
) -> PlanPoint:
    blocks = [
        BlockPlan(f"b{k}", OpConfig.zero(level, recompute=again))
        for k, (level, again) in enumerate(configs)
    ]
    root = (2 if configs[0][0] >= 2 else configs[0][0]) if root is None else root
    exchange = TopK() if lossy else None
    plan = ParallelPlan.of_blocks(
        (*blocks, BlockPlan("", OpConfig.zero(root))), mesh=2, gradient_exchange=exchange
    )
    return PlanPoint(seconds, mib * MIB, 2, plan)


# Three mechanisms: whole gradients, shards of them, compressed ones.
SIMPLEST_FIRST = [
    mixed(1.140, 900, (0, False), (0, False)),
    mixed(1.135, 890, (1, False), (1, False)),
    mixed(1.130, 880, (0, True), (0, True)),
    mixed(1.125, 870, (0, False), (0, False), root=1),
    mixed(1.120, 860, (0, False), (1, False), (1, False)),
    mixed(1.115, 850, (0, False), (0, True)),
    mixed(1.110, 840, (0, False), (1, True), (1, False)),
    mixed(1.070, 830, (2, False), (2, False)),
    mixed(1.060, 820, (3, False), (3, False)),
    mixed(1.050, 810, (3, True), (3, True)),
    mixed(1.045, 800, (2, False), (3, False)),
    mixed(1.000, 790, (0, False), (0, False), lossy=True),
]
MECHANISM = (0,) * 7 + (1,) * 4 + (2,)


def test_a_choice_is_the_simplest_within_the_error_of_all_that_fit() -> None:
    generator = random.Random(1)
    order = [p.plan for p in SIMPLEST_FIRST]
    for _ in range(200):
        points = [
            PlanPoint(1 + 0.3 * generator.random(), 100 * generator.random(), 2, plan)
            for plan in order
        ]
        limit = 110 * generator.random() + min(p.peak_bytes for p in points)
        fitting = [
            (p, kind)
            for p, kind in zip(points, MECHANISM, strict=True)
            if p.peak_bytes * 1.05 <= limit
        ]
        if fitting:
            fastest = min(p.step_seconds for p, _ in fitting)
            equal = [(p, kind) for p, kind in fitting if p.step_seconds <= 1.15 * fastest + 2e-3]
            alike = [p for p, kind in equal if kind == equal[0][1]]
            most = 1.03 * min(p.step_seconds for p in alike) + 2e-3
            assert choose(points, memory_limit=limit) == next(
                p for p in alike if p.step_seconds <= most
            )


def test_candidates_are_the_frontier_and_uniform_plans() -> None:
    uniform = [mixed(1.02, 950, (0, False)), mixed(1.0, 900, (0, False), root=1)]
    frontier = PlanFrontier.of([uniform[1]], uniform=uniform)
    assert frontier.points == (uniform[1],) and frontier.candidates == (uniform[1], uniform[0])
    assert choose(frontier.candidates) == uniform[0]
    assert frontier.shown_with(uniform[0]) == (uniform[1], uniform[0]) and frontier.shown_with(
        uniform[1]
    ) == (uniform[1],)
    assert frontier_of_json(frontier.to_json()) == frontier
    data = json.loads(frontier.to_json())
    written = [data["points"][0], *data["uniform"]]
    assert len(data["blocks"]) == len(written[0]["plan"]["stages"][0]["blocks"])
    assert len(data["configs"]) == 2, "what plans have in common is written once"


def test_a_compressed_plan_says_so_and_what_exact_ones_cost() -> None:
    compressed = [
        dataclasses.replace(p, plan=dataclasses.replace(p.plan, gradient_exchange=exchange))
        for p, exchange in [
            (point(0.4, 1200), TopK()),
            (point(0.9, 1100), Dense(hierarchical=True)),
        ]
    ]
    reason = choose([*POINTS, *compressed], devices=2).plan.reason
    assert "top-k 1 %), which was allowed" in reason
    # summed in nodes first: not lossy
    assert "without that the fastest plan takes 900 ms" in reason
    assert "compressed" not in choose([*POINTS, compressed[1]], devices=2).plan.reason
    alone = choose(compressed[:1]).plan.reason
    assert "top-k 1 %" in alone and "without that" not in alone
    frontier = PlanFrontier.of(compressed)
    assert frontier_of_json(frontier.to_json()) == frontier


def test_nothing_fits() -> None:
    with pytest.raises(NoPlanFitsError) as error:
        choose(POINTS, memory_limit=200 * MIB)
    message = str(error.value)
    assert (
        "200.00 MiB" in message
        and "420.00 MiB" in message
        and "1 x ZeRO-3 on 2 device(s)" in message
    )


def test_frontier_drops_what_is_beaten_per_device_count_and_round_trips() -> None:
    beaten = [point(1.6, 600), point(1.5, 601), point(1.0, 1000)]
    frontier = PlanFrontier.of([*beaten, *POINTS], capture_seconds=0.5, search_seconds=0.25)
    assert frontier.exact and not PlanFrontier.of(POINTS, error_bound=0.01).exact
    assert [(p.devices, p.peak_bytes / MIB) for p in frontier.points] == [
        (2, 400),
        (2, 600),
        (2, 1000),
        (4, 900),
    ]
    assert frontier_of_json(frontier.to_json()) == frontier
    with pytest.raises(ValueError, match="schema version"):
        frontier_of_json("{}")


def viewed(of: PlanPoint) -> PlanPoint:
    return dataclasses.replace(of, plan=dataclasses.replace(of.plan, gradient_views=True))


def test_gradients_are_views_only_where_that_buys_something() -> None:
    whole, views = point(1.0, 1000), viewed(point(0.97, 900))
    sharded = point(1.05, 500, stage=2)
    assert choose([whole, views, sharded]) == whole
    # shards are further from ddp
    assert choose([whole, views, sharded], memory_limit=1000 * MIB) == views
    needed = choose([whole, views], memory_limit=1000 * MIB).plan.reason
    assert "gradients are views of DDP's buckets" in needed and needed.endswith(
        "without which no plan fits."
    )
    slow = mixed(2.0, 800, (0, True))
    faster = choose([whole, views, slow], memory_limit=1000 * MIB)
    assert faster == views and "without that the fastest plan takes 2 s" in faster.plan.reason


# ---- equally fast up to what the ratio of two predictions may be off by


def on_mesh(
    seconds: float,
    mib: float,
    *,
    tensor: int,
    waits: float,
    recomputed: int = 0,
    stages: bool = False,
) -> PlanPoint:
    """A plan of 16 ranks that waits for communication in a share of its step."""
    data = 16 // tensor // (2 if stages else 1)
    axes = [Axis("pipeline", 2)] * stages + [Axis("data", data), Axis("tensor", tensor)]
    mesh = Mesh(tuple(axes))
    count = len(mesh.axes)
    blocks = [
        BlockPlan(f"b{k}", OpConfig.zero(0, recompute=k < recomputed, axes=count)) for k in range(4)
    ]
    rest = BlockPlan("", OpConfig.zero(0, axes=count))
    parts = [blocks[:2], [*blocks[2:], rest]] if stages else [[*blocks, rest]]
    predicted = StepEstimate(seconds, mib * MIB, seconds * (1 - waits), seconds * waits)
    plan = ParallelPlan(
        mesh,
        tuple(StagePlan(tuple(part)) for part in parts),
        schedule="1f1b" if stages else None,
        num_microbatches=4 if stages else 1,
        predicted=predicted,
    )
    return PlanPoint(seconds, mib * MIB, 16, plan)


def test_of_meshes_as_fast_the_one_that_waits_least_then_the_one_of_least_memory() -> None:
    fastest = on_mesh(1.00, 500, tensor=8, waits=0.3)
    waits_less = on_mesh(1.04, 700, tensor=4, waits=0.1)
    same, smaller = (on_mesh(1.05, 600, tensor=2, waits=0.1), on_mesh(1.2, 100, tensor=16, waits=0))
    points = [fastest, waits_less, smaller]
    assert choose(points) == fastest, "of one mechanism only 3 % are equal where nothing is known"
    assert choose(points, difference=0.06) == waits_less
    assert choose([*points, same], difference=0.06) == same
    assert choose(points, difference=0.3) == smaller
    assert choose(points, difference=0.0) == fastest
    # the limit decides before
    assert choose(points, difference=0.06, memory_limit=600 * MIB) == fastest
    reason = choose(points, difference=0.061).plan.reason
    assert reason.startswith("As fast as any plan, within 6.1 %, which the ratio of two predicted")
    assert "waits least for communication (10 % of the step)" in reason
    assert "the fastest (" in reason and "saves 40 ms" in reason
    # a percent of the step is no difference
    close = [on_mesh(1.0, 500, tensor=4, waits=0.101), on_mesh(1.01, 400, tensor=8, waits=0.103)]
    assert choose(close, difference=0.06) == close[1]


def test_plans_of_one_mesh_differ_by_what_is_well_known() -> None:
    """Recomputation costs products, whose rate is the same: no memory is bought with 5 %."""
    plain = on_mesh(1.0, 900, tensor=4, waits=0.1)
    again = on_mesh(1.05, 500, tensor=4, waits=0.1, recomputed=1)
    assert choose([plain, again], difference=0.06) == plain
    assert choose([plain, again], difference=0.06, memory_limit=600 * MIB) == again
