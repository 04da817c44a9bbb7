"""Losses that are sums, or means over what is not padding, train in a pipeline as in one process;
one that is not what `microbatch_loss` says is refused.
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
        self.tokens, self.empty, self.full = Tokens(length=16).tokens, empty, full

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


class ByHand(Language):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        mask = (targets != IGNORED).float()
        losses = F.cross_entropy(logits, targets, reduction="none")
        return (losses * mask).sum() / mask.sum()


class Summed(Language):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, reduction="sum") / 100


def unpadded(batch: Any) -> Tensor:
    return (batch[1] != IGNORED).sum()


EQUAL: dict[str, tuple[type[Language], dict[str, Any], Any]] = {
    "ignored": (Language, {}, "tokens"),
    "microbatches of padding": (Language, {"empty": True}, "tokens"),
    "by hand": (ByHand, {"empty": True}, unpadded),
    "sum": (Summed, {}, "sum"),
}
REFUSED = {"ignored": "mean", "sum": "tokens"}
SCHEDULES = {"by hand": "zbv", "microbatches of padding": "zero_bubble"}
ON_TWO = (*SCHEDULES, "sum")  # the first one trains in rows, below


def fit(
    name: str, strategy: Any = "auto", *, ranks: int = 1, batch_size: int = 8, **kwargs: Any
) -> Any:
    kind, options, _ = EQUAL[name]
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
    for name in ON_TWO:
        kind, schedule = EQUAL[name][2], SCHEDULES.get(name, "1f1b")
        strategy = pipeline(2, microbatches=4, schedule=schedule, microbatch_loss=kind)
        found[name] = fit(name, strategy, ranks=2)
    for name, kind in REFUSED.items():
        with pytest.raises(ValueError, match="microbatch_loss"):
            fit(name, pipeline(2, microbatches=4, microbatch_loss=kind), ranks=2)
    return found


def assert_alike(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5), "losses"
    assert found[1][0] == pytest.approx(expected[1][0], rel=1e-5), "logged"
    assert found[1][1] == pytest.approx(expected[1][1], rel=1e-5), "logged over the epoch"
    for name, value in expected[2].items():
        torch.testing.assert_close(found[2][name], value, rtol=1e-4, atol=1e-5)


def test_means_over_what_is_not_padding_are_those_of_the_batch() -> None:
    """Also where some microbatches have nothing else, which have no mean."""
    results = on_ranks(on_two)
    for name in ON_TWO:
        expected = fit(name)
        assert len(expected[0]) == 2
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
        AutoParallelStrategy(plan=mesh, cluster=cluster(4), microbatch_loss="tokens"),
        ranks=4,
        batch_size=4,
        max_epochs=1,
    )


def as_ddp(rank: int) -> Any:
    return fit("ignored", "ddp", ranks=2, batch_size=4, max_epochs=1)


def test_rows_of_pipelines_average_their_means_as_ranks_of_ddp_do() -> None:
    expected = on_ranks(as_ddp)
    for rank, found in enumerate(on_ranks(in_rows, world_size=4)):
        assert_alike(found, expected[rank % 2])
