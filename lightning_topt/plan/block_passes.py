"""`Passes` are what one microbatch takes in each block of a chain; here is what the graph of the
step says about them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_topt.basics.once import once_per_object
from lightning_topt.costs.cost_table import Array
from lightning_topt.costs.crossings import spec_bytes
from lightning_topt.costs.sizes import ROOT
from lightning_topt.costs.stage_table import StageBlock
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.op_graph import Amount, Op, OpGraph


@dataclass(frozen=True, eq=False)
class Passes:
    """One microbatch in each block (block,): seconds of `forward`, `backward` and the part of it
    for gradients of parameters; bytes `kept` from forward to backward, without recomputation and
    with, and the most above these while it runs; and those of gradients that are kept besides where
    gradients of parameters are left for later (`waiting`). `split`: the seconds that a backward in
    two parts takes besides.
    """

    forward: Array
    backward: Array
    weights: Array
    kept: Array
    hump: Array
    recomputed_kept: Array
    recomputed_hump: Array
    waiting: Array
    split: Array


@once_per_object
def sizes_of_segments(graph: OpGraph) -> tuple[Array, NDArray[np.bool_]]:
    """Return bytes kept, of the output, at the peaks of forward and of backward ([4], segment,
    [fixed, per sample]), and whether each segment is that of a block.
    """
    names = "kept_bytes", "output_bytes", "forward_peak_bytes", "backward_peak_bytes"
    amounts = [[getattr(segment, name) for segment in graph.timeline] for name in names]
    sizes = np.array(
        [[(amount.fixed, amount.per_sample) for amount in each] for each in amounts], float
    )
    return sizes, np.array([segment.block != ROOT for segment in graph.timeline])


def stage_block(passes: Passes, n: int, recomputes: Sequence[bool]) -> StageBlock:
    """Return what block `n` takes: without recomputation (endless time where it has to recompute),
    then with it, if it can.
    """
    seconds = passes.forward[n] + passes.backward[n]
    plain = seconds, passes.kept[n], passes.hump[n]
    again = seconds + passes.forward[n], passes.recomputed_kept[n], passes.recomputed_hump[n]
    several = [
        plain if False in recomputes else (np.inf, 0.0, 0.0),
        *([again] if True in recomputes else []),
    ]
    time, kept, hump = np.maximum(np.array(several).T, 0.0)
    nothing = np.zeros(len(several))
    return StageBlock(
        tuple(range(len(several))),
        np.round(time, 9),
        nothing,
        nothing,
        np.round(kept),
        np.round(hump),
    )


def waiting_gradients(
    step: TrainingStep, places: Sequence[int], num_blocks: int
) -> list[tuple[Amount, int]]:
    """Return the gradients that arrive at operators of each block with parameters and an input that
    gets a gradient, and how many operators these are; `places` are the blocks of the segments.
    """
    graph, found = step.graph, [(Amount(), 0)] * num_blocks
    inner = {
        edge.target
        for edge in graph.edges
        if edge.tensor.dtype.startswith(("float", "bfloat", "complex"))
    }
    trained = {name for p in graph.parameters if p.trainable for name in (p.name, *p.aliases)}
    for op in graph.ops:
        if op.name in inner and trained.intersection(op.parameters):
            n = places[step.segments.of_op[op.name]]
            amount, count = found[n]
            found[n] = (
                sum((spec_bytes(spec, graph.batch_size) for spec in op.outputs), start=amount),
                count + 1,
            )
    return found


def weight_shares(step: TrainingStep, places: Sequence[int], num_blocks: int) -> Array:
    """Return the share of the backward (block,) of gradients of parameters: half of that of
    operators that have parameters.
    """
    flops = np.zeros((2, num_blocks))
    for op in step.graph.ops:
        n = places[step.segments.of_op[op.name]]
        flops[:, n] += np.array([0.5 * bool(op.parameters), 1.0]) * _backward_flops(
            op, step.graph.batch_size
        )
    return np.asarray(np.divide(flops[0], flops[1], out=np.zeros(num_blocks), where=flops[1] > 0))


def _backward_flops(op: Op, samples: float) -> float:
    return sum(kernel.count * max(kernel.flops.at(samples), 0.0) for kernel in op.backward)
