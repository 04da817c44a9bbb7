"""The costs of many plans of one training step at once: what `PlanCosts` and `explain` say of each of them, in arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_topt.costs.cost_table import Array
from lightning_topt.costs.lifetimes import UPDATE
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.techniques.plan_costs import PlanCosts, network_delay
from lightning_topt.techniques.technique import Neighbours, Technique

Rows = NDArray[np.intp]


@dataclass(frozen=True)
class PlanBatch:
    """Plans (n, block) as indices into the `configs` that each block has, in the order of `configs`.

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
        for block, (name, legal) in enumerate(self.configs.items()):
            first, last = self.costs.step.segments.of_block.get(name, (0, 0)) if name else (0, times.shape[2] - 1)
            of_config = np.stack([self.costs.block_times(name, config)[:, first : last + 1] for config in legal])
            times[:, :, first : last + 1] += of_config[self.plans[:, block]]
        return np.asarray(times[:, 0].sum(axis=1) + network_delay(times) + self._plan_seconds)

    @cached_property
    def compute_seconds(self) -> Array:
        """The part of `seconds` that is computation (n,); see `explain.compute_seconds`."""
        step = self.costs.step
        kernels = step.num_microbatches * sum(float(step.compute[name].sum()) for name in self.configs)
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
        total = np.stack([phases.add_up(costs.shared_lifetimes(placed)) for placed in self._by_technique])
        total[:, phases.position[UPDATE]] += self._temporaries
        for rows, beside in self._by_neighbours():
            for block, (name, legal) in enumerate(self.configs.items()):
                chosen, which = np.unique(self.plans[rows, block], return_inverse=True)
                sizes = [costs.block_memory(name, legal[c], beside[name]) for c in chosen.tolist()]
                total[rows] += np.stack(sizes)[which]
        return np.asarray(total.max(axis=1))

    @cached_property
    def _temporaries(self) -> Array:
        largest, together = np.zeros((2, len(self.plans)))
        for block, (name, legal) in enumerate(self.configs.items()):
            sizes = np.array([self.costs.temporaries(name, config) for config in legal])[self.plans[:, block]]
            largest, together = np.maximum(largest, sizes[:, 0]), together + sizes[:, 1]
        return np.maximum(largest, together)

    def _by_neighbours(self) -> Iterator[tuple[Rows, dict[str, Neighbours]]]:
        """Plans that shard the gradients of the same blocks, and the neighbours of these."""
        sharded = np.stack(
            [
                np.array([bool(config.storage.sharded_axes("gradients")) for config in legal])[self.plans[:, block]]
                for block, legal in enumerate(self.configs.values())
            ],
            axis=1,
        )
        _, first, group = np.unique(sharded, axis=0, return_index=True, return_inverse=True)
        for index, row in enumerate(first.tolist()):
            yield np.flatnonzero(group == index), self.costs.neighbours(self.configs_of(row))

    @cached_property
    def _by_technique(self) -> list[dict[Technique, frozenset[str]]]:
        return [self.costs.by_technique(self.configs_of(row)) for row in range(len(self.plans))]

    @cached_property
    def _plan_seconds(self) -> Array:
        return np.array([self.costs.shared_seconds(placed) for placed in self._by_technique])
