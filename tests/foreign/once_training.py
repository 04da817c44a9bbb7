"""Programs whose models and losses count: banks, blocks, hooks, own autograd."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.foreign.once_shelf import COUNT, Built, Net, counted, numbered, rows, traced

# ---- banks and older selves


class MemoryBank(Net):
    """What the network said of each sample, by its number; counts beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.bank, self.visits = torch.zeros(COUNT, 5), torch.zeros(COUNT, dtype=torch.long)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, numbers = batch
        logits = self.net(x)
        self.visits[numbers] += 1
        self.bank[numbers] = 0.7 * self.bank[numbers] + 0.3 * logits.detach().softmax(-1)
        return F.cross_entropy(logits, y) + 0.1 * F.cross_entropy(logits, self.bank[numbers])


@counted("memory bank by number of sample, over two epochs", max_epochs=2, limit_train_batches=4)
def memory_bank() -> Built:
    module = MemoryBank()
    return Built(module, rows(numbered), lambda: module.visits.tolist())


# ---- blocks that count


class SpectralNorms(Net):
    def __init__(self) -> None:
        super().__init__()
        first, last = nn.utils.spectral_norm(nn.Linear(8, 32)), nn.Linear(32, 5)
        self.net = nn.Sequential(first, nn.ReLU(), nn.utils.parametrizations.weight_norm(last))
        first.register_forward_hook(lambda *args: self.trace.append("called"))


@counted("spectral_norm, whose buffers follow the calls, and weight_norm")
def norms_of_weights() -> Built:
    return traced(SpectralNorms())


# ---- autograd


class Checkpoints(Net):
    """The user recomputes blocks: two calls for each step, which are the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 5)
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Tanh())
        self.net[0].register_forward_hook(lambda *args: self.trace.append(torch.is_grad_enabled()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = checkpoint(self.net, self.first(batch[0]), use_reentrant=False)
        return F.cross_entropy(self.last(hidden), batch[1])


@counted("torch.utils.checkpoint by the user")
def checkpointing_by_the_user() -> Built:
    return traced(Checkpoints())


class ParameterHooks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.net[0].weight.register_hook(self.clamp)
        self.net[4].bias.register_post_accumulate_grad_hook(self.accumulated)

    def clamp(self, gradient: Tensor) -> Tensor:
        self.counts["hook"] += 1
        return gradient.clamp(-0.05, 0.05)

    def accumulated(self, parameter: Tensor) -> None:
        self.counts["accumulated"] += 1


@counted("hooks on parameters: of gradients and after accumulation")
def hooks_on_parameters() -> Built:
    module = ParameterHooks()
    return Built(module, rows(), lambda: dict(module.counts))


class PerSample(Net):
    """Samples with large gradients weigh less: torch.func over the parameters in the step."""

    def loss_of_one(self, parameters: Any, x: Tensor, y: Tensor) -> Tensor:
        self.trace.append(tuple(x.shape))
        return F.cross_entropy(
            torch.func.functional_call(self.net, parameters, (x[None],)), y[None]
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        parameters = {name: p.detach() for name, p in self.net.named_parameters()}
        slopes = torch.func.vmap(torch.func.grad(self.loss_of_one), in_dims=(None, 0, 0))(
            parameters, x, y
        )
        sizes = sum(slope.flatten(1).square().sum(-1) for slope in slopes.values())
        return (F.cross_entropy(self.net(x), y, reduction="none") / (1 + sizes.sqrt())).mean()


@counted("gradients per sample by torch.func")
def gradients_per_sample() -> Built:
    return traced(PerSample())
