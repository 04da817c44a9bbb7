"""A calibration that is looked at once more, and compared with the one before."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from lightning_topt.costs import calibration_check
from lightning_topt.costs.calibrate import calibrate
from lightning_topt.costs.calibration_check import (
    CheckedPoint,
    changes_between,
    check_calibration,
    largest_and_median,
    sizes_between,
    summarize,
)
from lightning_topt.costs.cluster import Cluster, CollectiveCurve, Link
from lightning_topt.costs.communication import ring_seconds
from lightning_topt.costs.timers import ProductTimer
from tests.costs.graphs import cluster_of
from tests.launch import run_ranks


def checked(rank: int) -> tuple[Cluster, list[CheckedPoint], list[CheckedPoint]]:
    cluster = calibrate(budget_seconds=0.4)
    device = dataclasses.replace(
        cluster.device, op_overhead_seconds=cluster.device.op_overhead_seconds * 1e6
    )
    wrong = dataclasses.replace(
        cluster,
        device=device,
        collectives={
            key: CollectiveCurve(curve.sizes, tuple(1e6 * each for each in curve.seconds))
            for key, curve in cluster.collectives.items()
        },
    )
    points = check_calibration(cluster, budget_seconds=0.4)
    return cluster, points, check_calibration(wrong, budget_seconds=0.4)


def test_ranks_agree_on_how_a_table_reproduces_itself_and_a_wrong_one_does_not() -> None:
    (cluster, points, wrong), (_, other, _) = run_ranks(checked, 2)
    assert points == other
    constants = {each.constant: each for each in summarize(points)}
    assert {f"{op} of 2 ranks" for op, *_ in cluster.collectives} < constants.keys()
    assert {
        "rate of float32 products",
        "memory bandwidth",
        "smallest kernel",
        "link inside nodes, as rings",
    } < constants.keys()
    for (op, *_), curve in cluster.collectives.items():
        assert constants[f"{op} of 2 ranks"].points == 2 * len(curve.sizes) - 1
    assert sum("between measured sizes" in point.at for point in points) == sum(
        len(curve.sizes) - 1 for curve in cluster.collectives.values()
    )
    # Other programs make a measurement slower, by a factor of thousands they do not.
    assert all(each.median < 1e3 for each in constants.values())
    off = {each.constant: each for each in summarize(wrong)}
    assert off["all_reduce of 2 ranks"].median > 1e3 and off["smallest kernel"].median > 1e3
    assert off["memory bandwidth"].median < 1e3


def test_one_process_has_a_device_alone() -> None:
    points = check_calibration(calibrate(budget_seconds=0.2), budget_seconds=0.2)
    assert points and all(
        "ranks" not in point.constant and "link" not in point.constant for point in points
    )


def test_errors_are_shares_of_what_was_measured() -> None:
    points = [
        CheckedPoint("a", "1", 2.0, 1.0),
        CheckedPoint("b", "1", 1.0, 1.0),
        CheckedPoint("a", "2", 0.5, 1.0),
    ]
    first, second = summarize(points)
    assert (first.constant, first.points, first.at) == ("a", 2, "1")
    assert (first.median, first.largest, second.largest) == (0.75, 1.0, 0.0)


def test_places_between_the_sizes_of_a_curve() -> None:
    assert sizes_between(CollectiveCurve((100.0, 400.0, 3600.0), (1.0, 1.0, 2.0))) == [
        100,
        200,
        400,
        1200,
        3600,
    ]


def test_a_link_is_asked_for_groups_that_it_joins() -> None:
    link = Link(1e-5, 1e9)
    sizes = (4096.0, 65536.0)
    exact = tuple(ring_seconds("all_reduce", size=size, ranks=2, link=link) for size in sizes)
    curves = {
        ("all_reduce", 4, 1): CollectiveCurve(sizes, (1.0, 2.0)),
        ("all_reduce", 2, 1): CollectiveCurve(sizes, tuple(2 * seconds for seconds in exact)),
        ("all_reduce", 2, 2): CollectiveCurve(sizes, exact),
    }
    cluster = dataclasses.replace(
        cluster_of(4), devices_per_node=2, num_nodes=2, intra=link, inter=link, collectives=curves
    )
    found = summarize([*calibration_check._link_points(cluster)])
    assert [(each.constant, each.points, round(each.largest, 9)) for each in found] == [
        ("link inside nodes, as rings", 2, 0.5),
        ("link between nodes, as rings", 2, 0.0),
    ]


def test_what_two_calibrations_differ_by() -> None:
    first = dataclasses.replace(
        cluster_of(2),
        overlap=0.5,
        collectives={("all_reduce", 2, 1): CollectiveCurve((10.0, 20.0, 40.0), (1.0, 2.0, 4.0))},
    )
    device = dataclasses.replace(first.device, memory_bandwidth=1.1 * first.device.memory_bandwidth)
    second = dataclasses.replace(
        first,
        device=device,
        overlap=0.25,
        collectives={("all_reduce", 2, 1): CollectiveCurve((10.0, 20.0, 30.0), (1.5, 2.2, 3.0))},
    )
    assert all(each.largest == 0 for each in changes_between(first, first))
    found: dict[str, Any] = {each.constant: each for each in changes_between(first, second)}
    assert {name for name, each in found.items() if each.largest} == {
        "memory bandwidth",
        "overlap of exchanges",
        "all_reduce of 2 ranks",
    }
    assert found["memory bandwidth"].largest == pytest.approx(0.1)
    assert found["overlap of exchanges"].is_share and found["overlap of exchanges"].largest == 0.25
    curve = found["all_reduce of 2 ranks"]
    assert (curve.points, curve.at, curve.before, curve.now) == (2, "10 bytes", 1.0, 1.5)
    assert (curve.largest, curve.median) == (0.5, pytest.approx(0.3))
    summary = largest_and_median(changes_between(first, second))
    assert summary is not None and summary[0] == curve and summary[1] == 0.0


def test_the_device_is_timed_at_the_same_sizes_every_time() -> None:
    timer = ProductTimer(torch.device("cpu"), budget_seconds=1e-6)
    assert {size for _, size in timer()} == {256} and timer().keys() == timer().keys()
