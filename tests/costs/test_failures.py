"""Runs with failures: the formulas against a run that is played failure by failure."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from lightning_topt.costs.cluster import (
    Cluster,
    ClusterError,
    Device,
    Failures,
    Link,
    daly_interval,
    expected_seconds,
    run_time,
)


def played(
    source: random.Random,
    *,
    steps: float,
    interval: float,
    writing: float,
    restart: float,
    between: float,
) -> float:
    """The seconds of one run whose failures are drawn."""
    clock, done, next_failure = 0.0, 0.0, source.expovariate(1 / between)
    while done < steps:
        part = min(interval, steps - done)
        needed = part + writing
        if next_failure >= needed:
            clock, next_failure, done = clock + needed, next_failure - needed, done + part
            continue
        clock, next_failure = clock + next_failure, source.expovariate(1 / between)
        while next_failure < restart:  # it fails again while it restarts
            clock, next_failure = clock + next_failure, source.expovariate(1 / between)
        clock, next_failure = clock + restart, next_failure - restart
    return clock


@pytest.mark.parametrize(
    ("between", "writing", "restart"), [(1000.0, 5.0, 20.0), (200.0, 10.0, 40.0)]
)
def test_expected_time_is_the_mean_of_runs_that_are_played(
    between: float, writing: float, restart: float
) -> None:
    source, interval = random.Random(0), daly_interval(writing, seconds_between=between)
    times = {"interval": interval, "writing": writing, "restart": restart, "between": between}
    runs = [played(source, steps=40 * interval, **times) for _ in range(400)]
    expected = expected_seconds(
        40 * interval,
        interval_seconds=interval,
        checkpoint_seconds=writing,
        restart_seconds=restart,
        seconds_between=between,
    )
    spread = statistics.stdev(runs) / math.sqrt(len(runs))
    assert abs(statistics.mean(runs) - expected) < 4 * spread
    assert expected > 1.1 * 40 * interval


@pytest.mark.parametrize(("between", "writing"), [(1e5, 10.0), (1e4, 100.0), (1e3, 200.0)])
def test_dalys_interval_is_best(between: float, writing: float) -> None:
    def total(interval: float) -> float:
        given = {"checkpoint_seconds": writing, "restart_seconds": 0.0, "seconds_between": between}
        return expected_seconds(1e6, interval_seconds=interval, **given)

    best = min(total(between * 1.02**k) for k in range(-400, 100))
    assert total(daly_interval(writing, seconds_between=between)) <= 1.001 * best


def test_nothing_is_added_without_failures() -> None:
    for failures in (None, Failures(), Failures(restart_seconds=600, checkpoint_bandwidth=1e9)):
        run = run_time(1000, failures=failures, devices=1000, checkpoint_bytes=1e12)
        assert run.seconds == 1000 and run.overhead == 0 and run.failures == 0


def test_a_run_that_never_reaches_a_checkpoint_takes_for_ever() -> None:
    failures = Failures(10.0, checkpoint_bandwidth=1.0)
    assert run_time(1e6, failures=failures, devices=1000, checkpoint_bytes=1e12).seconds == math.inf


def test_cluster_files_have_failures_and_prices(tmp_path) -> None:
    device = Device("d", 10**9, {"float32": 1e12}, 1e11, price_per_hour=2.0)
    failures = Failures(1e-5, restart_seconds=60.0, checkpoint_bandwidth=1e9)
    cluster = Cluster("c", device, 8, 1, Link(1e-5, 1e9), failures=failures)
    cluster.save(tmp_path / "c.yaml")
    assert Cluster.load(tmp_path / "c.yaml") == cluster
    plain = {**cluster.to_dict(), "failures": {"per_device_hour": -1}}
    with pytest.raises(
        ClusterError, match=r"failures\.per_device_hour must be finite and at least 0"
    ):
        Cluster.from_dict(plain)
    with pytest.raises(ClusterError, match="unknown entries"):
        Cluster.from_dict({**plain, "failures": {"rate": 1}})
    with pytest.raises(ValueError, match="checkpoint_bandwidth is positive"):
        Failures(checkpoint_bandwidth=0.0)
