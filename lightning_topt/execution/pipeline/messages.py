"""Messages that a rank of a pipeline sends and receives around each of its actions: they follow
from schedule and flows.

All ranks compute the same. Between two ranks, in each direction and kind (activations, gradients),
messages travel in the order in which the sender makes them, and receives are begun in that order:
no message needs a header or a tag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_topt.graph.step_flow import LeafSpec, TensorRef
from lightning_topt.schedules.schedules import Action, Schedule

LOOKAHEAD = (
    # actions for which receives are begun before they are needed: in 1F1B the next backward and the
    # next forward
    2
)


class Message(NamedTuple):
    """The tensor `ref` of a microbatch on its way from stage `source` to stage `target`, or its
    gradient on its way back.

    `sender` and `receiver` are ranks of the pipeline. It is made by the sender's action with the
    index `made` and used by the receiver's with the index `used`.
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

    def __str__(self) -> str:
        what = "gradients" if self.is_gradient else "activations"
        return (
            f"{what} of microbatch {self.microbatch} from stage {self.source} for stage "
            f"{self.target}"
        )


@dataclass(frozen=True)
class Crossings:
    """Tensors that cross between stages in a microbatch: `targets` has the stages that need each,
    `specs` all about it but its elements, `stage_of_call` the stage of each call.
    """

    targets: Mapping[TensorRef, tuple[int, ...]]
    specs: Mapping[TensorRef, LeafSpec]
    stage_of_call: tuple[int, ...]


@dataclass(frozen=True)
class Around:
    """The messages around one action: `begins` are receives to begin before it, `needs` what it
    waits for, `sends` what it makes. `ends` are stages whose parameters have all their gradients
    after it.
    """

    action: Action
    begins: tuple[Message, ...]
    needs: tuple[Message, ...]
    sends: tuple[Message, ...]
    ends: tuple[int, ...] = ()


def around_actions(
    schedule: Schedule, crossings: Sequence[Crossings], *, rank: int
) -> tuple[Around, ...]:
    """Return the messages around each action of `rank`; `crossings` are those of each
    microbatch.
    """
    messages = _messages(schedule, crossings)
    actions = schedule.actions[rank]
    needs: list[list[Message]] = [[] for _ in actions]
    sends: list[list[Message]] = [[] for _ in actions]
    for message in messages:
        if message.receiver == rank:
            needs[message.used].append(message)
        if message.sender == rank:
            sends[message.made].append(message)
    begins = _begins([m for m in messages if m.receiver == rank and m.sender != rank], len(actions))
    ends = _ends(actions)
    rows = zip(actions, begins, needs, sends, ends, strict=True)
    return tuple(
        Around(action, tuple(b), tuple(n), tuple(s), tuple(e)) for action, b, n, s, e in rows
    )


def _messages(schedule: Schedule, crossings: Sequence[Crossings]) -> list[Message]:
    """All messages of a step, in the order in which their senders make them."""
    places = _places(schedule)
    found = []
    for microbatch, of_microbatch in enumerate(crossings):
        for ref, targets in of_microbatch.targets.items():
            source, spec = of_microbatch.stage_of_call[ref.call], of_microbatch.specs[ref]
            for target in targets:
                forward = (source, target, microbatch, ref, spec, False)
                found.append(_message(*forward, schedule=schedule, places=places))
                if spec.requires_grad and ("backward", target, microbatch) in places:
                    back = (target, source, microbatch, ref, spec, True)
                    found.append(_message(*back, schedule=schedule, places=places))
    return sorted(found, key=lambda m: (m.sender, m.made, m.target, m.ref))


def _message(
    source: int,
    target: int,
    microbatch: int,
    ref: TensorRef,
    spec: LeafSpec,
    is_gradient: bool,
    *,
    schedule: Schedule,
    places: Mapping[tuple[str, int, int], int],
) -> Message:
    kind = "backward" if is_gradient else "forward"
    return Message(
        source=source,
        target=target,
        microbatch=microbatch,
        ref=ref,
        spec=spec,
        is_gradient=is_gradient,
        sender=schedule.rank_of_stage[source],
        receiver=schedule.rank_of_stage[target],
        made=places[kind, source, microbatch],
        used=places[kind, target, microbatch],
    )


def _places(schedule: Schedule) -> dict[tuple[str, int, int], int]:
    """The index of each pass among the actions of its rank; of a backward in two parts that of the
    first.
    """
    kinds = {"forward": "forward", "backward": "backward", "backward_input": "backward"}
    return {
        (kinds[action.kind], action.stage_index, action.microbatch_index): index
        for actions in schedule.actions
        for index, action in enumerate(actions)
        if action.kind in kinds
    }


def _begins(incoming: Sequence[Message], count: int) -> list[list[Message]]:
    """For each action the receives to begin before it: in the order of each sender, up to those of
    the next actions.
    """
    channels: dict[tuple[int, bool], list[Message]] = {}
    for message in incoming:
        channels.setdefault((message.sender, message.is_gradient), []).append(message)
    begins: list[list[Message]] = [[] for _ in range(count)]
    for channel in channels.values():
        first = count
        for message in reversed(channel):  # not later than any that comes after it
            first = min(first, max(message.used - LOOKAHEAD, 0))
            begins[first].append(message)
    # Lists are reversed channel by channel: each channel's part is put in order again, those used
    # first in front.
    return [sorted(reversed(of_action), key=lambda m: m.sender) for of_action in begins]


def _ends(actions: Sequence[Action]) -> list[list[int]]:
    last: dict[int, int] = {}
    for index, action in enumerate(actions):
        if action.kind in ("backward", "backward_weight"):
            last[action.stage_index] = index
    return [
        [stage for stage, index in last.items() if index == place] for place in range(len(actions))
    ]
