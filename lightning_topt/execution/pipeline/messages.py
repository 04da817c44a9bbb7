"""The program of each rank of a pipeline: its actions, with the messages around each of them.

    program = rank_program(schedule, crossings, rank=0)
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
wait for one another in a circle: so `MessageExchange` has one for each sender and receiver.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from lightning_topt.graph.step_flow import LeafSpec, TensorRef
from lightning_topt.schedules.check import Edges, run_order
from lightning_topt.schedules.schedules import Action, Kind, Schedule

Pair = tuple[int, int]  # of ranks: sender, receiver

# Receives are begun so many actions before they are needed: in 1F1B those of the next backward
# and of the next forward. Not where sends wait: see [Note: one order of passes].
LOOKAHEAD = 2
# By which passes are put in one order: as many forward passes a pass takes, and a message.
_SECONDS: Mapping[Kind, float] = {"forward": 1.0, "backward": 2.0, "update": 0.0}
_MESSAGE_SECONDS = 0.1


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
class Crossings:
    """Tensors that cross between stages in a microbatch.

    `targets` has the stages that need each, `specs` all about it but its elements, and
    `stage_of_call` the stage of each call.
    """

    targets: Mapping[TensorRef, tuple[int, ...]]
    specs: Mapping[TensorRef, LeafSpec]
    stage_of_call: tuple[int, ...]


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


def rank_program(
    schedule: Schedule, crossings: Sequence[Crossings], *, rank: int, sends_wait: bool = False
) -> tuple[ProgramStep, ...]:
    """Return the program of `rank`; `crossings` are those of each microbatch.

    Where a send waits for its receive, as over NCCL, receives begin in the order of all passes.
    """
    messages = all_messages(schedule, crossings)
    return program_of(schedule, messages, rank=rank, sends_wait=sends_wait)


def program_of(
    schedule: Schedule, messages: Sequence[Message], *, rank: int, sends_wait: bool = False
) -> tuple[ProgramStep, ...]:
    """Return the program of `rank` with these `messages` of the step."""
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
    """Return the place of each action (rank, action) in one order of the actions of all ranks.

    That in which they would end were all stages equal, each in need of the one before. So a message
    is made while the receiver runs what comes next in the order, if anything, and its receive has
    begun. What a schedule that hangs never runs has the last place.
    """
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
