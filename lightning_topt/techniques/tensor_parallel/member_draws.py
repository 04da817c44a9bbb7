"""Random numbers in a module that runs the batches of several ranks at once: each batch has those
of its rank, as under DDP.

A rank draws for its own samples from its own generator. Where it holds a part of everybody's
samples, it draws for all of them, each from the state of the generator of the rank that brought
them, which ranks exchange then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication.collectives import all_gather_into
from lightning_topt.techniques.tensor_parallel.kinds import Placed
from lightning_topt.techniques.tensor_parallel.layout import joined
from lightning_topt.techniques.tensor_parallel.tensor_axes import TensorAxes

Make = Callable[[tuple[int, ...]], Tensor]


def noise_for(
    placed: Placed,
    shape: tuple[int, ...],
    make: Make,
    *,
    operand: int = 0,
    cut: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return this rank's part, which `cut` takes from the whole, of random numbers of this whole
    shape.

    ``make(shape)`` draws numbers. The first dims, up to that of samples, are those of argument
    `operand`.
    """
    layout = placed.inputs[operand]
    if layout.batch is None:
        return cut(make(shape))
    part = [*shape]
    part[layout.batch.dim] //= placed.axes.sizes[0]
    if layout.placements == (layout.batch,):
        return make(tuple(part))
    return cut(joined(_drawn_by_all(lambda: make(tuple(part)), placed.axes), layout.batch))


def _drawn_by_all(make: Callable[[], Tensor], axes: TensorAxes) -> list[Tensor]:
    """Return what `make` gives on each rank of the axis, in their order; the state here is then as
    after this rank's own.
    """
    group, found = axes.groups[0], list[Tensor]()
    if group is None:
        axes.note("all_gather", 0, torch.empty(axes.sizes[0] * _STATE_BYTES, dtype=torch.uint8))
        return [make() for _ in range(axes.sizes[0])]
    on_cuda = dist.get_backend(group) == "nccl"
    own = torch.cuda.get_rng_state() if on_cuda else torch.get_rng_state()
    set_state = torch.cuda.set_rng_state if on_cuda else torch.set_rng_state
    sent = own.cuda() if on_cuda else own
    states = sent.repeat(axes.sizes[0], 1)  # a fake group leaves them as they are
    axes.note("all_gather", 0, states)
    all_gather_into(states.view(-1), sent, group=group)
    after = own
    for member, state in enumerate(states.cpu()):
        set_state(state.clone())  # that of CPUs does not mind where a view begins
        found.append(make())
        if member == axes.coordinates[0]:
            after = torch.cuda.get_rng_state() if on_cuda else torch.get_rng_state()
    set_state(after)
    return found


_STATE_BYTES = 5056  # of the generator of CPUs; one of CUDA has 16
