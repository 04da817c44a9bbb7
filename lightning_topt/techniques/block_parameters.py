"""The blocks of a plan in a module: whether they exist, and which parameters are whose."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from lightning_topt.graph.blocks import block_of
from lightning_topt.graph.op_config import OpConfig


def check_blocks(configs: Mapping[str, OpConfig], module: nn.Module, *, made_for: str = "") -> None:
    """Raise ValueError unless every block names a module, one that is called where that matters,
    and none lies in another.
    """
    modules = dict(module.named_modules())
    names = [block for block in configs if block]
    if missing := [name for name in names if name not in modules]:
        raise ValueError(
            f"the plan names modules that {type(module).__name__} does not have: {missing[:5]}; it "
            f"was made for {made_for or 'another model'}: make a new plan"
        )
    for name in names:
        # Scripted modules have a `forward` of their own, which their class does not give.
        forward = getattr(type(modules[name]), "forward", None)
        never_called = forward is nn.Module.forward and "forward" not in vars(modules[name])
        has_border = configs[name].inputs or configs[name].outputs
        if never_called and (
            has_border or configs[name].recompute or configs[name].storage.sharded_axes("gradients")
        ):
            first = next((child for child, _ in modules[name].named_children()), "...")
            raise ValueError(
                f"block {name!r} of the plan is a {type(modules[name]).__name__}, which is never "
                "called itself: to recompute it, to shard its gradients or to split what enters "
                f"it, name the modules in it ({name}.{first}, ...)"
            )
    inside = [(a, b) for a in names for b in names if b.startswith(a + ".")]
    if inside:
        raise ValueError(f"block {inside[0][1]!r} of the plan lies inside block {inside[0][0]!r}")


def parameters_by_block(
    module: nn.Module, blocks: Collection[str]
) -> dict[str, dict[str, nn.Parameter]]:
    """Return each block's parameters by name, under all names of a tied one; it belongs to the
    block of its first name.
    """
    block_of_parameter: dict[nn.Parameter, str] = {}
    found: dict[str, dict[str, nn.Parameter]] = {block: {} for block in blocks}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        block = block_of_parameter.setdefault(parameter, block_of(name, blocks))
        found[block][name] = parameter
    return found


def check_tied(
    parameters: Mapping[str, Mapping[str, nn.Parameter]], configs: Mapping[str, OpConfig]
) -> None:
    """Raise ValueError where a parameter is shared by two blocks and gradients of one of them are
    sharded.
    """
    for first, of_block in parameters.items():
        for name in of_block:
            second = block_of(name, configs)
            if second != first and any(
                configs[b].storage.sharded_axes("gradients") for b in (first, second)
            ):
                raise ValueError(
                    f"the parameter {name!r} of block {second!r} is tied to one of block "
                    f"{first!r}, and torch's FSDP2 shards a parameter in one block only: keep the "
                    "gradients of both whole (ZeRO level 0 or 1), or leave block "
                    f"{second or first!r} out of the plan, so that both are part of the block ''"
                )
