"""Flows of the steps that a run makes: traced once for every kind and signature of a microbatch,
the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_topt.execution.pipeline.messages import Crossings
from lightning_topt.execution.pipeline.random_order import RandomOrder
from lightning_topt.execution.pipeline.stage_pass import StagePass
from lightning_topt.graph.flow_stages import assign_calls
from lightning_topt.graph.flow_trace import trace_flow
from lightning_topt.graph.step_flow import StepFlow
from lightning_topt.graph.structures import PLAIN, tensors_in

Step = Callable[[nn.Module, Any], Any]
_KEPT = 64  # flows; more signatures than that are traced again


@dataclass(frozen=True, eq=False)
class StageFlow:
    """A step's flow, the stage of each of its calls, what crosses, and the passes of this rank's
    stages on it.
    """

    flow: StepFlow
    stage_of_call: tuple[int, ...]
    crossings: Crossings
    passes: StagePass

    @property
    def is_kept(self) -> bool:
        """Whether it serves later steps with microbatches of the same signature."""
        return not self.flow.reads_values


class StepFlows:
    """The flows of steps of `module`, whose stages run the blocks that `stages` name, on `device`.

    `of` traces; all ranks must ask for the same, in the same order.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Sequence[Collection[str]],
        *,
        device: torch.device,
        order: RandomOrder | None = None,
    ) -> None:
        self._module, self._device = module, device
        self._stages = [tuple(blocks) for blocks in stages]
        self.order = RandomOrder(device) if order is None else order
        self.whole: Callable[[Any], Any] = lambda value: value  # of tensors that are in slices
        # within it parameters are whole
        self.joined: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._submodules = list(module.modules())
        self._known: dict[Hashable, StageFlow] = {}
        # of each stage in the first step, the unnamed ones too
        self._modules: list[tuple[str, ...]] = []

    @property
    def units(self) -> list[str]:
        """The named blocks."""
        return [block for blocks in self._stages for block in blocks]

    def of(
        self, step: Step, microbatches: Sequence[Any], *, kind: Hashable = None
    ) -> list[StageFlow]:
        """Return the flow of `step` on each microbatch. `kind` tells steps apart; None: by their
        code.
        """
        common = (_code(step) if kind is None else kind, torch.is_grad_enabled(), self._modes())
        found = []
        for microbatch in microbatches:
            key = (common, signature(microbatch))
            flow = self._known.get(key)
            if flow is None:
                flow = self._trace(step, microbatch)
                if flow.is_kept:
                    self._remember(key, flow)
            found.append(flow)
        return found

    def _modes(self) -> Hashable:
        training = [submodule.training for submodule in self._submodules]
        return tuple(training), tuple(
            [parameter.requires_grad for parameter in self._module.parameters()]
        )

    def _trace(self, step: Step, microbatch: Any) -> StageFlow:
        with self.joined():
            flow = trace_flow(self._module, step, microbatch, units=self.units, device=self._device)
        stage_of_call = assign_calls(flow, self._stages_for(flow))
        if not self._modules:
            self._modules = _alone(flow, stage_of_call, len(self._stages))
        targets = flow.crossings(stage_of_call)
        crossings = Crossings(targets, {ref: flow.spec(ref) for ref in targets}, stage_of_call)
        passes = StagePass(
            self._module,
            flow,
            stage_of_call,
            units=self.units,
            device=self._device,
            order=self.order,
            whole=lambda value: self.whole(value),  # known once techniques have been applied
        )
        return StageFlow(flow, stage_of_call, crossings, passes)

    def _stages_for(self, flow: StepFlow) -> list[tuple[str, ...]]:
        """The blocks of each stage; in later steps units stay where the first step had them, and
        blocks may be missing.
        """
        if not self._modules:
            return self._stages
        called = {call.module for call in flow.calls}
        return [tuple(name for name in modules if name in called) for modules in self._modules]

    def _remember(self, key: Hashable, flow: StageFlow) -> None:
        if len(self._known) >= _KEPT:
            del self._known[next(iter(self._known))]
        self._known[key] = flow


def signature(value: Any) -> Hashable:
    """Return all about a microbatch that a flow may depend on: shapes and dtypes of its tensors,
    its other values.
    """
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, float | complex):
        return type(value).__name__
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Mapping):
        return type(value), tuple((key, signature(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(signature, value))
    return type(value), tuple(map(signature, tensors_in(value)))


def _alone(flow: StepFlow, stage_of_call: Sequence[int], count: int) -> list[tuple[str, ...]]:
    """The modules that are called on one stage alone, for each stage."""
    stages: dict[str, set[int]] = {}
    for call, stage in zip(flow.calls, stage_of_call, strict=True):
        stages.setdefault(call.module, set()).add(stage)
    return [
        tuple(name for name, where in stages.items() if where == {stage}) for stage in range(count)
    ]


def _code(step: Step) -> Hashable:
    function = getattr(step, "__func__", step)
    code: Hashable = getattr(function, "__code__", type(step).__qualname__)
    return code
