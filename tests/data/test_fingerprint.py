"""Equal for equal data sets in any process, different for whatever changes a sample."""

from __future__ import annotations

import collections
import enum
import os
import random
import re
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lightning_topt.data.cache import fingerprint as fingerprints
from lightning_topt.data.cache import sample_codec
from lightning_topt.data.cache.fingerprint import UnnamableError, fingerprint
from tests.preloaded import preloaded_python

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


def executed(code, namespace):
    exec(compile(code, "<test>", "exec", dont_inherit=True), namespace)
    return namespace


def data_of(module, body):
    namespace = {"__name__": module, "__package__": module.rpartition(".")[0]}
    code = f"class Data:\n    def __getitem__(self, i):\n        {body}"
    return executed(code, namespace)["Data"]()


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture(autouse=True)
def unseen():
    """Forget which modules there are."""

    def forget():
        for name in [name for name in sys.modules if name.partition(".")[0] == "later"]:
            del sys.modules[name]
        for cached in (fingerprints._file, fingerprints.is_library, fingerprints.version):
            cached.cache_clear()

    forget()
    yield forget
    forget()


# ---- state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [{"factor": 3}, {"constant": 6}, {"added": 2}, {"state": (1, 3)}, {"state": [1, 2]}]
)
def test_any_change_of_code_or_state_changes_the_name(change):
    assert fingerprint(made()) == fingerprint(made()) != fingerprint(made(**change))


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


def test_what_is_no_state(tmp_path, monkeypatch):
    """Randomness, folders, and the files that the kernel makes up."""
    assert len({fingerprint(made(torch.Generator().manual_seed(seed))) for seed in (1, 2)}) == 1
    before = fingerprint(made(str(tmp_path)))
    (tmp_path / "new").write_text("x")
    assert fingerprint(made(str(tmp_path))) == before
    assert fingerprint(made("/proc/uptime")) == fingerprint(made("/proc/uptime"))


def test_a_state_that_getstate_leaves_out_and_a_lock_of_the_module():
    assert fingerprint(Lazy()) == fingerprint(Lazy())
    values = {"__name__": "users_module", "lock": threading.Lock()}
    kinds = [type("Data", (), values | {"by": by}) for by in (1, 1, 2)]
    names = [fingerprint([kind, kind()]) for kind in kinds]
    assert names[0] == names[1] != names[2]


class Lazy(Dataset):
    def __init__(self):
        self.lock = threading.Lock()

    def __getstate__(self):
        return {}


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
    with open(os.devnull) as file, pytest.raises(UnnamableError, match="in ignored_by_cache"):
        fingerprint(made(file))


# ---- code ----------------------------------------------------------------------------------------


HELPERS = """
import dataclasses, enum, functools, re
def one(x):
    return x + {added}
@functools.lru_cache
def kept(x):
    return x + {added}
class Scale:
    def __init__(self, by):
        self.by = by
    def __call__(self, x):
        return x * self.by + {added}
scale = Scale(1)
class Compose:
    def __init__(self, *parts):
        self.parts = list(parts)
    def __call__(self, x):
        for part in self.parts:
            x = part(x)
        return x
class Decoder:
    size = {added}
    @staticmethod
    def load(x):
        return x + {added}
    @classmethod
    def make(cls, x):
        return x + cls.size
    @functools.lru_cache
    def kept(self, x):
        return x + {added}
    @functools.singledispatchmethod
    def kind(self, x):
        return x
    @kind.register
    def _(self, x: int):
        return x + {added}
    @functools.cached_property
    def table(self):
        return [{added}] * 9
    @property
    def width(self):
        return {added}
decoder = Decoder()
class Mode(enum.IntEnum):
    WIDE = {added}
class Flags(enum.Flag):
    A = {added}
    B = 8
@dataclasses.dataclass(slots=True)
class Slots:
    by: int = {added}
    def load(self, x):
        return x + self.by
slots = Slots()
digits = re.compile("a{{{added}}}").search
def with_attribute(x):
    return x + with_attribute.by
with_attribute.by = {added}
def outer(by):
    def inner(x):
        return x + by
    return inner
inner = outer({added})
"""
USES = [
    "helpers.one(i)",
    "kept(i)",
    "scale(i)",
    "Scale(2)(i)",
    "Compose(Scale(2), str)(i)",
    "Decoder.load(i)",
    "Decoder.make(i)",
    "decoder.kept(i)",
    "decoder.kind(i)",
    "decoder.table[0]",
    "decoder.width",
    "Mode.WIDE + i",
    "(Flags.A | Flags.B).value",
    "Slots().load(i)",
    "slots.load(i)",
    "digits('aaa')",
    "with_attribute(i)",
    "inner(i)",
]


def using(use, *, added):
    helpers = types.ModuleType("helpers")
    executed(HELPERS.format(added=added), vars(helpers))
    namespace = {"helpers": helpers, **vars(helpers)} | {"__name__": "users_module"}
    return executed(f"class Data:\n    def __getitem__(self, i):\n        return {use}", namespace)[
        "Data"
    ]()


@pytest.mark.parametrize("use", USES)
def test_code_in_other_modules_counts(use):
    names = [fingerprint(using(use, added=added)) for added in (1, 1, 2)]
    assert names[0] == names[1] != names[2]


LATER = {
    "later/__init__.py": "",
    "later/first.py": "from later.second import BY\ndef one(x):\n    return x + BY\n",
    "later/second.py": "BY = 1\n",
    "later/deep/__init__.py": "",
}
IMPORTS = [
    ("users.data", "from later.first import one; return one(i)"),
    ("users.data", "import later.first as f; return f.one(i)"),
    ("users.data", "from later import first; return first.one(i)"),
    ("later.data", "from .first import one; return one(i)"),
    ("later.deep.data", "from .. import first; return first.one(i)"),
]


@pytest.mark.parametrize(("module", "body"), IMPORTS)
@pytest.mark.parametrize("changed", ["later/first.py", "later/second.py"])
def test_modules_that_are_imported_when_they_are_needed_count(
    tmp_path, monkeypatch, unseen, module, body, changed
):
    names = {}
    other = "BY = 2\ndef one(x):\n    return x\n"
    for kind, text in {"as before": "", "again": "", "other": other}.items():
        write(tmp_path / kind, LATER | {changed: LATER[changed] + text})
        with monkeypatch.context() as patch:
            patch.syspath_prepend(tmp_path / kind)
            data = data_of(module, body)
            names[kind] = fingerprint(data)
            assert "later.first" not in sys.modules
            assert data[1] and "later.first" in sys.modules
            assert fingerprint(data) == names[kind]
        unseen()
    assert names["as before"] == names["again"] != names["other"]


def test_installed_packages_go_by_version(tmp_path, monkeypatch, unseen):
    names = []
    for text, number in (("", "1"), ("x = 1", "1"), ("", "2")):
        folder = tmp_path / f"{len(names)}" / "site-packages"
        info = f"Metadata-Version: 2.1\nName: later\nVersion: {number}\n"
        write(folder, LATER | {"later/first.py": text, f"later-{number}.dist-info/METADATA": info})
        with monkeypatch.context() as patch:
            patch.syspath_prepend(folder)
            names.append(fingerprint(data_of("users.data", IMPORTS[0][1])))
        unseen()
    assert names[0] == names[1] != names[2]


def test_another_format_of_samples_is_another_name(monkeypatch):
    before = fingerprint([1])
    monkeypatch.setattr(sample_codec, "FORMAT", sample_codec.FORMAT + 1)
    assert fingerprint([1]) != before


USERS = """
def using():
    return [Data(), {Scale, one, Decoder, kept}, frozenset([Mode.WIDE, (1, "a"), "b", None, 2.0]),
            Flags.A | Flags.B, using]
class Data:
    def __getitem__(self, i):
        from helpers import one
        return [%s]
"""


def test_equal_in_processes_with_other_hash_seeds_and_addresses(tmp_path):
    code = HELPERS.format(added=1) + USERS % ", ".join(USES)
    plain = CODE.format(factor=2, constant=5, added=1)
    write(tmp_path, {"users_module.py": code, "helpers.py": "one = len", "plain_module.py": plain})
    data = "plain_module.Data([{'x', 'y', 'z'}, frozenset('abcdef'), torch.nn.Linear])"
    assert [
        len(names) for names in named_in_other_processes(tmp_path, "users_module.using()", data)
    ] == [1, 1]


def named_in_other_processes(folder, *values):
    """What two processes call each of `values`, which are things of modules in `folder`.

    One has a hash seed of its own, the other the preloaded Python's.
    """
    modules = ", ".join(sorted({value.partition(".")[0] for value in values}))
    names = ", ".join(f"fingerprint({value})" for value in values)
    code = (
        f"import {modules}, torch\nfrom lightning_topt.data.cache.fingerprint import "
        f"fingerprint\nprint({names})"
    )
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}"}
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    jobs = [
        subprocess.Popen(
            [python, "-c", code], env=environment | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE
        )
        for python in (sys.executable, preloaded_python())
    ]
    said = [job.communicate()[0].decode().split() for job in jobs]
    assert [len(each) for each in said] == [len(values)] * 2
    return [set(each) for each in zip(*said, strict=True)]


class Items:
    def __init__(self, **more):
        self.size = 8
        vars(self).update(more)


@pytest.mark.parametrize("of_class", [True, False])
def test_what_is_ignored_is_no_change(of_class):
    ignored = {"ignored_by_cache": ("calls", "seen")}
    cls = type("Ignoring", (Items,), ignored if of_class else {})
    data = cls(calls=0, seen=[], **({} if of_class else ignored))
    before = fingerprint(data)
    data.calls += 1
    data.seen.append(threading.Lock())  # what has no name is ignored too
    assert fingerprint(data) == before
    data.size = 16
    assert fingerprint(data) != before
