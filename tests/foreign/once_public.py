"""Programs in the manner of public ones that read or write parameters and gradients themselves:
contrastive learners, teachers and averages, optimizers around optimizers, penalties and hooks.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn

from tests.foreign.once_shelf import Built, Net, counted, mlp, traced


def smooth() -> nn.Sequential:
    """As `mlp`; has a second derivative."""
    return nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5)
    )


# ---- teachers


class Teacher(Net):
    """Learns from a frozen copy that follows it after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(batch[0] + 0.1).softmax(-1)
        return super().training_step(batch, batch_idx) + F.cross_entropy(self.net(batch[0]), wanted)

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trace.append("moved")
        for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            slow.mul_(0.9).add_(fast, alpha=0.1)


@counted("mean teacher, or momentum encoder")
def teacher_in_place() -> Built:
    return traced(Teacher())


class MoCo(Net):
    """As published: parameters of the key encoder are set by `.data`, keys go to a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder_q, self.net = mlp(outputs=16), nn.Identity()
        self.encoder_k = copy.deepcopy(self.encoder_q)
        for parameter in self.encoder_k.parameters():
            parameter.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(16, 32), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def keys(self, x: Tensor) -> Tensor:
        pairs = zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True)
        for param_q, param_k in pairs:
            param_k.data = param_k.data * 0.9 + param_q.data * 0.1
        return F.normalize(self.encoder_k(x), dim=1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        q = F.normalize(self.encoder_q(batch[0]), dim=1)
        k = self.keys(batch[0].flip(-1))
        positive = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([positive, negative], dim=1) / 0.2
        gathered = self.all_gather(k).flatten(0, 1)
        start = int(self.queue_ptr)
        self.queue[:, start : start + len(gathered)] = gathered.T
        self.queue_ptr[0] = (start + len(gathered)) % self.queue.shape[1]
        self.trace.append(start)
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


@counted("MoCo: momentum encoder and queue inside of the step")
def moco() -> Built:
    return traced(MoCo())


# ---- averages


class OwnAverage(Net):
    """An average by hand, copied when the fit starts."""

    def on_fit_start(self) -> None:
        self.average = copy.deepcopy(self.net).requires_grad_(False).eval()

    @torch.no_grad()
    def on_before_zero_grad(self, optimizer: Any) -> None:
        pairs = zip(self.average.parameters(), self.net.parameters(), strict=True)
        for slow, fast in pairs:
            slow.lerp_(fast, 0.1)
        self.trace.append("averaged")


@counted("average copied in on_fit_start")
def average_from_fit_start() -> Built:
    return traced(OwnAverage())


# ---- optimizers around optimizers


class SAM(torch.optim.Optimizer):
    """The widespread one: a base optimizer inside shares the list of groups."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norms = [
            p.grad.norm(p=2) for g in self.param_groups for p in g["params"] if p.grad is not None
        ]
        norm = torch.norm(torch.stack(norms), p=2)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.first_step(zero_grad=True)
        closure()
        self.second_step()
        return loss


class TrainsWithSAM(Net):
    def configure_optimizers(self) -> Any:
        return SAM(self.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


@counted("SAM around SGD, automatic: the closure is asked twice")
def sam() -> Built:
    return traced(TrainsWithSAM())


class StepsInside(torch.optim.Optimizer):
    """Does nothing but to step a base optimizer that shares its groups (a report)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, momentum=0.9)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


class TrainsInside(Net):
    def configure_optimizers(self) -> Any:
        return StepsInside(self.parameters())


@counted("optimizer that steps another with the same groups (report)")
def optimizer_inside() -> Built:
    return traced(TrainsInside())


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer: every third step goes back half of the way to slow weights."""

    def __init__(self, optimizer: Any, k: int = 3, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups, self.state = optimizer.param_groups, defaultdict(dict)
        self.fast_state, self.defaults = optimizer.state, optimizer.defaults
        for group in self.param_groups:
            group["counter"] = 0

    def update(self, group: dict[str, Any]) -> None:
        for fast in group["params"]:
            state = self.state[fast]
            if "slow_param" not in state:
                state["slow_param"] = torch.zeros_like(fast.data)
                state["slow_param"].copy_(fast.data)
            slow = state["slow_param"]
            slow += (fast.data - slow) * self.alpha
            fast.data.copy_(slow)

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            if group["counter"] == 0:
                self.update(group)
            group["counter"] = (group["counter"] + 1) % self.k
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class LooksAhead(Net):
    def configure_optimizers(self) -> Any:
        return Lookahead(torch.optim.Adam(self.parameters(), lr=1e-2))


@counted("Lookahead around Adam")
def lookahead() -> Built:
    return traced(LooksAhead())


class OwnList(torch.optim.Optimizer):
    """Signs of momentum, over a list of parameters of its own."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        self.own = list(params)
        super().__init__(self.own, {"lr": lr})
        self.moments = [torch.zeros_like(p) for p in self.own]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter, moment in zip(self.own, self.moments, strict=True):
            if parameter.grad is not None:
                moment.mul_(0.9).add_(parameter.grad)
                parameter.add_(moment, alpha=-self.param_groups[0]["lr"])
        return loss


class TrainsOwnList(Net):
    def configure_optimizers(self) -> Any:
        return OwnList(self.parameters())


@counted("optimizer with a list of parameters of its own")
def own_list_of_parameters() -> Built:
    return traced(TrainsOwnList())


class Extragradient(Net):
    """A hook before the step moves the weights ahead of the closure; one after it, back."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        optimizer.register_step_pre_hook(self.ahead)
        return optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trace.append("step")
        return super().training_step(batch, batch_idx)

    @torch.no_grad()
    def ahead(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.trace.append("hook")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.95)


@counted("hook before the step that moves parameters (extragradient)")
def extragradient() -> Built:
    return traced(Extragradient())


class BoundsRows(Net):
    """Max-norm of rows after each batch, as in text classifiers."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for layer in (self.net[0], self.net[2]):
                layer.weight.data = torch.renorm(layer.weight.data, 2, 0, 0.5)
        self.trace.append(batch_idx)


@counted("rows of weights bounded by .data after each batch")
def rows_bounded() -> Built:
    return traced(BoundsRows())


# ---- adversaries and penalties


class PenaltyOnGradients(Net):
    """The norm of the gradients of parameters is part of the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        slopes = torch.autograd.grad(loss, list(self.net.parameters()), create_graph=True)
        return loss + 0.1 * sum(slope.square().sum() for slope in slopes)


@counted("penalty on the gradients of parameters")
def penalty_on_gradients() -> Built:
    module = PenaltyOnGradients()
    module.net = smooth()
    return traced(module)


# ---- parameters: read, unfrozen


class ReadsNorms(Net):
    """Norms of gradients become numbers of Python in two hooks, as for a logger."""

    def norms(self) -> list[float]:
        return [round(float(p.grad.norm()), 3) for p in self.net.parameters()]

    def on_after_backward(self) -> None:
        self.trace.append(self.norms())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.trace.append(self.norms())


@counted("norms of gradients as numbers")
def gradient_norms_as_numbers() -> Built:
    return traced(ReadsNorms())


class LogsWeights(Net):
    """Statistics of parameters, as loggers of histograms take them."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.net.parameters():
            values = parameter.detach().cpu().numpy()
            self.trace.append((values.shape, round(float(values.mean()), 3)))


@counted("statistics of parameters by NumPy")
def statistics_of_weights() -> Built:
    return traced(LogsWeights())


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[:4])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[:4], optimizer, lr=1e-3)
        pl_module.trace.append([len(group["params"]) for group in optimizer.param_groups])


class TrainsHead(Net):
    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.Adam(trained, lr=1e-2)


@counted(
    "BaseFinetuning unfreezes a body in the second epoch",
    find_unused=True,
    max_epochs=2,
    limit_train_batches=6,
)
def unfrozen_by_a_callback() -> Built:
    return traced(TrainsHead(), callbacks=[Unfreezes()])


# ---- buffers


class FakeQuantized(Net):
    """Buffers of scales are resized in forward, as those of torch.ao are (report)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.scale.numel() == 1:
            self.scale.resize_(5).fill_(1.0)
        self.scale.mul_(0.9).add_(0.1 * batch[0].abs().mean())
        return F.cross_entropy(self.net(batch[0]) / self.scale, batch[1])


@counted("buffer that forward resizes (report)")
def resized_buffer() -> Built:
    return traced(FakeQuantized())
