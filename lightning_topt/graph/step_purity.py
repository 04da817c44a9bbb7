"""Whether a training step changed anything but tensors, buffers, logs and metrics.

    watch = PurityWatch(module)
    ...                                  # training_step, once
    watch.change()                       # "attribute 'count' of Net changed"; None for a pure step

Nothing is copied and no code of the user is called: what can be reached is read shallowly, object
by object, before and after: which objects it holds, numbers and strings by value, arrays and
generators by their contents, tensors by identity and version. What cannot be compared counts as
changed.

[Note: what is watched] From the module: attributes of all its parts but metrics and what Lightning
keeps there, containers and objects in them. Of code that a step may run, judged by names: closures,
defaults, attributes of classes, and globals in files of the user. Attributes of the data module and
of callbacks. Values of parameters and buffers are free to change,
which buffer it is too. So are torch's default generators, but not Python's and NumPy's. What only
writes to screens and loggers is not watched, nor what is ours.
"""

from __future__ import annotations

import collections
import ctypes
import datetime
import decimal
import enum
import functools
import io
import itertools
import logging
import mmap
import operator
import pathlib
import random
import re
import sys
import threading
import types
import typing
import uuid
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from lightning_topt.graph.errors import is_users
from lightning_topt.graph.module_copy import runs_metrics

MAX_OBJECTS = 200_000
MAX_ITEMS = 100_000
MAX_BYTES = 1 << 28  # of an array whose contents are compared
_ATOMS: tuple[type, ...] = (
    *(str, bytes, bool, int, float, complex, type(None), type(...), range, slice),
    *(np.generic, np.dtype),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
# Cannot change, or have nothing that a step depends on.
_SETTLED: tuple[Any, ...] = (
    *(enum.Enum, re.Pattern, decimal.Decimal, uuid.UUID, pathlib.PurePath),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.MethodWrapperType, types.GetSetDescriptorType, types.MemberDescriptorType),
    *(types.ClassMethodDescriptorType, types.CodeType, types.GenericAlias, typing.TypeVar),
    *(operator.attrgetter, operator.itemgetter, operator.methodcaller),
    *(weakref.ref, type(threading.Lock()), type(threading.RLock())),
    *(logging.Logger, logging.Handler, torch.Stream, torch.Event, np.ufunc, type(np.asarray)),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket),
)
_BUFFERS = (
    *(bytearray, memoryview, array, mmap.mmap),
    *(ctypes.Array, ctypes._SimpleCData, ctypes.Structure),
)
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_CALLABLES = (types.MethodType, functools.partial, property, staticmethod, classmethod)
_SCREENS = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
_OUTSIDE = ("multiprocessing", "subprocess", "socket")
_LOGS = {
    *("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics"),
    *("logging", "tqdm", "rich"),
    *("wandb", "tensorboard", "tensorboardX", "mlflow", "neptune", "comet_ml"),
    "lightning_topt",  # which may be watching
}
_REGISTRIES = frozenset(["_buffers", "_non_persistent_buffers_set"])
_SLOT_BYTES = 8


class _Plain:
    """A class of Python, for its size."""


class _Held(NamedTuple):
    """A tensor as it is now, without keeping it alive."""

    tensor: weakref.ref[Tensor]
    version: int | None


class _Hash(NamedTuple):
    """The contents of something, as a number."""

    value: int


Entry = tuple[str, Any]  # what to call it, what it is


class _Scope(NamedTuple):
    """A class of a module, or a file.

    Of its names those count that code asks for; `done` have been read.
    """

    name: str
    values: Any
    done: set[str]


class PurityWatch:
    """Reads all that a step of `module` can reach when it is made; `change` reads it again."""

    def __init__(self, module: nn.Module) -> None:
        # a step may update these: their contents do not count
        self._own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._before: list[tuple[Callable[[], Iterator[Entry]], list[Entry]]] = []
        self._seen: dict[int, object] = {}  # held, so that no other object gets their places
        self._unknown: str | None = None
        self._names = {"training_step", "forward", "__call__", "__getattr__"}
        self._scopes: list[_Scope] = []
        self._todo: collections.deque[Entry] = collections.deque([("the module", module)])
        # all that the module leads to, then random states, then the trainer's user code
        while self._todo:
            while self._todo and len(self._seen) <= MAX_OBJECTS:
                self._visit(*self._todo.popleft())
            if self._todo:
                self._note_unknown(
                    f"more than {MAX_OBJECTS} objects can be reached, too many to compare"
                )
                self._todo.clear()
            # code that was met since names more globals and attributes: these are read as well
            for scope in self._scopes:
                if new := self._names - scope.done:
                    scope.done.update(new)
                    self._watch(functools.partial(_named, scope, frozenset(new)))
        self._watch(_generators)
        trainer = vars(module).get("_trainer")
        for value in (
            getattr(trainer, "datamodule", None),
            *(getattr(trainer, "callbacks", None) or ()),
        ):
            if value is not None and is_users(type(value).__module__):
                skipped = _names_of_lightning(type(value))
                self._watch(functools.partial(_of_object, value, skipped))
        self._todo.clear()

    def change(self) -> str | None:
        """Return what has changed since, or what cannot be compared, as a clause.

        None where nothing has.
        """
        # the same readers again, in the same order
        for read, before in self._before:
            after = list(self._held(read()))
            if (name := _difference(before, after)) is not None:
                return f"{name} changed"
        return self._unknown

    def _note_unknown(self, clause: str) -> None:
        self._unknown = self._unknown or clause

    def _watch(self, read: Callable[[], Iterator[Entry]]) -> None:
        """Note what `read` gives now, and go on with what is in it."""
        entries = list(read())
        self._todo += [
            entry for entry in entries if not issubclass(type(entry[1]), (*_ATOMS, Tensor, _Hash))
        ]
        self._before.append((read, list(self._held(entries))))

    def _held(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        for name, value in entries:
            yield name, self._hold_tensor(value) if issubclass(type(value), Tensor) else value

    def _hold_tensor(self, tensor: Tensor) -> _Held:
        # of all other tensors every write counts
        is_free = id(tensor) in self._own or tensor.is_inference()
        return _Held(weakref.ref(tensor), None if is_free else tensor._version)

    # ---- what is inside --------------------------------------------------------------------------

    def _visit(self, name: str, value: Any) -> None:
        """Find out how to read `value`, and watch it."""
        # By class, and by `type`: `isinstance` may ask the object for its class.
        kind = type(value)
        if id(value) in self._seen or issubclass(kind, _SETTLED):
            return
        self._seen[id(value)] = value
        if issubclass(kind, nn.Module):
            self._visit_module(value)
        elif issubclass(kind, type):
            if is_users(value.__module__):  # all its code that a step may use
                self._watch(functools.partial(_of_class, value))
                self._todo += [(f"class {base.__name__}", base) for base in value.__bases__]
        elif issubclass(kind, types.ModuleType):
            if is_users(value.__name__):
                self._scopes.append(_Scope(f"global {{!r}} of {value.__name__}", value, set()))
        elif kind in (types.FunctionType, functools._lru_cache_wrapper):
            self._visit_function(value)
        elif (read := _reader_of(name, value, kind)) is not None:
            if issubclass(kind, (dict, *_CONTAINERS)) and _length(value) > MAX_ITEMS:
                self._note_unknown(f"{name} holds more than {MAX_ITEMS} items, too many to compare")
            self._watch(read)
            self._visit_attributes(value, kind)
        # logs and screens are written to by design
        elif kind.__module__.partition(".")[0] not in _LOGS and all(
            value is not each for each in _SCREENS
        ):
            self._visit_object(name, value, kind)

    def _visit_module(self, module: nn.Module) -> None:
        if not runs_metrics(module):  # metrics count by design
            skipped = _REGISTRIES | _names_of_lightning(type(module))
            self._watch(functools.partial(_of_module, module, skipped))
            for cls in type(module).__mro__:
                if id(cls) not in self._seen and is_users(cls.__module__):
                    self._seen[id(cls)] = cls
                    self._scopes.append(
                        _Scope(f"attribute {{!r}} of class {cls.__name__}", cls, set())
                    )

    def _visit_function(self, function: Any) -> None:
        if type(function) is functools._lru_cache_wrapper:
            if is_users(function.__module__):
                self._watch(
                    lambda: iter(
                        [(f"the cache of {function.__qualname__}", tuple(function.cache_info()))]
                    )
                )
                self._todo.append((function.__qualname__, function.__wrapped__))
            return
        if is_users(function.__module__):
            # globals by the names that its code mentions, also in inner functions
            names = _names_in(function.__code__)
            self._names |= names
            self._watch(functools.partial(_globals_of, function, names))
        if is_users(function.__module__) or function.__closure__:
            self._watch(functools.partial(_of_function, function))

    def _visit_object(self, name: str, value: object, kind: type) -> None:
        # what advances by itself, is outside of Python or of this process, cannot be compared
        is_iterator = issubclass(
            kind, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
        )
        outside = kind.__module__.partition(".")[0] in _OUTSIDE or issubclass(
            kind, (threading.Thread, io.IOBase)
        )
        if is_iterator or outside or not _is_of_python(kind):
            self._note_unknown(
                f"{name} holds a {kind.__module__}.{kind.__qualname__}, which cannot be compared"
            )
            return
        self._visit_attributes(value, kind)
        self._todo.append((f"class {kind.__name__}", kind))

    def _visit_attributes(self, value: object, kind: type) -> None:
        if kind not in _BUILT_IN and (_attributes(value) or _slots(kind)):
            self._watch(functools.partial(_of_object, value, frozenset()))


def _difference(before: list[Entry], after: list[Entry]) -> str | None:
    """Return the name of the first entry that is not as it was."""
    for (name, old), (new_name, new) in zip(before, after, strict=False):
        # another name: an entry came or went before this one
        if name != new_name or not _is_same(old, new):
            return new_name if name != new_name else name
    # one of both has entries that the other lacks
    if len(before) != len(after):
        return (before if len(before) > len(after) else after)[min(len(before), len(after))][0]
    return None


def _is_same(old: Any, new: Any) -> bool:
    # the same object, whose contents are compared by a reader of their own
    if old is new:
        return True
    if isinstance(old, _Held):
        return (
            isinstance(new, _Held)
            and old.tensor() is new.tensor() is not None
            and old.version == new.version
        )
    # plain values by what they are; a tuple item by item
    kind = type(old)
    if kind is not type(new):
        return False
    if kind is tuple:
        return len(old) == len(new) and all(map(_is_same, old, new))
    # A user's own kind of number may have its own idea of what is equal.
    is_plain = issubclass(kind, (*_ATOMS, _Hash)) and not is_users(kind.__module__)
    return is_plain and (bool(old == new) or (old != old and new != new))


# ---- readers: each gives the entries of one object, without code of the user ---------------------


def _of_module(module: nn.Module, skipped: frozenset[str]) -> Iterator[Entry]:
    for key, value in vars(module).items():
        if key in skipped:
            continue
        if key in ("_parameters", "_modules"):
            for name, item in value.items():
                yield f"{name!r} of {type(module).__name__}", item
                if isinstance(item, Tensor):
                    yield (
                        f"requires_grad of {name!r} of {type(module).__name__}",
                        item.requires_grad,
                    )
        else:
            yield f"attribute {key!r} of {type(module).__name__}", value


def _of_object(value: object, skipped: frozenset[str]) -> Iterator[Entry]:
    name = type(value).__name__
    for key, item in _attributes(value).items():
        if key not in skipped:
            yield f"attribute {key!r} of {name}", item
    for slot in _slots(type(value)):
        try:
            yield f"attribute {slot.__name__!r} of {name}", slot.__get__(value)
        except AttributeError:
            continue


def _of_class(cls: type) -> Iterator[Entry]:
    for key, value in tuple(vars(cls).items()):
        if type(value) is types.FunctionType or not key.startswith(("__", "_abc_")):
            yield f"attribute {key!r} of class {cls.__name__}", value


def _named(scope: _Scope, names: frozenset[str]) -> Iterator[Entry]:
    for key in names & vars(scope.values).keys():
        yield scope.name.format(key), vars(scope.values)[key]


def _globals_of(function: types.FunctionType, names: frozenset[str]) -> Iterator[Entry]:
    for key in names & function.__globals__.keys():
        yield f"global {key!r} of {function.__module__}", function.__globals__[key]


@functools.cache
def _names_in(code: types.CodeType) -> frozenset[str]:
    """Return the globals and attributes that code names."""
    inner = (
        _names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)
    )
    return frozenset(code.co_names).union(*inner)


def _of_function(function: types.FunctionType) -> Iterator[Entry]:
    name = function.__qualname__
    yield f"defaults of {name}", function.__defaults__
    yield f"defaults of {name}", function.__kwdefaults__
    for key, value in function.__dict__.items():
        yield f"attribute {key!r} of {name}", value
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"variable {key!r} of {name}", cell.cell_contents
        except ValueError:
            continue


def _generators() -> Iterator[Entry]:
    yield "the state of Python's random numbers", _Hash(hash(random.getstate()))
    state: Any = np.random.get_state()
    yield "the state of NumPy's random numbers", _Hash(hash((state[1].tobytes(), *state[2:])))


def _reader_of(name: str, value: Any, kind: type) -> Callable[[], Iterator[Entry]] | None:
    """Return what reads a container, or the contents of something that has no other way.

    None for all else.
    """
    if issubclass(kind, dict):
        return functools.partial(_items, name, value)
    if issubclass(kind, _CONTAINERS):
        return functools.partial(_elements, name, value)
    if issubclass(kind, _CALLABLES):
        return functools.partial(_parts_of_callable, name, value)
    contents = _contents_of(value, kind)
    return None if contents is None else functools.partial(_read_contents, name, value, contents)


def _read_contents(name: str, value: object, read: Callable[[Any], object]) -> Iterator[Entry]:
    yield name, _Hash(hash(read(value)))


def _contents_of(value: Any, kind: type) -> Callable[[Any], object] | None:
    """Return what gives the contents of `value` as something that can be hashed."""
    if issubclass(kind, np.ndarray):
        is_known = not value.dtype.hasobject and value.nbytes <= MAX_BYTES
        return _array if is_known else None
    return next((read for kinds, read in _READERS.items() if issubclass(kind, kinds)), None)


def _array(value: np.ndarray[Any, Any]) -> object:
    data = value if value.flags.c_contiguous else np.ascontiguousarray(value)
    return (
        value.shape,
        str(value.dtype),
        xxhash.xxh3_64_intdigest(data.reshape(-1).view(np.uint8).data),
    )


def _items(name: str, value: dict[object, object]) -> Iterator[Entry]:
    # by methods of the base: a subclass may show other contents
    base: Any = (
        collections.OrderedDict if issubclass(type(value), collections.OrderedDict) else dict
    )
    for key, item in itertools.islice(base.items(value), MAX_ITEMS):
        yield name, key
        yield name, item
    yield name, _length(value)


def _elements(name: str, value: object) -> Iterator[Entry]:
    base: Any = next(base for base in _CONTAINERS if issubclass(type(value), base))
    for item in itertools.islice(base.__iter__(value), MAX_ITEMS):
        yield name, item
    yield name, _length(value)


def _length(value: object) -> int:
    base: Any = next(base for base in (dict, *_CONTAINERS) if issubclass(type(value), base))
    return int(base.__len__(value))


def _parts_of_callable(name: str, value: object) -> Iterator[Entry]:
    parts = ("__self__", "__func__", "func", "args", "keywords", "fget", "fset")
    for part in parts:
        if (found := getattr(value, part, None)) is not None:
            yield name, found


_BUILT_IN: set[type] = {
    *(dict, list, tuple, set, frozenset, np.ndarray, *_CALLABLES),
    *(collections.deque, collections.OrderedDict, collections.defaultdict),
}
_READERS: dict[Any, Callable[[Any], object]] = {
    _BUFFERS: lambda buffer: xxhash.xxh3_64_intdigest(memoryview(buffer).cast("B")),
    torch.Generator: lambda generator: generator.get_state().numpy().tobytes(),
    random.Random: random.Random.getstate,
    np.random.RandomState: lambda generator: repr(np.random.RandomState.get_state(generator)),
    np.random.Generator: lambda generator: repr(generator.bit_generator.state),
    (itertools.count, itertools.repeat): repr,
}


def _attributes(value: object) -> dict[str, object]:
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def _slots(cls: type) -> tuple[Any, ...]:
    """Return the descriptors of values that instances hold beside their dictionary."""
    found = (vars(base).values() for base in cls.__mro__ if base is not object)
    return tuple(
        each for values in found for each in values if isinstance(each, types.MemberDescriptorType)
    )


def _is_of_python(cls: type) -> bool:
    """Return whether all that instances of `cls` hold is in their dictionary and slots.

    Nothing was added by a language below then.
    """
    # as large as a plain class with as many slots
    return (
        cls.__basicsize__ <= _Plain.__basicsize__ + _SLOT_BYTES * len(_slots(cls))
        and not cls.__itemsize__
    )


def _names_of_lightning(cls: type) -> frozenset[str]:
    """Return the attributes in which Lightning keeps its own things on such a module."""
    packages = ("lightning.", "pytorch_lightning.", "lightning_fabric.")
    # all names that the constructors of Lightning's classes mention
    bases = (
        base
        for base in cls.__mro__
        if base.__module__.startswith(packages) and "__init__" in vars(base)
    )
    found: set[str] = {
        *("_trainer", "_fabric", "_hparams_initial", "_log_hyperparams", "_device", "_dtype")
    }
    for base in bases:
        if ".demos." not in base.__module__:
            found.update(vars(base)["__init__"].__code__.co_names)
    return frozenset(found) - {"training"}
