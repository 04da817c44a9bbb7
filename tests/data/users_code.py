"""Code as users write it, made anew as often as a test likes, and modules that nobody has seen
before.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_topt.data.cache import fingerprint_code
from tests.preloaded import preloaded_python

HELPERS = """
import collections, dataclasses, enum, functools, re
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
class Wider(Scale):
    pass
scale = Scale(1)
class Compose:
    def __init__(self, *parts):
        self.parts = list(parts)
    def __call__(self, x):
        for part in self.parts:
            x = part(x)
        return x
composed = Compose(functools.partial(one), str, int)
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
    plus = functools.partialmethod(lambda self, by, x: x + by, {added})
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
kinds = [Decoder]
decoder = Decoder()
@functools.singledispatch
def kind(x):
    return x
@kind.register
def _(x: int):
    return x + {added}
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
counts = collections.defaultdict(lambda: {added})
digits = re.compile("a{{{added}}}").search
def with_attribute(x):
    return x + with_attribute.by
with_attribute.by = {added}
def outer(by):
    def inner(x):
        return x + by
    return inner
inner = outer({added})
def caught(x):
    try:
        return x + {added}
    except ValueError:
        return x
"""
USES = [
    "helpers.one(i)",
    "[one(x) for x in range(i)]",
    "(lambda: one(i))()",
    "kept(i)",
    "scale(i)",
    "Scale(2)(i)",
    "Wider(2)(i)",
    "composed(i)",
    "Compose(Scale(2), str)(i)",
    "helpers.Scale(2)(i)",
    "[scale, Scale(2)][1](i)",
    "Decoder.load(i)",
    "Decoder.make(i)",
    "kinds[0].load(i)",
    "decoder.kept(i)",
    "decoder.plus(i)",
    "decoder.kind(i)",
    "decoder.table[0]",
    "decoder.width",
    "kind(i)",
    "Mode.WIDE + i",
    "(Flags.A | Flags.B).value",
    "Slots().load(i)",
    "slots.load(i)",
    "counts.copy()['none']",
    "digits('aaa')",
    "with_attribute(i)",
    "inner(i)",
    "caught(i)",
]


def executed(code, namespace):
    exec(compile(code, "<test>", "exec", dont_inherit=True), namespace)
    return namespace


def data_of(module, body):
    namespace = {"__name__": module, "__package__": module.rpartition(".")[0]}
    return executed(f"class Data:\n    def __getitem__(self, i):\n        {body}", namespace)[
        "Data"
    ]()


@pytest.fixture
def unseen(monkeypatch):
    """Forgets which modules there are."""

    def forget():
        for name in [
            name for name in sys.modules if name.partition(".")[0] in ("later", "installed")
        ]:
            del sys.modules[name]
        fingerprint_code._LATER.clear()
        for cached in (
            fingerprint_code.is_standard,
            fingerprint_code.is_library,
            fingerprint_code.version,
            fingerprint_code._owners,
            fingerprint_code._installed,
        ):
            cached.cache_clear()

    forget()
    yield forget
    forget()


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


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
