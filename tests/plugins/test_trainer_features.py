"""What users of Lightning's ``ddp`` expect of a strategy, for one plan of each way of running
(numbers: lightning features).

Each test runs on two ranks and compares with Lightning's own `DDPStrategy`, or with a value that
can be worked out.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_topt import AutoParallelStrategy
from lightning_topt.costs.measuring import RemotePlanningError
from tests.models import ConvNet
from tests.plugins.trainer_ranks import RecordingGPT, loader, make_trainer, on_ranks, topt_trainer

KINDS = ["ddp", "zero1", "zero3"]
every_kind = pytest.mark.parametrize("plan", ["zero1", "zero3"])


# ---- 1, 2: the four loops and their limits -------------------------------------------------------


def loops(rank: int, plan: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module = RecordingGPT()
    trainer = topt_trainer(plan, limit_train_batches=3, limit_val_batches=2, num_sanity_val_steps=1)
    trainer.fit(module, loader(4), loader(4))
    fitted = float(trainer.callback_metrics["val_loss"])
    validated = trainer.validate(module, loader(4), verbose=False)[0]["val_loss"]
    tested = trainer.test(module, loader(4), verbose=False)[0]["test_loss"]
    predicted = trainer.predict(module, loader(4, length=10))
    fast = topt_trainer(plan, fast_dev_run=2)
    fast.fit(RecordingGPT(), loader(4), loader(4))
    overfit = topt_trainer(plan, overfit_batches=1, max_epochs=2)
    overfit.fit(RecordingGPT(), loader(4))
    return {
        "steps": trainer.global_step,
        "losses": [fitted, validated, tested],
        "predicted": [tuple(batch.shape) for batch in predicted],
        "fast": fast.global_step,
        "overfit": overfit.global_step,
    }


@every_kind
def test_fit_validate_test_predict(plan: str) -> None:
    for result in on_ranks(loops, plan):
        assert result["steps"] == 3 and result["fast"] == 2 and result["overfit"] == 2
        # The same weights on the same data: all 8 batches in test; validation was limited to 2 of
        # them.
        assert result["losses"][0] == pytest.approx(result["losses"][1], rel=1e-6)
        # 10 samples on 2 ranks: 5 each, without repeated samples
        assert result["predicted"] == [(4, 8), (1, 8)]


# ---- 23: layer sync ------------------------------------------------------------------------------


class Images(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        data = torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(list(zip(data, torch.arange(32) % 10, strict=True)), batch_size=8)


def batch_norm(rank: int, plan: str | None) -> None:
    strategy = DDPStrategy() if plan is None else AutoParallelStrategy(plan=plan)
    with pytest.raises((ValueError, RemotePlanningError), match=r"SyncBatchNorm "):
        make_trainer(strategy, devices=2, sync_batchnorm=True).fit(ConvNet(), Images())


@pytest.mark.parametrize("plan", [None, "zero3"])
def test_sync_batchnorm_is_applied(plan: str | None) -> None:
    # torch's SyncBatchNorm runs on accelerators only: that it refuses the CPU shows that
    # Lightning's layer sync was applied.
    on_ranks(batch_norm, plan)


def buffers(rank: int) -> list[dict[str, Tensor]]:
    found = []
    for plan in KINDS:
        torch.manual_seed(rank)
        module = ConvNet()
        topt_trainer(plan).fit(module, Images())
        found.append({name: value.clone() for name, value in module.state_dict().items()})
    return found


def test_buffers_follow_rank_0() -> None:
    expected, *others = on_ranks(buffers)[0]
    for plan, state in zip(KINDS[1:], others, strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(
                state[name],
                value,
                rtol=1e-4,
                atol=1e-6,
                msg=lambda m, n=name, p=plan: f"{p} {n}: {m}",
            )
