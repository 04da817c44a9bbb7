"""Choosing from hand-made frontiers, with the sentences that users read."""

from __future__ import annotations

import dataclasses
import random

import pytest

from lightning_topt.communication.options import ExchangeOptions
from lightning_topt.plan.choose import NoPlanFitsError, PlanFrontier, PlanPoint, choose
from lightning_topt.plan.parallel_plan import uniform_plan

MIB = 2.0**20


def point(seconds: float, mib: float, devices: int = 2, stage: int = 0) -> PlanPoint:
    return PlanPoint(seconds, mib * MIB, devices, uniform_plan(stage, data_parallel_size=devices))


POINTS = [point(1.0, 1000, stage=0), point(1.5, 600, stage=2), point(2.0, 400, stage=3), point(0.6, 900, devices=4)]


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
        points = [point(generator.random(), 1 + 99 * generator.random(), generator.choice([1, 2])) for _ in range(6)]
        limit = 110 * generator.random() * MIB
        fitting = [p for p in points if p.peak_bytes * 1.05 <= limit]
        if fitting:
            assert choose(points, memory_limit=limit) == min(fitting, key=lambda p: p.step_seconds)
            assert choose(points, memory_limit=limit, objective="memory") == min(fitting, key=lambda p: p.peak_bytes)
        else:
            with pytest.raises(NoPlanFitsError):
                choose(points, memory_limit=limit)


def test_reason_names_the_neighbours() -> None:
    reason = choose(POINTS, memory_limit=700 * MIB, devices=2).plan.reason
    assert reason.startswith("The fastest step within 700.00 MiB per device: 1.5 s and 600.00 MiB")
    assert "saves 33.3 % of the time and needs 1.03 GiB with its margin, above the limit" in reason
    assert "saves 200.00 MiB and is 33.3 % slower" in reason


def test_a_compressed_plan_says_so_and_what_exact_ones_cost() -> None:
    compressed = [
        dataclasses.replace(p, plan=dataclasses.replace(p.plan, gradient_exchange=exchange))
        for p, exchange in [
            (point(0.4, 1200), ExchangeOptions()),
            (point(0.9, 1100), ExchangeOptions(method="dense", hierarchical=True)),
        ]
    ]
    reason = choose([*POINTS, *compressed], devices=2).plan.reason
    assert "top-k 1 %), which was allowed" in reason
    assert "the fastest plan of the frontier without that takes 900 ms" in reason  # summed in nodes first: not lossy
    assert "compressed" not in choose([*POINTS, compressed[1]], devices=2).plan.reason
    alone = choose(compressed[:1]).plan.reason
    assert "top-k 1 %" in alone and "without that" not in alone
    frontier = PlanFrontier.of(compressed)
    assert PlanFrontier.from_json(frontier.to_json()) == frontier


def test_nothing_fits() -> None:
    with pytest.raises(NoPlanFitsError) as error:
        choose(POINTS, memory_limit=200 * MIB)
    message = str(error.value)
    assert "200.00 MiB" in message and "420.00 MiB" in message and "1 x ZeRO-3 on 2 device(s)" in message


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="objective must be one of"):
        choose(POINTS, objective="money")
    with pytest.raises(ValueError, match=r"no plans for 8 devices; plans were made for \[2, 4\]"):
        choose(POINTS, devices=8)


def test_frontier_drops_what_is_beaten_per_device_count_and_round_trips() -> None:
    beaten = [point(1.6, 600), point(1.5, 601), point(1.0, 1000)]
    frontier = PlanFrontier.of([*beaten, *POINTS], capture_seconds=0.5, search_seconds=0.25)
    assert frontier.exact and not PlanFrontier.of(POINTS, error_bound=0.01).exact
    assert [(p.devices, p.peak_bytes / MIB) for p in frontier.points] == [(2, 400), (2, 600), (2, 1000), (4, 900)]
    assert PlanFrontier.from_json(frontier.to_json()) == frontier
    with pytest.raises(ValueError, match="schema version"):
        PlanFrontier.from_json("{}")
