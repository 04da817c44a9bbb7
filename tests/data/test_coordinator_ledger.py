"""Who prepares what: jobs that stop or fail, and whole runs simulated at random."""

from __future__ import annotations

import random

import pytest

from lightning_topt.data.coordinated.ledger import Ledger

MEMORY = 10_000


def ledger_of(
    *jobs: str, memory_bytes: int = MEMORY, start=(0, 0), end: int = 20, timeout_seconds: float = 10
) -> Ledger:
    """Each job with one worker, the number of its place from 1."""
    ledger = Ledger(timeout_seconds=timeout_seconds)
    for number, job in enumerate(jobs, 1):
        ledger.add_job(job, memory_bytes=memory_bytes)
        ledger.start(job, start, end=end)
        ledger.add_idle(number, job)
    return ledger


def finish(ledger: Ledger, worker: int, *, nbytes: int = 100) -> None:
    position = ledger.claims[worker].position
    ledger.prepared(worker, position, nbytes=nbytes)
    ledger.add_idle(worker, ledger.workers[worker])


def test_batches_that_only_a_stopped_job_needs_give_way():
    ledger = ledger_of("a", "b", "stopped", memory_bytes=1000, end=100)
    for step in range(50):
        for job in ("a", "b"):
            ledger.request(job)
        while not (given := ledger.deliveries()):
            list(ledger.assignments(step))
            for worker in list(ledger.claims):
                finish(ledger, worker)
            assert ledger.drop_excess() is not None
            assert ledger.held_bytes == sum(ledger.held.values())
        assert ledger.held_bytes <= 1000
        assert {job for job, _ in given} == {"a", "b"}  # one preparation serves both
    assert sum(job.prepared for job in ledger.jobs.values()) <= 50 + 6


def test_a_job_whose_workers_failed_does_not_try_again():
    ledger = ledger_of("a", "b")
    (worker, position), _ = ledger.assignments(0)
    ledger.failed(worker, position)
    ledger.add_idle(worker, ledger.workers[worker])
    assert all(again != position for _, again in ledger.assignments(0))
    finish(ledger, 3 - worker)
    assert (3 - worker, position) in ledger.assignments(0)


@pytest.mark.parametrize("seed", range(60))
def test_every_job_gets_every_batch_once_whatever_happens(seed):
    """Random speeds, sizes, memory, deaths, hangs, late jobs: the survivors get all, in order."""
    chance = random.Random(seed)
    memory, largest, epochs, batches = chance.choice([50, 400, 3000]), 200, 2, chance.randint(1, 12)
    ledger = Ledger(timeout_seconds=15, max_held=chance.choice([2, 1000]))
    names = [f"job {number}" for number in range(chance.randint(1, 4))]
    got: dict[str, list] = {name: [] for name in names}
    speed = {name: chance.choice([1.0, 0.3, 0.05]) for name in names}
    hanging, waiting, joined, workers = set(), set(), set(), 0
    dies = {name: chance.random() < 0.3 for name in names[1:]}
    expected = [(epoch, batch) for epoch in range(epochs) for batch in range(batches)]
    for now in range(20_000):
        for name in names:
            if name not in joined and chance.random() < 0.05:
                joined.add(name)
                ledger.add_job(name, memory_bytes=memory)
                ledger.start(name, (0, 0), end=batches)
                for place in range(chance.randint(1, 2)):
                    workers += 1
                    ledger.add_idle(workers, name)
                    # a job of which all hang would not get far alone either
                    if place > 0 and chance.random() < 0.3:
                        hanging.add(workers)
            elif name in ledger.jobs and name not in waiting and chance.random() < speed[name]:
                if len(got[name]) == len(expected) or (
                    dies.get(name) and len(got[name]) > batches // 2
                ):
                    for worker in [worker for worker, job in ledger.workers.items() if job == name]:
                        ledger.remove_worker(worker)
                    ledger.remove_job(name)
                    continue
                if got[name] and got[name][-1][1] == batches - 1:
                    ledger.start(name, (got[name][-1][0] + 1, 0), end=batches)
                ledger.request(name)
                waiting.add(name)
        for worker in [
            worker for worker in ledger.claims if worker not in hanging and chance.random() < 0.4
        ]:
            finish(ledger, worker, nbytes=chance.randint(1, largest))
        for name, position in ledger.deliveries():
            got[name].append(position)
            waiting.remove(name)
        ledger.drop_excess()
        assert ledger.held_bytes == sum(ledger.held.values())
        assert ledger.held_bytes <= ledger.memory_bytes and len(ledger.held) <= ledger.max_held
        list(ledger.assignments(now))
        if len(joined) == len(names) and not ledger.jobs:
            break
    for name in names:
        assert got[name] == expected[: len(got[name])]
        assert dies.get(name) or got[name] == expected
    assert not ledger.held and not ledger.claims and not ledger.workers
