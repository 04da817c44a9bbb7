"""Equal for equal data sets in any process, different for whatever changes a sample."""

from __future__ import annotations

import collections
import copy
import enum
import os
import pickle
import random
import re
import threading
from importlib import metadata

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from lightning_topt.data.cache import sample_layout
from lightning_topt.data.cache.cached_dataset import CachedDataset
from lightning_topt.data.cache.determinism import deterministic
from lightning_topt.data.cache.fingerprint import UnnamableError, fingerprint
from lightning_topt.data.cache.fingerprint_code import version
from lightning_topt.data.cache.sample_cache import SampleCache

CODE = """
import functools
FACTOR = {factor}
def scale(x, by=FACTOR):
    return x * {constant}
class Base:
    def load(self, i):
        return scale(i)
class Data(Base):
    tags = {{"a", "b", "c"}}
    def __init__(self, state):
        self.state = state
        self.transform = functools.partial(scale, by=3)
    def __getitem__(self, i):
        return self.load(i) + {added}
"""


def made(state=(1, 2), **changes):
    values = {"factor": 2, "constant": 5, "added": 1} | changes
    namespace = {"__name__": "users_module"}
    exec(CODE.format(**values), namespace)
    return namespace["Data"](state)


def test_equal_code_and_state_have_equal_names():
    assert fingerprint(made()) == fingerprint(made())


@pytest.mark.parametrize(
    "change", [{"factor": 3}, {"constant": 6}, {"added": 2}, {"state": (1, 3)}, {"state": [1, 2]}]
)
def test_any_change_of_code_or_state_changes_the_name(change):
    assert fingerprint(made(**change)) != fingerprint(made())


STATES = [
    1,
    True,
    1.0,
    "1",
    b"1",
    None,
    (1,),
    [1],
    {1},
    {1: 2},
    {1: 3},
    {2: 2},
    np.arange(3),
    np.arange(3.0),
    np.arange(3)[None],
    np.array([None, 1]),
    torch.arange(3),
    torch.arange(3.0),
    torch.arange(6)[::2],
    torch.float32,
    torch.nn.Linear,
    len,
    np.random,
    range(3),
    random.random,
    slice(1),
    re.compile("a").search,
    re.compile("b").search,
    collections.defaultdict(int),
    collections.defaultdict(list),
    {re.compile, int},
    {re.compile, str},
    enum.Enum("One", {"a": 1}).a,
    enum.Enum("One", {"a": 2}).a,
]


def test_different_states_have_different_names():
    names = [fingerprint(made(state)) for state in STATES]
    assert len(set(names)) == len(names)


def test_cycles_and_shared_parts():
    ring = [1]
    ring.append(ring)
    assert fingerprint(made(ring)) == fingerprint(made(ring)) != fingerprint(made([1, [1]]))


def test_randomness_is_no_part_of_it():
    first, second = (torch.Generator().manual_seed(seed) for seed in (1, 2))
    assert fingerprint(made(first)) == fingerprint(made(second))


def test_files_that_are_named_count_with_size_and_time(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    before, version = (
        fingerprint(made([str(path)])),
        fingerprint(made([str(path)]), data_version="1"),
    )
    assert fingerprint(made([path])) != fingerprint(made([tmp_path / "b.txt"]))
    path.write_text("three")
    assert fingerprint(made([str(path)])) != before
    assert (
        fingerprint(made([str(path)]), data_version="1")
        == version
        != fingerprint(made([str(path)]), data_version="2")
    )


NAMED = {
    "bytes": os.fsencode,
    "texts": lambda path: np.array([["none", ""], [path, path]]),
    "objects": lambda path: np.array([path, None]),
    "fields": lambda path: np.array([(1, path)], dtype=[("label", "i8"), ("path", "U300")]),
    "set": lambda path: {path},
}


@pytest.mark.parametrize("form", NAMED.values(), ids=NAMED)
def test_files_count_in_whatever_way_they_are_named(tmp_path, form):
    path = tmp_path / "a"
    path.write_text("one")
    state = form(str(path))
    before, version = fingerprint(made(state)), fingerprint(made(state), data_version="1")
    path.write_text("three")
    assert fingerprint(made(state)) != before
    assert fingerprint(made(state), data_version="1") == version


def test_what_has_no_canonical_form_is_an_error():
    with pytest.raises(UnnamableError, match="lock"):
        fingerprint(made(threading.Lock()))
    with open(os.devnull) as file, pytest.raises(UnnamableError):
        fingerprint(made(file))


class Lazy(Dataset):
    def __init__(self):
        self.lock = threading.Lock()

    def __getstate__(self):
        return {}


def test_what_getstate_leaves_out_does_not_count():
    assert fingerprint(Lazy()) == fingerprint(Lazy())
    assert fingerprint(TensorDataset(torch.ones(3))) != fingerprint(TensorDataset(torch.zeros(3)))


def test_a_lock_that_is_no_state_goes_by_name():
    values = {
        "__name__": "users_module",
        "lock": threading.Lock(),
        "__getitem__": lambda self, index: self.lock,
    }
    kinds = [type("Data", (), values | {"by": by}) for by in (1, 1, 2)]
    names = [fingerprint([kind, kind()]) for kind in kinds]
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize(
    "made_of", [lambda cls: cls, lambda cls: [cls], lambda cls: [cls, cls([1])]]
)
def test_a_class_in_the_state_counts_with_its_code(made_of):
    names = [fingerprint([made_of(type(made(added=added)))]) for added in (1, 1, 2)]
    assert names[0] == names[1] != names[2]


SHARED = [0.5]


class Normalized(Dataset):
    def __init__(self, mean=SHARED, std=(0.2, 0.3)):
        self.mean, self.std, self.again = mean, std, [mean, std]

    def __getitem__(self, index):
        return index - SHARED[0]


def test_a_copy_that_shares_nothing_is_equal():
    data = Normalized()
    assert fingerprint(pickle.loads(pickle.dumps(data))) == fingerprint(data)
    data.again = [[0.5], (0.2, 0.3)]
    assert fingerprint(data) == fingerprint(Normalized())


TABLE = """
import functools
class Data:
    def __init__(self, by):
        self.by = by
    @functools.cached_property
    def table(self):
        return [object(), self.by * {factor}]
    def __getitem__(self, i):
        return self.table[1] + i
"""


def test_a_cached_property_counts_as_its_code():
    def data(by, *, factor):
        namespace = {"__name__": "users_module"}
        exec(TABLE.format(factor=factor), namespace)
        return namespace["Data"](by)

    used = data(1, factor=1)
    before = fingerprint(used)
    assert used[1] == 2 and "table" in vars(used)
    assert fingerprint(used) == before == fingerprint(data(1, factor=1))
    assert len({before, fingerprint(data(2, factor=1)), fingerprint(data(1, factor=2))}) == 3


class Marked(Dataset):
    def __init__(self):
        self.pattern = re.compile("a+")

    def __len__(self):
        return 3

    @deterministic
    def load(self, index):
        return index

    def __getitem__(self, index):
        return self.load(index)


class WithoutState(Marked):
    def __init__(self):
        pass


@pytest.mark.parametrize("kind", [Marked, WithoutState])
def test_a_cache_that_is_in_use_changes_nothing(tmp_path, kind):
    data = kind()
    before = fingerprint(data)
    copy.deepcopy(data)  # Python notes things on the class
    dataset = CachedDataset(
        data,
        SampleCache(tmp_path, fingerprint=before, num_items=3, memory_bytes=4096, disk_bytes=0),
    )
    assert dataset[1] == 1
    assert fingerprint(data) == before == fingerprint(kind())


def test_folders_do_not_count(tmp_path):
    before = fingerprint(made(str(tmp_path)))
    (tmp_path / "new").write_text("x")
    assert fingerprint(made(str(tmp_path))) == before


def test_files_that_the_kernel_makes_up_do_not_count(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("x")
    names, look = [], os.stat
    for time in (1, 2):
        os.utime(tmp_path / "a", ns=(time, time))
        monkeypatch.setattr(os, "stat", lambda path, **options: look(tmp_path / "a", **options))
        names.append(
            (fingerprint(["/proc/uptime", b"/sys/power/state"]), fingerprint(["/data/uptime"]))
        )
        monkeypatch.undo()
    assert names[0][0] == names[1][0] and names[0][1] != names[1][1]


def test_another_version_of_a_library_is_another_name(monkeypatch):
    before = fingerprint(made(torch.nn.Linear))
    version.cache_clear()
    monkeypatch.setattr(metadata, "version", lambda name: "0.0")
    assert fingerprint(made(torch.nn.Linear)) != before
    version.cache_clear()


def test_another_format_of_samples_is_another_name(monkeypatch):
    before = fingerprint([1])
    monkeypatch.setattr(sample_layout, "FORMAT", sample_layout.FORMAT + 1)
    assert fingerprint([1]) != before
