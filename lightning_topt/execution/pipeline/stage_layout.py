"""The layout of a pipeline: stages need parameters and change buffers, and run on ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_topt.graph.step_flow import StepFlow


@dataclass(frozen=True)
class StageLayout:
    """A layout says that stage s runs on rank ``rank_of_stage[s]`` of a pipeline and needs the
    parameters ``parameters[s]``.

    Each parameter has its first name in the module. Those that no stage needs are on all ranks.
    `buffers` has the stage that changes each buffer that one changes.
    """

    rank_of_stage: tuple[int, ...]
    parameters: tuple[frozenset[str], ...]
    buffers: Mapping[str, int]

    @classmethod
    def of_flow(
        cls,
        flow: StepFlow,
        stage_of_call: Sequence[int],
        module: nn.Module,
        *,
        rank_of_stage: Sequence[int],
    ) -> StageLayout:
        """Return the layout of `module` for a step with the calls of `flow`."""
        names = {parameter: name for name, parameter in module.named_parameters()}
        needed: list[set[str]] = [set() for _ in rank_of_stage]
        for call, stage in zip(flow.calls, stage_of_call, strict=True):
            needed[stage] |= {
                names[parameter] for parameter in module.get_submodule(call.module).parameters()
            }
            needed[stage] |= call.reads
        needed[-1] |= flow.end_reads
        return cls(
            tuple(rank_of_stage),
            tuple(map(frozenset, needed)),
            written_buffers(flow, stage_of_call),
        )

    def stages_of(self, name: str) -> tuple[int, ...]:
        """Return the stages that need the parameter `name`; none where nothing does."""
        return tuple(stage for stage, needed in enumerate(self.parameters) if name in needed)

    def holders(self, name: str) -> tuple[int, ...]:
        """Return the ranks of the pipeline that keep the parameter `name`, first the owner; none:
        all do.
        """
        return tuple(dict.fromkeys(self.rank_of_stage[stage] for stage in self.stages_of(name)))


def written_buffers(flow: StepFlow, stage_of_call: Sequence[int]) -> dict[str, int]:
    """Return the stage that changes each buffer which the step changes: the last one where several
    do.
    """
    found = {
        name: stage
        for call, stage in zip(flow.calls, stage_of_call, strict=True)
        for name in call.writes
    }
    return found | dict.fromkeys(flow.end_writes, max(stage_of_call, default=0))
