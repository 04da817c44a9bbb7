"""Verify the stages of a plan before its ranks exist: a step is traced on shapes, and its schedule
is run through.

For any number of ranks: which parameters each keeps, and what it sends. Nothing is started and
nothing allocated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
from torch import nn
from torch.optim import Optimizer

from lightning_topt.costs.optimizer import OptimizerProfile
from lightning_topt.execution.held_bytes import KINDS, Blocks, Integers, held_bytes
from lightning_topt.execution.pipeline.messages import Crossings, Message, around_actions
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.execution.pipeline.stage_layout import StageLayout
from lightning_topt.graph.flow_stages import assign_calls
from lightning_topt.graph.flow_trace import trace_flow
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.schedules.check import check_schedule
from lightning_topt.schedules.schedules import Schedule, make_schedule


@dataclass(frozen=True)
class MessageRow:
    """A row says that one rank sends another `count` messages of `nbytes` bytes in all in a step.

    `sender` and `receiver` are places along the pipeline axis; `what` is ``"activations"`` or
    ``"gradients"``.
    """

    sender: int
    receiver: int
    what: str
    count: int
    nbytes: int


@dataclass(frozen=True)
class StagedStep:
    """A step of a plan with stages: the parameters and buffers of each stage (`layout`), and the
    messages between ranks.
    """

    layout: StageLayout
    messages: tuple[MessageRow, ...]

    @classmethod
    def of(
        cls,
        plan: ParallelPlan,
        module: nn.Module,
        example: Example,
        *,
        forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> StagedStep:
        """Return that of `module`, which needs no memory, with microbatches like that of `example`.

        Raises ValueError for a schedule that these ranks cannot have or that would hang with what
        stages need of one another, and for a step that cannot be cut like this.
        """
        assert plan.schedule is not None, "a plan without stages"
        schedule = make_schedule(
            plan.schedule,
            num_ranks=plan.mesh.pipeline_size,
            num_microbatches=plan.num_microbatches,
            stages_per_rank=plan.stages_per_rank,
        )
        blocks = [
            tuple(block.block for block in stage.blocks if block.block) for stage in plan.stages
        ]
        units = [name for names in blocks for name in names]
        flow = trace_flow(
            module, example.step, example.microbatch, units=units, forward_context=forward_context
        )
        stage_of_call = assign_calls(flow, blocks)
        targets = flow.crossings(stage_of_call)
        crossings = Crossings(targets, {ref: flow.spec(ref) for ref in targets}, stage_of_call)
        check_schedule(schedule, needs=_needs(crossings))
        layout = StageLayout.of_flow(
            flow, stage_of_call, module, rank_of_stage=schedule.rank_of_stage
        )
        return cls(layout, _messages(schedule, crossings))

    def held(
        self,
        plan: ParallelPlan,
        blocks: Blocks,
        *,
        optimizers: Sequence[Optimizer] = (),
        profile: OptimizerProfile | None = None,
    ) -> dict[str, Integers]:
        """Return what `held_bytes` returns, each rank with the parameters that its stages need."""
        mesh, configs = plan.mesh, {block.block: block.config for block in plan.blocks}
        held = {block: np.zeros((mesh.size, len(KINDS)), np.int64) for block in blocks}
        places = np.array([mesh.pipeline_rank(rank) for rank in range(mesh.size)])
        for place in range(mesh.pipeline_size):
            own = self._kept(blocks, place)
            of_place = held_bytes(own, configs, mesh, optimizers=optimizers, profile=profile)
            for block, sizes in of_place.items():
                held[block][places == place] = sizes[places == place]
        return held

    def _kept(self, blocks: Blocks, place: int) -> dict[str, Mapping[str, nn.Parameter]]:
        """The parameters that the rank `place` of the pipeline keeps; a tied one is kept under all
        of its names.
        """
        names_of: dict[nn.Parameter, list[str]] = defaultdict(list)
        for parameters in blocks.values():
            for name, parameter in parameters.items():
                names_of[parameter].append(name)
        kept = set()
        for parameter, names in names_of.items():
            holders = {rank for name in names for rank in self.layout.holders(name)}
            if not holders or place in holders:
                kept.add(parameter)
        return {
            block: {n: p for n, p in parameters.items() if p in kept}
            for block, parameters in blocks.items()
        }


def _needs(crossings: Crossings) -> dict[int, list[int]]:
    """For each stage the earlier ones that it receives from."""
    sources: dict[int, set[int]] = {}
    for ref, targets in crossings.targets.items():
        for target in targets:
            sources.setdefault(target, set()).add(crossings.stage_of_call[ref.call])
    return {target: sorted(found) for target, found in sources.items()}


def _messages(schedule: Schedule, crossings: Crossings) -> tuple[MessageRow, ...]:
    of_all, sizes = (
        [crossings] * schedule.num_microbatches,
        defaultdict[tuple[int, int, str], list[int]](list),
    )
    for rank in range(schedule.num_ranks):
        for step in around_actions(schedule, of_all, rank=rank):
            for message in step.sends:
                if message.sender != message.receiver:
                    sizes[_row_of(message)].append(message.spec.nbytes)
    return tuple(MessageRow(*key, len(found), sum(found)) for key, found in sorted(sizes.items()))


def _row_of(message: Message) -> tuple[int, int, str]:
    return message.sender, message.receiver, "gradients" if message.is_gradient else "activations"
