"""Whatever code determines a sample is in the fingerprint, and nothing that comes and goes while
samples are drawn.
"""

from __future__ import annotations

import sys
import types

import pytest
import torch

from lightning_topt.data.cache.fingerprint import fingerprint
from tests.data.test_fingerprint import CODE
from tests.data.users_code import (
    HELPERS,
    USES,
    data_of,
    executed,
    named_in_other_processes,
    unseen,
    write,
)

__all__ = ["unseen"]  # a fixture

IMPORTS = [
    ("users.data", "from helpers import one; return one(i)"),
    ("users.data", "from helpers import one as two; return two(i)"),
    ("users.data", "import users.helpers as short; return short.one(i)"),
    ("users.data", "from users import helpers; return helpers.one(i)"),
    ("users.data", "from . import helpers; return helpers.one(i)"),
    ("users.data", "from .helpers import one; return one(i)"),
    ("users.sets.data", "from .. import helpers; return helpers.kinds[0].load(i)"),
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


@pytest.mark.parametrize(("module", "body"), IMPORTS)
def test_code_that_is_imported_when_it_is_needed_counts(monkeypatch, module, body):
    names = []
    for added in (1, 1, 2):
        users, helpers = types.ModuleType("users"), types.ModuleType("helpers")
        users.__path__, users.helpers = [], helpers
        executed(HELPERS.format(added=added), vars(helpers))
        for name, value in {"users": users, "users.helpers": helpers, "helpers": helpers}.items():
            monkeypatch.setitem(sys.modules, name, value)
        data = data_of(module, body)
        assert data[1] == data[1] >= 1 + added
        names.append(fingerprint(data))
    assert names[0] == names[1] != names[2]


LATER = {
    "later/__init__.py": "",
    "later/first.py": "from later.second import BY\ndef one(x):\n    return x + BY\n",
}
LATER["later/second.py"] = "BY = 1\n"


@pytest.mark.parametrize(
    "body",
    ["from later.first import one; return one(i)", "import later.first as f; return f.one(i)"],
)
@pytest.mark.parametrize("changed", sorted(LATER))
def test_modules_that_are_not_imported_yet_count_with_all_they_import(
    tmp_path, monkeypatch, unseen, body, changed
):
    names = {}
    for kind, text in {
        "as before": "",
        "again": "# a remark\n",
        "other": "BY = 2\ndef one(x):\n    return x\n",
    }.items():
        write(tmp_path / kind, LATER | {changed: LATER[changed] + text})
        with monkeypatch.context() as patch:
            patch.syspath_prepend(tmp_path / kind)
            data = data_of("users.data", body)
            names[kind] = fingerprint(data)
            assert "later.first" not in sys.modules
            assert data[1] and "later.first" in sys.modules
            assert fingerprint(data) == names[kind]
        unseen()
    assert names["as before"] == names["again"]
    assert (names["other"] != names["again"]) == (
        changed != "later/__init__.py" or body.startswith("import")
    )


def test_imports_that_will_fail_are_left_to_fail(tmp_path, monkeypatch, unseen):
    write(tmp_path, {"later.py": "def"})
    monkeypatch.syspath_prepend(tmp_path)
    bodies = [
        "import later.none",
        "from ....too.far import one",
        "import nowhere",
        "from nowhere import one",
        "import later",
    ]
    names = [fingerprint(data_of("users.data", body)) for body in bodies]
    assert len(set(names)) == len(names) and names == [
        fingerprint(data_of("users.data", body)) for body in bodies
    ]


MODULE = """
import torch
class Shift(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("by", torch.ones(size))
    def forward(self, x):
        return x + self.by * {factor}
"""


def test_modules_of_torch_count_with_code_and_weights():
    def name(size, *, factor):
        shift = executed(MODULE.format(factor=factor), {"__name__": "users_module"})["Shift"](size)
        return fingerprint([torch.nn.Sequential(torch.nn.Identity(), shift)])

    assert name(1, factor=1) == name(1, factor=1)
    assert len({name(1, factor=1), name(2, factor=1), name(1, factor=2)}) == 3


def test_a_long_way_through_the_code():
    functions = "".join(f"def f{i}(x):\n    return f{i + 1}(x)\n" for i in range(3000))
    names = []
    for last in (1, 1, 2):
        namespace = executed(
            f"{functions}def f3000(x):\n    return {last}", {"__name__": "users_module"}
        )
        names.append(fingerprint([namespace["f0"]]))
    assert names[0] == names[1] != names[2]


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
