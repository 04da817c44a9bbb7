"""StallMonitor against a clock that the loader and the step move on: every value is exact."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset

from lightning_topt.plugins import monitors
from lightning_topt.plugins.monitors import StallMonitor
from tests.clock import Clock
from tests.plugins.trainer_ranks import make_trainer

WAIT, STEP, VALIDATION = 3.0, 1.0, 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(monitors, "time", clock)
    return clock


class Items(Dataset[torch.Tensor]):
    """Every item takes `wait` seconds to fetch."""

    def __init__(self, clock: Clock, length: int = 8, *, wait: float = WAIT) -> None:
        self.clock, self.length, self.wait = clock, length, wait

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.now += self.wait
        return torch.ones(2)


class Own:
    """No DataLoader at all."""

    def __init__(self, items: Items) -> None:
        self.items = items

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self.items[index] for index in range(len(self.items)))

    def __len__(self) -> int:
        return len(self.items)


class Step(pl.LightningModule):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.layer = clock, torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.clock.now += STEP
        return sum(
            self.layer(part).mean()
            for part in (batch if isinstance(batch, list | tuple) else [batch])
        )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += VALIDATION

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TakesTheIterator(Step):
    def training_step(self, dataloader_iter: Iterator[Any]) -> torch.Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return super().training_step(batch, 0)


class Bar(TQDMProgressBar):
    """Keeps what it would show."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[Any] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        self.shown.append(self.get_metrics(trainer, pl_module).get("stall"))


def fit(
    module: Step, loader: Any, *, monitor: StallMonitor | None = None, **options: Any
) -> StallMonitor:
    monitor = monitor or StallMonitor()
    options = {"callbacks": [monitor], **options}
    validation = options.pop("validation", None)
    trainer = make_trainer(**options)
    trainer.fit(module, loader, validation)
    assert not set(monitors._HOOKS) & set(vars(trainer.fit_loop.epoch_loop))
    return monitor


def total(batches: int, *, wait: float, seconds: float) -> tuple[int, float, float]:
    return (batches, pytest.approx(seconds), pytest.approx(wait))


def test_values_of_every_report(clock, tmp_path):
    logger, bar, monitor = CSVLogger(tmp_path, name="", version=""), Bar(), StallMonitor()
    options = {
        "logger": logger,
        "log_every_n_steps": 2,
        "enable_progress_bar": True,
        "callbacks": [monitor, bar],
    }
    fit(Step(clock), DataLoader(Items(clock), batch_size=1), monitor=monitor, **options)
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["topt/data_wait_share"]]
    assert [int(row["step"]) for row in rows] == [1, 3, 5, 7]
    for row in rows:
        assert float(row["topt/data_wait_share"]) == pytest.approx(WAIT / (WAIT + STEP))
        assert float(row["topt/data_wait_seconds"]) == pytest.approx(WAIT)
        assert float(row["topt/data_batch_seconds"]) == pytest.approx(WAIT + STEP)
    assert bar.shown[0] is None and bar.shown[-1] == pytest.approx(0.75)
    assert (
        monitor.total == total(8, wait=8 * WAIT, seconds=8 * (WAIT + STEP))
        and monitor.total.fraction == 0.75
    )


def test_validation_is_no_time_of_training(clock):
    validation = DataLoader(Items(clock, 3, wait=500.0))
    monitor = fit(
        Step(clock),
        DataLoader(Items(clock)),
        validation=validation,
        val_check_interval=3,
        max_epochs=2,
    )
    assert monitor.total == total(16, wait=16 * WAIT, seconds=16 * (WAIT + STEP))


def test_batches_of_several_samples_and_accumulated_gradients(clock):
    logged = []

    class Logs(Step):
        def log(self, name: str, value: Any, **_: Any) -> None:
            logged.append((name, value))

    monitor = StallMonitor(every_n_steps=1)
    fit(
        Logs(clock),
        DataLoader(Items(clock), batch_size=2),
        monitor=monitor,
        accumulate_grad_batches=2,
    )
    assert monitor.total == total(4, wait=8 * WAIT, seconds=8 * WAIT + 4 * STEP)
    assert [value for name, value in logged if name == "topt/data_wait_seconds"] == [
        2 * WAIT,
        2 * WAIT,
    ]


@pytest.mark.parametrize("kind", ["several", "own", "iterator"])
def test_any_loader(clock, kind):
    items, module = Items(clock), Step(clock)
    loader: Any = DataLoader(items)
    waits = len(items) * WAIT
    if kind == "several":
        loader, waits = (
            CombinedLoader([DataLoader(items), DataLoader(Items(clock))], "min_size"),
            2 * waits,
        )
    elif kind == "own":
        loader = Own(items)
    else:
        module = TakesTheIterator(clock)
    monitor = fit(module, loader)
    assert monitor.total == total(8, wait=waits, seconds=waits + 8 * STEP)


class Sleeps(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.ones(2)


@pytest.mark.parametrize("workers", [0, 1])
def test_with_the_real_clock(workers):
    monitor = fit(Step(Clock()), DataLoader(Sleeps(), num_workers=workers))
    # a worker has a head start of the time that the fit takes to begin
    least = 0 if workers else 6 * 0.02
    assert least < monitor.total.wait_seconds < monitor.total.seconds


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_wait_behind_its_work_is_none(tmp_path: Path) -> None:
    class Busy(Step):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            torch.cuda._sleep(int(5e8))  # some hundred ms
            return super().training_step(batch, batch_idx)

    monitor = StallMonitor()
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, max_epochs=1, callbacks=[monitor], logger=False
    )
    trainer.fit(Busy(Clock()), DataLoader(Sleeps(), num_workers=1))
    assert monitor.total.wait_seconds < 0.5 * monitor.total.seconds
