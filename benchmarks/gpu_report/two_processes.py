"""Part 5: two processes that share the device train under each plan, as Lightning's ``ddp`` does.

NCCL refuses two ranks on one device; gloo takes tensors of the device in collectives, though not in
send and receive, so pipelines are expected to fail. Each process is a node of its own for Lightning
(``num_nodes=2, devices=1``). The first run is Lightning's ``ddp``; beside each other run stands how
far its losses are from that. Exchanges that compress train otherwise: they are compared with their
run on CPU tensors in the same processes.

A plan that fails or hangs ends both processes; two new ones go on with the plans that are left.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor

from benchmarks.common import QUIET
from benchmarks.gpu_report.reporting import Report, memory_columns, processes, reset_peaks, run_part
from lightning_topt import (
    AutoParallelStrategy,
    CompressedDDPStrategy,
    LocalStepsStrategy,
    PipelineStrategy,
)
from lightning_topt.demo import VOCABULARY, ByteGPT

REFERENCE = "Lightning's ddp"
STEPS, GLOBAL_BATCH = 8, 8
SIZES = (2, 64, 4, 32)  # layers, hidden, heads, sequence
# The ranks of these get the same samples.
JOINT = ("tensor", "tensor+recompute", "pipeline")
PLANS = (
    "ddp",
    "ddp+recompute",
    "bf16",
    "fp16",
    "local_steps",
    "sparse_loco",
    "topk",  # numba compiles for a while
    "topt_pipeline",
    "pipeline",
    "bounded_loss",
)
# Torch's own collectives on tensors of CUDA over gloo end these by a segmentation fault: last.
RISKY = (
    "tensor",
    "tensor+recompute",
    "zero1",
    "zero2",
    "zero3",
    "zero3+recompute",
    "zero1+recompute",
    "zero2+recompute",
    "search, least memory",
)
COMPRESSED = ("topk", "bf16", "fp16", "bounded_loss")
LOCAL = ("local_steps", "sparse_loco")
FEW = (REFERENCE, "ddp", "zero3", "topk", "local_steps", "tensor", "pipeline")  # with --quick
# Seconds: that a collective call may take; of a plan, and of a risky one on CUDA; of imports; with
# which a pair is begun.
_CALL, _PLAN, _RISKY, _START, _LEAST_LEFT = 10.0, 20.0, 7.0, 90.0, 5.0


# ---- the two processes, from outside -------------------------------------------------------------


def run(report: Report) -> None:
    """Start pairs of processes until no plan is left."""
    left = [name for name in (REFERENCE, *PLANS, *RISKY) if not report.quick or name in FEW]
    with tempfile.TemporaryDirectory() as folder:
        while left and report.left() > _LEAST_LEFT:
            # Each risky one has a pair of its own.
            together = [name for name in left if name not in RISKY] or left[:1]
            begun = run_pair(report, together, Path(folder))
            # The last one that was begun has failed, unless all have been.
            left = left[begun + 1 :] if begun < len(together) else left[len(together) :]
    if left:
        report.note("not begun", plans=left)


def run_pair(report: Report, plans: Sequence[str], folder: Path) -> int:
    """Let two processes run `plans`; return the index of the last one that was begun."""
    for path in folder.glob("begun.*"):
        path.unlink()
    (folder / "store").unlink(missing_ok=True)
    context = processes()  # of a process that has imported all, and not begun CUDA
    pair = [context.Process(target=worker, args=(rank, plans, report, folder)) for rank in range(2)]
    for process in pair:
        process.start()
    begun, moved, ended = -1, time.monotonic(), None
    patience = _RISKY if plans[0] in RISKY else _PLAN
    while any(process.is_alive() for process in pair):
        time.sleep(0.1)
        now = time.monotonic()
        if (found := last_begun(folder)) != begun:
            begun, moved = found, now
        if ended is None and not all(process.is_alive() for process in pair):
            ended = now
        slow = 1.0 if report.device.type == "cuda" else 4.0
        hangs = now - moved > (_START if begun < 0 else slow * patience)
        # One that is alone gets a few seconds to say why.
        alone = ended is not None and now - ended > 2
        if alone or hangs or report.left() < 2:
            for process in pair:
                process.kill()
                process.join()
            if hangs:
                name = plans[max(begun, 0)]
                report.failure(name, TimeoutError(f"{name!r} did not end; begun: {begun >= 0}"))
    codes = [process.exitcode for process in pair]
    begun = last_begun(folder)
    name = plans[max(begun, 0)]
    failed = {line["name"].partition(", rank")[0] for line in report.rows_written()}
    if any(codes) and name not in failed:  # nobody could write why
        report.failure(name, RuntimeError(f"its processes ended with status {codes}"))
    return begun if any(codes) else len(plans)


def last_begun(folder: Path) -> int:
    """Return the index of the last plan that a process has begun; -1: none."""
    found = [-1]
    for path in folder.glob("begun.*"):
        with contextlib.suppress(ValueError):  # it is being written
            found.append(int(path.read_text()))
    return max(found)


# ---- one of them ---------------------------------------------------------------------------------


def worker(rank: int, plans: Sequence[str], report: Report, folder: Path) -> None:
    """Run the plans as one rank; end with an error at the first that fails."""
    device, cuda = report.device, report.device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    be_a_node(rank)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=_CALL if cuda else 4 * _CALL),
    )
    for index, name in enumerate(plans):
        faulthandler.dump_traceback_later(0.8 * _PLAN)
        (folder / f"begun.{rank}").write_text(str(index))
        columns: dict[str, Any] = {}
        start = time.monotonic()
        try:
            losses = fit(name, device, columns)
            compare(name, losses, device, columns, folder)
        except BaseException as error:
            report.failure(f"{name}, rank {rank}", error, **columns)
            # The other rank may wait for this one: leave at once, without joining any thread.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        if rank == 0:
            report.row(name, **columns, wall_s=round(time.monotonic() - start, 2))
        faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def be_a_node(rank: int) -> None:
    """Let Lightning take this process for the only rank of one of two nodes under torchrun."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK="0",
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="1",
        GROUP_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",  # never used: the process group exists already
        TORCHELASTIC_RUN_ID="gpu_report",
    )


def compare(
    name: str, losses: list[float], device: torch.device, columns: dict[str, Any], folder: Path
) -> None:
    """Add how far losses are from those of Lightning's ddp, or of the same on CPU tensors."""
    reference = folder / "reference.json"
    columns["first_loss"], columns["last_loss"] = losses[0], losses[-1]
    if name == REFERENCE:
        if dist.get_rank() == 0:
            reference.write_text(json.dumps(losses))
        dist.barrier()
        return
    if reference.exists():
        expected = json.loads(reference.read_text())
        columns["off_ddp"] = difference(losses, expected)
    if device.type == "cuda" and name in (*COMPRESSED, *LOCAL):
        on_cpu = fit(name, torch.device("cpu"), {})
        columns["off_cpu"] = difference(losses, on_cpu)


def difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference of two curves."""
    assert len(losses) == len(expected), f"{len(losses)} steps, {len(expected)} expected"
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


# ---- one fit -------------------------------------------------------------------------------------


def fit(name: str, device: torch.device, columns: dict[str, Any]) -> list[float]:
    """Train under `name`; return the losses, means over ranks, and add columns."""
    strategy = strategy_of(name)
    pl.seed_everything(0, verbose=False)
    module = RecordingGPT(*SIZES)
    trainer = pl.Trainer(
        accelerator="cuda" if device.type == "cuda" else "cpu",
        devices=1,
        num_nodes=2,
        strategy=strategy,
        max_epochs=1,
        **QUIET,
    )
    reset_peaks(device)
    start = time.perf_counter()
    trainer.fit(module, OwnShare(joint=name in JOINT))
    columns["fit_seconds"] = time.perf_counter() - start
    columns["step_seconds"] = (module.times[-1] - module.times[-4]) / 3
    plan = getattr(strategy, "parallel_plan", None)
    columns["plan"] = None if plan is None else plan.summary()
    columns["planned_by"] = getattr(strategy, "planned_by", None)
    columns.update(memory_columns(device))
    return module.losses


def strategy_of(name: str) -> Strategy:
    """Return the strategy of a plan, a method of exchange, or Lightning's own."""
    gloo: dict[str, Any] = {"process_group_backend": "gloo"}
    if name == REFERENCE:
        return DDPStrategy(**gloo)
    if name in COMPRESSED:
        return CompressedDDPStrategy(name, **gloo)
    if name in LOCAL:
        return LocalStepsStrategy({"method": name, "every": 3}, **gloo)
    if name == "topt_pipeline":
        return PipelineStrategy(**gloo)
    if name == "search, least memory":
        return AutoParallelStrategy(objective="memory", **gloo)
    return AutoParallelStrategy(plan=name, **gloo)


class RecordingGPT(ByteGPT):
    """Keeps the loss of each step, the mean over ranks, and when it ended."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.losses: list[float] = []
        self.times: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Average the loss over ranks."""
        mean = outputs["loss"].detach().float().cpu()
        dist.all_reduce(mean)
        self.losses.append(mean.item() / dist.get_world_size())
        self.times.append(time.perf_counter())


class OwnShare:
    """This rank's share of each global batch, or all of it for ranks that work on one."""

    def __init__(self, *, joint: bool) -> None:
        shape = (STEPS, GLOBAL_BATCH, SIZES[3] + 1)
        generator = torch.Generator().manual_seed(7)
        self.batches = torch.randint(0, VOCABULARY, shape, dtype=torch.uint8, generator=generator)
        self.joint = joint

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.batches:
            yield batch if self.joint else batch.chunk(2)[dist.get_rank()]

    def __len__(self) -> int:
        return STEPS


def main() -> None:
    run_part("two_processes", run, __doc__, forks=True)


if __name__ == "__main__":
    main()
