"""Jobs of the tests of coordinated preparation: real processes that say what they got."""

from __future__ import annotations

import hashlib
import multiprocessing as mp
import os
import pickle
import random
import signal
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_topt.data.coordinated.loader import CoordinatedLoader
from lightning_topt.data.coordinated.preparation import Preparation
from tests.processes import wait_until
from tests.shared_memory import opened

CONTEXT = mp.get_context("fork")
NUM_SAMPLES, BATCH_SIZE, SEED = 24, 2, 7
NUM_BATCHES = NUM_SAMPLES // BATCH_SIZE


class Samples(torch.utils.data.Dataset):
    """Random augmentation from all three generators; every sample that is drawn is noted in `log`.

    Processes meet at `barrier` before they draw their first one.
    """

    def __init__(
        self,
        log: Path | None = None,
        *,
        seconds: float = 0.0,
        hang_at: int | None = None,
        barrier: Any = None,
    ) -> None:
        self.log, self.seconds, self.hang_at, self.barrier = log, seconds, hang_at, barrier

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.barrier is not None:
            self.barrier.wait(30)
            self.barrier = None
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(f"{index}\n")
        if self.hang_at is not None and index >= self.hang_at:
            time.sleep(600)
        time.sleep(self.seconds)
        noise = torch.rand(50)
        return {"index": index, "x": noise, "y": np.random.rand(3), "z": random.random()}


class Shuffled:
    """The batches of an epoch."""

    def __init__(self, batch_size: int = BATCH_SIZE) -> None:
        self.batch_size = batch_size

    def __call__(self, epoch: int) -> list[list[int]]:
        order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(100 + epoch))
        return [part.tolist() for part in order.split(self.batch_size)]


def loader_of(dataset: Any, directory: Path, **changes: Any) -> CoordinatedLoader:
    options: dict[str, Any] = {
        "batches": Shuffled(),
        "collate_fn": torch.utils.data.default_collate,
        "directory": directory,
        "fingerprint": "samples",
        "seed": SEED,
        "memory_bytes": 1 << 24,
        "timeout_seconds": 20.0,
        "multiprocessing_context": "fork",
    }
    return CoordinatedLoader(dataset, **{**options, **changes})


def digest(batch: Any) -> str:
    """Of all bits of a batch."""
    return hashlib.sha256(
        b"".join(batch[name].numpy().tobytes() for name in sorted(batch))
    ).hexdigest()


def expected(epochs: int = 1) -> list[list[str]]:
    """The batches of one job alone, one after the other, without the machinery: the oracle."""

    def prepare() -> list[list[str]]:
        collate = torch.utils.data.default_collate
        preparation = Preparation(Samples(), batches=Shuffled(), collate_fn=collate, seed=SEED)
        return [
            [digest(preparation.prepare(epoch, batch)) for batch in range(NUM_BATCHES)]
            for epoch in range(epochs)
        ]

    state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        return prepare()
    finally:
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])
        random.setstate(state[2])


@dataclass
class Result:
    """What a job says at its end."""

    batches: list[list[str]] = field(default_factory=list)  # digests, by epoch
    warned: list[str] = field(default_factory=list)
    own: int = 0
    others: int = 0
    alone: int = 0
    coordinators: set[int] = field(default_factory=set)
    kept_bytes: int = 0  # the most that the coordinator was seen to keep


class Job:
    """A forked process in a group of its own.

    It passes `barrier` when it has joined, takes `seconds` for each batch, and after `pause` =
    (number, path) of them waits until the path is there. `log` has the number of batches that it
    got.
    """

    def __init__(self, loader: Any, **options: Any) -> None:
        self.reader, writer = CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(target=_run, args=(loader, writer), kwargs=options)
        self.process.start()
        writer.close()

    def result(self, timeout_seconds: float = 60) -> Result:
        if not self.reader.poll(timeout_seconds):
            raise TimeoutError("a job gave no result in time")
        value = pickle.loads(self.reader.recv_bytes())
        self.process.join(20)
        if isinstance(value, str):
            raise RuntimeError(value)
        return value

    def signal(self, number: int) -> None:
        """To the job and its workers."""
        os.killpg(self.process.pid, number)

    def end(self) -> None:
        if self.process.is_alive():
            for number in (signal.SIGCONT, signal.SIGKILL):
                self.signal(number)
        self.process.join()


def _run(loader, writer, *, epochs=1, seconds=0.0, barrier=None, log=None, pause=(-1, None)):  # type: ignore[no-untyped-def]
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    result = Result()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if barrier is not None:
                loader._joined()
                barrier.wait(30)
            for _ in range(epochs):
                result.batches.append([])
                for batch in loader:
                    result.batches[-1].append(digest(batch))
                    _look(loader, result)
                    if log is not None:
                        log.write_text(str(sum(map(len, result.batches))))
                    if sum(map(len, result.batches)) == pause[0]:
                        wait_until(pause[1].exists, seconds=60)
                    time.sleep(seconds)
        counts = loader.statistics()
        result.own, result.others, result.alone = counts.own, counts.others, counts.alone
        result.warned = [str(warning.message) for warning in caught]
        loader.close()
        writer.send_bytes(pickle.dumps(result))
    except BaseException:
        writer.send_bytes(pickle.dumps(traceback.format_exc()))


def _look(loader: CoordinatedLoader, result: Result) -> None:
    if loader._membership is not None:
        pid = loader._membership.coordinator_pid
        result.coordinators.add(pid)
        result.kept_bytes = max(result.kept_bytes, sum(kept(pid)))


def kept(pid: int) -> list[int]:
    """Sizes of the batches that a process has open."""
    sizes = []
    for name in os.listdir(f"/proc/{pid}/fd") if os.path.exists(f"/proc/{pid}/fd") else []:
        try:
            if "lightning-topt-batch" in os.readlink(f"/proc/{pid}/fd/{name}"):
                sizes.append(os.stat(f"/proc/{pid}/fd/{name}").st_size)
        except OSError:
            continue  # closed meanwhile
    return sizes


def coordinator_at(directory: Path) -> int:
    """The coordinator of the jobs that meet there; raises ValueError where there is not one."""
    address = loader_of(Samples(), directory)._address[1:]
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    links = {f"socket:[{words[6]}]" for words in sockets if words[7:] == [f"@{address}"]}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if "lightning_topt.data.coordinated.coordinator" in (process / "cmdline").read_text():
                found += [int(process.name)] if links & set(opened(process)) else []
        except OSError:
            continue
    (coordinator,) = found
    return coordinator


def lines(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []
