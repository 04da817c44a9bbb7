"""A copy of the user's optimizer over other parameters; stepping it cannot reach the original.

    copy = OptimizerCopy(optimizer, group, parameters=small)
    with no_global_hooks():
        copy.optimizer.step()

What the optimizer refers to is copied with it: numbers, lists, objects, optimizers that it wraps,
what its functions have closed over. Its parameters become those of the trial, its state is empty. A
module or a large tensor beside the state cannot be copied cheaply and cannot be shared safely: such
an optimizer is refused.

The trials of `optim.update_rule` make copies of their own. Those have all groups, step some
parameters at a time, and also try optimizers that are refused here.
"""

from __future__ import annotations

import io
import pickle
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_topt.optim.update_rule import empty_states

_MAX_BYTES = 1 << 18  # of a tensor or array that an optimizer has beside its state
_IMMUTABLE = (type, types.ModuleType, types.CodeType, torch.dtype, torch.device)


class OptimizerError(ValueError):
    """An optimizer that cannot be profiled, with the reason."""


class OptimizerCopy:
    """A copy, `optimizer`, not yet stepped.

    `states` are those of it and of all optimizers that it wraps.
    """

    def __init__(
        self, original: Any, group: Mapping[str, Any], *, parameters: Sequence[Tensor]
    ) -> None:
        copier = _Copier(group, parameters)
        try:
            self.optimizer: Any = copier.copied(original)
        except OptimizerError:
            raise
        except Exception as error:
            raise OptimizerError(
                f"{type(original).__name__} cannot be copied for a trial step, so what it needs is "
                f"not known: {error}. Give the plan explicitly, for instance plan='ddp'"
            ) from error
        self.states: list[Any] = copier.states


@contextmanager
def no_global_hooks() -> Iterator[None]:
    """Take away the hooks on the steps of all optimizers inside: they belong to the real run."""
    registries: tuple[Any, ...] = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    kept = [dict(hooks) for hooks in registries]
    for hooks in registries:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(registries, kept, strict=True):
            hooks.update(before)


class _Copier:
    """Copies what an optimizer refers to; `known` holds copies by the id of the original."""

    def __init__(self, group: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
        self.group, self.parameters = group, list(parameters)
        self.known: dict[int, Any] = {}
        self.alive: list[Any] = []  # an id is only good while its object lives
        self.states: list[Any] = []
        for original, parameter in zip(group["params"], parameters, strict=False):
            self._know(original, parameter)

    def copied(self, value: Any) -> Any:
        """Return a copy of `value`."""
        buffer = io.BytesIO()
        writer = _Writer(self, buffer)
        writer.dump(value)
        buffer.seek(0)
        reader = _Reader(buffer)
        reader.kept = writer.kept
        return reader.load()

    def special(self, value: Any) -> Any:
        """Return the copy of a value that `pickle` cannot or must not copy; None where it can."""
        if id(value) in self.known:
            return self.known[id(value)]
        if isinstance(value, _IMMUTABLE) or (
            isinstance(value, types.BuiltinFunctionType)
            and isinstance(value.__self__, types.ModuleType | None)
        ):
            return value
        if isinstance(value, nn.Module):
            raise OptimizerError(
                f"the optimizer refers to a module ({type(value).__name__}), which a trial step "
                "could change, so what it needs is not known. Give the plan explicitly, for "
                "instance plan='ddp'"
            )
        if isinstance(value, Tensor | np.ndarray):
            return self._know(value, self._array(value))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, Optimizer) or (
            hasattr(value, "param_groups") and hasattr(value, "step")
        ):
            return self._optimizer(value)
        return None

    def _know(self, original: Any, copy: Any) -> Any:
        self.known[id(original)] = copy
        self.alive.append(original)
        return copy

    def _array(self, value: Any) -> Any:
        # of another group, or one more than the trial has: it gets no gradient
        if isinstance(value, nn.Parameter):
            return nn.Parameter(torch.zeros(1), requires_grad=False)
        if value.nbytes > _MAX_BYTES:
            raise OptimizerError(
                f"the optimizer keeps {value.nbytes} bytes beside its state, in a tensor or array "
                f"of shape {tuple(value.shape)}, so what it needs is not known. Give the plan "
                "explicitly, for instance plan='ddp'"
            )
        if not isinstance(value, Tensor):
            return value.copy()
        if isinstance(value, FakeTensor) or value.is_meta:
            return torch.full(value.shape, 0.5, device="cpu").to(value.dtype)
        return value.detach().clone()

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        """Return the same code over copies of what it has closed over.

        It then counts and collects in the copy.
        """
        if not function.__closure__:
            return function
        cells = [
            self.known.get(id(cell)) or self._know(cell, types.CellType())
            for cell in function.__closure__
        ]
        copy = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            tuple(cells),
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        self._know(function, copy)
        for cell, original in zip(cells, function.__closure__, strict=True):
            try:
                content = original.cell_contents
            except ValueError:  # empty
                continue
            cell.cell_contents = self.copied(content)
        return copy

    def _optimizer(self, original: Any) -> Any:
        """Copy the optimizer itself or one that it wraps.

        `state` and `param_groups` may be those of another, or properties.
        """
        cls: Any = type(original)
        copy = self._know(original, cls.__new__(cls))
        own = vars(original)
        if "state" in own:
            state = self.known.get(id(own["state"]))
            if state is None:
                state = self._know(own["state"], empty_states(copy))
                self.states.append(state)
            copy.state = state
        if "param_groups" in own:
            copy.param_groups = self._groups(own["param_groups"])
        hooks = {name for name in own if name.endswith("_hooks")}
        # Methods on the instance are a scheduler's or a wrapper's; hooks belong to the real run.
        methods = {
            name for name, value in own.items() if callable(value) and hasattr(type(original), name)
        }
        left_out = {"state", "param_groups", "consolidate_state_dict", *hooks, *methods}
        vars(copy).update(
            {name: self.copied(value) for name, value in own.items() if name not in left_out}
        )
        vars(copy).update({name: OrderedDict() for name in hooks})
        return copy

    def _groups(self, groups: list[Any]) -> list[Any]:
        """Return one group over the parameters of the trial.

        With the options of the group that has the trial's parameters.
        """
        if id(groups) in self.known:
            return self.known[id(groups)]  # type: ignore[no-any-return]
        copies: list[Any] = self._know(groups, [])
        wanted = {id(parameter) for parameter in self.group["params"]}
        for group in groups:
            mine = group is self.group or any(
                id(parameter) in wanted for parameter in group["params"]
            )
            if not mine or copies:
                continue
            options = {
                name: value
                for name, value in group.items()
                if name not in ("params", "param_names")
            }
            rates = {name: 0.5 for name, value in options.items() if isinstance(value, Tensor)}
            copy = self.known.get(id(group))
            if copy is None:
                copy = {
                    name: value if name in rates else self.copied(value)
                    for name, value in options.items()
                }
                self._know(group, copy | rates | {"params": self.parameters})
            copies.append(self.known[id(group)])
        return copies


class _Writer(pickle.Pickler):
    """Pickles the frame of a value; special values are replaced by numbers and kept in a list."""

    def __init__(self, copier: _Copier, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.copier, self.kept = copier, list[Any]()

    def persistent_id(self, obj: Any) -> int | None:
        copy = self.copier.special(obj)
        if copy is None:
            return None
        self.kept.append(copy)
        return len(self.kept) - 1


class _Reader(pickle.Unpickler):
    kept: list[Any]

    def persistent_load(self, pid: Any) -> Any:
        return self.kept[pid]
