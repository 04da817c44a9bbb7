"""The costs of a plan on each rank, added up from its blocks: seconds of a step, bytes at its peak.

`PlanCosts` does it for one plan, `PlanBatch` for many of the same step at once, in arrays.

Symbols: k segment of the forward pass; c its seconds, all that is in the way; b those of its (last
microbatch's) backward; u those of its exchanges. These start after its backward and run one after
another beside the backward of earlier segments.

    step   sum of c + f_0 + what the plan adds,                 `PlanCosts.seconds`
           f_k = max(f_(k+1) - b_k, 0) + u_k
    peak   max over phases of the sum of lifetimes              `explain`
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_topt.basics import once_per_object
from lightning_topt.costs.chain_table import Array
from lightning_topt.costs.lifetimes import ONCE, UPDATE, Changes, Lifetime, Phase
from lightning_topt.costs.reserved_memory import CUBLAS_BYTES, communicator_bytes, unused_bytes
from lightning_topt.costs.sizes import ROOT
from lightning_topt.costs.training_step import TrainingStep, activation_lifetimes, temporary_bytes
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import Block, OpGraph
from lightning_topt.techniques.registry import TECHNIQUES, technique_of
from lightning_topt.techniques.technique import ALONE, BlockSeconds, Neighbours, Technique

Configs = Mapping[str, OpConfig]
# buffers in which they travel, as far as these exceed the optimizer's temporaries
RESULTS = "updated parameters"
COMPUTATION = "forward", "backward", "recompute", "update"  # of the work of a block


@dataclass(frozen=True)
class _BlockLifetimes:
    # What a block keeps that stands at the segment `home`.

    home: int
    lifetimes: list[Lifetime]
    changes: Changes


@dataclass
class _PlanCache:
    # What `PlanCosts` has worked out so far; blocks alike share entries.

    configs: dict[tuple[int, bool, bool], list[OpConfig]] = field(default_factory=dict)
    techniques: dict[OpConfig, tuple[Technique, ...]] = field(default_factory=dict)
    memories: dict[tuple[str, OpConfig, Neighbours], Array] = field(default_factory=dict)
    lifetimes: dict[Any, _BlockLifetimes] = field(default_factory=dict)
    updates: dict[tuple[int, OpConfig], tuple[float, float, float]] = field(default_factory=dict)
    seconds: dict[tuple[int, OpConfig], BlockSeconds] = field(default_factory=dict)
    times: dict[tuple[int, OpConfig], Array] = field(default_factory=dict)


@once_per_object
def _known_unused(graph: OpGraph) -> dict[Any, float]:
    # What `PlanCosts.fragmentation` has worked out so far of steps of this graph
    return {}


@dataclass(frozen=True)
class PlanCosts:
    """The costs of every plan of one training step."""

    step: TrainingStep
    _known: _PlanCache = field(default_factory=_PlanCache, init=False, compare=False, repr=False)

    # ---- what is legal ---------------------------------------------------------------------------

    def configs(self, block: Block) -> list[OpConfig]:
        """Return the configurations that some technique makes legal for `block`, simplest first."""
        # all that techniques look at; equal blocks share one list, which later code knows by
        # identity
        key = self.step.alike[block.name], block.recomputable, block.name in self.step.tied
        if key not in self._known.configs:
            found: list[OpConfig] = []
            # the last of the registry first: recomputation adds to what others have made legal
            for technique in reversed(TECHNIQUES):
                found += technique.configs(self.step, block, tuple(found))
            self._known.configs[key] = sorted(found, key=_simplicity)
        return self._known.configs[key]

    def check(self, configs: Configs) -> None:
        """Raise ValueError if a block has no configuration, or none that a technique places."""
        if missing := [block.name for block in self.step.graph.blocks if block.name not in configs]:
            raise ValueError(f"the plan has no configuration for the blocks {missing}")
        for config in configs.values():
            technique_of(config, self.step.mesh)  # raises

    # ---- memory ----------------------------------------------------------------------------------

    def neighbours(self, configs: Configs) -> dict[str, Neighbours]:
        """Return the sharded blocks around each block of a plan.

        Blocks whose gradients are unsharded have none.
        """
        spans, last = self.step.segments.of_block, self.step.reduced_last
        gathered = [name for name, config in configs.items() if self.is_gathered(name, config)]
        order = sorted((name for name in gathered if name != ROOT), key=lambda name: spans[name])
        found = {name: ALONE for name in configs}
        # the root is gathered first and reduced last: nothing is before it
        if ROOT in gathered:
            found[ROOT] = Neighbours(following=order[0] if order else None)
        previous = None
        for name, following in zip(order, [*order[1:], None], strict=False):
            found[name] = Neighbours(previous, following)
            previous = previous if name in last else name
        return found

    def is_gathered(self, block: str, config: OpConfig) -> bool:
        """Return whether FSDP2 gathers parameters of a block in forward; the root counts always."""
        if not config.storage.sharded_axes("gradients"):
            return False
        return block == ROOT or block in self._gathered[config.storage.level]

    def block_memory(self, block: str, config: OpConfig, beside: Neighbours = ALONE) -> Array:
        """Return the bytes of one block in each phase (phase,)."""
        key = block, config, beside
        if key not in self._known.memories:
            known, by = self._known_lifetimes(block, config, beside)
            self._known.memories[key] = self.step.phases.add_up_moved(known.changes, by)
        return self._known.memories[key]

    def block_lifetimes(self, block: str, config: OpConfig, beside: Neighbours) -> list[Lifetime]:
        """Return all that one block keeps in memory."""
        known, by = self._known_lifetimes(block, config, beside)
        return self.step.phases.shifted(known.lifetimes, by)

    def _known_lifetimes(
        self, block: str, config: OpConfig, beside: Neighbours
    ) -> tuple[_BlockLifetimes, int]:
        # Lifetimes of the block or one alike, and how many segments later it stands
        spans = self.step.segments.of_block
        home = spans.get(block, (0, 0))[0]
        # where neighbours stand, counted from the block itself
        near = [
            None if name is None else spans[name][0] - home
            for name in (beside.previous, beside.following)
        ]
        # without neighbours, buffers live to the ends of the step, which do not move with it
        fixed = None in near and bool(config.storage.sharded_axes("gradients"))
        key = self.step.alike[block], config, *near, home if fixed else 0
        if key not in self._known.lifetimes:
            lifetimes = [*self._block_lifetimes(block, config, beside)]
            self._known.lifetimes[key] = _BlockLifetimes(
                home, lifetimes, self.step.phases.changes(lifetimes)
            )
        return self._known.lifetimes[key], home - self._known.lifetimes[key].home

    def _block_lifetimes(
        self, block: str, config: OpConfig, beside: Neighbours
    ) -> Iterator[Lifetime]:
        yield from activation_lifetimes(self.step, block, config)
        for technique in self.techniques(config):
            yield from technique.lifetimes(self.step, block, config, beside)

    def plan_lifetimes(self, configs: Configs) -> Iterator[Lifetime]:
        """Yield what the blocks of a plan keep together, and what every plan keeps."""
        yield from self._tensor_lifetimes(configs)
        if self.step.cluster.device.caching_allocator:
            named = {config for name, config in configs.items() if name or len(configs) == 1}
            unused = max(map(self.fragmentation, named))
            yield self.step.phases.always("fragmentation", unused)

    def _tensor_lifetimes(self, configs: Configs) -> Iterator[Lifetime]:
        yield from self.shared_lifetimes()
        for technique, blocks in self.by_technique(configs).items():
            yield from technique.plan_lifetimes(self.step, blocks)
        largest, *sums = zip(
            *(self.temporaries(name, config) for name, config in configs.items()), strict=True
        )
        together, sent = map(sum, sums)
        temporaries = max(*largest, together)
        yield Lifetime("temporaries", temporaries, UPDATE, UPDATE)
        # results come when the temporaries are gone
        yield Lifetime(RESULTS, max(sent - temporaries, 0.0), UPDATE, UPDATE)

    def shared_lifetimes(self) -> Iterator[Lifetime]:
        """Yield what every plan keeps."""
        step, phases = self.step, self.step.phases
        yield phases.always(
            "buffers and batch",
            step.graph.buffer_bytes + step.graph.input_bytes.at(step.batch_size),
        )
        yield phases.always("process", step.cluster.device.process_bytes)
        if step.cluster.device.caching_allocator:
            yield phases.always("cuBLAS workspace", CUBLAS_BYTES)
            yield phases.always("communicators", communicator_bytes(step.mesh))
        # an evaluation comes when the update is over
        yield Lifetime("parameters", step.joined_bytes, UPDATE, UPDATE)

    def fragmentation(self, config: OpConfig) -> float:
        """Return the bytes reserved beside tensors where all blocks are stored as in `config`.

        Where there is a caching allocator. A plan counts the most of its named blocks.
        """
        # a graph without tensors bounds what others cost: it says the least
        if not self.step.graph.step.tensors:
            return 0.0
        # an exchange changes nothing of it that counts
        step, known = self.step, _known_unused(self.step.graph)
        given = step.mesh, step.batch_size, step.num_microbatches, step.gradient_views
        key = *given, step.float32_gathers, step.optimizer.name, config.storage, config.recompute
        if key not in known:
            configs = {}
            for block in self.step.graph.blocks:
                own = self.configs(block)
                alike = [each for each in own if each.storage == config.storage] or own[:1]
                again = [each for each in alike if each.recompute == config.recompute]
                configs[block.name] = [*again, *alike][0]
            beside = self.neighbours(configs)
            lifetimes = [("", each) for each in self._tensor_lifetimes(configs)]
            for name, each in configs.items():
                lifetimes += [(name, e) for e in self.block_lifetimes(name, each, beside[name])]
            known[key] = unused_bytes(
                self.step,
                [each for each in lifetimes if each[1].kind != "activations"],
                recomputed={name for name, each in configs.items() if each.recompute},
            )
        return known[key]

    def temporaries(self, block: str, config: OpConfig) -> tuple[float, float, float]:
        """Return bytes of the update: of the largest temporary, of all alive together, of results.

        Results travel in buffers that live together, after the temporaries.
        """
        key = self.step.alike[block], config
        if key not in self._known.updates:
            techniques = self.techniques(config)
            parameters = self.step.parameters(block)
            # shares of several techniques multiply
            factors = {
                p: [t.update_share(self.step, p, config) for t in techniques] for p in parameters
            }
            sizes = temporary_bytes(
                self.step, {p: float(np.prod(each)) for p, each in factors.items()}
            )
            sent = sum(t.result_bytes(self.step, p, config) for t in techniques for p in parameters)
            self._known.updates[key] = *sizes, sent
        return self._known.updates[key]

    # ---- seconds ---------------------------------------------------------------------------------

    def block_seconds(self, block: str, config: OpConfig) -> BlockSeconds:
        """Return what techniques add to the computation of one block."""
        key = self.step.alike[block], config
        if key not in self._known.seconds:
            seconds = BlockSeconds()
            for technique in self.techniques(config):
                technique.add_seconds(seconds, self.step, block, config)
            self._known.seconds[key] = seconds
        return self._known.seconds[key]

    def span(self, block: str) -> slice:
        """Return the segments in which `block` takes time.

        The root takes time in all of them: its exchanges enclose those of all others.
        """
        if block == ROOT:
            return slice(0, max(self.step.segments.count, 1))
        first, last = self.step.segments.of_block.get(block, (0, 0))
        return slice(first, last + 1)

    def block_times(self, block: str, config: OpConfig) -> Array:
        """Return c, b and u of one block in each segment of its `span` (3, segment)."""
        key = self.timed_alike[block], config
        if key not in self._known.times:
            seconds = self.block_seconds(block, config)
            # kernels of all microbatches; only the last backward hides exchanges
            forward, backward = (
                share * of_block
                for share, of_block in zip(
                    seconds.kernels, self.step.compute[block][:, self.span(block)], strict=True
                )
            )
            times, count = np.zeros((3, max(len(forward), 1))), self.step.num_microbatches
            times[0, : len(forward)] += count * (forward + backward)
            times[1, : len(backward)] += backward
            # a gather runs beside the segment before it, in forward and in backward
            before, after = self._beside(block)
            in_forward = seconds.gather_foreground[0] + max(
                seconds.gather_background[0] - before, 0.0
            )
            in_backward = seconds.gather_foreground[1] + max(
                seconds.gather_background[1] - after, 0.0
            )
            in_backward += seconds.recompute + seconds.reduce_foreground
            # in backward of the microbatches before the last
            earlier = (count - 1) * seconds.recompute
            times[0, 0] += in_forward + earlier + in_backward + seconds.reduce_last
            times[0, 0] += seconds.update + seconds.broadcast
            times[1, 0] += in_backward
            times[2, 0] += seconds.gather_background[1] + seconds.reduce_background
            self._known.times[key] = times
        return self._known.times[key]

    @cached_property
    def timed_alike(self) -> dict[str, int]:
        """A number for each block; equal ones take equal times under every configuration."""
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
        # Return the computation beside which a block is gathered, in forward and in backward.
        # That is the segment which runs just before it.
        if block == ROOT:
            return 0.0, float(self._all_backward[1]) if len(self._all_backward) > 1 else 0.0
        # in backward the segment after it in forward order comes before
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
        if config not in self._known.techniques:
            self._known.techniques[config] = tuple(
                t for t in TECHNIQUES if t.takes_part(self.step, config)
            )
        return self._known.techniques[config]

    @cached_property
    def _all_forward(self) -> Sequence[float]:
        forward = [times[0] for times in self.step.compute.values()]
        return np.sum(forward, axis=0)  # type: ignore[no-any-return]

    @cached_property
    def _all_backward(self) -> Sequence[float]:
        backward = [times[1] for times in self.step.compute.values()]
        return np.sum(backward, axis=0)  # type: ignore[no-any-return]

    @cached_property
    def _gathered(self) -> dict[int, frozenset[str]]:
        # Blocks, beside the root, of which something is gathered in the forward pass, by level
        placed = set(self.step.segments.of_block) - {ROOT}
        named, trained = (
            frozenset(p.block for p in self.step.graph.parameters if p.trainable or everything)
            for everything in (True, False)
        )
        return {2: trained & placed, 3: named & placed}


def _simplicity(config: OpConfig) -> tuple[bool, bool, bool, bool, int]:
    storage = config.storage
    hybrid = 0 < len(storage.sharded_axes("optimizer_state")) < len(storage.parameters)
    return storage.offload, config.recompute, config.compile, hybrid, storage.level


def network_delay(times: Array) -> Array:
    """Return how much later than computation the network finishes, in seconds (...,).

    `times` (..., 3, segment) hold c, b, u.
    """
    # from the last segment to the first, in the order of backward
    backward, exchange = times[..., 1, ::-1], times[..., 2, ::-1]
    late = np.zeros(times.shape[:-2])
    for k in range(times.shape[-1]):
        # its backward lets the network catch up, then its own exchange is added
        late = np.maximum(late - backward[..., k], 0.0) + exchange[..., k]
    return late


Rows = NDArray[np.intp]


@dataclass(frozen=True)
class PlanBatch:
    """The costs of many plans, n, of one step; the same as `PlanCosts` and `explain` say of each.

    `plans` (n, block) are indices into the `configs` of each block, in the order of `configs`.
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
        # c, b and u of every plan (n, 3, K)
        times = np.zeros((len(self.plans), 3, max(self.costs.step.segments.count, 1)))
        for name, of_block in self._by_block(self.costs.block_times):
            times[:, :, self.costs.span(name)] += of_block
        return np.asarray(times[:, 0].sum(axis=1) + network_delay(times) + self._plan_seconds)

    @cached_property
    def compute_seconds(self) -> Array:
        """The part of `seconds` that is computation (n,)."""

        def computed(name: str, config: OpConfig) -> float:
            seconds = _block_seconds(self.costs, name, config)
            return sum(seconds[kind] for kind in COMPUTATION)

        step = self.costs.step
        total = self._plan_seconds - step.sent_seconds - step.outer_seconds
        for _, of_block in self._by_block(computed):
            total += of_block
        return np.asarray(total)

    def _by_block(self, of: Callable[[str, OpConfig], Any]) -> Iterator[tuple[str, Array]]:
        # Yield each block, and what `of` says of it in every plan (n, ...); equal blocks are equal
        known: dict[tuple[int, int], Array] = {}
        for block, (name, legal) in enumerate(self.configs.items()):
            key = self.costs.timed_alike[name], id(legal)
            if key not in known:
                known[key] = np.array([of(name, config) for config in legal])
            yield name, known[key][self.plans[:, block]]

    @cached_property
    def peak_bytes(self) -> Array:
        """Bytes at the peak (n,)."""
        # what blocks share: total (n, phase)
        phases, costs = self.costs.step.phases, self.costs
        total = np.tile(phases.add_up(costs.shared_lifetimes()), (len(self.plans), 1))
        for technique, rows, blocks in self._by_technique:
            total[rows] += phases.add_up(technique.plan_lifetimes(costs.step, blocks))
        total[:, phases.position[UPDATE]] += self._temporaries
        if costs.step.cluster.device.caching_allocator:
            total += self._fragmentation[:, None]
        # what blocks keep depends on their neighbours: plans with equal ones at a time
        peaks = np.empty(len(self.plans))
        for rows, beside in self._by_neighbours():
            held, of_block = total[rows], np.empty((len(rows), total.shape[1]))
            for block, (name, legal) in enumerate(self.configs.items()):
                chosen = self.plans[rows, block]
                sizes = np.zeros((len(legal), total.shape[1]))
                for c in set(chosen.tolist()):
                    sizes[c] = costs.block_memory(name, legal[c], beside[name])
                # "raise", the default mode, would copy the result once more
                held += np.take(sizes, chosen, axis=0, out=of_block, mode="clip")
            peaks[rows] = held.max(axis=1)
        return peaks

    @cached_property
    def _temporaries(self) -> Array:
        largest, together, sent = np.zeros((3, len(self.plans)))
        for _, sizes in self._by_block(self.costs.temporaries):
            largest = np.maximum(largest, sizes[:, 0])
            together = together + sizes[:, 1]
            sent = sent + sizes[:, 2]
        return np.maximum(np.maximum(largest, together), sent)

    @cached_property
    def _fragmentation(self) -> Array:
        # See `PlanCosts.fragmentation` (n,)
        unused = np.zeros(len(self.plans))
        for block, (name, legal) in enumerate(self.configs.items()):
            if not name and len(self.configs) > 1:
                continue
            each = np.zeros(len(legal))
            for index in set(self.plans[:, block].tolist()):
                each[index] = self.costs.fragmentation(legal[index])
            unused = np.maximum(unused, each[self.plans[:, block]])
        return unused

    def _by_neighbours(self) -> Iterator[tuple[Rows, dict[str, Neighbours]]]:
        # Plans that gather the same blocks, and the neighbours of these
        is_gathered = self.costs.is_gathered
        gathered = np.stack(
            [
                np.array([is_gathered(name, config) for config in legal])[self.plans[:, block]]
                for block, (name, legal) in enumerate(self.configs.items())
            ],
            axis=1,
        )
        for rows, _ in _equal_rows(gathered):
            yield rows, self.costs.neighbours(self.configs_of(int(rows[0])))

    @cached_property
    def _by_technique(self) -> list[tuple[Technique, Rows, frozenset[str]]]:
        # Techniques, the plans (rows) in which they place the same blocks, and these blocks
        several = {config for legal in self.configs.values() for config in legal}
        takes_part = {
            config: [t in self.costs.techniques(config) for t in TECHNIQUES] for config in several
        }
        # (block, n, technique): whether a technique places a block in a plan
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
    # Yield the indices of equal rows of `table` (n, block), and what they are
    groups: dict[bytes, list[int]] = {}
    for index, row in enumerate(table):
        groups.setdefault(row.tobytes(), []).append(index)
    for rows in groups.values():
        yield np.array(rows, np.intp), table[rows[0]]


# ---- a plan taken apart --------------------------------------------------------------------------


@dataclass(frozen=True)
class Explanation:
    """What a plan is expected to cost on each rank, in seconds and bytes.

    Args:
        step_seconds: `compute_seconds` + `exposed_communication_seconds`
        seconds: the work by kind; exchanges in full, overlapped or not
        peak_phase: the phase of `peak_bytes`, ``"backward 3"`` for instance
        peak_parts: what is alive in that phase, in bytes by kind
        phases: the bytes of every phase, in the order of time
    """

    step_seconds: float
    compute_seconds: float
    exposed_communication_seconds: float
    seconds: Mapping[str, float]
    peak_bytes: float
    peak_phase: str
    peak_parts: Mapping[str, float]
    phases: Mapping[str, float]


def explain(costs: PlanCosts, configs: Configs) -> Explanation:
    """Return what the plan that gives each block its entry of `configs` costs.

    Raises:
        ValueError: a block has no configuration, or one that no technique places
    """
    costs.check(configs)
    # time
    seconds = seconds_by_kind(costs, configs)
    compute = sum(seconds[kind] for kind in COMPUTATION)
    step_seconds = costs.seconds(configs)
    # memory: bytes (phase,) of every kind, and the phase in which their sum is largest
    lifetimes, beside = [*costs.plan_lifetimes(configs)], costs.neighbours(configs)
    for name, config in configs.items():
        lifetimes += costs.block_lifetimes(name, config, beside[name])
    order, parts = costs.step.phases.order, costs.step.phases.by_kind(lifetimes)
    total = np.sum([*parts.values()], axis=0)
    peak = int(np.argmax(total))
    return Explanation(
        step_seconds=step_seconds,
        compute_seconds=compute,
        exposed_communication_seconds=max(step_seconds - compute, 0.0),
        seconds=seconds,
        peak_bytes=float(total[peak]),
        peak_phase=_name(order[peak]),
        peak_parts={kind: float(sizes[peak]) for kind, sizes in parts.items()},
        phases={_name(phase): float(size) for phase, size in zip(order, total, strict=True)},
    )


def seconds_by_kind(costs: PlanCosts, configs: Configs) -> dict[str, float]:
    """Return the work of a step in seconds by kind, overlapped or not."""
    # the sum over blocks
    blocks = [_block_seconds(costs, name, config) for name, config in configs.items()]
    found = {kind: sum(block[kind] for block in blocks) for kind in blocks[0]}
    # what the blocks of a plan take together counts as update, but for the host's part
    found["forward"] += costs.step.host_seconds
    outer = costs.step.outer_seconds
    found["update"] += (
        costs.plan_seconds(configs) - costs.step.sent_seconds - costs.step.host_seconds - outer
    )
    found["reduce"] += outer
    return {**found, "buffers": costs.step.sent_seconds}


def _block_seconds(costs: PlanCosts, name: str, config: OpConfig) -> dict[str, float]:
    time, (forward, backward) = costs.block_seconds(name, config), costs.step.compute[name]
    count = costs.step.num_microbatches
    return {
        "forward": count * time.kernels[0] * float(forward.sum()),
        "backward": count * time.kernels[1] * float(backward.sum()),
        "recompute": count * time.recompute,
        "update": time.update,
        "gather": sum(time.gather_foreground) + sum(time.gather_background),
        "reduce": time.reduce_foreground + time.reduce_background + time.reduce_last,
        "broadcast": time.broadcast,
    }


def _name(phase: Phase) -> str:
    return phase[0] if phase in ONCE else f"{phase[0]} {phase[1]}"
