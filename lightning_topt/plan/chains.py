"""PlanCosts -> ChainTable: the blocks of a model as a chain, for one configuration of the block ``""`` around them.

A block's bytes in each phase (see `costs.lifetimes`) become four numbers: what is there all the step, what from its forward to
its backward, what before and after these, and the peak while it runs. What it has in phases of other blocks above these (a
buffer that the next block still needs) is charged to the block that runs then, at the most that any configuration has. So the
table is an upper bound of what blocks keep, and equal to it where they do not differ in that; plans that are found are
evaluated by `PlanCosts` again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_topt.costs.chain_table import BlockCosts, ChainTable
from lightning_topt.costs.cost_table import Array
from lightning_topt.costs.lifetimes import BACKWARD, FORWARD, FORWARD_OVER, ONCE, REBUILD, Phase
from lightning_topt.costs.sizes import ROOT
from lightning_topt.frontier.mesh_frontier import search_meshes
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.techniques.plan_costs import PlanCosts
from lightning_topt.techniques.technique import Neighbours


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of a block under each of its configurations: (config,) each, and `own` (config, phase of its segment).

    `beside` are the phases of others in which a configuration has more than static + kept between its passes, or than
    static + late outside them, with the most that any has.
    """

    static: Array
    kept: Array
    late: Array
    own: Array
    beside: Mapping[Phase, float]


@dataclass(frozen=True)
class Choices:
    """Configurations that the blocks of a model may have beside one another; what chains of them share."""

    costs: PlanCosts
    configs: Mapping[str, Sequence[OpConfig]]

    @cached_property
    def positions(self) -> tuple[str, ...]:
        """The block that is decided about at each position of the chain; ``""`` where there is none."""
        spans = self.costs.step.segments.of_block
        homes = {spans[name][0]: name for name in self.configs if name != ROOT and name in spans}
        return tuple(homes.get(k, ROOT) for k in range(self.costs.step.segments.count))

    @cached_property
    def most(self) -> dict[str, OpConfig]:
        """The plan that shares the least of the work of the update, but shares it: the most that blocks keep together."""
        return {
            name: min(configs, key=lambda config: (config.storage.level == 0, config.storage.level))
            for name, configs in self.configs.items()
        }

    @cached_property
    def bytes(self) -> dict[int, BlockBytes]:
        """Bytes of the block at each position that has one."""
        known: dict[tuple[int | None, ...], tuple[int, BlockBytes]] = {}
        found = {}
        for home, block in enumerate(self.positions):
            if block:
                key = self.costs.step.alike[block], *self._near(block, home)
                if key not in known:
                    known[key] = home, self._block_bytes(block, home)
                first, numbers = known[key]
                found[home] = _moved(numbers, home - first)
        return found

    @cached_property
    def beside(self) -> Array:
        """What all blocks have in phases of others, at most (phase,)."""
        phases = self.costs.step.phases
        total = np.zeros(len(phases.order))
        for numbers in self.bytes.values():
            for phase, size in numbers.beside.items():
                if phase in phases.position:
                    total[phases.position[phase]] += size
        return total

    @cached_property
    def times(self) -> dict[int, Array]:
        """c, b and u of the block at each position that has one (3, config)."""
        return {
            home: np.array([self.costs.block_times(block, config).sum(axis=1) for config in self.configs[block]]).T
            for home, block in enumerate(self.positions)
            if block
        }

    @cached_property
    def own(self) -> NDArray[np.intp]:
        """The indices of the phases of each segment (segment, phase)."""
        position = self.costs.step.phases.position
        return np.array([[position[kind, k] for kind in FORWARD + BACKWARD] for k in range(len(self.positions))])

    def neighbours(self, block: str, config: OpConfig) -> Neighbours:
        """Return the blocks beside `block` where all are sharded, if it is."""
        if not config.storage.sharded_axes("gradients"):
            return Neighbours()
        return self._uniform_neighbours[block]

    @cached_property
    def _uniform_neighbours(self) -> dict[str, Neighbours]:
        sharded = OpConfig.zero(3, axes=len(self.costs.step.mesh.axes))
        return self.costs.neighbours(dict.fromkeys(self.configs, sharded))

    @property
    def _whole(self) -> bool:
        """Whether no configuration shards gradients."""
        several = (config for configs in self.configs.values() for config in configs)
        return not any(config.storage.sharded_axes("gradients") for config in several)

    def _near(self, block: str, home: int) -> tuple[int | None, ...]:
        beside, spans = self._uniform_neighbours[block], self.costs.step.segments.of_block
        names = beside.previous, beside.following
        return tuple(None if name is None else spans[name][0] - home for name in names)

    def _block_bytes(self, block: str, home: int) -> BlockBytes:
        phases, configs = self.costs.step.phases, self.configs[block]
        size = np.array([self.costs.block_memory(block, c, self.neighbours(block, c)) for c in configs])
        segment = np.array([-1 if phase in ONCE else phase[1] for phase in phases.order])
        forward = np.array([phase[0] in FORWARD for phase in phases.order])
        once = segment == -1
        between, own = (segment > home) | np.array([phase == FORWARD_OVER for phase in phases.order]), segment == home
        outside = ~between & ~own
        sides = [outside & ~once & forward, outside & ~once & ~forward]
        # New buckets are as large as all gradients: what blocks with whole gradients have beside one another then is exact.
        listed = outside & once & ~(np.array([phase == REBUILD for phase in phases.order]) & self._whole)
        most = np.max([size[:, listed].max(axis=1), *(size[:, s].min(axis=1) for s in sides if s.any())], axis=0)
        least = size[:, between].min(axis=1)
        static = np.minimum(most, least)
        kept, late = least - static, most - static
        above = size - static[:, None] - np.where(between, kept[:, None], late[:, None])
        above = np.where(own, 0.0, above).max(axis=0)
        beside = {phases.order[index]: float(above[index]) for index in np.flatnonzero(above >= 1)}
        return BlockBytes(static, kept, late, size[:, own] - static[:, None], beside)


def _moved(numbers: BlockBytes, by: int) -> BlockBytes:
    if by == 0:
        return numbers
    beside = {phase if phase in ONCE else (phase[0], phase[1] + by): size for phase, size in numbers.beside.items()}
    return BlockBytes(numbers.static, numbers.kept, numbers.late, numbers.own, beside)


@dataclass(frozen=True)
class Chain:
    """Plans that give the block ``""`` the configuration `root`, and every other block one of those of `choices`."""

    choices: Choices
    root: OpConfig

    @property
    def costs(self) -> PlanCosts:
        """The costs of its plans."""
        return self.choices.costs

    def plan(self, row: Sequence[int]) -> dict[str, OpConfig]:
        """Return the configurations of a plan: `row` (position,) holds indices into those of the block at each position."""
        configs, positions = self.choices.configs, self.choices.positions
        chosen = {block: configs[block][index] for block, index in zip(positions, row, strict=True) if block}
        rest = {name: several[0] for name, several in configs.items() if name not in chosen}
        return {**rest, **chosen, ROOT: self.root}

    @cached_property
    def table(self) -> ChainTable:
        """The costs. Blocks that never run in forward take their first configuration."""
        fixed = self._fixed_bytes
        always = float(fixed.min())
        beside = fixed - always + self.choices.beside
        distinct: dict[tuple[bytes, ...], int] = {}
        blocks: list[BlockCosts] = []
        order = []
        for k in range(len(self.choices.positions)):
            columns = self._columns(k, beside[self.choices.own[k]])
            index = distinct.setdefault(tuple(column.tobytes() for column in columns), len(blocks))
            if index == len(blocks):
                block = self.choices.positions[k]
                configs = tuple(self.choices.configs[block]) if block else (self.root,)
                seconds, backward, exchange, static, kept, late, hump = columns
                blocks.append(BlockCosts(configs, seconds, backward, exchange, static, kept, late, hump))
            order.append(index)
        return ChainTable(
            tuple(blocks),
            tuple(order),
            fixed_seconds=self.costs.plan_seconds({**self.choices.most, ROOT: self.root}),
            fixed_bytes=always,
            update_bytes=max(float(beside[self.costs.step.phases.position[phase]]) for phase in ONCE),
        )

    @property
    def _fixed_bytes(self) -> Array:
        """Bytes of the root and of what all blocks keep together (phase,)."""
        together = self.costs.step.phases.add_up(self.costs.plan_lifetimes({**self.choices.most, ROOT: self.root}))
        return together + self.costs.block_memory(ROOT, self.root, self.choices.neighbours(ROOT, self.root))

    def _columns(self, k: int, beside: Array) -> tuple[Array, ...]:
        """The costs of the block at position `k`: seconds, backward, exchange, static, kept, late, hump (config,).

        On grids, nanoseconds and bytes, on which those of equal blocks are equal.
        """
        root, numbers = self.costs.block_times(ROOT, self.root)[:, k : k + 1], self.choices.bytes.get(k)
        if numbers is None:
            zero = np.zeros(1)
            return (*np.round(root, 9), zero, zero, zero, np.round(beside.max(keepdims=True)))
        hump = np.maximum((numbers.own + beside).max(axis=1), 0.0)
        sizes = (np.round(size) for size in (numbers.static, numbers.kept, numbers.late, hump))
        return (*np.round(self.choices.times[k] + root, 9), *sizes)


NO_BOUND = 1e9  # where a search that was given up can state no relative error; files hold no infinities


@dataclass(frozen=True)
class FoundPlans:
    """Plans on the frontier of several chains, each as a row of its chain; `error_bound` as in `Frontier`."""

    plans: tuple[tuple[Chain, Sequence[int]], ...]
    error_bound: float


def search_chains(chains: Sequence[Chain], *, max_seconds: float) -> FoundPlans:
    """Return the plans that no plan of any of `chains` beats in both seconds and bytes, as far as `max_seconds` allow."""
    candidates = [(chain, lambda chain=chain: chain.table) for chain in chains]
    found = search_meshes(candidates, max_seconds=max_seconds)
    plans = ((chain, [*point.choice.values()]) for chain, point in found.points)
    return FoundPlans(tuple(plans), min(found.error_bound, NO_BOUND))
