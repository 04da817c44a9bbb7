"""Installed packages go by what is installed; what is the user's own does not."""

from __future__ import annotations

import sys
from importlib.machinery import EXTENSION_SUFFIXES

import pytest

from lightning_topt.data.cache import fingerprint_code
from lightning_topt.data.cache.fingerprint import fingerprint
from tests.data.users_code import data_of, unseen, write

__all__ = ["unseen"]  # a fixture

CODE = "def decode(x):\n    return x\nclass Resize:\n    def __call__(self, x):\n        return x\n"


def install(folder, *, version="1.0", code=CODE, checksum="sha256=a", listed=True):
    record = f"installed/__init__.py,{checksum},{len(code)}\n"
    record += "installed-1.dist-info/RECORD,,\n../bin/run,sha256=b,1\n"
    metadata = f"Metadata-Version: 2.1\nName: installed-package\nVersion: {version}\n"
    write(folder, {"installed/__init__.py": code, "installed-1.dist-info/METADATA": metadata})
    if listed:
        write(folder, {"installed-1.dist-info/RECORD": record})


INSTALLED = [
    "import installed; return installed.decode(i)",
    "from installed import Resize; return Resize()(i)",
]


def name_installed(folder, monkeypatch, unseen, body, *, imported, **changes):
    install(folder / "site-packages", **changes)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(folder / "site-packages")
        if imported:
            __import__("installed")
        name = fingerprint(data_of("users.data", body))
    unseen()
    return name


@pytest.mark.parametrize("body", INSTALLED)
def test_installed_packages_go_by_version_and_what_is_installed(
    tmp_path, monkeypatch, unseen, body
):
    changes = [
        {},
        {"version": "1.1"},
        {"checksum": "sha256=c"},
        {"code": f"{CODE}# edited in place"},
    ]
    names = [
        [
            name_installed(
                tmp_path / f"{number} {imported}",
                monkeypatch,
                unseen,
                body,
                imported=imported,
                **change,
            )
            for imported in (False, True)
        ]
        for number, change in enumerate(changes)
    ]
    assert all(before == after for before, after in names)
    assert len({before for before, _ in names}) == len(changes)


@pytest.mark.parametrize("body", INSTALLED)
def test_a_package_without_a_list_of_its_files_is_followed(tmp_path, monkeypatch, unseen, body):
    codes = [CODE, f"{CODE}# a remark", CODE.replace("return x", "return x + 1")]
    names = [
        name_installed(
            tmp_path / str(i), monkeypatch, unseen, body, imported=True, listed=False, code=code
        )
        for i, code in enumerate(codes)
    ]
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize(
    "name", ["special.expit", "ndimage._nd_image.zoom_shift", "special.cython_special.expit"]
)
def test_functions_written_in_c_count_with_their_version(monkeypatch, unseen, name):
    module, _, function = f"scipy.{name}".rpartition(".")
    value = getattr(pytest.importorskip(module), function)
    before, known = fingerprint([value]), fingerprint_code._installed
    fingerprint_code.version.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(
            fingerprint_code, "_installed", lambda top: known(top)._replace(version="another one")
        )
        assert fingerprint([value]) != before


def test_extensions_of_the_user_count_with_their_content(tmp_path, monkeypatch, unseen):
    monkeypatch.syspath_prepend(tmp_path)
    file = f"installed{EXTENSION_SUFFIXES[0]}"
    versions = []
    for content in ("one", "one", "two"):
        write(tmp_path, {file: content})
        versions.append(
            fingerprint(data_of("users.data", "import installed; return installed.decode(i)"))
        )
        unseen()
    assert versions[0] == versions[1] != versions[2] and not fingerprint_code.is_library(
        "installed"
    )


def test_a_module_of_the_user_may_have_a_name_of_pythons(tmp_path, monkeypatch, unseen):
    assert (
        fingerprint_code.is_library("graphlib")
        and fingerprint_code.is_library("math")
        and fingerprint_code.is_library("os.path")
    )
    unseen()
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, {"graphlib.py": ""})
    monkeypatch.delitem(sys.modules, "graphlib", raising=False)
    assert not fingerprint_code.is_library("graphlib")
