"""What a step does: its calls, cut into stages, and each rank's actions with their messages.

    StepFlows       the calls of a step, the stage of each, what crosses between stages; traced
                    once for every kind of step and signature of a microbatch
    StepPrograms    the schedule of a step, and the program of each rank: `ProgramStep`s

    program = programs.program(schedule, flows, rank=0, sends_wait=False)
    for step in program:          # `run_actions` in `pipeline_run` walks it
        step.begins               # receives to begin before the action
        step.needs                # what the action waits for
        step.sends                # what it makes

A program follows from the schedule and from the tensors that cross between stages; all ranks
compute the same. From one rank to another messages travel in the order in which the sender makes
them, and receives are begun in that order: no message needs a header or a tag.

[Note: a queue for each pair] A pipeline that runs without such queues runs with them. A send waits
in its queue only for messages that were made before it. Their receives begin no later than its own,
and a rank waits for nothing but what it needs. Where more than two ranks share a queue, they may
wait for one another in a circle: so `RankLinks` has one for each sender and receiver.

[Note: one order of passes] Over NCCL, code that waits for the whole device waits for all that the
rank has begun to receive and to send. User code may wait like that anywhere, on all ranks. So all
ranks agree on one order of the passes of all of them, in which these can run one after the other. A
rank begins a receive before the first of its passes that comes, in this order, after the pass which
makes the message. Then no ranks wait in a circle. Proof: suppose that some passes do not end, or
that a wait for the device after them does not. Take the first of these in the order. What its rank
has begun to receive is made by earlier passes, which end. What it has sent begins to be received
after earlier passes of the other rank, which end too. So it ends.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_topt.execution.pipeline.stage_pass import RandomOrder, StagePass
from lightning_topt.graph.flow_trace import trace_flow
from lightning_topt.graph.step_flow import LeafSpec, StepFlow, TensorRef, assign_calls
from lightning_topt.graph.structures import PLAIN, tensors_in
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.schedules.check import Edges, run_order
from lightning_topt.schedules.schedules import (
    Action,
    Kind,
    Schedule,
    forward_schedule,
    make_schedule,
)

Pair = tuple[int, int]  # of ranks: sender, receiver
Step = Callable[[nn.Module, Any], Any]
_KEPT = 64  # flows, and sequences of flows whose programs are known; others are made again

# Receives are begun so many actions before they are needed: in 1F1B those of the next backward
# and of the next forward. Not where sends wait: see [Note: one order of passes].
LOOKAHEAD = 2
# By which passes are put in one order: as many forward passes a pass takes, and a message.
_SECONDS: Mapping[Kind, float] = {"forward": 1.0, "backward": 2.0, "update": 0.0}
_MESSAGE_SECONDS = 0.1


@dataclass(frozen=True)
class Crossings:
    """Tensors that cross between stages in a microbatch.

    `targets` has the stages that need each, `specs` all about it but its elements, and
    `stage_of_call` the stage of each call.
    """

    targets: Mapping[TensorRef, tuple[int, ...]]
    specs: Mapping[TensorRef, LeafSpec]
    stage_of_call: tuple[int, ...]


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

    def of(self, step: Step, microbatches: Sequence[object]) -> list[StageFlow]:
        """Return the flow of `step` on each microbatch."""
        # Modes of modules and frozen parameters may change what a step calls.
        modes = (
            tuple([submodule.training for submodule in self._submodules]),
            tuple([parameter.requires_grad for parameter in parameters_in(self._submodules)]),
        )
        # A step is known by its code, or by its class.
        function = getattr(step, "__func__", step)
        code: Hashable = getattr(function, "__code__", type(step).__qualname__)
        common = (code, torch.is_grad_enabled(), modes)
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


def parameters_in(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield the own parameters of each of `modules`; one that several share more than once.

    To walk all modules anew takes longer than a small pass.
    """
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                yield parameter


# ---- programs ------------------------------------------------------------------------------------


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
                self._schedules[key] = forward_schedule(ranks)
        return self._schedules[key]

    def program(
        self, schedule: Schedule, flows: Sequence[StageFlow], *, rank: int, sends_wait: bool
    ) -> tuple[ProgramStep, ...]:
        """Return the program of `rank` of the pipeline; `flows` are those of the microbatches."""
        # Flows are compared by identity: those that are kept serve many steps.
        key = (schedule.name, tuple(flows))
        if (known := self._programs.get(key)) is None:
            crossings = [flow.crossings for flow in flows]
            messages = all_messages(schedule, crossings)
            known = program_of(schedule, messages, rank=rank, sends_wait=sends_wait)
            if all(flow.is_kept for flow in flows):
                if len(self._programs) >= _KEPT:
                    del self._programs[next(iter(self._programs))]
                self._programs[key] = known
        return known


# ---- messages ------------------------------------------------------------------------------------


class Message(NamedTuple):
    """A tensor of a microbatch on its way from stage `source` to stage `target`.

    `is_gradient`: it is the gradient of the activation `ref`, on its way back. `sender` and
    `receiver` are ranks of the pipeline. The sender's action with the index `made` makes it, and
    the receiver's with the index `used` needs it. The first `after` actions of the receiver come
    before it is made, in the order of all.
    """

    source: int
    target: int
    microbatch: int
    ref: TensorRef
    spec: LeafSpec
    is_gradient: bool
    sender: int
    receiver: int
    made: int
    used: int
    after: int = 0

    def __str__(self) -> str:
        what = "gradients" if self.is_gradient else "activations"
        return (
            f"{what} of microbatch {self.microbatch} from stage {self.source} for stage "
            f"{self.target}"
        )


@dataclass(frozen=True)
class ProgramStep:
    """One action of a rank, and the messages around it.

    `begins` are receives to begin before it, `needs` what it waits for, `sends` what it makes.
    `ends` are stages whose parameters have all their gradients after it.
    """

    action: Action
    begins: tuple[Message, ...]
    needs: tuple[Message, ...]
    sends: tuple[Message, ...]
    ends: tuple[int, ...] = ()


def program_of(
    schedule: Schedule, messages: Sequence[Message], *, rank: int, sends_wait: bool = False
) -> tuple[ProgramStep, ...]:
    """Return the program of `rank` with these `messages` of the step.

    Where a send waits for its receive, as over NCCL, receives begin in the order of all passes.
    """
    actions = schedule.actions[rank]
    needs: list[list[Message]] = [[] for _ in actions]
    sends: list[list[Message]] = [[] for _ in actions]
    incoming = []
    for message in messages:
        if message.receiver == rank:
            needs[message.used].append(message)
            if message.sender != rank:
                incoming.append(message)
        if message.sender == rank:
            sends[message.made].append(message)
    begins = _begins(incoming, len(actions), sends_wait=sends_wait)
    # A stage's gradients are complete after its last backward.
    last: dict[int, int] = {}
    for index, action in enumerate(actions):
        if action.kind in ("backward", "backward_weight"):
            last[action.stage_index] = index
    ends = [[stage for stage, at in last.items() if at == index] for index in range(len(actions))]
    rows = zip(actions, begins, needs, sends, ends, strict=True)
    return tuple(
        ProgramStep(action, tuple(b), tuple(n), tuple(s), tuple(e)) for action, b, n, s, e in rows
    )


def all_messages(schedule: Schedule, crossings: Sequence[Crossings]) -> list[Message]:
    """Return the messages of a step, in the order in which their senders make them."""
    # The index of each pass among its rank's actions; of a backward in two parts, the first's.
    kinds = {"forward": "forward", "backward": "backward", "backward_input": "backward"}
    index_of = {
        (kinds[action.kind], action.stage_index, action.microbatch_index): index
        for actions in schedule.actions
        for index, action in enumerate(actions)
        if action.kind in kinds
    }
    found, places = [], _places(schedule)

    def add(
        source: int,
        target: int,
        microbatch: int,
        ref: TensorRef,
        spec: LeafSpec,
        *,
        is_gradient: bool,
    ) -> None:
        kind = "backward" if is_gradient else "forward"
        sender, receiver = schedule.rank_of_stage[source], schedule.rank_of_stage[target]
        made, used = index_of[kind, source, microbatch], index_of[kind, target, microbatch]
        message = Message(
            source=source,
            target=target,
            microbatch=microbatch,
            ref=ref,
            spec=spec,
            is_gradient=is_gradient,
            sender=sender,
            receiver=receiver,
            made=made,
            used=used,
            after=min(used, bisect(places[receiver], places[sender][made])),
        )
        found.append(message)

    for microbatch, of_microbatch in enumerate(crossings):
        for ref, targets in of_microbatch.targets.items():
            source, spec = of_microbatch.stage_of_call[ref.call], of_microbatch.specs[ref]
            for target in targets:
                add(source, target, microbatch, ref, spec, is_gradient=False)
                if spec.requires_grad and ("backward", target, microbatch) in index_of:
                    add(target, source, microbatch, ref, spec, is_gradient=True)
    return sorted(found, key=lambda m: (m.sender, m.made, m.target, m.ref))


@lru_cache(maxsize=64)
def _places(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    # The place of each action (rank, action) in one order of the actions of all ranks: the order in
    # which they would end were all stages equal, each in need of the one before. So a message is
    # made while the receiver runs what comes next in the order, if anything, and its receive has
    # begun. What a schedule that hangs never runs has the last place.
    edges, ends = Edges(schedule.num_stages, needs=None), dict[tuple[str, int, int], float]()
    ranks = schedule.rank_of_stage
    clocks = [0.0] * schedule.num_ranks
    runs: list[tuple[float, int]] = []  # when an action ends, and its rank
    for rank, action in run_order(schedule, edges)[0]:
        stage, index = action.stage_index, action.microbatch_index
        for kind, source in edges.inputs[action.kind, stage]:
            travels = _MESSAGE_SECONDS if ranks[source] != rank else 0.0
            clocks[rank] = max(clocks[rank], ends[kind, source, index] + travels)
        clocks[rank] += _SECONDS.get(action.kind, 1.0)
        runs.append((clocks[rank], rank))
        if action.kind != "backward_weight":
            ends["forward" if action.kind == "forward" else "backward", stage, index] = clocks[rank]
    # Those of a rank stay in its own order.
    places: list[list[int]] = [[] for _ in schedule.actions]
    for place, (_, rank) in enumerate(sorted(runs)):
        places[rank].append(place)
    return tuple(
        (*of_rank, *[len(runs)] * (len(actions) - len(of_rank)))
        for of_rank, actions in zip(places, schedule.actions, strict=True)
    )


def _begins(incoming: Sequence[Message], count: int, *, sends_wait: bool) -> list[list[Message]]:
    # The receives to begin before each of `count` actions, in the order of each sender
    by_sender: dict[int, list[Message]] = {}
    for message in incoming:
        by_sender.setdefault(message.sender, []).append(message)
    begins: list[list[Message]] = [[] for _ in range(count)]
    for messages in by_sender.values():
        first = count
        for message in reversed(messages):  # not later than any that comes after it
            begin = message.after if sends_wait else max(message.used - LOOKAHEAD, 0)
            first = min(first, begin)
            begins[first].append(message)
    # Lists are reversed sender by sender: each one's part is put in order again.
    return [sorted(reversed(of_action), key=lambda m: m.sender) for of_action in begins]
