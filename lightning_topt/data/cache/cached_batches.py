"""Batches read from the cache straight into place, as `default_collate` would stack them.

For samples of equal layout (the header of their entries is the same) a batch is one tensor per
leaf. Every entry is read piece by piece into its rows: there is no tensor per sample, and no copy
but the one from the cache. Three ways, the fastest first:

    all entries mapped and verified     one `index_select` per leaf (`_read_at_once`)
    some in this node's memory          one system call per entry (`SampleCache.read_into`)
    the rest                            read from disk, other nodes, or the source

The memory of large batches is reused (`BatchMemory`).
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import lru_cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    default_collate,
    get_worker_info,
)

from lightning_topt.data.cache.cached_dataset import CachedDataset, marked_method
from lightning_topt.data.cache.sample_cache import SampleCache
from lightning_topt.data.cache.sample_codec import (
    TORCH_DTYPES,
    EntryLayout,
    Parts,
    Spec,
    header_of,
    in_one_piece,
    layout_of,
    leaves_of,
)

_NUMBERS = {"int": torch.int64, "float": torch.float64, "bool": torch.bool}
_LOOK_AT = 16  # items of a batch that are searched for one in memory
LEAST_BYTES = 1 << 18  # of a tensor; smaller ones stay in the allocator's own lists
_MOST_BLOCKS = 8
Bytes = npt.NDArray[np.uint8]


class ReadyBatch:
    """A batch that needs no collating."""

    def __init__(self, batch: object) -> None:
        self.batch = batch


class BatchDataset(Dataset[object]):
    """A `CachedDataset` whose ``__getitems__`` returns ready batches where it can.

    Its loader needs `collate` below.
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
        """Return a `ReadyBatch`, or a list of samples."""
        batch = None if self.dataset.is_marked or not indices else read_batch(self.dataset, indices)
        return self.dataset.__getitems__(indices) if batch is None else batch


def collate(samples: Any) -> Any:
    """Apply `default_collate` to what is not collated yet."""
    return samples.batch if isinstance(samples, ReadyBatch) else default_collate(samples)


def is_stacking(loader: DataLoader[Any]) -> bool:
    """Return whether torch would only stack the loader's samples: then batches are read whole."""
    return (
        type(loader) is DataLoader
        and loader.collate_fn is default_collate
        and loader.batch_sampler is not None
    )


def with_caches(
    dataset: Any, cache_of: Callable[[Any], SampleCache], *, ready_batches: bool
) -> Any:
    """Return `dataset` with a cache, which ``cache_of(dataset)`` opens.

    Of torch's subsets and concatenations the parts get one, so that these share their samples. A
    `BatchDataset` comes back where batches are read whole (`ready_batches`), for a loader with
    `collate`.
    """
    if type(dataset) is Subset:
        subset = copy(dataset)
        subset.dataset = with_caches(dataset.dataset, cache_of, ready_batches=ready_batches)
        return subset
    if type(dataset) is ConcatDataset:
        joined = copy(dataset)
        joined.datasets = [
            with_caches(part, cache_of, ready_batches=False) for part in dataset.datasets
        ]
        return joined
    if isinstance(dataset, CachedDataset | BatchDataset):
        return dataset
    # A mark somewhere inside: the cache is before that method, and what wraps it stays live.
    inner = getattr(dataset, "dataset", None)
    while inner is not None and marked_method(dataset) is None:
        if marked_method(inner) is not None:
            CachedDataset(inner, cache_of(inner))
            return dataset
        inner = getattr(inner, "dataset", None)
    cached = CachedDataset(dataset, cache_of(dataset))
    return BatchDataset(cached) if ready_batches else cached


def read_batch(dataset: CachedDataset, indices: Sequence[int]) -> ReadyBatch | list[object] | None:
    """Read the batch of `indices`, or its samples where their layouts differ.

    Entries that are not in this node's memory come as by `CachedDataset`. None: nothing was read,
    since none of the first entries is in memory, or torch would not stack them.
    """
    cache, chosen = dataset.cache, dataset.items(indices)
    # The layout of an entry in memory; of a partitioned cache the first may be another node's.
    layout = next(
        filter(None, (_layout_in_memory(cache, item) for item in chosen[:_LOOK_AT].tolist())), None
    )
    if layout is None or not _is_stackable(layout.header):
        return None
    ready = _read_at_once(cache, layout, chosen)
    if ready is not None:
        return ready
    # Row by row: this node's memory, then all else.
    items, rows = chosen.tolist(), BatchRows(layout, len(chosen))
    missing = [i for i, item in enumerate(items) if not cache.read_into(item, rows.buffers(i))]
    rest = dict(zip(missing, dataset.entries([items[i] for i in missing]), strict=True))
    cache.verify_new()
    if all(rows.fill(i, rest[i]) if i in rest else rows.is_filled(i) for i in range(len(items))):
        return ReadyBatch(rows.batch())
    # Layouts differ: samples of what was read, for no entry is read or counted twice.
    return [
        dataset.sample(item, in_one_piece(rest[i]) if i in rest else rows.entry(i))
        for i, item in enumerate(items)
    ]


def _layout_in_memory(cache: SampleCache, item: int) -> EntryLayout | None:
    header = None if cache.mapped is None else cache.mapped.header(item)
    return None if header is None else layout_of(header)


def _read_at_once(
    cache: SampleCache, layout: EntryLayout, items: npt.NDArray[np.int64]
) -> ReadyBatch | None:
    # The batch if all its entries are in mapped memory and verified
    mapped = cache.mapped
    offsets = (
        None
        if mapped is None
        else mapped.find_all(items, header=_entry_start(layout), nbytes=layout.nbytes)
    )
    if mapped is None or offsets is None:
        return None
    tensors = []
    for leaf in layout.leaves:
        rows = _empty(len(items), leaf.nbytes)  # of bytes
        mapped.take(offsets, leaf.start, rows)
        tensors.append(_typed(rows, leaf.spec))
    cache.count_memory_hits(len(items))
    return ReadyBatch(_nested(layout.spec, iter(tensors)))


class BatchRows:
    """The tensors of a batch of `size` entries of one layout, to be filled row by row."""

    def __init__(self, layout: EntryLayout, size: int) -> None:
        self.layout = layout
        self.rows = [_empty(size, leaf.nbytes) for leaf in layout.leaves]
        self._bytes: list[Bytes] = [rows.numpy() for rows in self.rows]
        # an entry is its header, then each leaf and what pads it
        starts = [*(leaf.start for leaf in layout.leaves), layout.nbytes]
        self._head = np.empty((size, starts[0]), np.uint8)
        self._padding = [
            np.empty((size, end - leaf.start - leaf.nbytes), np.uint8)
            for leaf, end in zip(layout.leaves, starts[1:], strict=True)
        ]
        self._expected = np.frombuffer(_entry_start(layout), np.uint8)

    def buffers(self, row: int) -> list[Bytes]:
        """Return where the entry of one row goes, piece by piece."""
        pieces = [self._head[row]]
        for rows, padding in zip(self._bytes, self._padding, strict=True):
            pieces.append(rows[row])
            if padding.size:
                pieces.append(padding[row])
        return pieces

    def entry(self, row: int) -> Bytes:
        """Return what was read into a row, in one piece."""
        return np.concatenate(self.buffers(row))

    def is_filled(self, row: int) -> bool:
        """Return whether what was read into a row has the layout."""
        return bool((self._head[row] == self._expected).all())

    def fill(self, row: int, parts: Parts) -> bool:
        """Copy an entry, given as buffers, into a row; False where its layout differs."""
        if header_of(parts[0]) != self.layout.header:
            return False
        for rows, leaf, view in zip(
            self._bytes, self.layout.leaves, leaves_of(parts, self.layout), strict=True
        ):
            if leaf.nbytes:
                rows[row] = np.frombuffer(view, np.uint8)
        return True

    def batch(self) -> Any:
        """Return what `default_collate` makes of the samples."""
        leaves = zip(self.layout.leaves, self.rows, strict=True)
        return _nested(self.layout.spec, (_typed(rows, leaf.spec) for leaf, rows in leaves))


def _entry_start(layout: EntryLayout) -> bytes:
    return len(layout.header).to_bytes(4, "little") + layout.header


def _empty(size: int, nbytes: int) -> Tensor:
    """Return rows of bytes, (size, nbytes).

    In a DataLoader's worker they are in shared memory, as with `default_collate`: the training
    process gets them without a copy. Workers of other loaders say ``own_memory``.
    """
    worker = get_worker_info()
    if worker is None or getattr(worker, "own_memory", False):
        return MEMORY.empty((size, nbytes), torch.uint8)
    storage = torch.UntypedStorage._new_shared(size * nbytes)
    rows: Any = torch.empty(0, dtype=torch.uint8, device="cpu")
    return cast(Tensor, rows.set_(storage, 0, (size, nbytes)))


def _typed(rows: Tensor, spec: Spec) -> Tensor:
    # View rows of bytes as the leaf's dtype and shape
    dtype = _dtype(spec)
    shape: list[int] = []  # of one sample
    if spec[0] == "numbers":
        shape = [spec[3]]
    elif spec[0] in ("tensor", "array", "scalar"):
        shape = spec[2]
    if not rows.numel():
        return torch.empty((len(rows), *shape), dtype=dtype, device="cpu")
    typed = rows.view(dtype)
    return typed if len(shape) == 1 else typed.view(len(rows), *shape)


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
        return True
    if kind in ("array", "scalar"):
        try:
            _dtype(spec)
            native: bool = np.dtype(spec[1]).isnative
            return native
        except TypeError:
            return False
    if kind == "dict":
        return all(_stackable(item) for _, item in spec[1])
    return kind in ("list", "tuple") and all(map(_stackable, spec[1]))


def _nested(spec: Spec, tensors: Iterator[Tensor]) -> Any:
    kind = spec[0]
    if kind == "dict":
        return {key: _nested(item, tensors) for key, item in spec[1]}
    if kind in ("list", "tuple"):
        return [_nested(item, tensors) for item in spec[1]]
    if kind == "numbers":
        return list(next(tensors).t().contiguous().unbind(0))
    return next(tensors)


class BatchMemory:
    """Memory for batches, used again once nobody holds the batch.

    New memory costs a page fault every 4 kB, as much as the copy. (glibc returns the memory of a
    large tensor to the system when it is freed, unless something lies behind it by chance.)

    At most `most_blocks` blocks are kept; one that is in use longer belongs to its users alone. A
    block is free when no tensor, view or array of it is left: they all hold the block's array,
    which counts its references.
    """

    def __init__(self, most_blocks: int = _MOST_BLOCKS) -> None:
        self._blocks: deque[npt.NDArray[np.uint8]] = deque(maxlen=most_blocks)
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor like `torch.empty`, on the CPU; a large one cannot be resized."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if nbytes < LEAST_BYTES:
            return torch.empty(shape, dtype=dtype, device="cpu")
        with self._lock:  # until the tensor holds the block
            return torch.from_numpy(self._free_block(nbytes)).view(dtype).view(shape)

    def _free_block(self, nbytes: int) -> npt.NDArray[np.uint8]:
        # The last used block may still be in the processor's cache.
        for index in reversed(range(len(self._blocks))):
            # Two references: of the deque, and of the call.
            if self._blocks[index].nbytes == nbytes and sys.getrefcount(self._blocks[index]) == 2:
                block = self._blocks[index]
                del self._blocks[index]
                break
        else:
            block = np.empty(nbytes, np.uint8)
        self._blocks.append(block)  # the one used last goes last
        return block


MEMORY = BatchMemory()  # of the process
# In a child the parent's lock may be held, and the blocks are the parent's.
os.register_at_fork(after_in_child=MEMORY.__init__)  # type: ignore[misc]
