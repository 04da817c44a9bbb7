"""`PlanCosts` as a `ChainTable`: the blocks of a model as a chain, to be searched.

The block ``""`` around them has one configuration (`Chain.root`). A block's bytes in each phase
(see `costs.lifetimes`) become a few numbers: what is there all the step; what while later blocks
run forward, and while they run backward; what before and after these; and the peaks while it runs.

- What a block has above these in phases of other blocks (a buffer that the next block still needs)
  is charged to the block that runs then, at the most of any configuration (`Choices.beside`).
- Buffers of sharded blocks live until the next sharded block: blocks with unsharded gradients
  between them are charged the largest (`Choices.between`).

So the table is an upper bound of what blocks keep, and equal to it where they do not differ in
that. Plans that are found are evaluated by `PlanCosts` again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_topt.costs.chain_table import Array, BlockCosts, ChainTable
from lightning_topt.costs.lifetimes import (
    BACKWARD,
    FORWARD,
    FORWARD_OVER,
    ONCE,
    REBUILD,
    UPDATE,
    Phase,
)
from lightning_topt.costs.sizes import ROOT
from lightning_topt.frontier.chain_search import search_meshes
from lightning_topt.frontier.pareto import pareto_rows_2
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.techniques.plan_costs import RESULTS, PlanBatch, PlanCosts, Rows
from lightning_topt.techniques.technique import Neighbours, Technique

# the error bound of a search that was given up, which can state none; files hold no infinities
NO_BOUND = 1e9
_PRICES = 96
_FIRST = 12  # every so many-th price is tried first


@dataclass(frozen=True)
class FoundPlans:
    """Plans on the frontier of several chains, and `error_bound` as in `Frontier`."""

    batches: tuple[PlanBatch, ...]
    error_bound: float


def search_chains(
    chains: Sequence[Chain], *, max_seconds: float, epsilon: float = 0.0
) -> FoundPlans:
    """Return the plans that no plan of any of `chains` beats in both seconds and bytes.

    As far as `max_seconds` allow, or but for the share `epsilon`.
    """
    candidates = [(chain, lambda chain=chain: chain.table) for chain in chains]
    found = search_meshes(candidates, max_seconds=max_seconds, epsilon=epsilon)
    # plans of each chain, as rows of choices by position
    rows: dict[Chain, list[Sequence[int]]] = {}
    for point in found.points:
        rows.setdefault(point.label, []).append([*point.choice.values()])
    batches = (chain.batch(np.array(some, np.intp)) for chain, some in rows.items())
    return FoundPlans(tuple(batches), min(found.error_bound, NO_BOUND))


@dataclass(frozen=True, eq=False)
class Chain:
    """Plans that give the block ``""`` the configuration `root`.

    Every other block has one of those of `choices`.
    """

    choices: Choices
    root: OpConfig

    @property
    def costs(self) -> PlanCosts:
        """The costs of its plans."""
        return self.choices.costs

    def batch(self, rows: Rows) -> PlanBatch:
        """Return plans of `rows` (n, position): indices into configurations of the block there."""
        configs = {
            name: (several[:1] if name != ROOT else [self.root])
            for name, several in self.choices.configs.items()
        }
        # blocks with a place in the chain have their choice, all others one configuration
        configs |= {block: self.choices.configs[block] for block in self.choices.positions if block}
        # (n, block) from (n, position)
        home = {block: k for k, block in enumerate(self.choices.positions) if block}
        nowhere = np.zeros(len(rows), np.intp)
        plans = np.stack(
            [rows[:, home[name]] if name in home else nowhere for name in configs], axis=1
        )
        return PlanBatch(self.costs, configs, plans)

    @cached_property
    def table(self) -> ChainTable:
        """The costs. Blocks that never run in forward take their first configuration."""
        fixed = self._fixed_bytes
        always = float(fixed.min())  # in every phase; the rest is beside blocks that run
        beside = fixed - always + self.choices.beside
        # bytes (position, phase of its segment), and times of the root (position, 3)
        own, root = beside[self.choices.own], self.costs.block_times(ROOT, self.root).T
        between = self.choices.between[self.choices.own]
        # two keys: by what decides the costs, which is cheap, then by the costs themselves
        seen: dict[Hashable, int] = {}
        distinct: dict[tuple[bytes, ...], int] = {}
        blocks: list[BlockCosts] = []
        order = []
        # positions of equal costs share one entry of the table
        for k, kind in enumerate(self.choices.kinds):
            key = kind, own[k].tobytes(), root[k].tobytes(), between[k].tobytes()
            if key not in seen:
                columns = self._columns(k, own[k], root[k], between[k])
                seen[key] = distinct.setdefault(
                    tuple(column.tobytes() for column in columns.values()), len(blocks)
                )
                if seen[key] == len(blocks):
                    block = self.choices.positions[k]
                    configs = tuple(self.choices.configs[block]) if block else (self.root,)
                    blocks.append(BlockCosts(configs, **columns))
            order.append(seen[key])
        return ChainTable(
            tuple(blocks),
            tuple(order),
            fixed_seconds=self.costs.plan_seconds({**self.choices.most, ROOT: self.root}),
            fixed_bytes=always,
            update_bytes=max(
                float(beside[self.costs.step.phases.position[phase]]) for phase in ONCE
            ),
        )

    @property
    def _fixed_bytes(self) -> Array:
        # Bytes (phase,) of the root and of what all blocks keep together
        step, usual = self.costs.step, {**self.choices.most, ROOT: self.root}
        own = {RESULTS} if self.choices.mixes else set()
        # (phase,)
        together = step.phases.add_up(
            each for each in self.costs.plan_lifetimes(usual) if each.kind not in own
        )
        # what only some plans have is counted for all: an upper bound
        for technique, blocks in self.choices.rarer.items():
            if technique not in self.costs.techniques(self.root):
                together = together + step.phases.add_up(technique.plan_lifetimes(step, blocks))
        return together + self.choices.block_memory(ROOT, self.root)

    def _columns(self, k: int, beside: Array, root: Array, between: Array) -> dict[str, Any]:
        """Return the costs (config,) of the block at position `k`, by their names in `BlockCosts`.

        On grids, nanoseconds and bytes, on which those of equal blocks are equal.

        Args:
            k: the position.
            beside: bytes (phase,) of others.
            root: the times of the root there (3,).
            between: bytes (phase,) beside it of sharded blocks, where its own gradients are
                unsharded.
        """
        numbers = self.choices.bytes.get(k)
        # bytes while it runs (config, phase)
        if numbers is None:  # where the buffers of the nearest block are listed
            listed_beside = self.choices.beside[self.choices.own[k]]
            own = (beside + np.maximum(between - listed_beside, 0.0))[None]
        else:
            # only a configuration with unsharded gradients has buffers of sharded blocks beside it
            whole = np.array(
                [_is_whole(config) for config in self.choices.configs[self.choices.positions[k]]]
            )
            own = numbers.own + beside + np.where(whole[:, None], between, 0.0)
        # (2, config): the most in forward, the most in backward
        humps = np.maximum(
            np.stack([own[:, : len(FORWARD)].max(axis=1), own[:, len(FORWARD) :].max(axis=1)]), 0.0
        )
        if numbers is None:
            times, listed = root[:, None], np.zeros((4, 1))
        else:
            times = self.choices.times[k] + root[:, None]
            listed = np.stack([numbers.static, numbers.kept, numbers.late, numbers.held])
        # nanoseconds and bytes
        seconds = zip(("seconds", "backward", "exchange"), np.round(times, 9), strict=True)
        names = "static", "kept", "late", "held", "forward_hump", "hump"
        sizes = zip(names, np.round(np.concatenate([listed, humps])), strict=True)
        return {**dict(seconds), **dict(sizes)}


@dataclass(frozen=True, eq=False)
class Choices:
    """Configurations that blocks may have beside one another, and what chains of them share."""

    costs: PlanCosts
    configs: Mapping[str, Sequence[OpConfig]]

    @cached_property
    def positions(self) -> tuple[str, ...]:
        """The block that has a choice at each position of the chain; ``""`` where there is none."""
        spans = self.costs.step.segments.of_block
        # a block is at home in its first segment
        homes = {spans[name][0]: name for name in self.configs if name != ROOT and name in spans}
        return tuple(homes.get(k, ROOT) for k in range(self.costs.step.segments.count))

    @cached_property
    def most(self) -> dict[str, OpConfig]:
        """The plan in which blocks keep the most together.

        It shares the least of the work of the update, but shares it.
        """
        return {
            name: min(configs, key=lambda config: (config.storage.level == 0, config.storage.level))
            for name, configs in self.configs.items()
        }

    @cached_property
    def rarer(self) -> dict[Technique, set[str]]:
        """The techniques that only other plans than `most` have, and blocks that may have them."""
        found: dict[Technique, set[str]] = {}
        # many blocks share a list of configurations: each list is looked at once
        usual = {t for config in self.most.values() for t in self.costs.techniques(config)}
        of_list: dict[int, set[Technique]] = {}
        for name, configs in self.configs.items():
            if id(configs) not in of_list:
                of_list[id(configs)] = {
                    t for config in configs for t in self.costs.techniques(config)
                } - usual
            for technique in of_list[id(configs)]:
                found.setdefault(technique, set()).add(name)
        return found

    @cached_property
    def bytes(self) -> dict[int, BlockBytes]:
        """Bytes of the block at each position that has one."""
        known: dict[Hashable, tuple[int, BlockBytes]] = {}
        found = {}
        for home, block in enumerate(self.positions):
            if block:
                # alike blocks with equal neighbours differ by their place alone
                key = self.costs.step.alike[block], *self._near(block, home)
                if key not in known:
                    known[key] = home, self._block_bytes(block, home)
                first, numbers = known[key]
                found[home] = _moved(numbers, home - first)
        return found

    @cached_property
    def kinds(self) -> tuple[Hashable, ...]:
        """Something for each position that is equal where the bytes and times of the blocks are."""
        alike, timed_alike = self.costs.step.alike, self.costs.timed_alike
        return tuple(
            (alike[block], *self._near(block, home), timed_alike[block]) if block else None
            for home, block in enumerate(self.positions)
        )

    @cached_property
    def beside(self) -> Array:
        """The bytes that all blocks have in phases of others, at most (phase,)."""
        phases = self.costs.step.phases
        total = np.zeros(len(phases.order))
        for numbers in self.bytes.values():
            for phase, size in numbers.beside.items():
                if phase in phases.position:
                    total[phases.position[phase]] += size
        return total

    @cached_property
    def times(self) -> dict[int, Array]:
        """The times c, b and u of the block at each position that has one (3, config)."""
        known: dict[tuple[int, int], Array] = {}
        found = {}
        for home, block in enumerate(self.positions):
            if block:
                configs = self.configs[block]
                key = self.costs.timed_alike[block], id(configs)
                # blocks of equal times that share a list share an array
                if key not in known:
                    known[key] = np.array(
                        [self.costs.block_times(block, config).sum(axis=1) for config in configs]
                    ).T
                found[home] = known[key]
        return found

    @cached_property
    def own(self) -> NDArray[np.intp]:
        """The indices of the phases of each segment (segment, phase)."""
        position = self.costs.step.phases.position
        return np.array(
            [[position[kind, k] for kind in FORWARD + BACKWARD] for k in range(len(self.positions))]
        )

    def neighbours(self, block: str, config: OpConfig) -> Neighbours:
        """Return the blocks beside `block` where all are sharded, if it is.

        For the root, one that it has in any case.
        """
        if not config.storage.sharded_axes("gradients"):
            return Neighbours()
        beside = self._uniform_neighbours[block]
        if (
            block == ROOT
            and beside.following is not None
            and any(map(_is_whole, self.configs[beside.following]))
        ):
            return replace(beside, following=None)
        return beside

    def block_memory(self, block: str, config: OpConfig) -> Array:
        """Return the bytes of a block in each phase (phase,).

        Where sharded and unsharded gradients mix, the buffer of its updated parameters is its own.
        A sum over all blocks, as if all had one, would be far above what most plans have.
        """
        size = self.costs.block_memory(block, config, self.neighbours(block, config))
        if self.mixes:
            size = size.copy()
            size[self.costs.step.phases.position[UPDATE]] += self.costs.temporaries(block, config)[
                2
            ]
        return size

    def split_by_first(self) -> tuple[Choices, ...]:
        """Return the choices in which the block that is gathered first is sharded, and the others.

        Until it is gathered the buffer of a sharded root lives.
        """
        first = self._uniform_neighbours[ROOT].following
        if first is None:
            return (self,)
        halves = (
            [config for config in self.configs[first] if _is_whole(config) == whole]
            for whole in (False, True)
        )
        return tuple(
            replace(self, configs={**self.configs, first: half}) for half in halves if half
        )

    @cached_property
    def between(self) -> Array:
        """The bytes (phase,) that a block with unsharded gradients has beside it of sharded ones.

        They come above what these have where all are sharded: the largest buffer of a block before
        it, and of one after it.
        """
        # (2, phase): of blocks before it, and after it
        phases, found = self.costs.step.phases, np.zeros((2, len(self.costs.step.phases.order)))
        if not self.mixes:
            return np.asarray(found[0])
        segment = phases.segment
        for home, block in self._ends:
            sharded = (
                config
                for config in self.configs[block]
                if not _is_whole(config) and not config.recompute
            )
            for config in sharded:
                # above what it has where its neighbours are sharded as well
                usual = self.costs.block_memory(block, config, self._uniform_neighbours[block])
                more = self.costs.block_memory(block, config) - usual
                for side, of_others in enumerate(
                    (segment > home, (segment >= 0) & (segment < home))
                ):
                    found[side] = np.maximum(found[side], np.where(of_others, more, 0.0))
        return np.asarray(found.sum(axis=0))

    @property
    def _ends(self) -> list[tuple[int, str]]:
        # The first and the last position of blocks that are alike
        ends: dict[Hashable, list[tuple[int, str]]] = {}
        for home, block in enumerate(self.positions):
            if block:
                key = self.costs.step.alike[block], id(self.configs[block])
                ends[key] = [*ends.get(key, [])[:1], (home, block)]
        return [end for pair in ends.values() for end in pair]

    @cached_property
    def mixes(self) -> bool:
        """True if some configurations shard gradients and others do not."""
        distinct = {id(several): several for name, several in self.configs.items() if name != ROOT}
        return len({_is_whole(config) for configs in distinct.values() for config in configs}) > 1

    @cached_property
    def _uniform_neighbours(self) -> dict[str, Neighbours]:
        # as if all blocks were sharded
        sharded = OpConfig.zero(3, axes=len(self.costs.step.mesh.axes))
        return self.costs.neighbours(dict.fromkeys(self.configs, sharded))

    @cached_property
    def _whole(self) -> bool:
        # True if no configuration shards gradients
        distinct = {id(several): several for several in self.configs.values()}
        return all(_is_whole(config) for configs in distinct.values() for config in configs)

    def _near(self, block: str, home: int) -> tuple[int | None, ...]:
        beside, spans = self._uniform_neighbours[block], self.costs.step.segments.of_block
        # relative to the block, so that repeated layers have equal keys
        names = beside.previous, beside.following
        return tuple(None if name is None else spans[name][0] - home for name in names)

    def _block_bytes(self, block: str, home: int) -> BlockBytes:
        phases, configs = self.costs.step.phases, self.configs[block]
        # (config, phase)
        size = np.array([self.block_memory(block, config) for config in configs])
        segment, forward, places = phases.segment, phases.is_forward, np.arange(len(phases.order))
        over = places == phases.position[FORWARD_OVER]
        # phases of its own segment, those of the step as a whole, later blocks forward and backward
        own, once = segment == home, (segment == -1) & ~over
        later, outside = ((segment > home) & forward) | over, ~own & ~over & (segment <= home)
        backward = (segment > home) & ~forward
        # New buckets are as large as all gradients: what blocks with
        # unsharded gradients have beside one another then is exact.
        listed = once & ~((places == phases.position[REBUILD]) & self._whole)
        sides = [outside & ~once & forward, outside & ~once & ~forward]
        most = np.max(
            [size[:, listed].max(axis=1), *(size[:, s].min(axis=1) for s in sides if s.any())],
            axis=0,
        )
        between = [
            size[:, some].min(axis=1) if some.any() else np.full(len(configs), np.inf)
            for some in (later, backward)
        ]
        # what is there all the step, then what each part of it has above that
        static = np.minimum(most, np.min(between, axis=0))
        late, held, kept = (
            most - static,
            *(np.where(np.isfinite(each), each - static, 0.0) for each in between),
        )
        # what these numbers do not list is added to `beside` for all plans: bytes are never too few
        listed_then = np.select([later, backward], [held[:, None], kept[:, None]], late[:, None])
        above = np.where(own, 0.0, size - static[:, None] - listed_then).max(axis=0)
        beside = {phases.order[index]: float(above[index]) for index in np.flatnonzero(above >= 1)}
        return BlockBytes(static, held, kept, late, size[:, own] - static[:, None], beside)


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of a block under each of its configurations.

    Args:
        static, held, kept, late: (config,): all the step; while later blocks run forward; while
            they run backward; before and after these.
        own: (config, phase of its segment).
        beside: phases of others in which a configuration has more, with the most that any has.
            More is: than static + held or static + kept between its passes, or than static + late
            outside them.
    """

    static: Array
    held: Array
    kept: Array
    late: Array
    own: Array
    beside: Mapping[Phase, float]


def _is_whole(config: OpConfig) -> bool:
    return not config.storage.sharded_axes("gradients")


def _moved(numbers: BlockBytes, by: int) -> BlockBytes:
    if by == 0:
        return numbers
    beside = {
        phase if phase in ONCE else (phase[0], phase[1] + by): size
        for phase, size in numbers.beside.items()
    }
    return replace(numbers, beside=beside)


# ---- what shows that no plan of a pipeline can beat known plans
#
# A plan that none of the known ones beats takes less time than some known plan, and fewer bytes
# than the next larger one: it lies below a corner (T, M). Take any price l of a byte: seconds t and
# bytes m of the plan have t + l m < T + l M. Where a lower bound of t + l m is not below T + l M
# for one l, no plan lies below that corner.


@dataclass(eq=False)
class KnownPlans:
    """Costs of plans (n, [seconds, bytes]) that no other one of them beats.

    Seconds ascend, bytes descend.
    """

    costs: Array
    # what was worked out before: by share, and by the identity of an array of prices
    _scaled: dict[float, KnownPlans] = field(default_factory=dict, init=False, repr=False)
    _known_corners: dict[int, tuple[Array, Array, Array]] = field(
        default_factory=dict, init=False, repr=False
    )

    @classmethod
    def of(cls, batches: Iterable[PlanBatch]) -> KnownPlans:
        """Return the best plans of `batches`."""
        return cls.best(np.stack([batch.seconds, batch.peak_bytes], axis=1) for batch in batches)

    @classmethod
    def best(cls, parts: Iterable[Array]) -> KnownPlans:
        """Return the best plans of several (n, [seconds, bytes])."""
        costs = np.concatenate([np.zeros((0, 2)), *parts])
        return cls(costs[pareto_rows_2(costs[:, 0], costs[:, 1])])

    def scaled(self, share: float) -> KnownPlans:
        """Return these with `share` of their costs.

        A share below 1 leaves out what is better by less than that.
        """
        if share == 1:
            return self
        if share not in self._scaled:
            self._scaled[share] = KnownPlans(self.costs * share)
        return self._scaled[share]

    def may_gain_above(self, fewest_bytes: float, prices: Array, least: Array) -> bool:
        """Return whether a plan above these bounds may beat all known plans; False is certain.

        No plan has fewer than `fewest_bytes`. At `prices`, the first of which is 0, none has less
        than `least` (price,) of seconds + price * bytes.
        """
        # cheap: faster or smaller than all known plans
        if not len(self.costs) or fewest_bytes < self.costs[-1, 1] or least[0] < self.costs[0, 0]:
            return True
        # Costs of the corners (corner, price) at all prices but the first, and at every so many-th.
        if id(prices) not in self._known_corners:
            seconds, sizes = self.costs.T
            corners = seconds[1:, None] + prices[1:] * sizes[:-1, None]
            self._known_corners[id(prices)] = (
                prices,
                corners,
                np.ascontiguousarray(corners[:, ::_FIRST]),
            )
        corners, some = self._known_corners[id(prices)][1:]
        # Few prices rule out nearly all corners.
        rows = np.flatnonzero((some > least[1::_FIRST]).all(axis=1))
        return bool((corners[rows] > least[1:]).all(axis=1).any())

    @cached_property
    def few_prices(self) -> Array:
        """Some of `prices`, which rule out nearly all that these do."""
        return self.prices[::_FIRST]

    @cached_property
    def prices(self) -> Array:
        """Prices of a byte: none, then those between the slopes of the known plans and beyond."""
        steps = np.diff(self.costs, axis=0)
        slopes = -steps[:, 0] / steps[:, 1] if len(steps) else np.ones(1)
        return np.concatenate(
            [np.zeros(1), np.geomspace(slopes.min() / 4, slopes.max() * 4, _PRICES)]
        )


def filled(costs: Array, count: int) -> Array:
    """Return costs of a block's configurations (..., C), the last one repeated up to `count`."""
    return costs[..., np.minimum(np.arange(count), costs.shape[-1] - 1)]
