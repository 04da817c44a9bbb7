"""Costs of a chain of blocks once per step, however many microbatches it has: exchange, update,
parameters, their state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_topt.costs.communication import ring_seconds
from lightning_topt.costs.cost_table import Array
from lightning_topt.costs.sizes import gradient_bytes, parameter_bytes
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.costs.update import temporaries_seconds
from lightning_topt.graph.op_graph import Parameter


@dataclass(frozen=True, eq=False)
class Once:
    """A step of each block (block,) at one ZeRO level: `seconds` of its exchange of gradients and
    its update, `static` bytes, and those that the optimizer takes while it steps. `shared` (2,
    first block, end) as in `StageTable`.
    """

    seconds: Array
    static: Array
    update: Array
    shared: Array | None


def parameter_costs(parameter: Parameter, step: TrainingStep, level: int) -> Array:
    """Return seconds of the update, static bytes and those of temporaries of one parameter."""
    ranks = step.mesh.data_parallel_size if level else 1
    seconds = step.update_seconds(parameter) / ranks + temporaries_seconds(
        step, {parameter: 1 / ranks}
    )
    state = step.optimizer.state_bytes(parameter.name) / ranks if parameter.trainable else 0.0
    update = step.optimizer.updates.get(parameter.name)
    temporaries = (
        update.temporary_bytes / ranks if update is not None and update.temporaries_add else 0.0
    )
    return np.array(
        [seconds, parameter_bytes(parameter) + gradient_bytes(parameter) + state, temporaries]
    )


def exchange_seconds(
    step: TrainingStep, parameters: Sequence[Parameter], level: int, ranks: int
) -> float:
    """Return the seconds to average gradients, and at level 1 to send what was updated."""
    if ranks == 1:
        return 0.0
    size = sum(map(gradient_bytes, parameters))
    collectives = ["all_reduce", "broadcast"] if level else ["all_reduce"]
    return sum(step.collective_seconds(op, size, axes=step.mesh.data_axes) for op in collectives)


def shared_costs(
    step: TrainingStep,
    uses: Mapping[str, Sequence[int]],
    count: int,
    level: int,
    *,
    crosses_nodes: bool,
) -> Array | None:
    """Return `Once.shared` of a chain of `count` blocks; `uses` are the places of those that read
    each parameter.

    Stages that have a reader of a parameter, but not all, sum its gradient with the others; those
    without its first reader keep and update it as well.
    """
    shared = [p for p in step.graph.parameters if len(uses[p.name]) > 1]
    if not shared:
        return None
    first, end = np.meshgrid(np.arange(count), np.arange(count + 1), indexing="ij")
    found = np.zeros((2, count, count + 1))
    for parameter in shared:
        places = np.array(uses[parameter.name])
        inside = ((places[:, None, None] >= first) & (places[:, None, None] < end)).sum(axis=0)
        some, copied = (inside > 0) & (inside < len(places)), (inside > 0) & (places[0] < first)
        size = gradient_bytes(parameter)
        link = (crosses_nodes and step.cluster.inter) or step.cluster.intra
        found[0] += some * ring_seconds("all_reduce", size=size, ranks=2, link=link)
        seconds, static, _ = parameter_costs(parameter, step, level)
        found[:2] += copied * np.array([seconds, static])[:, None, None]
    return found
