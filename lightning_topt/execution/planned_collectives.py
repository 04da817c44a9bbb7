"""The collectives of one step of a plan, from what its techniques say that they cost.

    collectives = planned_collectives(plan, module, blocks)     # for any number of ranks
    rows = rows_of(collectives, plan.mesh)                      # equal ones as one row

`differences_of_rows` compares them with the rows of collectives that were really called.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.costs.communication import Collective, Group
from lightning_topt.costs.optimizer import OptimizerProfile
from lightning_topt.costs.segments import blocks_gathered_once
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.execution.held_bytes import Blocks, once, shared_pieces
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import Block, OpGraph, Parameter
from lightning_topt.graph.step_memory import Amount, Step
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.gather import packed
from lightning_topt.optim.local_step import sends_updates
from lightning_topt.optim.pieces import rows_of as rows_of_piece
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.techniques.ddp_wrapper import bucket_bytes
from lightning_topt.techniques.fsdp_gathers import narrow_of
from lightning_topt.techniques.registry import TECHNIQUES
from lightning_topt.techniques.technique import has_unsharded_gradients
from lightning_topt.techniques.tensor_parallel.layout import layout_of

_NO_PROFILE = OptimizerProfile("no optimizer", elementwise=True, by_parameter=True, updates={})
_BUFFERS_TOGETHER = 250 << 20  # of DDP, and of `techniques.fsdp`
PASSES = ("forward", "backward", "update")


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

    Args:
        plan: any but one with stages.
        module: needs no memory.
        blocks: its parameters.
        optimizers: over these.
        cluster: the machines, if they are known.
        graph: the captured step; it tells in which order gradients become ready. Without it the
            last parameter's are first.

    Raises:
        ValueError: for an exchange of gradients that these ranks cannot have.
    """
    configs = {block.block: block.config for block in plan.blocks}
    # Every technique says what a block costs; packed ones are asked for below.
    step = parameters_only_step(plan, module, blocks, cluster=cluster)
    single = frozenset[str]()
    if graph is not None:
        named = tuple(Block(name, group=0, recomputable=False) for name in blocks)
        single = blocks_gathered_once(graph.with_blocks(named))
    not_again = {(block, "all_gather", "backward") for block in single}
    found = [
        collective
        for block, config in configs.items()
        for technique in TECHNIQUES
        if technique.takes_part(step, config)
        for collective in technique.collectives(step, block, config)
        # The step has no operators; the graph knows to which blocks gradients come.
        if (block, collective.op, collective.during) not in not_again
    ]
    # Those that are packed into messages: DDP's buckets, and updates from the ranks that share a
    # step. Techniques say how much there is, the packing says in how many calls.
    whole = _whole_gradients(blocks, configs, graph)
    messages = [
        ("all_reduce", bucket_bytes(whole)),
        ("broadcast", [*_updates(blocks, configs, optimizers, ranks=plan.data_parallel_size)]),
    ]
    # One size for each message, instead of one for each block.
    alone = [each for each in found if not each.packed]
    together = [*dict.fromkeys((each.op, each.group) for each in found if each.packed)]
    for op, sizes in messages:
        if groups := [group for name, group in together if name == op]:
            one = next(
                each for each in found if each.packed and (each.op, each.group) == (op, groups[0])
            )
            alone += [replace(one, size=size) for size in sizes]
    alone += [
        step.collective("update", "all_to_all", size, axes=plan.mesh.data_axes)
        for size in _owned(blocks, configs, optimizers, ranks=plan.data_parallel_size)
    ]
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
    """Return a step with the parameters of `blocks` and no operators.

    That is enough to ask for what ranks exchange.
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
    # Costs are asked for bytes alone: any cluster will do.
    machines = cluster if fits and cluster is not None else cluster_for(plan.mesh)
    split = {
        block: tuple(
            (name.removeprefix(f"{block}."), layout.placements)
            for name, each in of_block.items()
            if (layout := layout_of(each)) is not None
        )
        for block, of_block in blocks.items()
    }
    more: dict[str, Any] = {"exchange": plan.gradient_exchange, "split": split}
    more["local_steps"] = plan.local_steps
    if plan.gather_dtype:
        narrow = {each for of_block in blocks.values() for each in narrow_of(module, of_block)}
        named = (item for of_block in blocks.values() for item in of_block.items())
        more["narrow"] = frozenset(name for name, each in named if each in narrow)
    return TrainingStep(graph, machines, _NO_PROFILE, plan.mesh, 1, **more)


def cluster_for(mesh: Mesh) -> Cluster:
    """Return a cluster with the nodes that `mesh` was made for.

    Its speeds are not known: it may be asked about bytes only.
    """
    # Axes inside a node are the last ones.
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
    """Return the parameters whose gradients DDP averages, in the order of backward."""
    whole = {
        name: each
        for block, parameters in blocks.items()
        if has_unsharded_gradients(configs[block])
        for name, each in once(parameters)
        if each.requires_grad
    }
    # Backward meets parameters in the reverse order of their first use in forward.
    used: dict[str, int] = {}  # at which operator first, in the order of forward
    for index, op in enumerate(graph.ops if graph is not None else ()):
        for name in op.parameters:
            used.setdefault(name, index)
    order = {name: (used.get(name, len(used)), index) for index, name in enumerate(whole)}
    return [whole[name] for name in sorted(whole, key=lambda name: order[name], reverse=True)]


def _updates(
    blocks: Blocks, configs: Mapping[str, OpConfig], optimizers: Sequence[Optimizer], *, ranks: int
) -> Iterator[int]:
    """Yield the bytes of the messages in which owners send what they have updated."""
    for optimizer in optimizers:
        parameters = parameters_of(optimizer)
        whole = [
            piece
            for piece in shared_pieces(optimizer, blocks, configs, ranks=ranks)
            if parameters[piece.index] not in _in_shards(blocks, configs)
        ]
        for pieces in packed(whole, parameters):
            yield sum(rows_of_piece(parameters[piece.index], piece).nbytes for piece in pieces)


def _owned(
    blocks: Blocks, configs: Mapping[str, OpConfig], optimizers: Sequence[Optimizer], *, ranks: int
) -> Iterator[int]:
    """Yield the bytes of each exchange of shards with the owners of whole parameters."""
    for optimizer in optimizers:
        parameters = parameters_of(optimizer)
        pieces = shared_pieces(optimizer, blocks, configs, ranks=ranks)
        owned = [parameters[piece.index] for piece in pieces]
        size = sum(p.nbytes for p in owned if p in _in_shards(blocks, configs))
        yield from [size] * (2 if sends_updates(optimizer) else 3) if size else []


def _in_shards(blocks: Blocks, configs: Mapping[str, OpConfig]) -> set[Tensor]:
    return {
        parameter
        for block, parameters in blocks.items()
        if configs[block].storage.sharded_axes("gradients")
        for parameter in parameters.values()
    }


def _buffers(module: nn.Module) -> list[int]:
    """Return the bytes of the messages in which rank 0 sends its buffers."""
    buffers = [buffer for buffer in module.buffers() if buffer.numel()]
    if not buffers:
        return []
    # As DDP coalesces them.
    together, _ = dist._compute_bucket_assignment_by_size(  # type: ignore[attr-defined]
        buffers, [_BUFFERS_TOGETHER]
    )
    return [sum(buffers[index].nbytes for index in indices) for indices in together]


# ---- rows of a table -----------------------------------------------------------------------------


@dataclass(frozen=True)
class CollectiveRow:
    """One kind of collective in a step: `count` calls on `nbytes` bytes in all.

    They are calls of `op` that start in the pass `during`. `axis` names the axes of the mesh that
    the groups of `ranks` ranks lie along; ``"other"`` where they lie along none. Bytes are those of
    the whole tensors: what goes into an all-reduce or a reduce-scatter, what comes out of an
    all-gather.
    """

    during: str
    op: str
    axis: str
    ranks: int
    count: int
    nbytes: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        """All but count and bytes."""
        return self.during, self.op, self.axis, self.ranks

    @property
    def is_uneven(self) -> bool:
        """Whether ranks send parameters to their owners: as much as each has of them."""
        return (self.during, self.op) == ("update", "all_to_all")

    def __str__(self) -> str:
        return f"{self.op} over {self.axis} ({self.ranks} ranks) in {self.during}"


def rows_of(collectives: Iterable[Collective], mesh: Mesh) -> tuple[CollectiveRow, ...]:
    """Return equal collectives as one row each, in the order of passes.

    Groups of one rank exchange nothing, and have no row.
    """
    counts: dict[tuple[str, str, Group], list[float]] = defaultdict(lambda: [0, 0.0])
    for each in collectives:
        if each.group.size > 1 and each.size:
            entry = counts[each.during, each.op, each.group]
            entry[0], entry[1] = entry[0] + 1, entry[1] + each.size
    rows = [
        CollectiveRow(during, op, axis_name(mesh, group), group.size, int(count), round(size))
        for (during, op, group), (count, size) in counts.items()
    ]
    return tuple(sorted(rows, key=lambda row: (PASSES.index(row.during), row.key)))


def axis_name(mesh: Mesh, group: Group) -> str:
    """Return the names of the axes of `mesh` that groups like this lie along."""
    # The fewest axes that have such a group; axes of one rank do not matter.
    real = [index for index, size in enumerate(mesh.shape) if size > 1]
    for length in range(1, len(real) + 1):
        for axes in combinations(real, length):
            if mesh.ranks_along(axes) == group.size and mesh.stride(axes) == group.stride:
                return " x ".join(mesh.names[index] for index in axes)
    return "other"


def differences_of_rows(
    said: Sequence[CollectiveRow], called: Sequence[CollectiveRow]
) -> list[str]:
    """Return a sentence for every kind of collective whose count or bytes are not as said."""
    # By kind, those that were said first.
    expected, found = ({row.key: row for row in rows} for rows in (said, called))
    sentences = []
    for key in dict.fromkeys((*expected, *found)):
        row, other = expected.get(key), found.get(key)
        if row is None or other is None:
            one, text = (
                (other, "called, but not expected")
                if row is None
                else (row, "expected, but not called")
            )
            sentences.append(f"{one}: {one.count} {text}" if one is not None else "")
        elif row.count != other.count or (row.nbytes != other.nbytes and not row.is_uneven):
            sentences.append(
                f"{row}: {row.count} of {row.nbytes:,} bytes in all expected, {other.count} of "
                f"{other.nbytes:,} called"
            )
    return sentences
