"""Meshes with a tensor axis, and the step of one rank on its slices.

The tensor axis is the innermost one, inside nodes. `tensor_steps` yields the step of one rank on a
mesh under every split worth pricing; `step` below is always a `TrainingStep`:

    whole      the step of a data rank, with nothing split
    split      the model whose parameters can be split (`SplitModel`)
    a layout   which parameters are split, and maybe tensors between layers: `step_in`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.communication import Group
from lightning_topt.costs.sizes import parameter_bytes
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.blocks import block_of
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import OpConfig, Placements, Replicate
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.techniques.tensor_parallel.split_layouts import (
    SplitLayout,
    layout_named_by,
    rules_of,
)
from lightning_topt.techniques.tensor_parallel.split_model import SplitModel
from lightning_topt.techniques.tensor_parallel.split_prices import SplitPrices

# ---- meshes


def tensor_sizes(cluster: Cluster, count: int) -> list[int]:
    """Return the sizes that a tensor axis of `count` ranks may have.

    They divide the ranks and a node, and are above 1.
    """
    per_node = min(cluster.devices_per_node, count)
    return [
        size
        for size in range(2, per_node + 1)
        if count % size == 0 and cluster.devices_per_node % size == 0
    ]


def tensor_meshes(cluster: Cluster, count: int, size: int) -> Iterator[Mesh]:
    """Yield the meshes of `count` ranks with a tensor axis of `size`.

    One data axis first, then copies times shards.
    """
    per_node, data = cluster.devices_per_node, count // size
    whole, tensor = "intra" if count <= per_node else "inter", Axis("tensor", size)
    yield Mesh((Axis("data", data, whole), tensor))
    # copies times shards
    for shard in range(2, data // 2 + 1):
        if data % shard == 0:
            inside = (
                "intra" if shard * size <= per_node and per_node % (shard * size) == 0 else "inter"
            )
            yield Mesh(
                (
                    Axis("data_replicate", data // shard, whole),
                    Axis("data_shard", shard, inside),
                    tensor,
                )
            )


def least_seconds(whole: TrainingStep, size: int) -> float:
    """Return a lower bound of all steps in which tensor groups of `size` run their ranks' batches.

    `whole` is the step of a data rank. At best all of the computation and the update is split,
    which takes a collective in forward and one in backward of each batch. The exchange along data
    axes is hidden then.
    """
    (mesh, *_) = tensor_meshes(whole.cluster, whole.mesh.size, size)
    step = replace(whole, mesh=mesh, num_microbatches=size)
    compute = float(sum(times.sum() for times in step.compute.values()))
    update = sum(
        step.update_seconds(parameter, share=1 / size) for parameter in step.graph.parameters
    )
    collectives = 2 * size * step.collective_seconds("all_reduce", 1.0, axes=mesh.tensor_axes)
    return compute + update + collectives + step.sent_seconds


# ---- steps on slices


def tensor_steps(
    whole: TrainingStep, split: SplitModel, *, mesh: Mesh, layout: str = ""
) -> Iterator[TrainingStep]:
    """Yield the steps of one rank on `mesh`, which has tensor axes.

    In the `layout` "tensor" tensors are unsharded between layers. Without a layout, the last step
    has them split too (`tensor_sequence`), where another step was found. In any other layout, which
    other axes than ``tensor`` have by their names, there is one step.

    Args:
        whole: the unsplit step of a data rank.
        split: the model.
        mesh: with the tensor axes.
        layout: one of `LAYOUTS`; "" for any.

    Raises:
        ValueError: the axes have no layout, or the model cannot run in it.
    """
    # names of axes say the layout where none is given
    layout = layout or layout_named_by([mesh.names[axis] for axis in mesh.tensor_axes])
    if layout not in ("", "tensor"):
        yield layout_step(whole, split, mesh=mesh, layout=layout)
        return
    prices, found = prices_on(whole, split, mesh=mesh), False
    for candidate in split.candidates(prices):
        if (step := step_in(candidate.layout, whole, split, mesh=mesh)) is not None:
            yield step
            found = True
    # tensors between layers split as well, if the model can run so
    if found and not layout:
        with suppress(ValueError):
            yield layout_step(whole, split, mesh=mesh, layout="tensor_sequence")


def layout_step(whole: TrainingStep, split: SplitModel, *, mesh: Mesh, layout: str) -> TrainingStep:
    """Return the step of one rank on `mesh` in a layout (`LAYOUTS`) along its tensor axes.

    Raises:
        ValueError: the model cannot run so.
    """
    found = split.layout(layout, prices_on(whole, split, mesh=mesh), _along(mesh))
    step = step_in(found, whole, split, mesh=mesh)
    if step is None:
        why = "; ".join(split.refusals(mesh.ranks_along(mesh.tensor_axes)))
        raise ValueError(
            f"the code of this model does not run on slices in the layout {layout!r}: {why}. "
            "Choose plan='tensor'"
        )
    return step


def step_in(
    found: SplitLayout, whole: TrainingStep, split: SplitModel, *, mesh: Mesh
) -> TrainingStep | None:
    """Return the step with its tensors as in `found`; None where it cannot be captured."""
    along = _along(mesh)
    local = split.local_graph(found, along)
    if local is None:
        return None
    blocks = [block.name for block in whole.graph.blocks]
    # parameters by block, with their placements along the tensor axes
    placed: dict[str, list[tuple[str, Placements]]] = {block: [] for block in blocks}
    for name, placements in found.placements.items():
        block = block_of(name, blocks)
        placed[block].append((name.removeprefix(f"{block}."), placements))
    # tensors between layers by block
    computes = {
        block: {
            "inputs": rule.inputs,
            "outputs": rule.outputs,
            "sums": rule.sums,
            "gathers": tuple(
                axis.name for axis, gathers in zip(along, rule.gathers, strict=False) if gathers
            ),
        }
        for block, rule in found.rules.items()
        if block in placed
    }
    return replace(
        _on_slices(whole, local, mesh=mesh),
        split={block: tuple(each) for block, each in placed.items()},
        computes=computes,
        split_calls=sum(split.calls(found).values()),
    )


def _on_slices(whole: TrainingStep, local: OpGraph, *, mesh: Mesh) -> TrainingStep:
    # which part of each parameter a rank has
    sizes = {p.name: p.numel for p in whole.graph.parameters}
    shares = {p.name: p.numel / sizes[p.name] for p in local.parameters if p.numel != sizes[p.name]}
    return replace(
        whole,
        graph=local,
        mesh=mesh,
        optimizer=whole.optimizer.of_slices(shares),
        exchange=None,
        # what an evaluation gathers, in which each rank runs the unsplit model on its batch
        joined_bytes=_parameter_bytes(whole.graph) - _parameter_bytes(local)
        if whole.num_microbatches > 1
        else 0.0,
    )


def _parameter_bytes(graph: OpGraph) -> float:
    return float(sum(map(parameter_bytes, graph.parameters)))


def _along(mesh: Mesh) -> tuple[Axis, ...]:
    # The tensor axes of a mesh
    return tuple(mesh.axes[axis] for axis in mesh.tensor_axes)


def prices_on(whole: TrainingStep, split: SplitModel, *, mesh: Mesh) -> SplitPrices:
    """Return the prices of traced calls along the tensor axis of `mesh`.

    Of several axes that of columns.
    """
    axis = mesh.tensor_axes[-2:][0]
    group = Group(mesh.shape[axis], mesh.stride([axis]))
    return split.prices(whole.cluster, whole.optimizer, group, whole.batch_size / split.samples)


def saving_no_computation(step: TrainingStep, whole: TrainingStep) -> TrainingStep:
    """Return `step` with no less computation of its microbatches together than `whole` has.

    Kernels of both that were measured at different times may say otherwise.
    """
    # a split cannot save computation: what measurements say less is noise
    own, least = (
        sum(float(times.sum()) for times in each.compute.values()) for each in (step, whole)
    )
    if 0 < own < least / step.num_microbatches:
        factor = least / step.num_microbatches / own
        step = replace(step)
        step.__dict__["compute"] = {block: factor * times for block, times in step.compute.items()}
    return step


# ---- splits of plans


def placed_layout(configs: Mapping[str, OpConfig], mesh: Mesh) -> SplitLayout:
    """Return where blocks have tensors along the tensor axes of `mesh`."""
    return SplitLayout(_parameters_of(configs, mesh.tensor_axes), rules_of(configs, mesh))


def _parameters_of(configs: Mapping[str, OpConfig], axes: Sequence[int]) -> dict[str, Placements]:
    # names as the module has them, from those within the block
    return {
        f"{block}.{name}".lstrip("."): tuple(placements[axis] for axis in axes)
        for block, config in configs.items()
        for name, placements in config.parameters
    }


def placed_tensors(step: TrainingStep) -> dict[str, dict[str, Any]]:
    """Return the entries of the `OpConfig` of each block that `step` splits.

    They are along all axes of its mesh.
    """
    axes, count = step.mesh.tensor_axes, len(step.mesh.axes)

    def placed(along: Placements) -> Placements:
        # from the tensor axes to all axes of the mesh
        of_axis = dict(zip(axes, along, strict=True))
        return tuple(of_axis.get(axis, Replicate()) for axis in range(count)) if along else ()

    found: dict[str, dict[str, Any]] = {}
    for block, split in step.split.items():
        if split:
            found[block] = {"parameters": tuple((name, placed(along)) for name, along in split)}
    for block, entries in step.computes.items():
        of_block = found.setdefault(block, {})
        of_block |= {name: tuple(map(placed, entries[name])) for name in ("inputs", "outputs")}
        of_block |= {"sums": placed(entries["sums"]), "gathers": entries["gathers"]}
    return found
