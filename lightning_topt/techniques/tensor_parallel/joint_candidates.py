"""Modules that can run the batches of all ranks of a tensor group at once, for a split of their
parameters.

A block whose parameters are split is one; elsewhere, the smallest module around all uses of a
parameter whose arguments and results are whole. Samples are where sizes of a tensor grow with the
batch: one dim, as long as the batch. What has none must not depend on the batch, nor on random
numbers, for it has to be equal on all ranks. Whether samples meet inside is seen when the step is
captured so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from lightning_topt.graph.joint_module import JointModule
from lightning_topt.graph.op_config import Placement, Shard
from lightning_topt.techniques.tensor_parallel.function_trace import Border, FunctionTrace
from lightning_topt.techniques.tensor_parallel.sample_rows import DRAWING
from lightning_topt.techniques.tensor_parallel.split_prices import SplitPrices
from lightning_topt.techniques.tensor_parallel.split_walk import walk_split

Dims = tuple[int | None, ...]
Joint = tuple[dict[str, Placement], tuple[JointModule, ...]]


def find_joint(
    trace: FunctionTrace,
    placements: Mapping[str, Placement],
    prices: SplitPrices,
    *,
    regions: Sequence[Sequence[str]],
    samples: tuple[int, int],
) -> Joint:
    """Return those of `placements` whose parameters are in modules that may run several batches,
    and these modules.

    `regions` are blocks that are split alike, as in `SplitModel`; `samples` the sizes of the
    batches that were traced, first and last.
    """
    borders, repeated = (
        _Borders(trace, samples),
        [block for region in regions[1:] for block in region],
    )
    found: dict[str, JointModule] = {}
    kept: dict[str, Placement] = {}
    for first, *others in regions[1:]:
        dims = borders.dims(first)
        for block in (first, *others):
            own = {name: each for name, each in placements.items() if name.startswith(f"{block}.")}
            if own and dims is not None:
                kept, found[block] = kept | own, JointModule(block, *dims)
    once = [
        name for name in placements if not any(name.startswith(f"{block}.") for block in repeated)
    ]
    split = _split_numbers(trace, placements, prices, repeated) if once else set[int]()
    for name in once:
        for module in _around(trace, name):
            if any(block.startswith(f"{module}.") for block in repeated):
                break
            dims = borders.dims(module)
            if dims is not None and borders.numbers(module).isdisjoint(split):
                kept[name], found[module] = placements[name], JointModule(module, *dims)
                break
    outermost = (
        each
        for each in found.values()
        if not any(o is not each and o.holds(each.module) for o in found.values())
    )
    return kept, tuple(outermost)


def _around(trace: FunctionTrace, parameter: str) -> Iterator[str]:
    """The modules around all calls that read a parameter, innermost first."""
    stacks = [
        call.stack for call in trace.calls if any(ref.parameter == parameter for ref in call.inputs)
    ]
    shared: list[str] = []
    for several in zip(*stacks, strict=False):
        if len(set(several)) > 1:
            break
        shared.append(several[0])
    return iter(shared[::-1])


def _split_numbers(
    trace: FunctionTrace,
    placements: Mapping[str, Placement],
    prices: SplitPrices,
    repeated: Sequence[str],
) -> set[int]:
    """Tensors that are split between the calls of all that is there once."""
    calls, whole = trace.calls_of("", repeated), trace.whole_at("", repeated)
    found: set[int] = set()
    for placed in walk_split(calls, prices, placements, whole=whole):
        found |= {
            r.number
            for r, p in zip(placed.call.inputs, placed.placements, strict=True)
            if isinstance(p, Shard)
        }
        if placed.outcome is not None:
            outputs = zip(placed.call.outputs, placed.outcome.outputs, strict=True)
            found |= {ref.number for ref, place in outputs if isinstance(place, Shard)}
    return found


class _Borders:
    """The tensors that cross the borders of modules, in two passes with batches of the sizes
    `samples`.
    """

    def __init__(self, trace: FunctionTrace, samples: tuple[int, int]) -> None:
        self._samples, self._constant = samples, _constants(trace)
        self._first, self._last = _by_module(trace.first_borders), _by_module(trace.borders)

    def dims(self, module: str) -> tuple[Dims, Dims] | None:
        """Return the dims of samples of arguments and results, equal for all calls; None where it
        cannot be joint.
        """
        first, last = self._first.get(module, []), self._last.get(module, [])
        if not last or len(first) != len(last) or self._samples[0] == self._samples[1]:
            return None
        found: dict[bool, set[Dims]] = {False: set(), True: set()}
        for one, other in zip(first, last, strict=True):
            dims = self._of_border(one, other)
            if dims is None:
                return None
            found[other.is_end].add(dims)
        if any(len(each) != 1 for each in found.values()) or not any(
            dim is not None for dim in min(found[False])
        ):
            return None
        return min(found[False]), min(found[True])

    def numbers(self, module: str) -> set[int]:
        """Return the tensors that cross the borders of a module."""
        return {number for border in self._last.get(module, ()) for _, number in border.leaves}

    def _of_border(self, first: Border, last: Border) -> Dims | None:
        if first.is_end != last.is_end or len(first.leaves) != len(last.leaves) or last.hides:
            return None
        found: list[int | None] = []
        for (small, _), (large, number) in zip(first.leaves, last.leaves, strict=True):
            if len(small) != len(large):
                return None
            grow = [
                dim
                for dim, sizes in enumerate(zip(small, large, strict=True))
                if sizes[0] != sizes[1]
            ]
            if len(grow) > 1 or (grow and (small[grow[0]], large[grow[0]]) != self._samples):
                return None
            if not grow and not last.is_end and number not in self._constant:
                return None
            found.append(grow[0] if grow else None)
        return tuple(found)


def _by_module(borders: Collection[Border]) -> dict[str, list[Border]]:
    found: dict[str, list[Border]] = {}
    for border in borders:
        found.setdefault(border.module, []).append(border)
    return found


def _constants(trace: FunctionTrace) -> set[int]:
    """Tensors that are made of parameters, buffers and nothing else."""
    found, others = set(trace.constants), set[int]()
    for call in trace.calls:
        for ref in call.inputs:
            if ref.parameter is not None:
                found.add(ref.number)
            elif ref.number not in found:
                others.add(ref.number)
        varies = call.func in DRAWING or any(ref.number in others for ref in call.inputs)
        for ref in call.outputs:
            (others if varies else found).add(ref.number)
            if varies:
                found.discard(ref.number)
    return found
