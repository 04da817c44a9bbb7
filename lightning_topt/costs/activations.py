"""Activations of a block over the phases of a step: kept for backward, or made again there (Chen et
al., arXiv 1604.06174).
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_topt.costs.lifetimes import Lifetime
from lightning_topt.costs.training_step import TrainingStep


def activation_lifetimes(step: TrainingStep, block: str, *, recompute: bool) -> Iterator[Lifetime]:
    """Yield the activations of every segment of `block`; recomputed ones keep their output only and
    come back in backward.
    """
    phases, batch_size = step.phases, step.batch_size
    for k in step.segments.every.get(block, ()):
        segment = step.graph.timeline[k]
        kept, output = segment.kept_bytes.at(batch_size), segment.output_bytes.at(batch_size)
        forward, backward = (
            segment.forward_peak_bytes.at(batch_size),
            segment.backward_peak_bytes.at(batch_size),
        )
        during = kept + backward
        # while it recomputes, the gradient of its output is alive, which is as large as the output
        if recompute:
            during = max(during, output + forward)
        between = output if recompute else kept
        yield Lifetime("activations", forward, ("forward", k), ("forward", k))
        yield Lifetime(
            "activations", between, phases.after(("forward", k)), phases.before(("backward", k))
        )
        yield Lifetime("activations", during, ("backward", k), ("backward", k))
