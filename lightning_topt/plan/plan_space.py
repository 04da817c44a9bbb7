"""`PlanSpace` is the plans on one mesh, with one exchange of gradients: what blocks may have beside
one another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lightning_topt.communication.exchange_method import GradientMethod
from lightning_topt.costs.sizes import ROOT
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig, Storage
from lightning_topt.plan.chains import Chain, Choices
from lightning_topt.techniques.data_parallel import has_buckets
from lightning_topt.techniques.plan_batch import PlanBatch
from lightning_topt.techniques.plan_costs import PlanCosts


@dataclass(frozen=True)
class PlanSpace:
    """A `PlanSpace` holds the plans on one mesh: `groups` are storages that blocks may have beside
    one another, `own` those of uniform plans.
    """

    costs: PlanCosts
    groups: Sequence[Collection[Storage]]
    own: Collection[Storage]

    def chains(self) -> Iterator[Chain]:
        """Yield one chain for each group and configuration of the block ``""``."""
        for group in self.groups:
            configs = self._configs(group)
            if all(configs.values()):
                choices = Choices(self.costs, configs)
                halves = choices.split_by_first()
                for root in configs[ROOT]:
                    sharded = root.storage.sharded_axes("gradients")
                    yield from (Chain(each, root) for each in (halves if sharded else [choices]))

    @cached_property
    def uniform(self) -> PlanBatch:
        """The plans with one storage for all blocks, without and with recomputation; a block that
        cannot have that takes what is nearest.
        """
        configs = self._configs(self.own)
        kinds = dict.fromkeys(config for several in configs.values() for config in several)
        nearest = {
            id(several): [_nearest(several, kind) for kind in kinds]
            for several in {id(several): several for several in configs.values()}.values()
        }
        rows = dict.fromkeys(
            zip(*(nearest[id(several)] for several in configs.values()), strict=True)
        )
        return PlanBatch(self.costs, configs, np.array([*rows], np.intp))

    def smallest(self) -> PlanBatch:
        """Return one plan of little memory: the smallest of the `uniform` ones, improved as long as
        one change saves any.

        A change is another configuration of all blocks that are alike, or of the first or the last
        of them. The bytes of a chain are upper bounds where blocks differ in storage, so a search
        of chains may miss the smallest mix.
        """
        configs = self._configs(self.groups[-1])
        start = self.uniform.configs_of(int(self.uniform.peak_bytes.argmin()))
        row = np.array([several.index(start[name]) for name, several in configs.items()], np.intp)
        alike: dict[tuple[int, int], list[int]] = {}
        for index, (name, several) in enumerate(configs.items()):
            alike.setdefault((self.costs.step.alike[name], id(several)), []).append(index)
        changed = dict.fromkeys(
            tuple(some) for each in alike.values() for some in (each, each[:1], each[-1:])
        )
        lists = [*configs.values()]
        while True:
            rows = [row]
            for blocks in changed:
                for config in range(len(lists[blocks[0]])):
                    rows.append(row.copy())
                    rows[-1][[*blocks]] = config
            least = int(PlanBatch(self.costs, configs, np.array(rows)).peak_bytes.argmin())
            if least == 0:
                return PlanBatch(self.costs, configs, row[None])
            row = rows[least]

    def _configs(self, group: Collection[Storage]) -> dict[str, list[OpConfig]]:
        """The configurations of each block whose storage is in `group`; blocks alike share one
        list.
        """
        found: dict[int, list[OpConfig]] = {}
        legal = {block.name: self.costs.configs(block) for block in self.costs.step.graph.blocks}
        for several in legal.values():
            if id(several) not in found:
                found[id(several)] = [config for config in several if config.storage in group]
        return {name: found[id(several)] for name, several in legal.items()}


def _nearest(configs: Sequence[OpConfig], kind: OpConfig) -> int:
    """The index of the configuration that is most like `kind`."""

    def distance(index: int) -> tuple[int, int, bool]:
        config = configs[index]
        axes = [len(c.storage.sharded_axes("optimizer_state")) for c in (config, kind)]
        levels = abs(config.storage.level - kind.storage.level)
        return abs(axes[0] - axes[1]), levels, config.recompute != kind.recompute

    return min(range(len(configs)), key=distance)


def spaces_of(
    step: TrainingStep,
    others: Sequence[Mesh],
    *,
    shards: bool,
    exchanges: Sequence[GradientMethod] = (),
    views: Sequence[bool] = (False,),
) -> Iterator[PlanSpace]:
    """Yield the plans of `step`, on its mesh and on `others` of as many ranks; with each of
    `views`, which says whether gradients are views of DDP's buckets, where that saves anything.
    """
    saves = has_buckets(step) and step.num_microbatches == 1
    for are_views in dict.fromkeys(each and saves for each in views):
        viewed = replace(step, gradient_views=True) if are_views else step
        for exchange in (None, *exchanges):
            yield _whole_gradients(
                PlanCosts(viewed if exchange is None else replace(viewed, exchange=exchange))
            )
        if shards:
            returning = viewed if viewed.returns_memory else replace(viewed, returns_memory=True)
            for mesh in (step.mesh, *others):
                yield _sharded_gradients(PlanCosts(returning.on(mesh)))


def _storages(costs: PlanCosts) -> list[Storage]:
    legal = {id(several): several for several in map(costs.configs, costs.step.graph.blocks)}
    return [*dict.fromkeys(config.storage for several in legal.values() for config in several)]


def _whole_gradients(costs: PlanCosts) -> PlanSpace:
    """Plans of plain data parallelism by themselves, then all whose gradients are whole."""
    whole = [storage for storage in _storages(costs) if not storage.sharded_axes("gradients")]
    plain = [storage for storage in whole if storage.level == 0]
    return PlanSpace(costs, [plain, whole] if whole != plain else [plain], own=whole)


def _sharded_gradients(costs: PlanCosts) -> PlanSpace:
    """Plans that only the mesh of `costs` has: gradients sharded along its last axis, by themselves
    and with all others.
    """
    storages, axes = _storages(costs), costs.step.mesh.data_axes
    own = [storage for storage in storages if storage.sharded_axes("gradients") == axes[-1:]]
    if costs.step.gradient_views:  # of which plans without whole gradients have none
        return PlanSpace(costs, [storages] if own else [], own=())
    return PlanSpace(costs, [own, storages] if own else [], own=own)
