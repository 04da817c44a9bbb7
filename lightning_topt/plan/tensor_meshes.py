"""Meshes with a tensor axis, innermost and inside nodes, and the step of one rank on each under every split worth a look."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.groups import Group
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import Placements, Replicate
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.techniques.tensor_parallel.split_candidates import ModelSplit, SplitModel
from lightning_topt.techniques.tensor_parallel.split_prices import SplitPrices


def tensor_sizes(cluster: Cluster, count: int) -> list[int]:
    """Return the sizes that a tensor axis of `count` ranks may have: those that divide the ranks and a node, above 1."""
    per_node = min(cluster.devices_per_node, count)
    return [size for size in range(2, per_node + 1) if count % size == 0 and cluster.devices_per_node % size == 0]


def tensor_meshes(cluster: Cluster, count: int, size: int) -> Iterator[Mesh]:
    """Yield the meshes of `count` ranks with a tensor axis of `size`: one data axis, then copies times shards."""
    per_node, data = cluster.devices_per_node, count // size
    whole, tensor = "intra" if count <= per_node else "inter", Axis("tensor", size)
    yield Mesh((Axis("data", data, whole), tensor))
    for shard in range(2, data // 2 + 1):
        if data % shard == 0:
            inside = "intra" if shard * size <= per_node and per_node % (shard * size) == 0 else "inter"
            yield Mesh((Axis("data_replicate", data // shard, whole), Axis("data_shard", shard, inside), tensor))


def tensor_steps(
    whole: TrainingStep,
    split: SplitModel,
    *,
    mesh: Mesh,
    is_needed: Callable[[TrainingStep], bool] | None = None,
) -> Iterator[TrainingStep]:
    """Yield the steps of one rank on `mesh`, which has one tensor axis; `whole` is that of a data rank with nothing split.

    `is_needed` is asked before a step is captured, with one that costs at most as much. Raises ValueError for several tensor
    axes.
    """
    if len(mesh.tensor_axes) > 1:
        raise ValueError("the search splits along one tensor axis; give a plan that places parameters along several")
    (axis,) = mesh.tensor_axes
    size = mesh.shape[axis]
    prices = SplitPrices(
        whole.cluster, whole.optimizer, Group(size, mesh.stride([axis])), whole.batch_size / split.samples
    )
    for candidate in split.candidates(prices):
        if is_needed is not None:
            bound = split.bound_graph(candidate, prices)
            if not is_needed(step_of(whole, bound, mesh=mesh, split=candidate)):
                continue
        local = split.local_graph(candidate, size)
        if local is not None:
            yield step_of(whole, local, mesh=mesh, split=candidate)


def step_of(whole: TrainingStep, local: OpGraph, *, mesh: Mesh, split: ModelSplit) -> TrainingStep:
    """Return the step `local` of one rank on `mesh` under `split`; `whole` as in `tensor_steps`."""
    return replace(
        whole,
        graph=local,
        mesh=mesh,
        optimizer=whole.optimizer.of_slices(_shares(local, whole.graph)),
        exchange=None,
        split=split.by_block([block.name for block in whole.graph.blocks]),
    )


def placed_parameters(step: TrainingStep) -> dict[str, tuple[tuple[str, Placements], ...]]:
    """Return where a plan has the parameters of each block that `step` splits, along all axes of its mesh."""
    axes, count = step.mesh.tensor_axes, len(step.mesh.axes)

    def placed(along: Placements) -> Placements:
        of_axis = dict(zip(axes, along, strict=True))
        return tuple(of_axis.get(axis, Replicate()) for axis in range(count))

    return {
        block: tuple((name, placed(along)) for name, along in split) for block, split in step.split.items() if split
    }


def _shares(local: OpGraph, whole: OpGraph) -> dict[str, float]:
    """The share of every parameter that is local, where that is not all of it."""
    sizes = {parameter.name: parameter.numel for parameter in whole.parameters}
    return {p.name: p.numel / sizes[p.name] for p in local.parameters if p.numel != sizes[p.name]}
