"""The layouts of `split_layouts.LAYOUTS` of the models of `tensor_equality`: found as a search of
plans finds them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.costs.communication import Group
from lightning_topt.costs.optimizer import read_optimizer
from lightning_topt.graph.capture import capture
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import OpConfig, Placements, Replicate, Storage
from lightning_topt.plan.parallel_plan import BlockPlan
from lightning_topt.techniques.tensor_parallel.block_rules import BlockRule
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.split_layouts import SplitLayout
from lightning_topt.techniques.tensor_parallel.split_model import SplitModel
from lightning_topt.techniques.tensor_parallel.split_prices import SplitPrices

# Only which splits exist matters here, not what they cost.
_DEVICE = Device(
    "device", 10**10, {"float32": 1e12}, memory_bandwidth=1e12, op_overhead_seconds=1e-6
)
_CLUSTER = Cluster("layouts", _DEVICE, devices_per_node=64, num_nodes=1, intra=Link(1e-7, 1e11))


class LayoutRefused(ValueError):
    """A model that cannot run in a layout; says why."""


class Step(nn.Module):
    """A training step around a module that returns its loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss."""
        return self.inner(batch)


def layout_blocks(
    make: Callable[[], nn.Module],
    batch: Callable[[], Any],
    *,
    layout: str,
    mesh: Mesh,
    storage: Storage,
    recompute: bool,
) -> list[BlockPlan]:
    """Return the blocks of the plan of a model in `layout` along the tensor axes of `mesh`; `batch`
    is that of all data ranks.

    Raises LayoutRefused where the model cannot run so.
    """
    along = tuple(mesh.axes[axis] for axis in mesh.tensor_axes)
    found = _layout(make, batch, mesh.data_parallel_size, layout, along)
    if isinstance(found, str):
        raise LayoutRefused(found)
    blocks = [name for name in found.rules if name]
    return [
        BlockPlan(
            name,
            OpConfig(
                storage,
                recompute=recompute and bool(name),
                parameters=_parameters(found, name, blocks, mesh),
                **_computes(found.rules[name], mesh),
            ),
        )
        for name in [*blocks, ""]
    ]


def _parameters(
    found: SplitLayout, block: str, blocks: list[str], mesh: Mesh
) -> tuple[tuple[str, Placements], ...]:
    def is_here(name: str) -> bool:
        return (
            name.startswith(f"{block}.")
            if block
            else not any(name.startswith(f"{each}.") for each in blocks)
        )

    named = [(name, placed) for name, placed in found.placements.items() if is_here(name)]
    return tuple((name.removeprefix(f"{block}."), _on(mesh, placed)) for name, placed in named)


def _computes(rule: BlockRule, mesh: Mesh) -> dict[str, Any]:
    axes = [mesh.names[axis] for axis in mesh.tensor_axes]
    return {
        "inputs": tuple(_on(mesh, placed) for placed in rule.inputs),
        "outputs": tuple(_on(mesh, placed) for placed in rule.outputs),
        "sums": _on(mesh, rule.sums) if rule.sums else (),
        "gathers": tuple(
            name for name, gathers in zip(axes, rule.gathers, strict=False) if gathers
        ),
    }


def _on(mesh: Mesh, along: Placements) -> Placements:
    of_axis = dict(zip(mesh.tensor_axes, along, strict=True))
    return tuple(of_axis.get(axis, Replicate()) for axis in range(len(mesh.axes)))


@cache
def _layout(
    make: Callable[[], nn.Module],
    batch: Callable[[], Any],
    parts: int,
    layout: str,
    along: tuple[Axis, ...],
) -> SplitLayout | str:
    """The layout with names as in the model itself; a text says why there is none."""
    model = _split_model(make, batch, parts)
    optimizer = read_optimizer(
        [torch.optim.Adam(model.module.parameters())],
        named_parameters=model.module.named_parameters(),
    )
    try:
        found = model.layout(
            layout, SplitPrices(_CLUSTER, optimizer, Group(along[-2:][0].size)), along
        )
    except ValueError as error:
        return str(error)
    if model.local_graph_of(found, along) is None:
        return "; ".join(model.refusals(Mesh(along).size))

    def inside(name: str) -> str:
        return name.removeprefix("inner").lstrip(".")

    rules = {inside(name): rule for name, rule in found.rules.items()}
    return SplitLayout(
        {inside(name): each for name, each in found.placements.items()},
        rules,
        tuple(map(inside, found.left)),
    )


@cache
def _split_model(make: Callable[[], nn.Module], batch: Callable[[], Any], parts: int) -> SplitModel:
    torch.manual_seed(0)
    module, trace = Step(make().train()), FunctionTrace()
    own = tuple(tensor.chunk(parts)[0] for tensor in batch())
    return SplitModel(module, own, capture(module, own, adapt=trace.of, batch_scaling=False), trace)
