"""The ways to exchange gradients that `benchmarks.network` compares, each as a prepared
DistributedDataParallel module.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with classes.
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_topt.communication import CompressedExchange
from lightning_topt.communication.method_registry import read_gradient_method

ONE_BUCKET_MB = 4096  # torch's PowerSGD hangs on gloo with several buckets


@dataclass
class EagerTopK:
    """Flat top-k with error feedback as it is usually written: torch.topk, 64-bit indices,
    all-gather, scatter.
    """

    density: float
    residuals: dict[int, Tensor] = field(default_factory=dict)
    steps: int = 0

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer, world_size = bucket.buffer(), dist.get_world_size()
        self.steps += bucket.is_last()
        if self.steps < 2:  # buckets are laid anew after the first step
            work = dist.all_reduce(buffer, async_op=True)
            return work.get_future().then(lambda done: done.value()[0].div_(world_size))
        residual = self.residuals.setdefault(bucket.index(), torch.zeros_like(buffer)).add_(buffer)
        indices = torch.topk(
            residual.abs(), max(1, round(self.density * buffer.numel())), sorted=False
        ).indices
        values = residual[indices]
        residual[indices] = 0
        gathered = [torch.empty((world_size, *x.shape), dtype=x.dtype) for x in (values, indices)]
        works = [
            dist.all_gather_into_tensor(out.view(-1), x, async_op=True)
            for out, x in zip(gathered, (values, indices), strict=True)
        ]

        def decode(_: Any) -> Tensor:
            buffer.zero_()
            for row_values, row_indices in zip(*gathered, strict=True):
                buffer.index_add_(0, row_indices, row_values)
            return buffer.div_(world_size)

        return torch.futures.collect_all([work.get_future() for work in works]).then(decode)


@dataclass
class Method:
    """A prepared module; the bytes that leave a node for others per step, by formula; and our
    exchange where it is ours.
    """

    ddp: nn.Module
    bytes_per_step: float
    exchange: CompressedExchange | None = None


def _ring_bytes(nbytes: float, *, passes: int) -> float:
    """A ring over all ranks in order, of which one rank per node sends to another node: a gather of
    `nbytes` (`passes` 1) or an all-reduce (2).
    """
    world_size = dist.get_world_size()
    return passes * (world_size - 1) * nbytes / world_size


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _wrap(module: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, gradient_as_bucket_view=True, init_sync=False, **options)


def _hooked(
    module: nn.Module, hook: Any, state: Any = None, *, sent: float, **options: Any
) -> Method:
    ddp = _wrap(module, **options)
    ddp.register_comm_hook(state=state, hook=hook)
    return Method(ddp, sent)


def _dense(module: nn.Module) -> Method:
    return Method(_wrap(module), _ring_bytes(4 * _numel(module), passes=2))


def _fp16(module: nn.Module) -> Method:
    return _hooked(module, fp16_compress_hook, sent=_ring_bytes(2 * _numel(module), passes=2))


def _eager_top_k(module: nn.Module, density: float) -> Method:
    state = EagerTopK(density)
    sent = _ring_bytes(dist.get_world_size() * density * _numel(module) * (4 + 8), passes=1)
    return _hooked(module, lambda _, bucket: state.hook(bucket), sent=sent)


def _power_sgd(module: nn.Module, rank: int) -> Method:
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    elements = 0
    for parameter in module.parameters():
        rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
        factors = (rows + columns) * min(rows, columns, rank)
        is_compressed = (
            parameter.dim() > 1 and factors * state.min_compression_rate < parameter.numel()
        )
        elements += factors if is_compressed else parameter.numel()
    sent = _ring_bytes(4 * elements, passes=2)
    return _hooked(module, powerSGD_hook, state, sent=sent, bucket_cap_mb=ONE_BUCKET_MB)


def _ours(module: nn.Module, **options: Any) -> Method:
    ddp, exchange = (
        _wrap(module),
        CompressedExchange(read_gradient_method(options), timeout_seconds=120),
    )
    exchange.register(ddp)
    return Method(ddp, 0.0, exchange)  # it counts by itself


ALONE = "no exchange, each rank alone"
DENSE = "DDP, dense"
PEERS: dict[str, Callable[[nn.Module], Method]] = {
    DENSE: _dense,
    "torch fp16 hook": _fp16,
    "torch PowerSGD, rank 1": lambda module: _power_sgd(module, 1),
    "torch PowerSGD, rank 2": lambda module: _power_sgd(module, 2),
    "torch PowerSGD, rank 4": lambda module: _power_sgd(module, 4),
    "eager flat top-k, 1 %": lambda module: _eager_top_k(module, 0.01),
}
DENSITIES = {"5 %": 0.05, "1 %": 0.01, "0.1 %": 0.001}
FLAT = {
    f"ours, flat top-k, {name}": {"hierarchical": False, "density": d}
    for name, d in DENSITIES.items()
}
HIERARCHICAL = {
    f"ours, hierarchical, {name}": {"hierarchical": True, "density": d}
    for name, d in DENSITIES.items()
}
OTHERS: dict[str, dict[str, Any]] = {
    "ours, PowerSGD, rank 2": {"method": "powersgd", "rank": 2},
    "ours, bf16": {"method": "bf16"},
    "ours, sign": {"method": "sign"},
}
LOSSY: dict[str, dict[str, Any]] = {
    "ours, bounded loss, 1 %": {"method": "bounded_loss", "tolerance": 0.01}
}


def prepare(name: str, module: nn.Module) -> Method:
    """The method `name` over `module`; a collective call."""
    if name == ALONE:
        return Method(module, 0.0)
    if name in PEERS:
        return PEERS[name](module)
    return _ours(module, **(FLAT | HIERARCHICAL | OTHERS | LOSSY)[name])
