"""Constants that are fitted to measured steps, and figures of the errors that are left."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.prediction.error_figures import figure_of, quantile_of_groups
from benchmarks.prediction.fitted_constants import fit_constants
from lightning_topt.costs.cluster import Cluster, Device, ErrorFigure, Link
from lightning_topt.costs.compute import host_bound_seconds
from lightning_topt.costs.intervals import quantile_of

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


def test_a_few_odd_steps_do_not_decide():
    measured = np.array(seconds_of(CLUSTER))
    measured[0] *= 10
    fitted = fit_constants(CLUSTER, seconds_of, measured.tolist())
    assert all(factor == pytest.approx(1.0, abs=0.12) for factor in fitted.factors.values())


def test_figures_of_groups_and_of_fitted_constants():
    """A group of one run counts as much as that of many; fitted constants make errors larger."""
    many = [0.01] * 38 + [0.5]
    assert quantile_of_groups(many) == quantile_of(many) == 0.01
    assert quantile_of_groups(many, ["a"] * 38 + ["b"]) == 0.5
    plain, fitted = (figure_of([1.1, 0.8, 1.0, 1.0], [1.0] * 4, fitted=each) for each in (0, 3))
    assert plain == ErrorFigure.of([1.1, 0.8, 1.0, 1.0], [1.0] * 4)
    assert fitted.p90 == pytest.approx(2 * plain.p90)
