"""Losses that are means over what is not padding train in a pipeline as in one process; those that
cannot are refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_topt import AutoParallelStrategy
from tests.plugins.test_pipeline_fits import cluster, pipeline
from tests.plugins.test_pipeline_modules import split_stages
from tests.plugins.trainer_ranks import (
    RecordingGPT,
    Tokens,
    make_trainer,
    mean_over_ranks,
    on_ranks,
)

IGNORED = -100


class Padded(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of lengths that differ; two in a row may be of padding alone."""

    def __init__(self, *, empty: bool = False, full: int = 0) -> None:
        self.tokens, self.empty, self.full = Tokens(length=32).tokens, empty, full

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        targets = self.tokens[index, 1:].clone()
        length = 0 if self.empty and index % 8 in (2, 3) else 1 + (5 * index) % 8
        targets[length if index >= self.full else 8 :] = IGNORED
        return self.tokens[index, :-1], targets


class Language(RecordingGPT):
    """Its loss is a mean over what is not padding; also what it logs."""

    def __init__(self) -> None:
        super().__init__(heads=2)
        self.logged: list[float] = []

    def parts(self, batch: Any) -> tuple[Tensor, Tensor]:
        return self(batch[0]).flatten(0, 1), batch[1].flatten()

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*self.parts(batch))
        self.log("mean_loss", loss, on_epoch=True, on_step=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.logged.append(mean_over_ranks(self.trainer.callback_metrics["mean_loss_step"]))


class Smooth(Language):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, label_smoothing=0.1) / 3


class Classes(Language):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, weight=torch.linspace(0.1, 2, 32))


class ByHand(Language):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        mask = (targets != IGNORED).float()
        losses = F.cross_entropy(logits, targets, reduction="none")
        return (losses * mask).sum() / mask.sum()


class Chosen(Language):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, reduction="none")[targets != IGNORED].mean()


class Decays(Language):
    """Adds a penalty of parameters."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets) + 0.1 * self.head.weight.square().mean()


class Summed(Language):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, reduction="sum") / 100


class Normalized(Language):
    """Divides each summand: nothing says by how much all are divided."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        weights = (targets != IGNORED) / (targets != IGNORED).sum()
        return (F.cross_entropy(logits, targets, reduction="none") * weights).sum()


class Beside(Language):
    """A mean over tokens beside one over samples."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets) + 1e-3 * logits.square().mean()


class Scaled(Language):
    """Multiplies by what depends on the batch."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets) * (targets != IGNORED).float().mean()


EQUAL: dict[str, tuple[type[Language], dict[str, Any]]] = {
    "ignored": (Language, {}),
    "microbatches of padding": (Language, {"empty": True}),
    "smooth": (Smooth, {}),
    "classes": (Classes, {}),
    "by hand": (ByHand, {"empty": True}),
    "sum": (Summed, {}),
    "penalty": (Decays, {}),
    "even": (Beside, {"full": 32}),
}
REFUSED: dict[str, tuple[type[Language], dict[str, Any], str]] = {
    "normalized": (
        Normalized,
        {"full": 16},
        r"divided by 1 and 1.*and by 1 for both.*\.sum\(\) / mask\.sum",
    ),
    "chosen": (Chosen, {}, r"(?s)shape of its result depends on values.*targets != IGNORED.\.mean"),
    "scaled": (Scaled, {"full": 16}, "multiplied by a number that microbatches differ in"),
    "beside": (Beside, {}, "no weights of microbatches make it the loss of the whole batch"),
    "beside, later": (
        Beside,
        {"full": 16},
        "no weights of microbatches make it the loss of the whole batch",
    ),
}
SCHEDULES = {"ignored": "zero_bubble", "by hand": "zbv", "microbatches of padding": "zero_bubble"}


def fit(
    name: str, strategy: Any = "auto", *, ranks: int = 1, batch_size: int = 8, **kwargs: Any
) -> Any:
    kind, options = EQUAL[name] if name in EQUAL else REFUSED[name][:2]
    torch.manual_seed(0)
    module, data = kind(), Padded(**options)
    sampler = (
        DistributedSampler(data, num_replicas=1, rank=0, shuffle=False) if ranks == 1 else None
    )
    loader: Any = DataLoader(data, batch_size=batch_size, sampler=sampler)
    if ranks > 1 and not kwargs:
        kwargs = {"use_distributed_sampler": False}
    trainer = make_trainer(strategy, devices=ranks, **kwargs)
    trainer.fit(module, loader)
    logged = module.logged, float(trainer.callback_metrics["mean_loss_epoch"])
    return (
        module.losses,
        logged,
        {name: value.clone() for name, value in module.state_dict().items()},
    )


def on_two(rank: int) -> dict[str, Any]:
    found = {}
    for name in EQUAL:
        strategy = pipeline(2, microbatches=4, schedule=SCHEDULES.get(name, "1f1b"))
        found[name] = fit(name, strategy, ranks=2)
    for name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name][2]):
            fit(name, pipeline(2, microbatches=4), ranks=2)
    return found


def assert_alike(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5), "losses"
    assert found[1][0] == pytest.approx(expected[1][0], rel=1e-5), "logged"
    assert found[1][1] == pytest.approx(expected[1][1], rel=1e-5), "logged over the epoch"
    for name, value in expected[2].items():
        torch.testing.assert_close(found[2][name], value, rtol=1e-4, atol=1e-5)


def test_means_over_what_is_not_padding_are_those_of_the_batch() -> None:
    """Also where some microbatches have nothing else, which have no mean; and what would be another
    loss is refused.
    """
    results = on_ranks(on_two)
    for name in EQUAL:
        expected = fit(name)
        assert len(expected[0]) == 4
        for found in results:
            assert_alike(found[name], expected)


# ---- ranks of data -------------------------------------------------------------------------------


def in_rows(rank: int) -> Any:
    mesh = {
        "mesh": {"pipeline": 2, "data": 2},
        "schedule": "interleaved",
        "stages": 4,
        "num_microbatches": 2,
    }
    return fit(
        "ignored",
        AutoParallelStrategy(plan=mesh, cluster=cluster(4)),
        ranks=4,
        batch_size=4,
        max_epochs=1,
    )


def in_slices(rank: int) -> Any:
    return fit("ignored", AutoParallelStrategy(plan=split_stages(), cluster=cluster(4)), ranks=4)


def as_ddp(rank: int) -> Any:
    return fit("ignored", "ddp", ranks=2, batch_size=4, max_epochs=1)


def test_rows_of_pipelines_average_their_means_as_ranks_of_ddp_do() -> None:
    expected = on_ranks(as_ddp)
    for rank, found in enumerate(on_ranks(in_rows, world_size=4)):
        assert_alike(found, expected[rank % 2])


def one_row_tells(rank: int, ranks: int) -> Any:
    """The first batch of the second data rank is of padding alone, so that this row does not know
    that its loss is a sum.
    """
    torch.manual_seed(0)
    module, data, row = Summed(), Padded(), rank % 2
    batches = [[data[8 * step + 4 * row + index] for index in range(4)] for step in range(4)]
    own = [
        (torch.stack([x for x, _ in batch]), torch.stack([y for _, y in batch]))
        for batch in batches
    ]
    if row == 1:
        own[0][1].fill_(IGNORED)
    plan = {
        "mesh": {"pipeline": 2, "data": 2},
        "schedule": "interleaved",
        "stages": 4,
        "num_microbatches": 2,
    }
    strategy: Any = "ddp" if ranks == 2 else AutoParallelStrategy(plan=plan, cluster=cluster(4))
    loader: Any = DataLoader(own, batch_size=None)  # type: ignore[arg-type]
    make_trainer(strategy, devices=ranks, use_distributed_sampler=False).fit(module, loader)
    return module.losses, dict(module.state_dict())


def test_rows_learn_from_one_another_how_the_loss_adds_up() -> None:
    """They exchange gradients in the same order, whatever their own first batches have shown."""
    losses, state = on_ranks(one_row_tells, 2)[0]
    for found in on_ranks(one_row_tells, 4, world_size=4):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5)


def test_stages_in_slices_know_their_padding() -> None:
    expected = fit("ignored")
    for found in on_ranks(in_slices, world_size=4):
        assert_alike(found, expected)
