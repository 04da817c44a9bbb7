"""Tensor parallelism: parameters are cut along tensor axes, and the operators that use them run on
the pieces.

The plan says where the parameters of a block are as it computes (``computes.parameters``); what
happens to activations follows from the table of kinds (`tensor_parallel.kinds`), the same in the
search and in the run. A rank's step on its pieces is captured as a step of its own: operators,
memory and collectives of split blocks are in its graph, and no cost is added here.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from lightning_topt.communication.exchange_method import GradientMethod
from lightning_topt.communication.topology import own_group
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig, Partial, Placements, Replicate
from lightning_topt.techniques.technique import Applied, ParallelModel, Technique
from lightning_topt.techniques.tensor_parallel.block_rules import rules_of
from lightning_topt.techniques.tensor_parallel.joint_run import JointSteps, check_joint, own_samples
from lightning_topt.techniques.tensor_parallel.kept_tensors import keep_whole, places_of
from lightning_topt.techniques.tensor_parallel.layout import Layout
from lightning_topt.techniques.tensor_parallel.random_states import draw_alike
from lightning_topt.techniques.tensor_parallel.split_forward import (
    before_block,
    looks_back,
    unwrap,
    whole_arguments,
    wrap,
)
from lightning_topt.techniques.tensor_parallel.split_mode import PLAIN, SplitMode
from lightning_topt.techniques.tensor_parallel.split_parameters import (
    check_split,
    join_parameters,
    joined_parameters,
    split_parameters,
)
from lightning_topt.techniques.tensor_parallel.tensor_axes import TensorAxes


class TensorParallelism(Technique):
    """Blocks whose configuration places parameters along tensor axes."""

    @property
    @override
    def name(self) -> str:
        return "tensor parallelism"

    @override
    def claims(self, config: OpConfig, mesh: Mesh) -> frozenset[str]:
        placed = [*config.placed()]
        along_data = {placements[axis] for placements in placed for axis in mesh.data_axes}
        summands = any(Partial() in placements for placements in placed)
        known = mesh.tensor_axes and not summands and along_data <= {Replicate()}
        entries = ("inputs", "outputs", "parameters", "sums", "gathers")
        return frozenset(name for name in entries if known and getattr(config, name))

    @override
    def check(
        self, mesh: Mesh, configs: Mapping[str, OpConfig], exchange: GradientMethod | None
    ) -> None:
        names = {mesh.names[axis] for axis in mesh.tensor_axes}
        for block, config in configs.items():
            if unknown := [name for name in config.gathers if name not in names]:
                raise ValueError(
                    f"block {block!r} gathers parameters along axis {unknown[0]!r}, which is no "
                    "tensor axis of the mesh: leave it out; ZeRO levels shard along data axes"
                )

    # ---- how it is applied -----------------------------------------------------------------------

    @override
    def apply(self, model: ParallelModel) -> Applied | None:
        """Cut the parameters. Rank 0's values count, as in DDP, and ranks of one group draw the
        same random numbers.
        """
        if not model.mesh.tensor_axes:
            return None
        axes = TensorAxes.with_groups(model.mesh)
        if not model.mesh.pipeline_axes:  # else they are rank 0's already, and most are not here
            _take_over(model.module, model.device)
        if model.num_microbatches == 1 and not model.joint:
            draw_alike(own_group(model.mesh.groups_along(model.mesh.tensor_axes)))
        placements = split_placements(model.configs, model.mesh)
        local_shapes = _local_shapes(model.module, placements, axes)
        kept = {name for named in model.parameters.values() for name in named}
        own = {
            name: along
            for name, along in placements.items()
            if name in kept or name not in local_shapes
        }
        split = split_parameters(model.module, own, axes)
        new = {one.original: one.slice for one in split}
        model.parameters = {
            block: {name: new.get(parameter, parameter) for name, parameter in named.items()}
            for block, named in model.parameters.items()
        }
        model.split = {one.slice: one.how for one in split}
        rules = rules_of(model.configs, model.mesh)
        mode = SplitMode(axes, rule=rules.get("", PLAIN))
        steps = JointSteps(model.joint) if model.joint else None
        if steps is not None:
            check_joint(model.module, steps.modules, split, mesh=model.mesh)
        of_blocks: dict[str, Any] = {
            "blocks": tuple(model.configs),
            "rules": rules,
            "local_shapes": local_shapes,
        }
        wrapped = wrap(model.module, mode, split, steps=steps, **of_blocks)
        hooks = [whole_arguments(module, mode) for module in wrapped if looks_back(module)]
        model.before_block = partial(before_block, mode, wrapped)

        def undo() -> None:
            for hook in hooks:
                hook.remove()
            for module in wrapped:
                unwrap(module)
            join_parameters(model.module, split)

        @contextmanager
        def joined() -> Generator[None, None, None]:
            with joined_parameters(model.module, split):
                for forward in wrapped.values():
                    forward.is_joined = True
                try:
                    yield
                finally:
                    for forward in wrapped.values():
                        forward.is_joined = False

        return Applied(
            undo=undo,
            replaced={one.original: one.slice for one in split},
            split={one.original: one.how for one in split},
            around_step=partial(
                _around_step if steps is None else steps.around_step, mode, places_of(model.module)
            ),
            joined=joined,
            whole=mode.whole if steps is None else partial(own_samples, mode),
            take_turns=_same_batch if steps is None else steps.take_turns,
        )


def _same_batch(turns: bool) -> None:
    """All ranks of a tensor group run the same batch, anyway."""


@contextmanager
def _around_step(mode: SplitMode, places: Sequence[dict[str, Any]]) -> Generator[None, None, None]:
    with mode.on():
        yield
    keep_whole(places, mode.whole)


def split_placements(configs: Mapping[str, OpConfig], mesh: Mesh) -> dict[str, Placements]:
    """Return where a plan has parameters along the tensor axes of `mesh`, by their full names."""
    return {
        f"{block}.{name}" if block else name: tuple(placements[axis] for axis in mesh.tensor_axes)
        for block, config in configs.items()
        for name, placements in config.parameters
        if mesh.tensor_axes
    }


def _local_shapes(
    module: nn.Module, placements: Mapping[str, Placements], axes: TensorAxes
) -> dict[str, tuple[int, ...]]:
    """The shapes of slices by name, those of parameters that this rank does not keep as well."""
    whole = dict(module.named_parameters(remove_duplicate=False))
    found = {}
    for name, along in placements.items():
        if name in whole:
            check_split(name, tuple(whole[name].shape), along, axes)
            found[name] = Layout(tuple(whole[name].shape), along).local_shape(axes.sizes)
    return found


@torch.no_grad()
def _take_over(module: nn.Module, device: torch.device) -> None:
    for tensor in dict.fromkeys([*module.parameters(), *module.buffers()]):
        tensor.data = tensor.data.to(device).contiguous()
        dist.broadcast(tensor.data, 0)
