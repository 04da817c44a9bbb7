"""Data sets that are named again after something has happened to them."""

from __future__ import annotations

import gc
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
    with pytest.warns(UserWarning):
        assert names.name_of(data) == before


def test_what_had_no_value_may_be_a_change(names):
    data = Items()
    before = names.name_of(data)
    data.opened = "a transform"
    with pytest.warns(UserWarning):
        assert names.name_of(data) != before


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


def test_what_has_got_a_value_since_counts_when_something_is_opened(names):
    data = Items()
    names.name_of(data)
    data.opened = "a transform"
    with pytest.warns(UserWarning, match="not as it was"):
        name = names.name_of(data)
    data.made = threading.Lock()
    assert names.name_of(data) == name


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


def test_without_looking_at_files(tmp_path):
    names = DatasetNames(data_version="1")
    assert names.name_of(Items(path=str(tmp_path))) == fingerprint(Items(path=str(tmp_path)), data_version="1")


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


def test_data_sets_that_are_gone_are_forgotten(names, unwarned):
    for size in range(5):
        names.name_of(Items(size))
        gc.collect()
    plain = [1, 2, 3]
    assert names.name_of(plain) == names.name_of(plain) == fingerprint(plain)
    names.name_of(Items())
    assert len(names._known) <= 3
