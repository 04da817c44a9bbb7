"""What user code names, read from compiled code that is not run.

A `Reader` goes through a function and what that calls in turn. Paths of names (``self.net.weight``)
are followed to the objects that they stand for (a submodule, a method, a helper), where these are
known without running code. Code that gets at a parameter by another way goes unseen.

    own_functions    the user's implementations of a hook
    Reader.reads     what such a function reads of parameters and gradients
    names_of_step    all names that a training step uses
"""

from __future__ import annotations

import dis
import functools
import inspect
import logging
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import nn

LIBRARIES = frozenset(
    [
        *("torch", "torchmetrics", "functorch", "lightning_topt"),
        *("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning"),
    ]
)
# Names that read gradients, and parameters.
GRADIENTS = frozenset(
    [
        *("grad", "grad_norm", "clip_grad_norm_", "clip_grad_norm", "clip_grad_value_"),
        "clip_grads_with_norm_",
    ]
)
PARAMETERS = frozenset(
    [
        *("parameters", "named_parameters", "get_parameter", "state_dict", "weight", "bias"),
        *("update_parameters", "parameters_to_vector", "vector_to_parameters"),
        "trainable_parameters",
    ]
)
# What of a parameter is the same for its shards.
_HARMLESS = frozenset(
    [
        *("device", "dtype", "is_cuda", "requires_grad"),
        *("numel", "nelement", "shape", "size", "ndim", "dim"),
    ]
)
_HARMLESS_CALLS = frozenset(
    [
        *("isinstance", "issubclass", "type", "id", "print", "repr", "str", "super", "len"),
        *("next", "callable", "hasattr", "getattr", "setattr", "delattr"),
    ]
)
_KNOWS_SHARDS = frozenset({"full_tensor", "to_local"})
_MODES = frozenset({"train", "eval", "training"})
_THE_MODULE = frozenset({"pl_module", "lightning_module", "module", "model"})  # as an argument


def is_library(module_name: str | None) -> bool:
    """Return whether code of that module is torch's, Lightning's or this package's."""
    return (module_name or "").partition(".")[0] in LIBRARIES


def own_functions(owner: Any, name: str) -> Iterator[Callable[..., Any]]:
    """Yield the user's implementations of a method.

    They are on the object, and in its classes; in base classes too, which `super()` may call.
    """
    if callable(on_object := getattr(owner, "__dict__", {}).get(name)):
        yield on_object
    for cls in type(owner).__mro__:
        if name in vars(cls) and not is_library(cls.__module__):
            yield vars(cls)[name]


def names_of_step(module: pl.LightningModule) -> frozenset[str]:
    """Return all names of globals and attributes that user code in `training_step` may use."""
    reader = Reader(module)
    for function in own_functions(module, "training_step"):
        reader.follow(function, (module,))
    for part in module.modules():
        for function in own_functions(part, "forward"):
            reader.follow(function, (part,))
    return frozenset(reader.used)


@dataclass
class Reader:
    """Reads functions that may get at the parameters of `module`.

    Args:
        module: which is trained.
        names: what counts as reading, of a parameter, a module with some, or something unknown.
        calls_count: whether calls of modules with parameters do.
        attributes_count: whether parameters do that are attributes; always with `calls_count`.

    `used` are the names in all code that was read; `computes_gradients` is whether it uses
    `torch.autograd.grad`, which does not read the gradients there are.
    """

    module: pl.LightningModule
    names: frozenset[str] = frozenset()
    calls_count: bool = False
    attributes_count: bool = False
    used: set[str] = field(default_factory=set)
    computes_gradients: bool = False
    _seen: set[tuple[types.CodeType, tuple[int, ...]]] = field(default_factory=set)

    def reads(self, function: Any, *arguments: Any) -> str | None:
        """Return what `function` does: "reads gradients", "calls the model" ...; None for nothing.

        `arguments` are those that are known, by position.
        """
        found = self.follow(function, arguments)
        first = [clause for clause in ("reads gradients", "reads parameters") if clause in found]
        return next(iter([*first, *sorted(found)]), None)

    def follow(self, function: Any, arguments: tuple[Any, ...] = ()) -> set[str]:
        """Return all that `function` reads, and what it calls."""
        function = _plain(function)
        if function is None or is_library(function.__module__):
            return set()
        if (function.__module__ or "").partition(".")[0] in sys.stdlib_module_names - {"__main__"}:
            return set()
        # Once for the objects that it is called with.
        code: types.CodeType = function.__code__
        key = code, tuple(map(id, arguments))
        if key in self._seen:
            return set()
        self._seen.add(key)
        # Arguments are known by position in a hook, by name in what it calls.
        parameters = code.co_varnames[: code.co_argcount]
        scope = {name: self.module for name in parameters if name in _THE_MODULE}
        known = zip(parameters, arguments, strict=False)
        scope |= {name: value for name, value in known if value is not UNKNOWN}
        codes = [code, *_inner(code)]
        names = {name for each in codes for name in each.co_names}
        # Loggers of Python write on every rank.
        outer = function.__globals__
        loggers = {name for name in names if isinstance(outer.get(name), logging.Logger)}
        self.used |= names - loggers
        found = {
            clause
            for each in codes
            for path in _paths(each)
            for clause in self._judge(path, _Code(function, each, scope))
        }
        is_keyed = any("params" in each.co_consts for each in codes)
        if is_keyed and "param_groups" in names and self.names & PARAMETERS:
            found.add("reads parameters")  # group["params"]
        # Code that knows shards may read them.
        return set() if names & _KNOWS_SHARDS else found

    def _judge(self, path: _Path, code: _Code) -> Iterator[str]:
        """Yield what is read along one path of names."""
        owner: Any = UNKNOWN
        value = code.variable(path.names[0])
        for at, name in enumerate(path.names):
            if name in _STEPS:
                value = UNKNOWN
                continue
            if at:
                owner, value = value, _attribute_of(value, name, self.module)
            rest = path.names[at + 1 :]
            is_harmless = next((each for each in rest if each != _CALL), None) in _HARMLESS
            # A name that reads, of something with parameters, or of something unknown.
            if value is torch.autograd.grad:
                self.computes_gradients = True
            elif name in self.names and (
                isinstance(value, types.FunctionType)
                if at == 0
                else owner is UNKNOWN or isinstance(owner, types.ModuleType) or _is_trained(owner)
            ):
                if not is_harmless and not code.iterates_harmlessly(rest):
                    yield f"reads {'gradients' if name in GRADIENTS else 'parameters'}"
            elif isinstance(value, nn.Parameter):
                if (self.calls_count or self.attributes_count) and not is_harmless:
                    yield "reads parameters"
            elif self.calls_count and _is_trained(value):
                part = None if at == 0 or value is self.module else name
                yield from self._uses_of_module(value, part, rest, path, code)
            # A function, or a property, is read as well.
            if at == 0 or isinstance(owner, types.ModuleType | type):
                yield from self.follow(value)
                continue
            for function in own_functions(owner, name):
                is_static = isinstance(function, staticmethod)
                yield from self.follow(function, () if is_static else (owner,))

    def _uses_of_module(
        self, value: nn.Module, part: str | None, rest: tuple[str, ...], path: _Path, code: _Code
    ) -> Iterator[str]:
        """Yield what is done with a module that has parameters, unless that is harmless.

        `part` is its name in another one, None for the whole model; `rest`, what comes after it.
        """
        taker, use = path.taker, f"uses {part!r}"
        if rest and rest[0] not in _STEPS:
            # Its mode, a number, a further module; methods of the whole model are read.
            found = _attribute_of(value, rest[0], self.module)
            known = isinstance(found, nn.Module) or (found is not UNKNOWN and not callable(found))
            if part and not known and rest[0] not in _MODES | self.names:
                yield use
        elif path.is_called:
            yield use if part else "calls the model"
        elif part and not taker:
            yield use
        elif taker and taker[0] not in _HARMLESS_CALLS:
            # It is handed to a function, which is read with it, or unknown.
            found = code.variable(taker[0])
            for name in taker[1:]:
                found = UNKNOWN if name in _STEPS else _attribute_of(found, name, self.module)
            function = _plain(found)
            if function is None or is_library(function.__module__):
                yield use if part else "hands the model to a function"
            else:
                own = (found.__self__,) if isinstance(found, types.MethodType) else ()
                yield from self.follow(function, (*own, *[UNKNOWN] * path.place, value))


# ---- paths of names ------------------------------------------------------------------------------


class _Path(NamedTuple):
    """A variable and attributes of it, as code reads them."""

    names: tuple[str, ...]  # among them `_STEPS`
    is_called: bool  # with what comes next as arguments
    taker: tuple[str, ...]  # the path of the function that probably gets it, () for none
    place: int  # as which argument


# A call, of what is before it or with that as its last argument; a loop over it.
_STEPS = _CALL, _LOOP = "()", "for"
_VARIABLES = re.compile("LOAD_(FAST|GLOBAL|NAME|DEREF)")
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
_TARGETS = frozenset({"STORE_ATTR", "DELETE_ATTR"})
_CALLS = frozenset({"PRECALL", "CALL", "CALL_FUNCTION", "CALL_METHOD"})
_SILENT = frozenset({"CACHE", "NOP", "EXTENDED_ARG", "RESUME"})
_ENDS = ("STORE", "POP", "RETURN")  # of a statement
# From Python 3.11 on a NULL on the stack marks what is called.
_HAS_NULL, _NULL_IS_AFTER = sys.version_info >= (3, 11), sys.version_info >= (3, 13)


@functools.cache
def _paths(code: types.CodeType) -> tuple[_Path, ...]:
    """Return the paths of names in `code`, without those in inner functions."""
    found: list[_Path] = []
    names: list[str] = []
    taker: tuple[str, ...] = ()
    is_called, before, place = False, "", 0
    for each in dis.get_instructions(code):
        kind, value = each.opname, each.argval
        if kind in _SILENT:
            continue
        if kind in _ATTRIBUTES or kind in _TARGETS:
            names = [*(names or ["?"]), value]  # of a result, where there is no name
        if kind in _ATTRIBUTES:
            is_called = is_called or kind == "LOAD_METHOD" or "NULL" in each.argrepr
        elif kind in _CALLS:
            names += [_CALL] if names and names[-1] != _CALL else []
        elif kind == "GET_ITER":
            names += [_LOOP] if names else []
        elif kind == "PUSH_NULL":
            is_called = is_called or (_NULL_IS_AFTER and bool(names))
        else:
            # The path ends here, and another one may begin.
            loaded = value if isinstance(value, tuple) else (value,)  # two in one instruction
            loaded = loaded[kind.startswith("STORE") :] if _VARIABLES.search(kind) else ()
            for path in (tuple(names), *((name,) for name in loaded[:-1])):
                may_be_called = not _HAS_NULL and not taker and kind.startswith("LOAD")
                found += [_Path(path, is_called or may_be_called, taker, place)] if path else []
                place += len(path) > 0
                if {*path[1:]}.difference(_STEPS) or {*path[:1]}.difference(code.co_varnames):
                    taker, place = path, 0
            place += kind in ("LOAD_CONST", "LOAD_SMALL_INT")
            names = [*loaded[-1:]]
            is_pushed = before == "PUSH_NULL" and not _NULL_IS_AFTER
            is_called = bool(names) and (is_pushed or "NULL" in each.argrepr)
            taker = () if kind.startswith(_ENDS) else taker
        before = kind
    return tuple(found)


def _inner(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _inner(constant)


# ---- what a name stands for ----------------------------------------------------------------------


class _Unknown:
    """A value that only running the code would tell."""


UNKNOWN = _Unknown()


class _Code(NamedTuple):
    """The code of a function, or of one inside of it, and its arguments as far as known."""

    function: Any  # a types.FunctionType, which on a class would be a method
    code: types.CodeType
    scope: dict[str, Any]

    def variable(self, name: str) -> Any:
        """Return what a variable stands for."""
        outer = self.function.__code__
        if name in self.scope:
            return self.scope[name]
        if name in outer.co_freevars and self.function.__closure__:
            try:
                return self.function.__closure__[outer.co_freevars.index(name)].cell_contents
            except ValueError:
                return UNKNOWN
        is_local = name in (*self.code.co_varnames, *self.code.co_freevars, *outer.co_varnames)
        return UNKNOWN if is_local else self.function.__globals__.get(name, UNKNOWN)

    def iterates_harmlessly(self, rest: tuple[str, ...]) -> bool:
        """Return whether a generator takes devices, dtypes and sizes of parameters alone."""
        if _LOOP not in rest[:2] or rest[-1] == _LOOP:  # else a loop in this code
            return False
        return all(
            len(path.names) > 1 and path.names[1] in _HARMLESS
            for code in _inner(self.code)
            for path in _paths(code)
            if path.names[0] in code.co_varnames and path.names[0] != ".0"  # its argument
        )


def _plain(function: Any) -> types.FunctionType | None:
    """Return the function inside of methods, partial functions, decorators and callable objects."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, property):
            function = function.fget
        elif isinstance(function, staticmethod | classmethod | types.MethodType):
            function = function.__func__
        elif isinstance(function, types.FunctionType) and not hasattr(function, "__wrapped__"):
            return function
        else:
            called = vars(type(function)).get("__call__")
            function = inspect.getattr_static(function, "__wrapped__", called)
            if not isinstance(function, types.FunctionType):
                return None


def _attribute_of(owner: Any, name: str, module: pl.LightningModule) -> Any:
    """Return the object that ``owner.name`` stands for.

    `UNKNOWN` where only running the code would tell.
    """
    if owner is UNKNOWN:
        return UNKNOWN
    if isinstance(owner, pl.Trainer):
        return module if name in ("model", "lightning_module") else UNKNOWN
    if isinstance(owner, pl.LightningModule) and name == "trainer":
        return module._trainer or UNKNOWN
    if isinstance(owner, nn.Module):
        # nn.Module keeps these beside its attributes.
        for values in (owner._modules, owner._parameters, owner._buffers):
            if name in values:
                return values[name]
    value = inspect.getattr_static(owner, name, UNKNOWN)
    if isinstance(value, types.FunctionType) and not isinstance(owner, type | types.ModuleType):
        return types.MethodType(value, owner)
    return UNKNOWN if isinstance(value, property | types.MemberDescriptorType) else value


def _is_trained(value: Any) -> bool:
    """Return whether `value` is a parameter, or a module that has some."""
    return isinstance(value, nn.Parameter) or (
        isinstance(value, nn.Module) and next(value.parameters(), None) is not None
    )
