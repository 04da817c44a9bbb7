"""Modules run in the mode: those that hold slices, and the blocks that have rules."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_topt.graph.joint_module import JointModule
from lightning_topt.techniques.tensor_parallel.block_rules import BlockRule, rules_by_block
from lightning_topt.techniques.tensor_parallel.joint_run import JointSteps, run_joint
from lightning_topt.techniques.tensor_parallel.layout import Layout, layout_of, with_layout
from lightning_topt.techniques.tensor_parallel.split_mode import SplitMode
from lightning_topt.techniques.tensor_parallel.split_parameters import SplitParameter


class SplitForward:
    """A module's forward in the mode, whoever calls it: a step, a hook of the user, or backward, to
    recompute it.
    """

    def __init__(
        self,
        module: nn.Module,
        mode: SplitMode,
        layouts: Mapping[str, Layout],
        rule: BlockRule | None,
        *,
        is_root: bool,
        steps: JointSteps | None = None,
        joint: JointModule | None = None,
    ) -> None:
        self.forward, self.mode, self.own, self.is_root = (
            module.forward,
            mode,
            module._parameters,
            is_root,
        )
        self.layouts, self.rule, self.steps, self.joint = layouts, rule, steps, joint
        self.arrived: list[Layout | None] | None = None
        self.is_joined = False  # parameters are whole for now, and ranks run by themselves

    def __deepcopy__(self, memo: Any) -> Any:
        if self.is_joined:  # as it was without the mode
            return copy.deepcopy(self.forward, memo)
        raise ValueError(
            "a module whose parameters are split cannot be copied: copy it before the fit, or keep "
            "its parameters whole"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        if self.is_joined:
            return self.forward(*args, **kwargs)
        if self.steps is not None and not self.steps.takes_turns:
            if self.joint is None or self.steps.is_inside:
                return self.forward(*args, **kwargs)
            with self.steps.inside():
                return run_joint(self.mode, self.joint, self.forward, args, kwargs)
        for name, layout in self.layouts.items():
            parameter = self.own[name]
            if (
                parameter is not None
                and layout_of(parameter) is None
                and parameter.shape != layout.shape
            ):
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


def before_block(
    mode: SplitMode,
    wrapped: Mapping[nn.Module, SplitForward],
    module: nn.Module,
    args: Any,
    kwargs: Any,
) -> Any:
    """Return arguments for FSDP2's hooks, which make new tensors of what passes: whole ones, or
    slices whose places the forward then knows.
    """
    forward = wrapped.get(module)
    if forward is not None and forward.is_joined:
        return args, kwargs
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
    steps: JointSteps | None = None,
) -> dict[nn.Module, SplitForward]:
    """Wrap the modules in `root` that hold slices, and the blocks of these names that have rules.
    What enters and leaves blocks that are there several times is as their rules say, else whole, as
    the search has it, which looks at one of them. `steps` has the modules that run the batches of
    several ranks.
    """
    layouts = {one.slice: one.how.layout for one in split}
    joint = (
        {} if steps is None else {root.get_submodule(each.module): each for each in steps.modules}
    )
    named = {name: root.get_submodule(name) for name in blocks if name}
    structures = {name: _structure(name, block, local_shapes) for name, block in named.items()}
    count = Counter(structures.values())
    repeated = {name for name, structure in structures.items() if count[structure] > 1}
    by_block = {named[name]: rule for name, rule in rules_by_block(rules, named, repeated).items()}
    wrapped: dict[nn.Module, SplitForward] = {}
    for module in root.modules():
        is_ruled = (rules and (module is root or module in by_block)) or module in joint
        if not (is_ruled or looks_back(module) or any(p in layouts for p in module.parameters())):
            continue
        own = {name: layouts[p] for name, p in module._parameters.items() if p in layouts}
        rule = by_block.get(module)
        if looks_back(module):
            rule = replace(rule or BlockRule(), inputs=(), outputs=(), is_repeated=True)
        more: dict[str, Any] = {"steps": steps, "joint": joint.get(module)}
        wrapped[module] = module.forward = SplitForward(
            module, mode, own, rule, is_root=module is root, **more
        )
    return wrapped


def looks_back(module: nn.Module) -> bool:
    """Return whether hooks of the user see gradients of what enters and leaves `module`: both are
    then whole.
    """
    return bool(module._backward_hooks or module._backward_pre_hooks)


def whole_arguments(module: nn.Module, mode: SplitMode) -> RemovableHandle:
    """Let the hooks of `module` see whole arguments."""

    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return mode.whole(args), mode.whole(kwargs)

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _structure(
    name: str, block: nn.Module, local_shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Any, ...]:
    named = ((own, f"{name}.{own}", parameter) for own, parameter in block.named_parameters())
    return type(block), *(
        (own, local_shapes.get(full, tuple(parameter.shape))) for own, full, parameter in named
    )


def unwrap(module: nn.Module) -> None:
    """Give `module` its own forward back."""
    wrapped = module.__dict__.get("forward")
    assert isinstance(wrapped, SplitForward), "another technique was not undone"
    del module.__dict__["forward"]
    if module.forward != wrapped.forward:  # the user's own instance attribute was there before
        module.__dict__["forward"] = wrapped.forward
