"""What `topt plan` searches: meshes of some numbers of ranks, and pipelines on them.

    mesh, tensor, device_counts     ->  SearchedMeshes      all meshes, or one that is given
    pipeline                        ->  SearchedPipelines   plans with stages, or some of them

Both are read from the configuration, then asked of a captured step. `why_not...` says why a kind of
plan cannot be searched for it. `notes` are the sentences about plans that are left out. Where the
user insists on a kind of plan (``tensor=true``), an error is better than none of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from hydra_plugins.lightning_topt_searchpath import conf_dir
from lightning_topt.basics.argument_checks import check_choice, check_whole
from lightning_topt.cli.example_step import ExampleStep, plain_value
from lightning_topt.costs.cluster import Cluster
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.plan.parallel_plan import PlanError
from lightning_topt.plan.pipeline_search import PipelineRequest, StaleWeights
from lightning_topt.plan.plan_frontier import PlanFrontier
from lightning_topt.plan.plan_search import SearchRequest, why_unsplit
from lightning_topt.plugins.plan_options import (
    MeshPlan,
    PipelinePlan,
    read_device_counts,
    read_mesh,
)
from lightning_topt.plugins.plan_request import PlanRequest, rule_for
from lightning_topt.plugins.requirements import SHARDED, SLICES, STAGES, Fit, why_not
from lightning_topt.plugins.searched_plan import make_fake_optimizers, why_left_out
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES, SCHEDULES

_WAY_OUT = "leave out tensor=true"
_PIPELINE_ENTRIES = ("stages", "schedule", "microbatches")


# ---- pipelines


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
        if not request.stale.allowed:
            if wanted is not None and wanted.schedule in CONTINUOUS_SCHEDULES:
                raise ValueError(
                    f"the schedule {wanted.schedule!r} changes the training: stages compute with "
                    "weights that miss updates. To search it, add strategy.allow_staleness=true, "
                    "or the rule that predicts them, such as spectrain"
                )
            return None
        # allowed: then continuous schedules, which split no parameters, must be searched
        if (
            wanted is None
            or wanted.schedule not in (None, *CONTINUOUS_SCHEDULES)
            or not wanted.takes(1)
        ):
            raise ValueError(
                "strategy.allow_staleness is for pipelines that never flush, which are not "
                "searched here: leave it out"
            )
        # the rule that predicts weights follows from the optimizer
        optimizers, _ = make_fake_optimizers(module, device=torch.device("cpu"))
        if len(optimizers) != 1:
            raise PlanError(
                "a pipeline that never flushes updates with one optimizer, and the module has "
                f"{len(optimizers)}"
            )
        rule = partial(rule_for, optimizers[0], request.stale.prediction, accumulate=accumulate)
        rule()  # one that does not know the optimizer is refused before the search
        return StaleWeights(lambda flight: rule(flight=flight), accumulate)

    def notes(
        self,
        search: SearchRequest,
        example: ExampleStep,
        request: PlanRequest,
        trainer: pl.Trainer,
        *,
        unstaged: str | None,
    ) -> list[str]:
        """Return what is to be said about plans with stages that are left out.

        `unstaged` says why none was searched (`why_not`).
        """
        if unstaged is not None:
            return [f"Plans with stages were not searched: {unstaged}."]
        if search.pipelines is None or self.insists:
            return []
        module = trainer.lightning_module

        # parameters of a model that is built to be planned have no values, and get them in a fit
        def has_values(name: str) -> bool:
            return not module.get_parameter(name).is_meta

        fit = Fit(
            trainer,
            example.batch,
            search.graph,
            request.only_replicated,
            example.reads,
            would_shard=has_values,
        )
        why = why_left_out(fit, search)
        if why is None:
            return []
        return [
            'strategy="topt_full", where each rank has its own batches, leaves '
            f"plans with stages out: {why}."
        ]


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


# ---- meshes


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
                "strategy.allow_compression. topt train takes them as they are"
            )
        if request.allowed.candidates or request.allowed.local_steps:
            raise ValueError(
                "on a given mesh gradients are exchanged as they are: leave out allow_compression, "
                "or mesh"
            )
        on = given if isinstance(given, PipelinePlan) else None
        pipelines = SearchedPipelines.read(config, on=on, has_mesh=True)
        # a mesh with a pipeline axis is searched by the pipeline's shape, not as a mesh
        searched = None if mesh.pipeline_axes else mesh
        return cls(counts, searched, has_tensor, has_tensor, pipelines, mesh.data_parallel_size)

    def global_batch_size(self, samples: int, *, world_size: int) -> int:
        """Return the samples of a step on all ranks.

        `samples` are those of each rank of the trainer, or of each data rank of a given mesh.
        """
        return samples * (world_size if self.data_ranks is None else self.data_ranks)

    def words(self, cluster: Cluster) -> str:
        """Return for how many devices of `cluster` plans are searched, in a sentence."""
        asked, there = " or ".join(map(str, self.device_counts)), cluster.num_devices
        share = "all" if self.device_counts == (there,) else f"{asked} of the"
        return f"Planning for {share} {there} devices of {cluster.name}."

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
