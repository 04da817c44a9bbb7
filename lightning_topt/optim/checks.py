"""Checks before a step is split."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.pieces import Piece


def check_can_be_split(optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer that is sharded already, that moves parameters outside of
    its step, has no hooks around it, or a parameter twice.
    """
    name = type(optimizer).__name__
    if hasattr(optimizer, "consolidate_state_dict"):
        raise ValueError(f"{name} shards its state already; use one way of sharding")
    if not getattr(type(optimizer).step, "hooked", False) or not hasattr(
        optimizer, "_optimizer_step_pre_hooks"
    ):
        raise ValueError(
            f"{name} does not call torch.optim.Optimizer.__init__; a parallel step needs its step "
            "hooks"
        )
    # schedule-free ones
    if callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None)):
        raise ValueError(
            f"{name} moves parameters in train() and eval() by states that only one rank would "
            "have: keep its state whole "
            "(plan='ddp', no ParallelOptimizerStep)"
        )
    parameters = parameters_of(optimizer)
    if len(set(parameters)) != len(parameters):
        raise ValueError(f"{name} has a parameter twice; leave the second one out of its groups")


def check_agreement(
    parameters: Sequence[Tensor], pieces: Sequence[Piece], *, group: dist.ProcessGroup | None = None
) -> None:
    """Collective: raise ValueError, on all ranks, naming the first difference from rank 0."""
    own = [f"parameter {i}: {p.dtype} {tuple(p.shape)}" for i, p in enumerate(parameters)]
    own = [f"{len(own)} parameters", *own, f"{len(pieces)} pieces", *map(str, sorted(pieces))]
    everyone: list[list[str]] = [[]] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    for rank, theirs in enumerate(everyone):
        for first, other in zip(everyone[0], theirs, strict=False):
            if first != other:
                raise ValueError(
                    f"ranks disagree on what is split: rank 0 has {first}, rank {rank} has {other}"
                )
