"""Programs whose optimizers and rates count: kept gradients, closures asked again, frozen parts,
manual optimization.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.foreign.once_shelf import Built, Net, counted, mlp, traced

# ---- frozen parts and rates


class UnfreezesBody(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[:4].requires_grad_(batch_idx >= 5)
        self.trace.append([p.requires_grad for p in self.net.parameters()])


@counted("parameters unfrozen at step 5", find_unused=True, limit_train_batches=12)
def body_unfrozen_at_step_5() -> Built:
    return traced(UnfreezesBody())


class LateGroup(Net):
    """The last layer joins the optimizer at step 5, as in fine-tuning callbacks."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        if batch_idx == 5:
            optimizer.add_param_group({"params": list(self.net[4].parameters()), "lr": 1e-3})
        self.trace.append([len(group["params"]) for group in optimizer.param_groups])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net[:4].parameters(), lr=1e-2)


@counted("group of parameters added to the optimizer at step 5", limit_train_batches=12)
def late_group_of_parameters() -> Built:
    return traced(LateGroup())


# ---- optimizers


class DeltaOfGradients(torch.optim.Optimizer):
    """Adds the change of the gradient since the last step, whose tensor it keeps: `zero_grad`
    leaves it alone.
    """

    def __init__(self, params: Any, seen: list[Any], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.seen = seen

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        shared = []
        for group in self.param_groups:
            for parameter in group["params"]:
                last = self.state[parameter].get("last")
                change = torch.zeros_like(parameter.grad) if last is None else parameter.grad - last
                shared.append(last is not None and last.data_ptr() == parameter.grad.data_ptr())
                parameter.add_(parameter.grad + 0.5 * change, alpha=-group["lr"])
                self.state[parameter]["last"] = parameter.grad
        self.seen.append(any(shared))
        return loss


class KeepsGradients(Net):
    def configure_optimizers(self) -> Any:
        return DeltaOfGradients(self.parameters(), self.trace)


@counted("optimizer that keeps the tensor p.grad of the last step")
def gradients_kept_by_the_optimizer() -> Built:
    return traced(KeepsGradients())


class TrainsByCurvature(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trace.append(batch_idx)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(
            self.parameters(), lr=0.1, max_iter=3, tolerance_grad=0, tolerance_change=0
        )


@counted("LBFGS, which asks the closure three times")
def closure_asked_by_lbfgs() -> Built:
    return traced(TrainsByCurvature())


# ---- manual optimization


class Gan(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.critic = mlp(inputs=4, outputs=8), mlp(outputs=1)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        forger, critic = self.optimizers()
        noise = torch.randn(len(batch[0]), 4)
        self.toggle_optimizer(critic)
        loss = (
            F.softplus(self.critic(self.net(noise).detach())).mean()
            + F.softplus(-self.critic(batch[0])).mean()
        )
        critic.zero_grad()
        self.manual_backward(loss)
        critic.step()
        self.untoggle_optimizer(critic)
        self.trace.append("critic")
        self.log("critic", loss)
        if batch_idx % 2:
            self.toggle_optimizer(forger)
            loss = F.softplus(-self.critic(self.net(noise))).mean()
            forger.zero_grad()
            self.manual_backward(loss)
            forger.step()
            self.untoggle_optimizer(forger)
            self.trace.append("forger")

    def on_train_end(self) -> None:
        self.trace.append(self.global_step)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=1e-2), torch.optim.Adam(
            self.critic.parameters(), lr=1e-2
        )


@counted("two optimizers by manual optimization, one of them every other step", find_unused=True)
def two_optimizers_by_hand() -> Built:
    return traced(Gan())
