"""Plans with tensor axes compute what one process computes: loss, gradients, an update.

    python -m benchmarks.tensor.equality  # groups of 2, 4 and 8 ranks on gloo; about five minutes
    python -m benchmarks.tensor.equality --only tensor_2d context  # these rows alone

Every plan runs every model of `benchmarks.equality`. `PLANS` is one list, to which a plan is added
by a line. What a line cannot say, such as placements of activations, `change` does to the
configuration of every block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common import RESULTS, machine
from benchmarks.equality import (
    MODELS,
    Comparison,
    Differences,
    Model,
    Outcome,
    Refusal,
    cell,
    commit,
    compare_all,
    count_cells,
    differences,
    made,
    optimizer_of,
    read_options,
    reasons,
    table,
)
from lightning_topt.communication import FP16, Dense, GradientMethod, TopK
from lightning_topt.communication.topology import Topology
from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.costs.communication import Group
from lightning_topt.costs.optimizer import read_optimizer
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.states import gather_values
from lightning_topt.graph.capture import capture
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import (
    OpConfig,
    Placement,
    Placements,
    Replicate,
    Shard,
    Storage,
)
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan
from lightning_topt.plan.plan_values import PRESETS
from lightning_topt.techniques.technique import RunOptions
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.split_layouts import (
    BlockRule,
    SplitLayout,
    layout_axes,
)
from lightning_topt.techniques.tensor_parallel.split_model import SplitModel
from lightning_topt.techniques.tensor_parallel.split_prices import SplitPrices

ALL = ("attention", "perceptron", "rest")
EXACT, HALF = 1e-5, 3e-3  # relative to the largest element; the latter: 16 bits on the network
Change = Callable[[Model, str, OpConfig], OpConfig]


@dataclass(frozen=True)
class Plan:
    """A plan to run: its axes, what its blocks store, and what is cut along tensor axes.

    `axes` are names and sizes. `storage` has presets for the blocks in rotation, and the last one
    for the rest; "+" recomputes. `parts` of the model are cut along the tensor axes.

    On a second tensor axis parameters are cut along the same dim (`second` "same"), or the other
    one ("other"). `nodes` of the ranks matter to hierarchical exchanges; the first step of an
    exchange is dense, so the second is compared. `layout` is one of `split_layouts.LAYOUTS`, found
    for the model; `parts` and `second` have no effect then. `tolerance` is that of gradients and
    parameters; in bfloat16 it is measured.
    """

    name: str
    axes: Sequence[tuple[str, int]]
    storage: str = "ddp"
    parts: Sequence[str] = ALL
    second: str = "same"
    microbatches: int = 1
    clip: float | None = None
    bfloat16: bool = False
    exchange: GradientMethod | None = None
    nodes: int = 1
    tolerance: float = EXACT
    change: Change | None = field(default=None, compare=False)
    layout: str = ""

    @property
    def mesh(self) -> Mesh:
        """The mesh of its ranks."""
        crosses = ["inter"] * (self.nodes > 1) + ["intra"] * len(self.axes)
        return Mesh(
            tuple(Axis(*axis, scope) for axis, scope in zip(self.axes, crosses, strict=False))
        )

    @property
    def steps(self) -> int:
        """Steps to take; the last one is compared."""
        return 1 if self.exchange is None else 2

    def of(self, model: Model) -> ParallelPlan:
        """Return the plan for `model`. Raises LayoutRefused where it cannot run in the layout."""
        if self.layout:
            presets = self.storage.split()
            storage, recompute = (
                _storage(presets[-1].rstrip("+"), self.mesh),
                presets[0].endswith("+"),
            )
            found = layout_blocks(
                model.make,
                model.batch,
                layout=self.layout,
                mesh=self.mesh,
                storage=storage,
                recompute=recompute,
            )
            return ParallelPlan.of_blocks(found, mesh=self.mesh)
        return ParallelPlan.of_blocks(
            self.blocks_of(model), mesh=self.mesh, gradient_exchange=self.exchange
        )

    def blocks_of(self, model: Model) -> list[BlockPlan]:
        """Return the blocks of the plan for `model` without a layout, the block "" last."""
        presets, blocks = self.storage.split(), []
        for index, name in enumerate([*model.blocks, ""]):
            preset = presets[index % (len(presets) - 1) if name and len(presets) > 1 else -1]
            config = OpConfig(
                _storage(preset.rstrip("+"), self.mesh),
                recompute=preset.endswith("+") and bool(name),
                parameters=self._parameters(model, name),
            )  # fmt: skip
            blocks.append(
                BlockPlan(name, config if self.change is None else self.change(model, name, config))
            )
        return blocks

    def refusal(self, model: Model) -> Refusal | None:
        """Return why `model` cannot run in the layout; None where it can."""
        if self.layout:
            try:
                self.of(model)
            except LayoutRefused as error:
                return Refusal(error)
        return None

    def _parameters(
        self, model: Model, block: str
    ) -> tuple[tuple[str, tuple[Placement, ...]], ...]:
        mesh = self.mesh
        if not mesh.tensor_axes:
            return ()
        module = model.make()
        inside = module.get_submodule(block) if block else module
        names = [
            name for name, _ in inside.named_parameters(remove_duplicate=False)
            if block or not any(name.startswith(f"{each}.") for each in model.blocks)
        ]  # fmt: skip
        shapes = {
            name: tuple(p.shape) for name, p in inside.named_parameters(remove_duplicate=False)
        }
        cuts = {end: shard for part in self.parts for end, shard in model.cuts[part].items()}
        found = []
        for name in names:
            full = f"{block}.{name}" if block else name
            if (
                cut := next((shard for end, shard in cuts.items() if full.endswith(end)), None)
            ) is not None:
                found.append((name, self._placements(cut, shapes[name])))
        return tuple(found)

    def _placements(self, cut: Shard, shape: tuple[int, ...]) -> tuple[Placement, ...]:
        mesh = self.mesh
        placements: list[Placement] = [Replicate()] * len(mesh.axes)
        first, *others = mesh.tensor_axes
        placements[first] = cut
        size = mesh.shape[first]
        for axis in others:
            second = (
                cut
                if self.second == "same"
                else Shard(1 - cut.dim)
                if len(shape) >= 2 and cut.dim < 2
                else None
            )
            along = size * mesh.shape[axis] if second == cut else mesh.shape[axis]
            if second is not None and cut.parts == 1 and shape[second.dim] % along == 0:
                placements[axis] = second
        return tuple(placements)


def _storage(preset: str, mesh: Mesh) -> Storage:
    return PRESETS[preset].storage(mesh)


def _layout_plans() -> Iterator[Plan]:
    for layout, sizes in {
        "tensor_sequence": (2, 4, 8),
        "context": (2, 4, 8),
        "tensor_2d": (4, 8),
        "tensor_3d": (8,),
    }.items():
        for ranks in sizes:
            axes = [(axis.name, axis.size) for axis in layout_axes(layout, ranks)]
            yield Plan(f"{layout} {ranks}", axes, layout=layout)
            yield Plan(f"{layout} {ranks} + recomputation", axes, "ddp+ ddp", layout=layout)
            if ranks < 8 and layout in ("tensor_sequence", "tensor_2d"):
                yield Plan(f"data 2 x {layout} {ranks}", [D2, *axes], layout=layout)


D2, T2, T4, T8 = ("data", 2), ("tensor", 2), ("tensor", 4), ("tensor", 8)
HYBRID = (("data_replicate", 2), ("data_shard", 2))
GRID = (("tensor_rows", 2), ("tensor_columns", 2))
TOP_K = TopK(density=1.0, hierarchical=False)
PLANS: list[Plan] = [
    # one technique
    Plan("data parallel", [D2]),
    Plan("ZeRO-1", [D2], "zero1"),
    Plan("ZeRO-2", [D2], "zero2"),
    Plan("ZeRO-3", [D2], "zero3"),
    Plan("hybrid", HYBRID, "hybrid"),
    Plan("recomputation", [D2], "ddp+ ddp"),
    Plan("tensor 2", [T2]),
    Plan("tensor 4", [T4]),
    Plan("tensor 8", [T8]),
    Plan("tensor 4, attention alone", [T4], parts=("attention",)),
    Plan("tensor 4, perceptrons alone", [T4], parts=("perceptron",)),
    Plan("tensor 4, embeddings and head alone", [T4], parts=("rest",)),
    Plan("two tensor axes, same dim", GRID),
    Plan("two tensor axes, rows and columns", GRID, second="other"),
    # mixtures
    Plan("tensor 2 + recomputation", [T2], "ddp+ ddp"),
    Plan("tensor 2 + accumulation + clipping", [T2], microbatches=2, clip=0.5),
    Plan("data 2 x tensor 2", [D2, T2]),
    Plan("tensor 2 x data 2, tensor outside", [T2, D2]),
    Plan("ZeRO-1 x tensor 2", [D2, T2], "zero1"),
    Plan("ZeRO-2 x tensor 2", [D2, T2], "zero2"),
    Plan("ZeRO-3 x tensor 2", [D2, T2], "zero3"),
    Plan("ZeRO-3 x tensor 2 + recomputation", [D2, T2], "zero3+ zero3"),
    Plan("ZeRO levels mixed x tensor 2", [D2, T2], "zero1+ zero3 ddp"),
    Plan("data 2 x tensor 2 + accumulation", [D2, T2], microbatches=2),
    Plan("ZeRO-1 x tensor 2 + clipping", [D2, T2], "zero1", clip=0.5),
    Plan("ZeRO-2 x tensor 2 + accumulation + "
         "clipping", [D2, T2], "zero2", microbatches=2, clip=0.5),
    Plan("data 2 x tensor 4", [D2, T4]),
    Plan("ZeRO-1 x tensor 4", [D2, T4], "zero1"),
    Plan("data 4 x tensor 2 + recomputation", [("data", 4), T2], "ddp+ ddp"),
    Plan("ZeRO-3 (4) x tensor 2", [("data", 4), T2], "zero3"),
    Plan("hybrid x tensor 2", [*HYBRID, T2], "hybrid"),
    Plan("hybrid x tensor 2 + recomputation + clipping", [*HYBRID, T2], "hybrid+ zero1", clip=0.5),
    Plan("ZeRO-2 x two tensor axes", [D2, *GRID], "zero2", second="other"),
    # compressed exchange along the data axes
    Plan("all entries by top-k x tensor 2", [D2, T2], exchange=TOP_K),
    Plan("all entries by top-k x ZeRO-1 x tensor 2", [("data", 4), T2], "zero1", exchange=TOP_K),
    Plan(
        "whole gradients over two nodes x tensor 2", [("data", 4), T2], nodes=2,
        exchange=Dense(hierarchical=True),
    ),
    Plan("float16 exchange x tensor 2", [D2, T2], exchange=FP16(), tolerance=HALF),
    # 16 bits in operators
    Plan("tensor 2, bfloat16", [T2], bfloat16=True),
    Plan("ZeRO-3 x tensor 2, bfloat16", [D2, T2], "zero3", bfloat16=True),
    # layouts along one, two and three axes
    *_layout_plans(),
]  # fmt: skip


# ---- a step under a plan, and of one process -----------------------------------------------------

CPU = torch.device("cpu")


def _precision(plan: Plan) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if plan.bfloat16 else nullcontext()


def one_process(model: Model, plan: Plan) -> Outcome:
    """Return a step of one process on the whole batch.

    Where the loss belongs to parts of the batch, it runs them one after another.
    """
    module = made(model, seed=0)
    optimizer = optimizer_of(module)
    parts = plan.mesh.data_parallel_size * plan.microbatches if model.by_part else 1
    for _ in range(plan.steps):
        optimizer.zero_grad()
        loss = 0.0
        for part in zip(*(tensor.chunk(parts) for tensor in model.batch()), strict=True):
            with _precision(plan):
                of_part = module(part) / parts
            of_part.backward()
            loss += of_part.item()
        if plan.clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), plan.clip)
        optimizer.step()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return Outcome(loss, gradients, {name: p.detach() for name, p in module.named_parameters()})


def run_plan(rank: int, model: Model, plan: Plan) -> Outcome:
    """Return the same step under the plan. A collective call.

    Gradients and parameters are unsharded on rank 0 only.
    """
    module = made(model, seed=rank)  # rank 0's parameters count
    names = [name for name, _ in module.named_parameters()]
    world = dist.get_world_size()
    topology = Topology(plan.nodes, world // plan.nodes, rank)
    dtype = torch.bfloat16 if plan.bfloat16 else None
    options = RunOptions(topology=topology, gather_dtype=dtype)
    of_model = plan.of(model)
    if dtype is not None and of_model.leaves_gathers:  # no step is traced here, which would say it
        tables = [n for n, part in module.named_modules() if isinstance(part, nn.Embedding)]
        of_model = replace(of_model, float32_gathers=tuple(f"{name}.weight" for name in tables))
    engine = Engine(of_model, module, device=CPU, options=options)
    engine.apply()
    optimizer = optimizer_of(module)
    engine.attach_optimizers([optimizer])
    place, parts = plan.mesh.data_rank(rank), plan.mesh.data_parallel_size
    own = [tensor.chunk(parts)[place].chunk(plan.microbatches) for tensor in model.batch()]

    def loss_of(root: nn.Module, part: Any) -> Tensor:
        with _precision(plan):
            loss: Tensor = root(part)
        return loss

    for _ in range(plan.steps):
        optimizer.zero_grad()
        mean = engine.run_step(list(zip(*own, strict=True)), loss_of).mean()
        dist.all_reduce(mean)
        if plan.clip is not None:
            engine.clip_norm(list(module.parameters()), plan.clip)
        optimizer.step()
    now = dict(module.named_parameters())
    found = {name: now[name].grad for name in names if now[name].grad is not None}
    gathered = gather_values(found, engine._applied.split_names(), wanted=dist.get_rank() == 0)
    gradients = {name: value.clone() for name, value in gathered.items()}
    state = engine.module_state()
    parameters = {name: state[name].clone() for name in names if name in state}
    engine.release()
    engine.close()
    return Outcome(float(mean) / world, gradients, parameters)


def against_one_process(found: Outcome, model: Model, plan: Plan) -> Differences:
    """Return each difference and what it may be.

    In bfloat16: twice what one process in it differs by from one in float32, since both that are
    compared round so; at least the distance of two numbers.
    """
    expected = one_process(model, plan)
    limits = {
        "loss": 0.1 * plan.tolerance,
        "gradients": plan.tolerance,
        "parameters": plan.tolerance,
    }
    if plan.bfloat16:
        rounding = differences(expected, one_process(model, replace(plan, bfloat16=False)))
        limits = {quantity: max(2 * value, 2**-8) for quantity, value in rounding.items()}
    return {
        quantity: (value, limits[quantity])
        for quantity, value in differences(found, expected).items()
    }


def row(plan: Plan, names: Sequence[str], found: Mapping[tuple[str, str], Any]) -> str:
    """Return the row of `plan`."""
    cells = [cell(found.get((plan.name, name)), shows_limits=plan.bfloat16) for name in names]
    tolerance = "" if plan.bfloat16 else f"{plan.tolerance:g}"
    return f"| {plan.name} | {plan.mesh.size} | {tolerance} | {' | '.join(cells)} | {commit()} |"


COMPARISON = Comparison(PLANS, MODELS, run_plan, against_one_process, row)


def main() -> None:
    """Run everything, or what is named, and write the table."""
    options = read_options(__doc__, models=MODELS, out=RESULTS / "tensor_equality.md")
    compared = compare_all(COMPARISON, options)
    within, refused, cells = count_cells(compared.rows, len(options.models))
    options.out.write_text(
        f"""# Plans against one process

{machine()}

`python -m benchmarks.tensor.equality`, {compared.took}: one step (forward, backward, AdamW in two
parameter groups) of 16 samples under each plan, and of one process; of a compressed exchange the
second step, since its first is dense. In a cell: the largest difference of the loss, of all
gradients, and of all parameters after the update. The loss is relative to itself, the others to the
largest element of their tensor; gradients that are zero but for rounding (of the biases of keys) to
a thousandth of the largest gradient. Float32; within 1e-5 where sums are only reordered (the loss:
a tenth of it), 3e-3 where the network has 16 bits; of operators in bfloat16 twice what one process
in bfloat16 differs by from one in float32 (in brackets). Bold: above. Statistics of batches in the
convolutional net are those of a rank's own part of the batch, as under `ddp`: one process took the
parts one after another. Embeddings of GPT and T5 are tied. Weight averaging (EMA) keeps parameters
whole and is refused with tensor axes (tests/plugins/test_tensor_care.py). The layouts
`tensor_sequence`, `context`, `tensor_2d` and `tensor_3d` are those of the presets of these names.
Where a model cannot run so, its user is told why:

{reasons(compared.refusals)}

{within} of {cells - refused} cells within their tolerance; {refused} refused.

{table(compared.rows, options.models)}
"""
    )


# ---- layouts of the models, found as a search of plans finds them --------------------------------

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
    """Return the blocks of the plan of a model in `layout` along the tensor axes of `mesh`.

    `batch` is that of all data ranks. Raises LayoutRefused where the model cannot run so.
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
    if model.local_graph(found, along) is None:
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


if __name__ == "__main__":
    main()
