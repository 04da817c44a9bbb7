"""Side values: what travels back along a pipeline with the gradients of a minibatch, from each
stage to the one before.

Its loss, the norms of its gradients on the stages behind (as powers that add up), and bytes of the
caller's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_topt.execution.pipeline.stage_links import StageLinks
from lightning_topt.graph.step_flow import LeafSpec

UNKNOWN = -1.0  # a power of a norm that nobody has asked for; NaN is that of gradients which are
LEAST_BYTES = 1024  # room for a payload in every parcel; more once a payload was larger


@dataclass
class SideValues:
    """The `loss` (one number) of a minibatch, a power of the norm for each stage or UNKNOWN, and
    the payload.
    """

    loss: Tensor
    powers: Tensor
    payload: bytes | None = None


@dataclass
class ValueParcels:
    """Sends side values along `links` of `num_stages` stages, and receives them, on `device`."""

    links: StageLinks
    num_stages: int
    device: torch.device
    _room_sent: int = field(default=LEAST_BYTES, init=False)
    _room_begun: int = field(default=LEAST_BYTES, init=False)
    # the minibatch of the parcel that is being received
    _begun: int | None = field(default=None, init=False)

    def send(self, minibatch: int, values: SideValues) -> None:
        """Begin to send them to the stage before; nothing on the first. Bytes without room go in a
        second parcel.
        """
        stage = self.links.stage
        if stage == 0:
            return
        payload = values.payload or b""
        length = -1 if values.payload is None else len(payload)
        numbers = torch.empty(self.num_stages + 2, dtype=torch.float64, device=self.device)
        numbers[0], numbers[1], numbers[2:] = values.loss, length, values.powers
        room, rest = self._room_sent, payload[self._room_sent :]
        text = _bytes(payload[:room].ljust(room, b"\0")).to(self.device)
        self.links.send(
            "values", stage - 1, minibatch, [torch.cat([numbers.view(torch.uint8), text])]
        )
        if rest:
            self.links.send("values", stage - 1, minibatch, [_bytes(rest).to(self.device)])
            self._room_sent = _room_for(length)

    def begin(self, minibatch: int) -> None:
        """Begin to receive those of a minibatch from the stage behind, unless that has been
        done.
        """
        if self._begun is None and self.links.stage + 1 < self.num_stages:
            self.links.begin(
                "values",
                self.links.stage + 1,
                minibatch,
                [_of_bytes(self._head + self._room_begun)],
            )
            self._begun = minibatch

    def receive(self, minibatch: int) -> SideValues:
        """Return those of a minibatch, once they are here."""
        self.begin(minibatch)
        assert self._begun == minibatch, (self._begun, minibatch)
        source, room = self.links.stage + 1, self._room_begun
        (parcel,) = self.links.receive("values", source, minibatch)
        self._begun = None
        numbers = parcel[: self._head].view(torch.float64)
        length, payload = int(numbers[1]), None
        if length >= 0:
            payload = parcel[self._head :].cpu().numpy().tobytes()[:length]
        if length > room:
            self.links.begin("values", source, minibatch, [_of_bytes(length - room)])
            (rest,) = self.links.receive("values", source, minibatch)
            payload = (payload or b"") + rest.cpu().numpy().tobytes()
            self._room_begun = _room_for(length)
        return SideValues(numbers[0].to(torch.get_default_dtype()), numbers[2:].clone(), payload)

    @property
    def _head(self) -> int:
        return 8 * (self.num_stages + 2)


def _bytes(payload: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        if payload
        else torch.empty(0, dtype=torch.uint8)
    )


def _of_bytes(count: int) -> LeafSpec:
    return LeafSpec((count,), (1,), torch.uint8, requires_grad=False)


def _room_for(length: int) -> int:
    return 1 << length.bit_length()
