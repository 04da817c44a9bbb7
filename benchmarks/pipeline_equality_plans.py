"""The plans that `pipeline_equality` compares with one process: every schedule on every number of
ranks, and mixtures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.equality_tables import Refusal
from benchmarks.tensor_equality_models import Model
from benchmarks.tensor_equality_plans import Plan
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, StagePlan
from lightning_topt.schedules.schedules import SCHEDULES
from lightning_topt.techniques.registry import check_runs

ONE_STAGE = [name for name, rule in SCHEDULES.items() if rule.least_stages == 1]  # per rank
TWO_STAGES = [name for name, rule in SCHEDULES.items() if rule.least_stages == 2]
D2, T2 = ("data", 2), ("tensor", 2)


@dataclass(frozen=True)
class PipelinePlan(Plan):
    """A pipeline of `schedule`, `per_rank` stages on each rank of the axis "pipeline"; the rest as
    in `Plan`.

    Blocks are dealt out in order, equally many to each stage; the block "" stands in every stage.
    """

    schedule: str = "1f1b"
    per_rank: int = 1
    draws: bool = True  # whether models that draw random numbers draw those of one process

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return dict(self.axes)["pipeline"] * self.per_rank

    def of(self, model: Model) -> ParallelPlan:
        """Return the plan for `model`."""
        *blocks, rest = self.blocks_of(model)
        return ParallelPlan(
            self.mesh,
            tuple(StagePlan((*part, rest)) for part in _parts(blocks, self.num_stages)),
            schedule=self.schedule,
            num_microbatches=self.microbatches,
        )

    def refusal(self, model: Model) -> Refusal | None:
        """Return why `model` is not compared under this plan."""
        if "dropout" in model.make.__name__ and not self.draws:
            return Refusal("ranks of a data or tensor axis draw other numbers than one process")
        try:
            check_runs(self.mesh, self.of(model).configs, None)
        except ValueError as error:
            return Refusal(error)
        return None


def _parts(blocks: Sequence[BlockPlan], count: int) -> Iterator[Sequence[BlockPlan]]:
    sizes = [len(blocks) // count + (index < len(blocks) % count) for index in range(count)]
    start = 0
    for size in sizes:
        yield blocks[start : start + size]
        start += size


def _plan(
    schedule: str,
    ranks: int,
    *more: tuple[str, int],
    storage: str = "ddp",
    microbatches: int | None = None,
    note: str = "",
) -> PipelinePlan:
    name = " x ".join([f"{schedule} {ranks}", *(f"{axis} {size}" for axis, size in more)]) + note
    count = microbatches or {2: 4, 3: 6, 4: 8, 8: 8}[ranks]
    return PipelinePlan(
        name,
        [("pipeline", ranks), *more],
        storage,
        microbatches=count,
        schedule=schedule,
        per_rank=2 if schedule in TWO_STAGES else 1,
        draws=not more,
    )


def _mixtures() -> Iterator[PipelinePlan]:
    for schedule in ("gpipe", "1f1b", "zero_bubble", "interleaved", "zbv"):
        yield _plan(schedule, 2, D2)
        yield _plan(schedule, 2, D2, storage="zero1", note=", ZeRO-1")
        yield _plan(schedule, 2, storage="ddp+ ddp", note=" + recomputation")
        yield _plan(schedule, 2, T2)
    for schedule in ("1f1b", "zbv"):
        yield _plan(schedule, 4, D2, microbatches=4)
        yield _plan(
            schedule, 4, D2, storage="zero1+ zero1", microbatches=4, note=", ZeRO-1 + recomputation"
        )
        yield _plan(schedule, 4, T2)
        yield _plan(schedule, 2, D2, T2, storage="zero1+ zero1", note=", ZeRO-1 + recomputation")


PLANS: list[PipelinePlan] = [
    *(_plan(schedule, ranks) for schedule in ONE_STAGE for ranks in (2, 3, 4, 8)),
    *(_plan(schedule, ranks) for schedule in TWO_STAGES for ranks in (2, 3, 4)),
    _plan("1f1b", 4, microbatches=2, note=", fewer microbatches than stages"),
    _plan("interleaved", 3, microbatches=4, note=", microbatches that ranks do not divide"),
    *_mixtures(),
]
