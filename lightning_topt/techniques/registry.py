"""The techniques in the order of application, and what a plan must satisfy for them to run it.

`TECHNIQUES` are applied in this order and undone from the last to the first. `check_runs` compares
a plan with its mesh, `check_blocks` and `check_tied` compare it with the module. Stages along the
axis "pipeline" are no technique: `execution.pipeline` runs them, `plan.stage_tables` has their
costs, and here is what goes together with them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from lightning_topt.communication.exchange_method import GradientMethod
from lightning_topt.graph.blocks import block_of
from lightning_topt.graph.mesh_axes import DATA_AXES, PIPELINE_AXES, TENSOR_AXES, Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.techniques.compilation import Compilation
from lightning_topt.techniques.data_parallel import DataParallel
from lightning_topt.techniques.fsdp import FullSharding, HybridSharding
from lightning_topt.techniques.gradient_compression import GradientCompression, LocalTraining
from lightning_topt.techniques.optimizer_sharding import OptimizerSharding
from lightning_topt.techniques.recomputation import Recomputation
from lightning_topt.techniques.technique import Technique
from lightning_topt.techniques.tensor_parallelism import TensorParallelism

TECHNIQUES: tuple[Technique, ...] = (
    TensorParallelism(),  # all others see the pieces
    Compilation(),
    Recomputation(),  # around what is compiled
    DataParallel(),
    OptimizerSharding(),
    GradientCompression(),
    LocalTraining(),
    FullSharding(),  # once DDP is there: the outermost wrapper must gather first
    HybridSharding(),
)


def technique_of(config: OpConfig, mesh: Mesh) -> Technique:
    """Return the technique that stores what `config` places on `mesh`.

    Raises:
        ValueError: no technique does
    """
    for technique in TECHNIQUES:
        if "storage" in technique.claims(config, mesh):
            return technique
    axes = " x ".join(f"{axis.name} {axis.size}" for axis in mesh.axes)
    raise ValueError(
        f"no technique of this release keeps {config.storage} on the mesh {axes}; ZeRO levels 0 to "
        "3 over all data axes, and levels 2 and 3 over the last one (hybrid), can be run"
    )


def check_runs(
    mesh: Mesh, configs: Mapping[str, OpConfig], exchange: GradientMethod | None = None
) -> None:
    """Raise ValueError for what a plan of these blocks says and no technique runs.

    Args:
        mesh: the mesh of the plan
        configs: placement by block
        exchange: the plan's gradient exchange
    """
    # the mesh and the exchange
    known = {*mesh.data_axes, *mesh.tensor_axes, *mesh.pipeline_axes}
    if unknown := [axis.name for index, axis in enumerate(mesh.axes) if index not in known]:
        raise ValueError(
            f"the mesh has an axis {unknown[0]!r}, and nothing runs along it; axes are named "
            f"{', '.join(DATA_AXES)}, {', '.join(TENSOR_AXES)}, {', '.join(PIPELINE_AXES)}"
        )
    # stages: unsharded gradients, averaged once all microbatches have passed; first, for this
    # message says more than that no technique takes care of the block
    for block, config in configs.items():
        if mesh.pipeline_axes and config.storage.level > 1:
            raise ValueError(
                f"block {block!r} has ZeRO level {config.storage.level}, which does not go "
                "together with stages: its parameters or gradients would be exchanged for every "
                "microbatch. Choose level 0 or 1 (ddp, zero1)"
            )
    if mesh.pipeline_axes and exchange is not None and mesh.tensor_axes:
        raise ValueError(
            "gradient_exchange: stages whose parameters are in slices exchange gradients as they "
            "are; leave it out"
        )
    # every entry of every block is claimed by some technique
    names = ("recompute", "compile", "inputs", "outputs", "parameters", "sums", "gathers")
    for block, config in configs.items():
        try:
            technique_of(config, mesh)
        except ValueError as error:
            raise ValueError(f"block {block!r}: {error}") from error
        claimed = frozenset().union(*(technique.claims(config, mesh) for technique in TECHNIQUES))
        asked = {"storage", *(name for name in names if getattr(config, name))}
        if left := sorted(asked - claimed):
            raise ValueError(
                f"block {block!r}: no technique of this release takes care of its {', '.join(left)}"
            )
    for technique in TECHNIQUES:
        technique.check(mesh, configs, exchange)


def check_blocks(configs: Mapping[str, OpConfig], module: nn.Module, *, made_for: str = "") -> None:
    """Raise ValueError unless the blocks of a plan fit `module`.

    Every block names a module, none lies in another, and it is called itself where that matters: to
    recompute it, to shard its gradients or to place its inputs.
    """
    # every block names a module
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
            has_border
            or configs[name].recompute
            or configs[name].compile
            or configs[name].storage.sharded_axes("gradients")
        ):
            first = next((child for child, _ in modules[name].named_children()), "...")
            raise ValueError(
                f"block {name!r} of the plan is a {type(modules[name]).__name__}, which is never "
                "called itself: to recompute or compile it, to shard its gradients or to split "
                f"what enters it, name the modules in it ({name}.{first}, ...)"
            )
    # blocks are disjoint
    inside = [(a, b) for a in names for b in names if b.startswith(a + ".")]
    if inside:
        raise ValueError(f"block {inside[0][1]!r} of the plan lies inside block {inside[0][0]!r}")


def parameters_by_block(
    module: nn.Module, blocks: Collection[str]
) -> dict[str, dict[str, nn.Parameter]]:
    """Return each block's parameters by name, under all names of a tied one.

    A tied parameter belongs to the block of its first name.
    """
    # the first name of a parameter decides
    block_of_parameter: dict[nn.Parameter, str] = {}
    found: dict[str, dict[str, nn.Parameter]] = {block: {} for block in blocks}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        block = block_of_parameter.setdefault(parameter, block_of(name, blocks))
        found[block][name] = parameter
    return found


def check_tied(
    parameters: Mapping[str, Mapping[str, nn.Parameter]], configs: Mapping[str, OpConfig]
) -> None:
    """Raise ValueError if two blocks share a parameter and one of them shards gradients."""
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
