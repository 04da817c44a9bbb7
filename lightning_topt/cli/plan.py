"""`topt plan` finds the frontier of step time and peak memory, and the plan that fits the limits best. No training."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console

from lightning_topt.cli.example_step import NeedsValues, capture_example
from lightning_topt.cli.local_ranks import run_on_ranks
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.compute import KernelKey
from lightning_topt.costs.measurements import Measurements
from lightning_topt.costs.optimizer import OptimizerProfile, read_optimizer
from lightning_topt.graph.meta_build import build_on_meta
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plan.choose import check_objective
from lightning_topt.plan.plan_search import SearchRequest, search_plans
from lightning_topt.plan.report import print_table, save_html, save_png
from lightning_topt.plugins.auto_parallel import AutoParallelStrategy
from lightning_topt.plugins.planning import Planning, make_fake_optimizers
from lightning_topt.plugins.read_options import read_device_counts
from lightning_topt.plugins.searched_plan import choose_for


@dataclass(frozen=True)
class Costs:
    """`Costs` are what the search needs besides the graph."""

    cluster: Cluster
    optimizer: OptimizerProfile
    kernel_seconds: Mapping[KernelKey, float] | None


def run(config: DictConfig) -> None:
    """Plan what `config` describes; files go to Hydra's run folder.

    Raises ValueError when the strategy is not one that plans, and what capturing and choosing raise.
    """
    pl.seed_everything(config.seed, workers=True)
    datamodule: pl.LightningDataModule = instantiate(config.data)
    make_model = functools.partial(instantiate, config.model)
    model: pl.LightningModule = build_on_meta(make_model)
    strategy = instantiate(config.strategy, _convert_="all")
    if not isinstance(strategy, AutoParallelStrategy):
        raise ValueError("topt plan needs strategy=topt: the other strategies have nothing to plan")
    trainer: pl.Trainer = instantiate(config.trainer, strategy=strategy, logger=False, _convert_="all")
    device_counts = read_device_counts(config.device_counts, default=trainer.world_size)
    objective = config.objective or strategy.request.objective
    check_objective(objective)
    start = time.perf_counter()
    try:
        example = capture_example(model, datamodule, trainer)
    except NeedsValues:
        model = make_model()
        example = capture_example(model, datamodule, trainer)
    graph, capture_seconds = example.graph, time.perf_counter() - start
    costs = _costs(strategy, trainer, model, graph)
    if costs is None:  # another rank of torchrun goes on
        return
    frontier = search_plans(
        SearchRequest(
            graph,
            costs.cluster,
            costs.optimizer,
            device_counts,
            global_batch_size=example.samples * trainer.world_size,
            exchanges=strategy.request.allowed.candidates,
            kernel_seconds=costs.kernel_seconds or {},
            returns_memory=strategy.request.saves_memory,
            capture_seconds=capture_seconds,
        )
    )
    folder = Path(HydraConfig.get().runtime.output_dir)
    frontier.save(folder / "frontier.json")  # worth having even when no plan fits
    request = dataclasses.replace(strategy.request, objective=objective)
    _report(Planning(frontier, choose_for(request, frontier, costs.cluster), graph), request.memory_limit, folder)


def _costs(
    strategy: AutoParallelStrategy, trainer: pl.Trainer, module: pl.LightningModule, graph: OpGraph
) -> Costs | None:
    if strategy.request.cluster is not None:
        optimizers, named = make_fake_optimizers(module, device=torch.device("cpu"))
        return Costs(strategy.request.cluster, read_optimizer(optimizers, named_parameters=named), None)
    accelerator = "cpu" if strategy.root_device.type == "cpu" else "cuda"
    return run_on_ranks(_measure, graph, module, accelerator=accelerator, devices=trainer.num_devices)


def _measure(device: torch.device, num_nodes: int, graph: OpGraph, module: pl.LightningModule) -> Costs:
    optimizers, named = make_fake_optimizers(module, device=device)
    optimizer = read_optimizer(optimizers, named_parameters=named, device_type=device.type)
    measurements = Measurements.open(device=device, num_nodes=num_nodes, progress=print)
    seconds = measurements.update_seconds(optimizers, named_parameters=named)
    optimizer = dataclasses.replace(optimizer, seconds_per_element=seconds)
    return Costs(measurements.cluster(), optimizer, measurements.kernel_seconds(graph))


def _report(planning: Planning, memory_limit: float | None, folder: Path) -> None:
    frontier, chosen = planning.frontier, planning.chosen
    points, title = frontier.shown_with(chosen), planning.graph.model
    save_png(folder / "frontier.png", points, chosen, memory_limit=memory_limit, title=title)
    page = folder / "frontier.html"
    save_html(page, points, chosen, memory_limit=memory_limit, title=title, exact=frontier.exact)
    chosen.plan.save(folder / "plan.yaml")
    console = Console()
    print_table(points, chosen, console=console)
    console.print(f"{chosen.plan.summary()}\n{chosen.plan.reason}", highlight=False)
    console.print(f"run folder: {folder}", highlight=False, soft_wrap=True)
