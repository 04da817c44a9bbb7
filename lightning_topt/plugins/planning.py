"""From a captured module to a frontier of plans and the chosen one: what the strategy and `topt plan` have in common.

graph = capture(module, batch)
optimizers, named = make_fake_optimizers(module, device=torch.device("cpu"))
optimizer = read_optimizer(optimizers, named_parameters=named)
frontier = search_plans(graph, cluster=cluster, optimizer=optimizer, device_counts=(1, 2), global_batch_size=16)
choose(frontier.candidates, memory_limit=2**30).plan
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import _configure_optimizers
from torch import nn
from torch.optim import Optimizer

from lightning_topt.communication.options import ExchangeOptions
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.compute import KernelKey
from lightning_topt.costs.cost_table import CostTable
from lightning_topt.costs.estimate import StepModel, estimate_costs, explain, legal_families
from lightning_topt.costs.exchange import legal_exchanges
from lightning_topt.costs.memory import FAMILIES
from lightning_topt.costs.optimizer import OptimizerProfile
from lightning_topt.frontier.search import search_frontier
from lightning_topt.graph.fake import fake_copy
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plan.choose import PlanFrontier, PlanPoint
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, Prediction


@dataclass(frozen=True)
class Planning:
    """A frontier and the point chosen from it (its plan says why); `graph` is what was planned."""

    frontier: PlanFrontier
    chosen: PlanPoint
    graph: OpGraph


Optimizers = tuple[list[Optimizer], list[tuple[str, nn.Parameter]]]  # and the parameters of their module, by name


def optimizers_of(trainer: pl.Trainer) -> Optimizers:
    """Return the optimizers of a fit; where they do not exist yet, what the module would make, on a fake copy of it."""
    module, strategy = trainer.lightning_module, trainer.strategy
    if not strategy.optimizers:
        return make_fake_optimizers(module, device=strategy.root_device)
    return list(strategy.optimizers), list(module.named_parameters())


def make_fake_optimizers(module: pl.LightningModule, *, device: torch.device) -> Optimizers:
    """Return what the module's own `configure_optimizers` makes, run on a fake copy."""
    copied, mode = fake_copy(module, device=device.type)
    with mode:
        optimizers, _, _ = _configure_optimizers(copied.configure_optimizers())  # type: ignore[arg-type]
    # Modules may ask their trainer for the parameters (`self.trainer.model.parameters()`), which are the original ones.
    return optimizers, [*copied.named_parameters(), *module.named_parameters()]


def search_plans(
    graph: OpGraph,
    *,
    cluster: Cluster,
    optimizer: OptimizerProfile,
    device_counts: Sequence[int],
    global_batch_size: int,
    families: Iterable[str] = FAMILIES,
    exchanges: Sequence[ExchangeOptions] = (),
    kernel_seconds: Mapping[KernelKey, float] | None = None,
    returns_memory: bool = False,
    capture_seconds: float = 0.0,
) -> PlanFrontier:
    """Search every family of plans at every number of devices and unite the frontiers; uniform plans are kept beside them.

    Args:
        device_counts: numbers of ranks to plan for. The global batch is the same for all, so each must divide it.
        global_batch_size: samples per step over all ranks.
        families: the families that this run can use (see `estimate_costs`); those the optimizer forbids are left out.
        exchanges: ways to exchange whole gradients that may be chosen besides DDP's all-reduce, each searched by itself; those
            that a number of ranks cannot have are left out there.
        kernel_seconds: measured kernels (`measure_kernels`); only of use at the captured batch size.
        returns_memory: every plan is to keep a memory limit (see `StepModel`); sharded plans always do so on CPUs.
        capture_seconds: what making `graph` took, for the record.

    Raises ValueError when a device count does not divide the batch.
    """
    start, error_bound = time.perf_counter(), 0.0
    points: list[PlanPoint] = []
    uniform: list[PlanPoint] = []
    for count in device_counts:
        if global_batch_size % count:
            raise ValueError(
                f"a global batch of {global_batch_size} samples cannot be divided evenly over {count} devices; choose a "
                f"batch size that is a multiple of {count}, or other device counts"
            )
        for family in legal_families(optimizer, data_parallel_size=count):
            if family not in families:
                continue
            batch_size, kernels = global_batch_size // count, kernel_seconds or {}
            for exchange in (None, *_exchanges_of(family, exchanges, cluster=cluster, count=count)):
                returns = returns_memory or family == "sharded"
                model = StepModel(graph, cluster, optimizer, count, batch_size, family, kernels, exchange, returns)
                table = estimate_costs(model)
                found = search_frontier(table)
                error_bound = max(error_bound, found.error_bound)
                configs = [
                    {op.name: op.configs[point.choice[op.name]] for op in table.operators} for point in found.points
                ]
                points += [_point(model, each) for each in configs]
                uniform += [_point(model, each) for each in _uniform_configs(table)]
    return PlanFrontier.of(
        points,
        uniform=uniform,
        capture_seconds=capture_seconds,
        search_seconds=time.perf_counter() - start,
        error_bound=error_bound,
    )


def _exchanges_of(
    family: str, exchanges: Sequence[ExchangeOptions], *, cluster: Cluster, count: int
) -> list[ExchangeOptions]:
    if family != "replicated":
        return []
    legal = (legal_exchanges(options, cluster=cluster, world_size=count) for options in exchanges)
    return list(dict.fromkeys(itertools.chain.from_iterable(legal)))


def _uniform_configs(table: CostTable) -> list[dict[str, OpConfig]]:
    """One ZeRO level for all blocks, without and with recomputation; a block that cannot have that takes what is nearest."""
    found: list[dict[str, OpConfig]] = []
    kinds = {(config.storage.level, config.recompute) for operator in table.operators for config in operator.configs}
    for level, again in sorted(kinds):
        configs = {op.name: _nearest(op.configs, level=level, recompute=again) for op in table.operators}
        found += [configs] if configs not in found else []
    return found


def _nearest(configs: Sequence[OpConfig], *, level: int, recompute: bool) -> OpConfig:
    return min(configs, key=lambda config: (abs(config.storage.level - level), config.recompute != recompute))


def _point(model: StepModel, configs: Mapping[str, OpConfig]) -> PlanPoint:
    explained = explain(model, configs)
    plan = ParallelPlan.of_blocks(
        mesh=model.data_parallel_size,
        blocks=tuple(BlockPlan(block, config) for block, config in configs.items()),
        model=model.graph.model,
        fingerprint=model.graph.fingerprint,
        batch_size=int(model.batch_size),
        cluster=model.cluster.name,
        predicted=Prediction(
            step_seconds=explained.step_seconds,
            peak_bytes=explained.peak_bytes,
            compute_seconds=explained.compute_seconds,
            exposed_communication_seconds=explained.exposed_communication_seconds,
        ),
        gradient_exchange=model.exchange,
    )
    return PlanPoint(explained.step_seconds, explained.peak_bytes, model.data_parallel_size, plan)
