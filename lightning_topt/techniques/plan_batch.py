"""The costs of many plans of one training step at once: what `PlanCosts` and `explain` say of each
of them, in arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_topt.costs.cost_table import Array
from lightning_topt.costs.lifetimes import UPDATE
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.techniques.plan_costs import PlanCosts, network_delay
from lightning_topt.techniques.registry import TECHNIQUES
from lightning_topt.techniques.technique import Neighbours, Technique

Rows = NDArray[np.intp]


@dataclass(frozen=True)
class PlanBatch:
    """Plans (n, block) as indices into the `configs` that each block has, in the order of
    `configs`.

    Symbols: n plans, K segments.
    """

    costs: PlanCosts
    configs: Mapping[str, Sequence[OpConfig]]
    plans: Rows

    def configs_of(self, row: int) -> dict[str, OpConfig]:
        """Return the configuration of each block in one plan."""
        chosen = zip(self.configs.items(), self.plans[row].tolist(), strict=True)
        return {name: legal[index] for (name, legal), index in chosen}

    @cached_property
    def seconds(self) -> Array:
        """Seconds of a step (n,); see `PlanCosts.seconds`."""
        times = np.zeros((len(self.plans), 3, max(self.costs.step.segments.count, 1)))
        known: dict[tuple[int, int], Array] = {}
        for block, (name, legal) in enumerate(self.configs.items()):
            key = self.costs.timed_alike[name], id(legal)
            if key not in known:
                known[key] = np.array([self.costs.block_times(name, config) for config in legal])
            times[:, :, self.costs.span(name)] += known[key][self.plans[:, block]]
        return np.asarray(times[:, 0].sum(axis=1) + network_delay(times) + self._plan_seconds)

    @cached_property
    def compute_seconds(self) -> Array:
        """The part of `seconds` that is computation (n,); see `explain.compute_seconds`."""
        step = self.costs.step
        kernels = step.num_microbatches * sum(
            float(step.compute[name].sum()) for name in self.configs
        )
        total = kernels + self._plan_seconds - step.sent_seconds
        for block, (name, legal) in enumerate(self.configs.items()):
            added = [self.costs.block_seconds(name, config) for config in legal]
            own = [step.num_microbatches * each.recompute + each.update for each in added]
            total += np.array(own)[self.plans[:, block]]
        return np.asarray(total)

    @cached_property
    def peak_bytes(self) -> Array:
        """Bytes at the peak (n,); see `PlanCosts.memory`."""
        phases, costs = self.costs.step.phases, self.costs
        total = np.tile(phases.add_up(costs.shared_lifetimes()), (len(self.plans), 1))
        for technique, rows, blocks in self._by_technique:
            total[rows] += phases.add_up(technique.plan_lifetimes(costs.step, blocks))
        total[:, phases.position[UPDATE]] += self._temporaries
        peaks = np.empty(len(self.plans))
        for rows, beside in self._by_neighbours():
            held, of_block = total[rows], np.empty((len(rows), total.shape[1]))
            for block, (name, legal) in enumerate(self.configs.items()):
                chosen = self.plans[rows, block]
                sizes = np.zeros((len(legal), total.shape[1]))
                for c in set(chosen.tolist()):
                    sizes[c] = costs.block_memory(name, legal[c], beside[name])
                # others copy it once more
                held += np.take(sizes, chosen, axis=0, out=of_block, mode="clip")
            peaks[rows] = held.max(axis=1)
        return peaks

    @cached_property
    def _temporaries(self) -> Array:
        largest, together, sent = np.zeros((3, len(self.plans)))
        for block, (name, legal) in enumerate(self.configs.items()):
            sizes = np.array([self.costs.temporaries(name, config) for config in legal])[
                self.plans[:, block]
            ]
            largest, together, sent = (
                np.maximum(largest, sizes[:, 0]),
                together + sizes[:, 1],
                sent + sizes[:, 2],
            )
        return np.maximum(np.maximum(largest, together), sent)

    def _by_neighbours(self) -> Iterator[tuple[Rows, dict[str, Neighbours]]]:
        """Plans that shard the gradients of the same blocks, and the neighbours of these."""
        sharded = np.stack(
            [
                np.array([bool(config.storage.sharded_axes("gradients")) for config in legal])[
                    self.plans[:, block]
                ]
                for block, legal in enumerate(self.configs.values())
            ],
            axis=1,
        )
        for rows, _ in _equal_rows(sharded):
            yield rows, self.costs.neighbours(self.configs_of(int(rows[0])))

    @cached_property
    def _by_technique(self) -> list[tuple[Technique, Rows, frozenset[str]]]:
        """Techniques, the plans (rows) in which they place the same blocks, and these blocks."""
        several = {config for legal in self.configs.values() for config in legal}
        takes_part = {
            config: [t in self.costs.techniques(config) for t in TECHNIQUES] for config in several
        }
        placed = np.stack(
            [
                np.array([takes_part[config] for config in legal])[self.plans[:, block]]
                for block, legal in enumerate(self.configs.values())
            ]
        )
        return [
            (technique, rows, frozenset(itertools.compress(self.configs, blocks)))
            for index, technique in enumerate(TECHNIQUES)
            for rows, blocks in _equal_rows(placed[:, :, index].T)
            if blocks.any()
        ]

    @cached_property
    def _plan_seconds(self) -> Array:
        total = np.full(len(self.plans), self.costs.shared_seconds)
        for technique, rows, blocks in self._by_technique:
            total[rows] += technique.plan_seconds(self.costs.step, blocks)
        return total


def _equal_rows(table: NDArray[np.bool_]) -> Iterator[tuple[Rows, NDArray[np.bool_]]]:
    """Yield the indices of equal rows of `table` (n, block), and what they are."""
    groups: dict[bytes, list[int]] = {}
    for index, row in enumerate(table):
        groups.setdefault(row.tobytes(), []).append(index)
    for rows in groups.values():
        yield np.array(rows, np.intp), table[rows[0]]
