"""Parameters kept out of DistributedDataParallel: each rank has its own, under any strategy."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_topt import (
    AutoParallelStrategy,
    CompressedDDPStrategy,
    LocalSteps,
    LocalStepsStrategy,
    ParallelOptimizerStep,
    TopK,
)
from tests.plugins.trainer_ranks import OwnShare, make_trainer, on_ranks, once_on_ranks


class OwnParts(L.LightningModule):
    """Has a scale, a layer and a buffer that are each rank's own."""

    def __init__(self, ignored: tuple[str, ...]) -> None:
        super().__init__()
        self._ddp_params_and_buffers_to_ignore = list(ignored)
        self.embed, self.own, self.head = nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 32)
        self.scale = nn.Parameter(torch.rand(8))
        self.register_buffer("seen", torch.rand(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        logits = self.head(self.own(self.embed(tokens)) * self.scale)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


OWN = ("own.weight", "own.bias", "scale", "seen")
IGNORED = (*OWN, ".scale")  # a parameter of the module itself has two names for DDP
STRATEGIES: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "topt": AutoParallelStrategy,
    "zero1": lambda: AutoParallelStrategy(plan="zero1"),
    "memory_limit": lambda: AutoParallelStrategy(memory_limit="1GB"),
    "all entries sent": lambda: CompressedDDPStrategy(TopK(density=1.0)),
    "a local step": lambda: LocalStepsStrategy(
        LocalSteps(every=1, outer_learning_rate=1.0, outer_momentum=0.0)
    ),
    "step shared": lambda: "ddp",
}
CALLBACKS = {"step shared": lambda: ParallelOptimizerStep(always=True)}


def fit(rank: int, kind: str, ignored: tuple[str, ...]) -> dict[str, Tensor]:
    torch.manual_seed(rank)
    module = OwnParts(ignored)
    callbacks = [CALLBACKS[kind]()] if kind in CALLBACKS else []
    make_trainer(STRATEGIES[kind](), devices=2, callbacks=callbacks).fit(module, OwnShare(8))
    return module.state_dict()


@pytest.mark.parametrize("kind", [kind for kind in STRATEGIES if kind != "ddp"])
def test_ranks_keep_their_own_as_under_ddp(kind: str) -> None:
    first, second = on_ranks(fit, kind, IGNORED)
    for expected, found in zip(once_on_ranks(fit, "ddp", IGNORED), (first, second), strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
    for name, value in first.items():
        assert value.equal(second[name]) == (name not in OWN), name
