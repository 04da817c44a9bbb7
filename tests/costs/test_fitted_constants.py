"""Constants that are fitted to measured steps, and figures of the errors that are left."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_topt.costs.cluster import (
    UNKNOWN,
    Accuracy,
    Cluster,
    ClusterError,
    Device,
    ErrorFigure,
    Link,
    NodeType,
    sentence_of,
)
from lightning_topt.costs.compute import host_bound_seconds
from lightning_topt.costs.fitted_constants import CONSTANTS, fit_constants, least_factors

CLUSTER = Cluster(
    "c", Device("d", 10**9, {"float32": 1e12}, 1e11, launch_seconds=1e-5), 2, 1, Link(1e-5, 1e9)
)
STEPS = [
    (flops, size, kernels)
    for flops in (1e9, 1e11, 1e12)
    for size in (1e8, 1e10)
    for kernels in (10, 1000)
]


def seconds_of(cluster: Cluster) -> list[float]:
    """Steps with arithmetic, traffic and launches of each order of magnitude."""
    device = cluster.device
    return [
        host_bound_seconds(
            flops / device.flops_of("float32") + size / device.memory_bandwidth,
            host_seconds=kernels * device.launch_seconds,
        )
        for flops, size, kernels in STEPS
    ]


def changed(cluster: Cluster, *, flops: float, memory: float, launch: float) -> Cluster:
    device = cluster.device
    return replace(
        cluster,
        device=replace(
            device,
            flops={"float32": 1e12 * flops},
            memory_bandwidth=device.memory_bandwidth * memory,
            launch_seconds=device.launch_seconds * launch,
        ),
    )


def test_the_constants_that_made_the_times_are_found_again():
    made = changed(CLUSTER, flops=0.8, memory=1.2, launch=4.0)
    fitted = fit_constants(CLUSTER, seconds_of, seconds_of(made))
    assert fitted.factors["device.flops"] == pytest.approx(0.8, rel=0.03)
    assert fitted.factors["device.memory_bandwidth"] == pytest.approx(1.2, rel=0.03)
    assert fitted.factors["device.launch_seconds"] == pytest.approx(4.0, rel=0.03)
    assert fitted.error.p90 < 0.02 and fitted.error.runs == len(STEPS)
    assert fitted.cluster.device.launch_seconds == pytest.approx(4e-5, rel=0.03)


def test_what_the_steps_say_nothing_about_stays():
    fitted = fit_constants(CLUSTER, seconds_of, [2 * value for value in seconds_of(CLUSTER)])
    assert fitted.factors["intra.bandwidth"] == pytest.approx(1.0)
    assert fitted.cluster.intra == CLUSTER.intra
    assert not any(name.startswith("inter.") for name in fitted.factors)  # a single node has none


def test_a_few_odd_steps_do_not_decide():
    measured = np.array(seconds_of(CLUSTER))
    measured[0] *= 10
    fitted = fit_constants(CLUSTER, seconds_of, measured.tolist())
    assert all(factor == pytest.approx(1.0, abs=0.12) for factor in fitted.factors.values())


def test_factors_between_kinds_of_time():
    first, second = np.array([1.0, 2.0, 0.1, 1.0]), np.array([0.1, 0.0, 1.0, 1.0])
    found = least_factors(
        lambda a: a[0] * first + a[1] * second, 1.2 * first + 0.7 * second, widths=(0.5, 0.5)
    )
    assert found == pytest.approx([1.2, 0.7], rel=0.01)


def test_wrong_use():
    with pytest.raises(ValueError, match="two measured steps"):
        fit_constants(CLUSTER, seconds_of, [1.0])
    kinds = [NodeType(CLUSTER.device, 2)] * 2
    mixed = Cluster.of_nodes(kinds, name="m", intra=Link(0, 1), inter=Link(0, 1))
    with pytest.raises(ValueError, match="several kinds"):
        fit_constants(mixed, seconds_of, [1.0] * len(STEPS))


def test_every_constant_is_one_of_a_cluster():
    whole = replace(CLUSTER, num_nodes=2, inter=Link(1e-5, 1e9))
    for constant in CONSTANTS:
        scaled = constant.scaled(whole, 2.0)
        assert constant.of(scaled) == pytest.approx(2 * (constant.of(whole) or constant.usual))


def test_error_figures():
    figure = ErrorFigure.of([1.1, 0.8, 1.0], [1.0, 1.0, 1.0])
    assert (
        figure.median == pytest.approx(0.1)
        and figure.p90 == pytest.approx(0.25)
        and figure.runs == 3
    )
    fitted = ErrorFigure.of([1.1, 0.8, 1.0, 1.0], [1.0] * 4, fitted=3)
    assert fitted.p90 == pytest.approx(2 * ErrorFigure.of([1.1, 0.8, 1.0, 1.0], [1.0] * 4).p90)
    assert str(figure) == "half of 3 runs within 10 %, nine of ten within 25 %"
    assert (
        "half of 3 runs within 10 %" in sentence_of(Accuracy(figure, source="here"))
        and sentence_of(None) == UNKNOWN
    )
    with pytest.raises(ValueError, match="at least 1 run"):
        ErrorFigure(0.1, 0.2, 0)


def test_a_cluster_file_keeps_its_accuracy(tmp_path):
    known = replace(
        CLUSTER, accuracy=Accuracy(ErrorFigure(0.05, 0.1, 40), ErrorFigure(0.01, 0.02, 8), "rows")
    )
    known.save(tmp_path / "c.yaml")
    assert Cluster.load(tmp_path / "c.yaml") == known
    assert Cluster.from_dict(CLUSTER.to_dict()) == CLUSTER
    data = known.to_dict()
    data["accuracy"]["seconds"]["median"] = 0.5
    with pytest.raises(ClusterError, match="median <= p90"):
        Cluster.from_dict(data)
    data["accuracy"]["seconds"] = {"median": 0.1}
    with pytest.raises(ClusterError, match="p90"):
        Cluster.from_dict(data)
