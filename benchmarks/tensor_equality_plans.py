"""The plans that `tensor_equality` compares with one process: one list, to which a plan is added by
a line.

What a line cannot say, such as placements of activations, `change` does to the configuration of
every block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.equality_tables import Refusal
from benchmarks.tensor_equality_layouts import LayoutRefused, layout_blocks
from benchmarks.tensor_equality_models import Model
from lightning_topt.communication import FP16, Dense, GradientMethod, TopK
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import OpConfig, Placement, Replicate, Shard, Storage
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan
from lightning_topt.plan.plan_values import PRESETS
from lightning_topt.techniques.tensor_parallel.split_layouts import layout_axes

ALL = ("attention", "perceptron", "rest")
EXACT, HALF = 1e-5, 3e-3  # relative to the largest element; the latter: 16 bits on the network
Change = Callable[[Model, str, OpConfig], OpConfig]


@dataclass(frozen=True)
class Plan:
    """A `Plan` is what `tensor_equality` runs: `axes` by name and size, `storage` of the blocks in
    turn and then of the rest (presets; "+" recomputes), and the `parts` of the model that are cut
    along the tensor axes.

    On a second tensor axis parameters are cut along the same dim (`second` "same"), or the other
    one ("other"). `nodes` of the ranks matter to hierarchical exchanges; the first step of an
    exchange is dense, so the second is compared. `layout` is one of `split_layouts.LAYOUTS`, found
    for the model; `parts` and `second` have no say then. `tolerance` is that of gradients and
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
