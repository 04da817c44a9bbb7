"""Tensors that a stage exchanges with the others in a pass: activations on the way there, their
gradients on the way back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_topt.execution.pipeline.messages import Crossings
from lightning_topt.graph.step_flow import LeafSpec, TensorRef

Format = tuple[tuple[TensorRef, LeafSpec], ...]  # tensors in the order in which they travel


@dataclass(frozen=True)
class StageTraffic:
    """Activations that a stage receives, by stage that makes them, and that it sends, by stage that
    needs them.
    """

    received: Mapping[int, Format]
    sent: Mapping[int, Format]

    @classmethod
    def of_stage(cls, stage: int, crossings: Crossings) -> StageTraffic:
        """Return what `stage` exchanges where these tensors cross."""
        received: dict[int, Format] = {}
        sent: dict[int, Format] = {}
        for ref, targets in sorted(crossings.targets.items()):
            source, entry = crossings.stage_of_call[ref.call], (ref, crossings.specs[ref])
            if stage in targets:
                received[source] = (*received.get(source, ()), entry)
            for target in targets if source == stage else ():
                sent[target] = (*sent.get(target, ()), entry)
        return cls(received, sent)


def with_gradients(tensors: Format) -> Format:
    """Return those of the tensors whose gradients come back."""
    return tuple((ref, spec) for ref, spec in tensors if spec.requires_grad)


def shapes_of(tensors: Format) -> tuple[LeafSpec, ...]:
    """Return all that a receiver must know of the tensors; equal where the same buffers hold
    them.
    """
    return tuple(spec for _, spec in tensors)
