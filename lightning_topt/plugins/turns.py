"""Ranks of a tensor group that bring a batch each run these in turns: a batch passes the split
model on all ranks of the group, forward and backward, before the next one does.

The loss, its gradients and all that a step logs or counts are those of data parallelism, whatever
the loss is: a batch meets no other one. A rank takes part in the turn of another member as that
member would run it (see `member_state`). Losses of all turns but the last are differentiated at
once, without an exchange; their gradients wait until backward of the last one begins: Lightning
clears gradients in between. In memory is one turn.

Evaluation, whose ranks may have different numbers of batches, runs on whole parameters, each rank
by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.execution.engine import Engine
from lightning_topt.plugins.former_gradients import (
    Gradients,
    cleared_before_backward,
    gradients_aside,
)
from lightning_topt.plugins.member_batches import values_of_members
from lightning_topt.plugins.member_state import LoggedLater, MemberBuffers, foreign_turn
from lightning_topt.techniques.tensor_parallel.random_states import random_states

Step = Callable[..., Any]


class Turns:
    """The turns of the ranks of `group`, with this one, on `module`, which `engine` runs split over
    them on `device`.
    """

    def __init__(
        self,
        engine: Engine,
        module: pl.LightningModule,
        group: dist.ProcessGroup,
        *,
        device: torch.device,
    ) -> None:
        self._engine, self._module, self._group, self._device = engine, module, group, device
        self._size, self._place = dist.get_world_size(group), dist.get_rank(group)
        self._buffers = MemberBuffers(module, size=self._size, place=self._place)
        self._evaluation = ExitStack()

    # ---- training --------------------------------------------------------------------------------

    def training_step(self, step: Step, args: Sequence[Any], *, exchanges: bool) -> Any:
        """Return the output of ``step(*args)``, whose loss has the gradients of the group's mean
        loss in its graph.

        `exchanges`: backward is to exchange the gradients. A collective call.
        """
        self._buffers.begin(stay_in_sync=exchanges)
        logged, own, last_loss = LoggedLater(self._module), None, None
        with gradients_aside(
            self._module, dropped=cleared_before_backward(self._module)
        ) as gradients:
            for member, (batch, states) in enumerate(self._members(args)):
                is_last = member == self._size - 1
                with (
                    self._turn(member, states, logged),
                    nullcontext() if is_last else self._engine.no_sync(),
                ):
                    output = step(*batch)
                    loss = loss_of(output)
                    if loss is not None and not is_last:
                        loss.backward()  # type: ignore[no-untyped-call]
                    last_loss = loss if is_last else None
                    if member == self._place:
                        own = output
                    del output, loss, batch
        self._buffers.end()
        logged.replay()
        own_loss = loss_of(own)
        if own_loss is None or last_loss is None:
            return own
        joint = _JointLoss.apply(last_loss, own_loss.detach(), 1 / self._size, gradients)  # type: ignore[no-untyped-call]
        return {**own, "loss": joint} if isinstance(own, Mapping) else joint

    def _members(self, args: Sequence[Any]) -> Iterator[Any]:
        return values_of_members((tuple(args), random_states()), self._group, device=self._device)

    @contextmanager
    def _turn(self, member: int, states: Any, logged: LoggedLater) -> Generator[None, None, None]:
        is_own = member == self._place
        as_member: AbstractContextManager[None] = (
            nullcontext() if is_own else foreign_turn(self._module, states)
        )
        with as_member, self._buffers.turn_of(member), logged.on(own=is_own):
            yield

    # ---- evaluation ------------------------------------------------------------------------------

    def begin_evaluation(self) -> None:
        """Make the parameters whole. A collective call."""
        if not self.evaluates:
            self._buffers.begin()
            self._evaluation.enter_context(self._engine.joined())
            self.evaluates = True

    def end_evaluation(self) -> None:
        """Take up the slices again."""
        self._evaluation.close()
        self.evaluates = False

    evaluates = False


def loss_of(output: Any) -> Tensor | None:
    """Return the loss in what `training_step` returned."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None


class _JointLoss(torch.autograd.Function):
    """Has the value of a rank's own loss and the graph of the last turn's. Its gradient, times
    `share`, is that of all turns: backward adds the gradients of earlier ones, which it finds in
    `earlier`, and goes on with the last.
    """

    @staticmethod
    def forward(ctx: Any, last: Tensor, own: Tensor, share: float, earlier: Gradients) -> Tensor:
        ctx.shape, ctx.share, ctx.earlier = last.shape, share, earlier
        return own.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        factor = gradient * ctx.share
        while ctx.earlier:
            parameter, found = ctx.earlier.popitem()
            found.mul_(factor.reshape(()).to(found.dtype))
            parameter.grad = found if parameter.grad is None else parameter.grad.add_(found)
        return factor.reshape(ctx.shape), None, None, None
