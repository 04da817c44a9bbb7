"""The costs of a plan on each rank are added up from its blocks: seconds of the step, bytes at its
peak.

Symbols: k segment of the forward pass; c its seconds (all that is in the way), b those of its (last
microbatch's) backward, u those of its exchanges, which start after its backward and run one after
another beside the backward of earlier segments.

    step   sum of c + f_0 + what the plan adds,                 `PlanCosts.seconds`
           f_k = max(f_(k+1) - b_k, 0) + u_k
    peak   max over phases of the sum of lifetimes              `PlanCosts.memory`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lightning_topt.costs.cost_table import Array
from lightning_topt.costs.lifetimes import UPDATE, Changes, Lifetime
from lightning_topt.costs.sizes import ROOT
from lightning_topt.costs.training_step import TrainingStep, activation_lifetimes, temporary_bytes
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import Block
from lightning_topt.techniques.registry import TECHNIQUES, technique_of
from lightning_topt.techniques.technique import ALONE, BlockSeconds, Neighbours, Technique

Configs = Mapping[str, OpConfig]
RESULTS = (
    # the buffers in which they travel, as far as these are above the optimizer's temporaries
    "updated parameters"
)


@dataclass(frozen=True)
class _BlockLifetimes:
    """`_BlockLifetimes` are what a block keeps that stands at the segment `home`."""

    home: int
    lifetimes: list[Lifetime]
    changes: Changes


@dataclass(frozen=True)
class PlanCosts:
    """The costs of every plan of one training step. What is worked out for a block is kept."""

    step: TrainingStep

    # ---- what is legal ---------------------------------------------------------------------------

    def configs(self, block: Block) -> list[OpConfig]:
        """Return the configurations of `block` that some technique makes legal, the simplest
        first.
        """
        key = self.step.alike[block.name], block.recomputable, block.name in self.step.tied
        if key not in self._configs:
            found: list[OpConfig] = []
            for technique in reversed(TECHNIQUES):
                found += technique.configs(self.step, block, tuple(found))
            self._configs[key] = sorted(found, key=_simplicity)
        return self._configs[key]

    def check(self, configs: Configs) -> None:
        """Raise ValueError when a block has no configuration, or one that no technique places on
        this mesh.
        """
        if missing := [block.name for block in self.step.graph.blocks if block.name not in configs]:
            raise ValueError(f"the plan has no configuration for the blocks {missing}")
        for config in configs.values():
            technique_of(config, self.step.mesh)  # raises

    # ---- memory ----------------------------------------------------------------------------------

    def neighbours(self, configs: Configs) -> dict[str, Neighbours]:
        """Return the sharded blocks around each block of a plan; without any for blocks whose
        gradients are whole.
        """
        spans, last = self.step.segments.of_block, self.step.reduced_last
        sharded = [
            name for name, config in configs.items() if config.storage.sharded_axes("gradients")
        ]
        order = sorted(
            (name for name in sharded if name in self._gathered), key=lambda name: spans[name]
        )
        found = {name: ALONE for name in configs}
        if ROOT in sharded:
            found[ROOT] = Neighbours(following=order[0] if order else None)
        previous = None
        for name, following in zip(order, [*order[1:], None], strict=False):
            found[name] = Neighbours(previous, following)
            previous = previous if name in last else name
        return found

    def block_memory(self, block: str, config: OpConfig, beside: Neighbours = ALONE) -> Array:
        """Return the bytes of one block in each phase (phase,)."""
        key = block, config, beside
        if key not in self._memories:
            known, by = self._known_lifetimes(block, config, beside)
            self._memories[key] = self.step.phases.add_up_moved(known.changes, by)
        return self._memories[key]

    def block_lifetimes(self, block: str, config: OpConfig, beside: Neighbours) -> list[Lifetime]:
        """Return all that one block keeps in memory."""
        known, by = self._known_lifetimes(block, config, beside)
        return self.step.phases.shifted(known.lifetimes, by)

    def _known_lifetimes(
        self, block: str, config: OpConfig, beside: Neighbours
    ) -> tuple[_BlockLifetimes, int]:
        """Return what is known of the block or of one alike, and by how many segments `block`
        stands later.
        """
        spans = self.step.segments.of_block
        home = spans.get(block, (0, 0))[0]
        near = [
            None if name is None else spans[name][0] - home
            for name in (beside.previous, beside.following)
        ]
        # Without neighbours, buffers live to the ends of the step, which do not move.
        fixed = None in near and bool(config.storage.sharded_axes("gradients"))
        key = self.step.alike[block], config, *near, home if fixed else 0
        if key not in self._lifetimes:
            lifetimes = [*self._block_lifetimes(block, config, beside)]
            self._lifetimes[key] = _BlockLifetimes(
                home, lifetimes, self.step.phases.changes(lifetimes)
            )
        return self._lifetimes[key], home - self._lifetimes[key].home

    def _block_lifetimes(
        self, block: str, config: OpConfig, beside: Neighbours
    ) -> Iterator[Lifetime]:
        if not config.recompute:
            yield from activation_lifetimes(self.step, block, recompute=False)
        for technique in self.techniques(config):
            yield from technique.lifetimes(self.step, block, config, beside)

    def plan_lifetimes(self, configs: Configs) -> Iterator[Lifetime]:
        """Yield what the blocks of a plan keep together, and what every plan keeps."""
        yield from self.shared_lifetimes()
        for technique, blocks in self.by_technique(configs).items():
            yield from technique.plan_lifetimes(self.step, blocks)
        largest, *sums = zip(
            *(self.temporaries(name, config) for name, config in configs.items()), strict=True
        )
        together, sent = map(sum, sums)
        temporaries = max(*largest, together)
        yield Lifetime("temporaries", temporaries, UPDATE, UPDATE)
        # they come when the temporaries are gone
        yield Lifetime(RESULTS, max(sent - temporaries, 0.0), UPDATE, UPDATE)

    def shared_lifetimes(self) -> Iterator[Lifetime]:
        """Yield what every plan keeps."""
        step, phases = self.step, self.step.phases
        yield phases.always(
            "buffers and batch",
            step.graph.buffer_bytes + step.graph.input_bytes.at(step.batch_size),
        )
        yield phases.always("process", step.cluster.device.process_bytes)
        # an evaluation comes when the update is over
        yield Lifetime("parameters", step.joined_bytes, UPDATE, UPDATE)

    def temporaries(self, block: str, config: OpConfig) -> tuple[float, float, float]:
        """Return the bytes of the optimizer's temporaries: of the largest parameter, and of all
        that are alive together.

        The third number is the bytes of the buffers in which results travel. They live together,
        after the temporaries.
        """
        key = self.step.alike[block], config
        if key not in self._updates:
            techniques = self.techniques(config)
            parameters = self.step.parameters(block)
            factors = {
                p: [t.update_share(self.step, p, config) for t in techniques] for p in parameters
            }
            sizes = temporary_bytes(
                self.step, {p: float(np.prod(each)) for p, each in factors.items()}
            )
            sent = sum(t.result_bytes(self.step, p, config) for t in techniques for p in parameters)
            self._updates[key] = *sizes, sent
        return self._updates[key]

    def memory(self, configs: Configs) -> Array:
        """Return the bytes of a plan in each phase (phase,)."""
        total = self.step.phases.add_up(self.plan_lifetimes(configs))
        beside = self.neighbours(configs)
        for name, config in configs.items():
            total += self.block_memory(name, config, beside[name])
        return total

    # ---- seconds ---------------------------------------------------------------------------------

    def block_seconds(self, block: str, config: OpConfig) -> BlockSeconds:
        """Return what techniques add to the computation of one block."""
        key = self.step.alike[block], config
        if key not in self._seconds:
            seconds = BlockSeconds()
            for technique in self.techniques(config):
                technique.add_seconds(seconds, self.step, block, config)
            self._seconds[key] = seconds
        return self._seconds[key]

    def span(self, block: str) -> slice:
        """Return the segments in which `block` takes time: all for the root, whose exchanges
        enclose those of all others.
        """
        if block == ROOT:
            return slice(0, max(self.step.segments.count, 1))
        first, last = self.step.segments.of_block.get(block, (0, 0))
        return slice(first, last + 1)

    def block_times(self, block: str, config: OpConfig) -> Array:
        """Return c, b and u of one block in each segment of its `span` (3, segment)."""
        key = self.timed_alike[block], config
        if key not in self._times:
            self._times[key] = self._block_times(block, self.block_seconds(block, config))
        return self._times[key]

    def _block_times(self, block: str, seconds: BlockSeconds) -> Array:
        forward, backward = self.step.compute[block][:, self.span(block)]
        times, count = np.zeros((3, max(len(forward), 1))), self.step.num_microbatches
        times[0, : len(forward)] += count * (forward + backward)
        times[1, : len(backward)] += backward
        # A gather runs beside the segment before it, in forward and in backward.
        before, after = self._beside(block)
        in_forward = seconds.gather_foreground[0] + max(seconds.gather_background[0] - before, 0.0)
        in_backward = seconds.gather_foreground[1] + max(seconds.gather_background[1] - after, 0.0)
        in_backward += seconds.recompute + seconds.reduce_foreground
        earlier = (count - 1) * seconds.recompute  # in backward of the microbatches before the last
        times[0, 0] += in_forward + earlier + in_backward + seconds.reduce_last
        times[0, 0] += seconds.update + seconds.broadcast
        times[1, 0] += in_backward
        times[2, 0] += seconds.gather_background[1] + seconds.reduce_background
        return times

    @cached_property
    def timed_alike(self) -> dict[str, int]:
        """A number for each block; equal for blocks that take equal times under every
        configuration.
        """
        numbers: dict[Any, int] = {}
        return {
            block: numbers.setdefault(
                (self.step.alike[block], self._beside(block), compute.tobytes()), len(numbers)
            )
            for block, compute in (
                (b, passes[:, self.span(b)]) for b, passes in self.step.compute.items()
            )
        }

    def _beside(self, block: str) -> tuple[float, float]:
        """The computation beside which a block is gathered: the segment before it in forward, and
        that in backward.
        """
        if block == ROOT:
            return 0.0, float(self._all_backward[1]) if len(self._all_backward) > 1 else 0.0
        span = self.span(block)
        before = self._all_forward[span.start - 1] if span.start else 0.0
        after = self._all_backward[span.stop] if span.stop < len(self._all_backward) else 0.0
        return float(before), float(after)

    def seconds(self, configs: Configs) -> float:
        """Return the seconds of a step of a plan."""
        times = np.zeros((3, max(self.step.segments.count, 1)))
        for name, config in configs.items():
            times[:, self.span(name)] += self.block_times(name, config)
        return float(times[0].sum() + network_delay(times)) + self.plan_seconds(configs)

    def plan_seconds(self, configs: Configs) -> float:
        """Return what the blocks of a plan take together, and what every plan takes."""
        placed = self.by_technique(configs).items()
        return sum(t.plan_seconds(self.step, blocks) for t, blocks in placed) + self.shared_seconds

    @property
    def shared_seconds(self) -> float:
        """Seconds that every plan takes."""
        return self.step.sent_seconds + self.step.accumulation_seconds + self.step.host_seconds

    # ---- parts -----------------------------------------------------------------------------------

    def by_technique(self, configs: Configs) -> dict[Technique, frozenset[str]]:
        """Return the blocks that each technique places."""
        found: dict[Technique, list[str]] = {}
        for name, config in configs.items():
            for technique in self.techniques(config):
                found.setdefault(technique, []).append(name)
        return {technique: frozenset(blocks) for technique, blocks in found.items()}

    def techniques(self, config: OpConfig) -> tuple[Technique, ...]:
        """Return the techniques that add to the costs of blocks under `config`."""
        if config not in self._placed:
            self._placed[config] = tuple(t for t in TECHNIQUES if t.takes_part(self.step, config))
        return self._placed[config]

    @cached_property
    def _placed(self) -> dict[OpConfig, tuple[Technique, ...]]:
        return {}

    @cached_property
    def _all_forward(self) -> Sequence[float]:
        return np.sum([times[0] for times in self.step.compute.values()], axis=0)  # type: ignore[no-any-return]

    @cached_property
    def _all_backward(self) -> Sequence[float]:
        return np.sum([times[1] for times in self.step.compute.values()], axis=0)  # type: ignore[no-any-return]

    @cached_property
    def _gathered(self) -> frozenset[str]:
        """Blocks, beside the root, that have parameters and a place in the forward pass."""
        named = {parameter.block for parameter in self.step.graph.parameters} - {ROOT}
        return frozenset(named & set(self.step.segments.of_block))

    @cached_property
    def _memories(self) -> dict[tuple[str, OpConfig, Neighbours], Array]:
        return {}

    @cached_property
    def _configs(self) -> dict[tuple[int, bool, bool], list[OpConfig]]:
        return {}

    @cached_property
    def _lifetimes(self) -> dict[Any, _BlockLifetimes]:
        return {}

    @cached_property
    def _updates(self) -> dict[tuple[int, OpConfig], tuple[float, float, float]]:
        return {}

    @cached_property
    def _seconds(self) -> dict[tuple[int, OpConfig], BlockSeconds]:
        return {}

    @cached_property
    def _times(self) -> dict[tuple[int, OpConfig], Array]:
        return {}


def _simplicity(config: OpConfig) -> tuple[bool, bool, int]:
    storage = config.storage
    hybrid = 0 < len(storage.sharded_axes("optimizer_state")) < len(storage.parameters)
    return config.recompute, hybrid, storage.level


def network_delay(times: Array) -> Array:
    """Return how much later than computation the network finishes (...,): `times` (..., 3, segment)
    hold c, b, u.
    """
    backward, exchange = times[..., 1, ::-1], times[..., 2, ::-1]
    late = np.zeros(times.shape[:-2])
    for k in range(times.shape[-1]):
        late = np.maximum(late - backward[..., k], 0.0) + exchange[..., k]
    return late
