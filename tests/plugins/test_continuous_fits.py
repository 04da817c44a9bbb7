"""Modules in a pipeline that never flushes, under a Trainer: weights, logs, metrics, files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from examples.recipes.basis_rotation import BasisRotation
from lightning_topt import PipelineStrategy
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES, lag_of
from lightning_topt.weight_prediction import TwoVersions
from tests.plugins.continuous_twin import ChainTwin
from tests.plugins.test_pipeline_fits import cluster
from tests.plugins.trainer_ranks import make_trainer, on_ranks

WIDTH, CLASSES = 6, 3


class Points(Dataset[tuple[Tensor, Tensor]]):
    """`length` points of `CLASSES` classes, the same everywhere."""

    def __init__(self, length: int) -> None:
        draw = torch.Generator().manual_seed(3)
        self.points = torch.randn(length, WIDTH, generator=draw)
        self.classes = torch.randint(0, CLASSES, (length,), generator=draw)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.classes[index]


def points(length: int = 40) -> DataLoader[Any]:
    return DataLoader(Points(length), batch_size=4, shuffle=False)


def sgd(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(in_groups(named), lr=0.1, momentum=0.9)


def adamw(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(in_groups(named), lr=0.01)


def rotated(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return BasisRotation(in_groups(named), lr=0.01, refresh_every=3)


def in_groups(named: Sequence[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Biases are not decayed, and learn more slowly."""
    decayed = [p for name, p in named if name.endswith("weight")]
    others = [p for name, p in named if name.endswith("bias")]
    return [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "lr": 0.05, "weight_decay": 0.0},
    ]


def factor(update: int) -> float:
    return 1 / (1 + 0.1 * update)


class Net(L.LightningModule):
    """Six blocks that can be stages; logs, counts, and learns with a rate schedule."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer] = sgd) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [WIDTH, *[8] * 5]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)
        )
        self.head = nn.Linear(8, CLASSES)
        self.right = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.make = make
        self.batches: list[Any] = []
        self.outputs: list[tuple[float, int]] = []
        self.logged: list[tuple[float, float]] = []
        self.epochs: list[dict[str, float]] = []
        self.updates = 0

    def forward(self, points: Tensor) -> Tensor:
        for layer in self.layers:
            points = layer(points)
        logits: Tensor = self.head(points)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        logits = self(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.right(logits.argmax(-1), batch[1])
        self.log("right", self.right, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("samples", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum")
        return {"loss": loss, "index": batch_idx}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.updates += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append((float(outputs["loss"]), outputs.get("index", -1)))
        one, other = (self.trainer.callback_metrics[name] for name in ("loss", "loss_step"))
        self.logged.append((float(one), float(other)))

    def on_train_epoch_end(self) -> None:
        names = ("loss_epoch", "right", "samples", "val_loss", "updated")
        metrics = self.trainer.callback_metrics
        self.epochs.append({name: float(metrics[name]) for name in names if name in metrics})

    def configure_optimizers(self) -> Any:
        optimizer = self.make([*self.named_parameters()])
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


@dataclass
class Fit:
    """A fit on batches of four, the last of an epoch smaller: `options` of the strategy, `trainer`
    of the Trainer; drained before the batches in `ends`.
    """

    options: dict[str, Any]
    trainer: dict[str, Any]
    ends: Sequence[int] = ()
    length: int = 22
    make: Callable[..., torch.optim.Optimizer] = sgd
    callbacks: Callable[[], list[Any]] = field(default=list)

    def run(self, rank: int, ranks: int) -> dict[str, Any]:
        module = Net(self.make)
        strategy = PipelineStrategy(
            cluster=cluster(ranks), **{"schedule": "continuous", **self.options}
        )
        trainer = make_trainer(strategy, devices=ranks, callbacks=self.callbacks(), **self.trainer)
        trainer.fit(module, points(self.length), points(8))
        assert strategy.parallel_plan is not None
        return {
            "state": {name: value.clone() for name, value in module.state_dict().items()},
            "batches": module.batches,
            "outputs": module.outputs,
            "logged": module.logged,
            "epochs": module.epochs,
            "updates": module.updates,
            "steps": trainer.global_step,
            "plan": strategy.parallel_plan.to_dict(),
            "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        }


FITS = {
    "plain": Fit({"prediction": "none"}, {"max_epochs": 2}, ends=(6,)),
    "overlapped": Fit(
        {"schedule": "continuous_overlapped", "prediction": "spectrain"},
        {"max_epochs": 2},
        ends=(10,),
        length=38,
        make=adamw,
    ),
    "in between": Fit(
        {"prediction": "spectrain"}, {"max_epochs": 1, "val_check_interval": 3}, ends=(3,)
    ),
    "accumulated": Fit(
        {"prediction": "spectrain"},
        {
            "max_epochs": 2,
            "accumulate_grad_batches": 3,
            "gradient_clip_val": 0.3,
            "val_check_interval": 4,
        },
        ends=(4, 8, 10, 14, 18),
        length=38,
    ),
    # an optimizer from elsewhere, of which no default is known
    "rotated": Fit(
        {"prediction": {"rule": "two_versions", "error_feedback": True}},
        {"max_epochs": 2, "accumulate_grad_batches": 2},
        ends=(6,),
        make=rotated,
    ),
    # the first two updates wait, the third begins an asynchronous part
    "late start": Fit(
        {"prediction": {"rule": "two_versions", "error_feedback": True, "synchronous_updates": 2}},
        {"max_epochs": 2, "accumulate_grad_batches": 2},
        ends=(2, 4, 6),
        make=adamw,
    ),
    "some steps, clipped by value": Fit(
        {},
        {
            "max_steps": 7,
            "max_epochs": -1,
            "limit_train_batches": 5,
            "gradient_clip_val": 0.01,
            "gradient_clip_algorithm": "value",
        },
        ends=(5,),
    ),
}


def fits(rank: int, ranks: int, names: Sequence[str]) -> dict[str, Any]:
    return {name: FITS[name].run(rank, ranks) for name in names}


def expected(fit: Fit, found: dict[str, Any], batches: Sequence[Any], *, epoch: int = 10) -> Any:
    most, by_value = fit.trainer.get("gradient_clip_val"), "gradient_clip_algorithm" in fit.trainer
    return ChainTwin(
        Net(fit.make),
        ParallelPlan.from_dict(found["plan"]),
        batches,
        optimizer=lambda named: fit.make(named),
        ends=fit.ends,
        epoch=epoch,
        accumulate=fit.trainer.get("accumulate_grad_batches", 1),
        clip=None if by_value else most,
        clip_value=most if by_value else None,
        factor=factor,
    ).train()


def assert_equals(fit: Fit, found: dict[str, Any], twin: Any) -> None:
    for name, value in twin.state.items():
        torch.testing.assert_close(found["state"][name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_weights_are_those_of_the_schedule_action_by_action(ranks: int) -> None:
    more = ["overlapped", "accumulated"]  # lags that differ between stages say more
    names = more if ranks == 4 else [name for name in FITS if name not in more]
    results = on_ranks(fits, ranks, names, world_size=ranks)
    for name in names:
        fit, first = FITS[name], results[0][name]
        epoch = fit.trainer.get("limit_train_batches", -(-fit.length // 4))
        twin = expected(fit, first, first["batches"], epoch=epoch)
        plan = ParallelPlan.from_dict(first["plan"])
        lag = CONTINUOUS_SCHEDULES[plan.schedule or ""]
        assert plan.mesh.pipeline_size == ranks and plan.weight_prediction is not None
        for rank, found in enumerate(one[name] for one in results):
            assert_equals(fit, found, twin)
            # Lightning shows the loss divided by it
            each = fit.trainer.get("accumulate_grad_batches", 1)
            losses = {index: float(loss) / each for index, loss in twin.losses.items()}
            assert_heard(found, losses, fit.ends, lag_of(rank, num_ranks=ranks, lag_per_hop=lag))
            for what in ("steps", "rates", "metrics", "epochs", "updates"):
                assert found[what] == first[what], (name, what)
        assert first["updates"] == first["steps"]
        if name == "rotated":
            assert plan.weight_prediction == TwoVersions(error_feedback=True)
        if fit.trainer.get("max_epochs") == 2:
            assert_means(first, twin, fit.length)


def assert_heard(
    found: dict[str, Any], losses: dict[int, float], ends: Sequence[int], lag: int
) -> None:
    """In iteration i a rank sees the output of batch i - lag, unless none has come back since the
    last drain.
    """
    starts = [0, *ends]
    for i, (loss, index) in enumerate(found["outputs"]):
        start = max(place for place in starts if place <= i)
        back = i - lag
        assert math.isnan(loss) if back < start else loss == pytest.approx(losses[back], rel=1e-4)
        assert (index == -1) == (back < start)
    # What a step logs is there from the first batch on, as under ddp: NaN until one has come back,
    # by the first drain at the latest, which comes before hooks at the end of a batch.
    first = min([lag, *(end - 1 for end in ends)])
    for i, values in enumerate(found["logged"]):
        assert [math.isnan(value) for value in values] == [i < first] * 2


def assert_means(found: dict[str, Any], twin: Any, length: int) -> None:
    """Means of an epoch count every batch by its samples, also those that come at the end."""
    assert len(found["epochs"]) == 2
    for number, epoch in enumerate(found["epochs"]):
        places = range(len(twin.losses) // 2 * number, len(twin.losses) // 2 * (number + 1))
        sizes = [len(found["batches"][place][0]) for place in places]
        mean = sum(
            float(twin.losses[place]) * size for place, size in zip(places, sizes, strict=True)
        ) / sum(sizes)
        assert (
            epoch["loss_epoch"] == pytest.approx(mean, rel=1e-5)
            and epoch["samples"] == sum(sizes) == length
        )


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Points that come as long as they come."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([Points(26)[index] for index in range(26)])


class OwnPoints(Points):
    """Every rank has others."""

    def __init__(self, rank: int) -> None:
        super().__init__(60)
        self.points, self.classes = self.points[20 * rank :][:24], self.classes[20 * rank :][:24]


def unusual(rank: int) -> dict[str, Any]:
    found = {}
    for name, data in (("stream", Stream()), ("other batches", OwnPoints(rank))):
        module = Net(adamw)
        strategy = PipelineStrategy(
            schedule="continuous_overlapped", prediction="multistep", cluster=cluster(2)
        )
        trainer = make_trainer(strategy, devices=2, max_epochs=2, use_distributed_sampler=False)
        trainer.fit(module, DataLoader(data, batch_size=4), points(8))
        assert strategy.parallel_plan is not None
        found[name] = {
            "state": {key: value.clone() for key, value in module.state_dict().items()},
            "batches": module.batches,
            "epochs": module.epochs,
            "plan": strategy.parallel_plan.to_dict(),
        }
    return found


def test_loaders_without_a_length_and_ranks_with_other_batches() -> None:
    first, second = on_ranks(unusual)
    for name, epoch in (("stream", 7), ("other batches", 6)):
        plan, batches = ParallelPlan.from_dict(first[name]["plan"]), first[name]["batches"]
        assert len(batches) == 2 * epoch and first[name]["epochs"] == second[name]["epochs"]
        twin = ChainTwin(
            Net(adamw), plan, batches, optimizer=adamw, ends=(epoch,), epoch=epoch, factor=factor
        ).train()
        for key, value in twin.state.items():
            torch.testing.assert_close(first[name]["state"][key], value, rtol=1e-5, atol=1e-6)
            assert torch.equal(second[name]["state"][key], first[name]["state"][key])
