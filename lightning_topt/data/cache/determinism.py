"""The deterministic part of a data set, marked by the user and checked by drawing twice."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

Method = TypeVar("Method", bound=Callable[..., Any])
MARK = "_topt_deterministic"
# attribute of a class or object: names of attributes that its samples do not depend on
IGNORED = "ignored_by_cache"
HOOK = "_topt_cached_load"  # set on an instance whose marked method goes through a cache


class NotDeterministicError(ValueError):
    """Two draws of one sample differ: it cannot be cached."""


def deterministic(method: Method) -> Method:
    """Mark a data set's method ``load(self, index)``: the same sample whenever it is called, worth
    keeping.

    ``__getitem__`` calls it and then does what is random. Without a mark the whole ``__getitem__``
    counts as deterministic.

        class Pictures(Dataset):
            @deterministic
            def load(self, index):
                return decode(self.paths[index])

            def __getitem__(self, index):
                return random_crop(self.load(index))
    """

    @functools.wraps(method)
    def through_cache(self: Any, index: int) -> Any:
        hook = getattr(self, "__dict__", {}).get(HOOK)
        return method(self, index) if hook is None else hook(index, functools.partial(method, self))

    setattr(through_cache, MARK, True)
    return through_cache  # type: ignore[return-value]


def marked_method(dataset: Any) -> str | None:
    """Return the name of the marked method of `dataset`, None if it has none. Raises ValueError for
    more than one.
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


def put_cache_before(dataset: Any, load: Callable[[int, Callable[[int], Any]], Any]) -> None:
    """Let the marked method of `dataset` go through ``load(index, original)``."""
    vars(dataset)[HOOK] = load


@contextlib.contextmanager
def other_randomness(seed: int) -> Iterator[None]:
    """Make the random states of Python, NumPy and torch others inside, and afterwards as before."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        # of the CPU alone; torch.manual_seed would reach for GPUs
        torch.default_generator.manual_seed(seed)
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
