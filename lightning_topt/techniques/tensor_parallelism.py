"""Tensor parallelism: parameters are cut along tensor axes, and operators run on the pieces.

The plan says where the parameters of a block are while it computes (``computes.parameters``). What
happens to activations follows from the table of rules (`tensor_parallel.op_rules`), the same in the
search and in the run. A rank's step on its pieces is captured as a step of its own: its graph has
the operators, memory and collectives of split blocks, so no cost is added here.

`TensorParallelism.apply` puts slices in the place of parameters and wraps the forward of modules
that hold some (`SplitForward`), so that they run in a `SplitMode`.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_topt.communication.exchange_method import GradientMethod
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig, Partial, Placements, Replicate
from lightning_topt.techniques.technique import Applied, ParallelModel, Technique, restore_forward
from lightning_topt.techniques.tensor_parallel.layout import (
    Layout,
    TensorAxes,
    layout_of,
    with_layout,
)
from lightning_topt.techniques.tensor_parallel.random_states import draw_alike
from lightning_topt.techniques.tensor_parallel.split_layouts import (
    BlockRule,
    rules_by_block,
    rules_of,
)
from lightning_topt.techniques.tensor_parallel.split_mode import PLAIN, SplitMode
from lightning_topt.techniques.tensor_parallel.split_parameters import (
    SplitParameter,
    check_split,
    join_parameters,
    joined_parameters,
    split_parameters,
)
from lightning_topt.techniques.tensor_parallel.user_code import keep_whole, places_of


class TensorParallelism(Technique):
    """The technique of blocks whose configuration places parameters along tensor axes."""

    name = "tensor parallelism"

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

    @override
    def takes_part(self, step: TrainingStep, config: OpConfig) -> bool:
        return False  # the step on slices has the costs of split blocks

    # ---- how it is applied -----------------------------------------------------------------------

    @override
    def apply(self, model: ParallelModel) -> Applied | None:
        """Cut the parameters, with rank 0's values, and wrap the modules that hold slices.

        Ranks of one tensor group draw the same random numbers from then on.
        """
        if not model.mesh.tensor_axes:
            return None
        # equal values on all ranks; in a pipeline they are already, and most are not here
        axes = TensorAxes.with_groups(model.mesh, make=model.own_group)
        if not model.mesh.pipeline_axes:
            values = [*model.module.parameters(), *model.module.buffers()]
            model.broadcast(values, among=dist.group.WORLD)
        if model.num_microbatches == 1:
            # along one axis they have a group already
            alike = axes.groups[0] if len(axes.groups) == 1 else None
            draw_alike(alike or model.own_group(model.mesh.groups_along(model.mesh.tensor_axes)))
        # slices take the place of parameters, of those that this rank keeps
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
        # modules that hold slices, or have rules, run in the mode
        rules = rules_of(model.configs, model.mesh)
        mode = SplitMode(axes, rule=rules.get("", PLAIN))
        of_blocks: dict[str, Any] = {
            "blocks": tuple(model.configs),
            "rules": rules,
            "local_shapes": local_shapes,
        }
        wrapped = wrap(model.module, mode, split, **of_blocks)
        hooks = [whole_arguments(module, mode) for module in wrapped if looks_back(module)]
        model.before_block = partial(before_block, mode, wrapped)

        # in the reverse order: hooks, wrappers, then parameters
        def undo() -> None:
            for hook in hooks:
                hook.remove()
            for module in wrapped:
                restore_forward(module, SplitForward)
            join_parameters(model.module, split)

        @contextmanager
        def joined() -> Generator[None]:
            with joined_parameters(model.module, split):
                for forward in wrapped.values():
                    forward.is_unsharded = True
                try:
                    yield
                finally:
                    for forward in wrapped.values():
                        forward.is_unsharded = False

        return Applied(
            undo=undo,
            replaced={one.original: one.slice for one in split},
            split={one.original: one.how for one in split},
            around_step=partial(_around_step, mode, places_of(model.module)),
            joined=joined,
            whole=mode.whole,
        )


@contextmanager
def _around_step(mode: SplitMode, places: Sequence[dict[str, Any]]) -> Generator[None]:
    with mode.on():
        yield
    keep_whole(places, mode.whole)


def split_placements(configs: Mapping[str, OpConfig], mesh: Mesh) -> dict[str, Placements]:
    """Return where a plan has parameters along the tensor axes of `mesh`, by full name."""
    return {
        f"{block}.{name}" if block else name: tuple(placements[axis] for axis in mesh.tensor_axes)
        for block, config in configs.items()
        for name, placements in config.parameters
        if mesh.tensor_axes
    }


def _local_shapes(
    module: nn.Module, placements: Mapping[str, Placements], axes: TensorAxes
) -> dict[str, tuple[int, ...]]:
    # The shapes of slices by name, also of parameters that this rank does not keep
    whole = dict(module.named_parameters(remove_duplicate=False))
    found = {}
    for name, along in placements.items():
        if name in whole:
            check_split(name, tuple(whole[name].shape), along, axes)
            found[name] = Layout(tuple(whole[name].shape), along).local_shape(axes.sizes)
    return found


class SplitForward:
    """A module's forward in the mode, whoever calls it: a step, a hook, or a recomputation."""

    def __init__(
        self,
        module: nn.Module,
        mode: SplitMode,
        layouts: Mapping[str, Layout],
        rule: BlockRule | None,
        *,
        is_root: bool,
    ) -> None:
        self.forward = module.forward
        self.mode = mode
        self.own = module._parameters
        self.is_root = is_root
        self.layouts, self.rule = layouts, rule
        self.arrived: list[Layout | None] | None = None
        self.is_unsharded = False  # while parameters are unsharded, each rank runs by itself

    def __deepcopy__(self, memo: Any) -> Any:
        if self.is_unsharded:  # as it was without the mode
            return copy.deepcopy(self.forward, memo)
        raise ValueError(
            "a module whose parameters are split cannot be copied: copy it before the fit, or keep "
            "its parameters whole"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        if self.is_unsharded:
            return self.forward(*args, **kwargs)
        # parameters that FSDP2 gathered and put there, and arguments that it made anew, have lost
        # their layouts
        for name, layout in self.layouts.items():
            parameter = self.own[name]
            if (
                parameter is not None
                and layout_of(parameter) is None
                and parameter.shape != layout.shape
            ):
                with_layout(parameter, layout)
        if self.arrived is not None:
            # in the order in which `before_block` found them
            given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            for tensor, known in zip(given, self.arrived, strict=True):
                if known is not None:
                    with_layout(tensor, known)
            self.arrived = None
        # only what leaves the outermost forward goes to code outside of the mode
        is_outside = self.is_root and not self.mode.is_on
        with self.mode.on():
            if self.rule is not None:
                return self.mode.run_block(self.rule, self.forward, args, kwargs)
            result = self.forward(*args, **kwargs)
            return self.mode.whole(result) if is_outside else result


def before_block(
    mode: SplitMode,
    wrapped: Mapping[nn.Module, SplitForward],
    module: nn.Module,
    args: Any,
    kwargs: Any,
) -> Any:
    """Return arguments for FSDP2's hooks, which make new tensors of what passes.

    They are unsharded, or slices whose layouts the forward then restores.
    """
    forward = wrapped.get(module)
    if forward is not None and forward.is_unsharded:
        return args, kwargs
    # without a rule for its inputs a block gets them unsharded
    if forward is None or forward.rule is None or not forward.rule.inputs:
        return mode.whole(args), mode.whole(kwargs)
    args, kwargs = mode.mover.at_border(forward.rule, forward.rule.inputs, (args, kwargs))
    forward.arrived = [
        layout_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
    ]
    return args, kwargs


def wrap(
    root: nn.Module,
    mode: SplitMode,
    split: Sequence[SplitParameter],
    *,
    blocks: Collection[str],
    rules: Mapping[str, BlockRule],
    local_shapes: Mapping[str, tuple[int, ...]],
) -> dict[nn.Module, SplitForward]:
    """Wrap the modules in `root` that hold slices, and the named blocks that have rules.

    Tensors that enter and leave blocks of which there are several are placed as their rules say,
    else unsharded: so the search has it, which looks at one of them.

    Args:
        root: the model
        mode: in which wrapped modules run
        split: the parameters that are slices
        blocks: names of the plan's blocks
        rules: of blocks, by name
        local_shapes: of slices, by parameter name
    """
    # rules of blocks: blocks of equal structure are repeated, and have a border
    layouts = {one.slice: one.how.layout for one in split}
    named = {name: root.get_submodule(name) for name in blocks if name}
    # parameters that this rank does not keep count with the shapes of their slices
    structures = {name: _structure(name, block, local_shapes) for name, block in named.items()}
    count = Counter(structures.values())
    repeated = {name for name, structure in structures.items() if count[structure] > 1}
    by_block = {named[name]: rule for name, rule in rules_by_block(rules, named, repeated).items()}
    # wrap what has a rule, has backward hooks, or holds slices somewhere inside
    wrapped: dict[nn.Module, SplitForward] = {}
    for module in root.modules():
        is_ruled = rules and (module is root or module in by_block)
        if not (is_ruled or looks_back(module) or any(p in layouts for p in module.parameters())):
            continue
        own = {name: layouts[p] for name, p in module._parameters.items() if p in layouts}
        rule = by_block.get(module)
        if looks_back(module):
            rule = replace(rule or BlockRule(), inputs=(), outputs=(), is_repeated=True)
        wrapped[module] = module.forward = SplitForward(
            module, mode, own, rule, is_root=module is root
        )
    return wrapped


def looks_back(module: nn.Module) -> bool:
    """Return whether hooks of the user see gradients at the border of `module`.

    Tensors are unsharded there then.
    """
    return bool(module._backward_hooks or module._backward_pre_hooks)


def whole_arguments(module: nn.Module, mode: SplitMode) -> RemovableHandle:
    """Let the hooks of `module` see unsharded arguments."""

    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return mode.whole(args), mode.whole(kwargs)

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _structure(
    name: str, block: nn.Module, local_shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Any, ...]:
    # What is equal for blocks of equal structure: class, names and local shapes
    named = ((own, f"{name}.{own}", parameter) for own, parameter in block.named_parameters())
    return type(block), *(
        (own, local_shapes.get(full, tuple(parameter.shape))) for own, full, parameter in named
    )
