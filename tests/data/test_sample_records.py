"""Dataclasses and NamedTuples come back with what they hold, and their code does not run again."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import pytest

from lightning_topt.data.cache import sample_codec
from lightning_topt.data.cache.sample_codec import decode, encode
from lightning_topt.data.cache.sample_layout import UnsupportedSample
from tests.data.test_sample_codec import entry_of, kept


@dataclasses.dataclass
class Doubled:
    x: int
    y: Any = None
    total: int = dataclasses.field(init=False)

    def __post_init__(self):
        self.x *= 2
        self.total = self.x + 1


@dataclasses.dataclass
class Scaled:
    x: float
    factor: dataclasses.InitVar[float]

    def __post_init__(self, factor):
        self.x *= factor


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: int

    @functools.cached_property
    def squared(self):
        return self.x**2


@dataclasses.dataclass(slots=True)
class Slotted:
    x: int
    y: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    x: int
    y: int
    z: int = 0

    def __post_init__(self):
        object.__setattr__(self, "z", self.z + 1)


class OpenSlotted(Slotted):
    """Has a __dict__ beside its slots."""


class Counted(NamedTuple("Counted", [("x", int), ("y", int)])):
    __slots__ = ()

    def __new__(cls, x, y=0):
        return super().__new__(cls, x + 1, y)


class Noted(NamedTuple("Noted", [("x", int)])):
    """Has a __dict__ beside its items."""


class Pair(NamedTuple):
    x: Any
    y: Any


def with_attributes(value, **attributes):
    for name, item in attributes.items():
        object.__setattr__(value, name, item)
    return value


def without(value, name):
    object.__delattr__(value, name)
    return value


def state_of(value):
    slots = {name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())}
    return getattr(value, "__dict__", {}) | {
        name: getattr(value, name) for name in slots if hasattr(value, name)
    }


def touched(value):
    assert value.squared == 9
    return value


RECORDS = {
    "constructor": Doubled(2),
    "nested": Doubled(2, y=[Doubled(1)]),
    "init_variable": Scaled(2.0, 4.0),
    "frozen": Frozen(3),
    "cached_property": touched(Frozen(3)),
    "slots": Slotted(1, 2),
    "frozen_slots": FrozenSlotted(1, 2, 3),
    "slots_and_dict": with_attributes(OpenSlotted(1, 2), note=b"n"),
    "attribute": with_attributes(Doubled(2), extra=7),
    "missing": without(Doubled(2), "total"),
    "missing_slot": without(Slotted(1, 2), "y"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_dataclasses_come_back_with_all_they_hold_and_run_no_code(name):
    value = RECORDS[name]
    found = kept([value])[0]
    assert type(found) is type(value) and state_of(found) == state_of(value)
    assert entry_of([found]) == entry_of([value])


def test_named_tuples_come_back_as_they_are():
    value = Counted(1, 2)
    assert value == (2, 2)
    found = kept([value, Pair(value, None)])
    assert found == [value, Pair(value, None)] and type(found[0]) is type(found[1].x) is Counted
    with pytest.raises(UnsupportedSample, match="extra"):
        encode(with_attributes(Noted(1), extra=3))


def test_a_class_that_has_changed_is_not_made_of_what_was_stored():
    def make(fields):
        return collections.namedtuple("Changing", fields, module=__name__)

    entry = entry_of(make(["a", "b"])(1, 2))
    sample_codec.register_sample_type(make(["a", "c"]))
    with pytest.raises(UnsupportedSample, match="fields"):
        decode(entry)
    old, new = (dataclasses.make_dataclass("Changed", fields) for fields in (["a"], ["a", "b"]))
    entry = entry_of(old(1))
    sample_codec.register_sample_type(new)
    with pytest.raises(UnsupportedSample, match="fields"):
        decode(entry)
    with pytest.raises(ValueError, match="NamedTuple or dataclass"):
        sample_codec.register_sample_type(int)
