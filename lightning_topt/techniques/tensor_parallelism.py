"""Tensor parallelism: parameters are cut along tensor axes, and the operators that use them run on the pieces.

The plan says where the parameters of a block are as it computes (``computes.parameters``); what happens to activations
follows from the table of kinds (`tensor_parallel.kinds`), the same in the search and in the run. A rank's step on its pieces is
captured as a step of its own: operators, memory and collectives of split blocks are in its graph, and no cost is added here.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
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

from lightning_topt.communication.options import ExchangeOptions
from lightning_topt.communication.topology import own_group
from lightning_topt.costs.lifetimes import Lifetime
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig, Partial, Placements, Replicate
from lightning_topt.graph.op_graph import Block
from lightning_topt.techniques.technique import Applied, BlockSeconds, Neighbours, ParallelModel, Technique
from lightning_topt.techniques.tensor_parallel.block_rules import BlockRule, rules_by_block, rules_of
from lightning_topt.techniques.tensor_parallel.kept_tensors import keep_whole, places_of
from lightning_topt.techniques.tensor_parallel.layout import Layout, layout_of, with_layout
from lightning_topt.techniques.tensor_parallel.random_states import draw_alike
from lightning_topt.techniques.tensor_parallel.split_mode import PLAIN, SplitMode
from lightning_topt.techniques.tensor_parallel.split_parameters import (
    SplitParameter,
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
    def check(self, mesh: Mesh, configs: Mapping[str, OpConfig], exchange: ExchangeOptions | None) -> None:
        names = {mesh.names[axis] for axis in mesh.tensor_axes}
        for block, config in configs.items():
            if unknown := [name for name in config.gathers if name not in names]:
                raise ValueError(
                    f"block {block!r} gathers parameters along axis {unknown[0]!r}, which is no tensor axis of the mesh: leave "
                    "it out; ZeRO levels shard along data axes"
                )

    # ---- what is legal ----------------------------------------------------------------------------------------------

    @override
    def configs(self, step: TrainingStep, block: Block, so_far: Sequence[OpConfig]) -> list[OpConfig]:
        return []  # a graph of pieces is given with their placements; see `split_search`

    # ---- what it costs ----------------------------------------------------------------------------------------------

    @override
    def takes_part(self, step: TrainingStep, config: OpConfig) -> bool:
        return False

    @override
    def lifetimes(self, step: TrainingStep, block: str, config: OpConfig, beside: Neighbours) -> Iterator[Lifetime]:
        return iter(())

    @override
    def add_seconds(self, seconds: BlockSeconds, step: TrainingStep, block: str, config: OpConfig) -> None:
        return

    # ---- how it is applied -------------------------------------------------------------------------------------------

    @override
    def apply(self, model: ParallelModel) -> Applied | None:
        """Cut the parameters. Rank 0's values count, as in DDP, and ranks of one group draw the same random numbers."""
        if not model.mesh.tensor_axes:
            return None
        axes = TensorAxes.with_groups(model.mesh)
        if not model.mesh.pipeline_axes:  # else they are rank 0's already, and most are not here
            _take_over(model.module, model.device)
        if model.num_microbatches == 1:
            draw_alike(own_group(model.mesh.groups_along(model.mesh.tensor_axes)))
        placements = split_placements(model.configs, model.mesh)
        local_shapes = _local_shapes(model.module, placements, axes)
        kept = {name for named in model.parameters.values() for name in named}
        own = {name: along for name, along in placements.items() if name in kept or name not in local_shapes}
        split = split_parameters(model.module, own, axes)
        new = {one.original: one.slice for one in split}
        model.parameters = {
            block: {name: new.get(parameter, parameter) for name, parameter in named.items()}
            for block, named in model.parameters.items()
        }
        model.split = {one.slice: one.how for one in split}
        rules = rules_of(model.configs, model.mesh)
        mode = SplitMode(axes, rule=rules.get("", PLAIN))
        wrapped = _wrap(model, mode, split, rules, local_shapes)
        hooks = [_whole_arguments(module, mode) for module in wrapped if _looks_back(module)]
        model.before_block = partial(_before_block, mode, wrapped)

        def undo() -> None:
            for hook in hooks:
                hook.remove()
            for module in wrapped:
                _unwrap(module)
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
            around_step=partial(_around_step, mode, places_of(model.module)),
            joined=joined,
            whole=mode.whole,
        )


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


class _SplitForward:
    """A module's forward in the mode, whoever calls it: a step, a hook of the user, or backward, to recompute it."""

    def __init__(
        self,
        module: nn.Module,
        mode: SplitMode,
        layouts: Mapping[str, Layout],
        rule: BlockRule | None,
        *,
        is_root: bool,
    ) -> None:
        self.forward, self.mode, self.own, self.is_root = module.forward, mode, module._parameters, is_root
        self.layouts, self.rule = layouts, rule
        self.arrived: list[Layout | None] | None = None
        self.is_joined = False  # parameters are whole for now, and ranks run by themselves

    def __deepcopy__(self, memo: Any) -> Any:
        if self.is_joined:  # as it was without the mode
            return copy.deepcopy(self.forward, memo)
        raise ValueError(
            "a module whose parameters are split cannot be copied: copy it before the fit, or keep its parameters whole"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_joined:
            return self.forward(*args, **kwargs)
        for name, layout in self.layouts.items():
            parameter = self.own[name]
            if parameter is not None and layout_of(parameter) is None and parameter.shape != layout.shape:
                with_layout(parameter, layout)  # gathered by FSDP2, which put it there
        if self.arrived is not None:
            given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            for tensor, known in zip(given, self.arrived, strict=True):
                if known is not None:
                    with_layout(tensor, known)
            self.arrived = None
        is_outside = self.is_root and not self.mode.is_on
        with self.mode.on():
            if self.rule is not None:
                return self.mode.run_block(self.rule, self.forward, args, kwargs)
            result = self.forward(*args, **kwargs)
            return self.mode.whole(result) if is_outside else result


def _before_block(
    mode: SplitMode, wrapped: Mapping[nn.Module, _SplitForward], module: nn.Module, args: Any, kwargs: Any
) -> Any:
    """FSDP2's hooks make new tensors of what passes: they get whole ones, or slices whose places the forward then knows."""
    forward = wrapped.get(module)
    if forward is not None and forward.is_joined:
        return args, kwargs
    if forward is None or forward.rule is None or not forward.rule.inputs:
        return mode.whole(args), mode.whole(kwargs)
    args, kwargs = mode.mover.at_border(forward.rule, forward.rule.inputs, (args, kwargs))
    forward.arrived = [layout_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return args, kwargs


def _wrap(
    model: ParallelModel,
    mode: SplitMode,
    split: Sequence[SplitParameter],
    rules: Mapping[str, BlockRule],
    local_shapes: Mapping[str, tuple[int, ...]],
) -> dict[nn.Module, _SplitForward]:
    """Wrap the modules that hold slices, and the blocks that have rules. What enters and leaves blocks that are there several
    times is as their rules say, else whole, as the search has it, which looks at one of them.
    """
    layouts = {one.slice: one.how.layout for one in split}
    blocks = {name: model.module.get_submodule(name) for name in model.configs if name}
    structures = {name: _structure(name, block, local_shapes) for name, block in blocks.items()}
    count = Counter(structures.values())
    repeated = {name for name, structure in structures.items() if count[structure] > 1}
    by_block = {blocks[name]: rule for name, rule in rules_by_block(rules, blocks, repeated).items()}
    wrapped: dict[nn.Module, _SplitForward] = {}
    for module in model.module.modules():
        is_ruled = rules and (module is model.module or module in by_block)
        if not (is_ruled or _looks_back(module) or any(p in layouts for p in module.parameters())):
            continue
        own = {name: layouts[p] for name, p in module._parameters.items() if p in layouts}
        rule = by_block.get(module)
        if _looks_back(module):
            rule = replace(rule or BlockRule(), inputs=(), outputs=(), is_repeated=True)
        wrapped[module] = module.forward = _SplitForward(module, mode, own, rule, is_root=module is model.module)
    return wrapped


def _looks_back(module: nn.Module) -> bool:
    """Whether hooks of the user see gradients of what enters and leaves `module`: both are then whole."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def _whole_arguments(module: nn.Module, mode: SplitMode) -> RemovableHandle:
    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return mode.whole(args), mode.whole(kwargs)

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _structure(name: str, block: nn.Module, local_shapes: Mapping[str, tuple[int, ...]]) -> tuple[Any, ...]:
    named = ((own, f"{name}.{own}", parameter) for own, parameter in block.named_parameters())
    return type(block), *((own, local_shapes.get(full, tuple(parameter.shape))) for own, full, parameter in named)


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


def _unwrap(module: nn.Module) -> None:
    wrapped = module.__dict__.get("forward")
    assert isinstance(wrapped, _SplitForward), "another technique was not undone"
    del module.__dict__["forward"]
    if module.forward != wrapped.forward:  # the user's own instance attribute was there before
        module.__dict__["forward"] = wrapped.forward


@torch.no_grad()
def _take_over(module: nn.Module, device: torch.device) -> None:
    for tensor in dict.fromkeys([*module.parameters(), *module.buffers()]):
        tensor.data = tensor.data.to(device).contiguous()
        dist.broadcast(tensor.data, 0)
