"""Steps of manual optimization on copies: their graph has the work of all their passes."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from lightning_topt.graph.capture import capture, observe_step
from lightning_topt.graph.errors import CaptureError
from lightning_topt.graph.op_graph import OpGraph
from tests.graph.measure import flops_of

BATCH = torch.ones(4, 8)


def layers(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))


class Forger(L.LightningModule):
    """The loss of a generator, whose critic stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.critic = layers(8, 8), layers(8, 1)

    def fooled(self, batch: Tensor) -> Tensor:
        return softplus(-self.critic(self.net(batch))).mean()

    def judged(self, batch: Tensor) -> Tensor:
        made = self.net(batch).detach()
        return (softplus(-self.critic(batch)) + softplus(self.critic(made))).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.critic.requires_grad_(False)
        return self.fooled(batch)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters()) for part in (self.net, self.critic)]


class Critic(Forger):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.judged(batch)


class Both(Forger):
    """Both in turn, with all that manual optimization offers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        forger, critic = self.optimizers()
        self.toggle_optimizer(forger)
        loss = self.fooled(batch)
        forger.zero_grad()
        self.manual_backward(loss)
        assert all(p.grad is not None for p in self.net.parameters())
        assert all(p.grad is None for p in self.critic.parameters())
        self.clip_gradients(forger, gradient_clip_val=1.0)
        forger.step()
        forger.zero_grad()
        assert all(p.grad is None for p in self.net.parameters())
        self.untoggle_optimizer(forger)

        def closure() -> Tensor:
            loss = self.judged(batch)
            self.manual_backward(loss)
            return loss

        with critic.toggle_model():
            assert critic.step(closure=closure).requires_grad
        critic.zero_grad()
        assert all(p.requires_grad for p in self.parameters())
        first, second = self.lr_schedulers()
        first.step()
        second.step()

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        return made, [torch.optim.lr_scheduler.StepLR(each, 1) for each in made]


def work(graph: OpGraph) -> float:
    return sum(
        flops_of(op, direction, 4) for op in graph.ops for direction in ("forward", "backward")
    )


@pytest.mark.parametrize("see", [capture, observe_step])
def test_several_passes_are_one_step(see: Any) -> None:
    both, parts = see(Both(), BATCH), [see(kind(), BATCH) for kind in (Forger, Critic)]
    assert work(both) == sum(map(work, parts)) and both.unused == ()
    assert both.manual_passes == 2 and parts[0].manual_passes == 0
    # the critic is called three times, and each layer of it is a block nevertheless
    assert {block.name for block in both.blocks} > {"critic.0", "critic.2"}
    assert not any(block.recomputable for block in both.blocks if "critic" in block.name)


def test_a_step_without_a_loss_is_named() -> None:
    class Silent(Both):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.manual_backward(self.judged(batch).detach())

    with pytest.raises(CaptureError, match="no loss that depends on"):
        capture(Silent(), BATCH)
