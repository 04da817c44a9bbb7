"""Layouts of a model along one, two or three tensor axes, found from what its products do.

The search along one axis says which matrices are cut by outputs and which by inputs, and which
heads stay together; names say nothing. In two dimensions each of them is cut by its other dim along
the second axis, and outputs become the inputs of the next product. So features and rows change axes
after each product. In three, slices of matrices along a third axis are gathered for their use.

    layout           axes                                        paper
    tensor           tensor                                      Shoeybi et al., 1909.08053
    tensor_sequence  tensor                                      Korthikanti et al., 2205.05198
    context          tensor_tokens                               keys and values travel, or heads
                                                                 (Jacobs et al., 2309.14509)
    tensor_2d        tensor_rows, tensor_columns
    tensor_3d        tensor_tokens, tensor_rows, tensor_columns  Bian et al., 2105.14450
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_topt.graph.errors import PlanError
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import OpConfig, Placement, Placements, Shard
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace, Ref
from lightning_topt.techniques.tensor_parallel.layout import REPLICATE, divides_along
from lightning_topt.techniques.tensor_parallel.op_rules import KINDS
from lightning_topt.techniques.tensor_parallel.op_rules.shapes import carried

LAYOUTS = ("tensor", "tensor_sequence", "context", "tensor_2d", "tensor_3d")
_BY_AXES = {
    ("tensor",): "",
    ("tensor_tokens",): "context",
    ("tensor_rows", "tensor_columns"): "tensor_2d",
    ("tensor_tokens", "tensor_rows", "tensor_columns"): "tensor_3d",
}


@dataclass(frozen=True)
class Role:
    """What a parameter is to the products of a step: its dims of `outputs` and `inputs`.

    A bias has no inputs. `weight` is the matrix to whose products it is added; of a matrix, its own
    name.
    """

    weight: str
    outputs: int
    inputs: int | None


@dataclass(frozen=True)
class SplitLayout:
    """Where a model is along the tensor axes.

    Args:
        placements: of parameters by full name
        rules: of blocks
        left: matrices that are cut along fewer axes than the layout has, because sizes do not
            divide or nothing says how
    """

    placements: Mapping[str, Placements]
    rules: Mapping[str, BlockRule]
    left: tuple[str, ...] = ()


def layout_named_by(axes: Sequence[str]) -> str:
    """Return the one layout that these tensor axes, outermost first, can have.

    "" for one axis ``tensor``, which has several.

    Raises:
        PlanError: they have none
    """
    if tuple(axes) in _BY_AXES:
        return _BY_AXES[tuple(axes)]
    known = "; ".join(", ".join(names) for names in _BY_AXES)
    raise PlanError(
        f"no layout is known for the tensor axes {', '.join(axes)}; a mesh to search has one of "
        f"these: {known}. Others need a plan that places tensors along them"
    )


def layout_axes(layout: str, ranks: int) -> tuple[Axis, ...]:
    """Return the tensor axes of `layout` over `ranks` ranks, as equal as possible.

    Raises:
        PlanError: `ranks` is no product of two or three numbers above 1
    """
    if layout in ("tensor", "tensor_sequence"):
        return (Axis("tensor", ranks),)
    if layout == "context":
        return (Axis("tensor_tokens", ranks),)
    count = 2 if layout == "tensor_2d" else 3
    sizes = _factors(ranks, count)
    if sizes is None:
        raise PlanError(
            f"{layout} needs a number of ranks that is a product of {count} numbers above 1, and "
            f"{ranks} is not: start another number, or choose plan='tensor'"
        )
    # the longest axis is outermost
    names = ("tensor_tokens", "tensor_rows", "tensor_columns")[-count:]
    return tuple(Axis(name, size) for name, size in zip(names, sizes, strict=True))


def _factors(number: int, count: int) -> tuple[int, ...] | None:
    # The most equal factors above 1, largest first
    if count == 1:
        return (number,) if number > 1 else None
    # all ways to write the number as a product, of which the most equal counts
    found = []
    for first in range(2, number // 2 + 1):
        if number % first == 0 and (rest := _factors(number // first, count - 1)) is not None:
            found.append(tuple(sorted((first, *rest), reverse=True)))
    return min(found, key=lambda sizes: (sum(sizes), sizes), default=None)


def roles_of(trace: FunctionTrace) -> dict[str, Role]:
    """Return the roles of parameters in products and embeddings, by name; the first use counts."""
    found: dict[str, Role] = {}
    for call in trace.calls:
        kind = KINDS.get(call.func)
        # weights (outputs, inputs) in linear layers, (inputs, outputs) in addmm
        name, inputs = kind.name if kind is not None else "", call.inputs
        if name in ("linear", "addmm") and len(inputs) > 1:
            weight, bias = (
                (inputs[2], inputs[0])
                if name == "addmm"
                else (inputs[1], inputs[2] if len(inputs) > 2 else None)
            )
            outputs = 1 if name == "addmm" else 0
            if weight.parameter is not None and len(weight.shape) == 2:
                found.setdefault(weight.parameter, Role(weight.parameter, outputs, 1 - outputs))
                if bias is not None and bias.parameter is not None:
                    found.setdefault(bias.parameter, Role(weight.parameter, 0, None))
        elif name == "embedding" and len(inputs) > 1 and inputs[1].parameter is not None:
            found.setdefault(inputs[1].parameter, Role(inputs[1].parameter, 0, 1))
    return found


def make_layout(
    layout: str,
    trace: FunctionTrace,
    single: Mapping[str, Placement],
    *,
    axes: Sequence[Axis],
    blocks: Sequence[str],
    repeated: Collection[str],
) -> SplitLayout:
    """Return the layout of a model whose step was traced.

    Args:
        layout: one of `LAYOUTS`
        trace: of the model
        single: placements of parameters along one axis
        axes: the tensor axes
        blocks: those of the plan
        repeated: of these, those of which there are several

    Raises:
        ValueError: no tensor that enters a repeated block has rows that divide
    """
    # rules: rows of activations, and features where tensors cross borders
    refs: Iterator[Ref] = (ref for call in trace.calls for ref in call.inputs)
    shapes = {ref.parameter: ref.shape for ref in refs if ref.parameter is not None}
    sizes = tuple(axis.size for axis in axes)
    # The first tensor that enters a repeated block; without such blocks, the first computed one.
    entering = (
        b.shapes[0] for b in trace.borders if b.module in repeated and not b.is_end and b.shapes
    )
    computed = (ref.shape for call in trace.calls for ref in call.outputs if len(ref.shape) > 1)
    at_border = next(entering, None) or next(computed, (0, 0))
    rows = _rows(layout, at_border, sizes)
    crossing = rows if len(sizes) == 1 else (*rows[:-1], Shard(len(at_border) - 1))
    gathers = (True, False, False) if layout == "tensor_3d" else ()
    rules = {}
    for block in dict.fromkeys([*blocks, ""]):
        border = (crossing,) if block in repeated else ()
        rules[block] = BlockRule(block, border, border, rows, gathers)
    roles = roles_of(trace)
    # a vector of the width of the blocks goes with the features that cross their borders
    of_features = {
        name for name, shape in shapes.items() if shape == at_border[-1:] and name not in roles
    }
    if layout in ("tensor_sequence", "context"):
        kept = {name: (each,) for name, each in single.items() if name not in of_features}
        return SplitLayout(kept if layout == "tensor_sequence" else {}, rules)
    # two and three axes: every matrix by outputs and by inputs
    placements, left = {}, []
    for name, shape in shapes.items():
        wanted = (
            (REPLICATE, Shard(0)) if name in of_features else _in_two(roles.get(name), single, name)
        )
        placed = _that_fit(wanted, shape, sizes[-2:])
        if layout == "tensor_3d":
            placed = (_gathered(placed, shape, sizes), *placed)
        if any(isinstance(each, Shard) for each in placed):
            placements[name] = placed
        if len(shape) > 1 and sum(isinstance(each, Shard) for each in placed) < len(sizes):
            left.append(name)
    return SplitLayout(placements, rules, tuple(left))


def _in_two(
    role: Role | None, single: Mapping[str, Placement], name: str
) -> tuple[Placement, Placement]:
    # The placements of a parameter along the axis of the search and the second one
    # no product: as along one axis
    own = single.get(name, REPLICATE)
    if role is None:
        return own, REPLICATE
    along = single.get(role.weight, REPLICATE)
    # a bias of a matrix that is cut by inputs is added to sums, and cut as they are
    if role.inputs is None:
        is_row = isinstance(along, Shard) and not isinstance(own, Shard)
        return (REPLICATE, Shard(0)) if is_row else (own, REPLICATE)
    if not isinstance(own, Shard):
        return REPLICATE, REPLICATE
    return own, Shard(role.inputs if own.dim == role.outputs else role.outputs)


def _that_fit(placed: Placements, shape: tuple[int, ...], sizes: Sequence[int]) -> Placements:
    # The placements, replicated along the last axes that do not divide
    # one axis after another; what does not divide stays replicated
    kept: list[Placement] = [REPLICATE] * len(sizes)
    for axis, placement in enumerate(placed):
        kept[axis] = placement
        if not divides_along(shape, kept, sizes):
            kept[axis] = REPLICATE
    return tuple(kept)


def _gathered(placed: Placements, shape: tuple[int, ...], sizes: Sequence[int]) -> Placement:
    # The slices along the first axis of what the others leave of a matrix
    if len(shape) < 2:
        return REPLICATE
    # parts of the dim that the inner axes cut, each of which this axis cuts
    for dim in range(len(shape)):
        inner = [
            (each, size)
            for each, size in zip(placed, sizes[1:], strict=True)
            if isinstance(each, Shard)
        ]
        parts = math.prod([each.parts * size for each, size in inner if each.dim == dim])
        slices = Shard(dim, parts)
        if divides_along(shape, (slices, *placed), sizes):
            return slices
    return REPLICATE


def _rows(layout: str, shape: tuple[int, ...], sizes: Sequence[int]) -> Placements:
    # Where rows are along all axes: samples if these divide, else steps
    # dims of the rows that axes cut, best first: samples (0), else steps (1)
    lead, count = shape[:-1], len(sizes)
    last = min(1, len(lead) - 1)
    choices: list[tuple[int, ...]] = [
        (0,) * count,
        (0, *(last for _ in sizes[1:])),
        (last,) * count,
    ]
    if count < 3:
        choices = [(last,)] if count == 1 else [(0, 0), (last, last)]
    without = range(count - 2, count) if count > 1 else [None]
    for dims in choices:
        rows = tuple(map(Shard, dims))
        placed = (
            [REPLICATE if i == axis else each for i, each in enumerate(rows)] for axis in without
        )
        if all(divides_along(lead, each, sizes) for each in placed):
            return rows
    cut = " or ".join(sorted({str(dim) for dims in choices for dim in dims}))
    raise ValueError(
        f"plan={layout!r} splits dim {cut} of tensors between layers, and that of the shape "
        f"{shape} does not divide for {' x '.join(map(str, sizes))} ranks: choose a size that does "
        "(samples are dim 0, the steps of a sequence dim 1), another number of ranks, or "
        "plan='tensor'"
    )


# ---- rules of blocks -----------------------------------------------------------------------------

# They place tensors that cross the block's border, and say where sums of products rest. They also
# say along which axes parameters that rest in slices are gathered for their use.
#
#     what                 border     sums       parameters                  source, arXiv
#     1-D                  replicate  replicate  by outputs, then by inputs  Shoeybi, 1909.08053
#     sequence parallel    shard(1)   shard(1)   as in 1-D                   Korthikanti, 2205.05198
#     context parallel     shard(1)   shard(1)   replicate
#     2-D, rows            shard(0)   shard(0)   by outputs, then by inputs
#     2-D, columns         shard(2)   shard(0)   by inputs, then by outputs
#     3-D, the third axis  shard(0)   shard(0)   slices, gathered            Bian, 2105.14450
#
# A tensor whose size does not divide is replicated there.


@dataclass(frozen=True)
class BlockRule:
    """The rule of one block. Placements are per tensor axis.

    Args:
        block: its name
        inputs: placements of the tensors that enter, in order; others are replicated if the block
            `has_border`
        outputs: of the tensors that leave
        sums: where sums of products rest
        gathers: whether each axis gathers parameters
        is_repeated: there are several such blocks, of which the search looks at one
    """

    block: str = ""
    inputs: tuple[Placements, ...] = ()
    outputs: tuple[Placements, ...] = ()
    sums: Placements = ()
    gathers: tuple[bool, ...] = ()
    is_repeated: bool = False

    @property
    def has_border(self) -> bool:
        """True if it places tensors that enter and leave; else they stay where they are."""
        return self.is_repeated or bool(self.inputs or self.outputs)

    @cached_property
    def splits(self) -> tuple[Placement | None, ...]:
        """By axis, where activations are split, whatever sums of parameters' gradients cost.

        That is where sums rest, or else tensors at the border.
        """
        # sums first: a border may be placed otherwise
        given = [*([self.sums] if self.sums else []), *self.inputs, *self.outputs]
        axes = max(map(len, (*given, self.gathers)), default=0)
        found = (
            next((p[axis] for p in given if isinstance(p[axis], Shard)), None)
            for axis in range(axes)
        )
        return tuple(
            p or (Shard(0) if self.gathers and self.gathers[axis] else None)
            for axis, p in enumerate(found)
        )

    @cached_property
    def gathered(self) -> tuple[bool, ...]:
        """By axis, whether parameters are gathered; empty if none are."""
        return self.gathers if any(self.gathers) else ()

    @cached_property
    def is_plain(self) -> bool:
        """True if tensors are replicated at the border, and sums too."""
        return not any(self.splits)


def rules_of(configs: Mapping[str, OpConfig], mesh: Mesh) -> dict[str, BlockRule]:
    """Return the rules of a plan's blocks along the tensor axes of `mesh`.

    None at all if every block is plain.
    """
    axes = mesh.tensor_axes

    def along(placements: Placements) -> Placements:
        return tuple(placements[axis] for axis in axes)

    rules = {
        block: BlockRule(
            block,
            tuple(map(along, config.inputs)),
            tuple(map(along, config.outputs)),
            along(config.sums) if config.sums else (),
            tuple(mesh.names[axis] in config.gathers for axis in axes) if config.gathers else (),
        )
        for block, config in configs.items()
    }
    return {} if all(rule.is_plain for rule in rules.values()) else rules


def rules_by_block(
    rules: Mapping[str, BlockRule], blocks: Collection[str], repeated: Collection[str]
) -> dict[str, BlockRule]:
    """Return the rules of those of the named `blocks` that need one.

    They have one, or run beside blocks that do, or are repeated.
    """
    return {
        name: replace(rules.get(name, BlockRule(name)), is_repeated=name in repeated)
        for name in blocks
        if name and (rules or name in repeated)
    }


def rest_of(
    rule: BlockRule, rows: tuple[int, ...] | None, shape: tuple[int, ...], now: Sequence[Placement],
    *, axis: int, sizes: Sequence[int],
) -> Placement:  # fmt: skip
    """Return where a sum along `axis` rests.

    Args:
        rule: of the block
        rows: all dims but the last of tensors at the border; None: they are not known
        shape: the full shape of the sum; all but its last dim are `rows`, maybe in another form
        now: its placements along the other axes
        axis: the axis of the sum
        sizes: of the axes
    """
    rest = rule.sums[axis] if rule.sums else REPLICATE
    # its rows are all dims but the last, and must have the dim in which sums rest
    lead = shape[:-1]
    if not isinstance(rest, Shard) or rest.dim >= len(lead if rows is None else rows):
        return REPLICATE
    # the sum has the rows in another form: follow the shard through the reshape
    if rows is not None and lead != rows:
        if math.prod(lead) != math.prod(rows) or 0 in lead:
            return REPLICATE
        found = carried(rest, rows, lead, sizes[axis])
        if found is None:
            return REPLICATE
        rest = found
    # an inner axis with the same cut: its pieces would be cut, not the other way round
    if any(
        isinstance(each, Shard) and (each.dim, each.parts) == (rest.dim, rest.parts)
        for each in now[axis + 1 :]
    ):
        return REPLICATE
    after = [*now]
    after[axis] = rest
    return rest if divides_along(shape, after, sizes) else REPLICATE


def at_border(
    rule: BlockRule, wanted: Sequence[Placements], index: int, shape: tuple[int, ...], *,
    names: Sequence[str], sizes: Sequence[int],
) -> Placements:  # fmt: skip
    """Return where tensor `index` of a border is placed: as `wanted`, if its shape divides.

    Raises:
        ValueError: it lacks a dim that is to be split; names block, tensor and axis
    """
    placed = wanted[index] if index < len(wanted) else ()
    for axis, placement in enumerate(placed):
        if isinstance(placement, Shard) and placement.dim >= len(shape):
            side = "input" if wanted is rule.inputs else "output"
            raise ValueError(
                f"{side} {index} of block {rule.block!r} has the shape {shape}, and the plan "
                f"splits its dim {placement.dim} along axis {names[axis]!r}; correct the plan"
            )
    return _that_fit(placed, shape, sizes)
