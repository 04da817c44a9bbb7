"""Observe the steps of one rank under a plan for `topt verify`, and compare them with its result.

where                               what is real                              function
ranks of a process group            everything                                ObservedRun.observe
a fake process group of any size    the code; nothing is sent, and tensors    rehearse_rank
                                    have only shapes where torch's DDP,
                                    which reads their memory, has no part in
                                    the plan

An `Observation` has what the rank holds and the collectives that it calls. These are seen where
torch dispatches them (`CalledCollectives`): its own, FSDP2's, and those of DDP's reducer. Calls
from other threads (a gradient exchange) are not seen. `with_observations` adds what differs from
the verification to its problems and notes.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_topt.basics.units import format_bytes
from lightning_topt.communication.collectives import AllGather, ReduceScatter
from lightning_topt.costs.communication import Collective, Group
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.held_bytes import KINDS
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.execution.planned_collectives import (
    PASSES,
    CollectiveRow,
    differences_of_rows,
    rows_of,
)
from lightning_topt.execution.stored_states import TensorChunks
from lightning_topt.execution.verify_plan import OptimizersOf, Verification
from lightning_topt.graph.capture import CPU, call_training_step, loss_of
from lightning_topt.graph.module_copy import VALUE_NEEDED, fake_copy, filled_copy, silence
from lightning_topt.graph.structures import copied_batch, fake_batch, tensors_in
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES
from lightning_topt.techniques.registry import parameters_by_block
from lightning_topt.techniques.run_options import RunOptions
from lightning_topt.techniques.technique import forget_meshes, has_unsharded_gradients
from lightning_topt.techniques.tensor_parallel import moves

_STEPS = 3  # DDP packs its buckets anew before the second forward, and sends how
_SHOWN = 3  # differences of each kind


# By operator: the name, and the argument that has the full tensor.
_OPERATORS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
}


@dataclass(frozen=True)
class Observation:
    """What one rank holds of each block, in bytes by `KINDS`, and calls in one step."""

    rank: int
    held: Mapping[str, tuple[int, ...]]
    collectives: tuple[CollectiveRow, ...]


@dataclass(frozen=True)
class ObservedRun:
    """Steps of `module`, which has a `training_step`, on one batch.

    The module prints and logs nothing any more.

    Attributes:
        plan: that the engine runs.
        module: of the steps.
        batch: of every step.
        optimizers_of: makes the optimizers of the module.
        device: of this rank.
        options: of the engine.
        calls: records collectives.
        mode: is on while it steps (fake tensors).
        forward_context: makes a context around forward, such as autocast.
        parts: the microbatches of `batch` under a plan with stages.
    """

    plan: ParallelPlan
    module: nn.Module
    batch: Any
    optimizers_of: OptimizersOf
    device: torch.device = CPU
    options: RunOptions = field(default_factory=RunOptions)
    calls: CalledCollectives = field(default_factory=lambda: CalledCollectives())
    mode: AbstractContextManager[Any] | None = None
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    parts: Sequence[Any] = ()

    def observe(self) -> Observation:
        """Run steps as a rank of the plan, and return what the last one showed. A collective call.

        The module then has its own parameters again, unless they are fake. Raises PlanError as
        `Engine` does, and what the step raises.
        """
        # Apply the plan.
        silence(self.module)
        engine = Engine(self.plan, self.module, device=self.device, options=self.options)
        is_staged = self.plan.schedule is not None
        self.module.train()
        root = engine.apply(
            example=Example(self._loss_of_part, self.parts[0]) if is_staged else None
        )
        # Its all-reduce is called in C++: the hook that records it needs the group.
        if isinstance(root, DistributedDataParallel):
            self.calls.of_ddp = root.process_group
        optimizers = self.optimizers_of(self.module)
        engine.attach_optimizers(optimizers)
        # Step, and look at the rank between backward and update, when gradients are there.
        held: dict[str, list[int]] = {}
        for _ in range(_STEPS):
            self.calls.calls.clear()
            for optimizer in optimizers:
                optimizer.zero_grad()
            with self._on():
                self._run_forward_backward(engine)
            held = self._held_tensors(engine.non_local_parameters)
            with self._on():
                self.calls.during = "update"
                for optimizer in optimizers:
                    optimizer.step()
        self._add_states(held, engine, optimizers)
        # To undo shards is to gather them, which a fake group cannot.
        if dist.get_backend() != "fake":
            engine.release()
        engine.close()
        sizes = {block: tuple(of_block) for block, of_block in held.items()}
        return Observation(dist.get_rank(), sizes, rows_of(self.calls.calls, self.plan.mesh))

    @contextmanager
    def _on(self) -> Iterator[None]:
        with self.mode or nullcontext(), self.calls.watching():
            yield

    def _run_forward_backward(self, engine: Engine) -> None:
        def loss(model: nn.Module, batch: object) -> Tensor:
            self.calls.during = "forward"
            with _forward_is_training_step(self.module), self.forward_context():
                found = loss_of(model(batch))
            self.calls.during = "backward"
            return found

        self.module.train()
        if self.plan.schedule in CONTINUOUS_SCHEDULES:
            for part in self.parts:
                engine.continuous.advance(part, self._loss_of_part)
            deque(engine.continuous.drain(), maxlen=0)  # gradients add up: nothing is learnt here
        elif self.plan.schedule is not None:
            engine.run_step(self.parts, self._loss_of_part)
        else:
            engine.run_step([self.batch], loss)

    def _loss_of_part(self, model: nn.Module, part: object) -> Tensor:
        with self.forward_context():
            return loss_of(call_training_step(model, part))

    def _held_tensors(self, others: Collection[nn.Parameter]) -> dict[str, list[int]]:
        """Return the bytes of each block without states; `others` are not on this rank."""
        found = {}
        for block, parameters in parameters_by_block(self.module, self._names).items():
            tensors = [each for each in dict.fromkeys(parameters.values()) if each not in others]
            # in the order of `KINDS`; states are added after the update
            gradients = [parameter.grad for parameter in tensors if parameter.grad is not None]
            sizes = [sum(_local(tensor).nbytes for tensor in each) for each in (tensors, gradients)]
            found[block] = [*sizes, 0, _padding(tensors) + _padding(gradients)]
        return found

    def _add_states(
        self, held: dict[str, list[int]], engine: Engine, optimizers: Sequence[Optimizer]
    ) -> None:
        """Add the bytes of optimizer states to what is `held`."""
        blocks = parameters_by_block(self.module, self._names)
        home: dict[Tensor, str] = {
            p: block for block, parameters in blocks.items() for p in parameters.values()
        }
        for optimizer in optimizers:
            for index, values in engine.optimizer_state(optimizer, full=False)["state"].items():
                leaves = [_local(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
                held[home[parameters_of(optimizer)[index]]][2] += sum(
                    leaf.nbytes for leaf in leaves
                )

    @property
    def _names(self) -> list[str]:
        return [block.block for block in self.plan.blocks]


@contextmanager
def _forward_is_training_step(module: nn.Module) -> Iterator[None]:
    """Let the first call of `module` run its training step.

    Wrappers around the module gather and reduce for all of the step then.
    """
    # An instance attribute, which hides the method for one call.
    before = vars(module).get("forward")

    def give_back() -> None:
        vars(module).pop("forward", None)
        if before is not None:
            vars(module)["forward"] = before

    def step(batch: object) -> Any:
        give_back()
        return call_training_step(module, batch)

    vars(module)["forward"] = step
    try:
        yield
    finally:
        give_back()


def _local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that is on this rank."""
    if isinstance(tensor, TensorChunks):
        return tensor.local
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _padding(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of shards' memory that are no rows of their tensors."""
    # Storages of shards are as large as the largest shard.
    shards = [_local(tensor) for tensor in tensors if isinstance(tensor, DTensor)]
    storages = {
        shard.untyped_storage()._cdata: shard.untyped_storage().nbytes() for shard in shards
    }
    return sum(storages.values()) - sum(shard.nbytes for shard in shards)


# ---- collectives that are called -----------------------------------------------------------------


class CalledCollectives(TorchDispatchMode):
    """Records `calls` of collectives while it is on; `during` is the pass that they are part of.

    On gloo an all-gather and a reduce-scatter, FSDP2's and those along tensor axes, are exchanges
    of other kinds (`communication.collectives`): each of them is one call here.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Collective] = []
        self.during = "forward"
        # the group whose ranks' gradients DDP averages
        self.of_ddp: dist.ProcessGroup | None = None
        self._inside = False

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d" and name in _OPERATORS and not self._inside:
            op, position = _OPERATORS[name]
            # c10d's operators have their group somewhere among their arguments, boxed
            group = next(found for each in args if (found := _process_group(each)) is not None)
            self.note(op, list(tensors_in(args[position])), group)
        return func(*args, **(kwargs or {}))

    def note(self, op: str, whole: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        """Record a call of `op` on the tensors that have all its bytes."""
        # Groups along axes of a mesh have a constant stride.
        ranks = dist.get_process_group_ranks(group)
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        size = sum(tensor.numel() * tensor.element_size() for tensor in whole)
        self.calls.append(Collective(self.during, op, size, Group(len(ranks), stride)))

    @contextmanager
    def watching(self) -> Generator[None, None, None]:
        """Switch the recorder on, also for what runs as other collectives on gloo."""
        with (
            _counted(AllGather, "all_gather", 0, self),
            _counted(ReduceScatter, "reduce_scatter", 1, self),
            _counted_move("all_gather_into", "all_gather", 0, self),
            _counted_move("reduce_scatter_into", "reduce_scatter", 1, self),
            self,
        ):
            yield

    @contextmanager
    def as_one(
        self, op: str, whole: Tensor, group: dist.ProcessGroup
    ) -> Generator[None, None, None]:
        """Record a call of `op`, and none of those that it is made of."""
        self.note(op, [whole], group)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False


@contextmanager
def _counted(
    cls: type, op: str, position: int, calls: CalledCollectives
) -> Generator[None, None, None]:
    """Record calls of instances of `cls`; its argument at `position` has all bytes."""
    original: Callable[..., Any] = cls.__call__

    def counted(
        self: object,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with calls.as_one(op, (output_tensor, input_tensor)[position], group):
            return original(self, output_tensor, input_tensor, group, *args, **kwargs)

    cls.__call__ = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        cls.__call__ = original  # type: ignore[method-assign]


@contextmanager
def _counted_move(
    name: str, op: str, position: int, calls: CalledCollectives
) -> Generator[None, None, None]:
    """Record calls of a function of `moves`, as `_counted` does."""
    original: Callable[..., Any] = getattr(moves, name)

    def counted(output: Tensor, local: Tensor, *, group: dist.ProcessGroup, **kwargs: Any) -> Any:
        with calls.as_one(op, (output, local)[position], group):
            return original(output, local, group=group, **kwargs)

    setattr(moves, name, counted)
    try:
        yield
    finally:
        setattr(moves, name, original)


def _process_group(argument: object) -> dist.ProcessGroup | None:
    if isinstance(argument, dist.ProcessGroup):
        return argument
    if isinstance(argument, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(argument)
        except RuntimeError:
            return None
    return None


# ---- a fake process group ------------------------------------------------------------------------


class CannotRehearseError(RuntimeError):
    """A plan that cannot be tried without its ranks; says why."""


def rehearse_rank(
    plan: ParallelPlan,
    module: nn.Module,
    batch: object,
    *,
    optimizers_of: OptimizersOf,
    rank: int = 0,
    memory_limit: float = 4 << 30,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Observation:
    """Run steps of a copy of `module` as one rank of a fake process group; nothing is sent.

    `module` may be on the meta device. Where DDP has a part in the plan, the copy has real memory:
    full parameters, gradients and optimizer state. Other arguments are those of `ObservedRun`.

    Raises:
        CannotRehearseError: where that memory may be more than `memory_limit` (bytes), where the
            plan's gradient exchange reads what other ranks send, where the step depends on values
            of tensors, and within a process group. Else what `ObservedRun.observe` raises.
    """
    if dist.is_initialized():
        raise CannotRehearseError(
            "this process is in a process group, and a fake one would take its place"
        )
    if plan.schedule is not None:
        raise CannotRehearseError(
            "its stages compute with what other ranks send, and a fake group sends nothing"
        )
    if plan.local_steps is not None:
        raise CannotRehearseError(
            "its ranks train alone, and what they exchange once in many steps is not in one step"
        )
    if plan.gradient_exchange is not None:
        raise CannotRehearseError(
            "its gradient exchange reads what other ranks send, and a fake group sends nothing"
        )
    calls = CalledCollectives()
    given: dict[str, Any] = {
        "optimizers_of": optimizers_of,
        "calls": calls,
        "forward_context": forward_context,
    }
    if any(has_unsharded_gradients(block.config) for block in plan.blocks):
        # Parameters, gradients, and two states such as those of Adam.
        needed = 4 * sum(parameter.nbytes for parameter in module.parameters())
        if needed > memory_limit:
            raise CannotRehearseError(
                "torch's DistributedDataParallel reads the memory of its tensors, and whole "
                f"parameters, gradients and optimizer state take about {needed / 2**30:.1f} GiB"
            )
        options = RunOptions(hook=_note_bucket, hook_state=calls)
        run = ObservedRun(plan, filled_copy(module), copied_batch(batch), options=options, **given)
    else:
        # Shapes alone.
        copied, mode = fake_copy(module)
        with mode:
            shapes = fake_batch(batch, samples=(1, 1), device=CPU)
        run = ObservedRun(plan, copied, shapes, mode=mode, **given)
    # The process is a rank of a group of any size; what it sends goes nowhere.
    dist.init_process_group("fake", rank=rank, world_size=plan.mesh.size, store=FakeStore())
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), _own_objects():
            warnings.simplefilter("ignore")  # all of it comes again in the run itself
            return run.observe()
    except VALUE_NEEDED as error:
        raise CannotRehearseError(
            "the step depends on values of tensors, and fake ones have none"
        ) from error
    finally:
        dist.destroy_process_group()
        forget_meshes()


@contextmanager
def _own_objects() -> Iterator[None]:
    """Let a rank receive its own objects: nothing that could be unpickled comes of a fake group."""

    def gather(object_list: Any, obj: object, group: object = None) -> Any:
        object_list[:] = [obj] * len(object_list)

    # a broadcast leaves what is there; a gather finds its own object of every rank
    before = dist.broadcast_object_list, dist.all_gather_object
    dist.broadcast_object_list, dist.all_gather_object = lambda *_, **__: None, gather
    try:
        yield
    finally:
        dist.broadcast_object_list, dist.all_gather_object = before


def _note_bucket(calls: CalledCollectives, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Record a bucket in the place of DDP's all-reduce, whose result a fake group has not."""
    assert calls.of_ddp is not None
    calls.note("all_reduce", [bucket.buffer()], calls.of_ddp)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


# DDP compares annotations with the types themselves, not with their names.
_note_bucket.__annotations__.update({"bucket": GradBucket, "return": torch.futures.Future[Tensor]})


# ---- comparison ----------------------------------------------------------------------------------


def with_observations(
    verification: Verification, seen: Iterable[Observation], *, where: str
) -> Verification:
    """Return `verification` with what differs from what was `seen` of ranks `where` (words).

    It is a problem that a rank holds more than was said, or calls other collectives. It is a note
    that it holds less, or that DDP packs the same gradients into another number of buckets: that
    depends on the order in which they become ready. Collectives along tensor axes are added to what
    is said, where it has none.
    """
    # One sentence for each difference, by kind.
    seen = list(seen)
    verification = _with_tensor_rows(verification, seen[0])
    more: list[str] = []
    less: list[str] = []
    calls: list[str] = []
    buckets: list[str] = []
    for each in seen:
        for block, kind, said, found in _differing(verification, each):
            text = f"{kind.replace('_', ' ')} of block {block!r}, {format_bytes(said)} expected"
            if found > said:
                more.append(
                    f"rank {each.rank} {where} holds {found - said:,} bytes more than said: {text}"
                )
            else:
                less.append(
                    f"rank {each.rank} {where} holds {said - found:,} bytes less than said: {text}"
                )
        if verification.plan.gradient_exchange is None and verification.plan.schedule is None:
            different, repacked = _differences(verification, each)
            calls += [
                f"rank {each.rank} {where} calls other collectives: {text}" for text in different
            ]
            buckets += [f"rank {each.rank} {where} has other buckets: {text}" for text in repacked]
    problems = [*_shortened(more), *_shortened(calls)]
    notes = [*_shortened(less), *_shortened(buckets)]
    if verification.plan.gradient_exchange is not None:
        notes.append(
            f"the gradient exchange works in a thread of its own, so what ranks {where} call was "
            "not compared"
        )
    if verification.plan.schedule is not None:
        notes.append(f"what ranks {where} call and send was not compared: the plan has stages")
    if not problems:
        ranks = f"rank {seen[0].rank}" if len(seen) == 1 else f"all {len(seen)} ranks"
        notes.append(
            f"{ranks} {where} took a step and did what is said here"
            if not notes
            else f"{ranks} {where} took a step"
        )
    return replace(
        verification,
        problems=(*verification.problems, *problems),
        notes=(*verification.notes, *notes),
    )


def _with_tensor_rows(verification: Verification, seen: Observation) -> Verification:
    """Return the verification with the observed collectives along tensor axes."""
    mesh = verification.plan.mesh
    names = {mesh.names[axis] for axis in mesh.tensor_axes}

    def along_tensor_axes(rows: Iterable[CollectiveRow]) -> list[CollectiveRow]:
        return [row for row in rows if names & set(row.axis.split(" x "))]

    # what is called along tensor axes follows from the step, so it is seen, not said
    if along_tensor_axes(verification.collectives):
        return verification
    rows = [*verification.collectives, *along_tensor_axes(seen.collectives)]
    return replace(
        verification, collectives=tuple(sorted(rows, key=lambda row: PASSES.index(row.during)))
    )


def _differences(verification: Verification, seen: Observation) -> tuple[list[str], list[str]]:
    """Return sentences for collectives that differ, and for those in other buckets only."""
    said = {row.key: row for row in verification.collectives}
    # DDP: the same bytes in another number of buckets.
    packed = [
        row
        for row in seen.collectives
        if (row.during, row.op) == ("backward", "all_reduce")
        and row.key in said
        and said[row.key].nbytes == row.nbytes
        and any(has_unsharded_gradients(block.config) for block in verification.plan.blocks)
    ]
    repacked = differences_of_rows([said[row.key] for row in packed], packed)
    rest = [said[row.key] if row in packed else row for row in seen.collectives]
    return differences_of_rows(verification.collectives, rest), repacked


def _differing(
    verification: Verification, seen: Observation
) -> Iterator[tuple[str, str, int, int]]:
    """Yield block, kind, bytes said and bytes found where these differ."""
    for block, sizes in verification.held.items():
        for kind, said, found in zip(
            KINDS, sizes[seen.rank].tolist(), seen.held[block], strict=True
        ):
            if said != found and (verification.knows_state or kind != "optimizer_state"):
                yield block, kind, said, found


def _shortened(sentences: list[str]) -> list[str]:
    hidden = len(sentences) - _SHOWN
    return (
        sentences
        if hidden <= 0
        else [*sentences[:_SHOWN], f"and {hidden} more differences of this kind"]
    )
