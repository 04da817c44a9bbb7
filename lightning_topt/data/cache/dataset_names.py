"""Fingerprints of data sets that are asked for again and again, and may have changed in between."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lightning_topt.data.cache.determinism import IGNORED
from lightning_topt.data.cache.fingerprint import UnnamableError, named

Agree = Callable[[str], Sequence[str]]  # a rank's fingerprint -> those of all ranks


class _Known(NamedTuple):
    dataset: Callable[[], Any]  # None once it is gone
    name: str
    state: str  # the same without a look at files
    had_value: dict[str, bool]  # by attribute
    attributes: dict[str, bytes]  # hashes


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=5)


class DatasetNames:
    """The `fingerprint` of each data set under `data_version`, another one as soon as its state has
    changed.

    Files are looked at when a data set is new or has changed, not each time: there may be a million
    of them. An attribute that had no value before and cannot be named, as a file opened on first
    use, is no change. `warn` is told, once, what changes.
    """

    def __init__(self, *, data_version: str | None, warn: Callable[[str], None] = _warn) -> None:
        self.data_version, self.warn = data_version, warn
        self._known: dict[int, _Known] = {}
        # by place, with how often it was another one
        self._latest: dict[tuple[str, type], tuple[_Known, int]] = {}
        self._said: set[str] = set()

    def name_of(self, dataset: Any, *, place: str = "", agree: Agree | None = None) -> str:
        """Return the name of `dataset`; warns of a change. With `agree`, called for each data set
        that is not new, only one that is the same on all ranks counts. `place`, of a loader, is
        where a new data set may be one that was there already, but for some attributes.

        Raises UnnamableError for a new data set that has no fingerprint; one that has none any more
        keeps its own.
        """
        known = self._known.get(id(dataset))
        if known is None or known.dataset() is not dataset:
            now = self._look(dataset, dataset)
            self._compare(dataset, now, place)
        else:
            now = self._look_again(dataset, known)
            if agree is not None and len(set(agree(now.name))) > 1:
                self._say(
                    dataset,
                    "has become another one on each rank, and goes on with the cache that it has",
                )
                now = known
            if now is not known:
                self._say_changed(
                    dataset, _changed(known, now), "is not as it was when its cache was made"
                )
        self._known = {key: each for key, each in self._known.items() if each.dataset() is not None}
        self._known[id(dataset)] = now
        return now.name

    def _compare(self, dataset: Any, now: _Known, place: str) -> None:
        """With what was at this place before. Once it may be meant to be another one, as where a
        second fit has other data.
        """
        known, times = self._latest.get((place, type(dataset)), (now, 0))
        times += known.name != now.name
        if place:
            self._latest[place, type(dataset)] = now._replace(dataset=lambda: None), times
        changed = _changed(known, now)
        if times > 1 and changed and known.name != now.name:
            self._say_changed(dataset, changed, "is made anew again and again and never as it was")

    def _look(self, dataset: Any, like: Any) -> _Known:
        name, state, attributes = named(like, data_version=self.data_version)
        try:
            reference: Callable[[], Any] = weakref.ref(dataset)
        except TypeError:  # a list has no weak references
            reference = _Itself(dataset)
        had_value = {key: value is not None for key, value in getattr(like, "__dict__", {}).items()}
        return _Known(reference, name, state, had_value, attributes)

    def _look_again(self, dataset: Any, known: _Known) -> _Known:
        try:
            like, state = _state(dataset, known.had_value)
            if state == known.state:
                return known
            return self._look(dataset, like)
        except UnnamableError as error:
            self._say(
                dataset,
                "has something new that cannot be named, and goes on with the cache that it has: "
                f"{error}",
            )
            return known

    def _say_changed(self, dataset: Any, changed: Sequence[str], how: str) -> None:
        names = ", ".join(changed) or "what it refers to"
        advice = (
            f"{IGNORED} = {tuple(changed)!r}"
            if changed
            else "__getstate__, without what has changed"
        )
        self._say(
            dataset,
            f"{how} ({names} changed): its samples get another cache, with as much room. If they "
            "do not depend on that, "
            f"give {type(dataset).__name__} the attribute {advice}",
        )

    def _say(self, dataset: Any, words: str) -> None:
        message = f"{type(dataset).__name__} {words}"
        if message not in self._said:
            self._said.add(message)
            self.warn(message)


def _changed(before: _Known, now: _Known) -> list[str]:
    """Attributes whose values are others, are new or are gone."""
    names = before.attributes.keys() | now.attributes.keys()
    return sorted(name for name in names if before.attributes.get(name) != now.attributes.get(name))


class _Itself:
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __call__(self) -> Any:
        return self.dataset


def _state(dataset: Any, had_value: dict[str, bool]) -> tuple[Any, str]:
    """Return what can be named: the whole data set, or one like it that lacks what had no value
    before; and its state.
    """
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
