"""Recomputation (activation checkpointing): forward runs again in the backward pass (Chen et al., arXiv 1604.06174)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from typing_extensions import override

from lightning_topt.costs.activations import activation_lifetimes
from lightning_topt.costs.lifetimes import Lifetime
from lightning_topt.costs.sizes import ROOT
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import Block, Parameter
from lightning_topt.techniques.technique import BlockSeconds, Neighbours, Technique


class Recomputation(Technique):
    """Activations of a block are made again in backward, beside whatever places its parameters."""

    @override
    def places(self, config: OpConfig, mesh: Mesh) -> bool:
        return config.recompute

    # ---- what is legal ----------------------------------------------------------------------------------------------

    @override
    def configs(self, step: TrainingStep, block: Block, so_far: Sequence[OpConfig]) -> list[OpConfig]:
        if not block.recomputable or block.name == ROOT:
            return []
        return [replace(config, recompute=True) for config in so_far]

    # ---- what it costs ----------------------------------------------------------------------------------------------

    @override
    def lifetimes(self, step: TrainingStep, block: str, config: OpConfig, beside: Neighbours) -> Iterator[Lifetime]:
        yield from activation_lifetimes(step, block, recompute=True)

    @override
    def plan_lifetimes(self, step: TrainingStep, blocks: Collection[str]) -> Iterator[Lifetime]:
        return iter(())

    @override
    def add_seconds(self, seconds: BlockSeconds, step: TrainingStep, block: str, config: OpConfig) -> None:
        seconds.recompute += float(step.compute[block][0].sum())

    @override
    def plan_seconds(self, step: TrainingStep, blocks: Collection[str]) -> float:
        return 0.0

    @override
    def update_share(self, step: TrainingStep, parameter: Parameter, config: OpConfig) -> float:
        return 1.0
