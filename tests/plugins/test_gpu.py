"""The strategy on CUDA; skipped without one. Two ranks need two devices for NCCL."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from lightning_topt import AutoParallelStrategy
from tests.plugins.trainer_ranks import PLANS, RecordingGPT, loader

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def fit(devices: int, strategy: Any, **options: Any) -> RecordingGPT:
    torch.manual_seed(0)
    module = RecordingGPT(layers=3)
    trainer = L.Trainer(
        accelerator="cuda",
        devices=devices,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        max_epochs=1,
        **options,
    )
    trainer.fit(module, loader(8 // devices))
    return module


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_one_device_plans_and_trains_as_under_ddp(precision: Any) -> None:
    # Not "auto": under ddp Lightning shuffles what it would not shuffle otherwise.
    expected = fit(1, "ddp", precision=precision)
    actual = fit(1, AutoParallelStrategy(memory_limit="8GiB"), precision=precision)
    assert actual.losses == pytest.approx(
        expected.losses, rel=1e-5 if precision == "32-true" else 1e-2
    )


@two_devices
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("plan", PLANS)
def test_two_devices_follow_lightnings_ddp(plan: str, precision: Any) -> None:
    # Spawned ranks give back the weights of rank 0.
    expected = fit(2, "ddp_spawn", precision=precision).state_dict()
    actual = fit(
        2, AutoParallelStrategy(plan=plan, start_method="spawn"), precision=precision
    ).state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-3, atol=1e-4)
