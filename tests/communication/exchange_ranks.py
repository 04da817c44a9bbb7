"""Models, batches and a slow simulation of all ranks, for tests of gradient exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_topt.communication import GradientMethod, TopK
from lightning_topt.communication.hook import CompressedExchange, Streams
from lightning_topt.communication.node.node_exchange import shard_bounds
from lightning_topt.communication.topology import Topology
from tests.communication.few_bits import in_few_bits


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, 40),
        nn.LayerNorm(40),
        nn.Tanh(),
        nn.Linear(40, 50),
        nn.Tanh(),
        nn.Linear(50, 30),
        nn.Linear(30, 4),
    )


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 16, generator=generator)
    return x, torch.tanh(x[:, :4] - x[:, 4:8])


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    return nn.functional.mse_loss(model(x), y)


def wrap(
    method: GradientMethod,
    *,
    topology: Topology | None = None,
    model: nn.Module | None = None,
    settings: Mapping[str, Any] | None = None,
    **ddp_options: Any,
) -> tuple[DistributedDataParallel, CompressedExchange]:
    """A DDP model of several small buckets with an exchange; `settings`: `ExchangeSettings`."""
    ddp_options = {"bucket_cap_mb": 0.005, **ddp_options}
    ddp = DistributedDataParallel(model or make_model(), **ddp_options)
    exchange = CompressedExchange(ddp, method, topology=topology, **(settings or {}))
    return ddp, exchange


class FakeStreams(Streams):
    """Tensors of a CPU run as on CUDA: in the calling thread, on a stream that waits by itself."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, object()

    def after(self, reached: Any) -> None: ...

    def worker(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def future(self) -> torch.futures.Future[Tensor]:
        return torch.futures.Future()


def train(
    ddp: DistributedDataParallel, *, rank: int, steps: range, lr: float = 0.1
) -> Iterator[dict[str, Tensor]]:
    """Plain SGD; the gradient of every step, by name."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    for step in steps:
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        yield {
            name: p.grad.clone() for name, p in ddp.module.named_parameters() if p.grad is not None
        }
        optimizer.step()


def assert_equal_on_all_ranks(ddp: DistributedDataParallel) -> None:
    flat = torch.cat([p.detach().view(-1) for p in ddp.parameters()]).view(torch.int32)
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, flat)
    assert all(torch.equal(rows[0], row) for row in rows)


class Simulation:
    """All ranks in one process, in float64, written down as the formulas stand: the oracle.

    A *holder* is a rank, or a node where hierarchical; it keeps a residual per
    parameter, whatever the buckets. Gradients come in by rank and name; buckets are lists of names.
    """

    def __init__(
        self, options: TopK, topology: Topology, *, hierarchical: bool, exempt: set[str]
    ) -> None:
        self.options, self.exempt = options, exempt
        self.holder_size = topology.ranks_per_node if hierarchical else 1
        self.kept: dict[Any, Tensor] = {}  # (holder, name) -> residual

    def step(
        self, gradients: list[dict[str, Tensor]], buckets: list[list[str]], step: int
    ) -> dict[str, Tensor]:
        mean = {name: torch.zeros(value.shape).double() for name, value in gradients[0].items()}
        holders = len(gradients) // self.holder_size
        for names in buckets:
            for holder in range(holders):
                ranks = gradients[holder * self.holder_size : (holder + 1) * self.holder_size]
                node = [
                    torch.stack([g[name].double() for g in ranks]).mean(0).view(-1)
                    for name in names
                ]
                node = [g * (name not in self.exempt) for name, g in zip(names, node, strict=True)]
                for name, sent in zip(names, self._sent(holder, names, node, step), strict=True):
                    mean[name] += sent.view(mean[name].shape) / holders
        for name in self.exempt:
            mean[name] = torch.stack([g[name].double() for g in gradients]).mean(0)
        return mean

    def _sent(self, holder: int, names: list[str], node: list[Tensor], step: int) -> Any:
        """What a holder sends of one bucket, by parameter."""
        numels = [g.numel() for g in node]
        residual = torch.cat(
            [
                self.kept.get((holder, n), torch.zeros_like(g)) + g
                for n, g in zip(names, node, strict=True)
            ]
        )
        compressible = torch.cat(
            [
                torch.full((g.numel(),), n not in self.exempt)
                for n, g in zip(names, node, strict=True)
            ]
        )
        sent = torch.zeros_like(residual)
        for start, stop in shard_bounds(len(residual), local_size=self.holder_size):
            count = int(compressible[start:stop].sum())
            k = max(1, round(self.options.density_at(step) * count)) if count else 0
            taken = start + residual[start:stop].abs().topk(k).indices
            if self.options.is_dense_step(step):
                taken = torch.arange(start, stop)
            sent[taken] = residual[taken]
            if self.options.bits is not None and not self.options.is_dense_step(step):
                taken = taken.sort().values
                sent[taken] = torch.tensor(
                    in_few_bits(residual[taken].tolist(), self.options.bits, 64)
                ).double()
        residual = (residual - sent) * self.options.error_feedback
        parts = zip(names, residual.split(numels), strict=True)
        self.kept |= {(holder, n): part for n, part in parts}
        return sent.split(numels)


def bucket_names(exchange: CompressedExchange) -> list[list[str]]:
    """The buckets of the last step."""
    layouts = exchange.layouts
    return [list(layouts[index][1].names) for index in sorted(layouts)]


def gathered_gradients(
    make: Callable[[], nn.Module], parameters: dict[str, Tensor], world_size: int, step: int
) -> list[Any]:
    """Every rank's gradient at `parameters`, computed here."""
    gradients = []
    for rank in range(world_size):
        model = make()
        model.load_state_dict(parameters)
        loss_of(model, rank, step).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    return gradients
