"""Reasons why a plan would not run, found without starting anything.

Each is a sentence that says what to do. `*_problems` yield them: of the model, of shards and
optimizers, of the exchange, of batches, of the machines, of a captured step. The engine asks for
fewer and raises at once: `checked_parameters`, `check_world_size`. Where the nodes of a run are not
those that the plan was made for, it runs as well, only at another speed: `layout_difference`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_topt.basics.units import format_bytes
from lightning_topt.communication.topology import Topology
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.communication import check_world_size as check_cluster_size
from lightning_topt.costs.exchange_model import check_exchange
from lightning_topt.execution.held_bytes import Blocks, once, shares_updates
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import OpGraph, model_fingerprint
from lightning_topt.optim.update_rule import (
    BY_PARAMETER,
    UnsplittableOptimizer,
    check_runs_on_shards,
    is_one_of,
    update_rule,
)
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.techniques.registry import (
    check_blocks,
    check_runs,
    check_tied,
    parameters_by_block,
)
from lightning_topt.techniques.technique import shard_axes
from lightning_topt.techniques.tensor_parallel.layout import TensorAxes
from lightning_topt.techniques.tensor_parallel.split_parameters import check_split
from lightning_topt.techniques.tensor_parallelism import split_placements


def checked_parameters(plan: ParallelPlan, module: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    """Return the parameters of each block of `plan`, by all their names in `module`.

    Raises PlanError where the plan does not belong to the module, or nothing runs it.
    """
    configs = plan.configs
    try:
        check_runs(plan.mesh, configs, plan.gradient_exchange)
        check_blocks(configs, module, made_for=plan.model)
        parameters = parameters_by_block(module, configs)
        check_tied(parameters, configs)
    except ValueError as error:
        raise PlanError(str(error)) from error
    return parameters


def check_world_size(plan: ParallelPlan, world_size: int) -> None:
    """Raise PlanError unless the plan is for `world_size` ranks."""
    if plan.mesh.size != world_size:
        raise PlanError(
            f"the plan is for {plan.mesh.size} ranks, this run has {world_size}; start "
            f"{plan.mesh.size} ranks (devices x num_nodes) or make a plan for {world_size}"
        )


def layout_difference(mesh: Mesh, *, ranks_per_node: int) -> str | None:
    """Return how a run's nodes differ from those that `mesh` was made for: a sentence, or None.

    With a single axis there is nothing to choose between, and its scope is not compared.
    """
    if len(mesh.axes) == 1:
        return None
    for index, axis in enumerate(mesh.axes):
        # the group of rank 0
        neighbours = [rank * mesh.stride([index]) for rank in range(axis.size)]
        crosses = len({rank // ranks_per_node for rank in neighbours}) > 1
        if axis.size > 1 and crosses != (axis.scope == "inter"):
            made, here = (
                ("between nodes", "inside a node")
                if axis.scope == "inter"
                else ("inside a node", "between nodes")
            )
            return (
                f"the plan has its axis {axis.name} {made}, and in this run (nodes of "
                f"{ranks_per_node} ranks) it lies {here}: the plan runs as it is, and another may "
                "be faster here"
            )
    return None


def warn_where_nodes_differ(plan: ParallelPlan, topology: Topology | None) -> None:
    """Warn on rank 0 where the nodes of this run are not those of the plan.

    `topology` None: from the environment.
    """
    if dist.get_rank() != 0 or len(plan.mesh.axes) == 1:
        return
    nodes = topology or Topology.from_environment(rank=0, world_size=dist.get_world_size())
    if difference := layout_difference(plan.mesh, ranks_per_node=nodes.ranks_per_node):
        warnings.warn(f"topt: {difference}", stacklevel=3)


# ---- all problems of a plan ----------------------------------------------------------------------


def configs_of(plan: ParallelPlan) -> dict[str, OpConfig]:
    """Return the configuration of each block."""
    return {block.block: block.config for block in plan.blocks}


def model_problems(plan: ParallelPlan, module: nn.Module) -> Iterator[str]:
    """Yield why `plan` is none for `module`, or none that anything runs."""
    configs = configs_of(plan)
    name = type(module).__name__
    parameters = [
        (n, tuple(p.shape), str(p.dtype).removeprefix("torch."))
        for n, p in module.named_parameters()
    ]
    if plan.fingerprint is not None and plan.fingerprint != model_fingerprint(name, parameters):
        yield (
            f"the plan was made for another model ({plan.model or 'of another kind'}): class name, "
            f"parameter names, shapes or dtypes of this {name} differ; make a new plan, or remove "
            "'fingerprint' from the plan"
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        yield f"{name} has no trainable parameters, so there is nothing to train"
    yield from _raised(lambda: check_blocks(configs, module, made_for=plan.model))
    yield from _raised(lambda: check_runs(plan.mesh, configs, plan.gradient_exchange))
    yield from _raised(lambda: check_tied(parameters_by_block(module, configs), configs))
    yield from split_problems(plan, module)


def split_problems(plan: ParallelPlan, module: nn.Module) -> Iterator[str]:
    """Yield which parameters cannot be cut along tensor axes as the plan says, and why."""
    axes = TensorAxes.of_mesh(plan.mesh, rank=0)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, placements in split_placements(configs_of(plan), plan.mesh).items():
        if name not in parameters:
            yield (
                f"the plan places a parameter {name!r}, and {type(module).__name__} has none of "
                "that name: correct the name"
            )
            continue
        shape = tuple(parameters[name].shape)
        yield from _raised(partial(check_split, name, shape, placements, axes))


def shard_problems(
    plan: ParallelPlan, blocks: Blocks, optimizers: Sequence[Optimizer]
) -> Iterator[str]:
    """Yield what torch's FSDP2, or one of `optimizers`, cannot do with the shards of a plan."""
    configs = configs_of(plan)
    # FSDP2 shards rows, and one dtype together.
    sharded = [
        block for block, config in configs.items() if config.storage.sharded_axes("gradients")
    ]
    for block in sharded:
        # A scalar has no rows.
        parts = [
            (name, parameter)
            for name, parameter in once(blocks[block])
            if shard_axes(configs[block], is_trained=parameter.requires_grad)
        ]
        scalars = [name for name, parameter in parts if not parameter.dim()]
        if scalars:
            yield (
                f"the parameter {scalars[0]!r} is a single number, which has no rows to shard: "
                f"give it one dim, or keep the gradients of block {block!r} whole (ZeRO level 0 or "
                "1)"
            )
        dtypes = sorted({str(parameter.dtype) for _, parameter in parts if parameter.requires_grad})
        if len(dtypes) > 1:
            yield (
                f"block {block!r} trains parameters of {' and '.join(dtypes)}, and torch's FSDP2 "
                "shards one dtype together: name the modules of each as blocks of their own, or "
                "keep their gradients whole (ZeRO level 0 or 1)"
            )
    shared = [block for block, config in configs.items() if shares_updates(config)]
    # Nothing is shared with one data rank.
    if plan.mesh.data_parallel_size == 1:
        return
    for optimizer in optimizers:
        # Known ones update each parameter by itself; of others a copy is tried.
        if (blocks_of := [*sharded, *shared]) and not is_one_of(optimizer, BY_PARAMETER):
            try:
                update_rule(optimizer)
                if sharded:
                    check_runs_on_shards(optimizer)
            except UnsplittableOptimizer as error:
                yield (
                    f"ranks cannot share the updates of {type(optimizer).__name__}: "
                    f"{error.reason}; choose ZeRO level 0 for block {blocks_of[0]!r}"
                )


def exchange_problems(plan: ParallelPlan, cluster: Cluster) -> Iterator[str]:
    """Yield why the data ranks of `plan` cannot exchange gradients by its method."""
    method, mesh = plan.gradient_exchange, plan.mesh
    if method is not None:
        ranks, stride = mesh.data_parallel_size, mesh.stride(mesh.data_axes)
        given = {"world_size": ranks, "stride": stride}
        yield from _raised(lambda: check_exchange(method, cluster=cluster, **given))


def batch_problems(
    plan: ParallelPlan, *, global_batch_size: int | None, batch_size: int | None
) -> Iterator[str]:
    """Yield why a step's samples cannot be divided among the ranks.

    `batch_size` are the samples that one rank gets of the data.
    """
    # ranks with samples of their own, which a pipeline divides among its microbatches
    parts = plan.data_parallel_size
    # Each rank of a tensor group brings batches of its own, or stages one for each microbatch.
    if plan.brings_batches:
        parts *= plan.num_microbatches
    if global_batch_size is not None and global_batch_size % parts:
        low, high = global_batch_size // parts * parts, -(-global_batch_size // parts) * parts
        choose = f"{low} or {high}" if low else f"{high}"
        yield (
            f"a batch of {global_batch_size} samples cannot be divided evenly over {parts} "
            f"data-parallel ranks: choose {choose} samples, or a plan for another number of ranks"
        )
    elif (
        global_batch_size is not None
        and batch_size is not None
        and global_batch_size != batch_size * parts
    ):
        yield (
            f"a step of {global_batch_size} samples takes {global_batch_size // parts} on each of "
            f"{parts} ranks, and the data have batches of {batch_size}: set the batch size of the "
            f"data to {global_batch_size // parts}"
        )


def cluster_problems(
    plan: ParallelPlan, cluster: Cluster, *, needed: float, what: str
) -> Iterator[str]:
    """Yield why `cluster` does not take the plan.

    The fullest rank needs `needed` bytes for `what`.
    """
    yield from _raised(lambda: check_cluster_size(cluster, world_size=plan.mesh.size))
    if needed > cluster.device.memory_bytes:
        yield (
            f"the fullest rank needs {format_bytes(needed)} for {what}, and {cluster.device.name} "
            f"of the cluster {cluster.name!r} has {format_bytes(cluster.device.memory_bytes)}: "
            "shard more, recompute, or use more ranks"
        )


def graph_problems(plan: ParallelPlan, graph: OpGraph, blocks: Blocks) -> Iterator[str]:
    """Yield why a step that was captured cannot run under the plan."""
    unused = set(graph.unused)
    configs = configs_of(plan)
    for block, parameters in blocks.items():
        # FSDP2 and DDP wait for the gradients of all parameters.
        without = [name for name, _ in once(parameters) if name in unused]
        if without and plan.mesh.data_parallel_size > 1:
            way_out = "use strategy=topt_find_unused_parameters_true, or leave it out of the model"
            if configs[block].storage.sharded_axes("gradients"):
                way_out = (
                    f"keep the gradients of block {block!r} whole (ZeRO level 0 or 1), and "
                    f"{way_out}"
                )
            yield (
                f"the step gives {without[0]!r} no gradient, which only DistributedDataParallel "
                f"sees, if asked: {way_out}"
            )


def find_notes(plan: ParallelPlan, blocks: Blocks, cluster: Cluster | None) -> Iterator[str]:
    """Yield what is no problem and yet worth knowing."""
    # Shards without a row.
    configs, mesh = configs_of(plan), plan.mesh
    few = []
    for block, parameters in blocks.items():
        count = mesh.ranks_along(configs[block].storage.sharded_axes("gradients"))
        few += [
            (name, p.shape[0], count)
            for name, p in once(parameters)
            if p.dim() and p.shape[0] < count
        ]
    if few:
        name, rows, count = few[0]
        others = f" ({len(few) - 1} more parameters likewise)" if len(few) > 1 else ""
        yield (
            f"{name!r} has {rows} rows for {count} ranks: {count - rows} of them hold none of it, "
            f"and all of them allocate a row{others}"
        )
    # The nodes of the cluster, of which the plan may use a part.
    if cluster is not None and mesh.size <= cluster.num_devices:
        difference = layout_difference(
            mesh, ranks_per_node=min(cluster.devices_per_node, mesh.size)
        )
        if difference:
            yield difference


def _raised(check: Callable[[], None]) -> Iterator[str]:
    # Yield the message of what `check` raises
    try:
        check()
    except ValueError as error:
        yield " ".join(str(error).split())
