"""A map-style data set with a cache before its deterministic part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from lightning_topt.data.cache.determinism import (
    NotDeterministicError,
    marked_method,
    other_randomness,
    put_cache_before,
)
from lightning_topt.data.cache.sample_cache import SampleCache
from lightning_topt.data.cache.sample_codec import Parts, UnsupportedSample, decode, encode

# Misses that are drawn twice: the first ones of a job, then one in so many of a process.
FIRST_CHECKS, CHECK_EVERY = 16, 512


class CachedDataset(Dataset[Any]):
    """`dataset` with what its deterministic part gives kept in `cache`: the marked method, or the whole ``__getitem__``.

    The samples are the same, and so is the random state after each of them (where nothing is random). What comes from the cache
    is the caller's own copy. All other attributes are those of `dataset`.

    Raises NotDeterministicError when a sample drawn twice differs; the cache is then given up.
    """

    def __init__(self, dataset: Any, cache: SampleCache) -> None:
        self.dataset, self.cache = dataset, cache
        self.is_marked = marked_method(dataset) is not None
        self._misses = 0
        if self.is_marked:
            put_cache_before(dataset, self.load)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __getitem__(self, index: int) -> Any:
        if self.is_marked:
            return self.dataset[index]
        return self.load(index, self.dataset.__getitem__)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several samples; those of other nodes come in one exchange."""
        if self.is_marked:
            samples = [self.dataset[index] for index in indices]
        else:
            items = [self.item(index) for index in indices]
            entries = self.cache.get_many(items)
            samples = [self._sample(i, e, self.dataset.__getitem__) for i, e in zip(items, entries, strict=True)]
            self.cache.verify_new()
        if get_worker_info() is not None:  # nobody tells a worker which batch is the epoch's last one
            self.cache.flush()
        return samples

    def item(self, index: int) -> int:
        """The item number of an index; negative ones count from the end. Raises IndexError."""
        length = self.cache.num_items
        if not -length <= index < length:
            raise IndexError(f"index {index} of a data set of {length} samples")
        return int(index) % length

    def load(self, index: int, original: Callable[[int], Any]) -> Any:
        """The deterministic part's sample: from the cache, or from `original` and then kept."""
        item = self.item(index)
        return self._sample(item, self.cache.get(item), original)

    def entries(self, items: Sequence[int]) -> list[Parts]:
        """Entries (see `sample_codec`) of several items, from the cache (in one piece) or the source; without a mark."""
        found = self.cache.get_many(items)
        original = self.dataset.__getitem__
        return [
            self._store(item, original(item), original) if entry is None else [entry]
            for item, entry in zip(items, found, strict=True)
        ]

    def sample(self, item: int, entry: Any) -> Any:
        """The sample of an entry; for data sets without a mark."""
        return self._sample(item, entry, self.dataset.__getitem__)

    def _sample(self, item: int, entry: Any, original: Callable[[int], Any]) -> Any:
        if entry is not None:
            try:
                return decode(entry)
            except UnsupportedSample:
                pass  # a NamedTuple or dataclass that this process has not met yet: the source makes it known
        sample = original(item)
        self._store(item, sample, original)
        return sample

    def _store(self, item: int, sample: Any, original: Callable[[int], Any]) -> Parts:
        parts = encode(sample)
        self._check(item, parts, original)
        self.cache.put(item, parts)
        return parts

    def _check(self, item: int, parts: Parts, original: Callable[[int], Any]) -> None:
        """Draw a second time under other random states, and compare byte by byte."""
        self._misses += 1
        if self._misses % CHECK_EVERY and self.cache.num_misses() > FIRST_CHECKS:
            return
        with other_randomness(7919 * self._misses + item):
            again = encode(original(item))
        if b"".join(map(bytes, parts)) == b"".join(map(bytes, again)):
            return
        what = "the method marked @deterministic" if self.is_marked else "__getitem__"
        reason = (
            f"{what} of {type(self.dataset).__name__} gives different samples for index {item}: mark only the part that is "
            "not random with @lightning_topt.data.deterministic, and call it from __getitem__"
        )
        self.cache.refuse(reason)
        raise NotDeterministicError(reason)
