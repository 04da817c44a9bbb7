"""Rules of a block say where its tensors are along tensor axes, beside its parameters.

They place tensors that cross the block's border, and say where sums of products rest. They also say
along which axes parameters that rest in slices are gathered for their use.

    what                 border     sums       parameters                  source, arXiv
    1-D                  replicate  replicate  by outputs, then by inputs  Shoeybi, 1909.08053
    sequence parallel    shard(1)   shard(1)   as in 1-D                   Korthikanti, 2205.05198
    context parallel     shard(1)   shard(1)   replicate
    2-D, rows            shard(0)   shard(0)   by outputs, then by inputs
    2-D, columns         shard(2)   shard(0)   by inputs, then by outputs
    3-D, the third axis  shard(0)   shard(0)   slices, gathered            Bian, 2105.14450

A tensor whose size does not divide is replicated there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig, Placement, Placements, Replicate, Shard
from lightning_topt.techniques.tensor_parallel.layout import REPLICATE, pieces
from lightning_topt.techniques.tensor_parallel.op_rules.shapes import carried


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


def divides_along(
    shape: Sequence[int], placements: Sequence[Placement], sizes: Sequence[int]
) -> bool:
    """Return whether a tensor of this shape can be cut so."""
    found = pieces(placements, sizes)
    return found is not None and all(
        shape[dim] and shape[dim] % count == 0 for dim, count in found.items()
    )


def at_border(
    rule: BlockRule, wanted: Sequence[Placements], index: int, shape: tuple[int, ...], *,
    names: Sequence[str], sizes: Sequence[int],
) -> Placements:  # fmt: skip
    """Return where tensor `index` of a border is placed: as `wanted`, if its shape divides.

    Raises:
        ValueError: it lacks a dim that is to be split; names block, tensor and axis
    """
    placed: list[Placement] = [REPLICATE] * len(sizes)
    for axis, placement in enumerate(wanted[index] if index < len(wanted) else ()):
        if not isinstance(placement, Shard):
            continue
        if placement.dim >= len(shape):
            side = "input" if wanted is rule.inputs else "output"
            raise ValueError(
                f"{side} {index} of block {rule.block!r} has the shape {shape}, and the plan "
                f"splits its dim {placement.dim} along axis {names[axis]!r}; correct the plan"
            )
        placed[axis] = placement
        # one axis after another: those that divide stay
        if not divides_along(shape, placed, sizes):
            placed[axis] = Replicate()
    return tuple(placed)
