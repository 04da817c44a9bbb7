"""Activation checkpointing: run a block's forward again in the backward pass instead of keeping its activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class _RecomputedForward:
    """A module's forward under `torch.utils.checkpoint`; without gradients it is the plain forward."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


def apply_recomputation(module: nn.Module, blocks: Iterable[str]) -> None:
    """Recompute the named submodules in the backward pass. Names of parameters and modules do not change.

    `remove_recomputation` undoes it.
    """
    for name in blocks:
        block = module.get_submodule(name)
        # An instance attribute hides the class's forward: module hooks (FSDP2's among them) stay outside the recomputed
        # part, as torch asks, and unlike a wrapper module it leaves every name as it was.
        block.forward = _RecomputedForward(block.forward)


def remove_recomputation(module: nn.Module) -> None:
    """Undo `apply_recomputation` on all submodules."""
    for submodule in module.modules():
        recomputed = submodule.__dict__.get("forward")
        if isinstance(recomputed, _RecomputedForward):
            del submodule.__dict__["forward"]
            if submodule.forward != recomputed.forward:  # the user's own instance attribute was there before
                submodule.__dict__["forward"] = recomputed.forward
