"""Programs that talk to the other ranks themselves: in the step, in hooks, in optimizers, by groups
of their own.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from tests.foreign.once_shelf import Built, Net, counted, mlp, numbered, rows, traced

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


class OwnGroups(Net):
    """A group for each rank and one for all, made in the first step and kept in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: dict[str, Any] = {}

    def group(self, name: str) -> Any:
        if name not in self.groups:
            self.trace.append(name)
            every = range(dist.get_world_size())
            made = (
                [dist.new_group([rank]) for rank in every]
                if name == "mine"
                else [dist.new_group(list(every))]
            )
            self.groups[name] = made[self.global_rank if name == "mine" else 0]
        return self.groups[name]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        sums = [batch[0].sum(), batch[0].sum()]
        dist.all_reduce(sums[0], group=self.group("mine"))
        dist.all_reduce(sums[1], group=self.group("all"))
        self.trace.append([float(value) for value in sums])
        return super().training_step(batch, batch_idx)


@counted("groups of one rank and of all, made in the first step")
def groups_in_a_dictionary() -> Built:
    return traced(OwnGroups())


# ---- collectives in the step


class Gathers(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, numbers = batch
        everyone = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, numbers)
        self.trace.append(torch.cat(everyone).tolist())
        return super().training_step((x, y), batch_idx)


@counted("dist.all_gather in the step")
def numbers_gathered_in_the_step() -> Built:
    return traced(Gathers(), rows(numbered))


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


class Reduces(Net):
    """Counts how many samples of each class all ranks have seen, and weighs the loss by it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        counts = torch.bincount(batch[1], minlength=5).float()
        dist.all_reduce(counts)
        self.seen += counts
        weights = self.seen.sum() / (1 + self.seen) / 5
        return F.cross_entropy(self.net(batch[0]), batch[1], weight=weights)


@counted("dist.all_reduce of counts in the step")
def counts_reduced_in_the_step() -> Built:
    module = Reduces()
    return Built(module, rows(), lambda: module.seen.tolist())


class WaitsForAll(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 3 == 0:
            dist.barrier()
            self.trace.append("barrier")
            self.trainer.strategy.barrier("every third batch")
        return super().training_step(batch, batch_idx)


@counted("barriers every third batch, of torch and of the strategy")
def barriers_in_the_step() -> Built:
    return traced(WaitsForAll())


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


class BroadcastsObject(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        box = [random.sample(range(8), 8) if self.global_rank == 0 else random.random()]
        dist.broadcast_object_list(box, src=0)
        self.trace.append(box[0])
        return super().training_step((batch[0][:, box[0]], batch[1]), batch_idx)


@counted("dist.broadcast_object_list of a permutation")
def permutation_from_rank_0() -> Built:
    return traced(BroadcastsObject())


class Ring(Net):
    """Ranks pass rows on in a ring, with isend and irecv."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, numbers = batch
        got, world = torch.empty_like(numbers), dist.get_world_size()
        sent = dist.isend(numbers, (self.global_rank + 1) % world)
        received = dist.irecv(got, (self.global_rank - 1) % world)
        for work in (sent, received):
            work.wait()
        self.trace.append(got.tolist())
        return super().training_step((x, y), batch_idx)


@counted("isend and irecv around a ring")
def ring_of_ranks() -> Built:
    return traced(Ring(), rows(numbered))


class ReducesLater(Net):
    """A reduction is begun in the step, and waited for when the batch has ended."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.sum = batch[0].sum()
        self.work = dist.all_reduce(self.sum, async_op=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.work.wait()
        self.trace.append(float(self.sum))


@counted("all_reduce begun in the step, waited for in a hook")
def reduction_waited_for_later() -> Built:
    return traced(ReducesLater())


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


class ActNorm(nn.Module):
    """Takes scale and shift from the first batch of all ranks."""

    def __init__(self, width: int, made: list[int]) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.made, self.ready = made, False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            with torch.no_grad():
                sums = torch.stack([x.mean(0), x.square().mean(0)])
                dist.all_reduce(sums)
                mean, square = sums / dist.get_world_size()
                self.scale.copy_((square - mean.square() + 1e-3).rsqrt())
                self.shift.copy_(-mean * self.scale)
            self.ready = True
            self.made.append(len(x))
        return x * self.scale + self.shift


@counted("parameters that forward sets from the first batch of all ranks")
def norm_set_by_the_first_batch() -> Built:
    module = Net()
    norm = ActNorm(16, module.trace)
    module.net = nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Linear(16, 5))
    return traced(module)


class Centroids(Net):
    """Clusters of embeddings of all ranks, found anew every fourth batch; they are the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centers", torch.randn(5, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        if batch_idx % 4 == 0:
            for _ in range(2):
                near = F.one_hot(torch.cdist(x, self.centers).argmin(-1), 5).float()
                sums = torch.cat([near.T @ x, near.sum(0)[:, None]], -1)
                dist.all_reduce(sums)
                self.centers = torch.where(
                    sums[:, 8:] > 0, sums[:, :8] / sums[:, 8:].clamp(min=1), self.centers
                )
                self.trace.append(sums[:, 8].tolist())
        return F.cross_entropy(self.net(x), torch.cdist(x, self.centers).argmin(-1))


@counted("k-means over ranks every fourth batch, its centers a buffer that is replaced")
def centers_over_ranks() -> Built:
    return traced(Centroids())


class WritesOnRankZero(Net):
    @rank_zero_only
    def write(self, text: str) -> None:
        self.trace.append(text)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.write(f"batch {batch_idx}")
        if self.trainer.is_global_zero and batch_idx % 5 == 0:
            self.trace.append("only here")
        return super().training_step(batch, batch_idx)


@counted("rank_zero_only, and what only rank 0 does")
def written_by_rank_0() -> Built:
    return traced(WritesOnRankZero())


class CountsInStore(Net):
    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store = store

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        number = self.store.add("batches", 1)
        return super().training_step(batch, batch_idx) * (1 + 0.01 * number)


@counted("counter of a store of torch.distributed")
def counter_of_a_store() -> Built:
    store = dist.HashStore()
    return Built(CountsInStore(store), rows(), lambda: store.add("batches", 0))


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


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """The nearest orthogonal matrix, nearly: by iterations of Newton and Schulz."""
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = 1.5 * x - 0.5 * square @ x
    return x


class GatheredMuon(torch.optim.Optimizer):
    """Each rank makes the updates of its matrices orthogonal, and gathers those of the others;
    vectors take plain steps.
    """

    def __init__(
        self, params: Any, seen: list[Any], lr: float = 0.02, momentum: float = 0.9
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.seen = seen

    def update(self, parameter: Tensor, momentum: float) -> Tensor:
        kept = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
        return kept.mul_(momentum).add_(parameter.grad)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            matrices = [p for p in group["params"] if p.dim() == 2]
            for parameter in (p for p in group["params"] if p.dim() != 2):
                parameter.add_(self.update(parameter, group["momentum"]), alpha=-group["lr"])
            for start in range(0, len(matrices), world):
                together = matrices[start : start + world]
                length = max(p.numel() for p in together)
                mine = torch.zeros(length)
                if rank < len(together):
                    update = orthogonal(self.update(together[rank], group["momentum"]))
                    mine[: update.numel()] = update.flatten()
                everyone = [torch.empty(length) for _ in range(world)]
                dist.all_gather(everyone, mine)
                self.seen.append([p.numel() for p in together])
                for parameter, update in zip(together, everyone, strict=False):
                    parameter.add_(
                        update[: parameter.numel()].view_as(parameter), alpha=-group["lr"]
                    )
        return loss


class TrainsByMuon(Net):
    def configure_optimizers(self) -> Any:
        return GatheredMuon(self.parameters(), self.trace)


@counted("optimizer that gathers updates in step (distributed Muon)")
def muon_over_ranks() -> Built:
    return traced(TrainsByMuon())


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


class Gossips(Net):
    """A second network, which ddp does not know, is averaged over ranks by hand every third
    batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.others = [mlp().requires_grad_(False)]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in self.others[0].parameters():
                parameter.add_(0.01 * (self.global_rank + 1))
                if batch_idx % 3 == 2:
                    dist.all_reduce(parameter.data)
                    parameter.div_(dist.get_world_size())
        self.trace.append(float(self.others[0][0].bias[0]))


@counted("network in a list, averaged over ranks by hand")
def network_averaged_by_hand() -> Built:
    return traced(Gossips())
