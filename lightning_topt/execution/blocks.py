"""The blocks of a plan in a module: which are recomputed, whether they exist, who owns their parameters."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_topt.graph.ownership import assign_owners
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.pieces import Piece, num_rows
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError


def recomputed_blocks(plan: ParallelPlan) -> list[str]:
    """Names of the blocks whose forward runs again in the backward pass. Raises PlanError for the block ``""``."""
    names = [block.block for block in plan.blocks if block.config.recompute]
    if "" in names:
        raise PlanError('the block "" (everything outside the named blocks) cannot be recomputed')
    return names


def check_blocks(plan: ParallelPlan, module: nn.Module) -> None:
    """Raise PlanError unless every block names a module and no block lies inside another."""
    modules = dict(module.named_modules())
    names = [block.block for block in plan.blocks if block.block]
    if missing := [name for name in names if name not in modules]:
        raise PlanError(
            f"the plan names modules that {type(module).__name__} does not have: {missing[:5]}; it was made for "
            f"{plan.model or 'another model'}: make a new plan"
        )
    inside = [(a, b) for a in names for b in names if b.startswith(a + ".")]
    if inside:
        raise PlanError(f"block {inside[0][1]!r} of the plan lies inside block {inside[0][0]!r}")


def check_runs(plan: ParallelPlan) -> None:
    """Raise PlanError for what a plan may say and this release does not run."""
    if len(plan.stages) > 1 or len(plan.mesh.axes) > 1:
        raise PlanError("this release runs plans of one stage on one axis of ranks")
    levels = {block.config.storage.level for block in plan.blocks}
    if levels & {0, 1} and levels & {2, 3}:
        raise PlanError(
            "gradients are either whole on all ranks (ZeRO levels 0 and 1) or all sharded (2 and 3); "
            f"this plan mixes the levels {sorted(levels)}"
        )
    if plan.gradient_exchange is not None and not plan.keeps_gradients_whole:
        raise PlanError("gradient_exchange: needs whole gradients (ZeRO levels 0 and 1), and this plan shards them")
    if plan.gradient_exchange is not None and plan.mesh.size == 1:
        raise PlanError("gradient_exchange: a single rank exchanges nothing; leave it out")


def owners_of(plan: ParallelPlan, module: nn.Module) -> dict[Tensor, int]:
    """Which rank updates which parameter, for the blocks whose optimizer state is sharded (ZeRO level 1)."""
    level_1 = {block.block for block in plan.blocks if block.config.storage.level == 1}
    names = {block.block for block in plan.blocks}
    owned = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and _block_of(name, names) in level_1
    }
    owners = assign_owners({name: p.numel() for name, p in owned.items()}, plan.data_parallel_size)
    return {parameter: owners[name] for name, parameter in owned.items()}


def owned_pieces(optimizer: Optimizer, owners: Mapping[Tensor, int]) -> list[Piece]:
    """The parameters of `optimizer` that have an owner, each as one piece."""
    return [
        Piece(index, 0, num_rows(parameter), owners[parameter])
        for index, parameter in enumerate(parameters_of(optimizer))
        if parameter in owners
    ]


def _block_of(parameter: str, blocks: set[str]) -> str:
    parts = parameter.split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in blocks:
            return ".".join(parts[:end])
    return ""
