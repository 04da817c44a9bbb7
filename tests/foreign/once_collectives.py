"""Programs that talk to the other ranks themselves: in the step, in hooks, in optimizers."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from tests.foreign.once_shelf import Built, Net, counted, rows, traced

# ---- groups made on first use


@functools.lru_cache
def objects_group() -> Any:
    return dist.new_group(backend="gloo")


def mean_of_objects(numbers: dict[str, float]) -> dict[str, float]:
    everyone: list[Any] = [None] * dist.get_world_size(objects_group())
    dist.all_gather_object(everyone, numbers, group=objects_group())
    return {name: sum(each[name] for each in everyone) / len(everyone) for name in numbers}


class GathersObjects(Net):
    """After a report: a helper makes its group when it is first asked for, and keeps it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trace.append(
            mean_of_objects(
                {"samples": len(batch[0]), "batch": batch_idx, "rank": self.global_rank}
            )
        )
        return super().training_step(batch, batch_idx)


@counted("process group made on first use, kept by lru_cache (report)")
def group_made_on_first_use() -> Built:
    objects_group.cache_clear()
    module = GathersObjects()
    return Built(module, rows(), lambda: (module.trace, objects_group.cache_info()[:2]))


# ---- collectives in the step


class Contrastive(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mine = F.normalize(self.net(batch[0]), dim=-1)
        everyone = self.all_gather(mine, sync_grads=True).flatten(0, 1)
        self.trace.append(tuple(everyone.shape))
        targets = torch.arange(len(mine)) + self.global_rank * len(mine)
        return F.cross_entropy(mine @ everyone.T / 0.1, targets)


@counted("self.all_gather with gradients")
def contrastive_over_ranks() -> Built:
    return traced(Contrastive())


class AsksStrategy(Net):
    """Rank 0 decides, by dice of its own; the strategy tells everybody."""

    def __init__(self) -> None:
        super().__init__()
        self.dice, self.thrown = random.Random(12), 0

    def throw(self) -> float:
        self.thrown += 1
        return self.dice.random()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        amount = self.trainer.strategy.broadcast(
            self.throw() if self.global_rank == 0 else None, src=0
        )
        self.trace.append(amount)
        loss = super().training_step((batch[0] + amount * batch[0].roll(1, 0), batch[1]), batch_idx)
        mean = self.trainer.strategy.reduce(batch[0].sum(), reduce_op="mean")
        return loss * (1 + 1e-3 * mean.abs())


@counted("strategy.broadcast and strategy.reduce in the step")
def broadcast_by_the_strategy() -> Built:
    module = AsksStrategy()
    return Built(module, rows(), lambda: (module.thrown, module.trace))


class SyncedNorm(nn.Module):
    """Batch norm over all ranks by hand: sums are reduced with gradients."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift, self.calls = (
            nn.Parameter(torch.ones(width)),
            nn.Parameter(torch.zeros(width)),
            0,
        )

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        sums = all_reduce(torch.stack([x.sum(0), x.square().sum(0), torch.full_like(x[0], len(x))]))
        mean, square = sums[0] / sums[2], sums[1] / sums[2]
        return (x - mean) * (square - mean.square() + 1e-3).rsqrt() * self.scale + self.shift


@counted("batch norm over ranks by hand: a collective in forward and backward")
def norm_over_ranks() -> Built:
    module = Net()
    norm = SyncedNorm(16)
    module.net = nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Linear(16, 5))
    return Built(module, rows(), lambda: norm.calls)


# ---- collectives around the optimizer


class GathersNorms(Net):
    """Norms of gradients of all ranks are gathered before the step: under ddp they are equal."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.stack([p.grad.norm() for p in self.net.parameters()]).norm()
        norms = self.all_gather(norm)
        self.trace.append(bool((norms == norms[0]).all()))


@counted("norms of gradients gathered over ranks before the step")
def norms_gathered_before_the_step() -> Built:
    return traced(GathersNorms())


class AgreesOnStep(torch.optim.SGD):
    """Takes its step only where all ranks say that their loss is finite; counts the votes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.votes = 0

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        vote = torch.isfinite(loss.detach()).float()
        dist.all_reduce(vote)
        self.votes += int(vote)
        if int(vote) == dist.get_world_size():
            super().step()
        return loss


class Votes(Net):
    def configure_optimizers(self) -> Any:
        self.sgd = AgreesOnStep(self.parameters(), lr=0.1, momentum=0.9)
        return self.sgd


@counted("optimizer that reduces a vote in step")
def step_that_ranks_agree_on() -> Built:
    module = Votes()
    return Built(module, rows(), lambda: module.sgd.votes)
