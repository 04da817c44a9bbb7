"""`topt plan` searches all meshes of some numbers of ranks, with tensor axes or without, or one
mesh that is given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from omegaconf import DictConfig, OmegaConf

from lightning_topt.cli.example_step import ExampleStep
from lightning_topt.cli.searched_pipelines import SearchedPipelines
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.plan.parallel_plan import PlanError
from lightning_topt.plan.plan_frontier import PlanFrontier
from lightning_topt.plan.plan_search import SearchRequest, why_unsplit
from lightning_topt.plugins.given_plans import MeshPlan, PipelinePlan
from lightning_topt.plugins.plan_request import PlanRequest
from lightning_topt.plugins.read_options import read_device_counts, read_mesh
from lightning_topt.plugins.searched_plan import needs_whole_parameters

_WAY_OUT = "leave out tensor=true"


@dataclass(frozen=True)
class SearchedMeshes:
    """`device_counts` ranks on all meshes, or on `mesh` only; with `tensor` on those that have a
    tensor axis too, and with `insists` an error is better than none of them.
    """

    device_counts: tuple[int, ...]
    mesh: Mesh | None = None
    tensor: bool = False
    insists: bool = False
    pipelines: SearchedPipelines = field(default_factory=SearchedPipelines)
    data_ranks: int | None = None  # of a given mesh

    @classmethod
    def read(cls, config: DictConfig, request: PlanRequest, trainer: pl.Trainer) -> SearchedMeshes:
        """Read the options ``mesh``, ``tensor`` and ``device_counts``. Raises ValueError where they
        contradict one another or cannot be honoured.
        """
        if config.tensor not in (None, True, False):
            raise ValueError(f"tensor is true, false or null, got {config.tensor!r}")
        cluster, given = request.cluster, _given_mesh(config, request)
        per_node = trainer.num_devices if cluster is None else cluster.devices_per_node
        if given is not None:
            return cls._on(given, config, request, per_node=per_node)
        pipelines = SearchedPipelines.read(config, on=None, has_mesh=False)
        counts = read_device_counts(config.device_counts, default=trainer.world_size)
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
        ranks = math.prod(size for _, size in given.sizes or ())
        counts = read_device_counts(config.device_counts, default=ranks)
        mesh, *_ = [given.mesh(count, num_nodes=max(count // per_node, 1)) for count in counts]
        has_tensor = bool(mesh.tensor_axes)
        if config.tensor is not None and config.tensor != has_tensor:
            known = "has a tensor axis" if has_tensor else "has no tensor axis"
            raise ValueError(
                f"tensor={str(config.tensor).lower()}, but the mesh {known}; leave out one of them"
            )
        if request.allowed.candidates:
            raise ValueError(
                "on a given mesh gradients are exchanged as they are: leave out allow_compression, "
                "or mesh"
            )
        pipelines = SearchedPipelines.read(
            config, on=given if isinstance(given, PipelinePlan) else None, has_mesh=True
        )
        # its scopes are those of the pipeline's shape
        searched = None if mesh.pipeline_axes else mesh
        return cls(counts, searched, has_tensor, has_tensor, pipelines, mesh.data_parallel_size)

    def global_batch_size(self, samples: int, *, world_size: int) -> int:
        """Return the samples of a step on all ranks: `samples` on each rank of the trainer, or on
        each data rank of a given mesh.
        """
        return samples * (world_size if self.data_ranks is None else self.data_ranks)

    def why_not_split(
        self, example: ExampleStep, request: PlanRequest, trainer: pl.Trainer
    ) -> str | None:
        """Return why no tensor axis can be searched for this step, though it should, or None.
        Raises PlanError where the user insists.
        """
        if not self.tensor:
            return None
        reason = _why_not(example, request, trainer, any_batch=self.mesh is None)
        if reason is not None and self.insists:
            raise PlanError(
                f"plans with tensor axes split parameters, but {reason}; choose a mesh without, or "
                f"{_WAY_OUT}"
            )
        return reason

    def notes(self, search: SearchRequest, found: PlanFrontier, unsplit: str | None) -> list[str]:
        """Return what is worth saying about splits that are not among the plans `found`: `unsplit`
        says why none was looked for. Raises PlanError where the user insists and there are none.
        """
        if unsplit is not None:
            return [f"Plans with tensor axes were not searched: {unsplit}."]
        whys = why_unsplit(search)
        if (
            whys
            and self.insists
            and not any(point.plan.mesh.tensor_axes for point in found.candidates)
        ):
            raise PlanError(
                f"nothing of this model can be split: {'; '.join(whys.values())}; {_WAY_OUT}"
            )
        sizes = {
            why: " or ".join(str(size) for size, other in whys.items() if other == why)
            for why in whys.values()
        }
        return [
            f"Left out over {over} ranks of a tensor axis: {why}." for why, over in sizes.items()
        ]


def _given_mesh(config: DictConfig, request: PlanRequest) -> MeshPlan | PipelinePlan | None:
    plan, sizes = request.plan, _plain(config.mesh)
    if plan is None:
        return None if sizes is None else read_mesh(sizes)
    if isinstance(plan, MeshPlan | PipelinePlan) and plan.sizes is not None and sizes is None:
        return plan
    if isinstance(plan, PipelinePlan):
        raise ValueError(
            "topt plan searches pipelines with strategy=topt: what is to be kept is given as "
            "pipeline={stages:4,schedule:1f1b} "
            "or mesh={pipeline:4,data:2}"
        )
    raise ValueError(
        "topt plan searches a plan: leave out strategy.plan, or give nothing but a mesh, such as "
        "mesh={data:2,tensor:4}; "
        "topt verify looks at a plan that is there"
    )


def _why_not(
    example: ExampleStep, request: PlanRequest, trainer: pl.Trainer, *, any_batch: bool
) -> str | None:
    if example.split is None:
        return (
            "the step depends on values of tensors, so that its calls cannot be looked at one by "
            "one"
        )
    if any_batch and not example.graph.batch_scaling:
        return (
            "how the step grows with the batch is unknown, and ranks with fewer parts of the batch "
            "get larger ones"
        )
    if example.graph.unused:
        return f"the step gives {example.graph.unused[0]!r} no gradient"
    return needs_whole_parameters(request, trainer, would_shard=lambda _: False)


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
