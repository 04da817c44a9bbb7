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
in its queue for messages made before it, and those for receives which are begun no later than its
own, while a rank waits for nothing but what it needs. Queues that more than two ranks share can be
in a circle, which is why `MessageExchange` has one for each sender and receiver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_topt.graph.step_flow import LeafSpec, TensorRef
from lightning_topt.schedules.schedules import Action, Schedule

Pair = tuple[int, int]  # of ranks: sender, receiver

# Receives are begun so many actions before they are needed: in 1F1B those of the next backward
# and of the next forward. But none before what it follows from: over NCCL all that waits for the
# whole device waits for receives, and the rank itself would not go on.
LOOKAHEAD = 2


class Message(NamedTuple):
    """A tensor of a microbatch on its way from stage `source` to stage `target`.

    `is_gradient`: it is the gradient of the activation `ref`, on its way back. `sender` and
    `receiver` are ranks of the pipeline. The sender's action with the index `made` makes it, and
    the receiver's with the index `used` needs it. It follows from no more than the first `after`
    actions of the receiver.
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


def pairs_of(rank_of_stage: Sequence[int], crossings: Crossings) -> frozenset[Pair]:
    """Return the ranks (sender, receiver) between which activations travel."""
    pairs = {
        (rank_of_stage[crossings.stage_of_call[ref.call]], rank_of_stage[target])
        for ref, targets in crossings.targets.items()
        for target in targets
    }
    return frozenset((sender, receiver) for sender, receiver in pairs if sender != receiver)


def rank_program(
    schedule: Schedule, crossings: Sequence[Crossings], *, rank: int
) -> tuple[ProgramStep, ...]:
    """Return the program of `rank`; `crossings` are those of each microbatch."""
    return program_of(schedule, all_messages(schedule, crossings), rank=rank)


def program_of(
    schedule: Schedule, messages: Sequence[Message], *, rank: int
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
    begins = _begins(incoming, len(actions))
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
    found = []

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
        message = Message(
            source=source,
            target=target,
            microbatch=microbatch,
            ref=ref,
            spec=spec,
            is_gradient=is_gradient,
            sender=schedule.rank_of_stage[source],
            receiver=schedule.rank_of_stage[target],
            made=index_of[kind, source, microbatch],
            used=index_of[kind, target, microbatch],
        )
        found.append(message)

    for microbatch, of_microbatch in enumerate(crossings):
        for ref, targets in of_microbatch.targets.items():
            source, spec = of_microbatch.stage_of_call[ref.call], of_microbatch.specs[ref]
            for target in targets:
                add(source, target, microbatch, ref, spec, is_gradient=False)
                if spec.requires_grad and ("backward", target, microbatch) in index_of:
                    add(target, source, microbatch, ref, spec, is_gradient=True)
    return _with_after(sorted(found, key=lambda m: (m.sender, m.made, m.target, m.ref)), schedule)


def _with_after(messages: Sequence[Message], schedule: Schedule) -> list[Message]:
    """Return the messages, each with the number of its receiver's actions that it follows from.

    Where a schedule hangs, what is never made has all up to its use.
    """
    needed: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for message in messages:
        makers = needed.setdefault((message.receiver, message.used), set())
        makers.add((message.sender, message.made))
    # By action (rank, index): how many actions of each rank it follows from, itself among them.
    known: dict[tuple[int, int], list[int]] = {}
    last = [[0] * schedule.num_ranks for _ in schedule.actions]
    places, ready = [0] * schedule.num_ranks, True
    while ready:
        ready = False
        for rank, actions in enumerate(schedule.actions):
            while places[rank] < len(actions):
                makers = needed.get((rank, places[rank]), set())
                if not all(maker in known for maker in makers):
                    break
                before = [last[rank], *(known[maker] for maker in makers)]
                counts = [max(of_rank) for of_rank in zip(*before, strict=True)]
                ready, places[rank] = True, places[rank] + 1
                counts[rank] = places[rank]
                known[rank, places[rank] - 1] = last[rank] = counts
    found = []
    for message in messages:
        is_made = (message.sender, message.made) in known
        found.append(
            message._replace(
                after=known[message.sender, message.made][message.receiver]
                if is_made
                else message.used
            )
        )
    return found


def _begins(incoming: Sequence[Message], count: int) -> list[list[Message]]:
    """Return the receives to begin before each of `count` actions, in the order of each sender."""
    by_sender: dict[int, list[Message]] = {}
    for message in incoming:
        by_sender.setdefault(message.sender, []).append(message)
    begins: list[list[Message]] = [[] for _ in range(count)]
    for messages in by_sender.values():
        first = count
        for message in reversed(messages):  # not later than any that comes after it
            first = min(first, max(message.used - LOOKAHEAD, message.after))
            begins[first].append(message)
    # Lists are reversed sender by sender: each one's part is put in order again.
    return [sorted(reversed(of_action), key=lambda m: m.sender) for of_action in begins]
