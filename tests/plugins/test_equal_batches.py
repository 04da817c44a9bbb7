"""Ranks with different numbers of batches end an epoch together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_topt import AutoParallelStrategy, LocalStepsStrategy
from lightning_topt.plugins import equal_batches
from tests.models import GPT
from tests.plugins.trainer_ranks import compressed, make_trainer, on_ranks


class Batches:
    """The batches of one rank, with a length."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(self.count):
            generator = torch.Generator().manual_seed(1000 * self.rank + index)
            tokens = torch.randint(0, 32, (3, 9), generator=generator)
            yield tokens[:, :-1], tokens[:, 1:]


class Stream(IterableDataset[Any]):
    """The same without a length."""

    def __init__(self, rank: int, count: int) -> None:
        self.batches = Batches(rank, count)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def loader_of(kind: str, rank: int, count: int) -> Any:
    if kind != "length":
        return DataLoader(Stream(rank, count), batch_size=None)
    return Batches(rank, count)


class Seen(GPT):
    """Counts its batches and validations."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.batches, self.validations = list[int](), 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches.append(batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)

    def on_validation_end(self) -> None:
        self.validations += not self.trainer.sanity_checking


def strategy_of(plan: str) -> Any:
    if plan == "compressed":
        return compressed(method="bf16")
    return LocalStepsStrategy() if plan == "local steps" else AutoParallelStrategy(plan=plan)


def fit(rank: int, plan: str, counts: list[int], kind: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    trainer, module = make_trainer(strategy_of(plan), devices=len(counts), **options), Seen()
    with pytest.MonkeyPatch.context() as patch:
        if kind == "no network of hosts":  # votes go the way of gradients
            patch.setattr(equal_batches, "host_group", lambda: None)
        trainer.fit(module, loader_of(kind, rank, counts[rank]), Batches(rank, 2))
    state = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    return state, trainer.global_step, module.batches, module.validations


@pytest.mark.parametrize(
    ("plan", "kind", "options"),
    [
        ("ddp", "length", {"max_epochs": 2}),
        ("ddp", "stream", {"max_epochs": 2}),
        ("zero3", "no network of hosts", {}),
        ("zero2", "length", {"accumulate_grad_batches": 2}),
        ("compressed", "stream", {}),
        ("local steps", "length", {"val_check_interval": 0.5}),
    ],
)
def test_ranks_end_an_epoch_with_the_first(plan: str, kind: str, options: dict[str, Any]) -> None:
    first, second = on_ranks(fit, plan, [5, 3], kind, {"max_epochs": 1, **options})
    assert torch.equal(first[0], second[0])
    assert first[1:] == second[1:]
    epochs, window = options.get("max_epochs", 1), options.get("accumulate_grad_batches", 1)
    assert first[1] == epochs * -(-3 // window)
    assert first[2] == epochs * [0, 1, 2]
    assert first[3] == epochs if "val_check_interval" not in options else first[3] >= 2


def _evaluate(rank: int, plan: str, kind: str) -> str:
    trainer, module = make_trainer(strategy_of(plan), devices=2, max_epochs=1), Seen()
    try:
        trainer.fit(module, Batches(rank, 2), loader_of(kind, rank, 1 + rank))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("plan", "kind"), [("zero3", "length"), ("zero3", "stream"), ("zero1", "stream")]
)
def test_an_evaluation_in_shards_needs_equal_numbers(plan: str, kind: str) -> None:
    for said in on_ranks(_evaluate, plan, kind):
        assert ("batches to evaluate" in said) == (plan == "zero3") == bool(said)
