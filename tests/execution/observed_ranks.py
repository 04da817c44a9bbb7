"""What a rank holds and calls in a step, and what the cost model prices of it.

    seen = observe(plan, module, batch, optimizers_of)     # on every rank of the plan
    seen.held["blocks.0"]                                  # bytes, by KINDS
    seen.calls == priced(plan, graph, optimizers)          # by pass, operation and ranks

Collectives are seen where torch dispatches them: its own, FSDP2's, and those of DDP's reducer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_topt.communication.collectives import AllGather, ReduceScatter
from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.costs.communication import Collective
from lightning_topt.costs.optimizer import OptimizerProfile
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.execution.states import TensorChunks
from lightning_topt.execution.verify_plan import OptimizersOf
from lightning_topt.graph.capture import CPU, call_training_step, loss_of
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.module_copy import silence
from lightning_topt.graph.op_graph import Block, OpGraph
from lightning_topt.graph.structures import tensors_in
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES
from lightning_topt.techniques.plan_costs import PlanCosts
from lightning_topt.techniques.registry import parameters_by_block
from lightning_topt.techniques.technique import BlockSeconds, RunOptions

STEPS = 3  # DDP packs its buckets anew before the second
# What is sent in buckets of several blocks: its calls are not those of the blocks.
PACKED = ("all_reduce", "broadcast")
# by pass, operation and number of ranks: calls (0 of what is packed), and bytes of whole tensors
Calls = dict[tuple[str, str, int], tuple[int, int]]


class Seen(NamedTuple):
    """What one rank holds of each block, in bytes by `KINDS`, and its calls in one step."""

    held: dict[str, tuple[int, ...]]
    calls: Calls


def observe(
    plan: ParallelPlan,
    module: Any,
    batch: Any,
    optimizers_of: OptimizersOf,
    *,
    parts: Sequence[Any] = (),
    dtype: torch.dtype | None = None,
) -> Seen:
    """Run steps as a rank of the plan; return what the last one showed. A collective call.

    `parts` are the microbatches of a plan with stages, `dtype` is that of autocast.
    """
    silence(module)
    engine = Engine(plan, module, device=CPU, options=RunOptions(gather_dtype=dtype))
    module.train()
    staged = plan.schedule is not None
    engine.apply(example=Example(_loss_of_part, parts[0]) if staged else None)
    optimizers = optimizers_of(module)
    engine.attach_optimizers(optimizers)
    recorder = Recorder()

    def loss(model: nn.Module, batch: object) -> Tensor:
        with forward_is_training_step(module), autocast(dtype):
            found = loss_of(model(batch))
        recorder.during = "backward"
        return found

    held: dict[str, list[int]] = {}
    for _ in range(STEPS):
        recorder.calls.clear()
        for optimizer in optimizers:
            optimizer.zero_grad()
        module.train()
        with recorder.watching("forward"):
            if plan.schedule in CONTINUOUS_SCHEDULES:
                for part in parts:
                    engine.continuous.advance(part, _loss_of_part)
                deque(engine.continuous.drain(), maxlen=0)  # gradients add up: nothing is learnt
            elif staged:
                engine.run_step(parts, _loss_of_part)
            else:
                engine.run_step([batch], loss)
        # between backward and update, when gradients are there
        blocks = parameters_by_block(module, [block.block for block in plan.blocks])
        own = {p for p in module.parameters() if _is_here(p)}
        held = {name: _held(own & {*named.values()}) for name, named in blocks.items()}
        with recorder.watching("update"):
            for optimizer in optimizers:
                optimizer.step()
    home = {p: block for block, parameters in blocks.items() for p in parameters.values()}
    for optimizer in optimizers:
        for index, values in engine.optimizer_state(optimizer, full=False)["state"].items():
            leaves = [_local(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
            held[home[parameters_of(optimizer)[index]]][2] += sum(leaf.nbytes for leaf in leaves)
    engine.release()
    engine.close()
    # but for the number by which ranks compare what they have gathered
    compared = "all_reduce", dist.get_world_size(), 8
    calls = [call for call in recorder.calls if call[1:] != compared]
    return Seen({block: tuple(sizes) for block, sizes in held.items()}, _summed(calls))


def autocast(dtype: torch.dtype | None) -> torch.autocast:
    """Return the context of a step, as Lightning makes it."""
    return torch.autocast("cpu", dtype, enabled=dtype is not None, cache_enabled=False)


def cluster_for(mesh: Mesh) -> Cluster:
    """Return CPUs with the nodes that `mesh` was made for; their speeds are of no use."""
    # Axes inside a node are the last ones.
    per_node = 1
    for axis in reversed(mesh.axes):
        if axis.scope == "inter":
            break
        per_node *= axis.size
    device, link = Device("any device", 1, {"float32": 1.0}, 1.0), Link(0.0, 1.0)
    nodes = mesh.size // per_node
    return Cluster("any cluster", device, per_node, nodes, link, link, backend="gloo")


def priced(plan: ParallelPlan, graph: OpGraph, profile: OptimizerProfile) -> Calls:
    """Return the collectives whose seconds the cost model counts in a step."""
    blocks = tuple(Block(each.block, index, False) for index, each in enumerate(plan.blocks))
    step = TrainingStep(
        graph.with_blocks(blocks),
        cluster_for(plan.mesh),
        profile,
        plan.mesh,
        graph.batch_size,
        float32_gathers=plan.float32_gathers is True,
    )
    found: list[Collective] = []

    def noted(self: TrainingStep, collectives: Iterable[Collective]) -> float:
        found.extend(collectives)
        return 0.0

    costs = PlanCosts(step)
    with mock.patch.object(TrainingStep, "seconds_of", noted):
        for block in plan.blocks:
            for technique in costs.techniques(block.config):
                technique.add_seconds(BlockSeconds(), step, block.block, block.config)
    return _summed((each.during, each.op, each.group.size, each.size) for each in found)


def _summed(calls: Iterable[tuple[str, str, int, float]]) -> Calls:
    found: Calls = {}
    for during, op, ranks, size in calls:
        # rank 0's buffers are sent in forward, and are no block's
        if ranks > 1 and size and (during, op) != ("forward", "broadcast"):
            count, nbytes = found.get((during, op, ranks), (0, 0))
            found[during, op, ranks] = count + (op not in PACKED), nbytes + round(size)
    return found


def _loss_of_part(model: nn.Module, part: object) -> Tensor:
    return loss_of(call_training_step(model, part))


@contextmanager
def forward_is_training_step(module: nn.Module) -> Iterator[None]:
    """Let the first call of `module` run its training step.

    Wrappers around the module gather and reduce for all of the step then.
    """

    def step(batch: object) -> Any:
        del vars(module)["forward"]  # an instance attribute, which hides the method
        return call_training_step(module, batch)

    vars(module)["forward"] = step
    try:
        yield
    finally:
        vars(module).pop("forward", None)


def _held(tensors: Iterable[nn.Parameter]) -> list[int]:
    """Return the bytes of parameters and gradients; states are added later."""
    tensors = list(tensors)
    gradients = [parameter.grad for parameter in tensors if parameter.grad is not None]
    sizes = [sum(_local(tensor).nbytes for tensor in each) for each in (tensors, gradients)]
    return [*sizes, 0, _padding(tensors) + _padding(gradients)]


def _is_here(parameter: nn.Parameter) -> bool:
    """Return whether no other stage has it: those of others are one element, expanded."""
    local = _local(parameter)
    return local.untyped_storage().nbytes() >= local.nbytes


def _local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that is on this rank."""
    if isinstance(tensor, TensorChunks):
        return tensor.local
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _padding(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of shards' memory that are no rows of their tensors."""
    # storages of shards are as large as the largest shard
    shards = [_local(tensor) for tensor in tensors if isinstance(tensor, DTensor)]
    storages = [shard.untyped_storage() for shard in shards]
    sizes = {storage._cdata: storage.nbytes() for storage in storages}
    return sum(sizes.values()) - sum(shard.nbytes for shard in shards)


class Recorder(TorchDispatchMode):
    """Records `calls` while it is on: pass, operation, ranks, bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str, int, float]] = []
        self.during, self._inside = "forward", False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = {"allreduce_": "all_reduce", "broadcast_": "broadcast"}.get(
            func._schema.name.removeprefix("c10d::")
        )
        if op is not None and not self._inside:
            # operators have their group among their arguments, boxed
            group = next(found for each in args if (found := _process_group(each)) is not None)
            self._note(op, list(tensors_in(args[0])), group)
        return func(*args, **(kwargs or {}))

    def _note(self, op: str, whole: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self.calls.append((self.during, op, group.size(), sum(each.nbytes for each in whole)))

    @contextmanager
    def watching(self, during: str) -> Iterator[None]:
        """Switch it on. On gloo FSDP2's collectives are others inside, and one call here."""
        self.during = during
        gathers = mock.patch.object(AllGather, "__call__", self._as_one(AllGather, "all_gather", 0))
        sums = self._as_one(ReduceScatter, "reduce_scatter", 1)
        with gathers, mock.patch.object(ReduceScatter, "__call__", sums), self:
            yield

    def _as_one(self, cls: Any, op: str, position: int) -> Callable[..., Any]:
        original = cls.__call__

        # FSDP2 gives all of them by their names
        def counted(
            call: object, output_tensor: Tensor, input_tensor: Tensor, group: Any, **more: Any
        ) -> Any:
            self._note(op, [(output_tensor, input_tensor)[position]], group)
            self._inside = True
            try:
                return original(call, output_tensor, input_tensor, group, **more)
            finally:
                self._inside = False

        return counted


def _process_group(argument: object) -> dist.ProcessGroup | None:
    if isinstance(argument, dist.ProcessGroup):
        return argument
    try:
        return dist.ProcessGroup.unbox(argument)
    except (RuntimeError, TypeError, AttributeError):
        return None
