"""Activations and gradients of a stage in a run that never flushes: received ahead, sent without
waiting.

[Note: shapes ahead] Receives of activations are begun a minibatch ahead, before its shapes are
known: they are taken to be those of the last one, where the last two had the same. Where they turn
out to be others, the sender sends what is waited for all the same (it has no use), and after it the
tensors themselves. Sender and receiver know the shapes of both, so they agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_topt.execution.pipeline.stage_links import StageLinks
from lightning_topt.execution.pipeline.stage_traffic import StageTraffic, shapes_of, with_gradients
from lightning_topt.graph.step_flow import LeafSpec, TensorRef

Shapes = tuple[LeafSpec, ...]


@dataclass
class _Shapes:
    """The shapes that travelled between two stages with the last two minibatches."""

    last: Shapes | None = None
    before: Shapes | None = None

    def expected(self) -> Shapes | None:
        """Return the shapes that the next minibatch is taken to have; None where nothing is
        expected.
        """
        return self.last if self.last == self.before else None

    def add(self, shapes: Shapes) -> None:
        self.before, self.last = self.last, shapes


@dataclass
class StageInputs:
    """Exchanges of the stage of `links` with all others. With its activations travel norms to the
    next stage, (stages,).
    """

    links: StageLinks
    _from: dict[int, _Shapes] = field(default_factory=dict)
    _to: dict[int, _Shapes] = field(default_factory=dict)
    _begun: set[int] = field(default_factory=set)  # minibatches whose gradients are being received

    def receive(
        self, minibatch: int, traffic: StageTraffic, powers: Tensor
    ) -> dict[TensorRef, Tensor]:
        """Return what a forward pass needs, and begin to receive what the next one is expected to
        need.

        `powers` takes over those of the stages before.
        """
        found: dict[TensorRef, Tensor] = {}
        for source in range(self.links.stage):
            tensors, known = (
                traffic.received.get(source, ()),
                self._from.setdefault(source, _Shapes()),
            )
            shapes, is_next = shapes_of(tensors), source == self.links.stage - 1
            given = self._take(source, minibatch, shapes, known, powers if is_next else None)
            found.update(zip((ref for ref, _ in tensors), given, strict=True))
            known.add(shapes)
            if (expected := self._ahead(known)) is not None:
                self.links.begin(
                    "activations", source, minibatch + 1, [*expected, *_norms(is_next, powers)]
                )
        return found

    def _take(
        self, source: int, minibatch: int, shapes: Shapes, known: _Shapes, powers: Tensor | None
    ) -> list[Tensor]:
        norms = [] if powers is None else _norms(True, powers)
        expected = self._ahead(known)
        if expected is None:
            self.links.begin("activations", source, minibatch, [*shapes, *norms])
        elif expected != shapes:
            self.links.begin("activations", source, minibatch, shapes)
        given = self.links.receive("activations", source, minibatch)
        if powers is not None:
            powers[: self.links.stage] = given.pop()[: self.links.stage]
        if expected is not None and expected != shapes:
            given = self.links.receive("activations", source, minibatch)
        return given

    def send(
        self,
        minibatch: int,
        traffic: StageTraffic,
        made: Mapping[TensorRef, Tensor],
        powers: Tensor,
    ) -> None:
        """Send what a forward pass has made."""
        stage = self.links.stage
        for target in range(stage + 1, self.links.num_stages):
            tensors, known = traffic.sent.get(target, ()), self._to.setdefault(target, _Shapes())
            shapes, norms = shapes_of(tensors), [powers.clone()] if target == stage + 1 else []
            specs, expected = _norms(bool(norms), powers), self._ahead(known)
            given = [made[ref] for ref, _ in tensors]
            if expected is None or expected == shapes:
                self.links.send(
                    "activations", target, minibatch, [*given, *norms], [*shapes, *specs]
                )
            else:
                unused = [
                    torch.empty_strided(
                        spec.shape, spec.stride, dtype=spec.dtype, device=powers.device
                    )
                    for spec in expected
                ]
                self.links.send(
                    "activations", target, minibatch, [*unused, *norms], [*expected, *specs]
                )
                self.links.send("activations", target, minibatch, given, shapes)
            known.add(shapes)

    def begin_gradients(self, minibatch: int, traffic: StageTraffic) -> None:
        """Begin to receive the gradients of what was sent of a minibatch, unless that has been
        done.
        """
        if minibatch not in self._begun:
            self._begun.add(minibatch)
            for target, tensors in sorted(traffic.sent.items()):
                self.links.begin("gradients", target, minibatch, shapes_of(with_gradients(tensors)))

    def receive_gradients(self, minibatch: int, traffic: StageTraffic) -> dict[TensorRef, Tensor]:
        """Return the gradients of what was sent, summed over the stages that received it."""
        self._begun.remove(minibatch)
        found: dict[TensorRef, Tensor] = {}
        for target, tensors in sorted(traffic.sent.items()):
            given = self.links.receive("gradients", target, minibatch)
            for (ref, _), gradient in zip(with_gradients(tensors), given, strict=True):
                found[ref] = found[ref] + gradient if ref in found else gradient
        return found

    def send_gradients(
        self, minibatch: int, traffic: StageTraffic, made: Mapping[TensorRef, Tensor]
    ) -> None:
        """Send the gradients of what was received."""
        for source, tensors in sorted(traffic.received.items()):
            wanted = with_gradients(tensors)
            self.links.send(
                "gradients", source, minibatch, [made[ref] for ref, _ in wanted], shapes_of(wanted)
            )

    def _ahead(self, known: _Shapes) -> Shapes | None:
        return known.expected() if self.links.begins_ahead else None


def _norms(travel: bool, powers: Tensor) -> list[LeafSpec]:
    return [LeafSpec((powers.numel(),), (1,), powers.dtype, requires_grad=False)] if travel else []
