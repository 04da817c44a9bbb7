"""How losses and logged values of microbatches add up to those of the batch; found by a test.

They are means over what the parts have, sums, or neither. Three steps forward tell: two parts of
the first batch, and both together (`compare_steps`).

[Note: divisors] A mean is a sum that is divided by how much it has: samples, tokens that are not
padding, weights of classes. The graph of the loss says by what each of its summands is divided, in
every part of a batch. In a sum over samples that is the same in all parts; in a mean it grows with
the part, and is the part's weight in the mean of the whole batch. What they are multiplied by is a
constant.

Pipelines use this (`pipeline_steps`).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from lightning_topt.plugins.step_records import LoggedCall, loss_of, uncounted
from lightning_topt.techniques.tensor_parallel.random_states import random_states, set_random_states

_RELATIVE = 1e-4  # by which equal losses may differ, in float32


_RELATIVE_HALF, _RELATIVE_RANDOM = 3e-2, 0.4


_MEAN = 1  # torch.nn._reduction.get_enum


class Summand(NamedTuple):
    """A sum over a batch, divided by `divisor` and multiplied by `factor`."""

    divisor: float
    factor: float


Summands = tuple[Summand, ...]


# ---- the test ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossKinds:
    """How the values of a step over parts of its batch make that of the batch.

    `loss` is a ``"mean"`` or a ``"sum"``; None: the test batch did not tell. So are the values that
    it `logged`, by name, and the leaves of what it `returned`, by place: ``"sum"`` or ``"loss"``,
    which has the weights of the loss; all else are means over samples. `loops`: the loss has a
    summand for each sample. `unlike`: logged values that the test found to be none of these.
    """

    loss: str | None
    logged: Mapping[str, str] = field(default_factory=dict)
    returned: Mapping[int, str] = field(default_factory=dict)
    loops: bool = False
    unlike: tuple[str, ...] = ()


@dataclass(frozen=True)
class TriedStep:
    """A step of the test on `size` samples.

    What it returned, its calls, the summands of its loss.
    """

    output: Any
    calls: Sequence[LoggedCall]
    summands: Summands
    size: int


def compare_steps(
    parts: tuple[TriedStep, TriedStep], whole: TriedStep, *, draws: bool, half: bool = False
) -> LossKinds:
    """Return the kinds, from the steps of two parts of a batch, and of both together.

    `draws`: they draw random numbers, so that no two steps are equal; `half`: they compute in 16
    bits. Raises ValueError for a loss of neither kind.
    """
    # How far equal losses may be apart.
    relative = _RELATIVE_RANDOM if draws else _RELATIVE_HALF if half else _RELATIVE
    outputs = [step.output for step in (*parts, whole)]
    losses = [loss_of(output) for output in outputs]
    if any(loss is None for loss in losses):
        raise ValueError(
            "training_step returned no loss for a microbatch, which a pipeline cannot leave out; "
            "return one, or use another strategy"
        )
    # Weights of the two parts: by divisors where the graph tells, else by samples.
    loops = len({len(step.summands) for step in (*parts, whole)}) > 1
    sizes = [float(step.size) for step in parts]
    known = [] if loops else [step.summands for step in parts]
    shares = [size / sum(sizes) for size in sizes]
    weights = loss_weights(known, kind=None) or shares
    # Mean or sum.
    kind = _kind([float(loss) for loss in losses if loss is not None], weights, relative)
    if kind == "neither":
        first, second, both = (f"{float(loss):.6g}" for loss in losses if loss is not None)
        raise ValueError(
            "the loss is neither a mean nor a sum over samples: for the first two microbatches it "
            f"is {first} and {second}, and for both together {both}. A loss that depends on the "
            "batch as a whole is another one in microbatches; use microbatches=1"
        )
    if known:
        _check_whole(kind, known, whole.summands, relative=_RELATIVE_HALF if half else _RELATIVE)
    # The same for what is logged, by name, and returned, by place.
    logged, unlike = dict[str, str](), list[str]()
    for calls in zip(*(step.calls for step in (*parts, whole)), strict=False):
        found = _kind_of([call.value for call in calls], losses, (shares, weights), relative)
        if found == "neither" and not draws and calls[0].averages:
            unlike.append(calls[0].name)
        elif found in ("sum", "loss"):
            logged[calls[0].name] = found
    leaves = zip(*map(tree_leaves, outputs), strict=False)
    kinds = {
        place: _kind_of(values, losses, (shares, weights), relative)
        for place, values in enumerate(leaves)
    }
    returned = {place: found for place, found in kinds.items() if found in ("sum", "loss")}
    return LossKinds(kind, logged, returned, loops, tuple(unlike))


def _check_whole(
    kind: str | None, parts: Sequence[Summands], whole: Summands, *, relative: float
) -> None:
    """Raise ValueError unless the batch has the summands of a sum or mean over parts."""
    for summands in zip(*parts, whole, strict=True):
        first, second, both = (each.divisor for each in summands)
        expected = first if kind == "sum" else first + second
        is_one = math.isclose(both, expected, rel_tol=relative) and _close(
            summands[0].factor, summands[2].factor
        )
        if kind and summands[0].factor and not is_one:
            raise ValueError(
                f"the loss looks like a {kind} over samples, but a summand of it is divided by "
                f"{first:.6g} and {second:.6g} for the first two microbatches, and by {both:.6g} "
                "for both together: another batch may show that it depends on the batch as a "
                "whole. Write it as a sum over samples, divided by how much they have, such as "
                "(losses * mask).sum() / mask.sum(); or use microbatches=1"
            )


def _kind_of(
    values: Sequence[Any],
    losses: Sequence[Any],
    weights: tuple[Sequence[float], Sequence[float]],
    relative: float,
) -> str | None:
    """Return the kind of what is logged or returned.

    `weights` are those of samples and of the loss. None: no number, or not known.
    """
    if not all(
        isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        for value in values
    ):
        return None
    numbers = [*map(float, values)]
    if str(numbers) == str([*map(float, losses)]):  # NaN too
        return "loss"
    kinds = [_kind(numbers, each, relative) for each in weights]
    if kinds == ["mean", "mean"]:  # the difference between them may be small
        off_samples, off_loss = (
            abs(each[0] * numbers[0] + each[1] * numbers[1] - numbers[2]) for each in weights
        )
        return (
            "loss"
            if off_loss < 0.1 * off_samples and off_samples > 1e-6 * abs(numbers[2])
            else "mean"
        )
    return "loss" if kinds[1] == "mean" else kinds[0]


def _kind(values: Sequence[float], weights: Sequence[float], relative: float) -> str | None:
    """Return the kind of a value that is the third for a batch, and two for its parts.

    The parts have these `weights`.
    """
    first, second = (
        0.0 if weight == 0 else value for value, weight in zip(values, weights, strict=False)
    )  # NaN without any
    both = values[-1]
    if both == 0 or not all(map(math.isfinite, (first, second, both))):
        return None
    # Compared to the largest of the three.
    near = relative * max(abs(first), abs(second), abs(both))
    if math.isclose(weights[0] * first + weights[1] * second, both, abs_tol=near, rel_tol=0):
        return "mean"
    return "sum" if math.isclose(first + second, both, abs_tol=near, rel_tol=0) else "neither"


# ---- divisors ------------------------------------------------------------------------------------


def loss_weights(parts: Sequence[Summands], *, kind: str | None) -> list[float]:
    """Return the weights of parts, with these summands, in the loss of all.

    [] where there are no summands.

    Raises ValueError where no weights give that loss.
    """
    count = len(parts)
    if len({len(each) for each in parts}) > 1:
        raise ValueError(
            "training_step computes the losses of microbatches in different ways; use "
            "microbatches=1"
        )
    # Each summand gives weights; all must agree.
    found = [[1 / count] * count] if kind == "sum" and parts[0] else []
    for summands in zip(*parts, strict=True):
        if not all(_close(each.factor, summands[0].factor) for each in summands):
            raise ValueError(
                "the loss is multiplied by a number that microbatches differ in, which tells "
                "nothing about the whole batch: multiply what is summed, divide by what it is a "
                "mean over, or use microbatches=1"
            )
        if summands[0].factor:
            total = sum(each.divisor for each in summands) or math.nan
            found.append([each.divisor / total for each in summands])
    if not all(_close(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True)):
        raise ValueError(
            "the loss has summands that microbatches have different shares of, such as a mean over "
            "tokens that are not padding beside one over samples: no weights of microbatches make "
            "it the loss of the whole batch. Use microbatches=1, or batches whose samples are "
            "equally long"
        )
    return [1.0] * count if kind == "sum" and found else [*found[0]] if found else []


def summands_of(loss: Tensor, *, samples: int) -> Summands:
    """Return the summands of a loss, in the order of its graph.

    See [Note: divisors]. The batch has so many `samples`. Those of parameters alone, such as a
    penalty, are the same in all parts of a batch, and left out.
    """
    if loss.grad_fn is None:
        return ()
    # Walk down from the loss: numbers are followed, until something sums over entries.
    found, todo = list[Summand](), [(loss.grad_fn, Summand(1.0, 1.0))]
    while todo:
        node, around = todo.pop()
        inputs = [
            (parent, _shape(parent, number))
            for parent, number in node.next_functions
            if parent is not None
        ]
        divisor, factor = around.divisor, around.factor
        # Times or divided by a number: outside of the sum.
        if (constant := _constant(node)) is not None:
            is_product = node.name().startswith("Mul")
            divisor, factor = (
                (divisor, factor * constant) if is_product else (divisor * constant, factor)
            )
        # The first input that is no single number.
        entries = next((shape for _, shape in inputs if shape), None)
        stacked = (
            _stacked(inputs[0][0]) if entries and len(inputs) == 1 and entries != (samples,) else []
        )
        # Single numbers, added or stacked: go on with each.
        if entries is None or stacked:
            inside = stacked or [parent for parent, _ in inputs]
            todo += [(parent, Summand(divisor, factor)) for parent in reversed(inside)]
        elif not all(_is_of_parameters(parent) for parent, _ in inputs):
            found.append(Summand(divisor * _reduced(node, math.prod(entries)), factor))
    return tuple(found)


def _shape(node: Node, number: int) -> tuple[int, ...] | None:
    """Return the shape of an output of `node`; None where it is not known."""
    metadata = getattr(node, "_input_metadata", ())
    return tuple(metadata[number].shape) if number < len(metadata) else None


def _stacked(node: Node) -> list[Node]:
    """Return the single numbers that `node` puts together."""
    is_join = node.name().startswith(("StackBackward", "CatBackward"))
    inputs = [
        (parent, _shape(parent, number))
        for parent, number in node.next_functions
        if parent is not None
    ]
    return (
        [parent for parent, _ in inputs]
        if is_join and not any(shape for _, shape in inputs)
        else []
    )


def _is_of_parameters(node: Node) -> bool:
    """Return whether `node` computes of parameters and numbers alone."""
    todo, seen = [node], set[Node]()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        inputs = [parent for parent, _ in node.next_functions if parent is not None]
        is_whole = len(inputs) == len(node.next_functions) or _constant(node) is not None
        if not ((inputs and is_whole) or isinstance(getattr(node, "variable", None), nn.Parameter)):
            return False
        todo += inputs
    return True


def _constant(node: Node) -> float | None:
    """Return the constant by which `node` multiplies or divides a number, or None."""
    sides = [parent is not None for parent, _ in node.next_functions]
    if not node.name().startswith(("MulBackward", "DivBackward")) or sum(sides) > 1:
        return None
    value = getattr(node, "_saved_other" if sides[0] else "_saved_self", None)
    is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    return float(value) if is_number else None  # type: ignore[arg-type]


def _reduced(node: Any, entries: int) -> float:
    """Return by what `node`, which sums so many entries, divides them."""
    name = node.name()
    if name.startswith("NllLoss"):
        return _total_weight(node) if node._saved_reduction == _MEAN else 1.0
    is_mean = name.startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == _MEAN
    return float(entries) if is_mean else 1.0


def _total_weight(node: Any) -> float:
    """Return the weight of all targets of a cross-entropy that it does not ignore."""
    ignored = node._saved_ignore_index
    kept = node._saved_target[
        node._saved_target != (ignored - 2**64 if ignored >= 2**63 else ignored)
    ]
    return float(
        kept.numel() if node._saved_weight is None else node._saved_weight.double()[kept].sum()
    )


def _close(one: float, other: float) -> bool:
    """Return whether they are equal, or not both finite, which shows in the loss."""
    return math.isclose(one, other, rel_tol=_RELATIVE) or not (
        math.isfinite(one) and math.isfinite(other)
    )


# ---- running it ----------------------------------------------------------------------------------


@contextmanager
def without_trace(module: nn.Module) -> Generator[None, None, None]:
    """Run `module` in evaluation mode, without gradients, and leave no trace.

    Modes, random numbers, buffers and metrics stay as they were.
    """
    # All that a step changes is put back.
    states, modes = random_states(), [(part, part.training) for part in module.modules()]
    buffers = [
        (part, name, part._buffers[name]) for part in module.modules() for name in part._buffers
    ]
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
    arrays = [(now[0], before[0])] + (
        [(now[1], before[1])] if now[1] is not None and before[1] is not None else []
    )
    if any((a != b).any() for a, b in arrays):
        return True
    return now[3] != before[3] or any(
        bool((a != b).any()) if hasattr(a, "any") else a != b
        for a, b in zip(now[2], before[2], strict=True)
    )
