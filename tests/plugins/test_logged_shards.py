"""What is logged of parameters in shards: whole values, on all ranks, as under ddp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.plugins.trainer_ranks import RecordingGPT, loader, on_ranks, topt_trainer


class LoggingNorms(RecordingGPT):
    """Logs the norm of each step's gradients; a progress bar would read it on rank 0 alone."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.norms: list[float] = []
        self.are_whole: list[bool] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters()])
        self.log("norm", norm, on_step=True, on_epoch=True, prog_bar=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        value = self.trainer.callback_metrics["norm_step"]
        self.are_whole.append(not isinstance(value, DTensor))
        if self.global_rank == 0:
            self.norms.append(float(value))


def _logged(rank: int, plan: str) -> tuple[list[float], float, list[bool], bool]:
    torch.manual_seed(0)
    module = LoggingNorms()
    trainer = topt_trainer(plan, limit_train_batches=4)
    trainer.fit(module, loader(4))
    results = trainer.fit_loop.epoch_loop._results
    epoch = float(trainer.callback_metrics["norm_epoch"])
    return module.norms, epoch, module.are_whole, "log" in vars(results)


@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_logged_norms_are_whole(plan: str):
    wanted, wanted_epoch, _, _ = on_ranks(_logged, "ddp")[0]
    found = on_ranks(_logged, plan)
    norms, epoch, _, _ = found[0]
    assert norms == pytest.approx(wanted, rel=1e-4) and len(norms) == 4
    assert epoch == pytest.approx(wanted_epoch, rel=1e-4)
    for _, _, are_whole, is_lent in found:
        assert all(are_whole) and not is_lent
