"""Meshes with a tensor axis, innermost and inside nodes, and the step of one rank on each under
every split worth a look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.groups import Group
from lightning_topt.costs.sizes import parameter_bytes
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.blocks import block_of
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import Placements, Replicate, Shard
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.techniques.tensor_parallel.block_rules import rules_of
from lightning_topt.techniques.tensor_parallel.model_splits import ModelSplit
from lightning_topt.techniques.tensor_parallel.split_candidates import SplitModel
from lightning_topt.techniques.tensor_parallel.split_layouts import SplitLayout, layout_named_by
from lightning_topt.techniques.tensor_parallel.split_prices import SplitPrices


def tensor_sizes(cluster: Cluster, count: int) -> list[int]:
    """Return the sizes that a tensor axis of `count` ranks may have: those that divide the ranks
    and a node, above 1.
    """
    per_node = min(cluster.devices_per_node, count)
    return [
        size
        for size in range(2, per_node + 1)
        if count % size == 0 and cluster.devices_per_node % size == 0
    ]


def tensor_meshes(cluster: Cluster, count: int, size: int) -> Iterator[Mesh]:
    """Yield the meshes of `count` ranks with a tensor axis of `size`: one data axis, then copies
    times shards.
    """
    per_node, data = cluster.devices_per_node, count // size
    whole, tensor = "intra" if count <= per_node else "inter", Axis("tensor", size)
    yield Mesh((Axis("data", data, whole), tensor))
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


def tensor_steps(
    whole: TrainingStep,
    split: SplitModel,
    *,
    mesh: Mesh,
    layout: str = "",
    is_needed: Callable[[TrainingStep], bool] | None = None,
) -> Iterator[TrainingStep]:
    """Yield the steps of one rank on `mesh`, which has tensor axes; `whole` is that of a data rank
    with nothing split.

    `is_needed` is asked before a step is captured, with one that costs at most as much. In the
    `layout` "tensor" tensors are whole between layers; without one, the last step has them split by
    step, where another one was needed. In another layout, which others axes than ``tensor`` have by
    their names, there is one step. Raises ValueError for axes that have none, and where the model
    cannot run in it.
    """
    layout = layout or layout_named_by([mesh.names[axis] for axis in mesh.tensor_axes])
    if layout not in ("", "tensor"):
        yield layout_step(whole, split, mesh=mesh, layout=layout)
        return
    prices, found = prices_on(whole, split, mesh=mesh), False
    for candidate in split.candidates(prices):
        if is_needed is not None:
            bound = split.bound_graph(candidate, prices)
            if not is_needed(
                step_of(
                    whole,
                    bound,
                    mesh=mesh,
                    split=candidate,
                    calls=sum(split.calls(candidate).values()),
                )
            ):
                continue
        step = step_under(candidate, whole, split, mesh=mesh)
        if step is not None:
            yield step
            found = True
        if (
            whole.num_microbatches > 1
            and (step := joint_step(candidate, whole, split, mesh=mesh)) is not None
        ):
            yield step
    if found and not layout:
        with suppress(ValueError):
            yield layout_step(whole, split, mesh=mesh, layout="tensor_sequence")


def prices_on(whole: TrainingStep, split: SplitModel, *, mesh: Mesh) -> SplitPrices:
    """Return the prices of traced calls along the tensor axis of `mesh`, that of columns among
    several; `whole` as in `tensor_steps`.
    """
    axis = mesh.tensor_axes[-2:][0]
    group = Group(mesh.shape[axis], mesh.stride([axis]))
    return split.prices(whole.cluster, whole.optimizer, group, whole.batch_size / split.samples)


def step_under(
    chosen: ModelSplit, whole: TrainingStep, split: SplitModel, *, mesh: Mesh
) -> TrainingStep | None:
    """Return the step of one rank on `mesh`, as `tensor_steps` does for each of its candidates;
    None where it cannot be captured.
    """
    (axis,) = mesh.tensor_axes
    local = split.local_graph(chosen, mesh.shape[axis])
    return (
        None
        if local is None
        else step_of(whole, local, mesh=mesh, split=chosen, calls=sum(split.calls(chosen).values()))
    )


def joint_step(
    chosen: ModelSplit, whole: TrainingStep, split: SplitModel, *, mesh: Mesh
) -> TrainingStep | None:
    """Return the step of one rank of `mesh` whose modules run the batches of all ranks of the
    tensor axis where `chosen` splits their parameters; None where no module can. `whole` is that in
    turns.
    """
    prices, before = prices_on(whole, split, mesh=mesh), None
    while (layout := split.joint_layout(chosen, prices)) is not None and layout != before:
        if (step := joint_step_in(layout, whole, split, mesh=mesh)) is not None:
            return step
        before = layout  # a module that refused is left out of the next one
    return None


def joint_step_in(
    layout: SplitLayout, whole: TrainingStep, split: SplitModel, *, mesh: Mesh
) -> TrainingStep | None:
    """Return the step of one rank of `mesh` with joint modules as in `layout`; None where it cannot
    be captured.
    """
    local = split.local_graph_of(layout, _along(mesh))
    if local is None:
        return None
    chosen = ModelSplit(
        {name: placed for name, (placed,) in layout.placements.items()}, 0.0, 0.0, 0.0
    )
    step = step_of(whole, local, mesh=mesh, split=chosen, calls=sum(split.calls(chosen).values()))
    return replace(step, num_microbatches=1, joint=layout.joint)


def step_of(
    whole: TrainingStep, local: OpGraph, *, mesh: Mesh, split: ModelSplit, calls: int = 0
) -> TrainingStep:
    """Return the step `local` of one rank on `mesh` under `split`, which splits so many `calls`;
    `whole` as in `tensor_steps`.
    """
    placed = split.by_block([block.name for block in whole.graph.blocks])
    return replace(_on_slices(whole, local, mesh=mesh), split=placed, split_calls=calls)


def _on_slices(whole: TrainingStep, local: OpGraph, *, mesh: Mesh) -> TrainingStep:
    return replace(
        whole,
        graph=local,
        mesh=mesh,
        optimizer=whole.optimizer.of_slices(_shares(local, whole.graph)),
        exchange=None,
        joined_bytes=_whole_bytes(whole.graph) - _whole_bytes(local)
        if whole.num_microbatches > 1
        else 0.0,
    )


def split_of(plan: ParallelPlan) -> ModelSplit:
    """Return where `plan` has parameters along its one tensor axis, as a split; what it takes is
    left at 0.
    """
    (axis,) = plan.mesh.tensor_axes
    placed = (
        (f"{block.block}.{name}" if block.block else name, placements[axis])
        for block in plan.blocks
        for name, placements in block.config.parameters
    )
    return ModelSplit({name: p for name, p in placed if isinstance(p, Shard)}, 0.0, 0.0, 0.0)


def saving_no_computation(step: TrainingStep, whole: TrainingStep) -> TrainingStep:
    """Return `step`, whose microbatches take `whole`'s computation together, or more; kernels of
    both that were measured at different times may say otherwise.
    """
    own, least = (
        sum(float(times.sum()) for times in each.compute.values()) for each in (step, whole)
    )
    if 0 < own < least / step.num_microbatches:
        factor = least / step.num_microbatches / own
        step = replace(step)
        step.__dict__["compute"] = {block: factor * times for block, times in step.compute.items()}
    return step


def least_seconds(whole: TrainingStep, size: int) -> float:
    """Return seconds that no step is below in which tensor groups of `size` ranks run the batches
    of their ranks.

    `whole` is the step of a data rank. All of the computation and the update is split at best,
    which takes a collective in forward and one in backward; the exchange along data axes is hidden.
    """
    (mesh, *_) = tensor_meshes(whole.cluster, whole.mesh.size, size)
    step = replace(whole, mesh=mesh)  # joint modules may run all batches at once
    compute = float(sum(times.sum() for times in step.compute.values()))
    update = sum(
        step.update_seconds(parameter, share=1 / size) for parameter in step.graph.parameters
    )
    collectives = 2 * step.collective_seconds("all_reduce", 1.0, axes=mesh.tensor_axes)
    return compute + update + collectives + step.sent_seconds


def layout_step(whole: TrainingStep, split: SplitModel, *, mesh: Mesh, layout: str) -> TrainingStep:
    """Return the step of one rank on `mesh` in a layout (`LAYOUTS`) along its tensor axes; `whole`
    as in `tensor_steps`.

    Raises ValueError where the model cannot run so.
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
    """Return the step of one rank on `mesh` with its tensors as in `found`; None where it cannot be
    captured.
    """
    along = _along(mesh)
    local = split.local_graph_of(found, along)
    if local is None:
        return None
    blocks = [block.name for block in whole.graph.blocks]
    placed: dict[str, list[tuple[str, Placements]]] = {block: [] for block in blocks}
    for name, placements in found.placements.items():
        block = block_of(name, blocks)
        placed[block].append((name.removeprefix(f"{block}."), placements))
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
    split_by_block = {block: tuple(each) for block, each in placed.items()}
    return replace(_on_slices(whole, local, mesh=mesh), split=split_by_block, computes=computes)


def layout_of_plan(plan: ParallelPlan) -> SplitLayout:
    """Return where `plan` has tensors along its tensor axes."""
    configs = {block.block: block.config for block in plan.blocks}
    placed = (
        (f"{block}.{name}".lstrip("."), tuple(placements[axis] for axis in plan.mesh.tensor_axes))
        for block, config in configs.items()
        for name, placements in config.parameters
    )
    return SplitLayout(dict(placed), rules_of(configs, plan.mesh))


def _along(mesh: Mesh) -> tuple[Axis, ...]:
    return tuple(mesh.axes[axis] for axis in mesh.tensor_axes)


def placed_tensors(step: TrainingStep) -> dict[str, dict[str, Any]]:
    """Return the entries of the configuration of each block that `step` splits, along all axes of
    its mesh.
    """
    axes, count = step.mesh.tensor_axes, len(step.mesh.axes)

    def placed(along: Placements) -> Placements:
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


def _whole_bytes(graph: OpGraph) -> float:
    return float(sum(map(parameter_bytes, graph.parameters)))


def _shares(local: OpGraph, whole: OpGraph) -> dict[str, float]:
    """The share of every parameter that is local, where that is not all of it."""
    sizes = {parameter.name: parameter.numel for parameter in whole.parameters}
    return {p.name: p.numel / sizes[p.name] for p in local.parameters if p.numel != sizes[p.name]}
