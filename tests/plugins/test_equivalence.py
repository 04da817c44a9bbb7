"""Every plan under a Trainer has the loss curve and the parameters of one process without any
strategy.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.plugins.trainer_ranks import (
    PLANS,
    RECOMPUTE,
    LoggingGPT,
    OwnShare,
    loader,
    make_trainer,
    on_ranks,
    topt_trainer,
)

GLOBAL_BATCH, LENGTH = 8, 40
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"max_epochs": 2},
    "clip by norm": {"gradient_clip_val": 0.1},
    "clip by value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    "accumulate": {"accumulate_grad_batches": 2},
}


@functools.cache
def one_process(option: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    module = LoggingGPT(layers=3)
    make_trainer(**OPTIONS[option]).fit(module, loader(GLOBAL_BATCH, length=LENGTH))
    return module.losses, module.state_dict()


def fit(rank: int, plan: str, option: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(rank)
    module, trainer = LoggingGPT(layers=3), topt_trainer(plan, **OPTIONS[option])
    trainer.fit(module, OwnShare(GLOBAL_BATCH, length=LENGTH))
    last = module.losses[-1] * trainer.accumulate_grad_batches  # by which Lightning divides it
    assert float(trainer.callback_metrics["mean_loss"]) == pytest.approx(last)
    return module.losses, module.state_dict()


# Recomputation meets neither clipping nor accumulation.
CASES = [(p, o) for p in PLANS for o in OPTIONS if o == "plain" or not p.endswith(RECOMPUTE)]


@pytest.mark.parametrize(("plan", "option"), CASES)
def test_loss_curve_and_parameters(plan: str, option: str) -> None:
    losses, state = one_process(option)
    for rank_losses, rank_state in on_ranks(fit, plan, option):
        assert rank_losses == pytest.approx(losses, rel=1e-5)
        assert rank_state.keys() == state.keys()
        for name, expected in state.items():
            # float32 sums of two ranks in another order, amplified by AdamW's division over 10
            # steps
            torch.testing.assert_close(
                rank_state[name], expected, rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
