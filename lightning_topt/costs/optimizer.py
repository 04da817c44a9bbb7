"""Profiles say what the user's optimizers keep, move and allocate per parameter, read from the
optimizers themselves.

Nothing is looked up in a table of optimizers: the same optimizer object is copied onto small real
tensors, stepped, and watched, so that every option (fused, foreach, momentum, amsgrad, several
groups) counts as it is. Only whether the update treats elements one by one cannot be seen from
outside; see `optim.update_rule`.
"""

from __future__ import annotations

import inspect
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_topt.costs.cluster import Device
from lightning_topt.costs.global_state import kept_global_state
from lightning_topt.costs.optimizer_copy import OptimizerError, no_global_hooks
from lightning_topt.costs.optimizer_probe import ParameterUpdate, Probe, make_step, probe_group
from lightning_topt.costs.timing import time_call
from lightning_topt.graph.no_trace import kept_objects
from lightning_topt.optim.update_rule import (
    BY_PARAMETER,
    ELEMENTWISE,
    collective_in_step,
    is_one_of,
)

# Options of Adam and its kin, Adafactor, Adagrad, Adadelta, RMSprop.
_ADAPTIVE = {"betas", "beta2_decay", "initial_accumulator_value", "rho", "centered"}


@dataclass(frozen=True)
class OptimizerProfile:
    """All optimizers of a module together; `updates` by parameter name (none for a frozen
    parameter).

    `elementwise`: slices of parameters may be updated by different ranks (ZeRO 2 and 3 are exact).
    `by_parameter`: whole parameters may (ZeRO 1). `seconds_per_element` holds measurements by
    parameter name, if there are any (`measure_update_seconds`). `probes` are what trial steps have
    shown, by the name of each trained parameter. `adaptive`: one of them divides by running means
    of squares, as Adam does.
    """

    name: str
    elementwise: bool
    by_parameter: bool
    updates: Mapping[str, ParameterUpdate]
    seconds_per_element: Mapping[str, float] = field(default_factory=dict)
    probes: Mapping[str, Probe] = field(default_factory=dict, compare=False)
    adaptive: bool = False

    @cached_property
    def kinds(self) -> dict[str, int]:
        """A number for each parameter by name, equal where updates are; those that are not here
        have none.
        """
        numbers: dict[tuple[ParameterUpdate | None, float | None], int] = {}
        names = {**self.updates, **self.seconds_per_element}
        every = (
            (name, (self.updates.get(name), self.seconds_per_element.get(name))) for name in names
        )
        return {name: numbers.setdefault(key, len(numbers)) for name, key in every}

    def state_bytes_of(self, name: str, shape: Sequence[int]) -> int:
        """Return the bytes of the state of a part of parameter `name`, of `shape`, with as many
        dims; 0 without updates.
        """
        if name not in self.probes:
            return self.state_bytes(name)  # of a frozen parameter, as it is
        return self.probes[name].state_bytes(shape)

    def of_slices(self, shares: Mapping[str, float]) -> OptimizerProfile:
        """Return the profile of an optimizer over slices of parameters: `shares` of the whole ones,
        by name.
        """
        known: dict[tuple[ParameterUpdate, float], ParameterUpdate] = {}
        updates = {}
        for name, update in self.updates.items():
            share = shares.get(name, 1.0)
            key = update, share
            if key not in known:
                known[key] = replace(
                    update,
                    state_bytes=round(update.state_bytes * share),
                    moved_bytes=update.moved_bytes * share,
                    temporary_bytes=update.temporary_bytes * share,
                )
            updates[name] = known[key]
        return replace(self, updates=updates)

    def state_bytes(self, name: str) -> int:
        """Return the bytes of the state of parameter `name`; 0 for one that no optimizer
        updates.
        """
        update = self.updates.get(name)
        return 0 if update is None else update.state_bytes

    def update_seconds(self, name: str, *, numel: int, device: Device, share: float = 1.0) -> float:
        """Return the seconds to update the given share of parameter `name`, which has `numel`
        elements in all.

        As measured, else bytes moved over bandwidth; 0 for a parameter that no optimizer updates.
        """
        update = self.updates.get(name)
        if update is None:
            return 0.0
        measured = self.seconds_per_element.get(name)
        streaming = (
            update.moved_bytes / device.memory_bandwidth if measured is None else measured * numel
        )
        return streaming * share + update.calls * device.op_overhead_seconds


@kept_global_state()
def read_optimizer(
    optimizers: Iterable[Optimizer],
    *,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    device_type: str = "cpu",
) -> OptimizerProfile:
    """Profile optimizers that were built over `named_parameters` (fake tensors will do: only shapes
    are read).

    The optimizers may be those of the training: they, their state and parameters and all random
    generators stay as they are. `device_type` is where they will run; it decides torch's default
    between the for-loop and the foreach step. Raises OptimizerError for a parameter that is not
    among `named_parameters`, and for an optimizer that cannot be tried on a copy.
    """
    optimizers = list(optimizers)
    updates: dict[str, ParameterUpdate] = {}
    probes: dict[Any, Probe] = {}
    by_name: dict[str, Probe] = {}
    for optimizer, group, parameter, name in updated_parameters(optimizers, named_parameters):
        if not parameter.requires_grad:
            updates[name] = frozen_update(optimizer, parameter)
            continue
        key = (id(optimizer), options_key(group), parameter.ndim, parameter.dtype)
        if key not in probes:
            ndim, dtype = parameter.ndim, parameter.dtype
            with kept_objects(optimizer, type(optimizer)):
                probes[key] = probe_group(
                    optimizer, group, ndim=ndim, dtype=dtype, device_type=device_type
                )
        updates[name] = probes[key].update(parameter)
        by_name[name] = probes[key]
    return OptimizerProfile(
        name=" + ".join(type(optimizer).__name__ for optimizer in optimizers),
        elementwise=all(is_one_of(optimizer, ELEMENTWISE) for optimizer in optimizers),
        by_parameter=all(is_one_of(optimizer, BY_PARAMETER) for optimizer in optimizers),
        updates=updates,
        probes=by_name,
        adaptive=any(map(is_adaptive, optimizers)),
    )


def frozen_update(optimizer: Optimizer, parameter: nn.Parameter) -> ParameterUpdate:
    """Return the update of a frozen parameter: it is never stepped, but some optimizers (Adagrad)
    make its state when built.
    """
    existing = tree_leaves(optimizer.state.get(parameter, {}))
    nbytes = sum(value.nbytes for value in existing if torch.is_tensor(value))
    return ParameterUpdate(nbytes, 0.0, 0.0, 0.0, False)


def is_adaptive(optimizer: Optimizer) -> bool:
    """Return whether the optimizer divides by running means of squares, as Adam does; known by the
    options of its groups.
    """
    return any(not _ADAPTIVE.isdisjoint(group) for group in optimizer.param_groups)


@dataclass(frozen=True)
class UpdateKind:
    """Parameters, by `names`, whose updates cost the same per element: one measurement stands for
    all of them.

    It is taken with the options of `group` on a parameter of `numel` elements. `key` names the kind
    in any process: it is made of the optimizer's class and code, the options and `numel`; empty
    where the code is in no file.
    """

    key: str
    optimizer: Optimizer
    group: Mapping[str, Any]
    ndim: int
    dtype: torch.dtype
    numel: int
    names: tuple[str, ...]


def update_kinds(
    optimizers: Iterable[Optimizer],
    *,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    max_numel: int = 1 << 22,
) -> list[UpdateKind]:
    """Sort the trained parameters into kinds; `numel` is that of a kind's largest parameter, at
    most `max_numel`.

    Left out are those of LBFGS, whose step runs the model several times, and those of optimizers
    that communicate in their step: ranks measure for a time, and may do so with different numbers
    of steps. Raises OptimizerError as `read_optimizer` does.
    """
    optimizers = list(optimizers)
    untimed = {
        id(each) for each in optimizers if isinstance(each, optim.LBFGS) or _communicates(each)
    }
    members: dict[Any, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    first: dict[Any, tuple[Optimizer, Mapping[str, Any]]] = {}
    for optimizer, group, parameter, name in updated_parameters(optimizers, named_parameters):
        if parameter.requires_grad and id(optimizer) not in untimed:
            key = (id(optimizer), options_key(group), min(parameter.ndim, 2), parameter.dtype)
            members[key].append((name, parameter))
            first.setdefault(key, (optimizer, group))
    kinds = []
    for key, named in members.items():
        (optimizer, group), (_, options, ndim, dtype) = first[key], key
        numel = max(1, min(max_numel, max(parameter.numel() for _, parameter in named)))
        code = code_key(type(optimizer))
        text = json.dumps([code, options, ndim, str(dtype), numel]) if code else ""
        kinds.append(
            UpdateKind(text, optimizer, group, ndim, dtype, numel, tuple(name for name, _ in named))
        )
    return kinds


@kept_global_state()
def _communicates(optimizer: Optimizer) -> bool:
    with kept_objects(optimizer, type(optimizer)), no_global_hooks():
        return collective_in_step(optimizer) is not None


@kept_global_state()
def measure_kind(kind: UpdateKind, *, device: torch.device, budget_seconds: float) -> float:
    """Return the seconds per element of the update of `kind`, timed in about `budget_seconds`, but
    in at least five steps.

    A copy is stepped. Raises OptimizerError when its step fails.
    """
    ndim, dtype, numel = kind.ndim, kind.dtype, kind.numel
    with kept_objects(kind.optimizer, type(kind.optimizer)):
        step = make_step(
            kind.optimizer, kind.group, ndim=ndim, dtype=dtype, device=device, numel=numel
        )
        return time_call(step, device=device, budget_seconds=budget_seconds) / kind.numel


def measure_update_seconds(
    optimizers: Iterable[Optimizer],
    *,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    device: torch.device,
    max_numel: int = 1 << 22,
    budget_seconds: float = 0.5,
) -> dict[str, float]:
    """Return the seconds per element of each parameter's update, by name.

    Every kind of update (`update_kinds`) is timed, in about `budget_seconds` in all (but at least
    five steps per kind), on copies: optimizers, parameters and random generators stay as they are.
    Raises OptimizerError as `read_optimizer` does.
    """
    kinds = update_kinds(optimizers, named_parameters=named_parameters, max_numel=max_numel)
    seconds: dict[str, float] = {}
    for kind in kinds:
        measured = measure_kind(kind, device=device, budget_seconds=budget_seconds / len(kinds))
        seconds |= dict.fromkeys(kind.names, measured)
    return seconds


def updated_parameters(
    optimizers: Iterable[Optimizer], named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> Iterator[tuple[Optimizer, Mapping[str, Any], nn.Parameter, str]]:
    """Yield every parameter of every group with its name. Raises OptimizerError for one that has
    none, or no shape yet.
    """
    names = {parameter: name for name, parameter in named_parameters}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, UninitializedParameter):
                    raise OptimizerError(
                        f"{type(optimizer).__name__} updates a parameter of a lazy module that has "
                        "no shape yet; run the "
                        "module once on a batch before training"
                    )
                if parameter not in names:
                    raise OptimizerError(
                        f"{type(optimizer).__name__} updates a parameter of shape "
                        f"{tuple(parameter.shape)} that is not "
                        "a parameter of the module; build optimizers from module.parameters()"
                    )
                yield optimizer, group, parameter, names[parameter]


def options_key(group: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the options of a group as far as they decide what a step costs: of rates, whether they
    are zero.
    """
    options = (
        (name, value)
        for name, value in group.items()
        if name not in ("params", "param_names", "initial_lr")
    )
    return tuple(sorted((str(name), _option_key(value)) for name, value in options))


def _option_key(value: Any) -> str:
    if isinstance(value, bool | int | str | None):
        return repr(value)
    if isinstance(value, float):
        return "a number" if value else "zero"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_option_key, value))}]"
    return type(value).__name__


def code_key(cls: type) -> str:
    """Return a text that changes when the file in which `cls` is defined does; empty where there is
    no such file.
    """
    for base in cls.__mro__:
        if base.__module__ == "builtins":
            break
        if base.__module__ == "__main__":
            return ""  # may be any program, or a notebook
    try:
        status = Path(inspect.getfile(cls)).stat()
    except (TypeError, OSError):
        return ""
    return f"{cls.__module__}.{cls.__qualname__} {status.st_size} {status.st_mtime_ns}"
