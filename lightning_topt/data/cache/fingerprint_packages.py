"""The versions of installed packages stand in a `fingerprint` for code that is not followed.

Python and the libraries of `KNOWN` go by their versions. Other installed packages go by version,
and checksums and sizes of all their files, as their installer listed them. All else is the user's
own: it has no version.
"""

from __future__ import annotations

import csv
import functools
import importlib.util
import os
import re
import sys
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

KNOWN = {
    "torch",
    "torchvision",
    "numpy",
    "PIL",
    "lightning",
    "pytorch_lightning",
    "fsspec",
    "lightning_topt",
}
_STDLIB = os.path.dirname(os.path.realpath(os.__file__)) + os.sep


class _Installed(NamedTuple):
    """An `_Installed` holds what tells one installation of a package from another, and its
    files.
    """

    version: str
    files: frozenset[str]


def find_spec(name: str) -> ModuleSpec | None:
    """Return where a module is. Neither it nor the packages above it are imported."""
    above = name.rpartition(".")[0]
    try:
        if not above:
            return importlib.util.find_spec(name)
        package = sys.modules.get(above) or find_spec(above)
        path = getattr(package, "__path__", None) or getattr(
            package, "submodule_search_locations", None
        )
        return PathFinder.find_spec(name, list(path)) if path else None
    except Exception:  # anybody may have put a finder there
        return None


def home(value: Any) -> str:
    """Return the name of the module that something is from. Functions written in C may not say it:
    then, of a library that has it.
    """
    name = getattr(value, "__module__", None)
    if isinstance(name, str) and not isinstance(value, np.ufunc):  # all of them say numpy
        return "__main__" if name == "__mp_main__" else name  # as spawned processes call it
    own = getattr(value, "__name__", "")
    holders = [
        key
        for key, module in list(sys.modules.items())
        if getattr(module, "__dict__", {}).get(own) is value
    ]
    # others import it from there
    origin = sorted(filter(is_library, holders), key=lambda key: not _is_extension(key))
    return origin[0] if origin else ""


@functools.lru_cache(maxsize=4096)
def is_standard(module: str | None) -> bool:
    """Return whether a module is Python's or one of `KNOWN`."""
    top, file = _top(module), _file(module or "")
    # a user's folder may be called "code"
    if top in sys.stdlib_module_names and file.endswith(".py"):
        return os.path.realpath(file).startswith(_STDLIB) and not _is_installed(file)
    return top in sys.stdlib_module_names or top in KNOWN


@functools.lru_cache(maxsize=4096)
def is_library(module: str | None) -> bool:
    """Return whether `version` stands for all code of a module, which is not the user's then."""
    file = _file(module or "")
    return is_standard(module) or (_is_installed(file) and file in _installed(_top(module)).files)


@functools.lru_cache(maxsize=4096)
def version(module: str | None) -> str:
    """Return what stands for code that is not followed: another version may decode or resize in
    another way. '' if it is followed.
    """
    top = _top(module)
    if not is_library(module):
        return (
            xxhash.xxh3_128_hexdigest(Path(_file(module or "")).read_bytes())
            if _is_extension(module or "")
            else ""
        )
    if not is_standard(module):
        return _installed(top).version
    if top in sys.stdlib_module_names:
        return "" if top == "builtins" else f"{sys.version_info.major}.{sys.version_info.minor}"
    try:
        return metadata.version({"PIL": "pillow"}.get(top, top))
    except metadata.PackageNotFoundError:  # another build of it, or a source tree on the path
        versions = [each.version for each in _owners().get(top, ())]
        return " ".join([str(getattr(sys.modules.get(top), "__version__", "")), *versions])


def _top(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _file(module: str) -> str:
    """Return the file of a module, imported or not; that of the package at the top where it has
    none, as parts of what is written in C.
    """
    loaded = sys.modules.get(module)
    spec = find_spec(module) if loaded is None and module else None
    file = getattr(loaded, "__file__", None) or (
        spec.origin if spec is not None and spec.has_location else None
    )
    if not isinstance(file, str):
        return _file(_top(module)) if "." in module else ""
    return os.path.abspath(file)


def _is_extension(module: str) -> bool:
    return _file(module).endswith(tuple(EXTENSION_SUFFIXES))


def _is_installed(file: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


@functools.lru_cache(maxsize=1)
def _owners() -> dict[str, list[metadata.Distribution]]:
    """Distributions by the packages at the top whose files they list."""
    owners: dict[str, list[metadata.Distribution]] = {}
    for distribution in metadata.distributions():
        for top in sorted(
            set(re.findall(r"^([^\W.]+)[/.]", distribution.read_text("RECORD") or "", re.MULTILINE))
        ):
            owners.setdefault(top, []).append(distribution)
    return owners


@functools.lru_cache(maxsize=256)
def _installed(top: str) -> _Installed:
    """Return what is installed of all distributions that own `top`. Sizes are of the files as they
    are: somebody may have edited one in place.
    """
    digest, found = xxhash.xxh3_128(), set()
    for owner in sorted(_owners().get(top, ()), key=lambda each: each.metadata["Name"]):
        digest.update(f"{owner.metadata['Name']} {owner.version}\n".encode())
        base = str(owner.locate_file(""))
        for path, checksum in _listed(owner):
            file = os.path.abspath(os.path.join(base, path))
            found.add(file)
            digest.update(
                f"{path} {checksum} "
                f"{os.stat(file).st_size if os.path.exists(file) else None}\n".encode()
            )
    return _Installed(digest.hexdigest(), frozenset(found))


def _listed(distribution: metadata.Distribution) -> list[tuple[str, str]]:
    """Files of a distribution with their checksums, but for those that tell how and for whom it was
    installed.
    """
    rows = csv.reader((distribution.read_text("RECORD") or "").splitlines())
    files = sorted((row[0], row[1]) for row in rows if len(row) > 1 and row[1])
    return [file for file in files if not re.search(r"^(\.\.|/)|\.dist-info/|\.pyc$", file[0])]
