"""The collectives of one step of a plan, from what its techniques say that they cost, for any
number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.costs.communication import Collective
from lightning_topt.costs.optimizer import OptimizerProfile
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.execution.held_bytes import Blocks, once, shared_pieces
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import Amount, Block, OpGraph, Parameter, Step
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.gather import packed
from lightning_topt.optim.pieces import rows_of
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.techniques.ddp_wrapper import bucket_bytes
from lightning_topt.techniques.registry import TECHNIQUES
from lightning_topt.techniques.technique import has_whole_gradients
from lightning_topt.techniques.tensor_parallel.layout import layout_of

_NO_PROFILE = OptimizerProfile("no optimizer", elementwise=True, by_parameter=True, updates={})
_BUFFERS_TOGETHER = 250 << 20  # of DDP, and of `fsdp_blocks`


def planned_collectives(
    plan: ParallelPlan,
    module: nn.Module,
    blocks: Blocks,
    *,
    optimizers: Sequence[Optimizer] = (),
    cluster: Cluster | None = None,
    graph: OpGraph | None = None,
) -> list[Collective]:
    """Return the collectives of one step of `plan`, in no order.

    `blocks` are the parameters of `module`, which need no memory. `graph`, where the step was
    captured, tells in which order gradients become ready (else: the last parameter's first). Raises
    ValueError for an exchange of gradients that these ranks cannot have.
    """
    configs = {block.block: block.config for block in plan.blocks}
    step = parameters_only_step(plan, module, blocks, cluster=cluster)
    found = [
        collective
        for block, config in configs.items()
        for technique in TECHNIQUES
        if technique.takes_part(step, config)
        for collective in technique.collectives(step, block, config)
    ]
    whole = _whole_gradients(blocks, configs, graph)
    kinds = [
        [each for each in whole if (layout_of(each) is not None) == cut] for cut in (False, True)
    ]
    messages = [
        *(
            ("all_reduce", bucket_bytes(gradients))
            for gradients in (kinds if plan.joint else [whole])
        ),
        ("broadcast", [*_updates(blocks, configs, optimizers, ranks=plan.data_parallel_size)]),
    ]
    alone = [each for each in found if not each.packed]
    together = [*dict.fromkeys((each.op, each.group) for each in found if each.packed)]
    for op, sizes in messages:
        if groups := [group for name, group in together if name == op]:
            # those that are whole, among all ranks, come first
            if plan.joint and op == "all_reduce":
                together.remove((op, groups[0]))
            one = next(
                each for each in found if each.packed and (each.op, each.group) == (op, groups[0])
            )
            alone += [replace(one, size=size) for size in sizes]
    if plan.joint:  # buffers are sent before a step, not in it
        return alone
    return [
        *alone,
        *(
            step.collective("forward", "broadcast", size, axes=plan.mesh.data_axes)
            for size in _buffers(module)
        ),
    ]


def parameters_only_step(
    plan: ParallelPlan, module: nn.Module, blocks: Blocks, *, cluster: Cluster | None
) -> TrainingStep:
    """Return a step that knows the parameters of `blocks` and no operators: enough to ask for what
    ranks exchange.
    """
    parameters = tuple(
        Parameter(
            name,
            tuple(each.shape),
            str(each.dtype).removeprefix("torch."),
            block,
            each.requires_grad,
        )
        for block, of_block in blocks.items()
        for name, each in once(of_block)
    )
    graph = OpGraph(
        model=type(module).__name__,
        batch_size=1,
        ops=(),
        edges=(),
        parameters=parameters,
        blocks=tuple(
            Block(name, group=index, recomputable=False) for index, name in enumerate(blocks)
        ),
        step=Step((1, 1)),
        buffer_bytes=sum(buffer.nbytes for buffer in module.buffers()),
        input_bytes=Amount(),
    )
    fits = cluster is not None and plan.mesh.size <= cluster.num_devices
    machines = cluster if fits and cluster is not None else cluster_for(plan.mesh)
    split = {
        block: tuple(
            (name.removeprefix(f"{block}."), layout.placements)
            for name, each in of_block.items()
            if (layout := layout_of(each)) is not None
        )
        for block, of_block in blocks.items()
    }
    more: dict[str, Any] = {"exchange": plan.gradient_exchange, "joint": plan.joint, "split": split}
    return TrainingStep(graph, machines, _NO_PROFILE, plan.mesh, 1, **more)


def cluster_for(mesh: Mesh) -> Cluster:
    """Return a cluster with the nodes that `mesh` was made for, to be asked about bytes only: its
    speeds are not known.
    """
    per_node = 1
    for axis in reversed(mesh.axes):
        if axis.scope == "inter":
            break
        per_node *= axis.size
    device, link = Device("any device", 1, {"float32": 1.0}, 1.0), Link(0.0, 1.0)
    return Cluster("any cluster", device, per_node, mesh.size // per_node, link, link)


def _whole_gradients(
    blocks: Blocks, configs: Mapping[str, OpConfig], graph: OpGraph | None
) -> list[Tensor]:
    """Those that DDP averages, in the order in which backward makes them."""
    whole = {
        name: each
        for block, parameters in blocks.items()
        if has_whole_gradients(configs[block])
        for name, each in once(parameters)
        if each.requires_grad
    }
    used: dict[str, int] = {}  # at which operator first, in the order of forward
    for index, op in enumerate(graph.ops if graph is not None else ()):
        for name in op.parameters:
            used.setdefault(name, index)
    order = {name: (used.get(name, len(used)), index) for index, name in enumerate(whole)}
    return [whole[name] for name in sorted(whole, key=lambda name: order[name], reverse=True)]


def _updates(
    blocks: Blocks, configs: Mapping[str, OpConfig], optimizers: Sequence[Optimizer], *, ranks: int
) -> Iterator[int]:
    """Bytes of the messages in which owners send what they have updated."""
    for optimizer in optimizers:
        parameters = parameters_of(optimizer)
        for pieces in packed(shared_pieces(optimizer, blocks, configs, ranks=ranks), parameters):
            yield sum(rows_of(parameters[piece.index], piece).nbytes for piece in pieces)


def _buffers(module: nn.Module) -> list[int]:
    """Bytes of the messages in which rank 0 sends its buffers."""
    buffers = [buffer for buffer in module.buffers() if buffer.numel()]
    if not buffers:
        return []
    together, _ = dist._compute_bucket_assignment_by_size(buffers, [_BUFFERS_TOGETHER])  # type: ignore[attr-defined]
    return [sum(buffers[index].nbytes for index in indices) for indices in together]
