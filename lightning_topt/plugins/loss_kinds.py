"""Losses and logged values of the parts of a batch: means over samples, sums, or neither; found by a test."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_topt.plugins.metric_states import uncounted
from lightning_topt.plugins.pipeline_values import Call
from lightning_topt.plugins.turns import loss_of
from lightning_topt.techniques.tensor_parallel.random_states import random_states, set_random_states

_RELATIVE = 1e-3  # by which equal losses may differ, in float32
_RELATIVE_HALF, _RELATIVE_RANDOM = 3e-2, 0.4


@dataclass(frozen=True)
class LossKinds:
    """A step's `loss` over parts of its batch is a ``"mean"`` or a ``"sum"``, and so are the values that it logs, by name, and
    the leaves of what it returns, by place. None: the test batch did not tell.
    """

    loss: str | None
    logged: Mapping[str, str] = field(default_factory=dict)
    returned: Mapping[int, str] = field(default_factory=dict)

    def weights(self, sizes: Sequence[int]) -> tuple[float, ...]:
        """Return the weights of the losses of parts that have `sizes` samples."""
        return tuple(1.0 if self.loss == "sum" else size / sum(sizes) for size in sizes)


Step = tuple[Any, Sequence[Call]]  # what it returned, and its calls


def compare_steps(once: Step, twice: Step, *, draws: bool, half: bool = False) -> LossKinds:
    """Return the kinds, from the step of a batch and from that of the batch with every sample twice.

    `draws`: it draws random numbers, so that no two steps are equal; `half`: it computes in 16 bits. Raises ValueError for a
    loss of neither kind.
    """
    first, second = loss_of(once[0]), loss_of(twice[0])
    if first is None or second is None:
        raise ValueError(
            "training_step returned no loss for a microbatch, which a pipeline cannot leave out; return one, or use another "
            "strategy"
        )
    relative = _RELATIVE_RANDOM if draws else _RELATIVE_HALF if half else _RELATIVE
    kind = _kind(float(first), float(second), relative)
    if kind == "neither":
        raise ValueError(
            f"the loss is neither a mean nor a sum over samples: for the first microbatch it is "
            f"{float(first):.6g}, and with every sample in it twice {float(second):.6g}. A loss that depends on the batch as a "
            "whole is another one in microbatches; use microbatches=1"
        )
    logged = {a.name: _kind_of(a.value, b.value, relative) for a, b in zip(once[1], twice[1], strict=False)}
    leaves = zip(tree_leaves(once[0]), tree_leaves(twice[0]), strict=False)
    returned = {place: _kind_of(a, b, relative) for place, (a, b) in enumerate(leaves)}
    return LossKinds(
        kind,
        {name: found for name, found in logged.items() if found == "sum"},
        {place: found for place, found in returned.items() if found == "sum"},
    )


def _kind_of(once: Any, twice: Any, relative: float) -> str | None:
    if all(
        isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1) for value in (once, twice)
    ):
        return _kind(float(once), float(twice), relative)
    return None


def _kind(once: float, twice: float, relative: float) -> str | None:
    if once == 0 or not math.isfinite(once) or not math.isfinite(twice):
        return None
    if math.isclose(twice, once, rel_tol=relative):
        return "mean"
    return "sum" if math.isclose(twice, 2 * once, rel_tol=relative) else "neither"


@contextmanager
def without_trace(module: nn.Module) -> Generator[None, None, None]:
    """Run `module` in evaluation mode, without gradients; modes, random numbers, buffers and metrics stay as they were."""
    states, modes = random_states(), [(part, part.training) for part in module.modules()]
    buffers = [(part, name, part._buffers[name]) for part in module.modules() for name in part._buffers]
    values = [None if buffer is None else buffer.clone() for _, _, buffer in buffers]
    module.eval()
    try:
        with torch.no_grad(), uncounted(module, unless=[]):
            yield
    finally:
        set_random_states(states)
        for part, was_training in modes:
            part.training = was_training
        for (part, name, buffer), value in zip(buffers, values, strict=True):
            part._buffers[name] = buffer
            if buffer is not None and value is not None:
                with torch.no_grad():
                    buffer.copy_(value)


def drawn_since(states: Any) -> bool:
    """Return whether random numbers were drawn since `random_states` returned `states`."""
    now, before = random_states(), states
    arrays = [(now[0], before[0])] + ([(now[1], before[1])] if now[1] is not None and before[1] is not None else [])
    if any((a != b).any() for a, b in arrays):
        return True
    return now[3] != before[3] or any(_differs(a, b) for a, b in zip(now[2], before[2], strict=True))


def _differs(one: Any, other: Any) -> bool:
    return bool((one != other).any()) if hasattr(one, "any") else one != other
