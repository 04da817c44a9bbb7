"""What a `fingerprint` takes of code: its instructions, and what they refer to by name.

The user's own code is followed wherever it leads. A module that a function imports when it runs is
followed without importing it, for the function may never be called. Other code goes by version:

    Python and the libraries of `KNOWN`     their versions
    other installed packages                version, checksums and sizes of all files, as their
                                            installer listed them
    all else                                is the user's own, and has no version

It is a subject of its own beside `fingerprint`, which hashes the parts listed here.
"""

from __future__ import annotations

import csv
import dis
import functools
import importlib.util
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

KNOWN = {  # libraries whose version stands for their code, however they are installed
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
# Of a class: what Python keeps there (some only after the first use), and where its text was.
_NO_CODE = {
    "__dict__",
    "__weakref__",
    "__doc__",
    "__module__",
    "__abstractmethods__",
    "_abc_impl",
    "__slotnames__",
    "__firstlineno__",
    "__static_attributes__",
    "__annotations_cache__",
    "_value2member_map_",
    "__pydantic_core_schema__",  # with ids
    "__pydantic_serializer__",
    "__pydantic_validator__",
}
_IMPORT = dis.opmap["IMPORT_NAME"]
_LATER: set[str] = set()  # modules that were not imported when they were first met


class Words(NamedTuple):
    """Words to be hashed as they are."""

    words: tuple[str | bytes, ...]


class Own(NamedTuple):
    """A value without which the code would be different."""

    value: object


class Referred(NamedTuple):
    """A value that the code finds under a name.

    It is no part of the data set's state: a lock or a connection goes by name.
    """

    value: object


class LaterModule(NamedTuple):
    """A module that is not imported yet."""

    name: str


Parts = Iterator[Words | Own | Referred | LaterModule]


def parts_of(code: Any) -> Parts:
    """Return the parts that make up a function, a class, a module or a code object."""
    if isinstance(code, types.FunctionType):
        return _of_function(code)
    if isinstance(code, types.ModuleType):
        return _of_module(
            code, sorted(name for name in vars(code) if not name.startswith("__")), set()
        )
    if isinstance(code, types.CodeType):
        return _of_instructions(code)
    return _of_later_module(code.name) if isinstance(code, LaterModule) else _of_class(code)


def _of_function(function: types.FunctionType) -> Parts:
    module = home(function)
    yield Words(("function", module, function.__qualname__, version(module)))
    if is_standard(module):
        return
    # values that a function carries with it
    yield Own([function.__defaults__, function.__kwdefaults__])
    yield Own([cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell)])
    if not is_library(module):
        attributes = dict(vars(function))
        attributes.pop("_clear_cache", None)  # of singledispatch: it refers to earlier calls
        yield Referred(attributes)
        yield from _of_code(
            function.__code__, function.__globals__, package=_package_of(function.__globals__)
        )


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _package_of(namespace: dict[str, Any]) -> str:
    """Return where the relative imports of a module start, given its globals."""
    package, name = namespace.get("__package__"), namespace.get("__name__") or ""
    return str(
        (name if "__path__" in namespace else name.rpartition(".")[0])
        if package is None
        else package
    )


def _of_class(cls: type) -> Parts:
    yield Words(("class", home(cls), cls.__qualname__, version(home(cls))))
    yield Own([type(cls), *cls.__bases__])
    if not is_library(home(cls)):
        for name in sorted(vars(cls).keys() - _NO_CODE):
            yield Words((name,))
            yield Referred(vars(cls)[name])


def _of_later_module(name: str) -> Parts:
    yield Words(("module", name, version(name)))
    spec = find_spec(name)
    try:
        code = spec.loader.get_code(name)  # type: ignore[union-attr]
    except Exception:  # no such module, or unreadable: importing it will fail too
        code = None
    if spec is not None and code is not None:
        is_package = spec.submodule_search_locations is not None
        yield from _of_code(code, {}, package=name if is_package else name.rpartition(".")[0])


def _of_code(code: types.CodeType, namespace: dict[str, Any], *, package: str) -> Parts:
    """Yield the parts of the instructions, and what they mean in `namespace`.

    Relative imports start from `package`.
    """
    # The instructions, globals that they use, and modules that they import.
    yield from _of_instructions(code)
    names, modules = _names_in(code), set[int]()
    yield from _of_names(names, namespace, modules)
    for name in _imports_in(code, package=package):
        module = None if is_library(name) else _imported(name)
        if module is not None:
            yield from _of_module(module, names, modules)
        else:
            yield Words(("module", name, version(name))) if is_library(name) else LaterModule(name)


def _of_instructions(code: types.CodeType) -> Parts:
    variables = [*code.co_varnames, *code.co_cellvars, *code.co_freevars]
    exceptions = getattr(code, "co_exceptiontable", b"")  # Python 3.10 has none
    yield Words((code.co_code, exceptions, " ".join(code.co_names), " ".join(variables)))
    yield Own(list(code.co_consts))


def _of_names(names: list[str], namespace: Mapping[str, object], modules: set[int]) -> Parts:
    """Yield what `names` mean in a namespace, and in the user's modules that they lead to.

    Each of these modules is added to `modules`.
    """
    for name in names:
        if name in namespace:
            value = namespace[name]
            if not isinstance(value, types.ModuleType):
                yield Words((name,))
                yield Referred(value)
            # what was imported since is as if it were not there
            elif value.__name__ not in _LATER:
                yield Words((name,))
                yield from _of_module(value, names, modules)


def _of_module(module: types.ModuleType, names: list[str], modules: set[int]) -> Parts:
    yield Words(("module", module.__name__, version(module.__name__)))
    # each module once, by the names that this code uses
    if not is_library(module.__name__) and id(module) not in modules:
        modules.add(id(module))
        yield from _of_names(names, vars(module), modules)


def _imported(name: str) -> types.ModuleType | None:
    """Return a module, or None if it was not imported when it was first met.

    So the hash does not change when reading samples imports it.
    """
    module = sys.modules.get(name)
    if name not in _LATER and isinstance(module, types.ModuleType):
        return module
    if find_spec(name) is not None:
        _LATER.add(name)
    return None


def _names_in(code: types.CodeType) -> list[str]:
    """Return the names of globals and attributes that `code` uses.

    Functions and comprehensions inside it count.
    """
    inner = [
        _names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)
    ]
    return list(dict.fromkeys([*code.co_names, *(name for names in inner for name in names)]))


def _imports_in(code: types.CodeType, *, package: str) -> list[str]:
    """Return full names of the modules that `code` imports when it runs."""
    found: list[str] = []
    if _IMPORT in code.co_code[::2]:  # a quick test, for disassembling is slow
        constants: list[Any] = []
        for instruction in dis.get_instructions(code):
            # level and names are the constants before the import
            if instruction.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
                constants.append(instruction.argval)
            elif instruction.opcode == _IMPORT:
                level, wanted = constants[-2:]
                found += _targets("." * level + instruction.argval, wanted or (), package=package)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found += _imports_in(constant, package=package)
    return list(dict.fromkeys(found))


def _targets(name: str, wanted: tuple[str, ...], *, package: str) -> list[str]:
    """Return the modules that one import refers to.

    These are the module, and what is taken from it that is a module too. If nothing is taken, it is
    the module and all packages above it.
    """
    try:
        module = importlib.util.resolve_name(name, package)
    except ImportError:  # and it will be when it runs
        return []
    if not wanted:
        # a.b.c: a, a.b and a.b.c
        return [module[:end] for end, letter in enumerate(module + ".") if letter == "."]
    if is_library(module):
        return [module]
    parts = [f"{module}.{part}" for part in wanted]
    return [module, *(part for part in parts if part in sys.modules or find_spec(part) is not None)]


# Versions of code that is not followed.


@functools.lru_cache(maxsize=4096)
def version(module: str | None) -> str:
    """Return what stands for code that is not followed, '' if it is followed.

    Another version may decode or resize in another way.
    """
    # code that is followed has no version, but a compiled extension is hashed as a file
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


@functools.lru_cache(maxsize=4096)
def is_library(module: str | None) -> bool:
    """Return whether `version` stands for all code of a module; else it is the user's own."""
    file = _file(module or "")
    return is_standard(module) or (_is_installed(file) and file in _installed(_top(module)).files)


@functools.lru_cache(maxsize=4096)
def is_standard(module: str | None) -> bool:
    """Return whether a module is Python's or one of `KNOWN`."""
    top, file = _top(module), _file(module or "")
    # A user's own module may be called "code", as one of Python's.
    if top in sys.stdlib_module_names and file.endswith(".py"):
        return os.path.realpath(file).startswith(_STDLIB) and not _is_installed(file)
    return top in sys.stdlib_module_names or top in KNOWN


def home(value: object) -> str:
    """Return the name of the module that something is from.

    Functions written in C may not say it. Then it is a library that has it.
    """
    name = getattr(value, "__module__", None)
    if isinstance(name, str) and not isinstance(value, np.ufunc):  # all ufuncs say numpy
        return "__main__" if name == "__mp_main__" else name  # as spawned processes call it
    own = getattr(value, "__name__", "")
    # the modules that have it under its own name
    holders = [
        key
        for key, module in list(sys.modules.items())
        if getattr(module, "__dict__", {}).get(own) is value
    ]
    # Extensions first: other modules import it from them.
    origin = sorted(filter(is_library, holders), key=lambda key: not _is_extension(key))
    return origin[0] if origin else ""


def find_spec(name: str) -> ModuleSpec | None:
    """Return where a module is, without importing it or the packages above it."""
    above = name.rpartition(".")[0]
    try:
        if not above:
            return importlib.util.find_spec(name)
        package = sys.modules.get(above) or find_spec(above)
        path = getattr(package, "__path__", None) or getattr(
            package, "submodule_search_locations", None
        )
        return PathFinder.find_spec(name, list(path)) if path else None
    except Exception:  # finders may be anybody's
        return None


def _top(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _file(module: str) -> str:
    """Return the file of a module, imported or not.

    Modules without one, such as parts of what is written in C, have that of their top package.
    """
    loaded = sys.modules.get(module)
    # not imported: the file that an import would read
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


class _Installed(NamedTuple):
    """An installation of a package: a hash of it, and its files."""

    version: str
    files: frozenset[str]


@functools.lru_cache(maxsize=256)
def _installed(top: str) -> _Installed:
    """Return what is installed of all distributions that own `top`.

    Sizes are those of the files now: a file may have been edited in place.
    """
    digest, found = xxhash.xxh3_128(), set()
    for owner in sorted(_owners().get(top, ()), key=lambda each: each.metadata["Name"]):
        digest.update(f"{owner.metadata['Name']} {owner.version}\n".encode())
        base = str(owner.locate_file(""))
        # Without files that tell how and for whom it was installed.
        rows = csv.reader((owner.read_text("RECORD") or "").splitlines())
        for path, checksum in sorted((row[0], row[1]) for row in rows if len(row) > 1 and row[1]):
            if re.search(r"^(\.\.|/)|\.dist-info/|\.pyc$", path):
                continue
            file = os.path.abspath(os.path.join(base, path))
            found.add(file)
            digest.update(
                f"{path} {checksum} "
                f"{os.stat(file).st_size if os.path.exists(file) else None}\n".encode()
            )
    return _Installed(digest.hexdigest(), frozenset(found))


@functools.lru_cache(maxsize=1)
def _owners() -> dict[str, list[metadata.Distribution]]:
    """Return distributions by the top packages whose files they list."""
    owners: dict[str, list[metadata.Distribution]] = {}
    for distribution in metadata.distributions():
        for top in sorted(
            set(re.findall(r"^([^\W.]+)[/.]", distribution.read_text("RECORD") or "", re.MULTILINE))
        ):
            owners.setdefault(top, []).append(distribution)
    return owners
