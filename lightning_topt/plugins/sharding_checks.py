"""Checks whether user code allows that parameters and gradients are sharded.

Sharding puts other Parameter objects into the module. Code that reads parameters or gradients
between the steps would see shards, and whoever else holds a Parameter would go on with the old one.
`why_unsharded` returns the first reason against it, as a clause that names what was found and,
where there is one, the way out:

    why_unshardable           parameters and submodules that torch's FSDP2 cannot shard
    why_changed_by_callbacks  Lightning's callbacks that prune or freeze
    why_hooked, why_watched   hooks whose source reads parameters or gradients
    why_held                  other holders of parameters (`held_parameters`)

Hooks are not run but read: their source is parsed, and so is that of the functions that they call.
A name is followed to the object that it stands for (a submodule, a method, a helper) where that is
known without running code.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_topt.plugins.held_parameters import is_library, why_held

# Names in source code that read gradients, and parameters.
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
# What of a parameter is the same for its shards.
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
        *("isinstance", "issubclass", "type", "id", "print", "repr", "str", "super", "len"),
        *("next", "callable", "hasattr", "getattr", "setattr", "delattr"),
    ]
)
KNOWS_SHARDS = frozenset({"full_tensor", "to_local"})
MODES = frozenset({"train", "eval", "training"})
MAX_DEPTH = 5  # of functions that call one another

_MOMENTS = ("batch_start", "batch_end", "epoch_start", "epoch_end", "end")
# Hooks of modules and callbacks that run between steps.
HOOKS = (
    *(f"on_{stage}_{moment}" for stage in ("train", "validation") for moment in _MOMENTS),
    "on_validation_start",
    "on_validation_model_eval",
    "on_validation_model_train",
    "on_validation_model_zero_grad",
    "on_before_zero_grad",
    "on_before_backward",
    "on_before_optimizer_step",
    "on_before_batch_transfer",
    "on_after_backward",
    "on_after_batch_transfer",
    "transfer_batch_to_device",
    "on_save_checkpoint",
    "optimizer_step",
    "optimizer_zero_grad",
    "backward",
    "configure_gradient_clipping",
    "lr_scheduler_step",
)
# In the steps themselves. What a capture sees is left to it: parameters that `training_step` reads
# are unsharded while it runs.
READ_IN_STEPS = {
    "training_step": frozenset({"grad", "state_dict"}),
    "validation_step": GRADIENTS | PARAMETERS,
}
# where torch keeps what was registered on a module
HOOKS_OF_MODULES = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
# loggers whose `watch` registers hooks
WATCHERS = frozenset({"wandb", "comet_ml", "neptune", "clearml", "aim"})


class _Unknown:
    """A value that only running the code would tell."""


UNKNOWN = _Unknown()


def why_unsharded(
    trainer: pl.Trainer, *, would_shard: Callable[[str], bool] = lambda _: True
) -> str | None:
    """Return why parameters cannot be sharded in this fit, as a clause, or None.

    ZeRO levels 0 and 1 run then. What torch cannot shard counts where the parameter's name
    `would_shard`.

    To be called once the module is on its device and the optimizers exist. A clause names what it
    found ("callback Norms reads gradients in on_after_backward") and, where there is one, the way
    out. Takes milliseconds, and up to half a second where somebody else holds parameters.
    """
    module, strategy = trainer.lightning_module, trainer.strategy
    optimizers = [getattr(optimizer, "_optimizer", optimizer) for optimizer in strategy.optimizers]
    return (
        why_unshardable(module, would_shard=would_shard)
        or why_changed_by_callbacks(trainer)
        or why_hooked(module)
        or why_watched(trainer)
        or why_held(module, optimizers=optimizers, model=strategy.model)
    )


def why_unshardable(
    module: nn.Module, *, would_shard: Callable[[str], bool] = lambda _: True
) -> str | None:
    """Return which parameter or submodule FSDP2 cannot shard, as a clause, or None.

    The clause names the way out. Parameters count whose name `would_shard`.
    """
    # Modules.
    for name, submodule in module.named_modules():
        if isinstance(submodule, torch.jit.ScriptModule):
            return f"{name!r} is a TorchScript module; give the module itself in its place"
        table = isinstance(submodule, nn.Embedding | nn.EmbeddingBag)
        if table and submodule.sparse and would_shard(f"{name}.weight"):
            return f"{name!r} has sparse gradients; leave out sparse=True"
    # Parameters.
    sharded = [
        (name, parameter) for name, parameter in module.named_parameters() if would_shard(name)
    ]
    for name, parameter in sharded:
        if reason := _why_unshardable(parameter):
            return f"parameter {name!r} {reason}"
    # FSDP2 gathers the parameters of a block in one buffer.
    dtypes = {parameter.dtype: name for name, parameter in sharded if parameter.requires_grad}
    if len(dtypes) > 1:
        (one, first), (other, second) = [
            (str(dtype).removeprefix("torch."), name) for dtype, name in dtypes.items()
        ][:2]
        return (
            f"trained parameters differ in dtype ({first!r}: {one}, {second!r}: "
            f"{other}); keep them in one dtype, and compute in another with the Trainer's "
            "precision"
        )
    return None


def _why_unshardable(parameter: nn.Parameter) -> str | None:
    if is_lazy(parameter):
        return "has no shape yet; run a batch through the module before the fit"
    if isinstance(parameter, DTensor):
        return "is sharded already (DTensor)"
    if parameter.is_meta:
        return "is on the meta device; give it values in configure_model"
    if type(parameter.data) is not Tensor:
        return f"is a {type(parameter.data).__name__}, a tensor class of its own"
    if parameter.dim() == 0:
        return "has no dimension to shard; give it the shape (1,)"
    if parameter.numel() == 0 and parameter.requires_grad:
        return "is empty; leave it out, or set its requires_grad to False"
    return None


def why_changed_by_callbacks(trainer: pl.Trainer) -> str | None:
    """Return which of Lightning's callbacks changes parameters, as a clause, or None.

    It replaces or freezes them during the run.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        name = type(callback).__name__
        if isinstance(callback, ModelPruning):
            return f"callback {name} prunes parameters"
        if isinstance(callback, BaseFinetuning):
            return f"callback {name} freezes parameters and trains them later"
    return None


def why_hooked(module: pl.LightningModule) -> str | None:
    """Return which registered hook reads parameters or gradients, as a clause, or None.

    It is registered on parameters or submodules.
    """
    # Hooks on parameters see gradients.
    for name, parameter in module.named_parameters():
        after = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for hook in (*(parameter._backward_hooks or {}).values(), *after.values()):
            if not is_library(_module_of(hook)):
                return f"a hook on parameter {name!r} ({_name_of_hook(hook)}) gets its gradient"
    # Hooks on modules may read anything.
    for name, submodule in module.named_modules():
        hooks = [hook for kind in HOOKS_OF_MODULES for hook in getattr(submodule, kind).values()]
        for hook in hooks:
            if is_library(_module_of(hook)):
                continue
            of_logger = _module_of(hook).partition(".")[0] in WATCHERS
            if of_logger or why_function_watches(hook, module):
                return (
                    f"a hook on {name or 'the LightningModule'!r} ({_name_of_hook(hook)}) reads "
                    "parameters"
                )
    return None


def _module_of(function: Any) -> str:
    inner = getattr(function, "func", function)  # a functools.partial
    return getattr(inner, "__module__", None) or type(inner).__module__


def _name_of_hook(function: Any) -> str:
    inner = getattr(function, "func", function)
    return getattr(inner, "__qualname__", None) or type(inner).__name__


# ---- hooks of modules and callbacks --------------------------------------------------------------


def why_watched(trainer: pl.Trainer) -> str | None:
    """Return which hook reads gradients or parameters, as a clause, or None.

    Hooks are those of the module and of callbacks, which run between the steps.
    """
    module = trainer.lightning_module
    # The steps themselves.
    for name, names in READ_IN_STEPS.items():
        for function in _own_functions(module, name):
            reader = Reader(module, names, calls_count=False)
            if found := read_function(function, (module,), reader, 0):
                return f"{type(module).__name__}.{name} reads {found}"
            reader = Reader(
                module,
                PARAMETERS,
                calls_count=False,
                attributes_count=True,
                computes=reader.computes,
            )
            if reader.computes and read_function(function, (module,), reader, 0):
                return (
                    f"{type(module).__name__}.{name} computes gradients, which may be those of "
                    "parameters that it reads"
                )
    # Hooks of the module, then those of callbacks.
    for name in HOOKS:
        for function in _own_functions(module, name):
            if found := read_function(
                function, (module,), Reader(module, GRADIENTS | PARAMETERS, calls_count=True), 0
            ):
                return f"{type(module).__name__}.{name} {_verb(found)}"
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            for function in _own_functions(callback, name):
                # LambdaCallback: a function of (trainer, module, ...)
                bound = name in vars(callback)
                arguments = (trainer, module) if bound else (callback, trainer, module)
                if found := read_function(
                    function, arguments, Reader(module, GRADIENTS | PARAMETERS, calls_count=True), 0
                ):
                    return f"callback {type(callback).__name__} {_verb(found)} in {name}"
    return None


def why_function_watches(function: Callable[..., Any], module: pl.LightningModule) -> str | None:
    """Return the same for one function that torch calls, such as a forward hook.

    It may have a module as its first argument.
    """
    return read_function(
        function, (module,), Reader(module, GRADIENTS | PARAMETERS, calls_count=False), 0
    )


def _verb(found: str) -> str:
    return found if found.startswith(("calls", "hands", "uses")) else f"reads {found}"


def _own_functions(owner: Any, name: str) -> Iterator[Callable[..., Any]]:
    """Yield the user's implementations of a hook.

    They are on the object, and in its classes; in base classes too, which `super()` may call.
    """
    if callable(on_object := vars(owner).get(name)):
        yield on_object
    for cls in type(owner).__mro__:
        if name in vars(cls) and not is_library(cls.__module__):
            yield vars(cls)[name]


# ---- reading source code -------------------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    """What is known while one hook's source is read.

    The model, what counts as reading, and whether calls of the model count, or parameters that are
    attributes. It notes what the code `computes`: ``"gradients"``, by `torch.autograd.grad`, which
    does not read those there are.
    """

    module: pl.LightningModule
    names: frozenset[str]
    calls_count: bool
    attributes_count: bool = False
    seen: set[tuple[int, int]] = field(default_factory=set)
    computes: set[str] = field(default_factory=set)

    def is_computed(self, value: Any) -> bool:
        """Return whether `value` is the function that computes gradients, and note it."""
        if value is torch.autograd.grad:
            self.computes.add("gradients")
        return value is torch.autograd.grad


def read_function(
    function: Any, arguments: tuple[Any, ...], reader: Reader, depth: int
) -> str | None:
    """Return what `function` reads: "gradients", "parameters", "calls the model" ...

    None where it reads nothing of these. `arguments`: those that are known, by position.
    """
    function = _plain_function(function)
    code = getattr(function, "__code__", None)
    if code is None or depth > MAX_DEPTH or is_library(function.__module__):
        return None
    top_level = (function.__module__ or "").partition(".")[0]
    if top_level in sys.stdlib_module_names - {"__main__"}:
        return None
    # Once for each object that it is called with.
    key = (id(code), id(arguments[0]) if arguments else 0)
    if key in reader.seen:
        return None
    reader.seen.add(key)
    tree = _source_tree(function)
    if tree is None:
        return _by_names(code, reader)
    # Arguments that are known.
    scope: dict[str, Any] = dict(zip(code.co_varnames[: code.co_argcount], arguments, strict=False))
    return _Function(function, tree, scope, reader, depth).reads()


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


def _source_tree(function: Any) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None


def _by_names(code: types.CodeType, reader: Reader) -> str | None:
    """Return what names in compiled code alone read, without the source.

    An interactive session has none.
    """
    names = set(code.co_names)
    if read := names & reader.names:
        return _kind_of_name(min(read))
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return next((found for constant in inner if (found := _by_names(constant, reader))), None)


def _kind_of_name(name: str) -> str:
    return "gradients" if name in GRADIENTS else "parameters"


@dataclass(frozen=True)
class _Function:
    function: Any
    tree: ast.AST
    scope: Mapping[str, Any]
    reader: Reader
    depth: int

    def reads(self) -> str | None:
        # A node does not know where it is used.
        parents = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }
        # Code that knows shards may read them.
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
        # A name that reads, of something with parameters, or of something unknown.
        if node.attr in self.reader.names and (
            base is UNKNOWN or isinstance(base, types.ModuleType) or has_parameters(base)
        ):
            is_harmless = self.reader.is_computed(self._value(node)) or _is_harmless(node, parents)
            return None if is_harmless else _kind_of_name(node.attr)
        # A property is read like a function.
        if (getter := property_getter(base, node.attr)) is not None:
            return read_function(getter, (base,), self.reader, self.depth + 1)
        # An attribute that is a parameter, or a module with some.
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
        if node.id in self.reader.names and isinstance(value, types.FunctionType):
            return _kind_of_name(node.id)
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
        """Return whether only parts of a module without parameters are used.

        These are its mode, a number, a further module.
        """
        parent = parents[node]
        if isinstance(parent, ast.Call):
            return node in parent.args and self._takes_harmlessly(parent)
        if not isinstance(parent, ast.Attribute):
            return False
        value = self._value(parent)
        return (
            parent.attr in MODES | self.reader.names
            or (value is not UNKNOWN and not callable(value))
            or (isinstance(value, nn.Module))
        )

    def _takes_harmlessly(self, call: ast.Call) -> bool:
        """Return whether the called function is known to be harmless, or is read itself."""
        if isinstance(call.func, ast.Name) and call.func.id in HARMLESS_CALLS:
            return True
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call):
            # super().method(): base classes are read by themselves
            made_by = call.func.value.func
            return isinstance(made_by, ast.Name) and made_by.id == "super"
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
        return read_function(value, tuple(arguments), self.reader, self.depth + 1)

    def _value(self, node: ast.AST) -> Any:
        """Return the object that an expression of names and attributes stands for.

        No code runs for that.
        """
        if isinstance(node, ast.Name):
            return self._variable(node.id)
        if isinstance(node, ast.Attribute):
            return attribute_of(self._value(node.value), node.attr, self.reader.module)
        return UNKNOWN

    def _variable(self, name: str) -> Any:
        if name in self.scope:
            return self.scope[name]
        code = self.function.__code__
        # A variable of an enclosing function.
        if name in code.co_freevars and self.function.__closure__:
            cell = self.function.__closure__[code.co_freevars.index(name)]
            try:
                return cell.cell_contents
            except ValueError:
                return UNKNOWN
        return UNKNOWN if name in code.co_varnames else self.function.__globals__.get(name, UNKNOWN)


def _is_params_of_group(node: ast.Subscript) -> bool:
    """Return whether this is ``group["params"]`` of an optimizer's groups."""
    return (
        isinstance(node.slice, ast.Constant)
        and node.slice.value == "params"
        and isinstance(node.ctx, ast.Load)
    )


def _is_harmless(node: ast.Attribute, parents: Mapping[ast.AST, ast.AST]) -> bool:
    """Return whether only devices, dtypes and sizes are used, which shards have too."""
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


def attribute_of(owner: Any, name: str, module: pl.LightningModule) -> Any:
    """Return the object that ``owner.name`` stands for.

    `UNKNOWN` where only running the code would tell.
    """
    if owner is UNKNOWN:
        return UNKNOWN
    if isinstance(owner, pl.Trainer):
        return module if name in ("model", "lightning_module") else UNKNOWN
    if isinstance(owner, pl.LightningModule) and name == "trainer":
        return module._trainer or UNKNOWN
    if isinstance(owner, types.ModuleType):
        return vars(owner).get(name, UNKNOWN)
    if isinstance(owner, nn.Module):
        # nn.Module keeps these beside its attributes.
        for values in (owner._modules, owner._parameters, owner._buffers):
            if name in values:
                return values[name]
    try:
        value = inspect.getattr_static(owner, name)
    except AttributeError:
        return UNKNOWN
    if isinstance(value, types.FunctionType) and not isinstance(owner, type):
        return types.MethodType(value, owner)
    return UNKNOWN if isinstance(value, property | types.MemberDescriptorType) else value


def property_getter(owner: Any, name: str) -> Callable[..., Any] | None:
    """Return the function that reads the property `name` of `owner`; None where that is none."""
    value = None if owner is UNKNOWN else inspect.getattr_static(owner, name, None)
    return value.fget if isinstance(value, property) else None


def has_parameters(value: Any) -> bool:
    """Return whether `value` is a parameter, or a module that has some."""
    return isinstance(value, nn.Parameter) or (
        isinstance(value, nn.Module) and next(value.parameters(), None) is not None
    )
