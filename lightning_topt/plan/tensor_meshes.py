"""Meshes with a tensor axis, innermost and inside nodes, and the step of one rank on each under every split worth a look."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.groups import Group
from lightning_topt.costs.sizes import parameter_bytes
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import Placements, Replicate
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.techniques.tensor_parallel.split_candidates import SplitModel
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


def tensor_steps(whole: TrainingStep, split: SplitModel, *, mesh: Mesh) -> Iterator[TrainingStep]:
    """Yield the steps of one rank on `mesh`, which has one tensor axis; `whole` is that of a data rank with nothing split.

    Raises ValueError for several tensor axes.
    """
    if len(mesh.tensor_axes) > 1:
        raise ValueError("the search splits along one tensor axis; give a plan that places parameters along several")
    (axis,) = mesh.tensor_axes
    size = mesh.shape[axis]
    prices = SplitPrices(
        whole.cluster, whole.optimizer, Group(size, mesh.stride([axis])), whole.batch_size / split.samples
    )
    blocks = [block.name for block in whole.graph.blocks]
    for candidate in split.candidates(prices):
        local = split.local_graph(candidate, size)
        if local is not None:
            yield replace(
                whole,
                graph=local,
                mesh=mesh,
                optimizer=whole.optimizer.of_slices(_shares(local, whole.graph)),
                exchange=None,
                split=candidate.by_block(blocks),
                split_calls=split.calls(candidate),
                joined_bytes=_whole_bytes(whole.graph) - _whole_bytes(local) if whole.num_microbatches > 1 else 0.0,
            )


def saving_no_computation(step: TrainingStep, whole: TrainingStep) -> TrainingStep:
    """Return `step`, whose microbatches take `whole`'s computation together, or more; kernels of both that were measured at
    different times may say otherwise.
    """
    own, least = (sum(float(times.sum()) for times in each.compute.values()) for each in (step, whole))
    if 0 < own < least / step.num_microbatches:
        factor = least / step.num_microbatches / own
        step = replace(step)
        step.__dict__["compute"] = {block: factor * times for block, times in step.compute.items()}
    return step


def least_seconds(whole: TrainingStep, size: int) -> float:
    """Return seconds that no step is below in which tensor groups of `size` ranks run the batches of their ranks.

    `whole` is the step of a data rank. All of the computation and the update is split at best, which takes a collective in
    forward and one in backward; the exchange along data axes is hidden.
    """
    (mesh, *_) = tensor_meshes(whole.cluster, whole.mesh.size, size)
    step = replace(whole, mesh=mesh, num_microbatches=size)
    compute = float(sum(times.sum() for times in step.compute.values()))
    update = sum(step.update_seconds(parameter, share=1 / size) for parameter in step.graph.parameters)
    collectives = 2 * size * step.collective_seconds("all_reduce", 1.0, axes=mesh.tensor_axes)
    return compute + update + collectives + step.sent_seconds


def placed_parameters(step: TrainingStep) -> dict[str, tuple[tuple[str, Placements], ...]]:
    """Return where a plan has the parameters of each block that `step` splits, along all axes of its mesh."""
    axes, count = step.mesh.tensor_axes, len(step.mesh.axes)

    def placed(along: Placements) -> Placements:
        of_axis = dict(zip(axes, along, strict=True))
        return tuple(of_axis.get(axis, Replicate()) for axis in range(count))

    return {
        block: tuple((name, placed(along)) for name, along in split) for block, split in step.split.items() if split
    }


def _whole_bytes(graph: OpGraph) -> float:
    return float(sum(map(parameter_bytes, graph.parameters)))


def _shares(local: OpGraph, whole: OpGraph) -> dict[str, float]:
    """The share of every parameter that is local, where that is not all of it."""
    sizes = {parameter.name: parameter.numel for parameter in whole.parameters}
    return {p.name: p.numel / sizes[p.name] for p in local.parameters if p.numel != sizes[p.name]}
