"""A rank that is killed or stopped is named on the others, under every strategy, anywhere."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing as mp
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_topt import (
    AutoParallelStrategy,
    CompressedDDPStrategy,
    LocalStepsStrategy,
    ParallelOptimizerStep,
    PipelineStrategy,
)
from lightning_topt.communication import LocalSteps, TopK
from lightning_topt.communication.rank_watch import process_state
from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.plugins.plan_run import PlanRun
from tests.launch import free_port
from tests.plugins.trainer_ranks import LoggingGPT, _as_torchrun, loader, make_trainer
from tests.preloaded import preloaded_topt
from tests.processes import halt, wait_until

LIMIT, SHORT = timedelta(seconds=60), timedelta(seconds=2)
VICTIM, AT_ONCE = 1, 8
KILL, STOP, RAISE = signal.SIGKILL, signal.SIGSTOP, 0


class MyError(Exception):
    pass


class Loses(LoggingGPT):
    """The victim gets a signal where it says, from the other rank, or raises an error (0)."""

    folder = ""

    def __init__(self, where: str, number: int) -> None:
        super().__init__()
        self.where, self.number = where, number

    def _reach(self, where: str) -> None:
        if self.where != where:
            return
        victim = Path(self.folder, "victim")
        if dist.get_rank() == VICTIM:
            if self.number == RAISE:
                raise MyError("on one rank only")
            victim.with_suffix(".new").write_text(str(os.getpid()))
            victim.with_suffix(".new").rename(victim)
            time.sleep(120)
        if self.number != RAISE:
            # A busy machine may be slow before: from here on nobody answers.
            wait_until(victim.exists, seconds=60)
            with contextlib.suppress(ProcessLookupError):  # here a second time, long after
                halt(int(victim.read_text()), self.number)
            dist.distributed_c10d._set_pg_timeout(SHORT)

    def configure_optimizers(self) -> Any:
        self._reach("planning")
        return super().configure_optimizers()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self._reach("training")

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._reach("validation")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._reach("checkpoint")


class Fails(nn.LayerNorm):
    """Raises an error when it has run for some microbatches, on whichever rank that is."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += self.training and type(x) is Tensor
        if self.runs > 6:
            raise MyError("on one rank only")
        return super().forward(x)


class FailsInBlock(Loses):
    def __init__(self, where: str, number: int) -> None:
        super().__init__(where, number)
        self.norm = Fails(16)


class SgdLoses(Loses):
    def configure_optimizers(self) -> Any:
        self._reach("planning")
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Saves(L.Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(f"{self.folder}/saved.ckpt")


def topt(plan: Any) -> Any:
    return lambda: (AutoParallelStrategy(plan=plan, timeout=LIMIT), [])


def compressed() -> Any:
    return CompressedDDPStrategy(TopK(density=0.1), timeout=LIMIT, timeout_seconds=8), []


def local() -> Any:
    return LocalStepsStrategy(LocalSteps(every=2), timeout=LIMIT), []


def shared(**options: Any) -> Any:
    return lambda: (
        DDPStrategy(timeout=LIMIT),
        [ParallelOptimizerStep(always=True, timeout_seconds=8, **options)],
    )


def pipeline() -> Any:
    """Groups of a pipeline keep the limit that they are made with. Planning has the usual one: on a
    busy machine it takes longer.
    """
    kind: Any = PlanRun
    apply = kind.apply

    def limited(*args: Any) -> None:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=12))
        apply(*args)

    kind.apply = limited
    link = Link(1e-5, 1e9)
    cluster = Cluster(
        "toy", Device("core", 2**33, {"float32": 3e9}, 8e9, 3e-6), 2, 1, link, link, backend="gloo"
    )
    return PipelineStrategy(microbatches=2, cluster=cluster, timeout=LIMIT), []


CASES: dict[str, tuple[Any, str, int]] = {
    # those that wait longest come first
    "pipeline": (pipeline, "training", STOP),
    "compressed": (compressed, "training", STOP),
    "pipeline, error": (pipeline, "training", RAISE),
    "pipeline, error in a block": (pipeline, "block", RAISE),
    "pipeline, validation": (pipeline, "validation", KILL),
    "ddp": (topt("ddp"), "training", KILL),
    "ddp, error": (topt("ddp"), "training", RAISE),
    "zero3+recompute": (topt("zero3+recompute"), "training", STOP),
    "zero3, checkpoint": (topt("zero3"), "checkpoint", KILL),
    "search": (topt(None), "planning", KILL),
    "local steps": (local, "training", KILL),
    "shared step": (shared(), "training", KILL),
    "shared step, error": (shared(), "training", RAISE),
}


def fit(rank: int, case: str, folder: str) -> str:
    make, where, number = CASES[case]
    strategy, callbacks = make()
    trainer = make_trainer(strategy, devices=2, callbacks=[*callbacks, Saves(folder)])
    kind = SgdLoses if "compressed" in case else FailsInBlock if where == "block" else Loses
    module = kind(where, number)
    module.folder = folder
    try:
        trainer.fit(module, loader(4), loader(4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "the fit went through"


def run(rank: int, port: int, queue: Any, case: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=LIMIT
    )
    message = _as_torchrun(rank, fit, 2, (case, folder))
    if rank != VICTIM:
        queue.put((case, message))
    os._exit(0)  # what is left waits for the lost rank


@contextlib.contextmanager
def starting(queue: Any, folder: Path) -> Iterator[Callable[[str], None]]:
    """What starts the two ranks of a case, which tell what became of it in `queue`."""
    context, ranks = mp.get_context("fork"), []

    def start(case: str) -> None:
        own = folder / case
        own.mkdir()
        port = free_port()
        for rank in range(2):
            ranks.append(context.Process(target=run, args=(rank, port, queue, case, str(own))))
            ranks[-1].start()

    try:
        yield start
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def test_a_lost_rank_is_named_in_time(tmp_path: Path) -> None:
    """Some cases at once, on two ranks each."""
    found: dict[str, str] = {}
    queue, waiting = mp.get_context("fork").SimpleQueue(), iter(CASES)
    with starting(queue, tmp_path) as start:
        for case in itertools.islice(waiting, AT_ONCE):
            start(case)
        for _ in CASES:
            assert queue._reader.poll(90), f"still waiting: {set(CASES) - set(found)}"  # type: ignore[attr-defined]
            case, message = queue.get()
            found[case] = message
            for case in itertools.islice(waiting, 1):
                start(case)
    for case, (_, _, number) in CASES.items():
        fate = "has ended" if number == KILL else "is stopped"
        says = rf"rank 1 did not answer in .*\(rank 1: process \d+ {fate}\)"
        if number == RAISE:
            says = "rank 1 ended with MyError: on one rank only"
        assert re.search(f"Error: {says}; seen by rank 0", found[case]), found[case]


class Stops(Loses):
    """Leaves its processes' numbers, so that the stopped one can be ended after the other."""

    def on_train_start(self) -> None:
        Path(self.folder, str(self.global_rank)).write_text(str(os.getpid()))


def end_stopped(folder: Path) -> None:
    """Lightning would give the stopped rank half a minute after the end of the other."""
    while len(
        pids := [int(file.read_text() or 0) for file in sorted(folder.iterdir())]
    ) < 2 or not all(pids):
        time.sleep(0.05)
    while process_state(pids[0])[0]:  # until it is gone, not only ended
        time.sleep(0.05)
    os.kill(pids[1], signal.SIGKILL)


@pytest.mark.parametrize("shares_step", [False, True])
def test_forked_ranks_name_the_stopped_one(tmp_path: Path, shares_step: bool) -> None:
    """Lightning asks neither strategy nor callback in forked ranks; the error comes as text."""
    options: Any = {"start_method": "fork", "timeout": LIMIT}
    strategy = (
        DDPStrategy(**options) if shares_step else AutoParallelStrategy(plan="ddp", **options)
    )
    trainer = make_trainer(
        strategy, devices=2, callbacks=[ParallelOptimizerStep()] if shares_step else []
    )
    module = Stops("training", STOP)
    module.folder = str(tmp_path)
    ender = threading.Thread(target=end_stopped, args=(tmp_path,), daemon=True)
    ender.start()
    with pytest.raises(
        Exception, match=r"rank 1 did not answer in .* is stopped\); seen by rank 0"
    ):
        trainer.fit(module, loader(4))
    ender.join()


SCRIPT = """
import os, signal
import lightning as L
import lightning_topt
from tests.plugins.trainer_ranks import RecordingGPT, loader

class Dies(RecordingGPT):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 3 and self.global_rank == {dead}:
            os.kill(os.getpid(), signal.SIGKILL)

strategy = lightning_topt.AutoParallelStrategy(plan="{plan}")
L.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False,
          enable_progress_bar=False, max_epochs=1).fit(Dies(), loader(2))
print("FINISHED")
"""


def test_processes_that_lightning_started_name_the_killed_one(tmp_path: Path) -> None:
    """The main process says so before Lightning's observer kills it; or the others do."""
    path = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    jobs = []
    for plan, dead in (("zero1", 1), ("zero3", 0)):
        environment["MASTER_PORT"] = str(free_port())
        script = tmp_path / f"{plan}.py"
        script.write_text(SCRIPT.format(plan=plan, dead=dead))
        out = (tmp_path / f"{plan}.txt").open("w+")
        job = subprocess.Popen(
            [preloaded_topt(), str(script)],
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        jobs.append((job, out, 1 - dead, dead))
    try:
        for job, out, survivor, dead in jobs:
            says = f"rank {dead} did not answer"
            deadline = time.monotonic() + 120
            while says not in (text := Path(out.name).read_text()) and time.monotonic() < deadline:
                time.sleep(0.2)
            assert f"seen by rank {survivor}" in text and "FINISHED" not in text, text[-3000:]
            assert job.wait(timeout=60) == (1 if dead else -signal.SIGKILL)
    finally:
        for job, out, _, _ in jobs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            out.close()


LEAVES = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
from lightning_topt.plugins.lost_ranks import LostRankWatch

rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(minutes=10)
)
watch = LostRankWatch()
watch.begin()
print("ready", flush=True)
if rank == 1:
    sys.stdin.read()
else:
    waits = dist.broadcast(torch.zeros(1), 1, async_op=True)
    watch.name(RuntimeError("another call has failed"))
    watch.end()
    print("the end")
"""


def test_the_end_waits_for_no_call_that_others_have_left() -> None:
    """Of ranks that wait for one another, each for the end of the other one, all would stay."""
    command = [preloaded_topt(), "-c", LEAVES]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    port = str(free_port())
    ranks = [subprocess.Popen([*command, str(rank), port], **pipes) for rank in (0, 1)]
    try:
        said, _ = ranks[0].communicate(timeout=120)
        assert ranks[1].poll() is None
        assert ranks[0].returncode == 1 and said.endswith("the end\n")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
