"""Equal for equal data sets in any process, different for whatever changes a sample."""

from __future__ import annotations

import copy
import os
import random
import re
import subprocess
import sys
import threading
import types
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from lightning_topt.data.cache.cached_dataset import CachedDataset
from lightning_topt.data.cache.determinism import deterministic
from lightning_topt.data.cache.fingerprint import UnnamableError, fingerprint
from lightning_topt.data.cache.fingerprint import _version as version
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


@pytest.mark.parametrize("change", [{"factor": 3}, {"constant": 6}, {"added": 2}, {"state": (1, 3)}, {"state": [1, 2]}])
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


def test_equal_in_another_process_with_another_hash_seed(tmp_path):
    (tmp_path / "users_module.py").write_text(CODE.format(factor=2, constant=5, added=1))
    code = (
        "import users_module, torch\nfrom lightning_topt.data.cache.fingerprint import fingerprint\n"
        "print(fingerprint(users_module.Data([{'x', 'y', 'z'}, frozenset('abcdef'), torch.nn.Linear])))"
    )
    names = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
        job = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        names.add(job.stdout.strip())
    assert len(names) == 1


def test_files_that_are_named_count_with_size_and_time(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    before, version = fingerprint(made([str(path)])), fingerprint(made([str(path)]), data_version="1")
    assert fingerprint(made([path])) != fingerprint(made([tmp_path / "b.txt"]))
    path.write_text("three")
    assert fingerprint(made([str(path)])) != before
    assert (
        fingerprint(made([str(path)]), data_version="1") == version != fingerprint(made([str(path)]), data_version="2")
    )


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


HELPERS = """
import functools
def one(x):
    return x + {added}
@functools.lru_cache
def kept(x):
    return x + {added}
class Scale:
    def __init__(self, by):
        self.by = by
    def __call__(self, x):
        return x * self.by
scale = Scale({added})
"""
USES = ["helpers.one(i)", "[one(x) for x in range(i)]", "(lambda: one(i))()", "kept(i)", "scale(i)"]


def using(use, *, added):
    helpers = types.ModuleType("helpers")
    exec(HELPERS.format(added=added), vars(helpers))
    namespace = {"__name__": "users_module", "helpers": helpers, **vars(helpers)} | {"__name__": "users_module"}
    exec(f"class Data:\n    def __getitem__(self, i):\n        return {use}", namespace)
    return namespace["Data"]()


@pytest.mark.parametrize("use", USES)
def test_code_in_other_modules_counts(use):
    names = [fingerprint(using(use, added=added)) for added in (1, 1, 2)]
    assert names[0] == names[1] != names[2]


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
        data, SampleCache(tmp_path, fingerprint=before, num_items=3, memory_bytes=4096, disk_bytes=0)
    )
    assert dataset[1] == 1
    assert fingerprint(data) == before == fingerprint(kind())


def test_folders_do_not_count(tmp_path):
    before = fingerprint(made(str(tmp_path)))
    (tmp_path / "new").write_text("x")
    assert fingerprint(made(str(tmp_path))) == before


def test_another_version_of_a_library_is_another_name(monkeypatch):
    before = fingerprint(made(torch.nn.Linear))
    version.cache_clear()
    monkeypatch.setattr(metadata, "version", lambda name: "0.0")
    assert fingerprint(made(torch.nn.Linear)) != before
    version.cache_clear()
