"""Announces the items of coming batches to caches that prefetch from other nodes."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from lightning_topt.data.cache.cached_batches import BatchDataset
from lightning_topt.data.cache.cached_dataset import CachedDataset
from lightning_topt.data.cache.sample_cache import SampleCache
from lightning_topt.data.peers.prefetch import PrefetchingPeers


class Lookahead:
    """Draws `batches` batches ahead, and announces their items to the caches behind `dataset`.

    Only caches that prefetch from other nodes get announcements. At the end of an epoch it waits
    until other nodes have the entries pushed to them: the next epoch requests them there.
    """

    def __init__(self, dataset: object, *, batches: int) -> None:
        self.dataset, self.batches = dataset, batches

    def over(self, chosen: Iterator[object]) -> Iterator[object]:
        """Yield the same batches of indices (or single indices).

        Each one is announced `batches` batches before.
        """
        drawn: deque[object] = deque()  # announced, not yet yielded
        # announcements of an order that is no longer read
        for cache in _caches_behind(self.dataset):
            if isinstance(cache.peers, PrefetchingPeers):
                cache.peers.forget()
        for indices in chosen:
            # one announcement for each cache, with all its items of this batch
            wanted: dict[int, tuple[PrefetchingPeers, list[int]]] = {}
            for index in indices if isinstance(indices, list | tuple) else [indices]:
                found = _cache_behind(self.dataset, index)
                if found is not None and isinstance(found[0].peers, PrefetchingPeers):
                    peers, item = found[0].peers, found[1]
                    wanted.setdefault(id(peers), (peers, []))[1].append(item)
            for peers, items in wanted.values():
                peers.expect(items)
            drawn.append(indices)
            if len(drawn) > self.batches:
                yield drawn.popleft()
        # the last ones, which nothing follows
        yield from drawn

    def finish(self) -> None:
        """End the epoch, whose last batch has been read."""
        for cache in _caches_behind(self.dataset):
            cache.flush()


def _cache_behind(dataset: Any, index: Any) -> tuple[SampleCache, int] | None:
    """Return the cache and item of an index, or None where there is none that is known."""
    while True:
        if isinstance(dataset, BatchDataset):
            dataset = dataset.dataset
        elif isinstance(dataset, CachedDataset):
            return dataset.cache, dataset.item(index)
        elif type(dataset) is Subset:
            dataset, index = dataset.dataset, dataset.indices[index]
        elif type(dataset) is ConcatDataset:
            # the part that has the index, and its place in that
            part = bisect_right(dataset.cumulative_sizes, index)
            index = index - (dataset.cumulative_sizes[part - 1] if part else 0)
            dataset = dataset.datasets[part]
        else:
            return None


def _caches_behind(dataset: object) -> list[SampleCache]:
    if isinstance(dataset, BatchDataset):
        dataset = dataset.dataset
    if isinstance(dataset, CachedDataset):
        return [dataset.cache]
    if type(dataset) is Subset:
        return _caches_behind(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return [cache for part in dataset.datasets for cache in _caches_behind(part)]
    return []
