"""The norms of LARS, each computed by one rank and shared: "PTO" for trust ratios.

Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters, arXiv
2010.10458, section on parallel tensor operators. Every rank holds the same parameters and
(averaged) gradients, so every rank would compute the same norms. Here the 2L tensors of L layers
are dealt to the ranks, balanced by their numbers of elements; one all-reduce of 3 x (number of
parameters) floats shares the norms, and every rank updates everything itself: no parameter is sent.
This saves 1 - 1/P of the time of the norms on P ranks and costs the latency of one small
all-reduce.

    share_trust_ratios(optimizer, group=group)      # optimizer: a LARS
    ...
    unshare_trust_ratios(optimizer)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_topt.optim.assignment import Share, assign_pieces
from lightning_topt.optim.lars import LARS, tensor_norms

# computing a norm costs about as much as reading this many elements, however small the tensor is
_CALL_ELEMENTS = 4096


def share_trust_ratios(
    optimizer: Optimizer, *, group: dist.ProcessGroup | None = None
) -> TrustRatios:
    """Make the ranks of `group` (default: all) share the norms of `optimizer`, a `LARS`; undone by
    `unshare_trust_ratios`.

    Collective call. The parameters after a step are, bit for bit, those of the unshared optimizer.
    An exchange that a rank does not answer fails after the timeout of `group`. Raises ValueError
    for another optimizer, for one that shares already, and, on all ranks, for parameters that
    differ between ranks.
    """
    if not isinstance(optimizer, LARS):
        raise ValueError(
            f"trust ratios of {type(optimizer).__name__} cannot be shared by themselves: only "
            "those of LARS depend on "
            "parameters and gradients alone. The ratios of LAMB need the update itself, so that "
            "computing them is the work "
            "of a step: split whole parameters instead (parallel_step)"
        )
    if "layer_norms" in optimizer.__dict__:
        raise ValueError(
            "this optimizer shares its trust ratios already; call unshare_trust_ratios first"
        )
    _check_equal_parameters(optimizer, group)
    shared = TrustRatios(optimizer, group=group)
    optimizer.layer_norms = shared
    return shared


def unshare_trust_ratios(optimizer: Optimizer) -> None:
    """Undo `share_trust_ratios`; nothing to undo is no error."""
    optimizer.__dict__.pop("layer_norms", None)


class TrustRatios:
    """Computes `lars.layer_norms` with the other ranks; installed by `share_trust_ratios`.

    The layers of a step are the parameters that have a gradient, the same on all ranks; they may
    change from step to step.
    """

    def __init__(self, optimizer: Optimizer, *, group: dist.ProcessGroup | None = None) -> None:
        self.optimizer, self.group = optimizer, group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        # positions of the last step's layers among all parameters
        self.layers: list[int] | None = None
        # Rows: norms of parameters, norms of gradients, the number of ranks that have the gradient.
        self.present = torch.zeros(3, len(_parameters(optimizer)))
        self.own: list[int] = []

    def __call__(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
        """Return ‖w‖ and ‖g‖ (2, layers) of all layers. Raises ValueError where a gradient is
        missing on some ranks.

        On CPU missing gradients are seen in every step; elsewhere (it takes waiting for the device)
        in the first one and whenever those of this rank have changed.
        """
        changed = self._deal(parameters)
        vector = self.present.clone()
        tensors = [*parameters, *gradients]
        if self.own:
            vector.view(-1)[self.places] = tensor_norms([tensors[index] for index in self.own]).to(
                vector
            )
        dist.all_reduce(vector, group=self.group)
        if changed or vector.device.type == "cpu":
            self._check(vector)
        return vector[:2] if self.selected is None else vector[:2, self.selected]

    def _deal(self, parameters: Sequence[Tensor]) -> bool:
        """Choose the tensors whose norms this rank computes; whether that is another choice than in
        the last step.
        """
        everything = _parameters(self.optimizer)
        if len(everything) < self.present.shape[1]:
            raise ValueError(
                f"the optimizer had {self.present.shape[1]} parameters and steps with "
                f"{len(everything)}: a step that is split "
                "by parameters computes each norm once already; call unshare_trust_ratios"
            )
        number = {parameter: index for index, parameter in enumerate(everything)}
        layers = [number[parameter] for parameter in parameters]
        if layers == self.layers and self.present.shape[1] == len(everything):
            return False
        device = everything[0].device
        costs = 2 * [parameter.numel() + _CALL_ELEMENTS for parameter in parameters]
        shares = [
            Share(i, 1, nbytes=cost, cost_seconds=float(cost), splittable=False)
            for i, cost in enumerate(costs)
        ]
        pieces = assign_pieces(shares, world_size=self.world_size)
        self.layers, self.own = (
            layers,
            [piece.index for piece in pieces if piece.owner == self.rank],
        )
        exact = (
            torch.float64
            if any(parameter.dtype == torch.float64 for parameter in everything)
            else torch.float32
        )
        self.present = torch.zeros(3, len(everything), dtype=exact, device=device)
        self.present[2, layers] = 1
        cells = [row * len(everything) + layer for row in range(2) for layer in layers]
        self.places = torch.tensor(
            [cells[index] for index in self.own], dtype=torch.int64, device=device
        )
        self.selected = (
            None
            if len(layers) == len(everything)
            else torch.tensor(layers, dtype=torch.int64, device=device)
        )
        return True

    def _check(self, vector: Tensor) -> None:
        if torch.equal(vector[2], self.present[2] * self.world_size):
            return
        ranks = vector[2].tolist()
        index = next(i for i, count in enumerate(ranks) if count not in (0, self.world_size))
        raise ValueError(
            f"parameter {index} of shape {tuple(_parameters(self.optimizer)[index].shape)} has a "
            "gradient on "
            f"{ranks[index]:.0f} of {self.world_size} ranks; shared trust ratios need the same "
            "gradients on all of them "
            "(DistributedDataParallel gives that)"
        )


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check_equal_parameters(optimizer: Optimizer, group: dist.ProcessGroup | None) -> None:
    own = [
        (tuple(p.shape), str(p.dtype), options["adapt"])
        for options in optimizer.param_groups
        for p in options["params"]
    ]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    for rank, theirs in enumerate(everyone):
        for index in range(max(len(theirs), len(everyone[0]))):
            here, there = (
                some[index] if index < len(some) else None for some in (everyone[0], theirs)
            )
            if here != there:
                raise ValueError(
                    f"parameter {index} of the optimizer is {_text(there)} on rank {rank} and "
                    f"{_text(here)} on rank 0; "
                    "build the same optimizer on all ranks"
                )


def _text(described: tuple[Any, ...] | None) -> str:
    return (
        "missing"
        if described is None
        else f"{described[1]} {described[0]} with adapt={described[2]!r}"
    )
