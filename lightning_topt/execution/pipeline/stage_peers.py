"""Peers: the other ranks of a pipeline. Tensors go to them and come from them beside the
computation.

Sends never block; receives are begun early. Activations and gradients travel in groups of their
own, one for each direction: NCCL runs what two ranks exchange in a group in the order in which it
is begun, and gloo needs no tags that way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication.rank_watch import PeerLostError
from lightning_topt.communication.topology import own_group
from lightning_topt.execution.pipeline.messages import Message
from lightning_topt.graph.step_flow import LeafSpec
from lightning_topt.schedules.schedules import Schedule

Channel = tuple[bool, bool]  # of gradients; to a later rank of the pipeline


class Peers:
    """Exchanges the tensors of messages with the other `ranks` of this rank's pipeline, on
    `device`.

    `groups` has the group of each channel. All waits end at the time limit of the run's groups,
    with a PeerLostError that names the rank and what was expected of it.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        groups: Mapping[Channel, dist.ProcessGroup],
        *,
        rank: int,
        device: torch.device,
    ) -> None:
        self._ranks, self._groups, self._rank, self._device = (
            list(ranks),
            dict(groups),
            rank,
            device,
        )
        # by id of the message: hashing it all takes longer
        self._begun: dict[int, tuple[Any, Tensor]] = {}
        self._own: dict[int, Tensor] = {}  # from one stage of this rank to another
        self._sent: dict[int, list[tuple[Message, Any, Tensor]]] = {}  # by receiver

    @classmethod
    def of_pipelines(
        cls,
        pipelines: Sequence[Sequence[int]],
        schedule: Schedule,
        *,
        rank: int,
        device: torch.device,
    ) -> Peers:
        """Return the peers of this rank, `rank` of the run, which is in one of `pipelines`. A
        collective call of all ranks.
        """
        groups = {channel: own_group(pipelines) for channel in _channels(schedule)}
        own = next(ranks for ranks in pipelines if rank in ranks)
        peers = cls(own, groups, rank=own.index(rank), device=device)
        peers._meet()
        return peers

    def begin(self, messages: Sequence[Message]) -> None:
        """Begin to receive."""
        for message in messages:
            spec = message.spec
            buffer = torch.empty_strided(
                spec.shape, spec.stride, dtype=spec.dtype, device=self._device
            )
            group = self._groups[message.is_gradient, message.sender < message.receiver]
            try:
                self._begun[id(message)] = group.recv([flat(buffer)], message.sender, 0), buffer
            except RuntimeError as error:
                self._fail(message, error)

    def receive(self, message: Message) -> Tensor:
        """Return what `message` brings, once it is here."""
        if message.sender == message.receiver:
            return self._own.pop(id(message))
        work, buffer = self._begun.pop(id(message))
        try:
            work.wait()
        except RuntimeError as error:
            self._fail(message, error)
        self._let_go(message)
        return buffer

    def send(self, message: Message, tensor: Tensor) -> None:
        """Begin to send."""
        if message.sender == message.receiver:
            self._own[id(message)] = tensor
            return
        tensor = laid_out(tensor, message.spec)
        group = self._groups[message.is_gradient, message.sender < message.receiver]
        try:
            work = group.send([flat(tensor)], message.receiver, 0)
        except RuntimeError as error:
            self._fail(message, error)
        self._sent.setdefault(message.receiver, []).append((message, work, tensor))

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for sent in self._sent.values():
            for message, work, _ in sent:
                self._wait_for(message, work)
        self._sent = {}
        assert not self._begun and not self._own, "a message that nobody waited for"

    def forget(self) -> None:
        """Drop what is under way, after an error."""
        self._begun, self._own, self._sent = {}, {}, {}

    def _let_go(self, message: Message) -> None:
        """Free what the sender of `message` had used before it made this: gloo tells nobody when a
        send is over.
        """
        if sent := self._sent.get(message.sender):
            kept = []
            for each in sent:
                if each[0].used <= message.made:
                    self._wait_for(each[0], each[1])
                else:
                    kept.append(each)
            self._sent[message.sender] = kept

    def _wait_for(self, message: Message, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            self._fail(message, error)

    def _fail(self, message: Message, error: RuntimeError) -> NoReturn:
        me, sender, receiver = (
            self._ranks[rank] for rank in (self._rank, message.sender, message.receiver)
        )
        if sender == me:
            text = (
                f"rank {me} could not send {message} to rank {receiver}: rank {receiver} is gone, "
                "stopped or late"
            )
        else:
            text = (
                f"rank {me} waited for {message}, and rank {sender} did not send them: it is gone, "
                "stopped or late"
            )
        raise PeerLostError(f"{text} ({error})") from error

    def _meet(self) -> None:
        """Connect with all peers, in one order on all ranks: NCCL connects two ranks when they
        first exchange something.
        """
        for (_, to_later), group in sorted(self._groups.items()):
            for low in range(len(self._ranks)):
                for high in range(low + 1, len(self._ranks)):
                    sender, receiver = (low, high) if to_later else (high, low)
                    token = torch.zeros(1, device=self._device)
                    if self._rank == sender:
                        group.send([token], receiver, 0).wait()
                    elif self._rank == receiver:
                        group.recv([token], sender, 0).wait()


def flat(tensor: Tensor) -> Tensor:
    """Return the memory of a dense tensor as (n,), in the order in which it lies there."""
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def laid_out(tensor: Tensor, spec: LeafSpec) -> Tensor:
    """Return `tensor`, or a copy, as it is expected: with this dtype and these strides."""
    if tensor.dtype == spec.dtype and tensor.stride() == spec.stride:
        return tensor
    assert tensor.shape == spec.shape, (tensor.shape, spec)
    return torch.empty_strided(
        spec.shape, spec.stride, dtype=spec.dtype, device=tensor.device
    ).copy_(tensor)


def _channels(schedule: Schedule) -> list[Channel]:
    """The channels between any two ranks of `schedule` that stages may use, in order."""
    ranks = schedule.rank_of_stage
    pairs = {
        (first, second)
        for at, first in enumerate(ranks)
        for second in ranks[at + 1 :]
        if first != second
    }
    up = {first < second for first, second in pairs}
    return sorted(
        {(False, to_later) for to_later in up} | {(True, not to_later) for to_later in up}
    )
