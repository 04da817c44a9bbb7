"""Modules that are only planned, built without memory for their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from lightning_topt.graph.no_trace import random_states

T = TypeVar("T", bound=nn.Module)


def build_on_meta(make: Callable[[], T]) -> T:
    """Return the module that `make` makes, with parameters and buffers on the meta device where its
    constructor allows it.

    A constructor that reads the value of a tensor (`item`, `tolist`, `numpy`, a branch on it) or
    mixes devices raises there: it runs again with real tensors, from the same state of the random
    number generators. Raises what it then raises. ``is_on_meta`` says which of the two happened; a
    module on meta can be captured, but runs no real step.
    """
    with random_states():
        try:
            with torch.device("meta"):
                return make()
        except Exception:  # whatever a constructor makes of a tensor without values
            pass
    return make()


def is_on_meta(module: nn.Module) -> bool:
    """Return whether any parameter or buffer of `module` has no memory."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
