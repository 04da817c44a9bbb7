"""A flow is cut into stages: which stage runs each call."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lightning_topt.graph.errors import CaptureError
from lightning_topt.graph.step_flow import Draw, StepFlow


def assign_calls(flow: StepFlow, stages: Sequence[Collection[str]]) -> tuple[int, ...]:
    """Return the stage of each call: that of its block in `stages`, else that of the call before
    it, and 0 at the start.

    Raises ValueError for stages without blocks and blocks in two stages; CaptureError, one as well,
    for a block that the step does not call, calls that would go back to an earlier stage, and calls
    that must not be on two stages.
    """
    stage_of_block: dict[str, int] = {}
    for stage, blocks in enumerate(stages):
        if not blocks:
            raise ValueError(
                f"stage {stage} of {len(stages)} has no blocks; take fewer stages, or move the cuts"
            )
        for block in blocks:
            if block in stage_of_block:
                raise ValueError(
                    f"block {block!r} is in stages {stage_of_block[block]} and {stage}; it belongs "
                    "to one of them"
                )
            stage_of_block[block] = stage
    if missing := stage_of_block.keys() - {call.module for call in flow.calls}:
        raise CaptureError(
            f"the step does not call {', '.join(map(repr, sorted(missing)))} as modules, so no "
            "stage can begin there; name blocks that the step calls, or give a plan without a "
            "pipeline"
        )
    assigned: list[int] = []
    for call in flow.calls:
        before = assigned[-1] if assigned else 0
        stage = stage_of_block.get(call.module, before)
        if stage < before:
            raise CaptureError(
                f"call {call.index} of the step, block {call.module!r} of stage {stage}, comes "
                f"after a call of stage {before} ({flow.calls[call.index - 1].module!r}); blocks "
                "have to be in stages in the order of their calls"
            )
        assigned.append(stage)
    if len(stages) > 1:
        _check_bonds(flow, assigned)
        _check_draws(flow)
    return tuple(assigned)


def _check_bonds(flow: StepFlow, stage_of_call: Sequence[int]) -> None:
    last = max(stage_of_call, default=0)
    for bond in flow.bonds:
        is_end = bond.second == len(flow.calls)
        second = last if is_end else stage_of_call[bond.second]
        if stage_of_call[bond.first] != second:
            reader = (
                "after the last block" if is_end else f"by block {flow.calls[bond.second].module!r}"
            )
            raise CaptureError(
                f"no cut may lie between block {flow.calls[bond.first].module!r} (stage "
                f"{stage_of_call[bond.first]}) and what follows it up to stage {second}: it "
                f"{bond.reason} {reader}. Put both in one stage, or give a plan without a pipeline"
            )


def _check_draws(flow: StepFlow) -> None:
    def check(draws: Sequence[Draw], place: str) -> None:
        for draw in draws:
            if draw.problem:
                raise CaptureError(
                    f"{place} draws {draw.problem}, and stages that do not run it could not draw "
                    "the same; give a plan without a pipeline"
                )

    for call in flow.calls:
        check(call.draws_before, f"the step, before block {call.module!r},")
        check(call.draws, f"block {call.module!r}")
    check(flow.end_draws, "the step, after its last block,")
