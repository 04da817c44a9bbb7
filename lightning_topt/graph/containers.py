"""Names, attributes and containers that user code can reach, all that Python code can leave behind,
are saved and put back.

[Note: what is saved] From the roots: built-in containers, instances of classes from user files,
modules of torch, the globals of user files, the classes in them with their attributes, and the
closures, defaults and attributes of their functions. Every one is saved shallowly, whatever is
inside by itself. Left alone: instances of library classes, data sets, loaders and samplers, and
every object that owns a thread or a lock: it may change by itself meanwhile.
"""

from __future__ import annotations

import collections
import functools
import operator
import os
import queue
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

MAX_VISITS = 100_000
MAX_ITEMS = 10_000  # of a container whose items are looked into
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PATHS = ("purelib", "platlib", "stdlib")
FOLDERS = {
    *(sysconfig.get_path(name) for name in PATHS),
    PACKAGE,
    os.path.dirname(os.path.dirname(torch.__file__)),
}
LIBRARIES = tuple(os.path.join(folder, "") for folder in FOLDERS if folder)
ATOMS = (str, bytes, int, float, complex, type(None), Tensor, np.ndarray, torch.dtype, torch.device)
ON_THEIR_OWN = (threading.Thread, type(threading.Lock()), type(threading.RLock()), queue.Queue)
NAMESPACES = (types.SimpleNamespace, collections.UserDict, collections.UserList)
Undo = Callable[[], Any]


class SavedContainers:
    """Everything that is reachable from `roots`, as it is now; see [Note: what is saved]."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self._undo: list[Undo] = []
        self._seen: dict[int, Any] = {}
        todo = collections.deque(roots)
        while todo and len(self._seen) < MAX_VISITS:
            value = todo.popleft()
            if isinstance(value, ATOMS) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value  # held, so that no other object gets its id
            todo += self._visit(value)

    def restore(self) -> None:
        """Put back in place what has changed."""
        for undo in self._undo:
            undo()

    def _visit(self, value: Any) -> Iterable[Any]:
        if isinstance(value, dict):
            return self._save(
                value, [*_base(value).items(value)], _restore_dict, dict.values(value)
            )
        if isinstance(value, (list, collections.deque)):
            return self._save(value, [*value], _restore_sequence, value)
        if isinstance(value, set):
            return self._save(value, [*value], _restore_set, ())
        if isinstance(value, (tuple, types.MappingProxyType)):
            return value if isinstance(value, tuple) else value.values()
        if isinstance(value, types.CellType):
            return self._visit_cell(value)
        if isinstance(value, (types.MethodType, functools.partial)):
            return (
                (value.__func__, value.__self__)
                if isinstance(value, types.MethodType)
                else (value.func,)
            )
        if isinstance(
            value,
            (types.FunctionType, functools._lru_cache_wrapper, staticmethod, classmethod, property),
        ):
            return self._visit_function(value)
        if isinstance(value, types.ModuleType):
            return self._visit(vars(value)) if is_users(value.__name__) else ()
        if isinstance(value, type):
            return self._visit_class(value) if is_users(value.__module__) else ()
        return self._visit_object(value)

    def _save(
        self, target: Any, saved: Any, restore: Callable[[Any, Any], None], inside: Iterable[Any]
    ) -> Iterable[Any]:
        self._undo.append(functools.partial(restore, target, saved))
        return (
            [item for item in inside if not isinstance(item, ATOMS)]
            if len(saved) <= MAX_ITEMS
            else ()
        )

    def _visit_cell(self, cell: types.CellType) -> Iterable[Any]:
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            return ()
        self._undo.append(functools.partial(_restore_cell, cell, content))
        return (content,)

    def _visit_function(self, value: Any) -> Iterable[Any]:
        if isinstance(value, property):
            return (value.fget, value.fset)
        if isinstance(value, (staticmethod, classmethod)):
            return (value.__func__,)
        if isinstance(value, functools._lru_cache_wrapper):
            if is_users(value.__module__):
                self._undo.append(
                    functools.partial(_forget_calls, value, value.cache_info().misses)
                )
            return (value.__wrapped__,)
        if not is_users(value.__module__):
            return ()
        found = [
            *self._visit(value.__dict__),
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
        ]
        return [*found, *(value.__closure__ or ()), value.__globals__]

    def _visit_class(self, cls: type) -> Iterable[Any]:
        module = sys.modules.get(cls.__module__)
        inside = [*vars(cls).values(), *cls.__mro__[1:], *((module,) if module else ())]
        return self._save(cls, dict(vars(cls)), _restore_class, inside)

    def _visit_object(self, value: Any) -> Iterable[Any]:
        if isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState)):
            return self._visit_generator(value)
        if isinstance(value, (Dataset, DataLoader, Sampler)) and not isinstance(value, nn.Module):
            return ()
        of_user = is_users(type(value).__module__)
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict) or not (
            of_user or isinstance(value, (nn.Module, *NAMESPACES))
        ):
            return ()
        if any(isinstance(item, ON_THEIR_OWN) for item in attributes.values()):
            return ()
        if isinstance(value, nn.Module):
            for parameter in value._parameters.values():
                if parameter is not None:
                    self._undo.append(
                        functools.partial(_restore_gradient, parameter, parameter.grad)
                    )
        return [*self._visit(attributes), *((type(value),) if of_user else ())]

    def _visit_generator(self, value: Any) -> Iterable[Any]:
        if isinstance(value, torch.Generator):
            self._undo.append(functools.partial(value.set_state, value.get_state()))
        elif isinstance(value, np.random.Generator):
            self._undo.append(
                functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
            )
        else:
            self._undo.append(functools.partial(value.set_state, value.get_state()))
        return ()


def roots_of(module: nn.Module) -> Iterator[Any]:
    """Return where user code of a LightningModule may leave something: itself, its trainer,
    callbacks and data module.
    """
    yield module
    yield from {type(submodule) for submodule in module.modules()}
    trainer = getattr(module, "_trainer", None)
    if trainer is not None:
        yield vars(trainer)
        yield getattr(trainer, "datamodule", None)
        yield getattr(trainer, "callbacks", None)


def is_users(name: Any) -> bool:
    """Return whether the Python module `name`, as ``__module__`` has it, is of the user, not
    installed.
    """
    return isinstance(name, str) and _is_users(name)  # of classes in C it may be a descriptor


@functools.cache
def _is_users(name: str) -> bool:
    module = sys.modules.get(name)
    top, _, rest = name.partition(".")
    if module is None or top in sys.builtin_module_names or (rest and not _is_users(top)):
        return False
    if name == "__main__":
        return True
    file = getattr(module, "__file__", None)
    if file is None:
        specification = getattr(module, "__spec__", None)
        return specification is None or not isinstance(specification.origin, str)
    return not is_installed(file)


def is_installed(file: str) -> bool:
    """Return whether `file` is of Python, of this package, or of one that was installed, in any
    folder of the path.
    """
    file = os.path.abspath(file)
    if file.startswith(LIBRARIES):
        return True
    folders = [os.path.join(os.path.abspath(folder), "") for folder in sys.path]
    inside = [(folder, file[len(folder) :]) for folder in folders if file.startswith(folder)]
    return any(rest.partition(os.sep)[0] in _installed_in(folder) for folder, rest in inside)


@functools.cache
def _installed_in(folder: str) -> frozenset[str]:
    """The files and folders that ``pip install --target`` has put there; others beside them may be
    the user's.
    """
    records = Path(folder).glob("*.dist-info/RECORD")
    return frozenset(
        line.partition(",")[0].partition("/")[0]
        for each in records
        for line in each.open(encoding="utf-8")
    )


def _base(target: dict[Any, Any]) -> Any:
    """The class whose methods tell what `target` holds: a subclass may show other keys."""
    return collections.OrderedDict if isinstance(target, collections.OrderedDict) else dict


def _restore_dict(target: dict[Any, Any], saved: list[tuple[Any, Any]]) -> None:
    base = _base(target)
    now = [*base.items(target)]
    if len(now) == len(saved) and (not now or all(map(operator.is_, chain(*now), chain(*saved)))):
        return
    # Names that stay are not taken away in between: other threads may read them.
    wanted, known = dict(saved), dict(now)
    for key in known.keys() - wanted.keys():
        base.__delitem__(target, key)
    for key, value in saved:
        if key not in known or known[key] is not value:
            base.__setitem__(target, key, value)
    if [*base.__iter__(target)] != [*wanted]:
        base.clear(target)
        for key, value in saved:
            base.__setitem__(target, key, value)


def _restore_sequence(target: Any, saved: list[Any]) -> None:
    if len(target) != len(saved) or not all(map(operator.is_, target, saved)):
        base: Any = list if isinstance(target, list) else collections.deque
        base.clear(target)
        base.extend(target, saved)


def _restore_set(target: set[Any], saved: list[Any]) -> None:
    if {id(item) for item in target} != {id(item) for item in saved}:
        set.clear(target)
        set.update(target, saved)


def _restore_cell(cell: types.CellType, content: Any) -> None:
    try:
        changed = cell.cell_contents is not content
    except ValueError:
        changed = True
    if changed:
        cell.cell_contents = content


def _restore_class(cls: type, saved: dict[str, Any]) -> None:
    now = dict(vars(cls))
    with suppress(AttributeError, TypeError):  # what Python itself keeps there
        for name in now.keys() - saved.keys():
            type.__delattr__(cls, name)
        for name, value in saved.items():
            if now.get(name) is not value:
                type.__setattr__(cls, name, value)


def _restore_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    if parameter.grad is not gradient:
        parameter.grad = gradient


def _forget_calls(function: Any, misses: int) -> None:
    """Empty a cache that has grown: what was computed meanwhile may be fake."""
    if function.cache_info().misses != misses:
        function.cache_clear()
