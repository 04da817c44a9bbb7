"""Gradient exchanges to compare, each as a prepared DDP module, and two models for them.

`prepare` makes the module of a method: torch's hooks, top-k as it is usually written, or ours. For
`benchmarks.exchange.network`, `bounded_loss_models` and `adam_lab`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.exchange.recipes import method_of
from lightning_topt.communication import CompressedExchange
from lightning_topt.demo import ByteGPT, StdlibBytesDataModule

# No `from __future__ import annotations`: DDP compares the annotations of a hook with classes.


ONE_BUCKET_MB = 4096  # torch's PowerSGD hangs on gloo with several buckets


@dataclass
class EagerTopK:
    """Flat top-k with error feedback as it is usually written.

    It uses torch.topk, 64-bit indices, all-gather and scatter.
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
    """A prepared module, the bytes that leave a node per step by formula, our exchange if any."""

    ddp: nn.Module
    bytes_per_step: float
    exchange: CompressedExchange | None = None


def _ring_bytes(nbytes: float, *, passes: int) -> float:
    """Bytes of a ring over all ranks in order, of which one rank per node sends to another node.

    `passes` is 1 for a gather of `nbytes`, 2 for an all-reduce.
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
    ddp = _wrap(module)
    exchange = CompressedExchange(ddp, method_of(options), timeout_seconds=120)
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


# ---- two models of 25 M parameters with little to compute, so that the exchange decides the step -

SEQ_LEN, SEQUENCES, IMAGES = 32, 1, 1


class GPT(nn.Module):
    """Eight blocks of width 512 over bytes; `forward` gives the loss of a batch (B, 33)."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = ByteGPT(8, 512, 8, SEQ_LEN)

    def forward(self, batch: Tensor) -> Tensor:
        tokens = batch.long()
        return F.cross_entropy(self.gpt(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class ConvNet(nn.Module):
    """Convolutions of 512 channels on 4 x 4 maps, as in the last stages of a residual net.

    `forward` gives the loss of images (B, 3, 32, 32).
    """

    def __init__(self) -> None:
        super().__init__()
        sizes = [(3, 128), (128, 256), (256, 512)]
        self.stem = nn.Sequential(*(self._convolution(a, b, 2) for a, b in sizes))
        self.body = nn.ModuleList(self._convolution(512, 512, 1) for _ in range(8))
        self.head = nn.Sequential(
            self._convolution(512, 1024, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(1024, 10),
        )

    @staticmethod
    def _convolution(inputs: int, outputs: int, stride: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.body:
            x = x + block(x)
        labels = (images.mean((1, 2, 3)) * 1e3).long() % 10
        return F.cross_entropy(self.head(x), labels)


def make(name: str) -> nn.Module:
    """The model "gpt" or "cnn", the same on every rank."""
    torch.manual_seed(0)
    return GPT() if name == "gpt" else ConvNet()


def batches(name: str, rank: int) -> list[Tensor]:
    """Sixteen batches of this rank."""
    generator = torch.Generator().manual_seed(rank)
    if name == "gpt":
        return [
            torch.randint(0, 256, (SEQUENCES, SEQ_LEN + 1), generator=generator) for _ in range(16)
        ]
    return [torch.randn(IMAGES, 3, 32, 32, generator=generator) for _ in range(16)]


def text_batches(rank: int, world_size: int, *, sequences: int, steps: int) -> list[Tensor]:
    """Return batches of the standard library's source for this rank.

    The global batch is the same whatever the method.
    """
    data = StdlibBytesDataModule(SEQ_LEN, sequences, max_bytes=4_000_000)
    data.setup()
    order = torch.randperm(len(data.train_data), generator=torch.Generator().manual_seed(1))
    per_step = sequences * world_size
    chosen = [
        order[s * per_step + rank * sequences : s * per_step + (rank + 1) * sequences]
        for s in range(steps)
    ]
    return [torch.stack([data.train_data[int(i)] for i in indices]) for indices in chosen]


def held_out_batches(*, sequences: int, batches: int) -> list[Tensor]:
    """Return validation batches of the standard library's source, spread over it.

    They are the same on all ranks.
    """
    data = StdlibBytesDataModule(SEQ_LEN, sequences, max_bytes=4_000_000)
    data.setup()
    step = max(1, len(data.val_data) // (sequences * batches))
    windows = [data.val_data[index * step] for index in range(sequences * batches)]
    return list(torch.stack(windows).split(sequences))
