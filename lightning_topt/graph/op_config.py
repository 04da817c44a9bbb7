"""How an operator, or a block of them, is placed on a mesh: as it computes, and between steps.

A placement per axis, named as in torch's DTensor. Along the data axes of a mesh the ZeRO levels
(Rajbhandari et al., arXiv 1910.02054, section 5) are values of `Storage`:

    level   parameters    gradients     optimizer_state
    0       Replicate     Replicate     Replicate          data parallel
    1       Replicate     Replicate     Shard(0)
    2       Replicate     Shard(0)      Shard(0)
    3       Shard(0)      Shard(0)      Shard(0)

Sharded along the last data axis only, and replicated along the others, levels 2 and 3 are hybrid
sharding. What is sharded may be offloaded: kept in the memory of the host, or in a file.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the full tensor."""

    def __str__(self) -> str:
        return "replicate"


@dataclass(frozen=True)
class Shard:
    """Every rank of the axis holds one slice along `dim`.

    With `parts` the dim has that many equal parts, and a rank holds one slice of each (queries,
    keys and values in one matrix).
    """

    dim: int = 0
    parts: int = 1

    def __str__(self) -> str:
        return f"shard({self.dim})" if self.parts == 1 else f"shard({self.dim}, parts={self.parts})"


@dataclass(frozen=True)
class Partial:
    """Every rank of the axis holds a summand; the tensor is their sum."""

    def __str__(self) -> str:
        return "partial"


LAYOUT = "_topt_layout"  # attribute of a tensor that says how it is split
Placement = Replicate | Shard | Partial
Placements = tuple[Placement, ...]  # one per axis of the mesh
_SHARD = re.compile(r"shard\(([0-9]{1,3})(?:, ?parts=([1-9][0-9]{0,3}))?\)")


def parse_placement(text: object) -> Placement:
    """Read ``"replicate"``, ``"partial"``, ``"shard(0)"`` or ``"shard(0, parts=3)"``.

    Raises ValueError on anything else.
    """
    if text == "replicate":
        return Replicate()
    if text == "partial":
        return Partial()
    # few digits: what is read may come from anywhere
    if isinstance(text, str) and (found := _SHARD.fullmatch(text)):
        return Shard(int(found[1]), int(found[2] or 1))
    raise ValueError(
        f"{reprlib.repr(text)} is not a placement; write 'replicate', 'partial' or 'shard(0)'"
    )


@dataclass(frozen=True)
class Storage:
    """Placement of parameters, gradients and optimizer state between steps, one per axis.

    `offload`: the shards are in the memory of the host, where ranks are accelerators; in files,
    where they are CPUs.

    Raises ValueError where the three do not name equally many axes or one is partial. So does a
    tensor that is sharded along an axis along which one derived from it is replicated, and
    `offload` where gradients are whole.
    """

    parameters: Placements
    gradients: Placements
    optimizer_state: Placements
    offload: bool = False

    def __post_init__(self) -> None:
        # in the order in which one is derived from the other
        order = (self.parameters, self.gradients, self.optimizer_state)
        if len({len(placements) for placements in order}) != 1:
            raise ValueError(
                f"a storage has one placement per axis for each of its three tensors, got {self}"
            )
        for along in zip(*order, strict=True):
            # False before True: what is sharded stays sharded in all that is derived from it
            sharded = [isinstance(placement, Shard) for placement in along]
            if sharded != sorted(sharded) or Partial() in along:
                raise ValueError(
                    "sharded parameters need sharded gradients, and those a sharded optimizer "
                    f"state, along each axis, and none of them may be partial; got {self}"
                )
        if self.offload and not self.sharded_axes("gradients"):
            raise ValueError(f"only what is sharded (ZeRO level 2 or 3) is offloaded; got {self}")

    def __str__(self) -> str:
        kinds = ("parameters", "gradients", "optimizer_state")
        words = [f"{kind}={'x'.join(map(str, getattr(self, kind)))}" for kind in kinds]
        return ", ".join([*words, *(["offload"] if self.offload else [])])

    @classmethod
    def zero(
        cls, level: int, *, axes: int = 1, over: Iterable[int] | None = None, offload: bool = False
    ) -> Storage:
        """Return the storage of a ZeRO level on a mesh of `axes` axes.

        It is sharded along the axes `over`, None for all. Raises ValueError for a level other than
        0, 1, 2 and 3.
        """
        if level not in range(4):
            raise ValueError(f"a ZeRO level is 0, 1, 2 or 3; got {level}")
        along = frozenset(range(axes) if over is None else over)
        return _zero_storage(level, axes, along, offload)

    def sharded_axes(self, kind: str) -> tuple[int, ...]:
        """Return the indices of the axes along which `kind` is sharded.

        `kind` is ``"parameters"``, ``"gradients"`` or ``"optimizer_state"``.
        """
        return self._sharded_axes[kind]

    @cached_property
    def _sharded_axes(self) -> dict[str, tuple[int, ...]]:
        kinds = ("parameters", "gradients", "optimizer_state")
        return {
            kind: tuple(
                index
                for index, placement in enumerate(getattr(self, kind))
                if isinstance(placement, Shard)
            )
            for kind in kinds
        }

    @cached_property
    def level(self) -> int:
        """The ZeRO level along the axes that are sharded at all."""
        # each level shards one of the three more
        return sum(map(bool, self._sharded_axes.values()))

    @cached_property
    def _hash(self) -> int:
        return hash((self.parameters, self.gradients, self.optimizer_state, self.offload))

    def __hash__(self) -> int:  # searches hash configurations by the million
        return self._hash


@dataclass(frozen=True)
class OpConfig:
    """One way to place an operator, or a block whose operators are alike, on a mesh.

    Args:
        storage: where parameters, gradients and optimizer state are between steps.
        recompute: the forward runs again in the backward pass.
        compile: the forward is compiled (`techniques.compilation`).
        inputs, outputs, parameters: how it computes, a placement per axis for each tensor; empty
            for data parallelism (activations split along dim 0 over the data axes, parameters
            replicated).
        sums: placement of the sums of its products; empty for none.
        gathers: names of the axes along which it gathers parameters before it computes.
    """

    storage: Storage
    recompute: bool = False
    inputs: tuple[Placements, ...] = ()
    outputs: tuple[Placements, ...] = ()
    parameters: tuple[tuple[str, Placements], ...] = ()
    sums: Placements = ()
    gathers: tuple[str, ...] = ()
    compile: bool = False

    @cached_property
    def _hash(self) -> int:
        computes = self.inputs, self.outputs, self.parameters, self.sums, self.gathers
        return hash((self.storage, self.recompute, self.compile, *computes))

    def placed(self) -> Iterator[Placements]:
        """Yield the placements of its computation."""
        yield from (*self.inputs, *self.outputs, *(placements for _, placements in self.parameters))
        if self.sums:
            yield self.sums

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def zero(
        cls,
        level: int,
        *,
        recompute: bool = False,
        axes: int = 1,
        over: Iterable[int] | None = None,
        offload: bool = False,
    ) -> OpConfig:
        """Return the configuration of a ZeRO level; see `Storage.zero`."""
        return _stored(Storage.zero(level, axes=axes, over=over, offload=offload), recompute)


# Searches ask for these by the thousand.
@lru_cache(maxsize=1024)
def _zero_storage(level: int, axes: int, along: frozenset[int], offload: bool) -> Storage:
    # level 1 shards the optimizer state, 2 the gradients too, 3 the parameters too
    def placed(needed: int) -> Placements:
        return tuple(
            Shard(0) if level >= needed and axis in along else Replicate() for axis in range(axes)
        )

    return Storage(placed(3), placed(2), placed(1), offload)


@lru_cache(maxsize=1024)
def _stored(storage: Storage, recompute: bool) -> OpConfig:
    return OpConfig(storage, recompute)
