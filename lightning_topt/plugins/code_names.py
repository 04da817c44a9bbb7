"""What user code names, read from compiled code that is not run.

A `Reader` goes through a function and what that calls in turn. Paths of names (`code_paths`) are
followed to the objects that they stand for (a submodule, a method, a helper), where these are
known without running code. Code that gets at a parameter by another way goes unseen.

    own_functions    the user's implementations of a hook
    Reader.reads     what such a function reads of parameters and gradients
    read_code        a `Reader` that went through hooks and all that they may call
    names_of_step    all names that a training step uses
"""

from __future__ import annotations

import dis
import functools
import inspect
import logging
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_topt.plugins.code_paths import (
    ELSEWHERE,
    LOOP,
    NEXT,
    Call,
    PathStep,
    StackSlot,
    Use,
    inner_codes,
    listing,
)

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
# What of Python's own library may get a module.
_TELLS = frozenset({"logging", "warnings", "inspect", "typing"})
_KNOWS_SHARDS = frozenset({"full_tensor", "to_local"})
_MODES = frozenset({"train", "eval", "training"})
_THE_MODULE = frozenset({"pl_module", "lightning_module", "module", "model"})  # as an argument
# How deep calls are followed, in the user's code and in installed packages.
_DEPTH, _INSTALLED_DEPTH = 20, 5
_UNBOUND = (staticmethod, classmethod, functools.partial, type)  # get no instance from a class
_FUNCTIONS = (
    *(types.FunctionType, types.MethodType, functools.partial),
    *(staticmethod, classmethod),
)


def is_library(module_name: str | None) -> bool:
    """Return whether code of that module is torch's, Lightning's or this package's."""
    return (module_name or "").partition(".")[0] in LIBRARIES


def own_functions(owner: Any, name: str) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield the user's implementations of a method, and the arguments that they have already.

    They are on the object, and in its classes; in base classes too, which `super()` may call.
    """
    if callable(on_object := getattr(owner, "__dict__", {}).get(name)):
        yield on_object, ()
    for cls in type(owner).__mro__:
        if name in vars(cls) and not is_library(cls.__module__):
            function = vars(cls)[name]
            is_bound = hasattr(type(function), "__get__") and not isinstance(function, _UNBOUND)
            yield function, ((owner,) if is_bound else ())


def names_of_step(module: pl.LightningModule) -> frozenset[str]:
    """Return all names of globals and attributes that user code in `training_step` may use."""
    return frozenset(read_code(module, [(module, "training_step")]).used)


def read_code(
    module: pl.LightningModule, hooks: Iterable[tuple[Any, str]], *, widely: bool = False
) -> Reader:
    """Return a reader that went through user code of hooks, and all that this may call.

    Args:
        module: whose parts they may call.
        hooks: objects, and names of their methods.
        widely: whether to read, too, what may be called of unknown objects, see `_read_widely`.
    """
    reader = Reader(module)
    hooks = [*hooks]
    parts = ((part, "forward") for part in module.modules())
    for owner, name in (*hooks, *parts):
        for function, own in own_functions(owner, name):
            reader.follow(function, own)
    # Whoever has the module may call its methods.
    done: set[str] = set()
    while todo := reader.used - done:
        done |= todo
        for name in todo:
            for function, own in own_functions(module, name):
                reader.follow(function, own)
        if widely:
            _read_widely(reader, {type(owner) for owner, _ in hooks})
    return reader


def _read_widely(reader: Reader, classes: set[type]) -> None:
    """Read all methods that code names: of `classes`, of those that code sees, of a model's parts.

    Also forward hooks, and what functions import themselves. Not of installed packages.
    """
    parts = [*reader.module.modules()]
    for part in parts:
        for function in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
            reader.follow(function)
    classes = classes | {type(part) for part in parts}
    imported = [sys.modules[name] for name in reader.imports if name in sys.modules]
    scopes = [*reader.scopes.values(), *map(vars, imported)]
    classes |= {each for scope in scopes for each in scope.values() if isinstance(each, type)}
    bases = {base for cls in classes for base in cls.__mro__}
    called = {name for name in reader.used if not name.startswith("__")}
    found: list[Any] = []
    for base in bases:
        if not is_library(base.__module__) and not _is_standard(base.__module__):
            names = called | {"__call__", "__enter__", "__exit__"}
            names |= {"__init__"} if base.__name__ in called else set()
            found += [vars(base)[name] for name in names & vars(base).keys()]
    found += [vars(each)[name] for each in imported for name in called & vars(each).keys()]
    for function in found:
        plain, _ = _plain(function)
        if plain is not None and "-packages" not in plain.__code__.co_filename:
            reader.follow(function)


class _Called(NamedTuple):
    """A function that is to be read, with what is known of its arguments."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    depth: int  # of calls


@dataclass
class Reader:
    """Reads functions that may get at the parameters of `module`.

    Args:
        module: which is trained.
        names: what counts as reading, of a parameter, a module with some, or something unknown.
        calls_count: whether calls of modules with parameters do.
        attributes_count: whether parameters do that are attributes; always with `calls_count`.

    `used` are the names in all code that was read, `homes` the modules that its globals come from,
    `scopes` these globals, `imports` the modules that functions import; `computes_gradients` is
    whether it uses `torch.autograd.grad`, which does not read the gradients there are.
    """

    module: pl.LightningModule
    names: frozenset[str] = frozenset()
    calls_count: bool = False
    attributes_count: bool = False
    used: set[str] = field(default_factory=set)
    homes: set[str] = field(default_factory=set)
    scopes: dict[int, dict[str, Any]] = field(default_factory=dict)
    imports: set[str] = field(default_factory=set)
    computes_gradients: bool = False
    # With the arguments, which keep their ids as long as they are here.
    _seen: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)
    _bare: dict[types.FunctionType, types.FunctionType] = field(default_factory=dict)
    _todo: deque[_Called] = field(default_factory=deque)

    def reads(self, function: Any, *arguments: Any) -> str | None:
        """Return what `function` does: "reads gradients", "calls the model" ...; None for nothing.

        `arguments` are those that are known, by position.
        """
        found = self.follow(function, arguments)
        first = [clause for clause in ("reads gradients", "reads parameters") if clause in found]
        return next(iter([*first, *sorted(found)]), None)

    def follow(self, function: Any, arguments: tuple[Any, ...] = ()) -> set[str]:
        """Return all that `function` reads, and what it calls."""
        found: set[str] = set()
        self._todo.append(_Called(function, arguments, {}, depth=0))
        while self._todo:
            found |= self._read(self._todo.popleft())
        return found

    def _read(self, called: _Called) -> set[str]:
        """Return what one function reads, and note what it calls."""
        for wrapper in _wrappers_of(called.function):
            if wrapper not in self._bare:
                self._bare[wrapper] = _without_wrapped(wrapper)
                self._todo.append(called._replace(function=self._bare[wrapper]))
        function, own = _plain(called.function)
        if function is None or is_library(function.__module__):
            return set()
        if _is_of_python(function):
            return set()
        code: types.CodeType = function.__code__
        is_installed = "-packages" in code.co_filename
        if called.depth > (_INSTALLED_DEPTH if is_installed and self.names else _DEPTH):
            return set()
        # Arguments are known where they are given, else by name.
        parameters = _parameters_of(code)
        by_name = () if is_installed else _THE_MODULE
        scope = {name: self.module for name in parameters if name in by_name}
        positional = parameters[: code.co_argcount]
        given = zip(positional, (*own, *called.arguments), strict=False)
        known = [*given, *called.keywords.items()]
        scope |= {name: value for name, value in known if value is not UNKNOWN}
        # Once for the objects that it is called with.
        key = function, *sorted((name, *_identity(value)) for name, value in scope.items())
        if key in self._seen:
            return set()
        self._seen[key] = scope
        codes = [code, *inner_codes(code)]
        names = {name for each in codes for name in each.co_names}
        attributes = set().union(*(listing(each).attributes for each in codes))
        # Loggers of Python write on every rank.
        outer = function.__globals__
        loggers = {n for n in names - attributes if isinstance(outer.get(n), logging.Logger)}
        self.used |= names - loggers
        self.homes |= {home for name in names & outer.keys() for home in _homes_of(outer[name])}
        self.scopes[id(outer)] = outer
        self.imports |= {
            name for each in codes for name in _imports_of(each, outer.get("__package__"))
        }
        # Code that knows shards may read them.
        if self.names and names & _KNOWS_SHARDS:
            return set()
        found = {
            clause
            for each in codes
            for use in listing(each).uses
            for clause in self._judge(use, _Code(function, each, scope, self.module, called.depth))
        }
        is_keyed = any("params" in each.co_consts for each in codes)
        if is_keyed and "param_groups" in names and self.names & PARAMETERS:
            found.add("reads parameters")  # group["params"]
        return found

    def _judge(self, use: Use, code: _Code) -> Iterator[str]:
        """Yield what is read along one path."""
        owner: Any = UNKNOWN
        value = code.variable(use.path[0])
        for at, name in enumerate(use.path):
            if isinstance(name, Call | PathStep):
                value = UNKNOWN
                continue
            if at:
                owner, value = value, _attribute_of(value, name, self.module)
            rest = use.path[at + 1 :]
            is_harmless = _is_harmless(rest) or code.iterates_harmlessly(rest, use)
            # A name that reads, of something with parameters, or of something unknown.
            if value is torch.autograd.grad:
                self.computes_gradients = True
            elif name in self.names and (
                isinstance(value, types.FunctionType)
                if at == 0
                else owner is UNKNOWN or isinstance(owner, types.ModuleType) or _is_trained(owner)
            ):
                if not is_harmless:
                    yield f"reads {'gradients' if name in GRADIENTS else 'parameters'}"
            elif isinstance(value, nn.Parameter):
                if (self.calls_count or self.attributes_count) and not is_harmless:
                    yield "reads parameters"
            elif self.calls_count and _is_trained(value):
                part = None if at == 0 or value is self.module else name
                yield from self._uses_of_module(value, part, rest, use, code)
            # A function, or a property, is read as well, with what it is called with.
            call = rest[0] if rest and isinstance(rest[0], Call) else Call((), {})
            arguments = tuple(map(code.value, call.arguments))
            keywords = {key: code.value(slot) for key, slot in call.keywords.items()}
            is_plain = at == 0 or isinstance(owner, types.ModuleType | type)
            found = [(value, ())] if is_plain else own_functions(owner, name)
            for function, own in found:
                given = (*own, *arguments)
                self._todo.append(_Called(function, given, keywords, code.depth + 1))

    def _uses_of_module(
        self, value: nn.Module, part: str | None, rest: tuple[Any, ...], use: Use, code: _Code
    ) -> Iterator[str]:
        """Yield what is done with a module that has parameters, unless that is harmless.

        `part` is its name in another one, None for the whole model; `rest`, what comes after it.
        """
        clause = f"uses {part!r}"
        if not rest and use.callee is not None:
            # What is called is read with it, if that is possible.
            if not code.is_taken(use):
                yield clause if part else "hands the model to a function"
        elif not rest or rest[0] == LOOP:
            if part:
                yield clause
        elif isinstance(rest[0], Call):
            yield clause if part else "calls the model"
        elif rest[0] != NEXT:
            # Its mode, a number, a further module; methods of the whole model are read.
            found = _attribute_of(value, rest[0], self.module)
            known = isinstance(found, nn.Module) or (found is not UNKNOWN and not callable(found))
            if part and not known and rest[0] not in _MODES | self.names:
                yield clause


def _is_harmless(rest: tuple[Any, ...]) -> bool:
    """Return whether that is taken of a parameter, of a call's result, or of its first one."""
    calls = len(rest) > 0 and isinstance(rest[0], Call)
    rest = rest[calls:]
    rest = rest[len(rest) > 0 and rest[0] == NEXT :]
    return len(rest) > 0 and not isinstance(rest[0], Call) and rest[0] in _HARMLESS


# ---- what a name stands for ----------------------------------------------------------------------


class _Unknown:
    """A value that only running the code would tell."""


UNKNOWN = _Unknown()


class _Code(NamedTuple):
    """The code of a function, or of one inside of it, and its arguments as far as known."""

    function: Any  # a types.FunctionType, which on a class would be a method
    code: types.CodeType
    scope: dict[str, Any]
    module: pl.LightningModule
    depth: int

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

    def value(self, slot: StackSlot) -> Any:
        """Return what a slot of the stack stands for: of several values, one with parameters."""
        values = [self._value_of(path) for path in slot.paths]
        first = values[0] if len(values) == 1 else UNKNOWN
        return next(filter(_is_trained, values), first)

    def _value_of(self, path: tuple[Any, ...]) -> Any:
        if any(isinstance(name, Call | PathStep) for name in path):
            return UNKNOWN
        value = self.variable(path[0])
        for name in path[1:]:
            value = _attribute_of(value, name, self.module)
        return value

    def is_taken(self, use: Use) -> bool:
        """Return whether an argument goes to something harmless, or to code that is read."""
        assert use.callee is not None
        return len(use.callee.paths) > 0 and all(
            self._takes(path, use.place) for path in use.callee.paths
        )

    def _takes(self, path: tuple[Any, ...], place: int | str | None) -> bool:
        if len(path) == 1:
            is_builtin = self.variable(path[0]) is UNKNOWN and path[0] not in self.code.co_varnames
            if is_builtin and path[0] in _HARMLESS_CALLS:
                return True
        # super().method(): base classes are read by themselves.
        if len(path) == 3 and path[0] == "super" and isinstance(path[1], Call):
            return True
        function, own = _plain(self._value_of(path))
        if function is None or is_library(function.__module__):
            return False
        if _is_of_python(function):
            return function.__module__ in _TELLS
        parameters = _parameters_of(function.__code__)
        if isinstance(place, int):
            return place + len(own) < function.__code__.co_argcount
        return place in parameters

    def iterates_harmlessly(self, rest: tuple[Any, ...], use: Use) -> bool:
        """Return whether a loop takes devices, dtypes and sizes of parameters alone."""
        if (
            not rest
            or rest[-1] != LOOP
            or len(rest) > 2
            or not isinstance(rest[0], Call | PathStep)
        ):
            return False
        if use.names_in_loop is not None:
            return _are_harmless(use.names_in_loop, self.code)
        # The loop of a comprehension is in a function that gets the iterator.
        inner = use.callee.constant if use.callee else None
        if not isinstance(inner, types.CodeType) or use.callee != StackSlot(constant=inner):
            return False
        loops = [each for each in listing(inner).uses if each.path[0] == ".0"]
        return len(loops) > 0 and all(
            each.names_in_loop is not None and _are_harmless(each.names_in_loop, inner)
            for each in loops
        )


def _are_harmless(variables: list[str], code: types.CodeType) -> bool:
    """Return whether only devices, dtypes and sizes of variables are used in `code`."""
    return ELSEWHERE not in variables and all(
        len(use.path) > 1 and _is_harmless(use.path[1:2])
        for each in (code, *inner_codes(code))
        for use in listing(each).uses
        if use.path[0] in variables and (each is code or use.path[0] in each.co_freevars)
    )


def _homes_of(value: Any) -> list[str]:
    """Return the names of the modules that a function, an object, or a class and its bases, are of.

    Of a module its own name.
    """
    if isinstance(value, types.ModuleType):
        return [value.__name__]
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return [str(value.__module__)]
    cls = value if isinstance(value, type) else type(value)
    return [str(base.__module__) for base in cls.__mro__]


def _is_of_python(function: types.FunctionType) -> bool:
    """Return whether this is code of the standard library, which is not read."""
    return _is_standard(function.__module__)


def _is_standard(module_name: str | None) -> bool:
    home = (module_name or "").partition(".")[0]
    return home in sys.stdlib_module_names and home != "__main__"


def _identity(value: Any) -> tuple[int, ...]:
    """Return what is equal for one object alone; a method is another one each time."""
    is_method = isinstance(value, types.MethodType)
    return (id(value.__self__), id(value.__func__)) if is_method else (id(value),)


@functools.cache
def _imports_of(code: types.CodeType, package: str | None) -> frozenset[str]:
    """Return what Python modules a function may import, that are no library."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME"}
    found |= {f"{package}.{name}" for name in found}
    return frozenset(name for name in found if not is_library(name) and not _is_standard(name))


def _parameters_of(code: types.CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _plain(function: Any) -> tuple[types.FunctionType | None, tuple[Any, ...]]:
    """Return the function inside of methods, partial functions, decorators and callable objects.

    With the first arguments that these give it.
    """
    own: tuple[Any, ...] = ()
    while True:
        if isinstance(function, functools.partial):
            function, own = function.func, (*function.args, *own)
        elif isinstance(function, property):
            function = function.fget
        elif isinstance(function, staticmethod):
            function = function.__func__
        elif isinstance(function, classmethod):
            function, own = function.__func__, (UNKNOWN, *own)
        elif isinstance(function, types.MethodType):
            function, own = function.__func__, (function.__self__, *own)
        elif isinstance(function, types.FunctionType) and not hasattr(function, "__wrapped__"):
            return function, own
        else:
            inner = inspect.getattr_static(function, "__wrapped__", None)
            if inner is None:
                inner = inspect.getattr_static(type(function), "__call__", None)
                own = (function, *own)
            if not isinstance(inner, _FUNCTIONS):
                return None, ()
            function = inner


def _wrappers_of(function: Any) -> Iterator[types.FunctionType]:
    """Yield what `functools.wraps` has put around a function."""
    # by their types: an object may answer for any attribute, or raise
    while isinstance(function, types.MethodType | staticmethod | classmethod):
        function = function.__func__
    while isinstance(function, types.FunctionType) and hasattr(function, "__wrapped__"):
        yield function
        function = function.__wrapped__


def _without_wrapped(wrapper: types.FunctionType) -> types.FunctionType:
    """Return a function that is like `wrapper` alone."""
    return types.FunctionType(
        wrapper.__code__, wrapper.__globals__, wrapper.__name__, None, wrapper.__closure__
    )


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
