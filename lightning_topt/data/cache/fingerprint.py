"""A name for a data set and everything done to its samples, equal in every process and run as long as they are.

It is a hash of code and state in a canonical form: no memory addresses, no order of sets, no pickle. What cannot be brought
into that form raises, rather than sharing a name with something else.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import os
import stat
import sys
import types
from collections.abc import Mapping
from importlib import metadata
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from lightning_topt.data.cache.determinism import HOOK

_PLAIN = (int, float, complex, bool, str, bytes, bytearray, type(None), type(Ellipsis), range, slice)

# Of a class: what Python keeps there (some of it only after the first copy of an instance), and where its text stood.
_NO_CODE = frozenset(
    [
        "__dict__",
        "__weakref__",
        "__doc__",
        "__module__",
        "__abstractmethods__",
        "_abc_impl",
        "__slotnames__",
        "__firstlineno__",
    ]
)


class UnnamableError(ValueError):
    """Part of a data set has no canonical form."""


_LIBRARIES = frozenset(sys.stdlib_module_names) - {"__main__"} | {
    "torch",
    "torchvision",
    "numpy",
    "PIL",
    "lightning",
    "pytorch_lightning",
    "fsspec",
    "lightning_topt",
}


def fingerprint(dataset: Any, *, data_version: str | None = None) -> str:
    """32 hexadecimal digits for `dataset`: its class's code, its state, and what these refer to.

    Names of existing local files in the state add each file's size and time of last change. With a `data_version` that is not
    looked at: the user changes it whenever the data do. Raises UnnamableError where some state has no canonical form (an open
    file, a lock): keep it out of the pickled state (``__getstate__``) or build it on first use.
    """
    hasher = _Hasher(look_at_files=data_version is None)
    hasher.add(data_version)
    hasher.add(dataset)
    return hasher.digest.hexdigest()


class _Hasher:
    def __init__(self, *, look_at_files: bool) -> None:
        self.look_at_files = look_at_files
        self.digest = xxhash.xxh3_128()
        self.seen: dict[int, int] = {}  # id -> order of first meeting: cycles and shared parts
        self.kept: list[Any] = []  # what is alive keeps its id

    def _write(self, *words: str | bytes) -> None:
        for word in words:
            data = word.encode("utf-8", "surrogatepass") if isinstance(word, str) else word
            self.digest.update(len(data).to_bytes(8, "little"))
            self.digest.update(data)

    def add(self, value: Any) -> None:
        """Take `value` into the hash."""
        if isinstance(value, _PLAIN) and type(value) in _PLAIN:
            self._write(type(value).__name__, repr(value))
            if isinstance(value, str):
                self._add_file(value)
            return
        if id(value) in self.seen:
            self._write("again", str(self.seen[id(value)]))
            return
        self.seen[id(value)] = len(self.seen)
        self.kept.append(value)
        self._write(type(value).__module__, type(value).__qualname__)
        self._add_compound(value)

    def _add_compound(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, np.ndarray | np.generic):
            self._add_array(np.asarray(value))
        elif isinstance(value, torch.dtype | torch.device | torch.Size | np.dtype | enum.Enum):
            self._write(str(value))
        elif isinstance(value, PurePath):
            self._write(str(value))
            self._add_file(value)
        elif isinstance(value, Mapping):
            items = [(key, item) for key, item in value.items() if key != HOOK]  # which an earlier cache left
            self._write(str(len(items)))
            for key, item in items:
                self.add(key)
                self.add(item)
            self._add_attributes(value)
        elif isinstance(value, list | tuple):
            self._write(str(len(value)))
            for item in value:
                self.add(item)
            self._add_attributes(value)
        elif isinstance(value, set | frozenset):
            self._write(*sorted(_digest_of(item, self.look_at_files) for item in value))
        else:
            self._add_object(value)

    def _add_tensor(self, value: Tensor) -> None:
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        self._write(str(value.dtype), str(tuple(value.shape)))
        self.digest.update(plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b"")

    def _add_array(self, value: np.ndarray[Any, Any]) -> None:
        self._write(value.dtype.str, str(value.shape))
        if value.dtype.hasobject:
            for item in value.reshape(-1).tolist():
                self.add(item)
        else:
            self.digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data if value.size else b"")

    def _add_object(self, value: Any) -> None:
        if isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, types.MethodType):
            self.add(value.__func__)
            self.add(value.__self__)
        elif isinstance(value, functools.partial):
            self.add([value.func, value.args, value.keywords])
        elif isinstance(value, functools._lru_cache_wrapper):
            self.add(value.__wrapped__)
        elif isinstance(value, types.BuiltinFunctionType | types.ModuleType | np.ufunc):
            self._write(getattr(value, "__module__", "") or "", value.__name__)
        elif isinstance(value, types.CodeType):
            self._add_code(value)
        elif isinstance(value, property | staticmethod | classmethod):
            self.add([getattr(value, name, None) for name in ("fget", "fset", "__func__")])
        elif isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState):
            self._write("random state")  # randomness has no part in what is cached
        else:
            self._add_instance(value)

    def _add_instance(self, value: Any) -> None:
        """Its class, and what pickle would keep of it, in our own form."""
        self._add_class(type(value))
        try:
            registered = copyreg.dispatch_table.get(type(value))
            reduced: Any = value.__reduce_ex__(4) if registered is None else registered(value)
        except TypeError as error:
            raise UnnamableError(
                f"the data set's state has a {type(value).__module__}.{type(value).__qualname__}, of which it cannot be told "
                "whether it is the same in the next run: leave it out of __getstate__, or make it on first use"
            ) from error
        if isinstance(reduced, str):
            self._write(reduced)
            return
        state = reduced[2] if len(reduced) > 2 else None
        if isinstance(state, dict) and not state.keys() - {HOOK}:  # pickle has None for no attributes
            state = None
        self.add([*reduced[:2], state, *(list(part) for part in reduced[3:5] if part is not None)])

    def _add_attributes(self, value: Any) -> None:
        """Of a subclass of a container."""
        if type(value) not in (dict, list, tuple):
            self._add_class(type(value))
            self.add(getattr(value, "__dict__", None))

    def _add_class(self, cls: type) -> None:
        """Code of the class and its bases, as far as they are not installed with Python or torch: those go by name."""
        for base in cls.__mro__:
            self._write(base.__module__, base.__qualname__, _version(base.__module__))
            if _is_library(base.__module__) or id(base) in self.seen:
                continue
            self.seen[id(base)] = len(self.seen)
            for name in sorted(vars(base)):
                if name not in _NO_CODE:
                    self._write(name)
                    self.add(vars(base)[name])

    def _add_function(self, value: types.FunctionType) -> None:
        self._write(value.__module__ or "", value.__qualname__, _version(value.__module__))
        if _is_library(value.__module__):
            return
        self._add_code(value.__code__)
        self.add(value.__defaults__)
        self.add(value.__kwdefaults__)
        cells = value.__closure__ or ()
        self.add([cell.cell_contents for cell in cells if not _is_empty(cell)])
        names = _names(value.__code__)
        for name in names:
            if name in value.__globals__:
                self._write(name)
                self._add_global(value.__globals__[name], names)

    def _add_global(self, value: Any, names: list[str]) -> None:
        """What a function refers to in its module; of a module that is the user's, what may be meant by `names`."""
        if isinstance(value, types.ModuleType):
            if _is_library(value.__name__) or id(value) in self.seen:
                self._write(_version(value.__name__))
                return
            self.seen[id(value)] = len(self.seen)
            for name in names:
                if name in vars(value):
                    self._write(name)
                    self._add_global(vars(value)[name], names)
            del self.seen[id(value)]  # another function may mean other things of it
            return
        try:
            self.add(value)
        except UnnamableError:  # a lock, a connection: no part of the data set's own state
            self._write("by name")

    def _add_code(self, code: types.CodeType) -> None:
        self._write(code.co_code, " ".join(code.co_names), " ".join(code.co_varnames))
        for constant in code.co_consts:
            self.add(constant)

    def _add_file(self, path: str | PurePath) -> None:
        if not self.look_at_files or (isinstance(path, str) and (len(path) > 4096 or "\0" in path or not path)):
            return
        try:
            found = os.stat(path)
        except (OSError, ValueError):
            return
        if stat.S_ISREG(found.st_mode):  # a folder changes with whatever is put beside the data
            self._write(str(found.st_size), str(found.st_mtime_ns))


def _digest_of(value: Any, look_at_files: bool) -> str:
    hasher = _Hasher(look_at_files=look_at_files)
    hasher.add(value)
    return hasher.digest.hexdigest()


def _names(code: types.CodeType) -> list[str]:
    """Of globals and attributes that `code` uses, and the functions and comprehensions inside it."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return list(dict.fromkeys([*code.co_names, *(name for names in inner for name in names)]))


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


@functools.lru_cache(maxsize=4096)
def _is_library(module: str | None) -> bool:
    """Whether a module is not the user's: its version names it. Part of the standard library, torch, NumPy, PIL, Lightning."""
    return (module or "").partition(".")[0] in _LIBRARIES


@functools.lru_cache(maxsize=4096)
def _version(module: str | None) -> str:
    """What stands for the code of a library's module: another version may decode or resize in another way."""
    name = (module or "").partition(".")[0]
    if name not in _LIBRARIES or name == "builtins":
        return ""
    if name in sys.stdlib_module_names:
        return f"{sys.version_info.major}.{sys.version_info.minor}"
    try:
        return metadata.version({"PIL": "pillow", "lightning_topt": "lightning-topt"}.get(name, name))
    except metadata.PackageNotFoundError:  # a source tree on the path
        return ""
