"""The steps that `topt plan` takes from a configuration to a report, for one or many scenarios.

    setup = PlanSetup.of(config)                            # build: the model has no memory
    meshes = SearchedMeshes.read(config, setup.request, setup.trainer)
    example = setup.capture(splits=meshes.tensor)           # capture: the step of one rank
    unpriced = UnpricedSearch.of(setup, meshes, example, request)     # ask: but for the costs
    search = setup.with_costs(unpriced.request, request)    # price: costs given, or measured here
    report_plan(planning, search, ...)                      # report: what a search has found

`plan` searches once, `what_if` for many clusters, numbers of devices, batches and lengths.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console

from lightning_topt.cli.calibrate import run_on_ranks
from lightning_topt.cli.example_step import (
    ExampleStep,
    ModelSetup,
    model_name,
)
from lightning_topt.cli.search_space import SearchedMeshes
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.compute import KernelKey
from lightning_topt.costs.measurements import Measurements
from lightning_topt.costs.optimizer import OptimizerProfile, read_optimizer, time_updates
from lightning_topt.plan.explanation import explain_plan, explain_stages
from lightning_topt.plan.frontier_report import MemoryLimit, print_table, save_html
from lightning_topt.plan.plan_report import (
    print_explanation,
    print_stages,
    schedule_title,
)
from lightning_topt.plan.plan_search import SearchRequest, local_graphs, stage_blocks
from lightning_topt.plan.report_table import report_title
from lightning_topt.plan.stage_simulation import step_of_plan
from lightning_topt.plan.step_factors import left_out_sentence
from lightning_topt.plugins.auto_parallel import AutoParallelStrategy
from lightning_topt.plugins.plan_request import PlanRequest, allowed_ways, why_not_alone
from lightning_topt.plugins.planning import on_rank_0
from lightning_topt.plugins.searched_plan import Planning, make_fake_optimizers
from lightning_topt.techniques.tensor_parallel.split_model import Captured
from topt_console.status_line import STATUS

RequestWithoutCosts = Callable[..., SearchRequest]  # called with the costs


@dataclass
class PlanSetup(ModelSetup):
    """What a configuration of `topt plan` builds."""

    @classmethod
    def of(cls, config: DictConfig, **options: Any) -> PlanSetup:
        """Build what `config` describes.

        Raises:
            ValueError: the strategy is not one that plans.
        """
        strategy = instantiate(config.strategy, _convert_="all")
        if not isinstance(strategy, AutoParallelStrategy):
            raise ValueError(
                "topt plan needs strategy=topt: the other strategies have nothing to plan"
            )
        setup = super().of(config, strategy=strategy, **options)
        assert isinstance(setup, PlanSetup)
        return setup

    @property
    def request(self) -> PlanRequest:
        """The user's request to the planner."""
        strategy = self.trainer.strategy
        assert isinstance(strategy, AutoParallelStrategy)
        return strategy.request

    def with_costs(
        self, make_search: RequestWithoutCosts, request: PlanRequest
    ) -> SearchRequest | None:
        """Return the search with all that it needs besides the graph.

        Costs are those of the cluster of `request`; without one they are measured here.

        Returns:
            None on ranks of torchrun and srun that have nothing more to do.
        """
        # costs are given with the cluster, or measured on ranks of this machine
        if request.cluster is not None:
            search = make_search(cluster=request.cluster, optimizer=self._optimizer)
        else:
            accelerator = "cpu" if self.trainer.strategy.root_device.type == "cpu" else "cuda"
            measured = run_on_ranks(
                _measure,
                make_search,
                self.model,
                accelerator=accelerator,
                devices=self.trainer.num_devices,
            )
            if measured is None:
                return None
            # the steps on slices were captured where kernels were measured: not captured again
            search = make_search(**measured.costs)
            if search.split is not None and measured.captured is not None:
                search.split.take_over(measured.captured)
        # exchanges and local steps that are allowed, as far as the optimizer permits them
        ranks = {*search.device_counts}
        if search.pipelines is not None:  # with stages, fewer ranks have gradients of their own
            ranks |= {n for each in ranks for n in range(2, each) if each % n == 0}
        exchanges, local_steps = (
            ((), ())
            if search.mesh is not None
            else allowed_ways(request, self.trainer, search.optimizer, ranks=ranks)
        )
        if local_steps and (reason := why_not_alone(request, self.trainer)):
            print(f"Plans with local steps are left out: {reason}")
            local_steps = ()
        return dataclasses.replace(search, exchanges=exchanges, local_steps=local_steps)

    @functools.cached_property
    def _optimizer(self) -> OptimizerProfile:
        optimizers, named = make_fake_optimizers(self.model, device=torch.device("cpu"))
        return read_optimizer(optimizers, named_parameters=named)


@dataclass(frozen=True)
class UnpricedSearch:
    """What is searched on one cluster, without the costs of that cluster.

    Args:
        request: makes the search from its costs.
        unsplit: why tensor axes are left out; None: they are not.
        unstaged: why stages are left out; None: they are not.
    """

    request: RequestWithoutCosts
    unsplit: str | None
    unstaged: str | None

    @classmethod
    def of(
        cls,
        setup: PlanSetup,
        meshes: SearchedMeshes,
        example: ExampleStep,
        request: PlanRequest,
        **given: Any,
    ) -> UnpricedSearch:
        """Return what `meshes` and `request` ask of a captured step.

        `given` are more arguments of the `SearchRequest`.
        """
        # what cannot be searched here is left out with its reason
        unsplit = meshes.why_not_split(example, request, setup.trainer)
        unstaged = meshes.pipelines.why_not(example, request, setup.trainer)
        pipelines, stale = None, None
        if unstaged is None:
            pipelines = meshes.pipelines.wanted
            stale = meshes.pipelines.stale_weights(
                request, setup.model, accumulate=setup.trainer.accumulate_grad_batches
            )
        make_search = functools.partial(
            SearchRequest,
            example.graph,
            device_counts=meshes.device_counts,
            returns_memory=request.saves_memory,
            gradient_views=request.gradient_views,
            split=example.split if meshes.tensor and unsplit is None else None,
            mesh=meshes.mesh,
            pipelines=pipelines,
            stale=stale,
            **given,
        )
        return cls(make_search, unsplit, unstaged)


# ---- costs measured here


@dataclass(frozen=True)
class MeasuredCosts:
    """What ranks have measured for a search.

    Args:
        costs: arguments of the `SearchRequest`.
        captured: the steps on slices that rank 0 has captured for it.
    """

    costs: Mapping[str, Any]
    captured: Captured | None


def _measure(
    device: torch.device,
    num_nodes: int,
    make_search: RequestWithoutCosts,
    module: pl.LightningModule,
) -> MeasuredCosts:
    """Measure on every rank.

    Steps on slices are captured on one rank, and measured on all as the unsplit one is.
    """
    # the update of the optimizer
    optimizers, named = make_fake_optimizers(module, device=device)
    optimizer = read_optimizer(optimizers, named_parameters=named, device_type=device.type)
    measurements = Measurements.open(device=device, num_nodes=num_nodes, progress=print)
    times = time_updates(
        optimizers, named_parameters=named, device=device, known=measurements.known_updates
    )
    seconds = measurements.agree_on_updates(times)
    optimizer = dataclasses.replace(optimizer, seconds_per_element=seconds)
    costs: dict[str, Any] = {"cluster": measurements.cluster(), "optimizer": optimizer}

    # the kernels of the step, and of the steps of ranks that hold slices
    search = make_search(**costs)
    kernels: dict[KernelKey, float] = {}
    for graph in (search.graph, *on_rank_0(lambda: local_graphs(search))):
        kernels |= measurements.kernel_seconds(graph)
    captured = None if search.split is None else search.split.captured
    return MeasuredCosts({**costs, "kernel_seconds": kernels}, captured)


# ---- the report


def report_plan(
    planning: Planning,
    search: SearchRequest,
    request: PlanRequest,
    *,
    folder: Path,
    notes: Sequence[str],
    ends: bool = True,
) -> None:
    """Write the frontier and the chosen plan to `folder`, and print them.

    Args:
        planning: the frontier, and the point that was chosen; its times are those of a step.
        search: what was searched, for one of the micro-batches of a step.
        request: what the user asked.
        folder: gets ``frontier.html`` and ``plan.yaml``.
        notes: sentences for the page and, with `ends`, for the terminal.
        ends: print the notes and the folder too.
    """
    plan, points = planning.chosen.plan, planning.frontier.shown_with(planning.chosen)
    # a plan with tensor axes is explained block by block, one with stages stage by stage
    explained = (
        explain_plan(search, plan) if plan.mesh.tensor_axes and plan.schedule is None else None
    )
    # the step of a plan with stages, drawn unless it has too many passes
    step = None if plan.schedule is None else step_of_plan(stage_blocks(search, plan), plan)

    # files
    limit = memory_limit_of(request, search.cluster)
    _, title = save_frontier_page(
        folder,
        planning,
        model=model_name(planning.graph),
        where=search.cluster.name,
        memory_limit=limit,
        notes=notes,
        step=step,
    )
    plan.save(folder / "plan.yaml")

    # the terminal
    STATUS.clear()
    console = Console()
    console.print(title, style="bold", highlight=False, markup=False)
    print_table(points, planning.chosen, console=console, memory_limit=limit)
    console.print(f"{plan.summary()}\n{plan.reason}", highlight=False)
    if plan.accumulate > 1:
        console.print(
            f"A step has {plan.accumulate} micro-batches: trainer.accumulate_grad_batches="
            f"{plan.accumulate}.",
            highlight=False,
        )
    # the loader's batch is that of a data rank, not of each rank
    if plan.mesh.size > plan.mesh.data_parallel_size:
        console.print(
            f"Ranks of its {'pipelines' if plan.schedule else 'tensor axis'} get the same samples: "
            f"with batches of {plan.batch_size} in the loader a step has "
            f"{plan.accumulate * search.global_batch_size}.",
            highlight=False,
        )
    if step is not None:
        console.print(schedule_title(step), highlight=False, markup=False)
        print_stages(explain_stages(search, plan), console=console)
    if explained is not None:
        print_explanation(explained, console=console)
    if ends:
        for note in notes:
            console.print(note, highlight=False, markup=False)
        console.print(f"run folder: {folder}", highlight=False, soft_wrap=True)


def memory_limit_of(request: PlanRequest, cluster: Cluster | None) -> MemoryLimit | None:
    """Return the limit that was given, else the memory of a device; None: neither is known."""
    if request.memory_limit is not None:
        return MemoryLimit(request.memory_limit, request.margin_on(cluster))
    if cluster is None:
        return None
    margin = request.margin_on(cluster)
    return MemoryLimit(cluster.device.memory_bytes, margin, "memory of a device")


def save_frontier_page(
    folder: Path,
    planning: Planning,
    *,
    model: str,
    where: str,
    memory_limit: MemoryLimit | None,
    notes: Sequence[str] = (),
    **more: Any,
) -> tuple[Path, str]:
    """Write ``frontier.html`` to `folder`; return its path and its title.

    Args:
        folder: of the run.
        planning: what was searched and chosen.
        model: its name, for the title.
        where: the cluster, for the title.
        memory_limit: of a device.
        notes: lines on the chosen plan.
        more: further arguments of `save_html`.
    """
    frontier, path = planning.frontier, folder / "frontier.html"
    points = frontier.shown_with(planning.chosen)
    title = report_title(model, where, (point.devices for point in points))
    if frontier.left_out and (left := left_out_sentence(frontier.left_out)) not in notes:
        notes = [*notes, left]
    given: dict[str, Any] = {"memory_limit": memory_limit, "exact": frontier.exact, **more}
    save_html(path, points, planning.chosen, title=title, notes=notes, **given)
    return path, title
