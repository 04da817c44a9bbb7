"""What is worked out once for each object."""

from __future__ import annotations

import gc
from dataclasses import dataclass

from lightning_topt.basics import once_per_object


@dataclass(frozen=True)
class Subject:
    value: int


def test_equal_objects_are_told_apart_and_forgotten() -> None:
    asked = []

    @once_per_object
    def double(subject: Subject) -> int:
        asked.append(subject.value)
        return 2 * subject.value

    one, other = Subject(1), Subject(1)
    assert [double(one), double(other), double(one)] == [2, 2, 2] and asked == [1, 1]
    assert double.__name__ == "double"
    for value in range(50):  # numbers of objects that are gone are given to new ones
        assert double(Subject(value)) == 2 * value
    asked.clear()
    del one, other
    gc.collect()
    assert double(Subject(7)) == 14 and asked == [7]
