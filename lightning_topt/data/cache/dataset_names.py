"""Fingerprints of data sets that are asked for again and again, and may change in between.

A data set that changes gets another cache. A warning says once what changed, and how to say that
the samples do not depend on it.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lightning_topt.data.cache.determinism import IGNORED
from lightning_topt.data.cache.fingerprint import UnnamableError, named

Agree = Callable[[str], Sequence[str]]  # a rank's fingerprint -> those of all ranks


class _Known(NamedTuple):
    """What is known of a data set."""

    dataset: Callable[[], object]  # returns None once it is gone
    name: str
    state: str  # the same without files
    had_value: dict[str, bool]  # by attribute
    attributes: dict[str, bytes]  # hashes


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=5)


class DatasetNames:
    """The `fingerprint` of each data set, a new one as soon as its state changes.

    Files are checked when a data set is new or has changed, not each time: there may be a million
    of them. An attribute that had no value before and cannot be named, as a file opened on first
    use, is no change.

    Args:
        warn: gets each message once.
    """

    def __init__(self, *, data_version: str | None, warn: Callable[[str], None] = _warn) -> None:
        self.data_version, self.warn = data_version, warn
        self._known: dict[int, _Known] = {}
        # By place: the latest one, and how often it was a different one.
        self._latest: dict[tuple[str, type], tuple[_Known, int]] = {}
        self._said: set[str] = set()

    def name_of(self, dataset: object, *, place: str = "", agree: Agree | None = None) -> str:
        """Return the name of `dataset`; warns of a change.

        Args:
            dataset: as the loader has it.
            place: of the loader. A new data set at the same place may be an earlier one, but for
                some attributes.
            agree: returns the fingerprints of all ranks. It is called for each data set that is not
                new; a change counts only if it is the same on all ranks.

        Raises:
            UnnamableError: a new data set has no fingerprint. One that has none any more keeps its
                own.
        """
        known = self._known.get(id(dataset))
        # new, or another object in the place of one that is gone
        if known is None or known.dataset() is not dataset:
            now = self._name(dataset, dataset)
            self._compare(dataset, now, place)
        else:
            now = self._name_again(dataset, known)
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
        # Forget data sets that are gone.
        self._known = {key: each for key, each in self._known.items() if each.dataset() is not None}
        self._known[id(dataset)] = now
        return now.name

    def _compare(self, dataset: object, now: _Known, place: str) -> None:
        """Compare a new data set with the one that was at this place before.

        The first change may be intended, as where a second fit has other data.
        """
        known, times = self._latest.get((place, type(dataset)), (now, 0))
        times += known.name != now.name
        if place:
            # without the data set itself, which would live on
            self._latest[place, type(dataset)] = now._replace(dataset=lambda: None), times
        changed = _changed(known, now)
        if times > 1 and changed and known.name != now.name:
            self._say_changed(dataset, changed, "is made anew again and again and never as it was")

    def _name(self, dataset: object, like: object) -> _Known:
        name, state, attributes = named(like, data_version=self.data_version)
        try:
            reference: Callable[[], object] = weakref.ref(dataset)
        except TypeError:  # a list cannot have weak references
            reference = _Itself(dataset)
        had_value = {key: value is not None for key, value in getattr(like, "__dict__", {}).items()}
        return _Known(reference, name, state, had_value, attributes)

    def _name_again(self, dataset: object, known: _Known) -> _Known:
        try:
            like, state = _state(dataset, known.had_value)
            if state == known.state:
                return known
            return self._name(dataset, like)
        except UnnamableError as error:
            self._say(
                dataset,
                "has something new that cannot be named, and goes on with the cache that it has: "
                f"{error}",
            )
            return known

    def _say_changed(self, dataset: object, changed: Sequence[str], how: str) -> None:
        names = ", ".join(changed) or "what it refers to"
        advice = (
            f"{IGNORED} = {tuple(changed)!r}"
            if changed
            else "__getstate__, without what has changed"
        )
        self._say(
            dataset,
            f"{how} ({names} changed): its samples get another cache, with as much room. If they "
            f"do not depend on that, give {type(dataset).__name__} the attribute {advice}",
        )

    def _say(self, dataset: object, words: str) -> None:
        message = f"{type(dataset).__name__} {words}"
        if message not in self._said:
            self._said.add(message)
            self.warn(message)


def _changed(before: _Known, now: _Known) -> list[str]:
    """Return the attributes whose values changed, or that are new or gone."""
    names = before.attributes.keys() | now.attributes.keys()
    return sorted(name for name in names if before.attributes.get(name) != now.attributes.get(name))


def _state(dataset: object, had_value: dict[str, bool]) -> tuple[object, str]:
    """Return what can be named of a data set, and its state.

    That is the whole data set, or one like it without what had no value before.
    """
    try:
        return dataset, named(dataset, data_version="").state
    except UnnamableError:
        if not hasattr(dataset, "__dict__"):
            raise
        # as it was named before: without what is new, or had no value then
        before = copy.copy(dataset)
        for name in list(vars(before)):
            if name not in had_value:
                del vars(before)[name]
            elif not had_value[name]:
                vars(before)[name] = None
        return before, named(before, data_version="").state


class _Itself:
    """Stands for a weak reference to an object that cannot have one."""

    def __init__(self, dataset: object) -> None:
        self.dataset = dataset

    def __call__(self) -> object:
        return self.dataset
