"""`SearchRequest` says what to search for, and which step it is on a mesh and as a chain of
blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_topt.communication.exchange_method import GradientMethod
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.compute import KernelKey
from lightning_topt.costs.optimizer import OptimizerProfile
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import Mesh, data_mesh
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plan.continuous_plans import StaleWeights
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.pipeline_search import PipelineRequest
from lightning_topt.plan.split_stages import blocks_of_plan
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.techniques.tensor_parallel.split_candidates import SplitModel


@dataclass(frozen=True)
class SearchRequest:
    """A `SearchRequest` says what to search for one model on one cluster.

    Args:
        graph, cluster, optimizer: see `TrainingStep`.
        device_counts: numbers of ranks to plan for. The global batch is the same for all, so each
            must divide it.
        global_batch_size: samples per step over all ranks.
        shards: whether gradients and parameters may be sharded; else they stay whole on every rank.
        exchanges: ways to exchange whole gradients that may be chosen besides DDP's all-reduce;
            those that a number of ranks cannot have are left out there.
        kernel_seconds: measured kernels (`measure_kernels`); only of use at the captured batch
            size, and not asked on clusters of several kinds of nodes.
        in_place: `kernel_seconds` were measured in steps of the run that returned memory too (see
            `TrainingStep`).
        returns_memory: every plan is to keep a memory limit (see `TrainingStep`); plans that shard
            gradients always do so.
        capture_seconds: what making `graph` took, for the record.
        max_seconds: CPU seconds of the search for one number of devices, without captures of steps
            on slices, after which the best plans so far are returned with `error_bound`.
        split: the same step as one whose parameters can be split over tensor axes; None: no mesh
            has one.
        mesh: the only mesh to look at, of as many ranks as each of `device_counts`; None: all.
        own_batches: look at meshes with a tensor axis only, whose ranks bring a batch each, as data
            ranks do: the ranks of a tensor group run these as microbatches.
        evaluates: whether such a run has evaluations, for which every rank needs the whole
            parameters.
        layout: of the tensor axes of `mesh` (`split_layouts.LAYOUTS`); none: any of one axis.
        pipelines: look at plans with stages too, as asked for; None: at none. With a number of
            stages, a schedule or microbatches, at plans with stages alone.
        stale: with `pipelines`, look at those that never flush as well, whose weights are stale;
            None: at none.
        gradient_views: whether whole gradients are views of DDP's buckets (see `ParallelPlan`):
            what plans may have. Those that have different ones are not compared with one another.
        epsilon: plans that others beat by less than this share, in both costs, may be left out.
    """

    graph: OpGraph
    cluster: Cluster
    optimizer: OptimizerProfile
    device_counts: Sequence[int]
    global_batch_size: int
    shards: bool = True
    exchanges: Sequence[GradientMethod] = ()
    kernel_seconds: Mapping[KernelKey, float] = field(default_factory=dict)
    in_place: bool = False
    returns_memory: bool = False
    capture_seconds: float = 0.0
    max_seconds: float = 10.0
    split: SplitModel | None = None
    mesh: Mesh | None = None
    own_batches: bool = False
    evaluates: bool = True
    layout: str = ""
    pipelines: PipelineRequest | None = None
    stale: StaleWeights | None = None
    gradient_views: Sequence[bool] = (False,)
    epsilon: float = 0.0

    @property
    def kernels(self) -> Mapping[KernelKey, float]:
        """The measured kernels, none on a cluster of several kinds of nodes: one kind measured
        them.
        """
        return {} if self.cluster.nodes else self.kernel_seconds


def step_on(request: SearchRequest, mesh: Mesh) -> TrainingStep:
    """Return the step of a data rank of `mesh`, with nothing split."""
    batches = mesh.ranks_along(mesh.tensor_axes) if request.own_batches else 1
    samples = max(request.global_batch_size // (mesh.data_parallel_size * batches), 1)
    common = request.graph, request.cluster, request.optimizer, mesh, samples, request.kernels
    return TrainingStep(
        *common,
        returns_memory=request.returns_memory,
        in_place=request.in_place,
        num_microbatches=batches,
    )


def stage_blocks(request: SearchRequest, plan: ParallelPlan | None = None) -> StageBlocks:
    """Return the chain of blocks that stages of a pipeline share out; that of a rank with slices
    where `plan` has them.

    Raises PlanError for a plan with other splits than those of the search.
    """
    samples = request.graph.batch_size
    common = (
        request.graph,
        request.cluster,
        request.optimizer,
        data_mesh(1),
        samples,
        request.kernels,
    )
    blocks = StageBlocks(TrainingStep(*common, returns_memory=request.returns_memory))
    return blocks if plan is None else blocks_of_plan(blocks, request.split, plan)
