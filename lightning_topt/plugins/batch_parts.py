"""A batch of any structure in parts of fewer samples, for a step that takes them one after the
other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_topt.graph.structures import PLAIN, map_tensors, tensors_in

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
    """Return `batch` in `count` parts in order, whose sizes differ by one at most; in fewer where
    it has fewer samples.

    Dimension 0 of tensors and arrays is split where it has the size of the batch, and so are lists
    of as many texts or numbers. What has another size is in every part: dimensions of size 1,
    scalars, options. A batch whose tensors have no common size is split where it consists of
    sequences of one length, one entry per sample. Tensors of parts are views.

    Raises ValueError, with the way out, for a batch that cannot be split.
    """
    if count == 1:
        return Parts((batch,), (count_samples(batch),))
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


Along = Callable[[Any], Any]


@dataclass(frozen=True)
class _Samples:
    """`count` samples: along dimension 0 of tensors, or as entries of the sequences that a batch
    consists of.
    """

    count: int
    as_entries: bool

    @classmethod
    def of(cls, batch: Any) -> _Samples:
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
        sizes = sizes - {1} or sizes
        if len(sizes) == 1 and 0 not in sizes:
            return cls(sizes.pop(), as_entries=False)
        if count := _common_length(batch):
            return cls(count, as_entries=True)
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:8]) or "missing"
        raise ValueError(
            "a batch cannot be split into microbatches: its tensors have no common size in "
            f"dimension 0 (they are {shapes}); {_WAY_OUT}"
        )

    def map(self, batch: Any, along: Along) -> Any:
        """Return `batch` with `along` applied to whatever has the samples."""
        if not self.as_entries:
            return map_tensors(
                batch, lambda leaf: along(leaf) if self._has(leaf) else leaf, also=_is_leaf
            )
        changed = [
            along(value) if _length(value) == self.count else value for value in _children(batch)
        ]
        if isinstance(batch, Mapping):
            return type(batch)(zip(batch, changed, strict=True))  # type: ignore[call-arg]
        return type(batch)(*changed) if hasattr(batch, "_fields") else type(batch)(changed)

    def _has(self, leaf: Any) -> bool:
        return _length(leaf) == self.count


def _is_leaf(value: Any) -> bool:
    """Whether it is an array, or a list of values that are no batches themselves."""
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


def _common_length(batch: Any) -> int:
    lengths = {_length(value) for value in _children(batch)} - {None}
    return lengths.pop() or 0 if len(lengths) == 1 else 0


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


def _slice(start: int, stop: int) -> Along:
    return lambda value: value[start:stop]
