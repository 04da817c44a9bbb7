"""Data sets that are named again after something has happened to them."""

from __future__ import annotations

import threading
import warnings

import pytest

from lightning_topt.data.cache.dataset_names import DatasetNames
from lightning_topt.data.cache.fingerprint import UnnamableError, fingerprint


class Items:
    def __init__(self, size=8, **more):
        self.size, self.opened = size, None
        vars(self).update(more)

    def __getitem__(self, index):
        return [index] * self.size


@pytest.fixture
def names():
    return DatasetNames(data_version=None)


@pytest.fixture
def unwarned():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_the_name_is_the_fingerprint_and_stays(names, unwarned):
    data = Items()
    assert [names.name_of(data) for _ in range(3)] == [fingerprint(data)] * 3


def test_a_change_is_another_name(names):
    data = Items()
    before = names.name_of(data)
    data.size = 16
    with pytest.warns(UserWarning, match="Items is not as it was"):
        after = names.name_of(data)
    assert after == names.name_of(data) == fingerprint(Items(16)) != before
    data.size = 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it has said so
        assert names.name_of(data) == before


class Counting(Items):
    """Counts how often it is read."""

    def __init__(self, **more):
        super().__init__(calls=0, seen=[], **more)

    def read(self):
        self.calls += 1
        self.seen.append(self.calls)


def test_it_is_said_once_which_attributes_change_and_what_to_do(names):
    data = Counting()
    names.name_of(data)
    with pytest.warns(
        UserWarning, match=r"Counting is not as it was .*\(calls, seen changed\)"
    ) as caught:
        for _ in range(5):
            data.read()
            names.name_of(data)
    assert len(caught) == 1 and "ignored_by_cache = ('calls', 'seen')" in str(caught[0].message)
    data.size = 16
    with pytest.warns(UserWarning, match=r"\(size changed\)"):
        names.name_of(data)


@pytest.mark.parametrize("of_class", [True, False])
def test_what_is_ignored_is_no_change(names, unwarned, of_class):
    ignored = ("calls", "seen")
    cls = type("Ignoring", (Counting,), {"ignored_by_cache": ignored} if of_class else {})
    data = cls() if of_class else cls(ignored_by_cache=ignored)
    before = names.name_of(data)
    data.read()
    data.seen.append(threading.Lock())  # what has no name is ignored too
    assert names.name_of(data) == before == fingerprint(data)
    data.size = 16
    assert fingerprint(data) != before


def test_one_that_is_made_anew_in_each_epoch_says_what_is_never_the_same(names):
    def epoch(number, place="train"):
        return names.name_of(Items(made_at=number, paths=["a", "b"]), place=place)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epoch(0), epoch(1)  # a second fit may have other data
        epoch(2, "validation"), epoch(3, "test")
    with pytest.warns(
        UserWarning, match=r"Items is made anew .*\(made_at changed\).*ignored_by_cache"
    ) as caught:
        for number in range(4, 8):
            epoch(number)
    assert len(caught) == 1


@pytest.mark.parametrize("name", ["opened", "made"])
def test_what_is_opened_on_first_use_is_no_change(names, name):
    data = Items()
    before = names.name_of(data)
    setattr(data, name, threading.Lock())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert names.name_of(data) == before
    data.size = 16
    with pytest.warns(UserWarning, match="not as it was"):
        assert names.name_of(data) == fingerprint(Items(16))


def test_what_became_unnamable_keeps_its_name_with_a_warning(names):
    data = Items(inner=Items())
    before = names.name_of(data)
    data.inner.opened = threading.Lock()
    with pytest.warns(UserWarning, match="cannot be named"):
        assert names.name_of(data) == before
    with pytest.raises(UnnamableError):
        names.name_of(Items(threading.Lock()))


def test_files_are_looked_at_when_something_else_has_changed(names, tmp_path):
    file = tmp_path / "file"
    file.write_text("1")
    data = Items(path=str(file))
    before = names.name_of(data)
    file.write_text("22")
    assert names.name_of(data) == before != fingerprint(data)
    data.size = 16
    with pytest.warns(UserWarning):
        assert names.name_of(data) == fingerprint(data)


def test_ranks_that_disagree_stay(names):
    data, asked = Items(), []

    def agree(name):
        asked.append(name)
        return [name, other]

    other = before = names.name_of(data, agree=agree)
    assert not asked and names.name_of(data, agree=agree) == before
    data.size = 16
    with pytest.warns(UserWarning) as caught:
        assert names.name_of(data, agree=agree) == before
    assert "another one on each rank" in str(caught[-1].message)
    other = fingerprint(data)
    with pytest.warns(UserWarning, match="not as it was"):
        assert names.name_of(data, agree=agree) == other
    assert asked == [before, other, other]
