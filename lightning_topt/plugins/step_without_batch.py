"""A step of a rank that has no batch: the collective calls of the others' step, and nothing else.

Forward goes through what wraps the module (DDP, the root of FSDP2), with a function in the place of
``training_step`` that reads every parameter and returns zero. Backward then sends gradients of zero
through the buckets and the shards of a usual step. User code, its hooks and random numbers are left
alone.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class BlockCall(NamedTuple):
    """A call of a block under FSDP2, and whether what it was given has gradients.

    FSDP2 scatters the gradients of those without at the end of backward.
    """

    block: nn.Module
    takes_gradients: bool = True


def zero_loss(model: nn.Module, module: nn.Module, calls: Sequence[BlockCall] = ()) -> Tensor:
    """Return a loss of zero that depends on all trained parameters, by gradients of zero.

    A collective call, as forward of a step is; so is its backward.

    Args:
        model: what forward is called through.
        module: the LightningModule in it.
        calls: of blocks under FSDP2, in their order.
    """
    finds_unused = isinstance(model, DistributedDataParallel) and model.find_unused_parameters

    def forward() -> Tensor:
        zero = torch.zeros((), device=next(iter(module.parameters())).device)
        value, read = zero.clone().requires_grad_(torch.is_grad_enabled()), set[Tensor]()
        for block, takes_gradients in calls:
            given = value if takes_gradients else zero
            # As FSDP2's own hooks do, without those of the user.
            state = cast(Any, block)._get_fsdp_state()
            (given,), _ = state._pre_forward(block, (given,), {})
            output = _read(given, _trained(block), read)
            output = state._post_forward(block, (given,), output)
            value = output if takes_gradients else value + output
        rest = _trained(module)
        if finds_unused:
            # DDP leaves parameters alone that no rank has used: one stands for all.
            rest = rest[-1:]
        return _read(value, rest, read)

    with _in_place_of_forward(module, forward):
        loss: Tensor = model() if model is not module else forward()
    return loss


def _trained(module: nn.Module) -> list[Tensor]:
    # Parameters in shards are read where their block is.
    return [p for p in module.parameters() if p.requires_grad and not isinstance(p, DTensor)]


def _read(value: Tensor, parameters: Iterable[Tensor], read: set[Tensor]) -> Tensor:
    """Return `value`, which depends on `parameters` now; none is read twice."""
    new = [parameter for parameter in parameters if parameter not in read]
    read.update(new)
    result: Tensor = _Unchanged.apply(value, *new)  # type: ignore[no-untyped-call]
    return result


class _Unchanged(torch.autograd.Function):
    """The first argument; the gradients of all others are zero."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *parameters: Tensor) -> Tensor:
        # Only their form is needed: FSDP2 frees their memory until backward.
        ctx.parameters = parameters
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *(torch.zeros_like(parameter) for parameter in ctx.parameters)


@contextmanager
def _in_place_of_forward(module: nn.Module, forward: Any) -> Generator[None, None, None]:
    """Let a call of `module` run `forward` alone, without the user's hooks."""
    own = vars(module)
    before = {name: own[name] for name in (*_HOOKS, "forward") if name in own}
    own.update({name: type(own[name])() for name in _HOOKS})
    own["forward"] = forward
    try:
        yield
    finally:
        if "forward" not in before:
            del own["forward"]
        own.update(before)


class BlockOrder:
    """In which order the blocks under FSDP2 are called, as the last step of each kind has shown.

    `blocks` are in the plan's order, which an evaluation takes that nothing has shown.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = [block for block in blocks if isinstance(block, FSDPModule)]
        self._seen: dict[str, list[BlockCall]] = {}
        self._now: list[BlockCall] | None = None
        self._hooks: list[RemovableHandle] = [
            block.register_forward_pre_hook(self._called, prepend=True, with_kwargs=True)
            for block in self._blocks
        ]

    @property
    def has_seen_training(self) -> bool:
        """Whether a training step has shown the order."""
        return "training_step" in self._seen

    def calls(self, step: str) -> Sequence[BlockCall]:
        """Return the calls of the named step, or else of training."""
        seen = self._seen.get(step) or self._seen.get("training_step")
        return seen or [BlockCall(block) for block in self._blocks]

    @contextmanager
    def recorded(self, step: str) -> Generator[None, None, None]:
        """Record the forward pass of the named step within."""
        self._now = self._seen[step] = []
        try:
            yield
        finally:
            self._now = None

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _called(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        if self._now is not None:
            self._now.append(BlockCall(block, any(map(_has_gradients, (*args, *kwargs.values())))))


def _has_gradients(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, list | tuple | dict):
        return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(value))
    return False
