"""Trainers on ranks that the test started itself: it sees every rank, and may fit again."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_topt import AutoParallelStrategy, CompressedDDPStrategy
from lightning_topt.communication import read_method
from tests.launch import run_on_pool, run_ranks, torchrun_environment
from tests.models import GPT

RECOMPUTE = "+recompute"
PLANS = [
    f"{name}{suffix}" for name in ("ddp", "zero1", "zero2", "zero3") for suffix in ("", RECOMPUTE)
]


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """`length` random sequences, the same everywhere."""

    def __init__(self, length: int = 64, *, vocab: int = 32, context: int = 8) -> None:
        self.tokens = torch.randint(
            0, vocab, (length, context + 1), generator=torch.Generator().manual_seed(7)
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index, :-1], self.tokens[index, 1:]


class RecordingGPT(GPT):
    """Keeps the mean loss of each step; learns with a schedule; evaluates and predicts."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.losses: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(mean_over_ranks(outputs["loss"]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", super().training_step(batch, batch_idx), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", super().training_step(batch, batch_idx), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        # The gradient of a key bias is zero but for rounding; with a tiny eps Adam would turn that
        # noise into steps.
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        }


class SgdGPT(RecordingGPT):
    """Plain SGD: unlike Adam it shows a gradient of the wrong size, and has no state."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LoggingGPT(RecordingGPT):
    """Logs the mean of each loss in its step, by a collective call of Lightning's."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mean_loss", loss, sync_dist=True)
        return loss


def state_of(module: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of what the module has."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def mean_over_ranks(value: Tensor) -> float:
    """The mean of a scalar over the ranks (itself, in one process)."""
    value = value.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value.item()


def loader(batch_size: int, **kwargs: Any) -> DataLoader[Any]:
    """Batches of `Tokens`, in order."""
    return DataLoader(Tokens(**kwargs), batch_size=batch_size, shuffle=False)


class SaveAfterEpoch(L.Callback):
    """Saves once, after the epoch of this number."""

    def __init__(self, path: Path | str, epoch: int = 0) -> None:
        self.path, self.epoch = path, epoch

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


class OwnShare:
    """This rank's share of each global batch: together the ranks see the batches of one process, in
    the same order.

    (Under a distributed strategy Lightning shuffles even a loader that does not.)
    """

    def __init__(self, global_batch: int, **kwargs: Any) -> None:
        self.loader = loader(global_batch, **kwargs)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rank, world_size = (
            (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        )
        for tokens, targets in self.loader:
            yield tokens.chunk(world_size)[rank], targets.chunk(world_size)[rank]

    def __len__(self) -> int:
        return len(self.loader)


def make_trainer(strategy: Any = "auto", *, devices: int = 1, **kwargs: Any) -> L.Trainer:
    """A quiet Trainer on the CPU that writes nothing."""
    quiet: dict[str, Any] = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
        "max_epochs": 1,
    }
    return L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **{**quiet, **kwargs})


def topt_trainer(plan: Any = None, **kwargs: Any) -> L.Trainer:
    """A Trainer on all ranks with our strategy; keyword arguments of the strategy in `options`."""
    strategy = AutoParallelStrategy(plan=plan, **kwargs.pop("options", {}))
    return make_trainer(strategy, devices=dist.get_world_size(), **kwargs)


def compressed(
    kind: type[CompressedDDPStrategy] = CompressedDDPStrategy, **options: Any
) -> CompressedDDPStrategy:
    """Return the strategy with options of its method and of its own, told apart by their names."""
    own = {"method", *(field.name for field in fields(read_method(options.get("method", "topk"))))}
    of_method = {name: value for name, value in options.items() if name in own}
    return kind(of_method, **{name: value for name, value in options.items() if name not in own})


def on_ranks(function: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
    """Run ``function(rank, *args)`` on ranks that Lightning takes for ranks of torchrun.

    Calls share them, see `run_on_pool`: what `function` changes in modules it must restore.
    """
    return run_on_pool(_as_torchrun, world_size, function, world_size, args)


@functools.cache
def once_on_ranks(function: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
    """As `on_ranks`, for what several tests are compared with: the same arguments run once."""
    return on_ranks(function, *args, world_size=world_size)


def on_new_ranks(
    function: Callable[..., Any], *args: Any, world_size: int = 2, backend: str = "gloo"
) -> list[Any]:
    """As `on_ranks`, on ranks that are forked now and end: they see what the test has changed."""
    return run_ranks(_as_torchrun, world_size, function, world_size, args, backend=backend)


def _as_torchrun(
    rank: int, function: Callable[..., Any], world_size: int, args: tuple[Any, ...]
) -> Any:
    # the port is never used: the process group exists already
    os.environ.update(torchrun_environment(rank, world_size, port=1))
    return function(rank, *args)
