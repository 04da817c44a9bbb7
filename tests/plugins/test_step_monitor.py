"""StepMonitor against steps of known length and size."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.plan.parallel_plan import preset_plan
from lightning_topt.plan.plan_values import PRESETS, StepEstimate
from lightning_topt.plugins import monitors
from lightning_topt.plugins.monitors import StepMonitor
from tests.clock import Clock

MIB = 2**20
linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(monitors, "time", clock)
    return clock


class Known(pl.LightningModule):
    """Steps that take a second, the first two a hundred, and allocate what they are told."""

    def __init__(self, clock=None, *, step_bytes=0, val_bytes=0):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.clock = clock or Clock()
        self.step_bytes, self.val_bytes = step_bytes, val_bytes

    def training_step(self, batch, batch_idx):
        self.clock.now += 100 if self.global_step < 2 else 1
        torch.ones(self.step_bytes, dtype=torch.uint8)
        return self.layer(batch).mean()

    def validation_step(self, batch, batch_idx):
        torch.ones(self.val_bytes, dtype=torch.uint8)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module, *, warmup_steps=2, batches=12, **options):
    monitor = StepMonitor(warmup_steps=warmup_steps)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, callbacks=[monitor], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **options,
    )  # fmt: skip
    loader = DataLoader(torch.ones(batches, 1))
    trainer.fit(module, loader, DataLoader(torch.ones(2, 1)))
    return monitor.measurement


def test_median_leaves_out_the_first_steps(clock):
    measurement = fit(Known(clock), batches=4)
    assert (measurement.steps, measurement.median_step_seconds) == (2, 1)


def test_a_step_is_all_batches_of_an_accumulated_gradient(clock):
    measurement = fit(Known(clock), accumulate_grad_batches=3)
    assert (measurement.steps, measurement.median_step_seconds) == (2, 3)


class Logged(DummyLogger):
    """Keeps what is logged of ours."""

    def __init__(self):
        super().__init__()
        self.steps = {}

    def log_metrics(self, metrics, step=None):
        if "topt/step_seconds" in metrics:
            self.steps[step] = {name: metrics[name] for name in metrics if "topt/" in name}


class Planned(SingleDeviceStrategy):
    """A strategy that runs a plan of a known prediction, for steps of two batches."""

    parallel_plan = dataclasses.replace(
        preset_plan(PRESETS["ddp"], mesh=data_mesh(2)),
        predicted=StepEstimate(7.0, MIB, 7.0, 0.0),
        accumulate=2,
    )


@linux
@pytest.mark.parametrize("accumulates", [1, 2])
def test_steps_are_logged_beside_what_was_predicted(clock, accumulates):
    logger = Logged()
    trainer = pl.Trainer(
        strategy=Planned(torch.device("cpu")), max_epochs=1, callbacks=[StepMonitor()],
        logger=logger, log_every_n_steps=2, accumulate_grad_batches=accumulates,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Known(clock), DataLoader(torch.ones(4 * accumulates, 1)))
    # by the step as Lightning counts when it logs; the first two took a hundred seconds a batch
    assert [each["topt/step_seconds"] for each in logger.steps.values()] == [
        100 * accumulates,
        accumulates,
    ]
    for each in logger.steps.values():
        assert each["topt/peak_bytes"] >= 0
        assert each.get("topt/predicted_step_seconds") == (7 if accumulates == 2 else None)


@linux
def test_peak_is_that_of_training_steps_not_of_validation():
    module = Known(step_bytes=64 * MIB, val_bytes=256 * MIB)
    measurement = fit(module, val_check_interval=4)
    (peak,) = measurement.peak_bytes_per_rank
    assert 60 * MIB < peak < 80 * MIB
