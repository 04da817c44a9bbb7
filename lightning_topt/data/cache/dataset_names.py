"""Fingerprints of data sets that are asked for again and again, and may have changed in between."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lightning_topt.data.cache.fingerprint import UnnamableError, named

Agree = Callable[[str], Sequence[str]]  # a rank's fingerprint -> those of all ranks


class _Known(NamedTuple):
    dataset: Callable[[], Any]  # None once it is gone
    name: str
    state: str  # the same without a look at files
    had_value: dict[str, bool]  # by attribute


class DatasetNames:
    """The `fingerprint` of each data set under `data_version`, another one as soon as its state has changed.

    Files are looked at when a data set is new or has changed, not each time: there may be a million of them. An attribute that
    had no value before and cannot be named, as a file opened on first use, is no change.
    """

    def __init__(self, *, data_version: str | None) -> None:
        self.data_version = data_version
        self._known: dict[int, _Known] = {}

    def name_of(self, dataset: Any, *, agree: Agree | None = None) -> str:
        """Warns of a change. With `agree`, called for each data set that is not new, only one that is the same on all ranks
        counts.

        Raises UnnamableError for a new data set that has no fingerprint; one that has none any more keeps its own.
        """
        known = self._known.get(id(dataset))
        if known is None or known.dataset() is not dataset:
            now = self._look(dataset, dataset)
        else:
            now = self._look_again(dataset, known)
            if agree is not None and len(set(agree(now.name))) > 1:
                _warn(dataset, "has become another one on each rank, and goes on with the cache that it has")
                now = known
        self._known = {key: each for key, each in self._known.items() if each.dataset() is not None}
        self._known[id(dataset)] = now
        return now.name

    def _look(self, dataset: Any, like: Any) -> _Known:
        name, state = named(like, data_version=self.data_version)
        try:
            reference: Callable[[], Any] = weakref.ref(dataset)
        except TypeError:  # a list has no weak references
            reference = _Itself(dataset)
        had_value = {key: value is not None for key, value in getattr(like, "__dict__", {}).items()}
        return _Known(reference, name, state, had_value)

    def _look_again(self, dataset: Any, known: _Known) -> _Known:
        try:
            like, state = _state(dataset, known.had_value)
            if state == known.state:
                return known
            now = self._look(dataset, like)
        except UnnamableError as error:
            _warn(dataset, f"has something new that cannot be named, and goes on with the cache that it has: {error}")
            return known
        _warn(
            dataset,
            "is not as it was when its cache was made: its samples get another one, with as much room. If they do not depend "
            "on what has changed, leave that out of __getstate__",
        )
        return now


def _warn(dataset: Any, words: str) -> None:
    warnings.warn(f"{type(dataset).__name__} {words}", stacklevel=4)


class _Itself:
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __call__(self) -> Any:
        return self.dataset


def _state(dataset: Any, had_value: dict[str, bool]) -> tuple[Any, str]:
    """What can be named: the whole data set, or one like it that lacks what had no value before; and its state."""
    try:
        return dataset, named(dataset, data_version="").state
    except UnnamableError:
        if not hasattr(dataset, "__dict__"):
            raise
        before = copy.copy(dataset)
        for name in list(vars(before)):
            if name not in had_value:
                del vars(before)[name]
            elif not had_value[name]:
                vars(before)[name] = None
        return before, named(before, data_version="").state
