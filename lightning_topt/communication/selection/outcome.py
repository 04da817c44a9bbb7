"""This is what a selection returns and raises."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Selection(NamedTuple):
    """A selection holds `values` (k,), signed, and their `indices` (k,) in the flattened tensor,
    ascending.
    """

    values: Tensor
    indices: Tensor


class NonFiniteError(ArithmeticError):
    """A NaN or an infinity among the values: there is no top k."""
