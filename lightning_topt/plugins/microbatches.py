"""A batch split into microbatches, and their results combined to those of one step.

parts = split_batch(batch, 4)              # .batches, .sizes: samples of each
weights = loss_weights(parts, "mean")      # of their losses in that of the batch
outputs, calls, losses = ...               # one step per microbatch; losses are on the device
combined_output(outputs, sizes=..., weights=..., losses=...)
combined_calls(calls, sizes=..., weights=..., losses=...)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_topt.basics.argument_checks import check_choice
from lightning_topt.graph.structures import PLAIN, map_tensors, tensors_in
from lightning_topt.plugins.stage_steps import EXTREMES, LoggedCall, LoggedMetric, uncounted
from lightning_topt.techniques.tensor_parallel.random_states import random_states, set_random_states

_WAY_OUT = "let dimension 0 of all tensors be the samples, or use microbatches=1"


@dataclass(frozen=True)
class Parts:
    """The `batches` that a batch was split into, and how many samples each has."""

    batches: tuple[Any, ...]
    sizes: tuple[int, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of the samples that each part has; together 1."""
        return tuple(size / sum(self.sizes) for size in self.sizes)


def split_batch(batch: Any, count: int) -> Parts:
    """Return `batch` in `count` parts in order, whose sizes differ by one at most.

    A batch of fewer samples has as many parts as samples. Dimension 0 of tensors and arrays is
    split where it has the size of the batch, and so are lists of as many texts or numbers. What has
    another size is in every part: dimensions of size 1, scalars, options. A batch whose tensors
    have no common size is split where it consists of sequences of one length, one entry per sample.
    Tensors of parts are views.

    Raises ValueError, with the way out, for a batch that cannot be split.
    """
    if count == 1:
        return Parts((batch,), (count_samples(batch),))
    # Sizes differ by one at most: the first parts are larger.
    samples = _Samples.of(batch)
    count = min(count, samples.count)
    sizes = tuple(
        samples.count // count + (index < samples.count % count) for index in range(count)
    )
    starts = np.cumsum((0, *sizes)).tolist()
    parts = (samples.map(batch, _slice(start, stop)) for start, stop in itertools.pairwise(starts))
    return Parts(tuple(parts), sizes)


def count_samples(batch: Any) -> int:
    """Return the number of samples of `batch`; 1 for one that cannot be split."""
    try:
        return _Samples.of(batch).count
    except ValueError:
        return 1


def first_samples(batch: Any, count: int) -> Any:
    """Return the first `count` samples of `batch`, as views. Raises ValueError as `split_batch`."""
    return _Samples.of(batch).map(batch, _slice(0, count))


@dataclass(frozen=True)
class _Samples:
    """Where the `count` samples of a batch are: along dimension 0 of tensors, or `as_entries`.

    These are entries of the sequences that the batch consists of.
    """

    count: int
    as_entries: bool

    @classmethod
    def of(cls, batch: Any) -> _Samples:
        # What cannot be sliced.
        tensors = list(tensors_in(batch))
        if any(tensor.layout != torch.strided for tensor in tensors):
            raise ValueError(
                "a batch with sparse or nested tensors cannot be split into microbatches: "
                f"{_WAY_OUT}"
            )
        if _has_packed(batch):
            raise ValueError(
                "a packed sequence cannot be split into microbatches: pack it in training_step"
            )
        sizes = {tensor.shape[0] for tensor in tensors if tensor.dim()}
        sizes = sizes - {1} or sizes  # of size 1: the same for all samples
        if len(sizes) == 1 and 0 not in sizes:
            return cls(sizes.pop(), as_entries=False)
        # No common size: sequences of one length, one entry per sample.
        lengths = {_length(value) for value in _children(batch)} - {None}
        if len(lengths) == 1 and (count := lengths.pop()):
            return cls(count, as_entries=True)
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:8]) or "missing"
        raise ValueError(
            "a batch cannot be split into microbatches: its tensors have no common size in "
            f"dimension 0 (they are {shapes}); {_WAY_OUT}"
        )

    def map(self, batch: Any, along: Callable[[Any], Any]) -> Any:
        """Return `batch` with `along` applied to whatever has the samples."""
        # Tensors, arrays and lists of plain values, anywhere in the batch.
        if not self.as_entries:
            return map_tensors(
                batch,
                lambda leaf: along(leaf) if _length(leaf) == self.count else leaf,
                also=_is_leaf,
            )
        # Sequences at the top, whose entries are samples.
        changed = [
            along(value) if _length(value) == self.count else value for value in _children(batch)
        ]
        if isinstance(batch, Mapping):
            return type(batch)(zip(batch, changed, strict=True))  # type: ignore[call-arg]
        return type(batch)(*changed) if hasattr(batch, "_fields") else type(batch)(changed)


def _is_leaf(value: Any) -> bool:
    # Whether it is an array, or a list of values that are no batches themselves
    if isinstance(value, np.ndarray):
        return True
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(entry, PLAIN) for entry in value)
    )


def _length(value: Any) -> int | None:
    if isinstance(value, Tensor | np.ndarray):
        return len(value) if value.ndim else None
    is_sequence = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    return len(value) if is_sequence else None


def _children(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    return (
        list(batch)
        if isinstance(batch, list | tuple) and not isinstance(batch, PackedSequence)
        else []
    )


def _has_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence) or any(
        _has_packed(child) for child in _children(value)
    )


def _slice(start: int, stop: int) -> Callable[[Any], Any]:
    return lambda value: value[start:stop]


# ---- how losses of microbatches make that of the batch -------------------------------------------

MicrobatchLoss = str | Callable[[Any], Any]
_MEAN, _SUM, _TOKENS = "mean", "sum", "tokens"
_IGNORED = -100  # targets that torch's losses leave out
_RELATIVE, _RELATIVE_HALF, _RELATIVE_RANDOM = 1e-4, 3e-2, 0.4  # by which equal losses may differ


def check_microbatch_loss(kind: Any) -> MicrobatchLoss:
    """Return what `microbatch_loss` says. Raises ValueError for other words."""
    if not callable(kind):
        check_choice(kind, name="microbatch_loss", allowed=(_MEAN, _SUM, _TOKENS))
    found: MicrobatchLoss = kind
    return found


def loss_weights(parts: Parts, kind: MicrobatchLoss) -> list[float]:
    """Return the weights of the losses of `parts` in that of the batch.

    Args:
        parts: of the batch.
        kind: ``"mean"``: of samples; ``"sum"``; ``"tokens"``: a mean over targets that are not
            -100, the entries of ``batch["labels"]``, else of the batch's last tensor of whole
            numbers; or a function of a batch: what its mean is over. Both count in `parts`: in
            memory of the host, else the host waits for its device.
    """
    if len(parts.batches) == 1 or kind == _SUM:
        return [1.0] * len(parts.batches)
    if kind == _MEAN:
        counts = [float(size) for size in parts.sizes]
    else:
        count: Any = _targets if kind == _TOKENS else kind
        found = [count(batch) for batch in parts.batches]
        are_tensors = all(isinstance(each, Tensor) for each in found)
        # read at once
        counts = torch.stack(found).tolist() if are_tensors else [*map(float, found)]
    total = sum(counts) or 1.0
    return [each / total for each in counts]


def _targets(batch: Any) -> Tensor:
    named = batch.get("labels") if isinstance(batch, Mapping) else None
    wholes = [t for t in tensors_in(batch) if not (t.is_floating_point() or t.is_complex())]
    target = named if isinstance(named, Tensor) else wholes[-1] if wholes else None
    if target is None:
        raise ValueError(
            "microbatch_loss='tokens' counts targets, and the batch has no tensor of whole numbers "
            "and no 'labels': give a function of the batch that counts them"
        )
    return (target != _IGNORED).sum()


def loss_problem(
    losses: Sequence[float], weights: Sequence[float], *, draws: bool, half: bool
) -> str | None:
    """Return why two microbatches' losses are not that of both together; "" where they are.

    None: nothing can be told of these numbers.

    Args:
        losses: of the first, of the second, of both together.
        weights: of the first two in that of both.
        draws: whether steps draw random numbers, so that no two are equal.
        half: whether they compute in 16 bits.
    """
    # A microbatch of padding alone has no mean.
    first, second = (w and x for w, x in zip(weights, losses, strict=False))
    both = losses[-1]
    if both == 0 or not all(map(math.isfinite, (first, second, both))):
        return None
    parts = [weight and loss * weight for loss, weight in zip(losses, weights, strict=False)]
    relative = _RELATIVE_RANDOM if draws else _RELATIVE_HALF if half else _RELATIVE
    near = relative * max(*map(abs, parts), abs(both))
    if math.isclose(sum(parts), both, abs_tol=near, rel_tol=0):
        return ""
    return (
        f"the loss of two microbatches together is {both:.6g}, and microbatch_loss makes "
        f"{sum(parts):.6g} of theirs ({losses[0]:.6g} and {losses[1]:.6g}): set microbatch_loss to "
        "'mean' (over samples), 'sum', 'tokens' or a function of a batch that returns what its "
        "mean is over; a loss of the batch as a whole needs microbatches=1"
    )


# ---- microbatches as one -------------------------------------------------------------------------

Weights = Sequence[float]


def combined_output(
    outputs: Sequence[Any], *, sizes: Sequence[int], weights: Weights, losses: Sequence[Tensor]
) -> Any:
    """Return the output of a step from those of its microbatches. No host waits for its device.

    Tensors and lists with an entry for each sample are joined; what equals the loss is weighted as
    it; other scalars, and tensors of one shape, are averaged over samples; of all else the last
    microbatch's remains.

    Args:
        outputs: of the microbatches, in order.
        sizes: how many samples they have.
        weights: of their losses in that of the batch.
        losses: of the microbatches, () each.
    """
    if len(outputs) == 1:
        return outputs[0]
    outputs = [dict(output) if isinstance(output, Mapping) else output for output in outputs]
    # one structure, whatever is nested; lists of what is no tensor have an entry for each sample
    flat = [tree_flatten(output, is_leaf=_is_plain_list) for output in outputs]
    spec = flat[-1][1]
    if any(other != spec for _, other in flat):
        return outputs[-1]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten([_combined_leaf(c, sizes, weights, losses) for c in columns], spec)


def _is_plain_list(value: Any) -> bool:
    return isinstance(value, list) and not any(
        isinstance(one, Tensor | Mapping | list | tuple) for one in value
    )


def _combined_leaf(
    values: Sequence[Any], sizes: Sequence[int], weights: Weights, losses: Sequence[Tensor]
) -> Any:
    # An entry for each sample: joined, tensors along dimension 0.
    if all(isinstance(value, Tensor) for value in values):
        if all(
            value.dim() and len(value) == size for value, size in zip(values, sizes, strict=True)
        ):
            return torch.cat([*values])
    elif all(
        isinstance(value, list) and len(value) == size
        for value, size in zip(values, sizes, strict=True)
    ):
        return [entry for value in values for entry in value]
    return _averaged(values, sizes, weights, losses)


def _averaged(
    values: Sequence[Any], sizes: Sequence[int], weights: Weights, losses: Sequence[Tensor]
) -> Any:
    # What equals the loss in every microbatch is weighted as it, all else is a mean over samples
    mean, last = _weighted(values, sizes, "mean"), values[-1]
    if isinstance(last, float):
        # Equal numbers have the mean that they are: losses are read for others alone.
        is_known = all(value == last for value in values) and math.isclose(sum(weights), 1.0)
        read = losses if is_known else torch.stack([*losses]).tolist()
        is_loss = not is_known and str([*map(float, values)]) == str(read)  # NaN too
        return weighted_losses(values, weights) if is_loss else mean
    if any(
        not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point()
        for value in values
    ):
        return mean
    # Which one it is, the device knows. (microbatches,)
    numbers, expected = torch.stack([value.reshape(()) for value in values]), torch.stack([*losses])
    are_losses = torch.isclose(numbers, expected.to(numbers), rtol=0, atol=0, equal_nan=True)
    return torch.where(are_losses.all(), weighted_losses(values, weights), mean)


def weighted_losses(values: Sequence[Any], weights: Weights) -> Any:
    """Return the weighted sum of `values`; one with weight 0 may be NaN, as of padding alone."""
    return sum(value * weight for value, weight in zip(values, weights, strict=True) if weight != 0)


def combined_calls(
    microbatches: Sequence[Sequence[LoggedCall]],
    *,
    sizes: Sequence[int],
    weights: Weights,
    losses: Sequence[Tensor],
) -> tuple[LoggedCall, ...]:
    """Return the calls of a step from those of its microbatches.

    Values logged under one name become one: what equals the loss is weighted as it; else
    ``reduce_fx`` says whether values are added, or the greatest or least counts; or they are means
    over samples, or over the ``batch_size`` that the calls name. Metrics are logged once; texts are
    printed in order.

    Args:
        microbatches: their calls, in order.
        sizes: how many samples they have.
        weights: of their losses in that of the batch.
        losses: of the microbatches, () each.
    """
    if len(microbatches) == 1:
        return tuple(microbatches[0])
    # Calls that belong together: the n-th that a step makes under a name of a module. What is
    # printed stays apart.
    found: dict[Any, list[tuple[LoggedCall, int]]] = {}
    for index, calls in enumerate(microbatches):
        seen: dict[Any, int] = {}
        for call in calls:
            key = (call.path, call.method, call.name)
            seen[key] = seen.get(key, 0) + 1
            found.setdefault((*key, seen[key], index if call.method == "print" else -1), []).append(
                (call, index)
            )
    return tuple(_combined_call(same, sizes, weights, losses) for same in found.values())


def _combined_call(
    same: Sequence[tuple[LoggedCall, int]],
    sizes: Sequence[int],
    weights: Weights,
    losses: Sequence[Tensor],
) -> LoggedCall:
    first = same[0][0]
    if first.method != "log":
        return first
    # What the calls say counts more than the sizes of microbatches.
    named = [call.keywords.get("batch_size") for call, _ in same]
    sizes = [
        sizes[index] if own is None else own for own, (_, index) in zip(named, same, strict=True)
    ]
    values = [call.value for call, _ in same]
    if first.averages:
        places = [index for _, index in same]
        value = _averaged(values, sizes, [weights[i] for i in places], [losses[i] for i in places])
    else:
        value = _weighted(values, sizes, first.reduction)
    return first.with_value(value, batch_size=None if named[0] is None else sum(sizes))


def _weighted(values: Sequence[Any], sizes: Sequence[int], kind: str) -> Any:
    # The sum, extreme or mean over samples of what microbatches logged or returned
    last = values[-1]
    if isinstance(last, LoggedMetric):
        return replace(last, value=_weighted([value.value for value in values], sizes, kind))
    if isinstance(last, Mapping):
        return {name: _weighted([value[name] for value in values], sizes, kind) for name in last}
    if isinstance(last, Tensor):
        return _weighted_tensors(values, sizes, kind)
    if isinstance(last, bool) or not isinstance(last, int | float):
        return last
    if all(value == last for value in values) and kind != "sum":
        return last
    if kind == "sum":
        return sum(values)
    if kind in EXTREMES:
        return EXTREMES[kind](values)
    return sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)


def _weighted_tensors(values: Sequence[Any], sizes: Sequence[int], kind: str) -> Tensor:
    last: Tensor = values[-1]
    if last.dtype == torch.bool or any(value.shape != last.shape for value in values):
        return last
    stacked = torch.stack([*values])  # (microbatches, ...)
    if kind == "sum":
        return stacked.sum(0).to(last.dtype)
    if kind in EXTREMES:
        return stacked.amax(0) if kind == "max" else stacked.amin(0)
    # In float32 at least, as a mean over the batch would be; of whole numbers too.
    wide = stacked.to(torch.float64 if last.dtype == torch.float64 else torch.float32)
    counts = [float(size) for size in sizes]
    parts = torch._foreach_mul([*wide], [count / sum(counts) for count in counts])
    mean = torch.stack([*parts]).sum(0)
    return mean.to(last.dtype) if last.is_floating_point() else mean


# ---- a step that is tried ------------------------------------------------------------------------


@contextmanager
def without_trace(module: nn.Module) -> Generator[None]:
    """Run `module` in evaluation mode, without gradients, and leave no trace.

    Modes, random numbers, buffers and metrics stay as they were.
    """
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
