"""The model of a loop that waits for data: against sums, bounds, a loop played in small steps, and
DS-Analyzer's formula.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf

import numpy as np
import pytest

from lightning_topt.data.stalls.model import (
    SetUp,
    StallCosts,
    batch_seconds,
    best_num_workers,
    bounds,
    least_cache,
    samples_per_second,
    split_stalls,
    what_if,
)

COSTS = StallCosts(
    batch_size=32,
    num_items=10_000,
    step_seconds=0.020,
    step_core_seconds=0.004,
    latency_seconds=0.001,
    source_bytes=30_000,
    link_bytes_per_second=125e6,
    prepare_seconds=0.002,
    hit_seconds=50e-6,
    collate_seconds=0.001,
    worker_seconds=0.002,
    receive_seconds=0.0005,
    entry_bytes=150_000,
    disk_bytes_per_second=500e6,
)
MANY = 64  # cores


def test_without_workers_everything_is_one_after_the_other():
    wait = 32 * (0.001 + 30_000 / 125e6)
    expected = wait + 32 * 0.002 + 0.001 + 0.020
    assert batch_seconds(COSTS, SetUp(0, 2)) == pytest.approx(expected)
    assert batch_seconds(COSTS, SetUp(0, 2, memory_share=1.0)) == pytest.approx(32 * 50e-6 + 0.020)
    half = batch_seconds(COSTS, SetUp(0, 2, memory_share=0.5))
    assert half == pytest.approx((wait + 0.001 + 32 * (0.002 + 50e-6)) / 2 + 0.020, rel=0.02)


def test_what_others_compute_meanwhile_takes_cores_from_the_workers():
    costs = replace(COSTS, other_seconds=0.0006, prepare_seconds=0.004)
    assert batch_seconds(costs, SetUp(0, 1)) == pytest.approx(
        batch_seconds(replace(costs, other_seconds=0.0), SetUp(0, 1))
    )
    # cores; all are busy with enough workers
    work = 32 * (0.004 + 0.0006) + 0.001 + 0.002 + 0.0005 + 0.004
    assert batch_seconds(costs, SetUp(6, 1)) == pytest.approx(work, rel=0.03)
    assert bounds(costs, SetUp(6, 1))["cores"] == pytest.approx(work)


def test_a_disk_hit_waits_for_the_disk():
    on_disk = SetUp(0, 2, disk_share=1.0)
    assert batch_seconds(COSTS, on_disk) == pytest.approx(32 * (150_000 / 500e6 + 50e-6) + 0.020)
    faster = replace(on_disk, disk_bytes_per_second=1e9)
    assert batch_seconds(COSTS, faster) == pytest.approx(32 * (150_000 / 1e9 + 50e-6) + 0.020)


@pytest.mark.parametrize(
    ("changes", "setup", "slowest"),
    [
        ({"step_seconds": 1.0}, SetUp(2, MANY), "step"),
        ({"link_bytes_per_second": 2e6}, SetUp(4, MANY), "link"),
        ({"prepare_seconds": 0.01}, SetUp(2, MANY), "workers"),
        ({"prepare_seconds": 0.01}, SetUp(8, 2), "cores"),
        ({"latency_seconds": 0.1}, SetUp(3, MANY), "workers"),
        ({"disk_bytes_per_second": 1e6}, SetUp(4, MANY, disk_share=1.0), "disk"),
    ],
)
def test_where_one_resource_is_far_the_slowest_it_is_the_whole(changes, setup, slowest):
    costs = replace(COSTS, **changes)
    limits = bounds(costs, setup)
    assert max(limits, key=limits.__getitem__) == slowest
    # batches come in bursts
    assert batch_seconds(costs, setup) == pytest.approx(limits[slowest], rel=0.04)


def random_costs(rng: np.random.Generator) -> StallCosts:
    amounts = dict(
        zip(
            ("step", "latency", "prepare", "hit", "collate", "worker", "receive"),
            rng.random(7),
            strict=True,
        )
    )
    return StallCosts(
        batch_size=int(rng.integers(1, 40)),
        num_items=1000,
        step_seconds=0.05 * amounts["step"] + 1e-4,
        step_core_seconds=0.05 * rng.random(),
        latency_seconds=0.005 * amounts["latency"],
        source_bytes=50_000,
        link_bytes_per_second=10 ** rng.uniform(6, 9),
        prepare_seconds=0.005 * amounts["prepare"],
        hit_seconds=1e-4 * amounts["hit"],
        collate_seconds=1e-3 * amounts["collate"],
        worker_seconds=1e-3 * amounts["worker"],
        receive_seconds=1e-3 * amounts["receive"],
        entry_bytes=100_000,
    )


@pytest.mark.parametrize("seed", range(30))
def test_never_faster_than_any_bound_and_never_slower_than_all_in_turn(seed):
    rng = np.random.default_rng(seed)
    costs = random_costs(rng)
    setup = SetUp(
        int(rng.integers(0, 5)), int(rng.integers(1, 9)), memory_share=float(rng.choice([0.0, 1.0]))
    )
    seconds, limits = batch_seconds(costs, setup), bounds(costs, setup)
    assert seconds >= max(limits.values()) * (1 - 1e-6)
    in_turn = bounds(costs, replace(setup, num_workers=1))
    threads = max(costs.step_seconds, costs.step_core_seconds)
    assert seconds <= (
        in_turn["workers"] + costs.receive_seconds + costs.collate_seconds + threads
    ) * (1 + 1e-6)


def stepped(
    costs: StallCosts, *, workers: int, cores: int, batches: int = 40, tick: float = 2e-5
) -> float:
    """The loop played in small steps, without a cache: slow and obvious. Seconds per batch of its
    second half.
    """
    work = [
        ("delay", costs.latency_seconds),
        ("link", costs.source_bytes),
        ("core", costs.miss_seconds),
    ]
    todo = [(name, amount) for _ in range(costs.batch_size) for name, amount in work] + [
        ("core", costs.worker_seconds)
    ]
    queues = [[b for b in range(2 * workers) if b % workers == w] for w in range(workers)]
    jobs: list[list[tuple[str, float]]] = [[] for _ in range(workers)]
    done: set[int] = set()
    training: list[tuple[str, float]] = []
    starts: list[float] = []
    now, batch = 0.0, -1
    while len(starts) < batches:
        if not training and batch + 1 in done:
            batch += 1
            queues[(batch + 2 * workers) % workers].append(batch + 2 * workers)
            core = ("core", costs.receive_seconds + costs.step_core_seconds)
            training = [core, ("delay", costs.step_seconds - costs.step_core_seconds)]
            starts.append(now)
        for w in range(workers):
            if not jobs[w] and queues[w]:
                jobs[w] = list(todo)
        active = [job for job in (training, *jobs) if job]
        on_core, on_link = (sum(job[0][0] == name for job in active) for name in ("core", "link"))
        speed = {
            "delay": 1.0,
            "core": min(1.0, cores / max(1, on_core)),
            "link": costs.link_bytes_per_second / max(1, on_link),
        }
        for job in active:
            name, amount = job[0]
            job[0] = (name, amount - tick * speed[name])
            if job[0][1] <= 0:
                job.pop(0)
        for w in range(workers):
            if not jobs[w] and queues[w] and any(active_job is jobs[w] for active_job in active):
                done.add(queues[w].pop(0))
        now += tick
    half = batches // 2
    return (starts[-1] - starts[half]) / (batches - 1 - half)


@pytest.mark.parametrize(("workers", "cores"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)])
def test_against_a_loop_played_in_small_steps(workers, cores):
    costs = replace(COSTS, batch_size=4, step_seconds=0.012, step_core_seconds=0.006)
    expected = stepped(costs, workers=workers, cores=cores)
    assert batch_seconds(costs, SetUp(workers, cores)) == pytest.approx(expected, rel=0.04)


def test_contention_counts_as_far_as_cores_are_busy():
    costs = replace(
        COSTS, contention=1.5, prepare_seconds=0.01, latency_seconds=0.0, link_bytes_per_second=inf
    )
    assert batch_seconds(costs, SetUp(0, 2)) == batch_seconds(
        replace(costs, contention=1.0), SetUp(0, 2)
    )
    crowded, alone = (
        batch_seconds(c, SetUp(8, 2)) for c in (costs, replace(costs, contention=1.0))
    )
    assert crowded == pytest.approx(1.5 * alone, rel=0.02)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_more_cache_is_never_slower(workers):
    speeds = [
        samples_per_second(COSTS, SetUp(workers, 2, memory_share=share))
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    assert all(later >= earlier * 0.995 for earlier, later in pairwise(speeds))


@pytest.mark.parametrize("needed_rate", [300.0, 600.0, 1500.0])
def test_least_cache_is_ds_analyzers_where_its_assumptions_hold(needed_rate):
    """One reader that alternates between source and cache beside a step of constant rate."""
    costs = StallCosts(
        batch_size=64,
        num_items=1000,
        step_seconds=64 / needed_rate,
        step_core_seconds=0.0,
        latency_seconds=1 / 200,
        source_bytes=1,
        link_bytes_per_second=inf,
        prepare_seconds=0.0,
        hit_seconds=1 / 5000,
        collate_seconds=0.0,
        worker_seconds=0.0,
        receive_seconds=0.0,
        entry_bytes=1,
    )
    # x* = (D/S - N/R) / (D/S - D/C) of DS-Analyzer's what-if (arXiv 2007.06775, section 3.4), in
    # items per second
    expected = (1 / 200 - 1 / needed_rate) / (1 / 200 - 1 / 5000)
    assert 0 < expected < 1
    assert least_cache(costs, SetUp(1, 2, prefetch_factor=8), within=0.01) == pytest.approx(
        expected, abs=0.03
    )


def test_no_cache_is_worth_having_where_the_step_is_slower():
    assert least_cache(replace(COSTS, step_seconds=1.0), SetUp(2, 4)) == 0.0


def test_parts_add_up_to_what_was_measured():
    stalls = split_stalls(
        COSTS, SetUp(1, 2), cold_seconds=0.10, cached_seconds=0.03, step_seconds=0.02
    )
    assert stalls.total_seconds == pytest.approx(0.10) and stalls.fraction == pytest.approx(0.8)
    assert stalls.loading_seconds == pytest.approx(0.01)
    assert stalls.fetch_seconds > 0 and stalls.prepare_seconds > 0
    no_wait = replace(COSTS, latency_seconds=0.0, link_bytes_per_second=inf)
    assert (
        split_stalls(
            no_wait, SetUp(1, 2), cold_seconds=0.1, cached_seconds=0.03, step_seconds=0.02
        ).fetch_seconds
        == 0
    )
    no_work = replace(COSTS, prepare_seconds=COSTS.hit_seconds, collate_seconds=0.0)
    stalls = split_stalls(
        no_work, SetUp(0, 2), cold_seconds=0.1, cached_seconds=0.03, step_seconds=0.02
    )
    assert stalls.prepare_seconds == pytest.approx(0, abs=1e-9)


def test_workers_are_chosen_as_few_as_do():
    assert best_num_workers(replace(COSTS, step_seconds=0.2), SetUp(0, 4)) == 1
    assert (
        best_num_workers(replace(COSTS, latency_seconds=0.05, step_seconds=0.3), SetUp(0, 4)) == 6
    )
    warm = SetUp(4, 4, memory_share=1.0)
    nothing = replace(COSTS, collate_seconds=0.0, hit_seconds=0.0, receive_seconds=0.001)
    assert best_num_workers(nothing, warm) == 0


def test_questions_asked():
    rows = what_if(COSTS, SetUp(1, 2), changes=[("mine", "four workers", SetUp(4, 2))])
    groups = {row.group for row in rows}
    assert groups == {
        "now",
        "cache in memory",
        "cache on disk",
        "workers",
        "cores",
        "accelerator",
        "source",
        "mine",
    }
    assert rows[0].setup == SetUp(1, 2)
    for row in rows:
        assert row.samples_per_second == pytest.approx(samples_per_second(COSTS, row.setup))
    unknown = replace(
        COSTS, link_bytes_per_second=inf, disk_bytes_per_second=inf, latency_seconds=0.0
    )
    assert {row.group for row in what_if(unknown, SetUp(1, 2))} == groups - {
        "cache on disk",
        "source",
        "mine",
    }


@pytest.mark.parametrize(
    "changes",
    [{"num_workers": -1}, {"memory_share": 0.6, "disk_share": 0.6}],
)
def test_wrong_set_ups(changes):
    with pytest.raises(ValueError):
        SetUp(**{"num_workers": 1, "cores": 1, **changes})


@pytest.mark.parametrize(
    "changes", [{"batch_size": 0}, {"contention": 0.5}, {"link_bytes_per_second": 0.0}]
)
def test_wrong_costs(changes):
    with pytest.raises(ValueError):
        replace(COSTS, **changes)


def test_share_of_the_items():
    assert COSTS.share(150_000 * 2_500) == pytest.approx(0.25) and COSTS.share(1e12) == 1.0
