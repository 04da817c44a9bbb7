"""Point-to-point layer of a pipeline: its ranks send each other tensors beside their computation.

    class               pipelines                  what travels
    `RankLinks`         all                        tensors
    `MessageExchange`   with a flush after each    a `Message`: one tensor, known beforehand from
    (`step_program`)    step; all evaluation       the schedule
    `StageLinks`        asynchronous               a parcel: the tensors of one minibatch
    `StageInputs`       on `StageLinks`            activations and their gradients, received ahead
    `ValueParcels`      on `StageLinks`            a minibatch's loss, gradient norms and payload

Sends never block, and receives are begun early.

[Note: links] A link leads from one rank to another, and is a process group of these two. What it
carries arrives in the order in which it was sent, and is received in that order. NCCL runs what a
rank begins in one group in order, and a send waits there until the other rank receives: in a group
of more ranks, or of both directions, messages would wait for others that they have nothing to do
with, and ranks for one another in a circle. Each group takes memory of the device, so there are
links only where the plan's first step has messages. Those that other steps have besides (an
evaluation that leaves out a stage, gradients of what was frozen) go through the pipeline's group on
gloo. So does what is in memory of the host, with a tag for each channel: no host waits for its
device to learn it. All messages are bytes, since NCCL knows few dtypes.

[Note: shapes ahead] An asynchronous stage begins to receive activations a minibatch ahead, before
it knows their shapes. They are taken to be those of the last minibatch, where in the last two the
same crossed between all stages. Where they turn out to be others, the sender first sends something
of the expected shapes, which is not used, and then the tensors themselves. So it does where no
minibatch follows. Sender and receiver know the shapes of both, so they agree.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication.collectives import backend_of
from lightning_topt.communication.rank_watch import PeerLostError
from lightning_topt.execution.pipeline.stage_layout import Crossings, Pair, PipelineGroups
from lightning_topt.graph.step_flow import LeafSpec, TensorRef

LinkChannel = Literal[
    "activations", "gradients", "values", "heads", "payloads", "shared weights", "shared gradients"
]
# Channels in memory of the host, and their tags: not on the link.
ON_HOST: Mapping[LinkChannel, int] = {"heads": 1, "payloads": 2}
UNKNOWN = -1.0  # power of a norm that nobody asked for; NaN is that of gradients which are NaN
ROOM = 4096  # bytes of a payload's head, and of its elements, with every minibatch


class PendingTransfer(NamedTuple):
    """A send or receive under way. `tensor` must live until `work` is over."""

    work: Any
    tensor: Tensor
    other: int  # the other rank's place in the pipeline
    is_receive: bool
    what: object  # its text names the tensor in an error


class RankLinks:
    """Links between the ranks of one pipeline; see [Note: links].

    All waits end at the time limit of the run's groups, with a PeerLostError that names the other
    rank and what was expected of it.
    """

    def __init__(
        self,
        groups: PipelineGroups,
        pairs: Iterable[Pair],
        *,
        device: torch.device,
        names_stages: bool,
    ) -> None:
        """Make the links, and connect. A collective call of all ranks.

        Args:
            groups: of the plan; what is made here lasts as long.
            pairs: the places (sender, receiver) in the pipeline that a link leads between; the
                same on all ranks of the run.
            device: of the tensors.
            names_stages: errors name stages beside ranks, since there is one on each.
        """
        self.ranks, self.place = list(groups.pipeline), groups.rank
        self.pairs = frozenset(pairs)
        self._device, self._names_stages = device, names_stages
        self.sends_wait = backend_of(device, groups.pipeline_group) != "gloo"  # in line
        # For what has no link; on gloo, which sends nothing but memory of the host.
        pipelines = groups.mesh.groups_along(groups.mesh.pipeline_axes)
        self._rest = groups.host_group
        # By pair: the group, and the other's rank in it. In an order that is the same on all ranks.
        self._ends: dict[Pair, tuple[dist.ProcessGroup, int]] = {}
        for pair in sorted(self.pairs):
            group = groups.make([[ranks[place] for place in pair] for ranks in pipelines])
            if group is not None:
                (other,) = set(pair) - {self.place}
                self._ends[pair] = group, dist.get_group_rank(group, self.ranks[other])
        # NCCL connects two ranks when they first exchange something: so one element now.
        for pair in self._ends:
            token, none = torch.zeros(1, device=device), "the first message"
            is_sender = pair[0] == self.place
            self.wait(
                self.send(pair[1], token, none)
                if is_sender
                else self._receive_into(token, pair[0], none)
            )

    def receive(
        self, source: int, spec: LeafSpec, what: object, *, tag: int = 0
    ) -> PendingTransfer:
        """Begin to receive a tensor like `spec`; with a `tag` into memory of the host."""
        # With the strides that the sender's tensor has: no copy on this side.
        *_, device = self._end((source, self.place), source, tag)
        buffer = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
        return self._receive_into(buffer, source, what, tag=tag)

    def _receive_into(
        self, buffer: Tensor, source: int, what: object, *, tag: int = 0
    ) -> PendingTransfer:
        group, other, _ = self._end((source, self.place), source, tag)
        try:
            work = group.recv([_memory(buffer)], other, tag)
        except RuntimeError as error:
            self._fail(source, what, error, is_receive=True)
        return PendingTransfer(work, buffer, source, True, what)

    def send(self, target: int, tensor: Tensor, what: object, *, tag: int = 0) -> PendingTransfer:
        """Begin to send a dense tensor; with a `tag` through memory of the host."""
        group, other, device = self._end((self.place, target), target, tag)
        # as memory says: a conjugate may be a mark on the tensor alone
        sent = _memory(tensor.resolve_conj().resolve_neg()).to(device)
        try:
            work = group.send([sent], other, tag)
        except RuntimeError as error:
            self._fail(target, what, error, is_receive=False)
        return PendingTransfer(work, sent, target, False, what)

    def _end(self, pair: Pair, other: int, tag: int) -> tuple[dist.ProcessGroup, int, torch.device]:
        # A group with the `other` place of the pipeline, its rank in the group, and where the
        # tensors are that travel between the two
        if tag or pair not in self._ends:
            return self._rest, other, torch.device("cpu")
        return *self._ends[pair], self._device

    def wait(self, transfer: PendingTransfer, *, on_host: bool = False) -> Tensor:
        """Return the tensor once the transfer is over, on the device or where it came."""
        try:
            transfer.work.wait()
        except RuntimeError as error:
            self._fail(transfer.other, transfer.what, error, is_receive=transfer.is_receive)
        is_there = on_host or not transfer.is_receive
        return transfer.tensor if is_there else transfer.tensor.to(self._device)

    def _fail(
        self, other_place: int, what: object, error: RuntimeError, *, is_receive: bool
    ) -> NoReturn:
        me, other = (
            f"rank {self.ranks[place]}" + (f" (stage {place})" if self._names_stages else "")
            for place in (self.place, other_place)
        )
        if is_receive:
            text = (
                f"{me} waited for {what}, and {other} did not send them: it is gone, stopped or "
                "late"
            )
        else:
            lost = "it" if self._names_stages else other
            text = f"{me} could not send {what} to {other}: {lost} is gone, stopped or late"
        raise PeerLostError(f"{text} ({error})") from error


# ---- asynchronous pipelines ----------------------------------------------------------------------


class _ParcelName(NamedTuple):
    channel: LinkChannel
    minibatch: int

    def __str__(self) -> str:
        return f"{self.channel} of minibatch {self.minibatch}"


_Parcel = tuple[int, list[PendingTransfer]]  # the minibatch, a transfer for each tensor


class StageLinks:
    """Links of this rank's `stage` to the other stages of an asynchronous pipeline.

    There is one stage on each rank. Parcels (lists of tensors) of all channels travel from one
    stage to another in the order in which they are sent, and their receives are begun in that
    order. Those of the channels `ON_HOST` come apart, in order among themselves.

    Nothing else travels on the links while minibatches are in flight.
    """

    def __init__(self, links: RankLinks) -> None:
        self._links = links
        self.stage, self.num_stages = links.place, len(links.ranks)
        self._receives: dict[tuple[LinkChannel, int], deque[_Parcel]] = {}
        self._sends: dict[tuple[LinkChannel, int], deque[_Parcel]] = {}

    def begin(
        self, channel: LinkChannel, source: int, minibatch: int, specs: Sequence[LeafSpec]
    ) -> None:
        """Begin to receive the next parcel of stage `source`."""
        what, tag = _ParcelName(channel, minibatch), ON_HOST.get(channel, 0)
        transfers = [self._links.receive(source, spec, what, tag=tag) for spec in specs]
        self._receives.setdefault((channel, source), deque()).append((minibatch, transfers))

    def receive(self, channel: LinkChannel, source: int, minibatch: int) -> list[Tensor]:
        """Return the tensors of the parcel of `source` that was begun first, once they are here."""
        of_minibatch, transfers = self._receives[channel, source].popleft()
        assert of_minibatch == minibatch, (channel, source, of_minibatch, minibatch)
        on_host = channel in ON_HOST
        return [self._links.wait(transfer, on_host=on_host) for transfer in transfers]

    def send(
        self,
        channel: LinkChannel,
        target: int,
        minibatch: int,
        tensors: Sequence[Tensor],
        specs: Sequence[LeafSpec] | None = None,
    ) -> None:
        """Begin to send a parcel, with the dtypes and strides of `specs`."""
        what, tag, transfers = _ParcelName(channel, minibatch), ON_HOST.get(channel, 0), []
        for number, tensor in enumerate(tensors):
            sent = tensor if specs is None else laid_out(tensor, specs[number])
            transfers.append(self._links.send(target, sent, what, tag=tag))
        self._sends.setdefault((channel, target), deque()).append((minibatch, transfers))

    def free_sent(self, target: int, before: int) -> None:
        """Free what `target` is known to have used: parcels of minibatches before this one.

        Gloo tells nobody when a send is over; to wait for one that is takes no time.
        """
        # in the order in which they were sent, so the oldest are in front
        for (_, other), sends in self._sends.items():
            while other == target and sends and sends[0][0] < before:
                for transfer in sends.popleft()[1]:
                    self._links.wait(transfer)

    def finish(self) -> None:
        """Wait until all sends have arrived."""
        for sends in self._sends.values():
            while sends:
                for transfer in sends.popleft()[1]:
                    self._links.wait(transfer)

    @property
    def held_bytes(self) -> int:
        """Bytes under way: parcels not known to have arrived, and buffers for what comes."""
        parcels = [parcel for sends in self._sends.values() for parcel in sends]
        parcels += [parcel for receives in self._receives.values() for parcel in receives]
        return sum(transfer.tensor.nbytes for _, transfers in parcels for transfer in transfers)

    def forget(self) -> None:
        """Drop what is under way, after an error."""
        self._receives, self._sends = {}, {}


# ---- activations and gradients of an asynchronous stage ------------------------------------------

Format = tuple[tuple[TensorRef, LeafSpec], ...]  # tensors in the order in which they travel
Shapes = tuple[LeafSpec, ...]  # equal where the same buffers hold the tensors


@dataclass(frozen=True)
class StageTraffic:
    """Tensors that a stage exchanges in a pass; their gradients travel the other way.

    `received` has activations by the stage that makes them, `sent` by the stage that needs them.
    """

    received: Mapping[int, Format]
    sent: Mapping[int, Format]

    @classmethod
    def of_stage(cls, stage: int, crossings: Crossings) -> StageTraffic:
        """Return what `stage` exchanges where these tensors cross."""
        received: dict[int, Format] = {}
        sent: dict[int, Format] = {}
        # sorted: both sides list the tensors of a parcel in one order
        for ref, targets in sorted(crossings.targets.items()):
            source, entry = crossings.stage_of_call[ref.call], (ref, crossings.specs[ref])
            if stage in targets:
                received[source] = (*received.get(source, ()), entry)
            for target in targets if source == stage else ():
                sent[target] = (*sent.get(target, ()), entry)
        return cls(received, sent)


@dataclass
class StageInputs:
    """Activations and gradients between the stage of `links` and all others.

    Norms of gradients, (stages,), travel with the activations from each stage to the next. See
    [Note: shapes ahead].
    """

    links: StageLinks
    is_ahead: bool = True  # whether activations are received ahead at all; alike on all stages
    has_begun: bool = False  # whether those of the minibatch that came in last were begun ahead
    is_next_known: bool = False  # whether those of the next one are
    _begun_ahead: int | None = None  # the newest minibatch of which they are
    _crossings: tuple[Crossings, ...] = ()  # of the last two minibatches
    _from: dict[int, Shapes] = field(default_factory=dict)  # with the last minibatch, by stage
    _to: dict[int, Shapes] = field(default_factory=dict)
    # minibatch and stage behind whose gradients are being received
    _begun: set[tuple[int, int]] = field(default_factory=set)

    def come_in(self, crossings: Crossings) -> None:
        """Take over what crosses between all stages for a new minibatch."""
        self.has_begun, self._crossings = self.is_next_known, (*self._crossings[-1:], crossings)
        before, last = self._crossings[0], self._crossings[-1]
        is_same = len(self._crossings) > 1 and (before is last or before == last)
        self.is_next_known = self.is_ahead and is_same

    def receive(
        self, minibatch: int, traffic: StageTraffic, powers: Tensor
    ) -> dict[TensorRef, Tensor]:
        """Return what a forward pass needs.

        `powers`, (stages,), takes over those of the stages before.
        """
        found: dict[TensorRef, Tensor] = {}
        for source in range(self.links.stage):
            tensors = traffic.received.get(source, ())
            shapes = tuple(spec for _, spec in tensors)
            norms = [spec_of(powers)] if source == self.links.stage - 1 else []
            # This minibatch: what was begun ahead, or all of it, or the right shapes after it.
            expected = self._from[source] if self.has_begun else None
            if expected is None:
                self.links.begin("activations", source, minibatch, [*shapes, *norms])
            elif expected != shapes:
                self.links.begin("activations", source, minibatch, shapes)
            given = self.links.receive("activations", source, minibatch)
            if norms:
                powers[: self.links.stage] = given.pop()[: self.links.stage]
            if expected is not None and expected != shapes:
                given = self.links.receive("activations", source, minibatch)
            found.update(zip((ref for ref, _ in tensors), given, strict=True))
            self._from[source] = shapes
        return found

    def begin_ahead(self, minibatch: int, powers: Tensor) -> None:
        """Begin to receive for the next forward pass, that of `minibatch`, once."""
        if self.is_next_known and self._begun_ahead != minibatch:
            self._begun_ahead = minibatch
            for source, expected in self._from.items():
                norms = [spec_of(powers)] if source == self.links.stage - 1 else []
                self.links.begin("activations", source, minibatch, [*expected, *norms])

    def send(
        self,
        minibatch: int,
        traffic: StageTraffic,
        made: Mapping[TensorRef, Tensor],
        powers: Tensor,
    ) -> None:
        """Send what a forward pass has made, and `powers` to the next stage."""
        stage = self.links.stage
        for target in range(stage + 1, self.links.num_stages):
            tensors = traffic.sent.get(target, ())
            shapes = tuple(spec for _, spec in tensors)
            norms = [powers.clone()] if target == stage + 1 else []
            specs = [spec_of(powers)] if norms else []
            expected = self._to[target] if self.has_begun else None
            given = [made[ref] for ref, _ in tensors]
            # In one parcel, unless the receiver waits for other shapes.
            if expected is None or expected == shapes:
                self.links.send(
                    "activations", target, minibatch, [*given, *norms], [*shapes, *specs]
                )
            else:
                unused = _unused(expected, powers.device)
                self.links.send(
                    "activations", target, minibatch, [*unused, *norms], [*expected, *specs]
                )
                self.links.send("activations", target, minibatch, given, shapes)
            self._to[target] = shapes

    def end_ahead(self, minibatch: int, powers: Tensor) -> None:
        """Send what was begun ahead for `minibatch`, which does not come now; nobody reads it."""
        for target, expected in self._to.items() if self.is_next_known else ():
            norms = [spec_of(powers)] if target == self.links.stage + 1 else []
            unused = _unused([*expected, *norms], powers.device)
            self.links.send("activations", target, minibatch, unused)

    def drop_ahead(self, minibatch: int) -> None:
        """Receive what others have sent by `end_ahead`."""
        for source in self._from if self.is_next_known else ():
            self.links.receive("activations", source, minibatch)
        self._from, self._to, self._crossings, self.is_next_known = {}, {}, (), False

    def begin_gradients(self, minibatch: int, traffic: StageTraffic, target: int) -> None:
        """Begin to receive the gradients of what `target` needed, if that is not done yet."""
        if target in traffic.sent and (minibatch, target) not in self._begun:
            self._begun.add((minibatch, target))
            specs = [spec for _, spec in _with_gradients(traffic.sent[target])]
            self.links.begin("gradients", target, minibatch, specs)

    def receive_gradients(self, minibatch: int, traffic: StageTraffic) -> dict[TensorRef, Tensor]:
        """Return the gradients of what was sent, summed over the stages that received it."""
        found: dict[TensorRef, Tensor] = {}
        # In the order of stages: sums are the same in every run.
        for target, tensors in sorted(traffic.sent.items()):
            self._begun.remove((minibatch, target))
            given = self.links.receive("gradients", target, minibatch)
            for (ref, _), gradient in zip(_with_gradients(tensors), given, strict=True):
                found[ref] = found[ref] + gradient if ref in found else gradient
        return found

    def send_gradients(
        self, minibatch: int, traffic: StageTraffic, made: Mapping[TensorRef, Tensor]
    ) -> None:
        """Send the gradients of what was received."""
        for source, tensors in sorted(traffic.received.items()):
            wanted = _with_gradients(tensors)
            gradients, specs = [made[ref] for ref, _ in wanted], [spec for _, spec in wanted]
            self.links.send("gradients", source, minibatch, gradients, specs)


# ---- what travels back with a minibatch ----------------------------------------------------------

Payload = tuple[bytes, Tensor]
_LENGTHS = struct.Struct("<qq")


@dataclass
class SideValues:
    """Values that travel back from stage to stage with the gradients of a minibatch.

    `loss` is one number. `powers` (stages,) are norms of gradients to their power, so that they
    add up; UNKNOWN where nobody asked. `payload` is the caller's: its head, in memory of the host,
    and its elements, (n,) bytes on the device.
    """

    loss: Tensor
    powers: Tensor
    payload: Payload | None = None


@dataclass
class ValueParcels:
    """Sends side values along `links` of `num_stages` stages, and receives them, on `device`.

    A parcel is bytes on the device: the loss and the powers, float64, and the first `ROOM` elements
    of the payload. Its head comes apart, on the host: two lengths (of the head, -1 without a
    payload, and of the elements), and `ROOM` bytes. What has no room follows, on the host too.
    """

    links: StageLinks
    num_stages: int
    device: torch.device
    _begun: set[int] = field(default_factory=set, init=False)  # minibatches

    def send(self, minibatch: int, values: SideValues) -> None:
        """Begin to send to the stage before; nothing on the first."""
        target = self.links.stage - 1
        if target < 0:
            return
        head, elements = values.payload or (b"", torch.empty(0, dtype=torch.uint8))
        lengths = _LENGTHS.pack(-1 if values.payload is None else len(head), len(elements))
        text = _bytes_tensor(lengths + head[:ROOM].ljust(ROOM, b"\0"))
        self.links.send("heads", target, minibatch, [text])
        # (1 + stages,) numbers, and bytes of the payload.
        parcel = torch.empty(self._numbers + ROOM, dtype=torch.uint8, device=self.device)
        numbers, room = parcel[: self._numbers].view(torch.float64), parcel[self._numbers :]
        numbers[0], numbers[1:] = values.loss, values.powers
        room[: len(elements)] = elements[:ROOM]
        self.links.send("values", target, minibatch, [parcel])
        if max(len(head), len(elements)) > ROOM:
            rest = head[ROOM:] + elements[ROOM:].cpu().numpy().tobytes()
            self.links.send("payloads", target, minibatch, [_bytes_tensor(rest)])

    def begin(self, minibatch: int) -> None:
        """Begin to receive from the stage behind, if there is one and that is not done yet."""
        source = self.links.stage + 1
        if minibatch not in self._begun and source < self.num_stages:
            self._begun.add(minibatch)
            self.links.begin("heads", source, minibatch, [_spec_of_bytes(_LENGTHS.size + ROOM)])
            self.links.begin("values", source, minibatch, [_spec_of_bytes(self._numbers + ROOM)])

    def receive(self, minibatch: int) -> SideValues:
        """Return the values of a minibatch, once they are here."""
        self.begin(minibatch)
        self._begun.discard(minibatch)
        source = self.links.stage + 1
        (parcel,) = self.links.receive("values", source, minibatch)
        # The same layout as in `send`.
        numbers = parcel[: self._numbers].view(torch.float64)
        text = self.links.receive("heads", source, minibatch)[0].numpy().tobytes()
        length, count = _LENGTHS.unpack_from(text)
        head = text[_LENGTHS.size :][: max(length, 0)]
        elements = parcel[self._numbers :][:count]
        if max(length, count) > ROOM:
            size = max(length - ROOM, 0) + max(count - ROOM, 0)
            self.links.begin("payloads", source, minibatch, [_spec_of_bytes(size)])
            (rest,) = self.links.receive("payloads", source, minibatch)
            head += rest[: max(length - ROOM, 0)].numpy().tobytes()
            elements = torch.cat([elements, rest[max(length - ROOM, 0) :].to(self.device)])
        payload = None if length < 0 else (head, elements)
        return SideValues(numbers[0].to(torch.get_default_dtype()), numbers[1:].clone(), payload)

    @property
    def _numbers(self) -> int:
        # Bytes of the loss and the powers
        return 8 * (self.num_stages + 1)


# ---- tensors and their memory --------------------------------------------------------------------


def _memory(tensor: Tensor) -> Tensor:
    # The memory of a dense tensor as bytes, (n,), in the order in which it lies there
    is_flat = tensor.is_contiguous()
    flat = tensor.view(-1) if is_flat else tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)


def laid_out(tensor: Tensor, spec: LeafSpec) -> Tensor:
    """Return `tensor`, or a copy, with the dtype and strides that the receiver expects."""
    if tensor.dtype == spec.dtype and tensor.stride() == spec.stride:
        return tensor
    assert tensor.shape == spec.shape, (tensor.shape, spec)
    return torch.empty_strided(
        spec.shape, spec.stride, dtype=spec.dtype, device=tensor.device
    ).copy_(tensor)


def _unused(specs: Iterable[LeafSpec], device: torch.device) -> list[Tensor]:
    # Tensors that nobody reads
    return [
        torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
        for spec in specs
    ]


def _with_gradients(tensors: Format) -> Format:
    return tuple((ref, spec) for ref, spec in tensors if spec.requires_grad)


def spec_of(tensor: Tensor) -> LeafSpec:
    """Return what a tensor like this one looks like; no gradient travels back."""
    return LeafSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, requires_grad=False)


def _spec_of_bytes(count: int) -> LeafSpec:
    return LeafSpec((count,), (1,), torch.uint8, requires_grad=False)


def _bytes_tensor(payload: bytes) -> Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)
