"""This says which operator an autograd node belongs to."""

from __future__ import annotations

from typing import Any

import torch


class AutogradNodes:
    """Operators by the numbers of autograd nodes.

    An autograd node carries a sequence number, counted up by the thread that makes it. The numbers
    given out since the last low-level call belong to the operator of this call; so a node of the
    backward pass finds its operator.
    """

    def __init__(self) -> None:
        self._ops: dict[int, int] = {}
        self._next = torch._C._autograd._get_sequence_nr()
        self._between = range(0)

    def claim(self, op: int, *, keep_last: bool = False) -> None:
        """Note that nodes made since the last claim belong to operator `op`; `keep_last` leaves the
        newest unclaimed.
        """
        until = torch._C._autograd._get_sequence_nr() - keep_last
        for node in range(self._next, until):
            self._ops[node] = op
        self._next = max(self._next, until)

    def op_of(self, node: Any, default: int) -> int:
        """Return the operator of `node`, `default` for None and nodes that nobody claimed."""
        return default if node is None else self._ops.get(node._sequence_nr(), default)

    def begin_backward(self) -> None:
        """Note that nodes made since the last claim are none of the step's, such as that of a loss
        divided for accumulation.
        """
        self._between = range(self._next, torch._C._autograd._get_sequence_nr())

    def is_between(self, node: Any) -> bool:
        """Return whether `node` was made after the forward pass and before the backward pass."""
        return node._sequence_nr() in self._between

    @property
    def are_claimed(self) -> bool:
        """Whether no node was made since the last claim."""
        return bool(torch._C._autograd._get_sequence_nr() == self._next)
