"""The deterministic part of a data set: how users mark it, and random states for checking it.

A small module of its own: users, data sets in workers, fingerprints and loaders need it.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

from lightning_topt.data.resumable_loader import restored_random_states

Method = TypeVar("Method", bound=Callable[..., Any])
MARK = "_topt_deterministic"
IGNORED = "ignored_by_cache"  # attribute with names of attributes that samples do not depend on
HOOK = "_topt_cached_load"  # attribute of an instance whose marked method goes through a cache


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


def put_cache_before(dataset: object, load: Callable[[int, Callable[[int], Any]], Any]) -> None:
    """Let the marked method of `dataset` go through ``load(index, original)``."""
    vars(dataset)[HOOK] = load


@contextlib.contextmanager
def other_randomness(seed: int) -> Iterator[None]:
    """Seed the global random states with `seed` inside, and restore them afterwards."""
    with restored_random_states():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        # The CPU's only; torch.manual_seed would initialize GPUs.
        torch.default_generator.manual_seed(seed)
        yield
