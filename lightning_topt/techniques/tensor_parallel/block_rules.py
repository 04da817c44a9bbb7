"""Rules of a block say where its tensors are along tensor axes, beside its parameters: where they
cross its border, where sums of products rest, and along which axes parameters that rest in slices
are gathered for their use.

    what                 border     sums       parameters                  source, arXiv
    1-D                  replicate  replicate  by outputs, then by inputs  Shoeybi, 1909.08053
    sequence parallel    shard(1)   shard(1)   as in 1-D                   Korthikanti, 2205.05198
    context parallel     shard(1)   shard(1)   replicate
    2-D, rows            shard(0)   shard(0)   by outputs, then by inputs
    2-D, columns         shard(2)   shard(0)   by inputs, then by outputs
    3-D, the third axis  shard(0)   shard(0)   slices, gathered            Bian, 2105.14450

A tensor whose size does not divide is whole there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig, Placement, Placements, Replicate, Shard
from lightning_topt.techniques.tensor_parallel.kinds_shape import carried
from lightning_topt.techniques.tensor_parallel.layout import REPLICATE, pieces


@dataclass(frozen=True)
class BlockRule:
    """The rule of block `block`: placements per tensor axis of the tensors that enter and leave it,
    in order, of sums, and whether an axis gathers parameters. Tensors of a border that are not
    named are whole, where the block `has_border`.

    `is_joint`: it runs the batches of all ranks of the one axis, which bring one each
    (`joint_run`).
    """

    block: str = ""
    inputs: tuple[Placements, ...] = ()
    outputs: tuple[Placements, ...] = ()
    sums: Placements = ()
    gathers: tuple[bool, ...] = ()
    is_repeated: bool = False
    is_joint: bool = False

    @property
    def has_border(self) -> bool:
        """Whether it says where tensors are that enter and leave the block; elsewhere they stay
        where they are.
        """
        return self.is_repeated or bool(self.inputs or self.outputs)

    @cached_property
    def splits(self) -> tuple[Placement | None, ...]:
        """By axis, where activations are split whatever sums of parameters' gradients cost: as sums
        rest, or at the border.
        """
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
        """By axis, whether parameters are gathered; empty where none are."""
        return self.gathers if any(self.gathers) else ()

    @cached_property
    def is_plain(self) -> bool:
        """Whether tensors are whole at the border, and sums too."""
        return not any(self.splits)


def rules_of(configs: Mapping[str, OpConfig], mesh: Mesh) -> dict[str, BlockRule]:
    """Return the rules of the blocks of a plan along the tensor axes of `mesh`; none where all of
    them are plain.
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
    """Return the rules of all named `blocks` that have one, or need one beside those that do, or
    are there several times.
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
    """Return where a sum along `axis` rests whose whole `shape` has all but its last dim in common
    with `rows`, the dims of the tensors at the border of the block, or has them in another form;
    None: the dims are not known.
    """
    rest = rule.sums[axis] if rule.sums else REPLICATE
    lead = shape[:-1]
    if not isinstance(rest, Shard) or rest.dim >= len(lead if rows is None else rows):
        return REPLICATE
    if rows is not None and lead != rows:
        if math.prod(lead) != math.prod(rows) or 0 in lead:
            return REPLICATE
        found = carried(rest, rows, lead, sizes[axis])
        if found is None:
            return REPLICATE
        rest = found
    if any(_is_same_cut(each, rest) for each in now[axis + 1 :]):
        return REPLICATE  # pieces of the inner axis would be cut, not the other way round
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
    """Return where tensor `index` of a border is, of this whole shape: as `wanted`, whole along
    axes that do not divide it.

    Raises ValueError for a dim that it does not have; names block, tensor and axis.
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
        if not divides_along(shape, placed, sizes):
            placed[axis] = Replicate()
    return tuple(placed)


def _is_same_cut(inner: Placement, rest: Shard) -> bool:
    return isinstance(inner, Shard) and inner.dim == rest.dim and inner.parts == rest.parts
