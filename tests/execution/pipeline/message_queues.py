"""How long passes take where messages wait in queues, as over NCCL; no process and no tensor.

    programs = [[Compute(1.0), Send("x")], [Receive("x"), Wait("x"), Compute(1.0)]]
    seconds(programs, queue_of=lambda message: "all", transfer_of=lambda message: 0.5)    # 2.5

A rank computes and waits for messages, at either end; `Send` and `Receive` only begin. With
`queue_of` a rank has a queue for each value of it (a communicator): what it has begun there happens
in order, and a transfer starts when it is in front at both ends. Without, links are free: a
transfer starts as soon as the sender has sent what it had sent to this receiver before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

Message = Hashable


class Compute(NamedTuple):
    """The rank is busy for so long."""

    seconds: float


class Send(NamedTuple):
    """The rank begins to send."""

    message: Message


class Receive(NamedTuple):
    """The rank begins to receive."""

    message: Message


class Wait(NamedTuple):
    """The rank, at either end, waits until the message is over."""

    message: Message


Operation = Compute | Send | Receive | Wait


class _Queue:
    """What a rank has begun in one queue, with the times, and when what was before is over."""

    def __init__(self) -> None:
        self.begun: deque[tuple[Message, float]] = deque()
        self.free = 0.0


def seconds(
    programs: Sequence[Sequence[Operation]],
    *,
    queue_of: Callable[[Any], Hashable] | None,
    transfer_of: Callable[[Any], float],
) -> float | None:
    """When the last rank has run its program and its sends are over; None: they wait for ever."""
    clocks, places = [0.0] * len(programs), [0] * len(programs)
    ends = {  # sender and receiver of each message
        kind: {
            op.message: rank for rank, ops in enumerate(programs) for op in ops if type(op) is kind
        }
        for kind in (Send, Receive)
    }
    assert ends[Send].keys() == ends[Receive].keys(), "a message has two ends"
    sender_of, receiver_of = ends[Send], ends[Receive]
    queues: dict[Hashable, _Queue] = {}
    arrived: dict[Message, float] = {}
    waiting: dict[Message, list[int]] = {}
    ready = list(range(len(programs)))

    def queue(rank: int, message: Message) -> _Queue:
        if queue_of is None:
            key: Hashable = (sender_of[message], receiver_of[message])
        else:
            key = (rank, queue_of(message))
        return queues.setdefault(key, _Queue())

    def transfer(message: Message) -> None:
        """Let what is in front at both ends happen, and what that brings to the front."""
        pending = [message]
        while pending:
            each = pending.pop()
            both = [queue(sender_of[each], each)]
            if queue_of is not None:
                both.append(queue(receiver_of[each], each))
            if any(not one.begun or one.begun[0][0] != each for one in both):
                continue
            start = max(max(one.begun[0][1], one.free) for one in both)
            arrived[each] = end = start + transfer_of(each)
            ready.extend(waiting.pop(each, ()))
            for one in both:
                one.begun.popleft()
                one.free = end
                if one.begun:
                    pending.append(one.begun[0][0])

    while ready:
        rank = ready.pop()
        program = programs[rank]
        while places[rank] < len(program):
            op = program[places[rank]]
            if isinstance(op, Compute):
                clocks[rank] += op.seconds
            elif isinstance(op, Wait):
                if op.message not in arrived:
                    waiting.setdefault(op.message, []).append(rank)
                    break
                clocks[rank] = max(clocks[rank], arrived[op.message])
            elif isinstance(op, Send) or queue_of is not None:
                queue(rank, op.message).begun.append((op.message, clocks[rank]))
                transfer(op.message)
            places[rank] += 1
    if len(arrived) < len(sender_of) or waiting:
        return None
    return max([*clocks, *arrived.values()])
