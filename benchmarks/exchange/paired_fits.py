"""One of several paired runs: ranks of this machine that fit a module, and leave a loss curve.

    curve = fit_on_ranks(PairedFit(make_model=..., make_data=..., make_trainer=..., how={}, ...))

All runs of a seed begin with the same weights and get the same samples. What differs is `how`: a
method of gradient exchange, a pipeline without flush, or nothing (dense synchronous training).
Each run is a fit of its own in new processes, which write into its folder:

    curve.jsonl     a line for each check: optimizer steps, loss
    facts.json      the model and the optimizer
    log.txt         what the ranks print
    error_N.json    why rank N failed
"""

from __future__ import annotations

import json
import math
import os
import random
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.multiprocessing as mp
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from typing_extensions import override

from benchmarks.exchange.paired_runs import Target, WayFailedError
from lightning_topt.basics.units import format_duration
from lightning_topt.communication.rank_watch import is_of_collective
from lightning_topt.plan.step_factors import model_words
from lightning_topt.plugins.local_steps_strategy import compressed_strategy
from lightning_topt.plugins.pipeline_strategy import PipelineStrategy

_POLL_SECONDS = 0.2
_END_SECONDS = 30.0  # for ranks that were asked to end
_PORTS = range(20000, 32000)  # the kernel gives none of these to connections


@dataclass(frozen=True)
class PairedFit:
    """All that a rank must know of a run.

    Args:
        make_model, make_data, make_trainer: called on every rank; the last one with options of the
            Trainer. They pickle.
        metric: `name` and `mode` of what validation logs.
        how: a mapping with `method`, or with a continuous `schedule`; empty: dense.
        ranks, start_method: how many are started, and how.
        seed: of first weights and samples.
        accumulate: batches of an optimizer step.
        every: steps between two values of the loss.
        last: steps after which it ends.
        most_steps: that learning-rate schedules see, equal in all runs.
        target: ends it sooner.
        folder: for what it leaves.
    """

    make_model: Callable[[], pl.LightningModule]
    make_data: Callable[[], pl.LightningDataModule]
    make_trainer: Callable[..., pl.Trainer]
    metric: Mapping[str, Any]
    how: Mapping[str, Any]
    ranks: int
    start_method: str
    seed: int
    accumulate: int
    every: int
    last: int
    most_steps: int
    target: Target | None
    folder: Path


def fit_on_ranks(job: PairedFit, *, patience: float) -> list[tuple[float, float]]:
    """Make a run and return its curve; a loss of infinity says that it diverged.

    Raises:
        WayFailedError: a rank failed, or nothing came of the run for `patience` seconds.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    for path in job.folder.iterdir():  # of a run that was killed
        path.unlink()
    start: Any = mp.start_processes  # type: ignore[attr-defined]
    options = {"nprocs": job.ranks, "join": False, "start_method": job.start_method}
    _wait(start(_run_rank, args=(job, _free_port()), **options), job, patience=patience)
    return _curve_in(job.folder)


def facts_of(job: PairedFit) -> dict[str, str]:
    """Return the `model` and the `optimizer` of a run that was made."""
    facts: dict[str, str] = json.loads((job.folder / "facts.json").read_text())
    return facts


def _wait(ranks: Any, job: PairedFit, *, patience: float) -> None:
    """Wait for the ranks of a run to end.

    Raises:
        WayFailedError: one failed, or nothing came of the run for `patience` seconds.
    """
    curve, seen, since = job.folder / "curve.jsonl", -1, time.monotonic()
    try:
        while any(process.exitcode != 0 for process in ranks.processes):
            if any(process.exitcode for process in ranks.processes):
                _note_failure(job)
                return
            size = curve.stat().st_size if curve.exists() else 0
            if size != seen:
                seen, since = size, time.monotonic()
            if time.monotonic() - since > patience:
                raise WayFailedError(
                    f"nothing came of it for {format_duration(patience)}: say a longer --timeout, "
                    f"or see {job.folder / 'log.txt'}"
                )
            time.sleep(_POLL_SECONDS)
    finally:
        for process in ranks.processes:
            if process.is_alive():
                process.kill()
        for process in ranks.processes:
            process.join(_END_SECONDS)


def _note_failure(job: PairedFit) -> None:
    """Add a point to the curve of a run that diverged. Raises WayFailedError for other failures."""
    # whoever waited for a rank that failed has failed later, and says less
    found = [json.loads(path.read_text()) for path in job.folder.glob("error_*.json")]
    found.sort(key=lambda error: (error["of_others"], error["time"]))
    if not found:
        raise WayFailedError(f"a rank was killed; see {job.folder / 'log.txt'}")
    if found[0]["type"] != FloatingPointError.__name__:
        why = f"{found[0]['type']}: {found[0]['message']}"
        raise WayFailedError(f"{why} (see {job.folder / 'log.txt'})")
    curve = _curve_in(job.folder)
    _append(job.folder, (curve[-1][0] if curve else 0) + job.every, math.inf)


def _free_port() -> int:
    """Return a port of this machine on which nobody listens."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise ValueError("100 ports of this machine are in use: end what listens there")


def _append(folder: Path, step: float, value: float) -> None:
    with (folder / "curve.jsonl").open("a") as file:
        file.write(json.dumps([step, value]) + "\n")


def _curve_in(folder: Path) -> list[tuple[float, float]]:
    path = folder / "curve.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(step, value) for step, value in map(json.loads, lines)]


# ---- one rank


def _run_rank(rank: int, job: PairedFit, port: int) -> None:
    """Be a rank of a run. What it prints goes to a file."""
    log = os.open(job.folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.ranks),
        "LOCAL_WORLD_SIZE": str(job.ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "topt_quality",
    }
    _set_num_threads_if_needed(num_processes=job.ranks)
    try:
        _fit(job)
    except BaseException as error:
        cause = {
            "type": type(error).__name__,
            "message": " ".join(str(error).split()),
            "of_others": is_of_collective(error),
            "time": time.time(),
        }
        (job.folder / f"error_{rank}.json").write_text(json.dumps(cause))
        raise


def _fit(job: PairedFit) -> None:
    """Fit the user's module as the run asks."""
    pl.seed_everything(job.seed, workers=True)
    datamodule, model = job.make_data(), job.make_model()
    trainer = job.make_trainer(
        strategy=_strategy(job),
        devices=job.ranks,
        num_nodes=1,
        callbacks=[LossCurve(job)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        # the length that schedulers see is that of the longest run, for all runs
        max_steps=job.most_steps,
        max_epochs=-1,
        val_check_interval=job.every * job.accumulate,
        check_val_every_n_epoch=None,
    )
    trainer.fit(model, datamodule=datamodule)


def _strategy(job: PairedFit) -> Any:
    if "schedule" in job.how:
        return PipelineStrategy(**job.how)
    if job.ranks == 1:
        return "auto"
    return compressed_strategy(dict(job.how) or "dense")


class LossCurve(pl.Callback):
    """Keeps the curve of a run, and ends it when its target says so.

    The loss is the metric that validation logs, or the mean of the training loss since the last
    check where the module has no validation. It is the mean over the ranks.
    """

    def __init__(self, job: PairedFit) -> None:
        self.job = job
        self.curve: list[tuple[float, float]] = []
        self._losses: list[float] = []  # of the batches since a check
        self._step, self._model = 0, ""

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        parameters = sum(parameter.numel() for parameter in pl_module.parameters())
        self._model = model_words(type(pl_module).__name__, parameters)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"factors are measured of one optimizer, and {type(pl_module).__name__} has "
                f"{len(trainer.optimizers)}"
            )
        if "schedule" in self.job.how and not trainer.enable_validation:
            raise ValueError(
                "a pipeline without flush returns losses late, so its way is compared by what "
                "validation_step logs: give the module one"
            )
        if trainer.is_global_zero:
            facts = {"model": self._model, "optimizer": type(trainer.optimizers[0]).__name__}
            (self.job.folder / "facts.json").write_text(json.dumps(facts))

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.enable_validation:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not torch.is_tensor(loss):
            raise ValueError(
                "the training step returns no loss, and nothing is validated: let validation_step "
                "log a metric, and say metric.name=<its name>"
            )
        self._losses.append(float(loss))
        step, before = trainer.global_step, self._step
        self._step = step
        if step != before and step % self.job.every == 0:
            value = sum(self._losses) / len(self._losses)
            self._losses.clear()
            self._check(trainer, step, value)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        name = self.job.metric.get("name")
        if name not in trainer.callback_metrics:
            raise ValueError(
                f"validation logs no {name!r}: say metric.name=, one of "
                f"{', '.join(sorted(trainer.callback_metrics)) or 'what validation_step logs'}"
            )
        sign = -1.0 if self.job.metric.get("mode") == "max" else 1.0
        self._check(trainer, trainer.global_step, sign * float(trainer.callback_metrics[name]))

    def _check(self, trainer: pl.Trainer, step: int, value: float) -> None:
        """Add a point, which is equal on all ranks, and end the run where that is due."""
        if self.curve and step <= self.curve[-1][0]:
            return
        own = torch.tensor(value, device=trainer.strategy.root_device, dtype=torch.float32)
        mean = float(trainer.strategy.reduce(own, reduce_op="mean"))
        value = mean if math.isfinite(mean) else math.inf
        self.curve.append((step, value))
        if trainer.is_global_zero:
            _append(self.job.folder, step, value)
        target = self.job.target
        ends = not math.isfinite(value) if target is None else target.verdict(self.curve)
        if ends or step >= self.job.last:
            trainer.should_stop = True
