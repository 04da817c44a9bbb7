"""Steady steps of pipelines over a twin of NCCL: no host waits for its device."""

from __future__ import annotations

import collections
import math
from contextlib import ExitStack
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate
from typing_extensions import override

from lightning_topt.plugins import stage_steps
from tests.host_waits import package_waits
from tests.models import GPT
from tests.nccl_twin import TWIN
from tests.plugins.test_pipeline_fits import pipeline
from tests.plugins.trainer_ranks import Tokens, make_trainer, on_new_ranks

STEPS, WARM = 10, 5


class Batch(NamedTuple):
    """Knows where it is."""

    tokens: Tensor
    targets: Tensor
    place: str = "host"

    def to(self, *_: Any, **__: Any) -> Batch:
        return self._replace(place="device")


class Logging(GPT):
    """Logs its loss and more, with an embedding that the first and the last stage share."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch[:2], batch_idx)
        self.log_dict({"loss": loss, "twice": 2 * loss, "rate": 0.1})
        return {"loss": loss, "targets": batch.targets}

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)  # Adam's count is on a CPU


class Counting(L.Callback):
    """Counts waits of the package in steady steps."""

    def __init__(self) -> None:
        self.waits: collections.Counter[str] = collections.Counter()
        self.within, self.losses = ExitStack(), list[float]()

    @override
    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        if WARM <= index < STEPS:
            self.within.enter_context(package_waits(self.waits))

    @override
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.within.close()
        self.losses.append(float(outputs["loss"]))


def fits(rank: int, schedule: str, microbatches: int) -> Any:
    counting, places = Counting(), list[str]()

    def samples(batch: Batch) -> float:
        places.append(batch.place)
        return float(len(batch.tokens))

    def seen(batch: Batch, own: Any = stage_steps.checksum) -> int:
        places.append(batch.place)
        return int(own(batch))

    stage_steps.checksum = seen
    sizes: dict[str, Any] = {"schedule": schedule, "microbatches": microbatches}
    strategy, clip = pipeline(2, microbatch_loss=samples, **sizes), {"gradient_clip_val": 0.5}
    torch.manual_seed(0)
    collated = lambda each: Batch(*default_collate(each))  # noqa: E731
    data: Any = DataLoader(Tokens(128), batch_size=8, collate_fn=collated)
    trainer = make_trainer(strategy, devices=2, callbacks=[counting], max_steps=STEPS + 2, **clip)
    trainer.fit(Logging(layers=3, tied=True), data)
    return dict(counting.waits), counting.losses, set(places[4:])


@pytest.mark.parametrize(("schedule", "microbatches"), [("1f1b", 4), ("continuous", 1)])
def test_no_host_waits_for_its_device(schedule: str, microbatches: int) -> None:
    for waits, losses, places in on_new_ranks(fits, schedule, microbatches, backend=TWIN):
        assert len(losses) > STEPS and all(map(math.isfinite, losses[WARM:]))
        assert waits == {} and places <= {"host"}
