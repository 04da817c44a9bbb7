"""Batches read from the cache straight into their final place, as torch's `default_collate` would
stack them.

For samples of equal layout (the header of their entries is the same) a batch is one tensor per
leaf, and every entry is read piece by piece into its rows: no tensor per sample, no copy but the
one from the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info

from lightning_topt.data.cache.batch_memory import MEMORY
from lightning_topt.data.cache.cached_dataset import CachedDataset
from lightning_topt.data.cache.sample_cache import SampleCache
from lightning_topt.data.cache.sample_codec import (
    TORCH_DTYPES,
    Layout,
    Parts,
    Spec,
    header_of,
    joined,
    layout_of,
    leaves_of,
    named_type,
)

_NUMBERS = {
    "int": torch.int64,
    "float": torch.float64,
    "bool": torch.bool,
    "complex": torch.complex128,
}
_SMALL = 256  # bytes: gathered for all rows at once
_LOOK_AT = 16  # items of a batch, for one in memory whose layout is known
Bytes = npt.NDArray[np.uint8]


class ReadyBatch:
    """A batch that needs no collating."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch


class BatchDataset(Dataset[Any]):
    """A `CachedDataset` whose ``__getitems__`` gives ready batches where it can; for a loader with
    `collate` below.
    """

    def __init__(self, dataset: CachedDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """A `ReadyBatch`, or a list of samples."""
        batch = None if self.dataset.is_marked or not indices else read_batch(self.dataset, indices)
        if batch is None:
            return self.dataset.__getitems__(indices)
        if get_worker_info() is not None:  # as in `CachedDataset`
            self.dataset.cache.flush()
        return batch


def collate(samples: Any) -> Any:
    """Apply `default_collate` to what is not collated yet."""
    return samples.batch if isinstance(samples, ReadyBatch) else default_collate(samples)


def read_batch(dataset: CachedDataset, indices: Sequence[int]) -> ReadyBatch | list[Any] | None:
    """Return the batch of `indices`, or its samples where they have not all the same layout; None:
    nothing was read.

    That is where none of the first entries is in memory, or torch would not stack it. Entries that
    are not in this node's memory come as by `CachedDataset`.
    """
    cache, chosen = dataset.cache, dataset.items(indices)
    # Of a partitioned cache the first item may well be another node's.
    known = next(
        filter(None, (_layout_in_memory(cache, item) for item in chosen[:_LOOK_AT].tolist())), None
    )
    if known is None or not _is_stackable(known.header):
        return None
    ready = _read_at_once(cache, known, chosen)
    if ready is not None:
        return ready
    items, rows = chosen.tolist(), BatchRows(known, len(chosen))
    unmapped = np.flatnonzero(~rows.fill_from(cache, items)).tolist()
    missing = [i for i in unmapped if not cache.read_into(items[i], rows.buffers(i))]
    rest = dict(zip(missing, dataset.entries([items[i] for i in missing]), strict=True))
    cache.verify_new()
    if all(rows.fill(i, rest[i]) if i in rest else rows.is_filled(i) for i in unmapped):
        return ReadyBatch(rows.batch())
    # Every entry was read and counted once: samples of different sizes cost no second reading.
    return [
        dataset.sample(item, joined(rest[i]) if i in rest else rows.entry(i))
        for i, item in enumerate(items)
    ]


def _read_at_once(
    cache: SampleCache, known: Layout, items: npt.NDArray[np.int64]
) -> ReadyBatch | None:
    """The batch where all its entries are in mapped memory and verified."""
    mapped = cache.mapped
    offsets = (
        None
        if mapped is None
        else mapped.find_all(items, header=_start(known), nbytes=known.nbytes)
    )
    if mapped is None or offsets is None:
        return None
    tensors = []
    for leaf in known.leaves:
        if leaf.nbytes > _SMALL:
            rows = _empty(len(items), leaf.nbytes)
            mapped.take(offsets, leaf.start, rows)
        else:
            rows = torch.from_numpy(mapped.gather(offsets + leaf.start, leaf.nbytes))
        tensors.append(_typed(rows, leaf.spec))
    cache.count_memory_hits(len(items))
    return ReadyBatch(_nested(known.spec, iter(tensors)))


def _layout_in_memory(cache: SampleCache, item: int) -> Layout | None:
    seen = None if cache.mapped is None else cache.mapped.header(item)
    if seen is not None:
        return layout_of(seen)
    header, where = cache.peek(item), None if cache.memory is None else cache.memory.locate(item)
    if header is None or where is None:
        return None
    try:
        known = layout_of(header)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None  # it is damaged, which is dealt with where all of the entry is read
    return known if known.nbytes == where.nbytes else None


class BatchRows:
    """The tensors of a batch of `size` entries of one layout, to be filled row by row."""

    def __init__(self, known: Layout, size: int) -> None:
        self.known, self.size = known, size
        self.rows = [_empty(size, leaf.nbytes) for leaf in known.leaves]

    # Made where they are needed: where mapped memory has all entries that is the first only.
    @cached_property
    def _bytes(self) -> list[Bytes]:
        return [rows.numpy() for rows in self.rows]

    @cached_property
    def _head(self) -> Bytes:
        start = self.known.leaves[0].start if self.known.leaves else self.known.nbytes
        return np.empty((self.size, start), np.uint8)

    @cached_property
    def _padding(self) -> list[Bytes]:
        ends = [leaf.start for leaf in self.known.leaves[1:]] + [self.known.nbytes]
        leaves = zip(self.known.leaves, ends, strict=True)
        return [
            np.empty((self.size, end - leaf.start - leaf.nbytes), np.uint8) for leaf, end in leaves
        ]

    @cached_property
    def _expected(self) -> Bytes:
        return np.frombuffer(_start(self.known), np.uint8)

    def buffers(self, row: int) -> list[Bytes]:
        """Return where the entry of one row goes, piece by piece."""
        pieces = [self._head[row]]
        for rows, padding in zip(self._bytes, self._padding, strict=True):
            pieces.append(rows[row])
            if padding.size:
                pieces.append(padding[row])
        return pieces

    def fill_from(self, cache: SampleCache, items: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Copy the entries that the mapped memory of `cache` has; whether it had them, (size,)."""
        if cache.mapped is None:
            return np.zeros(self.size, np.bool_)
        mapped, header = cache.mapped, _start(self.known)
        offsets, fresh = mapped.find(items, header=header, nbytes=self.known.nbytes)
        leaves = list(zip(self.known.leaves, self._bytes, strict=True))
        large = [
            (leaf.start, leaf.nbytes, rows.ctypes.data)
            for leaf, rows in leaves
            if leaf.nbytes > _SMALL
        ]

        def copy(rows: npt.NDArray[np.int64]) -> None:
            for start, nbytes, target in large:
                mapped.copy(
                    (offsets[rows] + start).tolist(), nbytes, (target + nbytes * rows).tolist()
                )

        copy(np.flatnonzero((offsets > 0) & ~fresh))
        for row in np.flatnonzero(fresh).tolist():
            if mapped.verify(items[row], header=header):
                copy(np.array([row]))
            else:
                offsets[row] = 0
        found: npt.NDArray[np.bool_] = offsets > 0
        for leaf, target in leaves:
            if 0 < leaf.nbytes <= _SMALL:
                target[found] = mapped.gather(offsets[found] + leaf.start, leaf.nbytes)
        if not found.all():  # what `entry` needs, if it comes to that
            self._head[found] = self._expected
            for padding in self._padding:
                padding[found] = 0
        cache.count_memory_hits(int(found.sum()))
        return found

    def entry(self, row: int) -> Bytes:
        """Return what was read into a row, in one piece."""
        return np.concatenate(self.buffers(row))

    def is_filled(self, row: int) -> bool:
        """Return whether what was read into a row has the layout."""
        return bool((self._head[row] == self._expected).all())

    def fill(self, row: int, parts: Parts) -> bool:
        """Copy an entry, given as buffers, into a row; False where it has another layout."""
        if header_of(parts[0]) != self.known.header:
            return False
        for rows, leaf, view in zip(
            self._bytes, self.known.leaves, leaves_of(parts, self.known), strict=True
        ):
            if leaf.nbytes:
                rows[row] = np.frombuffer(view, np.uint8)
        return True

    def batch(self) -> Any:
        """Return what `default_collate` makes of the samples."""
        leaves = zip(self.known.leaves, self.rows, strict=True)
        return _nested(self.known.spec, (_typed(rows, leaf.spec) for leaf, rows in leaves))


def _start(known: Layout) -> bytes:
    """With which its entries begin."""
    return len(known.header).to_bytes(4, "little") + known.header


def _empty(size: int, nbytes: int) -> Tensor:
    """Rows of bytes. In a worker in shared memory, as `default_collate` does: the training process
    gets it without a copy.
    """
    if get_worker_info() is None:
        return MEMORY.empty((size, nbytes), torch.uint8)
    storage = torch.UntypedStorage._new_shared(size * nbytes)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (size, nbytes))  # type: ignore[call-overload, no-any-return]


def _typed(rows: Tensor, spec: Spec) -> Tensor:
    """Rows of bytes as what they are."""
    dtype, shape = _dtype(spec), _shape(spec)
    if not rows.numel():
        return torch.empty((len(rows), *shape), dtype=dtype, device="cpu")
    typed = rows.view(dtype)
    return typed if len(shape) == 1 else typed.view(len(rows), *shape)


def _shape(spec: Spec) -> list[int]:
    if spec[0] == "numbers":
        return [spec[3]]
    return spec[2] if spec[0] in ("tensor", "array", "scalar") else []


def _dtype(spec: Spec) -> torch.dtype:
    if spec[0] == "tensor":
        return TORCH_DTYPES[spec[1]]
    if spec[0] in ("array", "scalar"):
        return torch.from_numpy(np.empty(0, spec[1])).dtype
    return _NUMBERS[spec[2] if spec[0] == "numbers" else spec[0]]


@lru_cache(maxsize=1024)
def _is_stackable(header: bytes) -> bool:
    return _stackable(layout_of(header).spec)


def _stackable(spec: Spec) -> bool:
    kind = spec[0]
    if kind in ("tensor", "numbers", *_NUMBERS):
        return bool(kind != "complex")  # which default_collate refuses
    if kind in ("array", "scalar"):
        try:
            _dtype(spec)
            native: bool = np.dtype(spec[1]).isnative
            return native
        except TypeError:
            return False
    if kind == "dict":
        return all(_stackable(item) for _, item in spec[1])
    if kind == "named":
        return named_type(spec[1]) is not None and all(map(_stackable, spec[2]))
    return kind in ("list", "tuple") and all(map(_stackable, spec[1]))


def _nested(spec: Spec, tensors: Iterator[Tensor]) -> Any:
    kind = spec[0]
    if kind == "dict":
        return {key: _nested(item, tensors) for key, item in spec[1]}
    if kind in ("list", "tuple"):
        return [_nested(item, tensors) for item in spec[1]]
    if kind == "numbers":
        return list(next(tensors).t().contiguous().unbind(0))
    if kind == "named":
        record = named_type(spec[1])
        assert record is not None
        return record(*(_nested(item, tensors) for item in spec[2]))
    return next(tensors)
