"""Ranks of a tensor group that bring a batch each, as data ranks do, run each other's batches.

The model is split over the group, so a batch needs all of its ranks. Two ways, as the plan says:

    SequentialBatches  one after the other: a batch passes the split model, forward and backward,
                       on all ranks before the next one does; one batch is in memory at a time
    JointBatches       at the same time: each rank its own batch, but for the joint modules of the
                       plan, which run those of all ranks at once
                       (`techniques.tensor_parallel.joint_run`)

Batches never meet in a loss, whatever that is. So the loss, its gradients, and all that a step
logs, draws or counts are those of data parallelism. A rank that runs the batch of another one is
that rank meanwhile: random numbers, buffers, metrics, what rank 0 alone does.

Losses of all batches but the last are differentiated at once, without an exchange; their gradients
are stashed until backward of the last one begins (`stashed_gradients`). Joint modules need batches
of one shape; where ranks find together that theirs differ, that step runs them sequentially.

Evaluation, whose ranks may have different numbers of batches, runs on unsharded parameters, each
rank by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from typing_extensions import override

from lightning_topt.execution.engine import Engine
from lightning_topt.graph.structures import tensors_in
from lightning_topt.plugins.stashed_gradients import (
    cleared_before_backward,
    loss_with_gradients,
    stashed_gradients,
)
from lightning_topt.plugins.step_records import (
    RECORDED_METHODS,
    as_nonzero_rank,
    loss_of,
    own_methods,
    restore_methods,
    uncounted,
)
from lightning_topt.plugins.step_runner import Step, StepRunner, run_own_step
from lightning_topt.plugins.value_exchange import values_of_ranks
from lightning_topt.techniques.tensor_parallel.random_states import (
    RandomStates,
    random_states,
    set_random_states,
)

Buffers = dict[tuple[str, str], Tensor]  # by the paths of their modules, and their names

_MESSAGE_BYTES = 250 << 20  # of a broadcast of buffers, as DDP's
# Joint batches warn when more than this share of the first steps ran sequentially.
_COUNTED_STEPS, _MANY = 100, 0.1


class SequentialBatches(StepRunner):
    """Runs the steps of `module`, split by `engine` over the ranks of a group, on `device`.

    They run the batches of all of them, one after the other. Made before the plan is applied.
    """

    engine: Engine
    group: dist.ProcessGroup
    buffers: RankBuffers

    def __init__(self, engine: Engine, module: pl.LightningModule, *, device: torch.device) -> None:
        self.engine, self._module, self._device = engine, module, device
        self._evaluation = ExitStack()  # while it evaluates
        self._evaluates = False

    @override
    def begin(self, trainer: pl.Trainer) -> None:
        mesh = self.engine.plan.mesh
        self.group = self.engine.own_group(mesh.groups_along(mesh.tensor_axes))
        self._size, self._place = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.buffers = RankBuffers(self._module, size=self._size, place=self._place)

    @override
    def close(self, *, failed: bool) -> None:
        if not failed:
            self.end_evaluation()

    @override
    def training_step(
        self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], *, exchanges: bool
    ) -> Any:
        """Return the output of this rank's step, its loss with the gradients of the mean loss."""
        # Buffers as DDP would have them before forward.
        self.buffers.begin(stay_in_sync=exchanges)
        logs, own, last_loss = DelayedLogs(self._module), None, None
        inputs = values_of_ranks(((args, kwargs), random_states()), self.group, device=self._device)
        with stashed_gradients(
            self._module, dropped=cleared_before_backward(self._module)
        ) as gradients:
            for place, (batch, states) in enumerate(inputs):
                is_last, is_own = place == self._size - 1, place == self._place
                as_rank: AbstractContextManager[None] = (
                    nullcontext() if is_own else as_other_rank(self._module, states)
                )
                with (
                    as_rank,
                    self.buffers.buffers_of(place),
                    logs.on(own=is_own),
                    nullcontext() if is_last else self.engine.no_sync(),
                ):
                    output = run_own_step(self.engine, step, *batch)
                    loss = loss_of(output)
                    if loss is not None and not is_last:
                        loss.backward()
                    last_loss = loss if is_last else None
                    if is_own:
                        own = output
                    del output, loss, batch  # not beside the next one
        # This rank goes on with its own buffers; ranks log together.
        self.buffers.end()
        logs.replay()
        # The value of the own loss, with the graph of the last one.
        own_loss = loss_of(own)
        if own_loss is None or last_loss is None:
            return own
        joint = loss_with_gradients(
            own_loss, gradients, factor=1 / self._size, device=self._device, graph=last_loss
        )
        return {**own, "loss": joint} if isinstance(own, Mapping) else joint

    @override
    def evaluate(self, name: str, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.unsharded(step(*args, **kwargs))

    @override
    def begin_evaluation(self) -> None:
        """Unshard the parameters. A collective call."""
        if not self._evaluates:
            self.buffers.begin()
            self._evaluation.enter_context(self.engine.joined())
            self._evaluates = True

    @override
    def end_evaluation(self) -> None:
        """Split the parameters again."""
        self._evaluation.close()
        self._evaluates = False


class JointBatches(StepRunner):
    """Runs joint modules on the batches of all ranks at once, where these have one shape.

    Else it runs them sequentially.
    """

    engine: Engine

    def __init__(self, engine: Engine, module: pl.LightningModule, *, device: torch.device) -> None:
        self.engine, self._device = engine, device
        self._sequential = SequentialBatches(engine, module, device=device)
        self._buffers_differ = False
        self._steps = self._sequential_steps = 0

    @override
    def begin(self, trainer: pl.Trainer) -> None:
        self._sequential.begin(trainer)

    @override
    def close(self, *, failed: bool) -> None:
        self._sequential.close(failed=failed)

    @override
    def training_step(
        self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], *, exchanges: bool
    ) -> Any:
        group, buffers = self._sequential.group, self._sequential.buffers
        is_joint = are_alike((args, kwargs), group, device=self._device)
        self.engine.set_sequential(not is_joint)
        self._count(is_joint)
        if is_joint:
            buffers.begin(stay_in_sync=exchanges)
            with buffers.own_buffers():
                output = run_own_step(self.engine, step, args, kwargs)
            self._buffers_differ = True  # each rank has changed its own
            return output
        if self._buffers_differ:
            buffers.exchange(group, device=self._device)
            self._buffers_differ = False
        return self._sequential.training_step(step, args, kwargs, exchanges=exchanges)

    @override
    def evaluate(self, name: str, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._sequential.evaluate(name, step, args, kwargs)

    @override
    def begin_evaluation(self) -> None:
        self._sequential.begin_evaluation()

    @override
    def end_evaluation(self) -> None:
        self._sequential.end_evaluation()

    def _count(self, is_joint: bool) -> None:
        """Warn once where so many steps are sequential that another plan may be better."""
        self._steps += 1
        self._sequential_steps += not is_joint
        if self._steps == _COUNTED_STEPS and self._sequential_steps > _MANY * _COUNTED_STEPS:
            rank_zero_warn(
                f"topt: in {self._sequential_steps} of the first {_COUNTED_STEPS} steps ranks of a "
                "tensor group had batches of different "
                "shapes, and ran them one after the other, which the plan did not expect: let "
                "loaders make batches of one "
                'shape on all ranks (drop_last, padding to one length), or compare with plan="ddp"'
            )


def are_alike(batch: Any, group: dist.ProcessGroup | None, *, device: torch.device) -> bool:
    """Return whether the tensors of the batches of all ranks of `group` have the same shapes.

    A collective call.
    """
    forms = [
        (tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in tensors_in(batch)
    ]
    digest = hashlib.blake2b(repr(forms).encode(), digest_size=7).digest()
    own = torch.tensor([int.from_bytes(digest, "big")], device=device)
    several = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(several, own, group=group)
    return len({int(each) for each in torch.cat(several).tolist()}) == 1


# ---- being another rank --------------------------------------------------------------------------


@contextmanager
def as_other_rank(module: nn.Module, states: RandomStates) -> Generator[None, None, None]:
    """Run a step as the rank whose random generators are in `states` would.

    It draws from these; nothing that rank 0 alone does, or that metrics count, is left at the end.
    """
    own = random_states()
    with uncounted(module, unless=[]), as_nonzero_rank():
        set_random_states(states)
        try:
            yield
        finally:
            set_random_states(own)


class DelayedLogs:
    """Keeps what a module logs for its own batch, until all batches are done.

    Ranks then synchronize what they log together. What is logged for batches of others is dropped.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [each for each in module.modules() if isinstance(each, pl.LightningModule)]
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    @contextmanager
    def on(self, *, own: bool) -> Generator[None, None, None]:
        """Keep what is logged where the batch is this rank's own, and drop it where not."""
        before = [own_methods(module) for module in self._modules]
        for module in self._modules:
            vars(module).update(
                {"log": self._keeper(module.log)}
                if own
                else dict.fromkeys(RECORDED_METHODS, lambda *_, **__: None)
            )
        try:
            yield
        finally:
            for module, of_instance in zip(self._modules, before, strict=True):
                restore_methods(module, of_instance)

    def replay(self) -> None:
        """Log what was kept."""
        calls, self._calls = self._calls, []
        for log, args, kwargs in calls:
            log(*args, **kwargs)

    def _keeper(self, log: Callable[..., Any]) -> Callable[..., None]:
        def keep(*args: Any, **kwargs: Any) -> None:
            keywords = {name: _snapshot(value) for name, value in kwargs.items()}
            self._calls.append((log, tuple(map(_snapshot, args)), keywords))

        return keep


def _snapshot(value: Any) -> Any:
    """Return the value as it is now: the step may go on to change it."""
    if isinstance(value, dict):
        return {name: _snapshot(one) for name, one in value.items()}
    return value.detach().clone() if isinstance(value, Tensor) else value


class RankBuffers:
    """The buffers that every rank of a group would have under DDP, of those that steps change.

    DDP gives all ranks rank 0's before forward, unless the last pass was an evaluation or left
    gradients unsynchronized.
    """

    def __init__(self, module: nn.Module, *, size: int, place: int) -> None:
        self._module, self._place = module, place
        self._ranks: list[Buffers] = [_running_statistics(module)] * size
        self._are_to_sync = True
        self._is_first = True

    def begin(self, *, stay_in_sync: bool = False) -> None:
        """Give all ranks rank 0's where DDP would. A collective call.

        Args:
            stay_in_sync: whether the next pass is to do so too.
        """
        # As DDP: rank 0's, for all.
        own = {(path, name): buffer for path, name, buffer in self._all()}
        if self._are_to_sync and own:
            world: Any = dist.group.WORLD
            dist._broadcast_coalesced(  # type: ignore[attr-defined]
                world, [*own.values()], _MESSAGE_BYTES, 0
            )
        now = {key: own[key].clone() for key in self._ranks[self._place] if key in own}
        for place in range(len(self._ranks)):
            if self._are_to_sync or place == self._place:
                self._ranks[place] = now
        self._are_to_sync = stay_in_sync

    def exchange(self, group: dist.ProcessGroup, *, device: torch.device) -> None:
        """Learn those of all ranks of `group`, after each ran a step alone. A collective call."""
        own = self._ranks[self._place]
        self._ranks = [{**buffers} for buffers in values_of_ranks(own, group, device=device)]

    @contextmanager
    def buffers_of(self, place: int) -> Generator[None, None, None]:
        """Let the module have the buffers of a rank; remember them as they are at the end."""
        # Before the step of that rank.
        known = self._ranks[place]
        self._write(known)
        before = {(path, name): (buffer, buffer._version) for path, name, buffer in self._all()}
        # The first batch of all shows which buffers change.
        was = {key: buffer.clone() for key, (buffer, _) in before.items()} if self._is_first else {}
        self._is_first = False
        yield
        # After it: which buffers are new, or have new values?
        after = {(path, name): buffer for path, name, buffer in self._all()}
        changed = {
            key
            for key, now in after.items()
            if key not in before or _has_changed(now, *before[key], was.get(key))
        }
        # The other ranks have those that are new among the changed as they were before.
        was = {key: value for key, value in was.items() if key in changed}
        self._ranks = [{**was, **buffers} for buffers in self._ranks]
        self._ranks[place] = {
            key: after[key].clone() for key in changed | set(known) if key in after
        }

    def own_buffers(self) -> AbstractContextManager[None]:
        """Let the module have this rank's own buffers, and remember them at the end."""
        return self.buffers_of(self._place)

    def end(self) -> None:
        """Let the module have this rank's own buffers."""
        self._write(self._ranks[self._place])

    @torch.no_grad()
    def _write(self, buffers: Buffers) -> None:
        for (path, name), value in buffers.items():
            own = self._module.get_submodule(path)._buffers
            held = own.get(name)
            if held is None or held.shape != value.shape:
                own[name] = value.clone()
            else:
                # not in place: the graph of the last batch may hold the elements
                held.data = value.clone()

    def _all(self) -> Iterator[tuple[str, str, Tensor]]:
        for path, module in self._module.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield path, name, buffer


def _has_changed(now: Tensor, before: Tensor, version: int, value: Tensor | None) -> bool:
    """Compare a buffer by identity, version and value.

    Kernels of batch norm write running statistics without a new version.
    """
    return (
        now is not before
        or now._version != version
        or (value is not None and not torch.equal(now, value))
    )


def _running_statistics(module: nn.Module) -> Buffers:
    """Return those of norms: of frozen layers they change only once these are not any more."""
    return {
        (path, name): buffer.clone()
        for path, layer in module.named_modules()
        if isinstance(layer, _NormBase)
        for name, buffer in layer._buffers.items()
        if buffer is not None
    }
