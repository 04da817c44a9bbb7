"""The parallel step: every rank updates its pieces of the parameters and receives the others from
their owners.

Gradients are equal on all ranks (DDP), so an optimizer that sees this rank's pieces only does
exactly its share of the work and makes state for that share alone (Rajbhandari et al., arXiv
1910.02054, section 5.1, P_os; Xu et al., arXiv 2004.13336). Equal to the plain step for every
optimizer that treats each parameter by itself (whole pieces), or each element (rows).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_topt.communication.node.rows import NodeRows
from lightning_topt.optim.checks import check_agreement, check_can_be_split
from lightning_topt.optim.full_state import (
    State,
    check_cut_state,
    exact_parameters,
    gather_state_dict,
    keep_own_state,
    parameters_of,
    whole_states,
)
from lightning_topt.optim.gather import PendingGather, PieceGather
from lightning_topt.optim.piece_keys import PieceKeys
from lightning_topt.optim.pieces import Piece, check_pieces
from lightning_topt.optim.step_hooks import asked_once, inside_hooks

# on the optimizer, while installed
_REPLACED = ("step", "state_dict", "load_state_dict", "consolidate_state_dict")


class ParallelStep:
    """Replaces ``optimizer.step`` by one that updates this rank's pieces and gathers all of them.

    Parameters without a piece are updated on every rank; parameters without a gradient are not
    sent. Hooks of the optimizer see whole groups and, after the step, gathered parameters.
    `exchange` is called once the own pieces are updated; whoever replaces it gathers in another
    way.
    """

    # What learning-rate schedulers leave on a step that they have wrapped, to see that it is
    # called.
    _wrapped_by_lr_sched = True

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        pieces: Sequence[Piece],
        group: dist.ProcessGroup | None = None,
        gather_dtype: torch.dtype | None = None,
        node: NodeRows | None = None,
    ) -> None:
        check_can_be_split(optimizer)
        self.optimizer, self.group, self.gather_dtype = optimizer, group, gather_dtype
        self.node = node
        self.rank = dist.get_rank(group)
        self.step: Callable[..., Any] = optimizer.step
        self.exchange: Callable[[], None] = self.gather
        self.active: list[int] = []  # parameters that had a gradient in the last step
        self._original = {
            name: optimizer.__dict__[name] for name in _REPLACED if name in optimizer.__dict__
        }
        self._removed = False
        self._consolidated: State | None = None
        self._checked_state = False
        self._narrowed: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._use(pieces)

    def _use(self, pieces: Sequence[Piece]) -> None:
        """Make the keys of own pieces and drop what other ranks keep."""
        parameters = parameters_of(self.optimizer)
        check_agreement(parameters, pieces, group=self.group)
        check_pieces(pieces, parameters, world_size=dist.get_world_size(self.group))
        self.parameters, self.pieces = parameters, sorted(pieces)
        # what stands for own pieces in the optimizer
        self.own = PieceKeys(
            parameters, self.pieces, rank=self.rank, gather_dtype=self.gather_dtype
        )
        self._gather = PieceGather(
            parameters,
            self.pieces,
            group=self.group,
            node=self.node,
            dtype=self.gather_dtype,
            sources=self.own.masters,
        )
        keep_own_state(self.optimizer, self.pieces, keys=self.own.keys)
        self._consolidated, self._checked_state = None, False

    def __call__(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """One step. `closure` runs the forward and backward pass (and clipping) on whole gradients
        first.

        Raises PeerLostError when a rank is gone or late beyond the timeout of the group, and
        ValueError for sparse gradients of parameters that are cut into rows.
        """
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # as a scheduler's wrapper would
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            kwargs["closure"] = asked_once(loss, name=type(self.optimizer).__name__)
        self._consolidated = None
        try:
            with inside_hooks(self.optimizer, enter=self._narrow, leave=self._leave):
                output = self.step(**kwargs)
        finally:
            self._widen()
        return output if closure is None else loss

    def _leave(self) -> None:
        self._widen()
        self._after_update()

    def _narrow(self) -> None:
        """Leave the own pieces alone in the groups, with their rows of the gradients."""
        self.active = [
            index for index, parameter in enumerate(self.parameters) if parameter.grad is not None
        ]
        self.own.refresh()
        for group in self.optimizer.param_groups:
            names = group.get("param_names")
            self._narrowed.append(
                (group, {"params": group["params"]} | ({"param_names": names} if names else {}))
            )
            kept = [
                self.own.of_parameter.get(parameter, [parameter]) for parameter in group["params"]
            ]
            group["params"] = [key for keys in kept for key in keys]
            if names:
                group["param_names"] = [
                    name for name, keys in zip(names, kept, strict=True) for _ in keys
                ]

    def exact_parameters(self) -> dict[Tensor, Tensor]:
        """Collective call: what stands behind parameters that are gathered rounded, in CPU memory
        on rank 0, elsewhere {}.
        """
        rounded = [piece for piece in self.pieces if self.own.is_rounded(piece)]
        for piece in rounded:
            self.own.follow(piece)
        whole = exact_parameters(self.parameters, rounded, exact=self.own.masters, group=self.group)
        return {self.parameters[index]: value for index, value in whole.items()}

    def _widen(self) -> None:
        for group, entries in self._narrowed:
            group.update(entries)
        if self._narrowed:
            self.own.drop_gradients()
        self._narrowed = []

    def _after_update(self) -> None:
        if not self._checked_state:
            check_cut_state(self.optimizer, keys=self._current_keys())
            self._checked_state = True
        self.exchange()

    def start_gather(self) -> PendingGather:
        """Begin to send the pieces of the parameters that had a gradient in the last step."""
        return self._gather.start(self.active)

    def gather(self) -> None:
        """Do `start_gather` and wait."""
        self.start_gather().wait()

    def current_pieces(self) -> list[Piece]:
        """Return the pieces, counted as the optimizer counts its parameters now (groups may have
        grown since).
        """
        return list(self._counted_now().values())

    def _current_keys(self) -> Mapping[Piece, Tensor]:
        now = self._counted_now()
        return {now[piece]: key for piece, key in self.own.keys.items() if piece in now}

    def _counted_now(self) -> dict[Piece, Piece]:
        now = {parameter: index for index, parameter in enumerate(parameters_of(self.optimizer))}
        kept = [piece for piece in self.pieces if self.parameters[piece.index] in now]
        return {piece: replace(piece, index=now[self.parameters[piece.index]]) for piece in kept}

    def update_pieces(self, pieces: Sequence[Piece]) -> None:
        """Move the state to the owners of `pieces`, which count the parameters of the groups as
        they are now.

        Collective call. Exact values behind rounded rows are not moved: owners go on from the
        rounded ones. Raises ValueError as `check_pieces` and when ranks disagree.
        """
        check_pieces(
            pieces, parameters_of(self.optimizer), world_size=dist.get_world_size(self.group)
        )
        old, keys, parameters = (
            self.current_pieces(),
            self._current_keys(),
            parameters_of(self.optimizer),
        )
        for index, state in whole_states(self.optimizer, old, keys=keys, group=self.group):
            for piece, key in keys.items():
                if piece.index == index:
                    self.optimizer.state.pop(key, None)
            mine = any(piece.index == index and piece.owner == self.rank for piece in pieces)
            if mine or all(piece.index != index for piece in pieces):
                self.optimizer.state[parameters[index]] = state
        self._use(pieces)

    def own_states(self) -> dict[Piece, State]:
        """Return the states of this rank's pieces, which count parameters as the groups do now; in
        the optimizer's memory.
        """
        state = self.optimizer.state
        return {
            piece: dict(state[key]) for piece, key in self._current_keys().items() if key in state
        }

    def consolidate_state_dict(self) -> None:
        """Collective call: bring the whole state to rank 0 of the group, for its next
        `state_dict`.
        """
        self._consolidated = gather_state_dict(
            self.optimizer, self.current_pieces(), keys=self._current_keys(), group=self.group
        )

    def state_dict(self) -> State:
        """Return the unsharded optimizer's ``state_dict``, in CPU memory, on rank 0 after
        `consolidate_state_dict`.
        """
        if self._removed and not self.pieces:
            return type(self.optimizer).state_dict(self.optimizer)
        if not self._consolidated:
            raise RuntimeError(
                "the state of this optimizer is spread over ranks: call "
                "optimizer.consolidate_state_dict() on all ranks "
                "after the last step, then optimizer.state_dict() on rank 0"
            )
        return self._consolidated

    def load_state_dict(self, state_dict: State) -> None:
        """Load a whole state, the same on all ranks; each keeps its part."""
        self._consolidated = None
        pieces, keys = self.current_pieces(), self._current_keys()
        own = {piece.index for piece in keys}
        foreign = {piece.index for piece in pieces} - own
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        dropped = {saved for index, saved in enumerate(indices) if index in foreign}
        kept = {
            index: state for index, state in state_dict["state"].items() if index not in dropped
        }
        type(self.optimizer).load_state_dict(self.optimizer, {**state_dict, "state": kept})
        keep_own_state(self.optimizer, pieces, keys=keys)

    def remove(self) -> None:
        """Collective call: the whole state on every rank, and the optimizer's own methods again."""
        self.update_pieces([])
        self.detach()

    def detach(self) -> None:
        """Give the optimizer its own methods again, its state left in pieces:
        `consolidate_state_dict` still gathers it.
        """
        self._removed = True  # whoever wrapped a method since calls through to the original
        for name in _REPLACED:
            if (
                getattr(
                    self.optimizer.__dict__.get(name), "__self__", self.optimizer.__dict__.get(name)
                )
                is self
            ):
                del self.optimizer.__dict__[name]
        self.optimizer.__dict__.update(
            {
                name: value
                for name, value in self._original.items()
                if name not in self.optimizer.__dict__
            }
        )


def install_parallel_step(
    optimizer: Optimizer,
    *,
    pieces: Sequence[Piece],
    group: dist.ProcessGroup | None = None,
    gather_dtype: torch.dtype | None = None,
    node: NodeRows | None = None,
) -> ParallelStep:
    """Make ``optimizer.step`` update this rank's `pieces` and gather all of them;
    `ParallelStep.remove` undoes it.

    Collective call on `group`. With `gather_dtype` (``torch.bfloat16``) wider parameters hold
    rounded values on all ranks, and owners keep the exact values that they update. State that the
    optimizer has is cut to the pieces. Saving needs ``optimizer.consolidate_state_dict()`` on all
    ranks first. `node` has the ranks of `group` where they share a machine: parameters on the CPU
    are then gathered through its memory. Raises ValueError for pieces that do not cover their
    parameters, when ranks disagree, and for an optimizer that is sharded already.
    """
    step = ParallelStep(optimizer, pieces=pieces, group=group, gather_dtype=gather_dtype, node=node)
    optimizer.step = step  # type: ignore[method-assign]
    optimizer.state_dict = step.state_dict  # type: ignore[method-assign]
    optimizer.load_state_dict = step.load_state_dict  # type: ignore[method-assign]
    optimizer.consolidate_state_dict = step.consolidate_state_dict  # type: ignore[attr-defined]
    return step
