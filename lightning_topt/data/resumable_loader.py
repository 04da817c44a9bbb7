"""A DataLoader that resumes in the middle of an epoch, at the next batch and in the same order.

The skipped batches are not read. The order is drawn again from the same random states. So a
checkpoint holds these and a count, whatever the number of samples. Only the order is restored:
random augmentation in workers differs from a run that was never interrupted.

The loader also looks ahead (`Lookahead`): caches that prefetch from other nodes learn which items
are read next.
"""

from __future__ import annotations

import random
import warnings
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_topt.data.cache.cached_batches import BatchDataset
from lightning_topt.data.cache.cached_dataset import CachedDataset
from lightning_topt.data.cache.determinism import other_randomness
from lightning_topt.data.cache.sample_cache import SampleCache
from lightning_topt.data.peers.prefetch import PrefetchingPeers

_POSITION = "_topt_position"
# These draw all randomness of an epoch at its start: drawing the rest earlier changes nothing.
_SAMPLERS = (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


class ResumableLoader(DataLoader[Any]):
    """A DataLoader with ``state_dict`` and ``load_state_dict``, for map-style data sets.

    The state counts the batches that were handed out, not those that workers have prepared ahead.
    It can be loaded with ``weights_only``. There is a warning where the order could not be drawn
    again. It can if it depends on nothing but these:

    - the random states at its start: Python's, NumPy's, torch's, its or the loader's `generator`;
    - the sampler's ``epoch``;
    - the sampler's ``state_dict``.

    Args:
        is_epoch_over: says, when the state is taken, that the epoch ends although there are more
            batches. None: every epoch is read to its end.
        lookahead: learns of batches before they are read, where that changes nothing: without
            workers, which read ahead by themselves, and for torch's own samplers.
    """

    def __init__(
        self,
        *args: Any,
        is_epoch_over: Callable[[], bool] | None = None,
        lookahead: Lookahead | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.is_epoch_over, self.lookahead = is_epoch_over, lookahead

    @property
    def _index_sampler(self) -> Any:
        return self._position

    @property
    def _position(self) -> _Position:
        if _POSITION not in vars(self):  # a DataLoader may have become resumable later
            sampler = self.sampler if self.batch_sampler is None else self.batch_sampler
            vars(self)[_POSITION] = _Position(sampler, self.generator)
        return vars(self)[_POSITION]  # type: ignore[no-any-return]

    def __iter__(self) -> Any:
        # looking ahead draws the order earlier: only where that changes nothing
        looks = self.num_workers == 0 and all(map(can_look_ahead, self._position.parts))
        epoch = self._position.begin(self.lookahead if looks else None)
        return _Batches(super().__iter__(), epoch)

    def state_dict(self) -> dict[str, object]:
        """Return the position in the epoch: tensors and plain values.

        ``batches`` is 0 at the epoch's beginning or end.
        """
        position = self._position
        over = self.is_epoch_over is not None and self.is_epoch_over()
        return {"batches": 0} if over and position.to_resume is None else position.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next epoch be the rest of the one that `state` is of."""
        self._position.load_state_dict(state)


def make_resumable(
    loader: DataLoader[Any],
    *,
    is_epoch_over: Callable[[], bool] | None = None,
    lookahead: Lookahead | None = None,
) -> bool:
    """Turn a plain DataLoader into a ResumableLoader in place; returns whether that was possible.

    It is not for subclasses, which may be resumable themselves, nor for iterable data sets, nor for
    loaders that return batches out of order.
    """
    if (
        type(loader) is not DataLoader
        or isinstance(loader.dataset, IterableDataset)
        or not loader.in_order
    ):
        return False
    # only the class changes, so the loader stays the object that the user holds
    loader.__class__ = ResumableLoader
    loader.is_epoch_over, loader.lookahead = is_epoch_over, lookahead
    return True


class _Position:
    """Replaces a loader's sampler (of batches, or else of samples), and starts its epochs."""

    def __init__(self, sampler: Any, generator: torch.Generator | None) -> None:
        self.sampler = sampler
        # of a batch sampler, the sampler of single samples inside of it
        inner = getattr(sampler, "sampler", None)
        self.parts = [part for part in (sampler, inner) if part is not None]
        found = [generator, *(getattr(part, "generator", None) for part in self.parts)]
        # each once, though the loader and its samplers may share one
        self.generators = list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
        self.epoch: _Epoch | None = None
        self.to_resume: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[object]:
        return iter(self.sampler) if self.epoch is None else self.epoch.indices()

    def begin(self, lookahead: Lookahead | None) -> _Epoch:
        """Start a new epoch, or the rest of the one that was loaded."""
        self.epoch, self.to_resume = _Epoch(self, self.to_resume, lookahead), None
        return self.epoch

    def state_dict(self) -> dict[str, object]:
        # loaded and not begun: the position is still that one
        if self.to_resume is not None:
            return self.to_resume
        return {"batches": 0} if self.epoch is None else self.epoch.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.to_resume = dict(state) if state["batches"] else None
        # A Trainer sets the samplers' epoch only after workers have drawn their first batches.
        for part, number in zip(self.parts, state.get("epochs", ()), strict=False):
            if number is not None:
                part.set_epoch(number)

    def remember(self) -> dict[str, object]:
        """Return the state that the next order depends on."""
        name, keys, *rest = np.random.get_state()
        return {
            "random": {
                "python": random.getstate(),
                "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
                "torch": torch.get_rng_state(),
            },
            "generators": [generator.get_state() for generator in self.generators],
            "epochs": [part.epoch if hasattr(part, "set_epoch") else None for part in self.parts],
            "samplers": [
                deepcopy(part.state_dict()) if hasattr(part, "state_dict") else None
                for part in self.parts
            ],
            "rank": getattr(self.parts[-1], "rank", 0),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore that state.

        The caller puts the global random states back afterwards.
        """
        version, internal, gauss = state["random"]["python"]
        random.setstate((version, tuple(internal), gauss))
        name, keys, *rest = state["random"]["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(state["random"]["torch"])
        for generator, value in zip(self.generators, state["generators"], strict=False):
            generator.set_state(value)
        for part, value in zip(self.parts, state["samplers"], strict=False):
            if value is not None:
                part.load_state_dict(value)


class _Epoch:
    """One pass over the sampler: its initial state, and how much was handed out."""

    def __init__(
        self, position: _Position, resumed: dict[str, Any] | None, lookahead: Lookahead | None
    ) -> None:
        self.position, self.resumed, self.lookahead = position, resumed, lookahead
        self.origin: dict[str, Any] = {} if resumed is None else resumed
        self.batches = 0 if resumed is None else int(resumed["batches"])
        self.check = 0 if resumed is None else int(resumed["check"])  # of the order up to here
        self.is_over = False
        self._drawn: deque[int] = deque()  # the check after each batch that is still in flight

    def indices(self) -> Iterator[object]:
        """Yield the sampler's batches (or samples).

        Nothing happens before the first one is requested.
        """
        if self.resumed is None:
            self.origin = self.position.remember()
            iterator, check = iter(self.position.sampler), 0
        else:
            iterator, check = self._skipped(), self.check
        for chosen in iterator if self.lookahead is None else self.lookahead.over(iterator):
            check = _check(chosen, check)
            # in flight: drawn from the sampler, not yet handed out by the loader
            self._drawn.append(check)
            yield chosen

    def _skipped(self) -> Iterator[object]:
        """Draw the order of the interrupted epoch again.

        Returns its iterator after the batches that were handed out.
        """
        # Draw from the restored states, outside of which nothing changes.
        check, done = 0, 0
        with other_randomness(0):
            self.position.restore(self.origin)
            iterator: Iterator[object] = iter(self.position.sampler)
            for chosen in _first(iterator, self.batches):
                check, done = _check(chosen, check), done + 1
        # A checkpoint holds rank 0's order; only the position applies to other ranks.
        own = self.origin["rank"] == getattr(self.position.parts[-1], "rank", 0)
        if done < self.batches or (own and check != self.check):
            warnings.warn(
                "the order of the interrupted epoch could not be drawn again (another data set, "
                f"batch size or seed, or a sampler with a state of its own): after {self.batches} "
                "batches that were used, samples of this epoch may come twice or not at all. Give "
                "the sampler a generator, set_epoch or state_dict",
                stacklevel=2,
            )
        return iterator

    def count(self) -> None:
        """Count one more batch."""
        self.batches += 1
        self.check = self._drawn.popleft()
        if self.lookahead is not None and self.batches >= _length(self.position.sampler):
            self.lookahead.finish()

    def state_dict(self) -> dict[str, object]:
        # nothing to go on with: the next epoch is drawn anew
        if self.is_over or not self.batches or self.batches >= _length(self.position.sampler):
            return {"batches": 0}
        return {**self.origin, "batches": self.batches, "check": self.check}


class _Batches(Iterator[object]):
    """A DataLoader's iterator that counts batches."""

    def __init__(self, batches: Any, epoch: _Epoch) -> None:
        self._batches, self._epoch = batches, epoch

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> object:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._epoch.is_over = True
            raise
        self._epoch.count()
        return batch


def _check(chosen: object, before: int) -> int:
    """Return a 63-bit hash of a batch of indices and all before it."""
    try:
        data = array("q", chosen if isinstance(chosen, list | tuple) else [chosen]).tobytes()
    except (TypeError, OverflowError):  # other keys than numbers
        data = repr(chosen).encode()
    return xxhash.xxh3_64_intdigest(data, seed=before) >> 1


def _first(iterator: Iterator[object], number: int) -> Iterable[object]:
    """Yield up to `number` items.

    Unlike `zip` with a range it takes no more than that from `iterator`.
    """
    for _ in range(number):
        try:
            yield next(iterator)
        except StopIteration:
            return


def _length(sampler: Any) -> float:
    try:
        return len(sampler)
    except TypeError:  # it has no length
        return float("inf")


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


def can_look_ahead(sampler: object) -> bool:
    """Return whether drawing earlier from `sampler` changes nothing.

    Subclasses, Lightning's among them, may do anything.
    """
    return type(sampler) in _SAMPLERS


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
