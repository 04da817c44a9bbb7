"""What the user's optimizers keep, move and allocate per parameter, read from the optimizers themselves.

Nothing is looked up in a table of optimizers: the same optimizer object is copied onto small real tensors, stepped, and
watched, so that every option (fused, foreach, momentum, amsgrad, several groups) counts as it is. Only whether the
update treats elements one by one cannot be seen from outside; see `optim.update_rule`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn, optim
from torch.optim import Optimizer

from lightning_topt.costs.cluster import Device
from lightning_topt.costs.optimizer_probe import OptimizerError, ParameterUpdate, Probe, make_step, probe_group
from lightning_topt.costs.timing import time_call
from lightning_topt.optim.update_rule import BY_PARAMETER, ELEMENTWISE, is_one_of


@dataclass(frozen=True)
class OptimizerProfile:
    """All optimizers of a module together; `updates` by parameter name (none for a frozen parameter).

    `elementwise`: slices of parameters may be updated by different ranks (ZeRO 2 and 3 are exact). `by_parameter`:
    whole parameters may (ZeRO 1). `seconds_per_element` holds measurements by parameter name, if there are any
    (`measure_update_seconds`).
    """

    name: str
    elementwise: bool
    by_parameter: bool
    updates: Mapping[str, ParameterUpdate]
    seconds_per_element: Mapping[str, float] = field(default_factory=dict)

    def state_bytes(self, name: str) -> int:
        """Bytes of the state of parameter `name`; 0 for one that no optimizer updates."""
        update = self.updates.get(name)
        return 0 if update is None else update.state_bytes

    def update_seconds(self, name: str, *, numel: int, device: Device, share: float = 1.0) -> float:
        """Seconds to update the given share of parameter `name`, which has `numel` elements in all.

        As measured, else bytes moved over bandwidth; 0 for a parameter that no optimizer updates.
        """
        update = self.updates.get(name)
        if update is None:
            return 0.0
        measured = self.seconds_per_element.get(name)
        streaming = update.moved_bytes / device.memory_bandwidth if measured is None else measured * numel
        return streaming * share + update.calls * device.op_overhead_seconds


def read_optimizer(
    optimizers: Iterable[Optimizer],
    *,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    device_type: str = "cpu",
) -> OptimizerProfile:
    """Profile optimizers that were built over `named_parameters` (fake tensors will do: only shapes are read).

    `device_type` is where they will run; it decides torch's default between the for-loop and the foreach step.
    Raises OptimizerError for a parameter that is not among `named_parameters`, and for an optimizer that cannot be
    stepped.
    """
    names = {parameter: name for name, parameter in named_parameters}
    optimizers = list(optimizers)
    updates: dict[str, ParameterUpdate] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            probes: dict[Any, Probe] = {}
            for parameter in group["params"]:
                if parameter not in names:
                    raise OptimizerError(
                        f"{type(optimizer).__name__} updates a parameter of shape {tuple(parameter.shape)} that is not "
                        "a parameter of the module; build optimizers from module.parameters()"
                    )
                if not parameter.requires_grad:
                    # Never stepped, but some optimizers (Adagrad) make the state when they are built.
                    existing = sum(v.nbytes for v in optimizer.state.get(parameter, {}).values() if torch.is_tensor(v))
                    updates[names[parameter]] = ParameterUpdate(existing, 0.0, 0.0, 0.0, False)
                    continue
                key = (parameter.ndim, parameter.dtype)
                if key not in probes:
                    probes[key] = probe_group(optimizer, group, ndim=key[0], dtype=key[1], device_type=device_type)
                updates[names[parameter]] = probes[key].update(parameter)
    return OptimizerProfile(
        name=" + ".join(type(optimizer).__name__ for optimizer in optimizers),
        elementwise=all(is_one_of(optimizer, ELEMENTWISE) for optimizer in optimizers),
        by_parameter=all(is_one_of(optimizer, BY_PARAMETER) for optimizer in optimizers),
        updates=updates,
    )


def measure_update_seconds(
    optimizers: Iterable[Optimizer],
    *,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    device: torch.device,
    max_numel: int = 1 << 22,
    budget_seconds: float = 0.5,
) -> dict[str, float]:
    """Seconds per element of each parameter's update, by name.

    Every group's step is timed on a parameter as large as the group's largest, but of at most `max_numel` elements, in
    about `budget_seconds` in all (but at least five steps per group and kind of parameter).
    """
    names = {parameter: name for name, parameter in named_parameters}
    kinds: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for optimizer in optimizers:
        if isinstance(optimizer, optim.LBFGS):  # its step runs the model, several times
            continue
        for number, group in enumerate(optimizer.param_groups):
            for parameter in (p for p in group["params"] if p.requires_grad):
                kinds[optimizer, number, min(parameter.ndim, 2), parameter.dtype].append(parameter)
    seconds: dict[str, float] = {}
    for (optimizer, number, ndim, dtype), members in kinds.items():
        group = optimizer.param_groups[number]
        numel = max(1, min(max_numel, max(parameter.numel() for parameter in members)))
        step = make_step(optimizer, group, ndim=ndim, dtype=dtype, device=device, numel=numel)
        elapsed = time_call(step, device=device, budget_seconds=budget_seconds / len(kinds))
        seconds |= {names[parameter]: elapsed / numel for parameter in members}
    return seconds
