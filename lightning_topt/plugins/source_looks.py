"""The source of a function, and that of the functions it calls, says what it looks at; nothing is
run.

A name is followed to the object it stands for (a submodule, a method, a helper) where that is known
before running.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_topt.plugins.held_parameters import is_library
from lightning_topt.plugins.known_members import UNKNOWN, has_parameters, member_of, property_getter

GRADIENTS = frozenset(
    [
        "grad",
        "grad_norm",
        "clip_grad_norm_",
        "clip_grad_norm",
        "clip_grad_value_",
        "clip_grads_with_norm_",
    ]
)
PARAMETERS = frozenset(
    [
        "parameters",
        "named_parameters",
        "get_parameter",
        "state_dict",
        "weight",
        "bias",
        "update_parameters",
        "parameters_to_vector",
        "vector_to_parameters",
        "trainable_parameters",
    ]
)
HARMLESS = frozenset(
    [
        "device",
        "dtype",
        "is_cuda",
        "requires_grad",
        "numel",
        "nelement",
        "shape",
        "size",
        "ndim",
        "dim",
    ]
)
HARMLESS_CALLS = frozenset(
    [
        *(
            "isinstance",
            "issubclass",
            "type",
            "id",
            "print",
            "repr",
            "str",
            "super",
            "len",
            "next",
            "callable",
        ),
        *("hasattr", "getattr", "setattr", "delattr"),
    ]
)
KNOWS_SHARDS = frozenset({"full_tensor", "to_local"})
MODES = frozenset({"train", "eval", "training"})
MAX_DEPTH = 5


@dataclass(frozen=True)
class Reader:
    """A `Reader` has what a reading of one hook knows: the model, what counts as looking, and
    whether calls of the model count, or parameters that are attributes. It notes what the code
    `computes`: ``"gradients"``, by `torch.autograd.grad`, which does not look at those there are.
    """

    module: pl.LightningModule
    looks: frozenset[str]
    calls_count: bool
    attributes_count: bool = False
    seen: set[tuple[int, int]] = field(default_factory=set)
    computes: set[str] = field(default_factory=set)

    def is_computed(self, value: Any) -> bool:
        """Return whether `value` is the function that computes gradients, and note it."""
        if value is torch.autograd.grad:
            self.computes.add("gradients")
        return value is torch.autograd.grad


def look_into(function: Any, arguments: tuple[Any, ...], reader: Reader, depth: int) -> str | None:
    """Return what `function` looks at: "gradients", "parameters", "calls the model" and the like;
    or None.

    `arguments`: those that are known, by position.
    """
    function = _plain_function(function)
    code = getattr(function, "__code__", None)
    if (
        code is None
        or depth > MAX_DEPTH
        or is_library(function.__module__)
        or _is_standard(function)
    ):
        return None
    key = (id(code), id(arguments[0]) if arguments else 0)
    if key in reader.seen:
        return None
    reader.seen.add(key)
    tree = _source_tree(function)
    if tree is None:
        return _by_names(code, reader)
    scope: dict[str, Any] = dict(zip(code.co_varnames[: code.co_argcount], arguments, strict=False))
    return _Function(function, tree, scope, reader, depth).looks()


def _plain_function(function: Any) -> Any:
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, staticmethod | classmethod | types.MethodType):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif not isinstance(function, type) and not hasattr(function, "__code__"):
            function = vars(type(function)).get("__call__", len)
        else:
            return function


def _is_standard(function: Any) -> bool:
    return (function.__module__ or "").partition(".")[0] in sys.stdlib_module_names - {"__main__"}


def _source_tree(function: Any) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None


def _by_names(code: types.CodeType, reader: Reader) -> str | None:
    """Without the source (an interactive session): by the names in the compiled code alone."""
    names = set(code.co_names)
    if looked := names & reader.looks:
        return _title(min(looked))
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return next((found for constant in inner if (found := _by_names(constant, reader))), None)


def _title(name: str) -> str:
    return "gradients" if name in GRADIENTS else "parameters"


@dataclass(frozen=True)
class _Function:
    function: Any
    tree: ast.AST
    scope: Mapping[str, Any]
    reader: Reader
    depth: int

    def looks(self) -> str | None:
        parents = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }
        if any(isinstance(node, ast.Attribute) and node.attr in KNOWS_SHARDS for node in parents):
            return None
        groups = any(
            isinstance(node, ast.Attribute) and node.attr == "param_groups" for node in parents
        )
        found: set[str | None] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute):
                found.add(self._attribute(node, parents))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                found.add(self._name(node, parents))
            elif groups and isinstance(node, ast.Subscript) and _is_params_of_group(node):
                found.add("parameters")
            elif isinstance(node, ast.Call):
                found.add(self._call(node))
        said = sorted(clause for clause in found if clause)
        return next(
            (clause for clause in ("gradients", "parameters", *said) if clause in said), None
        )

    def _attribute(self, node: ast.Attribute, parents: Mapping[ast.AST, ast.AST]) -> str | None:
        base = self._value(node.value)
        if node.attr in self.reader.looks and (
            base is UNKNOWN or isinstance(base, types.ModuleType) or has_parameters(base)
        ):
            is_harmless = self.reader.is_computed(self._value(node)) or _is_harmless(node, parents)
            return None if is_harmless else _title(node.attr)
        if (getter := property_getter(base, node.attr)) is not None:
            return look_into(getter, (base,), self.reader, self.depth + 1)
        value = self._value(node)
        if isinstance(value, nn.Parameter) and (
            self.reader.calls_count or self.reader.attributes_count
        ):
            return None if _is_harmless(node, parents) else "parameters"
        if not self.reader.calls_count:
            return None
        if (
            isinstance(value, nn.Module)
            and has_parameters(value)
            and not self._is_used_harmlessly(node, parents)
        ):
            return f"uses {node.attr!r}"
        return None

    def _name(self, node: ast.Name, parents: Mapping[ast.AST, ast.AST]) -> str | None:
        value = self._value(node)
        if self.reader.is_computed(value):
            return None
        if node.id in self.reader.looks and isinstance(value, types.FunctionType):
            return _title(node.id)
        if not (self.reader.calls_count and isinstance(value, nn.Module) and has_parameters(value)):
            return None
        parent = parents[node]
        if isinstance(parent, ast.Call) and parent.func is node:
            return "calls the model"
        if (
            isinstance(parent, ast.Call)
            and node in parent.args
            and not self._takes_harmlessly(parent)
        ):
            return "hands the model to a function"
        return None

    def _is_used_harmlessly(self, node: ast.Attribute, parents: Mapping[ast.AST, ast.AST]) -> bool:
        """Whether of a module only what has no parameters is used: its mode, a number, a further
        module.
        """
        parent = parents[node]
        if isinstance(parent, ast.Call):
            return node in parent.args and self._takes_harmlessly(parent)
        if not isinstance(parent, ast.Attribute):
            return False
        value = self._value(parent)
        return (
            parent.attr in MODES | self.reader.looks
            or (value is not UNKNOWN and not callable(value))
            or (isinstance(value, nn.Module))
        )

    def _takes_harmlessly(self, call: ast.Call) -> bool:
        """Whether the called function is known not to look, or is read itself."""
        if isinstance(call.func, ast.Name) and call.func.id in HARMLESS_CALLS:
            return True
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call):
            return _is_super(call.func.value)  # base classes are read by themselves
        value = self._value(call.func)
        return isinstance(value, types.FunctionType | types.MethodType) and not is_library(
            value.__module__
        )

    def _call(self, node: ast.Call) -> str | None:
        value = self._value(node.func)
        if not isinstance(value, types.FunctionType | types.MethodType):
            return None
        arguments = [self._value(argument) for argument in node.args]
        if isinstance(value, types.MethodType):
            arguments.insert(0, value.__self__)
        return look_into(value, tuple(arguments), self.reader, self.depth + 1)

    def _value(self, node: ast.AST) -> Any:
        """The object that an expression of names and attributes stands for, without running any
        code.
        """
        if isinstance(node, ast.Name):
            return self._variable(node.id)
        if isinstance(node, ast.Attribute):
            return member_of(self._value(node.value), node.attr, self.reader.module)
        return UNKNOWN

    def _variable(self, name: str) -> Any:
        if name in self.scope:
            return self.scope[name]
        code = self.function.__code__
        if name in code.co_freevars and self.function.__closure__:
            cell = self.function.__closure__[code.co_freevars.index(name)]
            try:
                return cell.cell_contents
            except ValueError:
                return UNKNOWN
        return UNKNOWN if name in code.co_varnames else self.function.__globals__.get(name, UNKNOWN)


def _is_super(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id == "super"


def _is_params_of_group(node: ast.Subscript) -> bool:
    """Return whether this is ``group["params"]`` of an optimizer's groups."""
    return (
        isinstance(node.slice, ast.Constant)
        and node.slice.value == "params"
        and isinstance(node.ctx, ast.Load)
    )


def _is_harmless(node: ast.Attribute, parents: Mapping[ast.AST, ast.AST]) -> bool:
    """Whether of the parameters only devices, dtypes and sizes are used, which shards have too."""
    outer = parents[node]
    if isinstance(outer, ast.Attribute):
        return outer.attr in HARMLESS
    if not isinstance(outer, ast.Call) or outer.func is not node:
        return False
    outer, call = parents[outer], outer
    if isinstance(outer, ast.Call) and isinstance(outer.func, ast.Name) and outer.func.id == "next":
        attribute = parents[outer]
        return isinstance(attribute, ast.Attribute) and attribute.attr in HARMLESS
    if isinstance(outer, ast.comprehension) and outer.iter is call:
        names = {n.id for n in ast.walk(outer.target) if isinstance(n, ast.Name)}
        uses = [
            n
            for n in ast.walk(parents[outer])
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
        ]
        return all(
            isinstance(attribute := parents[use], ast.Attribute) and attribute.attr in HARMLESS
            for use in uses
            if use.id in names
        )
    return False
