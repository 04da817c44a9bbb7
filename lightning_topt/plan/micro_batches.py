"""Steps of several micro-batches, from the prediction of one.

    T_k = k T - (k - 1) (u + x)     step_of_microbatches

T seconds of a micro-batch's forward, backward, exchange x and update u; k micro-batches of a step,
whose gradients are added up. Plans with sharded gradients exchange at every micro-batch: x is 0 for
them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.optimizer import OptimizerProfile
from lightning_topt.costs.sizes import parameter_bytes
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plan.parallel_plan import ParallelPlan, StepEstimate
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint
from lightning_topt.plan.plan_search import SearchRequest


@dataclass(frozen=True)
class ModelFacts:
    """Bytes of a checkpoint, and seconds of a full update by block."""

    checkpoint_bytes: float
    update_seconds: dict[str, float]

    @classmethod
    def of(cls, graph: OpGraph, optimizer: OptimizerProfile, cluster: Cluster) -> ModelFacts:
        """Return the facts of a graph and its optimizer on `cluster`.

        A checkpoint has parameters and optimizer state.
        """
        size, seconds = 0.0, {block.name: 0.0 for block in graph.blocks}
        for parameter in graph.parameters:
            size += parameter_bytes(parameter)
            # a frozen parameter is in the checkpoint, but has no state and no update
            if parameter.trainable:
                size += optimizer.state_bytes(parameter.name)
                seconds[parameter.block] += optimizer.update_seconds(
                    parameter.name, numel=parameter.numel, device=cluster.device
                )
        return cls(size, seconds)

    def update_of(self, plan: ParallelPlan) -> float:
        """Return the seconds of the update of one rank under `plan`."""
        total = 0.0
        for block, config in plan.configs.items():
            # ranks that share the optimizer state share its update
            axes = config.storage.sharded_axes("optimizer_state")
            share = 1 / plan.mesh.ranks_along(axes) if axes else 1.0
            total += share * self.update_seconds.get(block, 0.0)
        # along tensor axes every rank updates its slices; a rank of a pipeline updates its stages,
        # about as much as the others
        return total / plan.mesh.ranks_along((*plan.mesh.tensor_axes, *plan.mesh.pipeline_axes))


def step_of_microbatches(point: PlanPoint, *, accumulate: int, facts: ModelFacts) -> PlanPoint:
    """Return the point of a step of so many micro-batches like that of `point`, with one update."""
    plan, predicted = point.plan, point.plan.predicted
    # With one micro-batch the step of `point` is the step: its update need not be told apart.
    if accumulate == 1 or predicted is None:
        return point
    # what is done once: the update, and the exchange of unsharded gradients
    exposed, once = predicted.exposed_communication_seconds, facts.update_of(plan)
    if plan.keeps_gradients_whole and plan.schedule is None:
        once += exposed
    else:
        exposed *= accumulate
    # k steps less what k - 1 of them leave out, and never less than one step
    seconds = max(accumulate * point.step_seconds - (accumulate - 1) * once, point.step_seconds)
    exposed = min(exposed, seconds)
    of_step = StepEstimate(seconds, point.peak_bytes, seconds - exposed, exposed)
    of_steps = replace(plan, predicted=of_step, accumulate=accumulate)
    return replace(point, step_seconds=seconds, plan=of_steps)


def of_steps(frontier: PlanFrontier, *, accumulate: int, facts: ModelFacts) -> PlanFrontier:
    """Return a frontier of micro-batches as one of steps of `accumulate` of them.

    It is not exact: a plan that others beat in a micro-batch may do more of it only once in a step.
    """
    if accumulate == 1:
        return frontier
    points, uniform = (
        [step_of_microbatches(point, accumulate=accumulate, facts=facts) for point in several]
        for several in (frontier.points, frontier.uniform)
    )
    # a plan that another one beats in a step is dropped
    kept = PlanFrontier.of(points, uniform=uniform)
    # what is left out takes at least its micro-batch, a plan of the frontier k of its own
    bound = accumulate * (1 + frontier.error_bound) - 1
    return replace(
        frontier, points=kept.points, uniform=kept.uniform, exact=False, error_bound=bound
    )


def of_microbatches(request: SearchRequest, count: int) -> SearchRequest:
    """Return what is searched for one of `count` micro-batches of `request`.

    Pipelines cut their batches themselves, and are searched with one micro-batch alone.
    """
    if count == 1:
        return request
    return replace(
        request, global_batch_size=request.global_batch_size // count, pipelines=None, stale=None
    )
