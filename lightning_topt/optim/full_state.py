"""Optimizer state that is spread over ranks: its full form, and the part that one rank keeps.

A rank keeps the state of an own piece under a tensor that stands for the piece in the optimizer,
its *key*: the parameter itself where the piece is all of it. What a piece of several rows has in
the shape of its rows is cut with the rows. Anything else (a step count) is equal on all owners of
the parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lightning_topt.communication.collectives import travel_device, values_of_group
from lightning_topt.optim.pieces import Piece, is_whole

State = dict[Any, Any]
Keys = Mapping[Piece, Tensor]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters in the order in which pieces and ``state_dict`` count them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gather_state_dict(
    optimizer: Optimizer,
    pieces: Sequence[Piece],
    *,
    keys: Keys,
    group: dist.ProcessGroup | None = None,
) -> State:
    """Return the full state on rank 0 of `group`, as the optimizer's own ``state_dict`` writes it.

    Collective call; {} on other ranks. Tensors travel one by one and arrive on the CPU, so that no
    device holds more than one extra tensor.
    """
    whole = dict(full_states(optimizer, pieces, keys=keys, group=group, to=0))
    return state_dict_of(optimizer, pieces, whole) if dist.get_rank(group) == 0 else {}


def state_dict_of(
    optimizer: Optimizer, pieces: Sequence[Piece], whole: Mapping[int, State]
) -> State:
    """Return what the ``state_dict`` of the optimizer's class returns with full states.

    `whole` has those of parameters that have pieces, by index.
    """
    parameters, spread = parameters_of(optimizer), {piece.index for piece in pieces}
    # the class writes what it finds in `state`: the full one stands in for the time of the call
    state = optimizer.state
    full = copy.copy(state)
    full.clear()
    for index, parameter in enumerate(parameters):
        if index in spread and index in whole:
            full[parameter] = whole[index]
        elif index not in spread and parameter in state:
            full[parameter] = dict(
                tree_map(
                    lambda leaf: (
                        leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf
                    ),
                    dict(state[parameter]),
                )
            )
    full.update({key: value for key, value in state.items() if not isinstance(key, Tensor)})
    optimizer.state = full
    try:
        return dict(type(optimizer).state_dict(optimizer))
    finally:
        optimizer.state = state


@torch.no_grad()
def full_states(
    optimizer: Optimizer,
    pieces: Sequence[Piece],
    *,
    keys: Keys,
    group: dist.ProcessGroup | None = None,
    to: int | None = None,
) -> Iterator[tuple[int, State]]:
    """Yield (index of a parameter with pieces, its full state).

    On rank `to` in CPU memory, or for None on all ranks where the parameter lives. Collective: all
    ranks exhaust the iterator; ranks that receive nothing get nothing. Parameters that no owner has
    state of are left out.
    """
    parameters, rank = parameters_of(optimizer), dist.get_rank(group)
    own = {
        piece: dict(optimizer.state[key]) for piece, key in keys.items() if key in optimizer.state
    }
    # first what there is, as outlines; then the tensors, parameter by parameter
    outlines = values_of_group(
        {piece: tree_map(_outline, state) for piece, state in own.items()}, group
    )
    everyone: dict[Piece, Any] = {
        piece: outline for of_rank in outlines for piece, outline in of_rank.items()
    }
    for index, of_parameter in sorted(_by_index(pieces).items()):
        known = [piece in everyone for piece in of_parameter]
        if not any(known):
            continue
        assert all(known), f"state of some rows of parameter {index} only"
        move = _Move(group, to, parameters[index].device)
        parts = []  # leaves of each piece, as they have arrived
        for piece in of_parameter:
            expected = tree_leaves(everyone[piece])
            leaves = tree_leaves(own[piece]) if piece in own else [None] * len(expected)
            pairs = zip(expected, leaves, strict=True)
            parts.append([move(outline, leaf, piece.owner) for outline, leaf in pairs])
        if to is None or rank == to:
            yield index, _joined(parts, everyone, of_parameter, parameters[index])


@dataclass(frozen=True)
class _Outline:
    # Shape and dtype of a tensor that is on another rank.

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool  # also where parameters are on a device (step counts)


def _outline(leaf: object) -> Any:
    if isinstance(leaf, Tensor):
        return _Outline(tuple(leaf.shape), leaf.dtype, leaf.device.type == "cpu")
    return leaf


@dataclass(frozen=True)
class _Move:
    # Brings a leaf from its owner to rank `to`, or to all; returns None on other ranks.

    group: dist.ProcessGroup | None
    to: int | None
    device: torch.device

    def __call__(self, outline: Any, leaf: Any, owner: int) -> Any:
        if not isinstance(outline, _Outline):
            return outline
        rank = dist.get_rank(self.group)
        if self.to == owner:
            return leaf.detach().to("cpu", copy=True) if rank == owner else None
        if self.to is not None and rank not in (self.to, owner):
            return None
        travels_on = travel_device(self.group)
        buffer = (
            torch.empty(outline.shape, dtype=outline.dtype, device=travels_on)
            if leaf is None
            else leaf
        )
        buffer = buffer.detach().to(travels_on).contiguous()
        # an owner that sends has the leaf, the others an empty buffer
        if self.to is None:
            dist.broadcast(buffer, group=self.group, group_src=owner)
        elif rank == owner:
            dist.send(buffer, group=self.group, group_dst=self.to)
            return None
        else:
            dist.recv(buffer, group=self.group, group_src=owner)
        return buffer.to("cpu" if outline.on_host or self.to is not None else self.device)


def _joined(
    parts: Sequence[Sequence[Any]],
    everyone: Mapping[Piece, Any],
    pieces: Sequence[Piece],
    like: Tensor,
) -> State:
    # Join the leaves of a parameter's pieces to its full state
    outlines = [tree_leaves(everyone[piece]) for piece in pieces]
    leaves, spec = tree_flatten(everyone[pieces[0]])
    for position in range(len(leaves)):
        of_pieces = [leaves_of_piece[position] for leaves_of_piece in parts]
        shapes = [getattr(leaves_of_piece[position], "shape", None) for leaves_of_piece in outlines]
        # rows are state_leaf; what has another shape is equal on all owners
        cut = [(piece.stop - piece.start, *like.shape[1:]) for piece in pieces]
        state_leaf = torch.cat(of_pieces) if len(pieces) > 1 and shapes == cut else of_pieces[0]
        leaves[position] = laid_out(state_leaf, like)
    state = tree_unflatten(leaves, spec)
    assert isinstance(state, dict)
    return state


@torch.no_grad()
def keep_own_state(optimizer: Optimizer, pieces: Sequence[Piece], *, keys: Keys) -> None:
    """Cut full state, kept under the parameters, down to this rank's pieces.

    `keys` has the tensor that stands for each own piece. State that is cut already stays, and so
    does that of parameters without pieces. A collective call where full state is in shards.
    """
    parameters = parameters_of(optimizer)
    by_index = _by_index(pieces)
    for index, of_parameter in by_index.items():
        parameter = parameters[index]
        if parameter not in optimizer.state:
            continue
        full = tree_map(
            lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf,
            dict(optimizer.state.pop(parameter)),
        )
        for piece in of_parameter:
            if piece in keys:
                optimizer.state[keys[piece]] = _part(full, parameter, piece=piece, key=keys[piece])


def check_cut_state(optimizer: Optimizer, *, keys: Keys) -> None:
    """Raise ValueError where state of rows is neither of their shape nor a single value.

    Such a rule may not be cut into rows.
    """
    parameters = parameters_of(optimizer)
    cut = {
        piece: key for piece, key in keys.items() if not is_whole(piece, parameters[piece.index])
    }
    for piece, key in cut.items():
        for leaf in tree_leaves(dict(optimizer.state.get(key, {}))):
            if isinstance(leaf, Tensor) and leaf.numel() > 1 and leaf.shape != key.shape:
                raise ValueError(
                    f"{type(optimizer).__name__} keeps state of shape {tuple(leaf.shape)} for rows "
                    "of shape "
                    f"{tuple(key.shape)} of parameter {piece.index}: it is not an update of single "
                    "elements; split it by "
                    'whole parameters (declare the rule "parameters")'
                )


def _part(state: Mapping[Any, object], parameter: Tensor, *, piece: Piece, key: Tensor) -> State:
    # The state of `piece`, in memory apart from the full `state` where rows are cut

    def cut(leaf: object) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf)
        if leaf.dim() == 0 or leaf.shape != parameter.shape:
            return leaf.clone()
        return torch.empty_like(key, dtype=leaf.dtype, device=leaf.device).copy_(
            leaf[piece.start : piece.stop]
        )

    whole = is_whole(piece, parameter)
    return dict(tree_map((lambda leaf: laid_out(leaf, key)) if whole else cut, dict(state)))


def laid_out(leaf: object, like: Tensor) -> Any:
    """Return `leaf` with the strides of the parameter that it belongs to.

    Fused kernels take equal ones for granted.
    """
    if not isinstance(leaf, Tensor) or leaf.shape != like.shape or leaf.stride() == like.stride():
        return leaf
    return torch.empty_like(like, dtype=leaf.dtype, device=leaf.device).copy_(leaf)


def _by_index(pieces: Sequence[Piece]) -> dict[int, list[Piece]]:
    by_index: dict[int, list[Piece]] = {}
    for piece in sorted(pieces):
        by_index.setdefault(piece.index, []).append(piece)
    return by_index
