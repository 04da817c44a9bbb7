"""A map-style data set with a cache before its deterministic part.

    dataset = CachedDataset(Pictures(), cache)
    dataset[3]          # from the cache, or from the source and then kept

`deterministic` marks the part that is worth caching. Some misses are drawn twice under
other random states: what differs must not be cached.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from lightning_topt.data.cache.sample_cache import SampleCache
from lightning_topt.data.cache.sample_codec import Parts, decode, encode
from lightning_topt.data.resumable_loader import restored_random_states

Method = TypeVar("Method", bound=Callable[..., Any])
MARK = "_topt_deterministic"
IGNORED = "ignored_by_cache"  # attribute with names of attributes that samples do not depend on
HOOK = "_topt_cached_load"  # attribute of an instance whose marked method goes through a cache
# Misses that are drawn twice: the first ones of a job, then one of so many in a process.
FIRST_CHECKS, CHECK_EVERY = 16, 512
_MISSING = object()


class NotDeterministicError(ValueError):
    """Two draws of one sample differ: it cannot be cached."""


def deterministic(method: Method) -> Method:
    """Mark a data set's method ``load(self, index)`` as deterministic and worth caching.

    It returns the same sample whenever it is called. ``__getitem__`` calls it and then does what is
    random. Without a mark the whole ``__getitem__`` counts as deterministic.

        class Pictures(Dataset):
            @deterministic
            def load(self, index):
                return decode(self.paths[index])

            def __getitem__(self, index):
                return random_crop(self.load(index))
    """

    @functools.wraps(method)
    def through_cache(self: object, index: int) -> Any:
        hook = getattr(self, "__dict__", {}).get(HOOK)
        return method(self, index) if hook is None else hook(index, functools.partial(method, self))

    setattr(through_cache, MARK, True)
    return through_cache  # type: ignore[return-value]


def marked_method(dataset: object) -> str | None:
    """Return the name of the marked method of `dataset`, None if it has none.

    Raises:
        ValueError: there is more than one.
    """
    found = {
        name
        for base in type(dataset).__mro__
        for name, value in vars(base).items()
        if hasattr(value, MARK)
    }
    if len(found) > 1:
        raise ValueError(
            f"{type(dataset).__name__} has {len(found)} methods marked @deterministic, "
            f"{', '.join(sorted(found))}: mark one"
        )
    return next(iter(found), None)


class CachedDataset(Dataset[object]):
    """`dataset`, with the samples of its deterministic part kept in `cache`.

    That part is the marked method, or the whole ``__getitem__``. The samples are the same, and so
    is the random state after each of them (where nothing is random). What comes from the cache is
    the caller's own copy. All other attributes are those of `dataset`.

    Raises:
        NotDeterministicError: a sample drawn twice differs; the cache is then given up.
    """

    def __init__(self, dataset: Any, cache: SampleCache) -> None:
        self.dataset, self.cache = dataset, cache
        self.is_marked = marked_method(dataset) is not None
        # Misses of this process, and whether the job still checks its first ones.
        self._misses, self._is_new = 0, True
        if self.is_marked:
            vars(dataset)[HOOK] = self.load  # `through_cache` looks for it

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        # an object that is being unpickled has no data set yet
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: int) -> Any:
        if self.is_marked:
            # the cache is before the marked method, inside of this call
            return self.dataset[index]
        return self.load(index, self.dataset.__getitem__)

    def __getitems__(self, indices: Sequence[int]) -> list[object]:
        """Return several samples; there is one exchange with each other node."""
        if self.is_marked:
            return [self.dataset[index] for index in indices]
        items = self.items(indices).tolist()
        samples = self._samples(items, self.cache.get_many(items), self.dataset.__getitem__)
        self.cache.verify_new()
        return samples

    def item(self, index: int) -> int:
        """Return the item number of an index; negative ones count from the end.

        Raises:
            IndexError: there is no such index.
        """
        length = self.cache.num_items
        if not -length <= index < length:
            raise IndexError(f"index {index} of a data set of {length} samples")
        return int(index) % length

    def items(self, indices: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the item numbers of several indices.

        Raises:
            IndexError: there is no such index.
        """
        found = np.asarray(indices, np.int64)
        # As unsigned numbers, negative ones are large.
        if found.size and found.view(np.uint64).max() >= self.cache.num_items:
            return np.array([self.item(index) for index in indices])
        return found

    def load(self, index: int, original: Callable[[int], object]) -> object:
        """Return a sample from the cache, or from `original` and then keep it."""
        item = self.item(index)
        return self._samples([item], [self.cache.get(item)], original)[0]

    def entries(self, items: Sequence[int]) -> list[Parts]:
        """Return the entries (see `sample_codec`) of several items; for data sets without a mark.

        They come from the cache (in one piece), or from the source.
        """
        found = self.cache.get_many(items)
        missing = [item for item, entry in zip(items, found, strict=True) if entry is None]
        read = self._read(missing, self.dataset.__getitem__)[1]
        return [
            read[item] if entry is None else [entry]
            for item, entry in zip(items, found, strict=True)
        ]

    def sample(self, item: int, entry: object) -> object:
        """Return the sample of an entry; for data sets without a mark."""
        return self._samples([item], [entry], self.dataset.__getitem__)[0]

    def _samples(
        self, items: Sequence[int], entries: Sequence[object], original: Callable[[int], object]
    ) -> list[object]:
        # The samples of entries, and from `original` where there is none
        samples = [_MISSING if entry is None else decode(entry) for entry in entries]
        missing = [i for i, sample in enumerate(samples) if sample is _MISSING]
        if missing:
            for i, sample in zip(
                missing, self._read([items[i] for i in missing], original)[0], strict=True
            ):
                samples[i] = sample
        return samples

    def _read(
        self, items: Sequence[int], original: Callable[[int], object]
    ) -> tuple[list[object], dict[int, Parts]]:
        """Read samples from the source, and keep them.

        Returns the samples and their entries. Samples before one that fails are kept, too. They are
        stored together when the last one is there, which is cheaper than one by one.
        """
        samples: list[object] = []
        try:
            for item in items:
                samples.append(original(item))
        finally:
            # Check some of them, then store all.
            read = dict(zip(items, samples, strict=False))
            entries = {item: encode(sample) for item, sample in read.items()}
            for item in self._to_check(list(entries)):
                self._check(item, entries[item], original)
            self.cache.put_many(entries)
        return samples, entries

    def _to_check(self, items: list[int]) -> list[int]:
        # Which of these misses, counted already, are drawn twice
        # One of `CHECK_EVERY`, counted in this process.
        before, self._misses = self._misses, self._misses + len(items)
        checked = [
            item for number, item in enumerate(items, before + 1) if number % CHECK_EVERY == 0
        ]
        # And the first ones of the job, counted in all processes.
        if self._is_new:
            earlier = self.cache.num_misses() - len(items)
            checked = items[: max(0, FIRST_CHECKS - earlier)] + checked
            self._is_new = earlier + len(items) < FIRST_CHECKS
        return list(dict.fromkeys(checked))

    def _check(self, item: int, parts: Parts, original: Callable[[int], object]) -> None:
        # Draw a second time under other random states, and compare byte by byte
        with _other_randomness(7919 * self._misses + item):
            sample = original(item)
        if b"".join(map(bytes, parts)) == b"".join(map(bytes, encode(sample))):
            return
        what = "the method marked @deterministic" if self.is_marked else "__getitem__"
        reason = (
            f"{what} of {type(self.dataset).__name__} gives different samples for index {item}: "
            "mark only the part that is not random with @lightning_topt.data.deterministic, and "
            "call it from __getitem__"
        )
        self.cache.refuse(reason)
        raise NotDeterministicError(reason)


@contextlib.contextmanager
def _other_randomness(seed: int) -> Iterator[None]:
    # Seed the global random states inside, and restore them afterwards
    with restored_random_states():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        # The CPU's only; torch.manual_seed would initialize GPUs.
        torch.default_generator.manual_seed(seed)
        yield
