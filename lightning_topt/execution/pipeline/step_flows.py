"""What the steps of a run do: their flows, traced once, and the programs of ranks that follow.

    StepFlows       the calls of a step, the stage of each, what crosses between stages; traced
                    once for every kind of step and signature of a microbatch
    StepPrograms    the schedule of a step, and each rank's actions with the messages around them

Both are the same on all ranks. Both keep the newest entries only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_topt.execution.pipeline.messages import Crossings, ProgramStep, rank_program
from lightning_topt.execution.pipeline.random_order import RandomOrder
from lightning_topt.execution.pipeline.stage_pass import StagePass
from lightning_topt.graph.flow_trace import trace_flow
from lightning_topt.graph.step_flow import StepFlow, assign_calls
from lightning_topt.graph.structures import PLAIN, tensors_in
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.schedules.schedules import Schedule, forward_schedule, make_schedule

Step = Callable[[nn.Module, Any], Any]
_KEPT = 64  # flows, and sequences of flows whose programs are known; others are made again


@dataclass(frozen=True, eq=False)
class StageFlow:
    """A step's flow, cut into stages, and the passes of this rank's stages on it.

    `stage_of_call` has the stage of each call, `crossings` what crosses between stages.
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
    """The flows of steps of `module`, on `device`; `stages` name the blocks of each stage.

    `of` traces: all ranks must ask for the same, in the same order. Once techniques are applied,
    `whole` makes split tensors full, and parameters are unsharded within
    `unsharded`. With `shares_casts` microbatches share 16-bit casts of parameters (`StagePass`).
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Sequence[Collection[str]],
        *,
        device: torch.device,
        order: RandomOrder | None = None,
        shares_casts: bool = True,
    ) -> None:
        self._module, self._device, self._shares_casts = module, device, shares_casts
        self._stages = [tuple(blocks) for blocks in stages]
        self.order = RandomOrder(device) if order is None else order
        self.whole: Callable[[Any], Any] = lambda value: value
        self.unsharded: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._submodules = list(module.modules())
        self._known: dict[Hashable, StageFlow] = {}
        # The modules of each stage in the first step, those in no named block too.
        self._modules: list[tuple[str, ...]] = []

    @property
    def units(self) -> list[str]:
        """The named blocks."""
        return [block for blocks in self._stages for block in blocks]

    def of(
        self, step: Step, microbatches: Sequence[object], *, kind: Hashable = None
    ) -> list[StageFlow]:
        """Return the flow of `step` on each microbatch.

        `kind` tells steps apart; None: their code does.
        """
        # Modes of modules and frozen parameters may change what a step calls.
        modes = (
            tuple([submodule.training for submodule in self._submodules]),
            tuple([parameter.requires_grad for parameter in parameters_in(self._submodules)]),
        )
        # A step is known by its code, or by its class.
        function = getattr(step, "__func__", step)
        code: Hashable = getattr(function, "__code__", type(step).__qualname__)
        common = (code if kind is None else kind, torch.is_grad_enabled(), modes)
        found = []
        for microbatch in microbatches:
            key = (common, signature(microbatch))
            flow = self._known.get(key)
            if flow is None:
                flow = self._trace(step, microbatch)
                if flow.is_kept:
                    if len(self._known) >= _KEPT:
                        del self._known[next(iter(self._known))]
                    self._known[key] = flow
            found.append(flow)
        return found

    def _trace(self, step: Step, microbatch: object) -> StageFlow:
        with self.unsharded():
            flow = trace_flow(self._module, step, microbatch, units=self.units, device=self._device)
        # Blocks of each stage. In later steps units stay where the first step had them, and some
        # may be missing.
        stages = self._stages
        if self._modules:
            called = {call.module for call in flow.calls}
            stages = [tuple(name for name in names if name in called) for names in self._modules]
        stage_of_call = assign_calls(flow, stages)
        if not self._modules:
            # For each stage, the modules that only this stage calls.
            users: dict[str, set[int]] = {}
            for call, stage in zip(flow.calls, stage_of_call, strict=True):
                users.setdefault(call.module, set()).add(stage)
            self._modules = [
                tuple(name for name, where in users.items() if where == {stage})
                for stage in range(len(self._stages))
            ]
        # What crosses between stages, and the passes that make and use it.
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
            shares_casts=self._shares_casts,
        )
        return StageFlow(flow, stage_of_call, crossings, passes)


def signature(value: object) -> Hashable:
    """Return all about a microbatch that a flow may depend on.

    That are shapes and dtypes of its tensors, and its other values; of floats the type alone.
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


# ---- programs ------------------------------------------------------------------------------------


def parameters_in(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield the own parameters of each of `modules`; one that several share more than once.

    To walk all modules anew takes longer than a small pass.
    """
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                yield parameter


class StepPrograms:
    """Schedules of a plan's steps by number of microbatches, and the programs of ranks.

    Methods are no collective calls.
    """

    def __init__(self, plan: ParallelPlan) -> None:
        self._plan = plan
        self._schedules: dict[tuple[bool, int], Schedule] = {}
        self._programs: dict[Hashable, tuple[ProgramStep, ...]] = {}

    def schedule(self, num_microbatches: int, *, backward: bool) -> Schedule:
        """Return the schedule of a step, or without `backward` of an evaluation.

        Raises ValueError for one that does not exist or take these sizes.
        """
        if num_microbatches < 1:
            raise ValueError("a step has at least one microbatch")
        key = backward, num_microbatches
        if key not in self._schedules:
            if backward:
                assert self._plan.schedule is not None
                self._schedules[key] = make_schedule(
                    self._plan.schedule,
                    num_ranks=self._plan.mesh.pipeline_size,
                    num_microbatches=num_microbatches,
                    stages_per_rank=self._plan.stages_per_rank,
                )
            else:  # stages are on the ranks that train them
                ranks = self.schedule(self._plan.num_microbatches, backward=True).rank_of_stage
                self._schedules[key] = forward_schedule(ranks, num_microbatches)
        return self._schedules[key]

    def program(
        self, schedule: Schedule, flows: Sequence[StageFlow], *, rank: int, sends_wait: bool
    ) -> tuple[ProgramStep, ...]:
        """Return the program of `rank` of the pipeline; `flows` are those of the microbatches."""
        # Flows are compared by identity: those that are kept serve many steps.
        key = (schedule.name, tuple(flows))
        if (known := self._programs.get(key)) is None:
            crossings = [flow.crossings for flow in flows]
            known = rank_program(schedule, crossings, rank=rank, sends_wait=sends_wait)
            if all(flow.is_kept for flow in flows):
                if len(self._programs) >= _KEPT:
                    del self._programs[next(iter(self._programs))]
                self._programs[key] = known
        return known
