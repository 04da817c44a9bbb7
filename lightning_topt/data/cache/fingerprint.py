"""A name for a data set and everything done to its samples, the same in every process and run.

    fingerprint(dataset)        # 32 hexadecimal digits; others as soon as code or state change

It is a hash of code and state in a canonical form: no memory addresses, no order of sets, no
pickle. What cannot be brought into that form raises, rather than sharing a name with something
else.

    Python, installed packages     their versions
    the user's functions, classes  instructions, and what they refer to, wherever that leads
    imports inside of functions    the text of the user's module, and of those that it imports
    files that the state names     size and time of last change, not the content

Each piece of code is hashed alone, and refers to others by name.
"""

from __future__ import annotations

import contextlib
import copyreg
import dis
import functools
import importlib.util
import os
import random
import stat
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from lightning_topt.data.cache import sample_codec
from lightning_topt.data.cache.cached_dataset import HOOK, IGNORED

_PLAIN = (int, float, complex, bool, str, bytes, bytearray, type(None), type(Ellipsis), range)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_DESCRIPTORS = (
    property,
    staticmethod,
    classmethod,
    functools.cached_property,
    functools.singledispatchmethod,
)
# Of a class: what Python keeps there, some only after the first use, and where its text was.
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
}
_STDLIB = sysconfig.get_path("stdlib")
_OURS = str(Path(__file__).parents[2])


class UnnamableError(ValueError):
    """Part of a data set has no canonical form."""


def fingerprint(dataset: object, *, data_version: str | None = None) -> str:
    """Return 32 hexadecimal digits for `dataset`.

    They cover the code of its class, its state, and what these refer to. What a ``cached_property``
    has computed is no state, nor are the attributes that a class, or an object, names in
    ``ignored_by_cache``.

    Args:
        dataset: any object that can be pickled, but for what its classes keep out.
        data_version: None: existing local files that the state names count by size and time of last
            change. Else they do not count: the user changes it whenever the data do.

    Raises:
        UnnamableError: some state has no canonical form (an open file, a lock). Keep it out of the
            pickled state (``__getstate__``), or name it in ``ignored_by_cache``.
    """
    hasher = _Hasher(look_at_files=data_version is None)
    return hasher.finished(hasher.hash_of(dataset), data_version)


def _digest(words: Any) -> bytes:
    digest = xxhash.xxh3_128()
    for word in words:
        data = word.encode("utf-8", "surrogatepass") if isinstance(word, str) else word
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


class _Hasher:
    """Hashes of values, of the code that they refer to, and of the files that they name."""

    def __init__(self, *, look_at_files: bool) -> None:
        self.look_at_files = look_at_files
        self.is_strict = True  # whether what has no canonical form is an error
        self.files: set[bytes] = set()
        self.open: dict[int, int] = {}  # id -> depth, of what is being hashed, to detect cycles
        self.known: dict[int, bytes] = {}  # id -> hash
        self.kept_alive: list[object] = []  # ids are unique only among live objects
        self.code: dict[int | str, Any] = {}  # that was met, by id or name of a module

    def finished(self, state: bytes, data_version: str | None) -> str:
        """Return the hash of everything: state, all code that was met, files."""
        self.is_strict = False  # a lock that code finds under a name is no state
        done: list[bytes] = []
        while len(done) < len(self.code):  # it grows meanwhile
            done += [self._hash_of_code(each) for each in list(self.code.values())[len(done) :]]
        base = [str(sample_codec.FORMAT), repr(data_version), state]
        return _digest([*base, *sorted(done), *sorted(self.files)]).hex()

    # ---- values ----------------------------------------------------------------------------------

    def hash_of(self, value: Any) -> bytes:
        """Return the hash of a value; code is met, and hashed later."""
        kind = type(value)
        if kind in _PLAIN:
            if kind in (str, bytes):
                self._see_file(value)
            return _digest([kind.__name__, value if kind in (str, bytes) else repr(value)])
        if issubclass(kind, type | types.FunctionType | types.CodeType | types.ModuleType):
            return self._name_of_code(value)
        if id(value) in self.known:
            return self.known[id(value)]
        if id(value) in self.open:
            return _digest(["again", str(len(self.open) - self.open[id(value)])])
        self.kept_alive.append(value)
        self.open[id(value)] = len(self.open)
        try:
            found = _digest([kind.__qualname__, *self._parts(value)])
        finally:
            del self.open[id(value)]
        self.known[id(value)] = found
        return found

    def _parts(self, value: Any) -> Iterator[bytes | str]:
        if isinstance(value, Tensor):
            plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            yield from (str(value.dtype), str(tuple(value.shape)))
            yield plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        elif isinstance(value, np.ndarray | np.generic):
            yield from self._array(np.asarray(value))
        elif isinstance(value, PurePath):
            self._see_file(value)
            yield str(value)
        elif isinstance(value, _GENERATORS):
            yield "random state"  # cached samples do not depend on randomness
        elif isinstance(value, _DESCRIPTORS):
            names = ("fget", "fset", "__func__", "func", "dispatcher")
            yield from (self.hash_of(getattr(value, name, None)) for name in names)
        elif type(value) in (list, tuple):
            yield from map(self.hash_of, value)
        elif type(value) in (set, frozenset):
            yield from sorted(map(self.hash_of, value))
        elif type(value) in (dict, types.MappingProxyType):
            for key, item in value.items():
                if key != HOOK:
                    yield from (self.hash_of(key), self.hash_of(item))
        elif is_library(_module(type(value))) and getattr(value, "__wrapped__", None) is not None:
            # wrapped by lru_cache; by numba, whose state contains a random number
            yield self.hash_of(value.__wrapped__)
        else:
            yield from self._instance(value)

    def _array(self, value: np.ndarray[Any, Any]) -> Iterator[bytes | str]:
        yield from (value.dtype.str, str(value.shape), str(value.dtype.names))
        if value.dtype.hasobject:
            yield self.hash_of(value.tolist())
            return
        yield np.ascontiguousarray(value).tobytes()
        for part in [value[name] for name in value.dtype.names or ()] or [value]:
            if part.dtype.kind in "SU":
                for text in set(part.reshape(-1).tolist()):
                    self._see_file(text)

    def _instance(self, value: Any) -> Iterator[bytes | str]:
        # Hash an object: its class, and what pickle would keep of it, in our own form
        yield self.hash_of(type(value))
        if isinstance(value, set | frozenset):
            yield from sorted(map(self.hash_of, value))
            yield self.hash_of(_lasting_state(getattr(value, "__dict__", None), value))
            return
        reduced = self._reduced(value)
        if reduced is None:
            yield "by name"
        elif isinstance(reduced, str):
            yield from (reduced, _module(value), version(_module(value)))
        else:
            # (function, arguments, state, list items, dict items), as of the pickle protocol
            parts: list[Any] = [*reduced, None, None, None]
            function, arguments, state, items, pairs = parts[:5]
            yield from (self.hash_of(function), self.hash_of(arguments))
            yield self.hash_of(_lasting_state(state, value))
            yield self.hash_of([None if each is None else list(each) for each in (items, pairs)])

    def _reduced(self, value: Any) -> Any:
        try:
            registered = copyreg.dispatch_table.get(type(value))
            return value.__reduce_ex__(4) if registered is None else registered(value)
        except Exception as error:  # TypeError where it cannot be pickled, but others raise others
            if self.is_strict:
                raise UnnamableError(
                    f"the data set's state has a {type(value).__module__}."
                    f"{type(value).__qualname__}, of which it cannot be told whether it is the "
                    f"same in the next run: leave it out of __getstate__, or name it in {IGNORED}"
                ) from error
            return None

    def _see_file(self, path: str | bytes | PurePath) -> None:
        if self.look_at_files and (found := _hash_of_file(path)) is not None:
            self.files.add(found)

    # ---- code ------------------------------------------------------------------------------------

    def _name_of_code(self, code: Any) -> bytes:
        # What stands for code where it is met; what is in it is hashed later, once
        if id(code) not in self.code:
            self.kept_alive.append(code)
            self.code[id(code)] = code
        name = getattr(code, "__qualname__", getattr(code, "__name__", ""))
        # of two functions with one name, such as lambdas, each has instructions of its own
        inner = getattr(code, "__code__", code)
        own = [inner.co_code, repr(inner.co_names)] if isinstance(inner, types.CodeType) else []
        return _digest(["code", _module(code), name, *own])

    def _hash_of_code(self, code: Any) -> bytes:
        if isinstance(code, str):
            return _digest([code, *self._text_of_module(code)])
        return _digest([self._name_of_code(code), *self._parts_of_code(code)])

    def _parts_of_code(self, code: Any) -> Iterator[bytes | str]:
        module = _module(code)
        yield version(module)
        if isinstance(code, types.FunctionType):
            yield self.hash_of([code.__defaults__, code.__kwdefaults__])
            yield self.hash_of([_content(cell) for cell in code.__closure__ or ()])
            if not is_library(module):
                attributes = {k: v for k, v in vars(code).items() if k != "_clear_cache"}
                yield self.hash_of(attributes)
                yield from self._instructions(code.__code__, code.__globals__)
        elif isinstance(code, type):
            yield self.hash_of([type(code), *code.__bases__])
            if not is_library(module):
                for name in sorted(vars(code).keys() - _NO_CODE):
                    if not name.startswith("__pydantic"):  # which contain ids
                        yield from (name, self.hash_of(vars(code)[name]))
        elif isinstance(code, types.CodeType):
            yield from self._instructions(code, {})

    def _instructions(
        self, code: types.CodeType, names: Mapping[str, Any]
    ) -> Iterator[bytes | str]:
        # Hash instructions, and what they refer to by name in `names` and what they import
        variables = [*code.co_varnames, *code.co_cellvars, *code.co_freevars]
        yield from (code.co_code, getattr(code, "co_exceptiontable", b""), repr(variables))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from self._instructions(constant, names)
            else:
                yield self.hash_of(constant)
        used = list(dict.fromkeys(_names_in(code)))
        yield from self._referred(used, names, set())
        name = names.get("__name__") or ""
        yield from self._imported(
            code, package=name if "__path__" in names else name.rpartition(".")[0]
        )

    def _imported(self, code: types.CodeType, *, package: str) -> Iterator[bytes | str]:
        # Hash what instructions import. The modules may never be needed: they are only read.
        for module in _imports_in(code, package=package):
            if not is_library(module):
                self.code.setdefault(module, module)
            yield from (module, version(module))

    def _referred(
        self, used: list[str], names: Mapping[str, Any], seen: set[int]
    ) -> Iterator[bytes | str]:
        # Hash what names mean, also as attributes of the user's modules among them
        for name in used:
            value = names.get(name, _MISSING)
            if value is _MISSING:
                continue
            yield name
            if not isinstance(value, types.ModuleType):
                yield self.hash_of(value)
                continue
            yield from (value.__name__, version(value.__name__))
            if not is_library(value.__name__) and id(value) not in seen:
                seen.add(id(value))
                yield from self._referred(used, vars(value), seen)

    def _text_of_module(self, name: str) -> Iterator[bytes | str]:
        # The text of a user's module that is imported when a function runs, and its imports
        file = _file(name)
        if not file.endswith(".py"):  # no such module, whose import will fail too
            return
        text = Path(file).read_bytes()
        yield text
        package = name if Path(file).stem == "__init__" else name.rpartition(".")[0]
        with contextlib.suppress(SyntaxError, ValueError):
            yield from self._imported(compile(text, file, "exec"), package=package)


_MISSING = object()


def _lasting_state(state: Any, value: object) -> Any:
    # The state of `value` without what exists only after the first use, or is ignored
    if isinstance(state, tuple) and len(state) == 2:  # the second part is that of __slots__
        return _lasting_state(state[0], value), state[1]
    if not isinstance(state, dict):
        return state
    cls = type(value)
    cached = {
        name
        for base in cls.__mro__
        for name, each in vars(base).items()
        if isinstance(each, functools.cached_property)
    }
    ignored = _texts(getattr(cls, IGNORED, None)) | _texts(state.get(IGNORED))
    left_out = cached | ignored | {HOOK}
    return {name: each for name, each in state.items() if name not in left_out} or None


def _texts(given: Any) -> set[str]:
    return {given} if isinstance(given, str) else set(given or ())


def _hash_of_file(path: str | bytes | PurePath) -> bytes | None:
    # A hash of the name, size and time of last change of a file; None where there is none
    if isinstance(path, str | bytes) and not 0 < len(path) <= 4096:
        return None
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # no such file; no name of a file
        return None
    # A folder changes with whatever is put beside the data; the kernel's own files always do.
    name = os.fsdecode(path)
    if not stat.S_ISREG(found.st_mode) or name.startswith(("/proc/", "/sys/")):
        return None
    return _digest([os.fsencode(name), str(found.st_size), str(found.st_mtime_ns)])


# ---- modules -------------------------------------------------------------------------------------


def _module(value: object) -> str:
    # The name of the module that something is from, '' where it does not say so
    if isinstance(value, types.ModuleType):
        return value.__name__
    name = getattr(value, "__module__", None)
    name = name if isinstance(name, str) else ""
    return "__main__" if name == "__mp_main__" else name  # as spawned processes call it


def _spec(name: str) -> Any:
    # Where a module is, without importing it or the packages above it
    above = name.rpartition(".")[0]
    try:
        if not above:
            return importlib.util.find_spec(name)
        package = sys.modules.get(above) or _spec(above)
        path = getattr(package, "__path__", None) or getattr(
            package, "submodule_search_locations", None
        )
        return PathFinder.find_spec(name, list(path)) if path else None
    except Exception:  # finders may be anybody's
        return None


@functools.lru_cache(maxsize=4096)
def _file(module: str) -> str:
    # The file of a module, imported or not; '' where it has none
    loaded = sys.modules.get(module)
    spec = _spec(module) if loaded is None and module else None
    file = getattr(loaded, "__file__", None) or getattr(spec, "origin", None) or ""
    if os.path.isabs(str(file)):
        return os.path.realpath(file)
    # parts of what is written in C have the file of their package
    return _file(module.rpartition(".")[0]) if "." in module else ""


@functools.lru_cache(maxsize=4096)
def is_library(module: str) -> bool:
    """Return whether `version` stands for all code of a module; else it is the user's own."""
    file = _file(module)
    if not file:
        return module.partition(".")[0] in sys.stdlib_module_names - {"__main__"}
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
    return is_installed or file.startswith((_STDLIB + os.sep, _OURS + os.sep))


@functools.lru_cache(maxsize=4096)
def version(module: str) -> str:
    """Return the version of a library; of a compiled extension of the user's a hash of it."""
    if not is_library(module):
        file = _file(module)
        compiled = file.endswith((".so", ".pyd"))
        return xxhash.xxh3_128_hexdigest(Path(file).read_bytes()) if compiled else ""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return "" if top == "builtins" else f"{sys.version_info.major}.{sys.version_info.minor}"
    try:
        return metadata.version(top)
    except metadata.PackageNotFoundError:  # its distribution has another name, as of PIL
        owners = sorted(set(metadata.packages_distributions().get(top, ())))
        found = " ".join(metadata.version(owner) for owner in owners)
        return found or str(getattr(sys.modules.get(top), "__version__", ""))


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _names_in(code: types.CodeType) -> list[str]:
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return [*code.co_names, *(name for each in inner for name in _names_in(each))]


def _imports_in(code: types.CodeType, *, package: str) -> list[str]:
    # The modules that instructions import when they run; relative names start in `package`
    constants: list[Any] = []
    found: list[str] = []
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            constants.append(step.argval)
            if isinstance(step.argval, types.CodeType):
                found += _imports_in(step.argval, package=package)
        elif step.opname == "IMPORT_NAME":
            level, names = constants[-2:]  # which are loaded just before
            with contextlib.suppress(ImportError):  # as when it runs
                module = importlib.util.resolve_name("." * level + step.argval, package)
                # what is taken from a module may be one too
                found += [module, *(f"{module}.{name}" for name in names or ())]
    return list(dict.fromkeys(found))
