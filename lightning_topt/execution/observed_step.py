"""Training steps of one rank under a plan, run by the engine and watched: what the rank holds,
which collectives it calls.

where                               what is real                              function
ranks of a process group            everything                                ObservedRun.observe
a fake process group of any size    the code; nothing is sent, and tensors    rehearse_rank
                                    have only shapes where torch's DDP,
                                    which reads their memory, has no part in
                                    the plan
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import debug as tensor_debug
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from lightning_topt.execution.called_collectives import CalledCollectives
from lightning_topt.execution.collective_rows import CollectiveRow, rows_of
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.execution.tensor_chunks import TensorChunks
from lightning_topt.graph.fake import fake_copy
from lightning_topt.graph.module_copy import filled_copy
from lightning_topt.graph.sample_counts import fake_batch
from lightning_topt.graph.silence import VALUE_NEEDED, silence
from lightning_topt.graph.step_run import CPU, call_training_step, loss_of
from lightning_topt.graph.structures import copied_batch
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES
from lightning_topt.techniques.block_parameters import parameters_by_block
from lightning_topt.techniques.technique import RunOptions, has_whole_gradients

OptimizersOf = Callable[[Any], Sequence[Optimizer]]  # the optimizers of a module
_STEPS = 3  # DDP packs its buckets anew before the second forward, and sends how


@dataclass(frozen=True)
class Observation:
    """One rank as it was seen: the bytes that it `held` of each block, by `KINDS`, and the
    collectives of one step.
    """

    rank: int
    held: Mapping[str, tuple[int, ...]]
    collectives: tuple[CollectiveRow, ...]


class CannotRehearseError(RuntimeError):
    """A plan that cannot be tried without its ranks; says why."""


@dataclass(frozen=True)
class ObservedRun:
    """Steps of `module`, which has a `training_step`, on `batch` with the optimizers that
    `optimizers_of` makes.

    `parts` are the microbatches of `batch` under a plan with stages. `mode` is on while it steps
    (fake tensors), `forward_context` makes a context around forward, such as autocast; `options`
    are those of the engine. The module says and logs nothing any more.
    """

    plan: ParallelPlan
    module: nn.Module
    batch: Any
    optimizers_of: OptimizersOf
    device: torch.device = CPU
    options: RunOptions = field(default_factory=RunOptions)
    calls: CalledCollectives = field(default_factory=CalledCollectives)
    mode: AbstractContextManager[Any] | None = None
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    parts: Sequence[Any] = ()

    def observe(self) -> Observation:
        """Run steps as a rank of the plan, and return what the last one showed. A collective call.

        The module then has its own parameters again, unless they are fake. Raises PlanError as
        `Engine` does, and what the step raises.
        """
        silence(self.module)
        engine = Engine(self.plan, self.module, device=self.device, options=self.options)
        is_staged = self.plan.schedule is not None
        self.module.train()
        root = engine.apply(
            example=Example(self._loss_of_part, self.parts[0]) if is_staged else None
        )
        if isinstance(root, DistributedDataParallel):
            self.calls.of_ddp = root.process_group
        optimizers = self.optimizers_of(self.module)
        engine.attach_optimizers(optimizers)
        held: dict[str, list[int]] = {}
        for _ in range(_STEPS):
            self.calls.calls.clear()
            for optimizer in optimizers:
                optimizer.zero_grad()
            with self._on():
                self._run_forward_backward(engine)
            held = self._held_tensors(engine.foreign_parameters)
            with self._on():
                self.calls.during = "update"
                for optimizer in optimizers:
                    optimizer.step()
        self._add_states(held, engine, optimizers)
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
        def loss(model: nn.Module, batch: Any) -> Tensor:
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

    def _loss_of_part(self, model: nn.Module, part: Any) -> Tensor:
        with self.forward_context():
            return loss_of(call_training_step(model, part))

    def _held_tensors(self, foreign: Collection[nn.Parameter]) -> dict[str, list[int]]:
        found = {}
        for block, parameters in parameters_by_block(self.module, self._names).items():
            tensors = [each for each in dict.fromkeys(parameters.values()) if each not in foreign]
            gradients = [parameter.grad for parameter in tensors if parameter.grad is not None]
            sizes = [sum(_local(tensor).nbytes for tensor in each) for each in (tensors, gradients)]
            found[block] = [*sizes, 0, _padding(tensors) + _padding(gradients)]
        return found

    def _add_states(
        self, held: dict[str, list[int]], engine: Engine, optimizers: Sequence[Optimizer]
    ) -> None:
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
    """The first call of `module` runs its training step: wrappers around it then gather and reduce
    for all of that.
    """
    before = vars(module).get("forward")

    def give_back() -> None:
        vars(module).pop("forward", None)
        if before is not None:
            vars(module)["forward"] = before

    def step(batch: Any) -> Any:
        give_back()
        return call_training_step(module, batch)

    vars(module)["forward"] = step
    try:
        yield
    finally:
        give_back()


def _local(tensor: Tensor) -> Tensor:
    if isinstance(tensor, TensorChunks):
        return tensor.local
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _padding(tensors: Sequence[Tensor]) -> int:
    """Bytes of the memory of shards that are no rows of their tensors."""
    shards = [_local(tensor) for tensor in tensors if isinstance(tensor, DTensor)]
    storages = {
        shard.untyped_storage()._cdata: shard.untyped_storage().nbytes() for shard in shards
    }
    return sum(storages.values()) - sum(shard.nbytes for shard in shards)


# ---- a fake process group ------------------------------------------------------------------------


def rehearse_rank(
    plan: ParallelPlan,
    module: nn.Module,
    batch: Any,
    *,
    optimizers_of: OptimizersOf,
    rank: int = 0,
    memory_limit: float = 4 << 30,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Observation:
    """Run steps of a copy of `module` as `rank` of a fake process group of the plan's size; nothing
    is sent.

    `module` may be on the meta device. Where DDP has a part in the plan, the copy has real memory:
    whole parameters, gradients and optimizer state. Raises CannotRehearseError where these may be
    more than `memory_limit` (bytes), where the plan's gradient exchange reads what other ranks
    send, where the step depends on values of tensors, and within a process group; else what
    `ObservedRun.observe` raises.
    """
    if dist.is_initialized():
        raise CannotRehearseError(
            "this process is in a process group, and a fake one would take its place"
        )
    if plan.schedule is not None:
        raise CannotRehearseError(
            "its stages compute with what other ranks send, and a fake group sends nothing"
        )
    if plan.joint:
        raise CannotRehearseError(
            "its joint modules compute with the batches of other ranks, and a fake group sends "
            "nothing"
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
    if any(has_whole_gradients(block.config) for block in plan.blocks):
        needed = 4 * sum(parameter.nbytes for parameter in module.parameters())
        if needed > memory_limit:
            raise CannotRehearseError(
                "torch's DistributedDataParallel reads the memory of its tensors, and whole "
                f"parameters, gradients and optimizer state take about {needed / 2**30:.1f} GiB"
            )
        options = RunOptions(hook=_note_bucket, hook_state=calls)
        run = ObservedRun(plan, filled_copy(module), copied_batch(batch), options=options, **given)
    else:
        copied, mode = fake_copy(module)
        with mode:
            shapes = fake_batch(batch, samples=(1, 1), device=CPU)
        run = ObservedRun(plan, copied, shapes, mode=mode, **given)
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


def forget_meshes() -> None:
    """Empty DTensor's caches: a later mesh of the same shape, of another rank, would be taken for
    that of the rehearsal.
    """
    for name in (
        "_clear_sharding_prop_cache",
        "_clear_python_sharding_prop_cache",
        "_clear_fast_path_sharding_prop_cache",
    ):
        if (clear := getattr(tensor_debug, name, None)) is not None:
            clear()
    _gen_transform_infos.cache_clear()


@contextmanager
def _own_objects() -> Iterator[None]:
    """Objects that ranks tell one another are their own: from a fake group comes nothing that could
    be unpickled.
    """

    def gather(object_list: Any, obj: Any, group: Any = None) -> Any:
        object_list[:] = [obj] * len(object_list)

    before = dist.broadcast_object_list, dist.all_gather_object
    dist.broadcast_object_list, dist.all_gather_object = lambda *_, **__: None, gather
    try:
        yield
    finally:
        dist.broadcast_object_list, dist.all_gather_object = before


def _note_bucket(calls: CalledCollectives, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """In the place of DDP's all-reduce, whose result a fake group has not."""
    assert calls.of_ddp is not None
    calls.note("all_reduce", [bucket.buffer()], calls.of_ddp)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


# DDP compares annotations with the types themselves, not with their names.
_note_bucket.__annotations__.update({"bucket": GradBucket, "return": torch.futures.Future[Tensor]})
