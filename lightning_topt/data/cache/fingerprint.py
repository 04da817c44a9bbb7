"""A name for a data set and everything done to its samples, the same in every process and run.

    fingerprint(dataset)        # 32 hexadecimal digits; others as soon as code or state change

It is a hash of code and state in a canonical form: no memory addresses, no order of sets, no
pickle. What cannot be brought into that form raises, rather than sharing a name with something
else. State is a tree of values, each with a hash of its own. Code is a graph: functions, classes
and modules are numbered in the order in which they are met, and added one after the other. What
makes up a piece of code is in `fingerprint_code`. Files that the state names count by size and time
of last change, not by content.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import os
import random
import stat
import types
import weakref
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from lightning_topt.data.cache import sample_layout
from lightning_topt.data.cache.determinism import HOOK, IGNORED
from lightning_topt.data.cache.fingerprint_code import (
    LaterModule,
    Own,
    Parts,
    Words,
    home,
    is_library,
    parts_of,
    version,
)

_KINDS = (int, float, complex, bool, str, bytearray, type(None), type(Ellipsis), range)
_PLAIN = {kind: kind.__name__ for kind in _KINDS}
_DESCRIPTORS = (
    property,
    staticmethod,
    classmethod,
    functools.cached_property,
    functools.singledispatchmethod,
)
_SEARCHED = 1 << 22  # bytes of an array of texts at a time, to stay in a core's cache


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
            pickled state (``__getstate__``), or make it on first use.
    """
    return named(dataset, data_version=data_version).name


class Named(NamedTuple):
    """A `fingerprint` and its parts.

    Args:
        name: the fingerprint.
        state: the same without data version and files: equal as long as code and state are.
        attributes: a hash of each attribute that is state.
    """

    name: str
    state: str
    attributes: dict[str, bytes]


def named(dataset: object, *, data_version: str | None = None) -> Named:
    """Return the fingerprint and its parts, at the cost of the fingerprint."""
    hasher = _Hasher(look_at_files=data_version is None)
    hasher.add(sample_layout.FORMAT)
    hasher.add(dataset)
    # files are summed, so that their order does not count
    state = hasher.finished()
    name = xxhash.xxh3_128_hexdigest(f"{state} {sum(hasher.files)} {data_version!r}".encode())
    return Named(
        name, state, {key: hasher.hash_of(value) for key, value in hasher.attributes.items()}
    )


class _Hasher:
    """A hash that takes in values of any type, and the code that they refer to."""

    def __init__(
        self, *, look_at_files: bool, is_strict: bool = True, follows_code: bool = True
    ) -> None:
        self.look_at_files, self.follows_code = look_at_files, follows_code
        self.is_strict = is_strict  # whether what has no canonical form is an error
        self.digest = xxhash.xxh3_128()
        self.files: set[int] = set()  # a hash of each; a file that is named twice counts once
        self.open: dict[int, int] = {}  # id -> depth, of what is being added, to detect cycles
        # id -> hash; a shared part counts like two equal ones
        self.added: dict[int, bytes] = {}
        self.kept_alive: list[object] = []  # ids are unique only among live objects
        self.numbers: dict[int | str, int] = {}  # of code that was met, by id or name
        self.waiting: list[tuple[Any, bool]] = []  # the same code, each with its `is_strict`
        self.transient: dict[type, set[str]] = {}  # names of attributes that are no lasting state
        self.attributes: dict[str, Any] = {}  # of the first object

    def finished(self) -> str:
        """Return the hash, with all code that was met and what it refers to in turn."""
        for code, is_strict in self.waiting:  # it grows meanwhile
            self.is_strict = is_strict
            self._add_parts(parts_of(code))
        return self.digest.hexdigest()

    def hash_of(self, value: object) -> bytes:
        """Return the hash of a part that was added, at no cost: it is known, or small."""
        if type(value) in _PLAIN or type(value) is bytes:
            return xxhash.xxh3_128_digest(
                repr((type(value).__name__, value)).encode("utf-8", "surrogatepass")
            )
        return self.added.get(id(value), repr(type(value)).encode())

    def _add_parts(self, parts: Parts) -> None:
        outer = self.is_strict
        for part in parts:
            if isinstance(part, Words):
                self._write(*part.words)
            elif isinstance(part, LaterModule):
                self._add_number(part, key=part.name)
            else:
                self.is_strict = outer and isinstance(part, Own)
                self.add(part.value)
                self.is_strict = outer

    def _write(self, *words: str | bytes) -> None:
        for word in words:
            data = word.encode("utf-8", "surrogatepass") if isinstance(word, str) else word
            self.digest.update(len(data).to_bytes(8, "little"))
            self.digest.update(data)

    def add(self, value: Any) -> None:
        """Take `value` into the hash."""
        # Plain values; texts may be names of files.
        if type(value) in _PLAIN:
            text = value if isinstance(value, str) else repr(value)
            self.digest.update(
                f"{_PLAIN[type(value)]} {len(text)} {text}".encode("utf-8", "surrogatepass")
            )
            if isinstance(value, str):
                self._add_file(value)
        elif type(value) is bytes:
            self._write("bytes", value)
            self._add_file(value)
        # Code, by number.
        elif issubclass(type(value), type | types.FunctionType):
            self._add_number(value, key=id(value))
        # Compound values: seen before, or being added (a cycle), or new.
        elif id(value) in self.added:
            self._write(self.added[id(value)])
        elif id(value) in self.open:
            self._write("again", str(len(self.open) - self.open[id(value)]))
        else:
            self.kept_alive.append(value)
            self.open[id(value)] = len(self.open)
            # a hash of its own, which then stands for the value wherever it is met again
            outer, self.digest = self.digest, xxhash.xxh3_128()
            self._write(type(value).__qualname__)
            self._add_compound(value)
            self.added[id(value)] = self.digest.digest()
            self.digest = outer
            self._write(self.added[id(value)])
            del self.open[id(value)]

    def _add_number(self, code: Any, *, key: int | str) -> None:
        """Add code by number; its parts follow later.

        A long chain of functions would be too deep a recursion.
        """
        if not self.follows_code:
            self._write(
                home(code),
                code.__qualname__,
                getattr(getattr(code, "__code__", None), "co_code", b""),
            )
            return
        if key not in self.numbers:
            self.numbers[key] = len(self.numbers)
            self.kept_alive.append(code)
            self.waiting.append((code, self.is_strict))
        self._write("code", str(self.numbers[key]))

    def _add_compound(self, value: object) -> None:
        if isinstance(value, list | tuple):
            self._write(str(len(value)))
            for item in value:
                self.add(item)
            self._add_attributes(value)
        elif isinstance(value, Tensor):
            plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            self._write(str(value.dtype), str(tuple(value.shape)))
            self.digest.update(
                plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b""
            )
        elif isinstance(value, np.ndarray | np.generic):
            self._add_array(np.asarray(value))
        elif isinstance(value, torch.dtype | torch.device | np.dtype):
            self._write(str(value))
        elif isinstance(value, enum.Enum):
            self.add([type(value), value.name, value.value])
        elif isinstance(value, PurePath):
            self._write(str(value))
            self._add_file(value)
        elif isinstance(value, weakref.WeakKeyDictionary | weakref.WeakValueDictionary):
            self._refuse(value)  # its items are whatever happens to be alive
        elif isinstance(value, Mapping):
            items = [(key, item) for key, item in value.items() if key != HOOK]
            self._write(str(len(items)))
            for key, item in items:
                self.add(key)
                self.add(item)
            self._add_attributes(value)
        elif isinstance(value, set | frozenset):
            for item in sorted(value, key=self._order):
                self.add(item)
            self._add_attributes(value)
        else:
            self._add_object(value)

    def _order(self, item: object) -> str:
        """Return what an item of a set is sorted by, whatever the order of the items."""
        if type(item) in _PLAIN or type(item) is bytes:
            return f"{type(item).__name__} {item!r}"
        # sets have no order: items are sorted by a hash of their own, of names instead of code
        alone = _Hasher(look_at_files=False, is_strict=False, follows_code=False)
        alone.open = dict(self.open)
        alone.add(item)
        return alone.finished()

    def _add_array(self, value: np.ndarray[Any, Any]) -> None:
        self._write(value.dtype.str, str(value.shape))
        if value.dtype.hasobject:
            for item in value.reshape(-1).tolist():
                self.add(item)
        else:
            self.digest.update(
                np.ascontiguousarray(value).reshape(-1).view(np.uint8).data if value.size else b""
            )
            for path in paths_in(value) if self.look_at_files else ():
                self._add_file(path)

    def _add_object(self, value: object) -> None:
        if isinstance(value, types.MethodType):
            self.add([value.__func__, value.__self__])
        elif isinstance(value, functools.partial):
            self.add([value.func, value.args, value.keywords])
        elif isinstance(value, types.BuiltinFunctionType | np.ufunc):
            owner = getattr(value, "__self__", None)
            if owner is None or isinstance(owner, types.ModuleType) or value.__module__:
                self._write(home(value), value.__name__, version(home(value)))
            else:
                self._write(value.__name__)
                self.add(owner)
        elif isinstance(value, types.ModuleType | types.CodeType):
            self._add_parts(parts_of(value))
        elif isinstance(value, _DESCRIPTORS):
            names = ("fget", "fset", "__func__", "func", "dispatcher")
            self.add([type(value), *(getattr(value, name, None) for name in names)])
        elif isinstance(
            value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random
        ):
            self._write("random state")  # cached samples do not depend on randomness
        else:
            self._add_instance(value)

    def _add_instance(self, value: Any) -> None:
        """Add an object: its class, and what pickle would keep of it, in our own form."""
        self.add(type(value))
        if is_library(home(type(value))) and getattr(value, "__wrapped__", None) is not None:
            self.add(
                [value.__wrapped__, getattr(value, "targetoptions", None)]
            )  # numba: the state contains a random number
            return
        try:
            registered = copyreg.dispatch_table.get(type(value))
            reduced: Any = value.__reduce_ex__(4) if registered is None else registered(value)
        except Exception as error:  # TypeError where it cannot be pickled, but others raise others
            self._refuse(value, error)
            return
        if isinstance(reduced, str):
            self._write(reduced, home(value), version(home(value)))
            return
        # (function, arguments, state, list items, dict items), as of the pickle protocol.
        state = self._lasting_state(reduced[2], type(value)) if len(reduced) > 2 else None
        # the data set itself: its attributes are noted, to say later which one has changed
        if len(self.open) == 1:
            parts = state if isinstance(state, tuple) else (state,)
            self.attributes = {
                key: each for part in parts if isinstance(part, dict) for key, each in part.items()
            }
        self.add([*reduced[:2], state, *(list(part) for part in reduced[3:5] if part is not None)])

    def _refuse(self, value: object, error: Exception | None = None) -> None:
        if self.is_strict:
            raise UnnamableError(
                f"the data set's state has a {type(value).__module__}.{type(value).__qualname__}, "
                "of which it cannot be told whether it is the same in the next run: leave it out "
                "of __getstate__, or make it on first use"
            ) from error
        self._write("by name")

    def _lasting_state(self, state: object, cls: type) -> object:
        """Return the state without what exists only after the first use.

        None if nothing is left, as with pickle.
        """
        if isinstance(state, tuple) and len(state) == 2:  # the second part is that of __slots__
            return self._lasting_state(state[0], cls), state[1]
        if not isinstance(state, dict):
            return state
        if cls not in self.transient:
            values = {
                name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()
            }
            cached = {
                name
                for name, value in values.items()
                if isinstance(value, functools.cached_property)
            }
            # The hook may be there from an earlier cache.
            self.transient[cls] = cached | {HOOK} | _names(values.get(IGNORED))
        transient = self.transient[cls] | _names(state.get(IGNORED))
        return {name: value for name, value in state.items() if name not in transient} or None

    def _add_attributes(self, value: object) -> None:
        """Add the attributes of a subclass of a container."""
        if type(value) not in (dict, list, tuple, set, frozenset):
            attributes = self._lasting_state(getattr(value, "__dict__", None), type(value))
            self.add([type(value), attributes, getattr(value, "default_factory", None)])

    def _add_file(self, path: str | bytes | PurePath) -> None:
        if self.look_at_files and (found := hash_of_file(path)) is not None:
            self.files.add(found)


def _names(ignored: Any) -> set[str]:
    return {ignored} if isinstance(ignored, str) else set(ignored or ())


def hash_of_file(path: str | bytes | PurePath) -> int | None:
    """Return a hash of the name, size and time of last change of the file at `path`.

    None where there is no such file.
    """
    if isinstance(path, str | bytes) and not 0 < len(path) <= 4096:
        return None
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # no such file; no name of a file
        return None
    is_live = os.fsdecode(path).startswith(("/proc/", "/sys/"))  # their time is always now
    # A folder changes with whatever is put beside the data.
    if not stat.S_ISREG(found.st_mode) or is_live:
        return None
    fact = f"{os.fsdecode(path)} {found.st_size} {found.st_mtime_ns}".encode(
        "utf-8", "surrogateescape"
    )
    return xxhash.xxh3_64_intdigest(fact)


def paths_in(array: np.ndarray[Any, Any]) -> list[str | bytes]:
    """Return the distinct items of an array of texts that may be names of files.

    These are the ones with a dot or a separator.
    """
    if array.dtype.names:
        return [path for name in array.dtype.names for path in paths_in(array[name])]
    if array.dtype.kind not in "SU" or not array.size * array.dtype.itemsize:
        return []
    texts = np.ascontiguousarray(array).reshape(-1)
    # (texts, characters) as numbers
    letters = texts.view("u1" if array.dtype.kind == "S" else f"{array.dtype.str[0]}u4").reshape(
        len(texts), -1
    )
    found: dict[str | bytes, None] = {}
    step = max(1, _SEARCHED // array.dtype.itemsize)
    for start in range(0, len(texts), step):
        part = letters[start : start + step]
        is_path = ((part == ord(".")) | (part == ord("/")) | (part == ord(os.sep))).any(axis=1)
        found |= dict.fromkeys(texts[start : start + step][is_path].tolist())
    return list(found)
