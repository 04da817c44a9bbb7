"""Buckets without DDP: gradients by name, exchanged on ranks of a test, one after another."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication import GradientMethod
from lightning_topt.communication.bucket import (
    Bucket,
    BucketExchange,
    BucketLayout,
    ExchangeContext,
    Stages,
)
from lightning_topt.communication.topology import Topology, make_groups

# Two matrices of one shape, a convolution, a vector, a matrix too small for factors, an embedding
# that the tests exempt.
SHAPES = {
    "first": (24, 20),
    "second": (24, 20),
    "conv": (12, 3, 3, 3),
    "bias": (13,),
    "small": (3, 2),
    "embedding": (10, 8),
}
ONE_BUCKET = [list(SHAPES)]
_made = itertools.count()  # the same on all ranks

TWO_BUCKETS = [["conv", "embedding", "second"], ["bias", "first", "small"]]


class NonFiniteGradient(ArithmeticError):
    """A bucket is not finite; `own`: on this rank."""

    def __init__(self, own: bool) -> None:
        super().__init__("not finite")
        self.own = own


def gradients_of(rank: int, step: int, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The gradients of one rank in one step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()
    }


def make_layout(shapes: Mapping[str, Sequence[int]], *, exempt: Sequence[str] = ()) -> BucketLayout:
    """These parameters one after the other; the same object for the same ones, as under DDP."""
    return _layout(
        tuple(shapes), tuple(torch.Size(shape) for shape in shapes.values()), tuple(exempt)
    )


@functools.cache
def _layout(
    names: tuple[str, ...], sizes: tuple[torch.Size, ...], exempt: tuple[str, ...]
) -> BucketLayout:
    numels = [size.numel() for size in sizes]
    offsets = [sum(numels[:index]) for index in range(len(numels))]
    return BucketLayout(
        names, tuple(offsets), tuple(numels), sizes, tuple(name in exempt for name in names)
    )


def make_exchange(
    method: GradientMethod, rank: int, world_size: int, *, nodes: int = 1
) -> BucketExchange:
    """An exchange on all ranks, on so many nodes. A collective call."""
    topology = Topology(nodes, world_size // nodes, rank)
    groups = make_groups(
        topology,
        num_stages=method.num_stages(topology),
        hierarchical=method.sums_in_nodes(topology),
        timeout_seconds=30,
    )
    store = dist.PrefixStore(f"tests/{next(_made)}", dist.distributed_c10d._get_default_store())
    return method.make_exchange(ExchangeContext(topology, groups, torch.device("cpu"), 30, store))


def run_stages(stages: Stages) -> Tensor:
    """Run one bucket to its end."""
    try:
        while True:
            next(stages).wait()
    except StopIteration as stop:
        return stop.value


def exchange_step(
    exchange: BucketExchange,
    gradients: dict[str, Tensor],
    *,
    step: int,
    buckets: Sequence[Sequence[str]] = ONE_BUCKET,
    exempt: Sequence[str] = (),
    loss_scale: float = 1.0,
) -> dict[str, Tensor]:
    """The means of the gradients by name, as one step with these buckets gives them."""
    means = {}
    for index, names in enumerate(buckets):
        layout = make_layout({name: gradients[name].shape for name in names}, exempt=exempt)
        buffer = torch.cat([gradients[name].reshape(-1) for name in names]) * loss_scale
        bucket = Bucket(index, buffer, layout, index == len(buckets) - 1, step, loss_scale)
        if not exchange.prepare(bucket):
            exchange.relayout()
        result = run_stages(exchange.stages(bucket))
        for _, is_ours in bucket.checks.failed():
            raise NonFiniteGradient(own=is_ours)
        assert result.data_ptr() == buffer.data_ptr()
        means.update(
            {
                name: result[part].view(gradients[name].shape)
                for name, part in zip(names, layout.slices, strict=True)
            }
        )
    return means
