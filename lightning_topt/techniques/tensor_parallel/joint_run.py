"""Modules that run the batches of all ranks of a tensor axis at once: joint modules.

Their parameters are cut; every rank calls such a module with its own batch.

    at its border             forward  gradient
    a tensor with samples     none     times the ranks on its way in, divided by them on its way out
    another one, equal there  none     the mean over ranks on its way out

Inside, a tensor with samples is a slice by samples of one that has those of all ranks. If a product
needs them all, they are gathered, and sums rest by samples.

The loss of the step has weight 1 on every rank, as under DDP. Inside of the module gradients are
those of the mean of all losses. They are replicated, or, of a parameter with `sums_later`, have
that as their mean. So the mean over all ranks, which DDP takes, is right for every replicated
parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from typing_extensions import override

from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import JointModule, Shard
from lightning_topt.techniques.tensor_parallel import moves
from lightning_topt.techniques.tensor_parallel.block_rules import BlockRule
from lightning_topt.techniques.tensor_parallel.layout import (
    Layout,
    TensorAxes,
    layout_of,
    with_layout,
)
from lightning_topt.techniques.tensor_parallel.op_rules.rules import tensors_in
from lightning_topt.techniques.tensor_parallel.split_mode import SplitMode
from lightning_topt.techniques.tensor_parallel.split_parameters import SplitParameter
from lightning_topt.techniques.tensor_parallel.user_code import ATTRIBUTES, LOCAL, keep_whole

# dictionaries of a module in which torch keeps its hooks
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class JointRefusal(ValueError):
    """Joint module `module` cannot run the batches of several ranks."""

    def __init__(self, module: str, reason: object) -> None:
        super().__init__(f"module {module!r} cannot run the batches of several ranks: {reason}")
        self.module = module


class JointSteps:
    """The `modules` that run the batches of several ranks, and how the present step runs.

    In a step that `is_sequential` they run one batch at a time.
    """

    def __init__(self, modules: Sequence[JointModule]) -> None:
        self.modules = tuple(modules)
        self.is_sequential = self.is_inside = False
        self._is_checked = False

    @contextmanager
    def inside(self) -> Generator[None, None, None]:
        """Run such a module within it."""
        self.is_inside = True
        try:
            yield
        finally:
            self.is_inside = False

    def set_sequential(self, is_sequential: bool) -> None:
        """From now on, in backward too, run modules on one batch at a time, which all ranks have.

        Or, with False, on the batches of all ranks again.
        """
        self.is_sequential = is_sequential

    @contextmanager
    def around_step(
        self, mode: SplitMode, places: Sequence[dict[str, Any]]
    ) -> Generator[None, None, None]:
        """Run a step within it, whose modules may keep tensors in `places`.

        Raises:
            ValueError: in the first step, if slices are read outside of such modules
        """
        if self.is_sequential:
            with mode.on():
                yield
            keep_whole(places, mode.whole)
            return
        # the first step also checks that no slice is read outside of these modules
        with nullcontext() if self._is_checked else OutsideMode(self):
            yield
        self._is_checked = True
        # what modules keep beyond the step: of tensors with samples, those of this rank
        keep_whole(places, partial(own_samples, mode))


class OutsideMode(TorchFunctionMode):
    """Checks calls outside of joint modules: no tensor may be a slice there."""

    def __init__(self, steps: JointSteps) -> None:
        super().__init__()
        self._steps = steps

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not self._steps.is_inside and func not in LOCAL and func not in ATTRIBUTES:
            for tensor in tensors_in((*args, *(kwargs or {}).values())):
                if (layout := layout_of(tensor)) is not None:
                    raise ValueError(
                        f"{getattr(func, '__name__', func)} reads a tensor of shape "
                        f"{list(layout.shape)} that is split, outside of the joint modules: keep "
                        "the parameter whole, or the tensor inside"
                    )
        return func(*args, **(kwargs or {}))


def joint_rule(joint: JointModule) -> BlockRule:
    """Return the rule by which a module runs several batches: sums rest by samples."""
    dim = next((dim for dim in (*joint.inputs, *joint.outputs) if dim is not None), 0)
    return BlockRule(joint.module, sums=(Shard(dim),), is_joint=True)


def run_joint(
    mode: SplitMode,
    joint: JointModule,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return ``forward(*args, **kwargs)`` for this rank's batch, run with those of all ranks.

    A collective call.

    Raises:
        ValueError: the module is called with other tensors than `joint` says, or brings samples
            together
    """
    assert not mode.is_on, "a module that runs several batches is called by another one"
    # arguments become slices, by samples, of the joint batch
    leaves, tree = tree_flatten((args, dict(kwargs)))
    rows = None
    places = _tensor_places(leaves, joint, "inputs", joint.inputs)
    for place, dim in zip(places, joint.inputs, strict=True):
        if dim is None:
            continue
        leaves[place] = moved = _arrived(leaves[place], dim, mode.axes, joint)
        if rows is None and moved.ndim > 1 and moved.is_floating_point():
            layout = layout_of(moved)
            assert layout is not None
            rows = layout.shape[:-1]
    # forward on the joint batch, then each rank takes its own samples of the results
    args, kwargs = tree_unflatten(leaves, tree)
    with mode.on(), mode.following(joint_rule(joint), rows):
        result = forward(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            leaves, tree = tree_flatten(result)
            places = _tensor_places(leaves, joint, "outputs", joint.outputs)
            for place, dim in zip(places, joint.outputs, strict=True):
                leaves[place] = _left_one(leaves[place], dim, mode, joint)
            return tree_unflatten(leaves, tree)


def own_samples(mode: SplitMode, value: object) -> Any:
    """Return `value`, a tree of what such a module kept, with this rank's own samples.

    A collective call.
    """
    leaves, tree = tree_flatten(value)
    if not any(isinstance(leaf, Tensor) and layout_of(leaf) is not None for leaf in leaves):
        return value
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and (layout := layout_of(leaf)) is not None:
            leaves[place] = (
                mode.whole(leaf) if layout.batch is None else _own(leaf, layout, mode).detach()
            )
    return tree_unflatten(leaves, tree)


def _arrived(tensor: Tensor, dim: int, axes: TensorAxes, joint: JointModule) -> Tensor:
    """Return an argument as a slice, by samples, of one with those of all ranks."""
    if dim >= tensor.ndim:
        raise ValueError(
            f"module {joint.module!r} got a tensor of shape {list(tensor.shape)}, and the plan "
            f"says that its dim {dim} has the samples; correct the plan, or make a new one"
        )
    # the loss has weight 1 on every rank, and gradients inside are of the mean of all
    (ranks,) = axes.sizes
    shape = (*tensor.shape[:dim], tensor.shape[dim] * ranks, *tensor.shape[dim + 1 :])
    arrived = moves.weigh(tensor, float(ranks))
    return with_layout(arrived, Layout(shape, (Shard(dim),), Shard(dim)))


def _left_one(tensor: Tensor, dim: int | None, mode: SplitMode, joint: JointModule) -> Tensor:
    layout = layout_of(tensor)
    # the plan says which results have samples, and in which dim
    batch = None if layout is None else layout.batch
    if batch != (None if dim is None else Shard(dim)):
        where = "has no samples" if batch is None else f"has samples as {batch}"
        raise ValueError(
            f"a result of module {joint.module!r} of shape {list(mode.mover.shape(tensor))} "
            f"{where}, and the plan says {'none' if dim is None else f'dim {dim}'}; correct the "
            "plan, or make a new one"
        )
    # equal on all ranks: the gradient is the mean of theirs
    if layout is None or batch is None:
        whole: Tensor = mode.whole(tensor)
        if not (whole.requires_grad and torch.is_grad_enabled()):
            return whole.detach()
        alike: Tensor = _LeaveAlike.apply(whole, mode.axes)  # type: ignore[no-untyped-call]
        return alike
    # with samples: the weight of the way in is taken back
    return moves.weigh(_own(tensor, layout, mode), 1 / mode.axes.sizes[0])


def _own(tensor: Tensor, layout: Layout, mode: SplitMode) -> Tensor:
    """Return this rank's samples."""
    assert layout.batch is not None
    return mode.mover.move(tensor, layout.placements, (layout.batch,), (False,))


class _LeaveAlike(Function):
    """A tensor that is equal on all ranks, and used by the step of each.

    Its gradient is the mean of theirs.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axes: TensorAxes) -> Tensor:
        ctx.axes = axes
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        moves.refuse_graph()
        return moves.all_reduce(gradient, ctx.axes, 0) / ctx.axes.sizes[0], None


def _tensor_places(
    leaves: list[Any], joint: JointModule, what: str, dims: tuple[int | None, ...]
) -> list[int]:
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if len(places) != len(dims):
        raise ValueError(
            f"module {joint.module!r} has {len(places)} tensors among its {what}, and the plan "
            f"says {len(dims)}; correct the plan, or make a new one"
        )
    return places


def check_hooks(joint: JointModule, module: nn.Module) -> None:
    """Raise JointRefusal if something inside of `module` has hooks.

    They would see the batches of all ranks. Hooks of the module itself see the samples of one.
    """
    for path, inside in module.named_modules():
        if path and any(getattr(inside, name) for name in _HOOKS):
            raise JointRefusal(
                joint.module, f"{path!r} in it has hooks, which would see the batches of all ranks"
            )


def check_joint(
    root: nn.Module, modules: Sequence[JointModule], split: Sequence[SplitParameter], *, mesh: Mesh
) -> None:
    """Raise ValueError if `modules` of `root` cannot run the batches of several ranks.

    Args:
        root: the model
        modules: its joint modules
        split: its parameters that are slices
        mesh: which must have one tensor axis
    """
    if len(mesh.tensor_axes) != 1:
        raise ValueError(
            "joint modules need a mesh with one tensor axis, and this one has "
            f"{len(mesh.tensor_axes)}"
        )
    # the modules exist, and nothing inside of them has hooks
    known = dict(root.named_modules())
    for joint in modules:
        if joint.module not in known:
            raise ValueError(
                f"the joint module {joint.module!r} is not in the model; correct its path"
            )
        check_hooks(joint, known[joint.module])
    # every slice is in one of them
    slices = {one.slice for one in split}
    for path, module in known.items():
        outside = not any(joint.holds(path) for joint in modules)
        if outside and (
            names := [name for name, own in module._parameters.items() if own in slices]
        ):
            raise ValueError(
                f"parameter {f'{path}.{names[0]}'.lstrip('.')!r} is split, and module {path!r} is "
                "in none of the joint modules: keep it whole, or name a module around it"
            )
