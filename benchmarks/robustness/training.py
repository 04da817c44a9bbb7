"""What each rank of a random trial runs: a fit that writes down, as it goes, what it trained on.

`run_rank` is called in a new process. Its records are lines of JSON in a file of this rank:

    start   where the fit begins: epoch and optimizer step
    batch   indices of the samples, and the optimizer step that they are part of
    saved   ``last.ckpt`` of this step is complete
    valid   what validation found, at which step
    sent    this rank's signal is about to be sent
    end     the fit came to its end; with its parameters
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import stat
import sys
import warnings
from pathlib import Path
from typing import Any, TextIO

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from benchmarks.common import QUIET
from benchmarks.robustness.trial import Event, Run, Trial
from lightning_topt import AutoParallelStrategy, CompressedDDPStrategy, LocalStepsStrategy

FEATURES = 4
RATE = 0.05


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Each sample is its index, and numbers that follow from it."""

    def __init__(self, items: int) -> None:
        self.items = items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(index), features_of(torch.tensor(index))


def features_of(index: Tensor) -> Tensor:
    """Return numbers from -1 to 1 for each index: [..., FEATURES]."""
    return torch.sin(index[..., None] * torch.arange(1, FEATURES + 1) * 0.37)


def new_net() -> nn.Sequential:
    """Return the net of all trials, as it is before training."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))


def losses_of(net: nn.Module, features: Tensor) -> Tensor:
    """Return the loss of each sample."""
    return (net(features).squeeze(-1) - features.sum(-1)).square()


def new_optimizer(net: nn.Module, *, adam: bool) -> torch.optim.Optimizer:
    """Return the optimizer of a trial."""
    if adam:
        return torch.optim.Adam(net.parameters(), lr=RATE, eps=1e-3)
    return torch.optim.SGD(net.parameters(), lr=RATE / 5, momentum=0.9)


class Records:
    """The lines that a rank writes."""

    def __init__(self, path: Path) -> None:
        self.file: TextIO = path.open("a", buffering=1)

    def write(self, kind: str, **values: Any) -> None:
        """Write a line, which is in the file when this returns."""
        self.file.write(json.dumps({"kind": kind, **values}) + "\n")


class Model(pl.LightningModule):
    """A small net that says what it is trained on."""

    def __init__(self, trial: Trial, records: Records) -> None:
        super().__init__()
        self.net, self.mean = new_net(), MeanMetric()
        self.trial, self.records = trial, records

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        index, features = batch
        # Before the optimizer step, which a checkpoint may follow; it counts if that has the step.
        self.records.write(
            "batch",
            epoch=self.current_epoch,
            batch=batch_idx,
            step=self.global_step + 1,
            samples=index.tolist(),
        )
        return losses_of(self.net, features).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        index, features = batch
        fixed = torch.sin(index.double() * 1.7)
        self.mean.update(fixed)
        size = len(index)
        self.log("fixed", fixed.mean(), sync_dist=True, batch_size=size)
        self.log("loss", losses_of(self.net, features).mean(), sync_dist=True, batch_size=size)
        self.log("count", float(size), sync_dist=True, reduce_fx="sum")
        self.log("mean", self.mean)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return new_optimizer(self.net, adam=self.trial.adam)


class Notes(Callback):
    """Writes where the fit begins, and what validation found."""

    def __init__(self, records: Records) -> None:
        self.records = records

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.records.write("start", epoch=trainer.current_epoch, step=trainer.global_step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.records.write("valid", step=trainer.global_step, metrics=found)


class Sends(Callback):
    """Sends this rank's signal where `event` says."""

    def __init__(self, event: Event, rank: int, records: Records) -> None:
        self.event, self.records, self.calls = event, records, 0
        self.at = dict(event.at).get(rank)

    def _reach(self, where: str) -> None:
        if where != self.event.where or self.at is None:
            return
        self.calls += 1
        if self.calls != self.at:
            return
        self.records.write("sent", signal=self.event.kind)
        if self.event.kind == "interrupt":
            os.killpg(os.getpgid(0), signal.SIGINT)
            return
        numbers = {"term": signal.SIGTERM, "usr1": signal.SIGUSR1, "kill": signal.SIGKILL}
        os.kill(os.getpid(), numbers[self.event.kind])

    def on_train_batch_start(self, *args: Any) -> None:
        self._reach("batch_start")

    def on_train_batch_end(self, *args: Any) -> None:
        self._reach("batch_end")

    def on_save_checkpoint(self, *args: Any) -> None:
        self._reach("save")

    def on_validation_batch_start(self, *args: Any) -> None:
        self._reach("validation")


class Saves(ModelCheckpoint):
    """Writes down when ``last.ckpt`` is complete."""

    records: Records

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        if Path(filepath).name.startswith(self.CHECKPOINT_NAME_LAST):
            self.records.write("saved", step=trainer.global_step)


def run_rank(trial: Trial, number: int, rank: int, folder: Path, *, own: str) -> None:
    """Run rank `rank` of run `number`: to its end, or as its event ends it.

    Args:
        trial: to run a part of.
        number: of the run in it.
        rank: of this process; the variables of torchrun are set.
        folder: of the trial, with a file ``resume`` that says where it goes on, or none.
        own: ``"topt"``, or ``"ddp"`` for Lightning's own strategy.
    """
    faulthandler.register(signal.SIGUSR2, file=sys.stderr)
    warnings.simplefilter("ignore")
    # Metrics and parameters are compared with one process; what is compressed is compared with
    # nothing, and wants single precision.
    if trial.is_exact:
        torch.set_default_dtype(torch.float64)
    run = trial.runs[number]
    records = Records(folder / "records" / f"{number}-{rank}.jsonl")
    pl.seed_everything(trial.seed % 2**32, verbose=False)
    random.seed(rank)
    model = Model(trial, records)
    torch.manual_seed(1000 * number + rank)
    saves = Saves(folder / "work" / "regular", save_last=True, every_n_train_steps=trial.save_every)
    saves.records = records
    trainer = pl.Trainer(
        **{**QUIET, "enable_checkpointing": True},
        accelerator="cpu",
        devices=run.ranks,
        strategy=strategy_of(run, own=own),
        plugins=_slurm(folder) if run.event.kind == "usr1" else None,
        max_epochs=trial.epochs,
        accumulate_grad_batches=trial.accumulate,
        num_sanity_val_steps=0,
        default_root_dir=folder / "work",
        callbacks=[Notes(records), Sends(run.event, rank, records), saves],
    )
    resume = folder / "resume"
    path = resume.read_text() if resume.exists() else None
    train, validation = loaders_of(trial, run)
    trainer.fit(model, train, validation, ckpt_path=path, weights_only=True)
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    records.write("end", step=trainer.global_step, parameters=parameters)


def strategy_of(run: Run, *, own: str) -> Any:
    """Return the strategy of a run."""
    if own == "ddp":
        return "ddp"
    if run.plan == "compressed":
        method = {"method": "topk", "density": 0.5, "momentum": 0.0}
        return CompressedDDPStrategy(method)
    if run.plan == "local_steps":
        return LocalStepsStrategy({"method": "local_steps", "every": 2})
    plan = None if run.plan == "auto" else run.plan
    return AutoParallelStrategy(plan=plan, checkpoint=run.form)


def loaders_of(trial: Trial, run: Run) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return the loaders of training and validation."""
    validation = DataLoader(
        Samples(trial.validation_items), 3, num_workers=trial.validation_workers
    )
    training = DataLoader(
        Samples(trial.items),
        run.batch_size,
        shuffle=trial.shuffle,
        drop_last=trial.drop_last,
        num_workers=run.workers,
    )
    return training, validation


def _slurm(folder: Path) -> list[Any]:
    """Return Lightning's environment of SLURM, whose ``scontrol`` does nothing."""
    program = folder / "bin" / "scontrol"
    program.parent.mkdir(exist_ok=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    os.environ["PATH"] = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    rank, ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
    os.environ.update(
        {"SLURM_JOB_ID": "17", "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0"}
        | {"SLURM_NTASKS": ranks, "SLURM_NTASKS_PER_NODE": ranks, "SLURM_JOB_NAME": "trial"}
    )
    return [SLURMEnvironment(requeue_signal=signal.SIGUSR1)]
