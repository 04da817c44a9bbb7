"""Run a user's code once more than the user asked for, and leave everything as if it had not run.

    with no_trace(module):
        copy.training_step(batch, 0)

[Note: what is saved] From the roots: built-in containers, modules of torch, and instances of
classes from user files; globals of these files, their classes with attributes, and the closures,
defaults and attributes of their functions. Each is saved shallowly, what is inside by itself, and
put back in place. Left alone are instances of library classes, data sets, loaders and samplers. So
is every object that owns a thread or a lock, which may change by itself meanwhile. Files, sockets,
iterators that something else advances, and the values of tensors are out of scope.
"""

from __future__ import annotations

import builtins
import collections
import functools
import gc
import logging
import operator
import queue
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_topt.graph.errors import is_users

MAX_VISITS = 100_000
MAX_ITEMS = 10_000  # of a container whose items are visited
ATOMS = (str, bytes, int, float, complex, type(None), Tensor, np.ndarray, torch.dtype, torch.device)
# change by themselves: objects that have one of these are left alone
ON_THEIR_OWN = (threading.Thread, type(threading.Lock()), type(threading.RLock()), queue.Queue)
NAMESPACES = (types.SimpleNamespace, collections.UserDict, collections.UserList)
Undo = Callable[[], object]
_AUTOCAST_DEVICES = ("cpu", "cuda")


@contextmanager
def no_trace(module: nn.Module, *roots: object) -> Iterator[None]:
    """Put back, at the end, random states, modes of torch and what user code can reach.

    These are the random states of torch (of every device in use), NumPy and Python, and generators
    that the module owns; whether gradients are computed, the default dtype and autocast;
    attributes, lists, dicts, sets, hooks and gradients that can be reached from `module` and
    `roots` (see [Note: what is saved]). `print` without a file and `logging` are silent meanwhile.
    """
    with random_states(), _modes_of_torch(), kept_objects(*roots_of(module), *roots):
        yield


@contextmanager
def kept_objects(*roots: object) -> Iterator[None]:
    """Put back, at the end, what user code can reach from `roots`.

    `print` and `logging` are silent meanwhile.
    """
    saved = SavedContainers(roots)
    with _silence():
        try:
            yield
        finally:
            saved.restore()


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage meanwhile.

    A collection takes long, and would end the life of tensors in cycles at no moment of the step.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def random_states() -> Iterator[None]:
    """Put back, at the end, the random states of torch, NumPy and Python."""
    uses_cuda = torch.cuda.is_initialized()
    devices = list(range(torch.cuda.device_count())) if uses_cuda else []
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def _modes_of_torch() -> Iterator[None]:
    # gradients, the default dtype, autocast
    gradients, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    casts = {
        kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in _AUTOCAST_DEVICES
    }
    caches = torch.is_autocast_cache_enabled()
    try:
        yield
    finally:
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(dtype)
        for kind, (enabled, cast_dtype) in casts.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, cast_dtype)
        torch.set_autocast_cache_enabled(caches)


@contextmanager
def _silence() -> Iterator[None]:
    """Let `print` to the standard output and `logging` do nothing.

    A debugger, which writes to a file that it names, can be used.
    """
    # the switches of `print` and `logging`, for all threads
    own_print, disabled = builtins.print, logging.root.manager.disable

    def quiet(*args: Any, file: Any = None, **kwargs: Any) -> None:
        if file is not None:
            own_print(*args, file=file, **kwargs)

    builtins.print = quiet
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        builtins.print = own_print
        logging.disable(disabled)


# ---- containers and attributes -------------------------------------------------------------------


class SavedContainers:
    """Everything that is reachable from `roots`, as it is now; see [Note: what is saved]."""

    def __init__(self, roots: Iterable[object]) -> None:
        self._undo: list[Undo] = []
        self._empty: list[dict[Any, Any]] = []  # most dicts of modules, such as those of hooks
        self._seen: dict[int, object] = {}
        todo = collections.deque(roots)  # breadth first: what is near is saved before the limit
        while todo and len(self._seen) < MAX_VISITS:
            value = todo.popleft()
            if isinstance(value, ATOMS) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value  # held, so that no other object gets its id
            todo += self._visit(value)

    def restore(self) -> None:
        """Put back in place what has changed."""
        for empty in self._empty:
            if dict.__len__(empty):
                _restore_dict(empty, [])
        for undo in self._undo:
            undo()

    def _visit(self, value: object) -> Iterable[object]:
        """Save `value` shallowly, and return what is inside of it."""
        # containers
        if isinstance(value, dict):
            if not dict.__len__(value):
                self._empty.append(value)
                return ()
            return self._save(
                value, [*_base(value).items(value)], _restore_dict, dict.values(value)
            )
        if isinstance(value, (list, collections.deque)):
            return self._save(value, [*value], _restore_sequence, value)
        if isinstance(value, set):
            return self._save(value, [*value], _restore_set, ())
        if isinstance(value, (tuple, types.MappingProxyType)):
            return value if isinstance(value, tuple) else value.values()
        # code, and what it closes over
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
        self,
        target: Any,
        saved: Any,
        restore: Callable[[Any, Any], None],
        inside: Iterable[object],
    ) -> Iterable[object]:
        """Note how to put `target` back, and return what of `inside` is to be visited."""
        self._undo.append(functools.partial(restore, target, saved))
        return (
            [item for item in inside if not isinstance(item, ATOMS)]
            if len(saved) <= MAX_ITEMS
            else ()
        )

    def _visit_cell(self, cell: types.CellType) -> Iterable[object]:
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            return ()
        self._undo.append(functools.partial(_restore_cell, cell, content))
        return (content,)

    def _visit_function(self, value: Any) -> Iterable[object]:
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
        # attributes, defaults, what it closes over, and the globals of its file
        found = [
            *self._visit(value.__dict__),
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
        ]
        return [*found, *(value.__closure__ or ()), value.__globals__]

    def _visit_class(self, cls: type) -> Iterable[object]:
        # its attributes, base classes and the globals of its file
        module = sys.modules.get(cls.__module__)
        inside = [*vars(cls).values(), *cls.__mro__[1:], *((module,) if module else ())]
        return self._save(cls, dict(vars(cls)), _restore_class, inside)

    def _visit_object(self, value: object) -> Iterable[object]:
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
        if isinstance(value, nn.Module):  # a backward pass of user code leaves gradients
            for parameter in value._parameters.values():
                if parameter is not None:
                    self._undo.append(
                        functools.partial(_restore_gradient, parameter, parameter.grad)
                    )
        return [*self._visit(attributes), *((type(value),) if of_user else ())]

    def _visit_generator(self, value: Any) -> Iterable[object]:
        if isinstance(value, torch.Generator):
            self._undo.append(functools.partial(value.set_state, value.get_state()))
        elif isinstance(value, np.random.Generator):
            self._undo.append(
                functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
            )
        else:
            self._undo.append(functools.partial(value.set_state, value.get_state()))
        return ()


def roots_of(module: nn.Module) -> Iterator[object]:
    """Yield where user code of a LightningModule may leave something.

    These are itself, the classes of its parts, its trainer, callbacks and data module.
    """
    yield module
    yield from {type(submodule) for submodule in module.modules()}
    trainer = getattr(module, "_trainer", None)
    if trainer is not None:
        yield vars(trainer)
        yield getattr(trainer, "datamodule", None)
        yield getattr(trainer, "callbacks", None)


def _base(target: dict[Any, Any]) -> Any:
    """Return the class whose methods say what `target` holds; a subclass may show other keys."""
    return collections.OrderedDict if isinstance(target, collections.OrderedDict) else dict


def _restore_dict(target: dict[Any, Any], saved: list[tuple[Any, Any]]) -> None:
    """Put back the items of a dict and their order."""
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
    if [*base.__iter__(target)] != [*wanted]:  # the same keys in another order
        base.clear(target)
        for key, value in saved:
            base.__setitem__(target, key, value)


def _restore_sequence(target: Any, saved: list[Any]) -> None:
    if len(target) != len(saved) or not all(map(operator.is_, target, saved)):
        base: Any = list if isinstance(target, list) else collections.deque
        base.clear(target)
        base.extend(target, saved)


def _restore_set(target: set[object], saved: list[object]) -> None:
    if {id(item) for item in target} != {id(item) for item in saved}:
        set.clear(target)
        set.update(target, saved)


def _restore_cell(cell: types.CellType, content: object) -> None:
    try:
        changed = cell.cell_contents is not content
    except ValueError:
        changed = True
    if changed:
        cell.cell_contents = content


def _restore_class(cls: type, saved: dict[str, object]) -> None:
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
