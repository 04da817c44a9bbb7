"""Costs of a chain of blocks whose runs of neighbours are the stages of a pipeline.

A stage takes one of its variants (a device, a level of sharding), a block one configuration. With M
microbatches, w how many of them a stage holds activations of at most (its schedule says how many),
everything else sums over the blocks of a stage:

    step_seconds   sum over stages of lead  +  the largest load of a stage
                   lead = lead_rate * seconds + constants
                   load = load_rate * seconds + once_rate * once + constants
    peak_bytes     the largest of
                   static + w * kept + the largest hump                   while passes run
                   static + h * kept + g * waiting + the largest hump     while passes run
                   static + v * kept + update                             while the optimizer steps

The lead is what the first microbatch takes on its way through, the load what the slowest stage
takes besides. A backward pass in two parts leaves `waiting` bytes between them: of h microbatches
that are held, g are there for these alone.

1F1B and GPipe have lead_rate 1, load_rate M - 1; v is 0 but in a pipeline that never flushes (w -
1), which has lead_rate 0, load_rate 1. A stage that begins with block n pays for what it receives
(`StageLink`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_topt.costs.chain_table import Array

Indices = NDArray[np.intp]
COLUMNS = ("seconds", "once", "static", "kept", "hump")


@dataclass(frozen=True, eq=False)
class StageBlock:
    """Costs of one block under each of its `configs`, arrays (config,).

    Args:
        configs: names of the configurations.
        seconds: forward and backward of one microbatch.
        once: seconds once per step: its exchange of gradients, its update.
        static: bytes that are there all the step.
        kept: bytes from its forward to its backward, for each microbatch in flight.
        hump: peak bytes above these while it runs.
    """

    configs: tuple[Any, ...]
    seconds: Array
    once: Array
    static: Array
    kept: Array
    hump: Array

    def __post_init__(self) -> None:
        if not self.configs:
            raise ValueError("a block has no configuration")
        for name in COLUMNS:
            value = getattr(self, name)
            if value.shape != (len(self.configs),):
                raise ValueError(f"{name} has shape {value.shape}, expected {(len(self.configs),)}")
            forbids = name == "seconds"
            if (
                np.isnan(value).any()
                or (value < 0).any()
                or not (forbids or np.isfinite(value).all())
            ):
                raise ValueError(
                    f"{name} must be finite and not negative; forbid configurations with infinite "
                    "seconds"
                )


@dataclass(frozen=True, eq=False)
class StageChain:
    """A chain of blocks; several tables may share one.

    `blocks` are the distinct ones, ``order[n]`` says which of them block n is.
    """

    blocks: tuple[StageBlock, ...]
    order: tuple[int, ...]

    @cached_property
    def costs(self) -> tuple[tuple[tuple[float, ...], ...], ...]:
        """The costs of each block under each configuration, as plain numbers.

        In the order of `COLUMNS`.
        """
        columns = ([getattr(block, name).tolist() for name in COLUMNS] for block in self.blocks)
        return tuple(tuple(zip(*each, strict=True)) for each in columns)

    def __post_init__(self) -> None:
        if not self.order or any(not 0 <= index < len(self.blocks) for index in self.order):
            raise ValueError(
                f"a chain has blocks from 0 to {len(self.blocks) - 1}, got {self.order}"
            )


@dataclass(frozen=True, eq=False)
class StageVariant:
    """One way for all blocks of a stage.

    `lead`, `load` and `static` (distinct block,) come on top of those of `chain`; `update` are
    bytes that the optimizer takes while it steps, `waiting` those of a microbatch between the two
    parts of its backward.
    """

    chain: StageChain
    lead: Array
    load: Array
    static: Array
    update: Array
    waiting: Array

    @classmethod
    def of(cls, chain: StageChain) -> StageVariant:
        """Return the costs of `chain` as they are."""
        nothing = np.zeros(len(chain.blocks))
        return cls(chain, nothing, nothing, nothing, nothing, nothing)


@dataclass(frozen=True, eq=False)
class StageLink:
    """What a stage pays that begins with block n, arrays (block,); the first stage pays nothing.

    `lead` and `load` are seconds as in the table; its load is at least `floor`, what the link is
    busy; `kept` are the bytes that it receives, for each microbatch in flight.
    """

    lead: Array
    load: Array
    floor: Array
    kept: Array

    @classmethod
    def none(cls, count: int) -> StageLink:
        """Return a link that costs nothing, of a chain of `count` blocks."""
        return cls(*np.zeros((4, count)))


@dataclass(frozen=True)
class StageKind:
    """What one stage may be.

    Attributes:
        variants: indices of those that it may take.
        in_flight: microbatches that it holds at most.
        link: what it receives through.
        waits: (h, g): h microbatches held, g of which between the two parts of their backward.
        in_update: microbatches that it holds while its optimizer steps.
    """

    variants: tuple[int, ...]
    in_flight: float
    link: int = 0
    waits: tuple[tuple[float, float], ...] = ()
    in_update: float = 0.0

    @property
    def held(self) -> tuple[tuple[float, float], ...]:
        """All times that may be the worst, as in `waits`."""
        return (self.in_flight, 0.0), *self.waits


@dataclass(frozen=True, eq=False)
class StageTable:
    """A pipeline to be cut: its `stages` in order, each of at least one block.

    `shared` (3, first block, end): seconds of load, static bytes and those of the update that a
    stage of these blocks pays besides, None: none. Every plan also pays `fixed_seconds` and
    `fixed_bytes`. Raises ValueError for fewer blocks than stages.
    """

    variants: tuple[StageVariant, ...]
    stages: tuple[StageKind, ...]
    links: tuple[StageLink, ...]
    lead_rate: float
    load_rate: float
    once_rate: float = 1.0
    shared: Array | None = None
    fixed_seconds: float = 0.0
    fixed_bytes: float = 0.0

    def __post_init__(self) -> None:
        orders = {variant.chain.order for variant in self.variants}
        if len(orders) != 1:
            raise ValueError("all variants of a stage have the same chain of blocks")
        if not 1 <= len(self.stages) <= len(self.order):
            raise ValueError(
                f"{len(self.order)} blocks cannot be cut into {len(self.stages)} stages"
            )

    @property
    def order(self) -> tuple[int, ...]:
        """The place of each block among the distinct ones."""
        return self.variants[0].chain.order

    def evaluate(
        self, ends: Sequence[int], variants: Sequence[int], configs: Sequence[int]
    ) -> tuple[float, float]:
        """Return (step_seconds, peak_bytes) of one plan.

        `ends` (stage,) say before which block each stage ends, `variants` (stage,) and `configs`
        (block,) are indices.
        """
        # leads of stages add up; load and bytes are those of the worst stage
        lead, load, size, first = 0.0, 0.0, 0.0, 0
        for stage, end, variant in zip(self.stages, ends, variants, strict=True):
            own = self._stage(stage, self.variants[variant], first, configs[first:end])
            lead, load, size, first = lead + own[0], max(load, own[1]), max(size, own[2]), end
        return self.fixed_seconds + lead + load, self.fixed_bytes + size

    def _stage(
        self, stage: StageKind, variant: StageVariant, first: int, configs: Sequence[int]
    ) -> tuple[float, float, float]:
        # the distinct block, and its row of costs, for each block of the stage
        kinds = self.order[first : first + len(configs)]
        rows = [variant.chain.costs[kind][c] for kind, c in zip(kinds, configs, strict=True)]
        *sums, humps = zip(*rows, strict=True)
        seconds, once, static, kept = (float(sum(each)) for each in sums)
        # Nothing of infinity, of a configuration that is forbidden, would be no number.
        lead = (self.lead_rate * seconds if self.lead_rate else 0.0) + sum(
            float(variant.lead[kind]) for kind in kinds
        )
        load = (
            self.load_rate * seconds
            + self.once_rate * once
            + sum(float(variant.load[kind]) for kind in kinds)
        )
        static += sum(float(variant.static[kind]) for kind in kinds)
        # bytes while the optimizer steps, and between the two parts of a backward
        update, waiting = (
            sum(float(each[kind]) for kind in kinds) for each in (variant.update, variant.waiting)
        )
        if self.shared is not None:  # what blocks of the stage pay together
            together = self.shared[:, first, first + len(kinds)]
            load, static, update = np.array([load, static, update]) + together
        if first:  # what the stage receives
            link = self.links[stage.link]
            lead, kept = lead + float(link.lead[first]), kept + float(link.kept[first])
            load = max(load + float(link.load[first]), float(link.floor[first]))
        hump = max(humps)
        # bytes at the worst moment: of a pass, or while the optimizer steps
        held = max(count * kept + late * waiting for count, late in stage.held)
        return (
            float(lead),
            float(load),
            float(static + max(held + hump, stage.in_update * kept + update)),
        )
