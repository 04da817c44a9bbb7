"""A module split over ranks against the same module on one of them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import Placement, Replicate
from lightning_topt.techniques.tensor_parallel.layout import TensorAxes
from lightning_topt.techniques.tensor_parallel.split_layouts import BlockRule
from lightning_topt.techniques.tensor_parallel.split_mode import SplitMode
from lightning_topt.techniques.tensor_parallel.split_parameters import (
    join_parameters,
    split_parameters,
)

_WHOLE = "whole call of "
Placements = Mapping[str, tuple[Placement, ...]]


def compare(
    rank: int,
    make: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module], Tensor],
    placements: Placements,
    mesh: Mesh,
    rules: Mapping[str, BlockRule] = MappingProxyType({}),
) -> dict[str, float]:
    """Largest difference of the loss ("loss"), of every gradient (relative to its largest element)
    and of every buffer.

    `placements` are those of parameters whose name ends so; all others are whole. "whole call of
    ...": functions that got whole tensors because no row fits them. `rules` are those of blocks, by
    their names.
    """
    torch.manual_seed(1)
    module = make()
    alone = copy.deepcopy(module)
    torch.manual_seed(2)
    expected = loss_of(alone)
    expected.backward()  # type: ignore[no-untyped-call]
    axes = TensorAxes.with_groups(mesh)
    parameters = dict(module.named_parameters())
    whole = (Replicate(),) * len(axes)
    chosen = {
        name: next((p for end, p in placements.items() if name.endswith(end)), whole)
        for name in parameters
    }
    assert all(any(name.endswith(end) for name in parameters) for end in placements), (
        "a placement of no parameter"
    )
    pieces = split_parameters(module, chosen, axes)
    assert all(tuple(one.slice.shape) == one.how.local_shape for one in pieces)
    split = {one.slice: one.how for one in pieces}
    parameters = dict(module.named_parameters())
    mode = SplitMode(axes, rule=rules.get("", BlockRule()))
    for name, rule in rules.items():
        if name:
            block = module.get_submodule(name)
            block.forward = partial(_run_block, mode, rule, block.forward)  # type: ignore[method-assign]
    torch.manual_seed(2)
    with mode:
        loss = loss_of(module)
    loss.backward()  # type: ignore[no-untyped-call]
    found = {"loss": float((loss - expected).detach().abs() / expected.detach().abs())}
    others = dict(alone.named_parameters())
    # What is zero but for rounding (a key's bias) is compared with the largest gradient.
    floor = 1e-3 * max(float(p.grad.abs().max()) for p in others.values() if p.grad is not None)
    for name, parameter in parameters.items():
        want, got = others[name].grad, parameter.grad
        if want is None or got is None:
            assert want is got, f"{name} has a gradient on one side only"
            continue
        got = split[parameter].whole(got) if parameter in split else got
        found[name] = float((got - want).abs().max() / want.abs().max().clamp(min=floor))
    for (name, want), (_, got) in zip(alone.named_buffers(), module.named_buffers(), strict=True):
        found[name] = float((want.float() - got.float()).abs().max())
    join_parameters(module, pieces)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, others[name]), f"{name} did not come back"
    # functions that got unsharded tensors since no row fits, once per signature
    names = Counter(p.call.func.__name__ for p in mode.prepared if not p.decision.outputs)
    found |= {f"{_WHOLE}{name}": float(count) for name, count in names.items()}
    return found


def _run_block(
    mode: SplitMode, rule: BlockRule, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return mode.run_block(rule, forward, args, kwargs)


def check(
    results: list[dict[str, float]], *, tolerance: float = 1e-5, whole_calls: int | None = 0
) -> None:
    """Every rank's loss, gradients and buffers are equal but for the order of additions."""
    for found in results:
        whole = {name: found.pop(name) for name in [*found] if name.startswith(_WHOLE)}
        assert whole_calls is None or sum(whole.values()) == whole_calls, whole
        name, worst = max(found.items(), key=lambda item: item[1])
        assert worst <= tolerance, f"{name} differs by {worst}"
