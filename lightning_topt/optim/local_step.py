"""The step of an optimizer over sharded parameters (DTensors), on the local tensors.

The update of a shard is the shard of the update where every element is updated by itself. The
optimizer then needs no DTensor at work: it is spared their dispatch (about 40 us per call on a
CPU). Parameters that are replicated, or sharded on different meshes, may be in one group, also for
its fused and foreach forms, which take tensors of one kind only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.step_hooks import begin_step, inside_hooks
from lightning_topt.optim.update_rule import ELEMENTWISE, is_one_of

State = dict[str, Any]


def install_local_step(optimizer: Optimizer) -> LocalStep | None:
    """Make ``optimizer.step`` update local tensors, where that is known to be the same.

    That needs DTensors among its parameters, and an optimizer known to update each element by
    itself. Any other optimizer is left as it is, and None returned. `LocalStep.detach` undoes it.
    """
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters_of(optimizer))
    if not sharded or not is_one_of(optimizer, ELEMENTWISE):
        return None
    step = LocalStep(optimizer)
    optimizer.step = step  # type: ignore[method-assign]
    return step


class LocalStep:
    """Replaces ``optimizer.step`` by one that sees local tensors in place of DTensors.

    Outside of the update, parameters and their state are DTensors: for users, hooks of the
    optimizer and checkpoints.
    """

    # Learning-rate schedulers leave this mark on a step that they have wrapped.
    _wrapped_by_lr_sched = True

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.step: Callable[..., Any] = optimizer.step
        self._original = optimizer.__dict__.get("step")
        self._stand_ins: dict[Tensor, nn.Parameter] = {}
        # the state of DTensors while the optimizer is at work
        self._outside: dict[Tensor, State] = {}
        self._groups: list[tuple[dict[str, Any], list[Tensor]]] = []

    def __call__(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Take one step; `closure` first runs forward, backward and clipping on DTensors."""
        loss = begin_step(self.optimizer, closure)
        try:
            with inside_hooks(self.optimizer, enter=self._enter, leave=self._leave):
                output = self.step(**kwargs)
        finally:
            self._leave()
        return output if closure is None else loss

    def _enter(self) -> None:
        """Put the local tensors and their state in place of the DTensors."""
        state = self.optimizer.state
        for group in self.optimizer.param_groups:
            self._groups.append((group, group["params"]))
            group["params"] = [
                self._stand_in(p) if isinstance(p, DTensor) else p for p in group["params"]
            ]
        for parameter, key in self._stand_ins.items():
            # state follows its parameter: under the stand-in while the optimizer is at work
            self._outside[parameter] = state.pop(parameter, {})
            if self._outside[parameter]:
                state[key] = {
                    name: _local(value) for name, value in self._outside[parameter].items()
                }

    def _stand_in(self, parameter: DTensor) -> nn.Parameter:
        """Return the parameter over the local tensor, with the local gradient."""
        local = _local(parameter)
        key = self._stand_ins.get(parameter)
        if key is None:
            key = self._stand_ins[parameter] = nn.Parameter(
                local, requires_grad=parameter.requires_grad
            )
        elif key.data_ptr() != local.data_ptr():  # the parameter has got other memory
            key.data = local
        key.requires_grad_(parameter.requires_grad)
        key.grad = None if parameter.grad is None else _local(parameter.grad)
        return key

    def _leave(self) -> None:
        """Put the DTensors back, with what the update has made of their state."""
        if not self._groups:  # the hooks have done it already
            return
        for group, parameters in self._groups:
            group["params"] = parameters
        state = self.optimizer.state
        for parameter, key in self._stand_ins.items():
            key.grad = None
            before = self._outside.pop(parameter, {})
            if key in state:
                state[parameter] = _as_shards(state.pop(key), before, parameter, key)
            elif before:
                state[parameter] = before
        self._groups = []
        # parameters have left the groups
        if len(self._stand_ins) > len(parameters_of(self.optimizer)):
            self._stand_ins = {
                p: key
                for p, key in self._stand_ins.items()
                if p in set(parameters_of(self.optimizer))
            }

    def detach(self) -> None:
        """Give the optimizer its own step again.

        Whoever wrapped this one since calls through to it.
        """
        self._stand_ins.clear()
        if self.optimizer.__dict__.get("step") is self:
            del self.optimizer.__dict__["step"]
            if self._original is not None:
                self.optimizer.step = self._original


def _local(value: object) -> Any:
    """Return this rank's shard of a DTensor, the same object each time; anything else as it is."""
    return value._local_tensor if isinstance(value, DTensor) else value


def _as_shards(local: State, before: State, parameter: Tensor, key: Tensor) -> State:
    """Return the `local` state of a shard as DTensors.

    Those of `before` where their memory is still in use.
    """
    assert isinstance(parameter, DTensor)

    def placed(name: str, value: object) -> Any:
        known = before.get(name)
        if not isinstance(value, Tensor) or not value.dim() or value.shape != key.shape:
            return value
        if isinstance(known, DTensor) and known._local_tensor is value:
            return known
        return DTensor.from_local(
            value,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    return {name: placed(name, value) for name, value in local.items()}
