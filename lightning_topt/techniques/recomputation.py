"""Recomputation, also called activation checkpointing: forward runs again in the backward pass.

Source: Chen et al., arXiv 1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_topt.communication.exchange_method import GradientMethod
from lightning_topt.costs.sizes import ROOT
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import Block
from lightning_topt.techniques.technique import (
    Applied,
    BlockSeconds,
    ParallelModel,
    Technique,
    restore_forward,
)


class Recomputation(Technique):
    """Blocks whose configuration says `recompute`."""

    name = "recomputation"

    @override
    def claims(self, config: OpConfig, mesh: Mesh) -> frozenset[str]:
        return frozenset({"recompute"}) if config.recompute else frozenset()

    @override
    def check(
        self, mesh: Mesh, configs: Mapping[str, OpConfig], exchange: GradientMethod | None
    ) -> None:
        if "" in configs and configs[""].recompute:
            raise ValueError(
                'the block "" (everything outside the named blocks) cannot be recomputed'
            )

    # ---- what is legal ---------------------------------------------------------------------------

    @override
    def configs(
        self, step: TrainingStep, block: Block, so_far: Sequence[OpConfig]
    ) -> list[OpConfig]:
        if not block.recomputable or block.name == ROOT:
            return []
        return [replace(config, recompute=True) for config in so_far]

    # ---- what it costs ---------------------------------------------------------------------------

    @override
    def add_seconds(
        self, seconds: BlockSeconds, step: TrainingStep, block: str, config: OpConfig
    ) -> None:
        seconds.recompute += seconds.kernels[0] * step.recomputed[block]

    # ---- how it is applied -----------------------------------------------------------------------

    @override
    def apply(self, model: ParallelModel) -> Applied | None:
        blocks = model.blocks_of(self)
        if not blocks:
            return None
        apply_recomputation(model.module, blocks, device=model.device)
        return Applied(undo=lambda: remove_recomputation(model.module))


class RecomputedForward:
    """A module's forward under `torch.utils.checkpoint`; the plain one without gradients."""

    def __init__(self, forward: Callable[..., Any], device: torch.device) -> None:
        self.forward, self._on_device = forward, torch.empty(0, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        names, count = tuple(kwargs), len(args)

        def forward(_: Tensor, *values: Any) -> Any:
            named = dict(zip(names, values[count:], strict=True))
            return self.forward(*values[:count], **named)

        # All by position: torch keeps the random states of the devices of positional arguments
        # only, and saves only those so that a change in place is noticed. It opens no dataclasses,
        # so that a tensor of the block's device comes first.
        values = (self._on_device, *args, *kwargs.values())
        return checkpoint(forward, *values, use_reentrant=False)


def apply_recomputation(module: nn.Module, blocks: Iterable[str], *, device: torch.device) -> None:
    """Recompute the named submodules in the backward pass; `remove_recomputation` undoes it.

    They draw the random numbers of `device` again. Names of parameters and modules do not change.
    """
    for name in blocks:
        block = module.get_submodule(name)
        # An instance attribute hides the class's forward: module hooks (FSDP2's among them) stay
        # outside the recomputed part, as torch asks, and unlike a wrapper module it leaves every
        # name as it was.
        block.forward = RecomputedForward(block.forward, device)


def remove_recomputation(module: nn.Module) -> None:
    """Undo `apply_recomputation` on all submodules."""
    for submodule in module.modules():
        restore_forward(submodule, RecomputedForward)
