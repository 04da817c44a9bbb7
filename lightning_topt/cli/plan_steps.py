"""What `topt plan` searches, and the steps from a configuration to a report.

    setup = PlanSetup.of(config)                            # build: the model has no memory
    meshes = SearchedMeshes.read(config, setup.request, setup.trainer)
    example = setup.capture(splits=meshes.tensor)           # capture: the step of one rank
    unpriced = UnpricedSearch.of(setup, meshes, example, request)     # ask: but for the costs
    search = setup.with_costs(unpriced.request, request, batch)     # price: given, or measured here
    report_plan(planning, search, ...)                      # report: what a search has found

`plan` searches once, `what_if` for many clusters, numbers of devices, batches and lengths. Options
say what is searched:

    mesh, tensor, device_counts     ->  SearchedMeshes      all meshes, or one that is given
    pipeline                        ->  SearchedPipelines   plans with stages, or some of them

Both are read from the configuration, then asked of a captured step. `why_not...` says why a kind of
plan cannot be searched for it. `notes` are the sentences about plans that are left out. Where the
user insists on a kind of plan (``tensor=true``), an error is better than none of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from hydra_plugins.lightning_topt_searchpath import conf_dir
from lightning_topt.basics.argument_checks import check_choice, check_whole
from lightning_topt.cli.calibrate import run_on_ranks
from lightning_topt.cli.example_step import ExampleStep, ModelSetup, model_name, plain_value
from lightning_topt.communication.started_ranks import started_rank
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.communication import check_world_size
from lightning_topt.costs.compute import KernelKey
from lightning_topt.costs.measurements import Measurements
from lightning_topt.costs.measuring import on_rank_0, world_size
from lightning_topt.costs.optimizer import OptimizerProfile, read_optimizer, time_updates
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.plan.explanation import explain_stages
from lightning_topt.plan.frontier_report import (
    MemoryLimit,
    print_stages,
    print_table,
    report_title,
    save_html,
)
from lightning_topt.plan.parallel_plan import PlanError
from lightning_topt.plan.pipeline_search import PipelineRequest, StaleWeights
from lightning_topt.plan.plan_frontier import PlanFrontier
from lightning_topt.plan.plan_search import SearchRequest, local_graphs, why_unsplit
from lightning_topt.plan.step_factors import left_out_sentence
from lightning_topt.plugins.auto_parallel import AutoParallelStrategy
from lightning_topt.plugins.plan_options import (
    MeshPlan,
    PipelinePlan,
    read_device_counts,
    read_mesh,
)
from lightning_topt.plugins.plan_request import (
    PlanRequest,
    allowed_ways,
    rule_for,
    steps_of_fit,
    why_not_alone,
)
from lightning_topt.plugins.requirements import SHARDED, SLICES, STAGES, Fit, why_not
from lightning_topt.plugins.searched_plan import Planning, make_fake_optimizers
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES, SCHEDULES
from lightning_topt.techniques.known_trials import KnownTrials, compiled_costs
from lightning_topt.techniques.tensor_parallel.split_model import Captured
from topt_console.status_line import STATUS

RequestWithoutCosts = Callable[..., SearchRequest]  # called with the costs
_WAY_OUT = "leave out tensor=true"
_PIPELINE_ENTRIES = ("stages", "schedule", "microbatches")


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
        self, make_search: RequestWithoutCosts, request: PlanRequest, batch: object
    ) -> SearchRequest | None:
        """Return the search with all that it needs besides the graph.

        Costs come from the cluster of `request`; without one they are measured here. Compiled
        blocks cost what fits on this machine have found, for batches like `batch`.

        Returns:
            None on ranks of torchrun and srun that have nothing more to do.
        """
        # costs are given with the cluster, or measured on ranks of this machine
        compiles = request.allowed.compile
        if request.cluster is not None:
            if compiles:
                print("Compiled blocks are left out: they are measured on this machine alone")
            search = make_search(cluster=request.cluster, optimizer=self._optimizer)
        else:
            accelerator = "cpu" if self.trainer.strategy.root_device.type == "cpu" else "cuda"
            measured = run_on_ranks(
                _measure,
                make_search,
                self.model,
                (batch, self.trainer.precision, steps_of_fit(self.trainer)) if compiles else None,
                accelerator=accelerator,
                devices=self.trainer.num_devices,
            )
            if measured is None:
                return None
            # the steps on slices were captured where kernels were measured: not captured again
            costs, captured = measured
            if compiles and not costs["compiled"]:
                print(
                    "Compiled blocks are left out: no fit with allow='compile' has found here that "
                    "they pay for this model and batch"
                )
            search = make_search(**costs)
            if search.split is not None and captured is not None:
                search.split.captured.update(captured)
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


def _measure(
    device: torch.device,
    num_nodes: int,
    make_search: RequestWithoutCosts,
    module: pl.LightningModule,
    fit: tuple[object, str, float] | None,
) -> tuple[dict[str, Any], Captured | None]:
    """Measure on every rank; return arguments of the `SearchRequest`, and captured steps on slices.

    These are captured on rank 0, and measured on all as the unsplit step is. `fit` is the batch,
    the precision and the steps of one that may compile blocks.
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
    if fit is not None:
        batch, precision, steps = fit
        ranks = world_size() // num_nodes
        known = KnownTrials(module, batch, device=device, ranks=ranks, precision=precision)
        costs["compiled"] = compiled_costs(module, known.trials, steps=steps)
    return {**costs, "kernel_seconds": kernels}, captured


# ---- what is searched: pipelines


@dataclass(frozen=True)
class SearchedPipelines:
    """The plans with stages that are searched.

    Args:
        wanted: which of them; None: none.
        insists: an error is better than none of them.
    """

    wanted: PipelineRequest | None = None
    insists: bool = False

    @classmethod
    def read(
        cls, config: DictConfig, *, on: PipelinePlan | None, has_mesh: bool
    ) -> SearchedPipelines:
        """Read the option ``pipeline``.

        Args:
            config: of `topt plan`.
            on: a given mesh that has a pipeline axis.
            has_mesh: some mesh was given.

        Raises:
            ValueError: the option cannot be read, or contradicts the mesh.
        """
        given = plain_value(config.pipeline)
        # a mesh that is given decides whether there are stages: the option may not say otherwise
        if on is None and has_mesh and given not in (None, False):
            raise ValueError(
                "pipeline= asks for stages, but the mesh has no pipeline axis, such as "
                "'mesh={pipeline:4,data:2}'"
            )
        if given is False and on is not None:
            raise ValueError(
                "pipeline=false, but the mesh has a pipeline axis; leave out one of them"
            )
        if given is False or (has_mesh and on is None):
            return cls(None)

        # what the mesh says, then what the option says
        # entries that neither gives stay open, and are searched
        known = PipelineRequest()
        if on is not None:
            sizes = dict(on.sizes or ())
            given_parts = on.stages, on.schedule, on.microbatches, sizes["pipeline"]
            known = PipelineRequest(*given_parts, tensor=sizes.get("tensor", 1))
        if given is None or given is True:
            return cls(known, insists=bool(given) or known.is_given)
        return cls(replace(known, **_read_pipeline_entries(given)), insists=True)

    def why_not(
        self, example: ExampleStep, request: PlanRequest, trainer: pl.Trainer
    ) -> str | None:
        """Return why this step cannot run in stages, though that should be searched, or None.

        Raises:
            PlanError: the user insists.
        """
        if self.wanted is None:
            return None
        reason = why_not(_unbuilt(request, trainer), STAGES, SHARDED)
        # stages cannot read values before the last block; whether they would is not known here
        if reason is None and example.reads_values and not self.insists:
            reason = (
                "the step reads values of tensors, which stages can do after the last block alone "
                "(pipeline=true insists)"
            )
        if reason is not None and self.insists:
            raise PlanError(
                f"a pipeline runs the step in stages, but {reason}; leave out pipeline, or set it "
                "to false"
            )
        return reason

    def stale_weights(
        self, request: PlanRequest, module: pl.LightningModule, *, accumulate: int
    ) -> StaleWeights | None:
        """Return what may be chosen of asynchronous pipelines; None: none of them.

        An update takes `accumulate` minibatches.

        Raises:
            ValueError: they are asked for and not allowed, or allowed and not searched.
            PlanError: the module has several optimizers.
        """
        wanted = self.wanted
        # not allowed: then none may be asked for
        if not request.allowed.staleness:
            if wanted is not None and wanted.schedule in CONTINUOUS_SCHEDULES:
                raise ValueError(
                    f"the schedule {wanted.schedule!r} changes the training: stages compute with "
                    "weights that miss updates. To search it, add strategy.allow=staleness, "
                    "or the rule that predicts them (strategy.allow={staleness:spectrain})"
                )
            return None
        # allowed: then continuous schedules, which split no parameters, must be searched
        if (
            wanted is None
            or wanted.schedule not in (None, *CONTINUOUS_SCHEDULES)
            or not wanted.takes(1)
        ):
            raise ValueError(
                "strategy.allow has staleness, which is for pipelines that never flush, and these "
                "are not searched here: leave it out"
            )
        # the rule that predicts weights follows from the optimizer
        optimizers, _ = make_fake_optimizers(module, device=torch.device("cpu"))
        if len(optimizers) != 1:
            raise PlanError(
                "a pipeline that never flushes updates with one optimizer, and the module has "
                f"{len(optimizers)}"
            )
        rule = functools.partial(
            rule_for, optimizers[0], request.allowed.rule, accumulate=accumulate
        )
        rule()  # one that does not know the optimizer is refused before the search
        return StaleWeights(lambda flight: rule(flight=flight), accumulate)


def _unbuilt(request: PlanRequest, trainer: pl.Trainer) -> Fit:
    # What requirements look at, whose parameters have no values yet
    only_replicated = request.only_replicated
    return Fit(trainer, only_replicated=only_replicated, would_shard=lambda _: False)


def _read_pipeline_entries(given: object) -> dict[str, Any]:
    # The entries of ``pipeline={stages:4,schedule:1f1b}`` that are given, checked
    known = _PIPELINE_ENTRIES
    if not isinstance(given, Mapping) or not given or set(given) - set(known):
        raise ValueError(f"pipeline is true, false, or some of {', '.join(known)}; got {given!r}")
    # the schedule is a name; the other two are whole numbers
    if given.get("schedule") is not None:
        check_choice(
            given["schedule"], name="pipeline.schedule", allowed=(*SCHEDULES, *CONTINUOUS_SCHEDULES)
        )
    for key, value in given.items():
        if key != "schedule" and value is not None:
            check_whole(value, name=f"pipeline.{key}")
    return {str(key): value for key, value in given.items() if value is not None}


# ---- what is searched: meshes


@dataclass(frozen=True)
class SearchedMeshes:
    """The meshes that are searched, and the pipelines on them.

    Args:
        device_counts: numbers of ranks.
        mesh: this one only; None: all of so many ranks.
        tensor: those with a tensor axis as well.
        insists: an error is better than none of those.
        pipelines: the plans with stages.
        data_ranks: of a given mesh.
    """

    device_counts: tuple[int, ...]
    mesh: Mesh | None = None
    tensor: bool = False
    insists: bool = False
    pipelines: SearchedPipelines = field(default_factory=SearchedPipelines)
    data_ranks: int | None = None

    @classmethod
    def read(cls, config: DictConfig, request: PlanRequest, trainer: pl.Trainer) -> SearchedMeshes:
        """Read the options ``mesh``, ``tensor``, ``device_counts`` and ``pipeline``.

        Raises:
            ValueError: they contradict one another, or cannot be honoured.
        """
        if config.tensor not in (None, True, False):
            raise ValueError(f"tensor is true, false or null, got {config.tensor!r}")
        cluster, given = request.cluster, _given_mesh(config, request)
        # of the machines that are planned for, which need not be these
        per_node = trainer.num_devices if cluster is None else cluster.devices_per_node
        if given is not None:
            return cls._on(given, config, request, per_node=per_node)

        # all meshes: a tensor axis lies inside a node, so its size divides both numbers of devices
        pipelines = SearchedPipelines.read(config, on=None, has_mesh=False)
        counts = read_device_counts(config.device_counts, default=_ranks(config, cluster, trainer))
        # some number of ranks has such an axis
        some = any(math.gcd(per_node, count) > 1 for count in counts)
        if config.tensor and not some:
            raise ValueError(
                "tensor=true, but a tensor axis lies inside a node, and no size above 1 divides "
                f"both the {per_node} device(s) of a node and {' or '.join(map(str, counts))} "
                f"rank(s); give a mesh, or {_WAY_OUT}"
            )
        tensor = some and config.tensor is not False
        return cls(counts, tensor=tensor, insists=bool(config.tensor), pipelines=pipelines)

    @classmethod
    def _on(
        cls,
        given: MeshPlan | PipelinePlan,
        config: DictConfig,
        request: PlanRequest,
        *,
        per_node: int,
    ) -> SearchedMeshes:
        # Read the options beside a `given` mesh
        # a mesh without sizes takes all ranks; it must be possible for each number of them
        ranks = math.prod(size for _, size in given.sizes or ())
        counts = read_device_counts(config.device_counts, default=ranks)
        # all are made, for the errors of those that cannot be; the first one is searched
        mesh, *_ = [given.mesh(count, num_nodes=max(count // per_node, 1)) for count in counts]
        has_tensor = bool(mesh.tensor_axes)
        if config.tensor is not None and config.tensor != has_tensor:
            known = "has a tensor axis" if has_tensor else "has no tensor axis"
            raise ValueError(
                f"tensor={str(config.tensor).lower()}, but the mesh {known}; leave out one of them"
            )
        if isinstance(given, PipelinePlan) and given.gradient_exchange is not None:
            raise ValueError(
                "topt plan searches what rows of stages exchange, and takes nothing given beside a "
                "mesh: leave out gradient_exchange; or leave out the mesh, and say "
                "strategy.allow=compression. topt train takes them as they are"
            )
        if request.allowed.changes_exchange:
            raise ValueError(
                "on a given mesh gradients are exchanged as they are: leave out mesh, or "
                "compression and local_steps in strategy.allow"
            )
        on = given if isinstance(given, PipelinePlan) else None
        pipelines = SearchedPipelines.read(config, on=on, has_mesh=True)
        # a mesh with a pipeline axis is searched by the pipeline's shape, not as a mesh
        searched = None if mesh.pipeline_axes else mesh
        return cls(counts, searched, has_tensor, has_tensor, pipelines, mesh.data_parallel_size)

    def check_devices(self, cluster: Cluster | None, trainer: pl.Trainer) -> None:
        """Raise ValueError where `cluster`, or the ranks here, are fewer than is searched for."""
        most = max(self.device_counts)
        if cluster is not None:
            check_world_size(cluster, world_size=most)
        elif most > (here := max(started_rank()[1], trainer.num_devices)):
            raise ValueError(
                f"{most} ranks do not fit the {here} device(s) here: set trainer.devices={most}, "
                "or choose a larger cluster, such as cluster=a100_8x8"
            )

    def global_batch_size(self, samples: int, *, world_size: int) -> int:
        """Return the samples of a step on all ranks.

        `samples` are those of each rank of the trainer, or of each data rank of a given mesh.
        """
        return samples * (world_size if self.data_ranks is None else self.data_ranks)

    def words(self, cluster: Cluster, precision: str) -> str:
        """Return for how many devices of `cluster` plans are searched, in a sentence."""
        asked, there = " or ".join(map(str, self.device_counts)), cluster.num_devices
        share = "all" if self.device_counts == (there,) else f"{asked} of the"
        return f"Planning for {share} {there} devices of {cluster.name}, in {precision}."

    def why_not_split(
        self, example: ExampleStep, request: PlanRequest, trainer: pl.Trainer
    ) -> str | None:
        """Return why no tensor axis can be searched for this step, though it should, or None.

        Raises:
            PlanError: the user insists.
        """
        if not self.tensor:
            return None
        # of the step first, then of the user's options
        if example.split is None:
            reason: str | None = (
                "the step depends on values of tensors, so that its calls cannot be looked at one "
                "by one"
            )
        elif self.mesh is None and not example.graph.batch_scaling:
            reason = (
                "how the step grows with the batch is unknown, and ranks with fewer parts of the "
                "batch get larger ones"
            )
        elif example.graph.unused:
            reason = f"the step gives {example.graph.unused[0]!r} no gradient"
        else:
            reason = why_not(_unbuilt(request, trainer), SHARDED, SLICES)
        if reason is not None and self.insists:
            raise PlanError(
                f"plans with tensor axes split parameters, but {reason}; choose a mesh without, or "
                f"{_WAY_OUT}"
            )
        return reason

    def notes(self, search: SearchRequest, found: PlanFrontier, unsplit: str | None) -> list[str]:
        """Return what is to be said about splits that are not among the plans `found`.

        `unsplit` says why none was searched (`why_not_split`).

        Raises:
            PlanError: the user insists, and there are none.
        """
        if unsplit is not None:
            return [f"Plans with tensor axes were not searched: {unsplit}."]
        whys = why_unsplit(search)  # by size of the tensor axis
        if (
            whys
            and self.insists
            and not any(point.plan.mesh.tensor_axes for point in found.candidates)
        ):
            raise PlanError(
                f"nothing of this model can be split: {'; '.join(whys.values())}; {_WAY_OUT}"
            )
        # one sentence for each reason, with the sizes that it holds for
        sizes = {
            why: " or ".join(str(size) for size, other in whys.items() if other == why)
            for why in whys.values()
        }
        return [
            f"Left out over {over} ranks of a tensor axis: {why}." for why, over in sizes.items()
        ]


def _ranks(config: DictConfig, cluster: Cluster | None, trainer: pl.Trainer) -> int:
    """Return for how many ranks plans are searched where no number is given.

    All devices of a cluster, unless the command line or a configuration says how many of them the
    trainer has: other numbers than those of `conf/trainer/default.yaml`.
    """
    if cluster is None:
        return trainer.world_size
    words = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    usual: Any = OmegaConf.load(conf_dir() / "trainer" / "default.yaml")
    names = ("devices", "num_nodes")
    given = any(re.match(r"\+*trainer\.(devices|num_nodes)=", word) for word in words) or any(
        config.trainer.get(name, usual[name]) != usual[name] for name in names
    )
    if given and trainer.num_nodes > 1 and trainer.num_devices != cluster.devices_per_node:
        raise ValueError(
            f"nodes of {cluster.name} have {cluster.devices_per_node} devices, and the trainer "
            f"takes {trainer.num_devices}: say cluster.devices_per_node={trainer.num_devices}"
        )
    return trainer.world_size if given else cluster.num_devices


def _given_mesh(config: DictConfig, request: PlanRequest) -> MeshPlan | PipelinePlan | None:
    # The mesh of ``mesh`` or of ``strategy.plan``; None where neither gives one
    # one of the two may give it; both together are an error below
    plan, sizes = request.plan, plain_value(config.mesh)
    if plan is None:
        return None if sizes is None else read_mesh(sizes)
    if isinstance(plan, MeshPlan | PipelinePlan) and plan.sizes is not None and sizes is None:
        return plan
    if isinstance(plan, PipelinePlan):
        raise ValueError(
            "topt plan searches pipelines with strategy=topt: what is to be kept is given as "
            "'pipeline={stages:4,schedule:1f1b}' or 'mesh={pipeline:4,data:2}'"
        )
    raise ValueError(
        "topt plan searches a plan: leave out strategy.plan, or give nothing but a mesh, such as "
        "'mesh={data:2,tensor:4}'; topt verify looks at a plan that is there"
    )


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
    """Write the page and the chosen plan to `folder`, and print them.

    Args:
        planning: the frontier, and the point that was chosen; its times are those of a step.
        search: what was searched, for one of the micro-batches of a step.
        request: what the user asked.
        folder: gets ``frontier.html`` and ``plan.yaml``.
        notes: sentences for the page and, with `ends`, for the terminal.
        ends: print the notes and the folder too.
    """
    plan, points = planning.chosen.plan, planning.frontier.shown_with(planning.chosen)

    # files
    limit = memory_limit_of(request, search.cluster)
    _, title = save_frontier_page(
        folder,
        planning,
        model=model_name(planning.graph),
        where=search.cluster.name,
        memory_limit=limit,
        notes=notes,
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
    if plan.schedule is not None:
        print_stages(explain_stages(search, plan), console=console)
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
) -> tuple[Path, str]:
    """Write ``frontier.html`` to `folder`; return its path and its title.

    Args:
        folder: of the run.
        planning: what was searched and chosen.
        model: its name, for the title.
        where: the cluster, for the title.
        memory_limit: of a device.
        notes: lines on the chosen plan.
    """
    frontier, path = planning.frontier, folder / "frontier.html"
    points = frontier.shown_with(planning.chosen)
    title = report_title(model, where, (point.devices for point in points))
    if frontier.left_out and (left := left_out_sentence(frontier.left_out)) not in notes:
        notes = [*notes, left]
    save_html(
        path,
        points,
        planning.chosen,
        memory_limit=memory_limit,
        title=title,
        exact=frontier.exact,
        notes=notes,
    )
    return path, title
