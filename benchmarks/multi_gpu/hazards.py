"""What several GPUs may break that one cannot show: a fit for each fault that reading has found.

    case                     a fit                                      must
    full card                planned while 85 % of the card is in use   have the losses of ddp
    recomputed dropout       of blocks that take a dataclass alone      have the losses of ddp
    complex between stages   under 1F1B                                 have the losses of ddp
    host waits: SCHEDULE     of a pipeline                              not wait for the device
    uneven loaders           of ranks that differ in batches            end together, in the groups
                                                                        that it began with
    topk                     none: one exchange of 25 MiB               be as fast as it is alone

Ranks train on the same batches, so that losses are those of one process. What a fit must is checked
by its case. Of the last one there are times, and a profile (``topk.json``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn

from benchmarks.common import ROOT
from benchmarks.gpu_report.compression import (
    SHAPES,
    SMALL_SHAPES,
    Matrices,
    bucket_call,
    counted_events,
    waiting_lines,
)
from benchmarks.gpu_report.reporting import memory_columns, reset_peaks
from benchmarks.gpu_report.two_processes import difference
from benchmarks.multi_gpu.job import Job
from benchmarks.multi_gpu.pipelines import Batches, Record, backend_of, fit
from lightning_topt import AutoParallelStrategy, PipelineStrategy, TopK
from lightning_topt.communication import CompressedExchange, Topology
from lightning_topt.demo import VOCABULARY, ByteGPT

STEPS, SAMPLES = 8, 8
SECONDS = 60.0  # of a case
_WIDTH = 32
_FULL, _CLOSE = 0.85, 1e-3  # share of the card; relative difference of losses
_STEADY = range(4, 7)  # steps of which waits are counted


def run(job: Job) -> None:
    cases: dict[str, Callable[[Job, dict[str, Any]], None]] = {
        "full card": full_card,
        "recomputed dropout": recomputed_dropout,
        "complex between stages": complex_between_stages,
        **{f"host waits: {s}": partial(host_waits, s) for s in ("1f1b", "continuous")},
        "uneven loaders": uneven_loaders,
        "topk": topk,
    }
    for name in job.left(list(cases)):
        with job.case(name, seconds=SECONDS) as row:
            reset_peaks(job.device)
            cases[name](job, row)
            row.update(memory_columns(job.device))


def options_of(job: Job) -> dict[str, Any]:
    """Return what all strategies are given; a rehearsal measures no machine."""
    is_cpu = job.device.type == "cpu"
    given = {"cluster": str(ROOT / "conf" / "cluster" / "local_cpu.yaml")} if is_cpu else {}
    return {"process_group_backend": backend_of(job), **given}


def losses_of_ddp(
    make: Callable[[], pl.LightningModule],
    batches: Tensor,
    strategy: Strategy,
    job: Job,
    row: dict[str, Any],
) -> None:
    """Train under `strategy`, and under Lightning's ddp. Raises AssertionError for other losses."""
    ddp = DDPStrategy(process_group_backend=backend_of(job))
    fit(make, Batches(batches), ddp, job, expected := Record())
    fit(make, Batches(batches), strategy, job, record := Record())
    row["last_loss"], row["ddp_last_loss"] = record.losses[-1], expected.losses[-1]
    row["off_ddp"] = difference(record.losses, expected.losses)
    assert row["off_ddp"] < _CLOSE, f"losses are {row['off_ddp']:.2g} off those of ddp"


def tokens(job: Job, steps: int = STEPS) -> tuple[tuple[int, int, int, int], Tensor]:
    """Return the sizes of a GPT, gpt2_medium's on GPUs, and batches for it."""
    small = job.report.quick or job.device.type == "cpu"
    sizes = (2, 64, 4, 32) if small else (24, 1024, 16, 512)
    generator = torch.Generator().manual_seed(7)
    shape = (steps, SAMPLES, sizes[3] + 1)
    return sizes, torch.randint(0, VOCABULARY, shape, generator=generator)


# ---- a full card ---------------------------------------------------------------------------------


def full_card(job: Job, row: dict[str, Any]) -> None:
    sizes, batches = tokens(job)
    strategy = AutoParallelStrategy(plan="search", **options_of(job))
    with in_use(_FULL, job.device) as row["held_bytes"]:
        losses_of_ddp(lambda: ByteGPT(*sizes), batches, strategy, job, row)
    assert strategy.parallel_plan is not None
    row["plan"] = strategy.parallel_plan.summary()
    row["planned_by"] = strategy.planned_by


@contextmanager
def in_use(share: float, device: torch.device) -> Iterator[int]:
    """Leave so much of the card's memory to others; give the bytes that are held. None of a CPU."""
    if device.type != "cuda":
        yield 0
        return
    free, total = torch.cuda.mem_get_info(device)
    held = torch.empty(
        max(0, int(share * total) - (total - free)), dtype=torch.uint8, device=device
    )
    yield held.nbytes


# ---- what blocks take and return -----------------------------------------------------------------


@dataclass
class State:
    """What travels between blocks, in an object that pytree does not open."""

    hidden: Tensor


class DropoutBlock(nn.Module):
    """Takes its state in a dataclass alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, state: State) -> Tensor:  # (B, H) -> (B, H)
        return state.hidden + F.dropout(self.linear(state.hidden).relu(), 0.5, self.training)


class ComplexBlock(nn.Module):
    """Takes and returns complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary = (nn.Linear(_WIDTH, _WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # (B, H) -> (B, H)
        return x + torch.complex(self.real(x.real).relu(), self.imaginary(x.imag).relu())


class Blocks(pl.LightningModule):
    """Blocks of one kind, trained to return what they get."""

    def __init__(self, kind: type[nn.Module], count: int) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(count))
        self.last = nn.Linear(_WIDTH, _WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.first(batch)
        if self.kind is ComplexBlock:
            x = torch.complex(x, torch.roll(x, 1, -1))
        for block in self.blocks:
            x = block(State(x)) if self.kind is DropoutBlock else block(x)
        return F.mse_loss(self.last(x.real if x.is_complex() else x), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def numbers() -> Tensor:
    """Return batches (step, sample, feature)."""
    return torch.randn(STEPS, SAMPLES, _WIDTH, generator=torch.Generator().manual_seed(7))


def recomputed_dropout(job: Job, row: dict[str, Any]) -> None:
    strategy = AutoParallelStrategy(plan="ddp+recompute", **options_of(job))
    losses_of_ddp(lambda: Blocks(DropoutBlock, 4), numbers(), strategy, job, row)


def complex_between_stages(job: Job, row: dict[str, Any]) -> None:
    strategy = PipelineStrategy(schedule="1f1b", microbatches=4, **options_of(job))
    losses_of_ddp(lambda: Blocks(ComplexBlock, 2 * job.ranks), numbers(), strategy, job, row)


# ---- what a step waits for -----------------------------------------------------------------------


class CountedSteps(pl.Callback):
    """Counts waits of the host for its device, in steps whose loss nobody reads."""

    def __init__(self, device: torch.device, row: dict[str, Any]) -> None:
        self._row, self._counting, self._waits = row, ExitStack(), device.type == "cuda"

    def on_train_batch_start(self, *_: Any) -> None:
        """Begin at the first of the steps."""
        if _[-1] == _STEADY.start and self._waits:
            self._counting.enter_context(waiting_lines(self._row))

    def on_train_batch_end(self, *_: Any) -> None:
        """End after the last of them."""
        if _[-1] == _STEADY.stop - 1:
            self._counting.close()
            self._row["steps"] = len(_STEADY)


def host_waits(schedule: str, job: Job, row: dict[str, Any]) -> None:
    sizes, batches = tokens(job)
    layers = max(sizes[0], 2 * job.ranks)
    strategy = PipelineStrategy(schedule=schedule, **options_of(job))
    make = partial(ByteGPT, layers, *sizes[1:])
    fit(make, Batches(batches), strategy, job, CountedSteps(job.device, row))
    waits = job.largest(float(row.get("waits", 0)))  # on a CPU nobody waits for a value
    assert not waits, f"in {len(_STEADY)} steps a rank waits {waits:.0f} times for its device"


# ---- ranks that end at different times -----------------------------------------------------------


class OpenedGroups(pl.Callback):
    """Counts the process groups that are made after the first step, and the memory they take."""

    def __init__(self, device: torch.device, row: dict[str, Any]) -> None:
        self._device, self._row = device, row

    def _now(self) -> tuple[set[str], int]:
        names = {group.group_name for group in dist.distributed_c10d._world.pg_map}
        return names, memory_columns(self._device).get("used_bytes") or 0

    def on_train_batch_end(self, *_: Any) -> None:
        """Note what there is after the first step."""
        if _[-1] == 0:
            self._groups, self._used = self._now()

    def on_train_end(self, *_: Any) -> None:
        """Note what there is more."""
        groups, used = self._now()
        self._row["groups_opened"], self._row["opened_bytes"] = (
            len(groups - self._groups),
            used - self._used,
        )


def uneven_loaders(job: Job, row: dict[str, Any]) -> None:
    sizes, batches = tokens(job, STEPS + job.rank)
    strategy = AutoParallelStrategy(**options_of(job))
    callbacks = record, _ = Record(), OpenedGroups(job.device, row)
    fit(lambda: ByteGPT(*sizes), Batches(batches), strategy, job, *callbacks)
    row["steps"], row["last_loss"] = len(record.losses), record.losses[-1]
    most = job.largest(float(row["steps"]))
    assert most == row["steps"] == STEPS, f"ranks took {row['steps']} to {most:.0f} steps"
    assert not row["groups_opened"], f"{row['groups_opened']} groups were made in mid-training"


# ---- one exchange --------------------------------------------------------------------------------


def topk(job: Job, row: dict[str, Any]) -> None:
    shapes = SMALL_SHAPES if job.report.quick else SHAPES
    topology = Topology(1, job.ranks, job.rank)
    with bucket_call(TopK(), shapes, job.device, topology) as call:
        row["alone_seconds"] = job.seconds_of(call)
    module = Matrices(shapes).to(job.device)
    gradients = [torch.randn_like(parameter) for parameter in module.parameters()]
    exchange = CompressedExchange(module, TopK(), topology=topology, device=job.device)

    def average() -> None:
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        exchange.average()

    try:
        row["thread_seconds"] = job.seconds_of(average)
        trace = job.report.path.with_name("topk.json") if job.rank == 0 else None
        with counted_events(row, job.device, trace=trace):
            average()
    finally:
        exchange.close()
