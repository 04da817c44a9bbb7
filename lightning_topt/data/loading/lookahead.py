"""Those who can fetch it beforehand are told what a loader will read next."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_topt.data.cache.cached_batches import BatchDataset
from lightning_topt.data.cache.cached_dataset import CachedDataset
from lightning_topt.data.cache.sample_cache import SampleCache
from lightning_topt.data.peers.prefetch import PrefetchingPeers

# These draw what is random about an epoch when it begins: when the rest is asked for makes no
# difference.
_SAMPLERS = (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


def can_look_ahead(sampler: Any) -> bool:
    """Return whether drawing from `sampler` earlier gives the same; its subclasses, and
    Lightning's, may do anything.
    """
    return type(sampler) in _SAMPLERS


class Lookahead:
    """Draws `batches` batches ahead and announces the items of caches that lie behind `dataset`,
    where these prefetch.

    At the end of an epoch it waits until other nodes have what was read for them: the next epoch
    asks them for it.
    """

    def __init__(self, dataset: Any, *, batches: int) -> None:
        self.dataset, self.batches = dataset, batches

    def over(self, chosen: Iterator[Any]) -> Iterator[Any]:
        """Yield the same batches of indices (or single indices), each one announced `batches`
        before it is given.
        """
        drawn: deque[Any] = deque()
        for cache in _caches(self.dataset):
            if isinstance(cache.peers, PrefetchingPeers):
                cache.peers.forget()
        for indices in chosen:
            self._announce(indices if isinstance(indices, list | tuple) else [indices])
            drawn.append(indices)
            if len(drawn) > self.batches:
                yield drawn.popleft()
        yield from drawn

    def finish(self) -> None:
        """End the epoch, whose last batch has been read."""
        for cache in _caches(self.dataset):
            cache.flush()

    def _announce(self, indices: Sequence[Any]) -> None:
        wanted: dict[int, tuple[PrefetchingPeers, list[int]]] = {}
        for index in indices:
            found = _behind(self.dataset, index)
            if found is not None and isinstance(found[0].peers, PrefetchingPeers):
                peers, item = found[0].peers, found[1]
                wanted.setdefault(id(peers), (peers, []))[1].append(item)
        for peers, items in wanted.values():
            peers.expect(items)


def _behind(dataset: Any, index: Any) -> tuple[SampleCache, int] | None:
    """The cache and item of an index; None: there is none, or nobody knows."""
    while True:
        if isinstance(dataset, BatchDataset):
            dataset = dataset.dataset
        elif isinstance(dataset, CachedDataset):
            return dataset.cache, dataset.item(index)
        elif type(dataset) is Subset:
            dataset, index = dataset.dataset, dataset.indices[index]
        elif type(dataset) is ConcatDataset:
            part = bisect_right(dataset.cumulative_sizes, index)
            dataset, index = (
                dataset.datasets[part],
                index - (dataset.cumulative_sizes[part - 1] if part else 0),
            )
        else:
            return None


def _caches(dataset: Any) -> list[SampleCache]:
    if isinstance(dataset, BatchDataset):
        dataset = dataset.dataset
    if isinstance(dataset, CachedDataset):
        return [dataset.cache]
    if type(dataset) is Subset:
        return _caches(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return [cache for part in dataset.datasets for cache in _caches(part)]
    return []
