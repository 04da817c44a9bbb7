"""Passes wait for one another: `Edges` says which each needs, and `run_order` finds an order that they can run in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_topt.schedules.schedule import Action, Schedule


class Done(NamedTuple):
    """A pass that has been run; ``"backward"`` stands for backward and backward_input, with which stages before can go on."""

    kind: str
    stage_index: int
    microbatch_index: int


class Edges:
    """Edges are tensors that stages receive: `sources` of each stage, and `readers`, from whom gradients come back."""

    def __init__(self, num_stages: int, *, needs: Mapping[int, Sequence[int]] | None) -> None:
        """`needs` are earlier stages from which each stage receives, by default the one before it.

        Raises ValueError where a stage needs one that is not before it.
        """
        if needs is None:
            needs = {stage: (stage - 1,) for stage in range(1, num_stages)}
        for stage, sources in needs.items():
            if not 0 <= stage < num_stages or any(not 0 <= source < stage for source in sources):
                raise ValueError(
                    f"a stage receives from stages before it, of 0 to {num_stages - 1}; "
                    f"stage {stage} is to receive from {sorted(sources)}"
                )
        self.sources = tuple(tuple(sorted(needs.get(stage, ()))) for stage in range(num_stages))
        self.readers = tuple(
            tuple(reader for reader in range(num_stages) if stage in self.sources[reader])
            for stage in range(num_stages)
        )

    def inputs(self, action: Action) -> list[Done]:
        """Return the passes, on this rank and others, before which `action` cannot run."""
        kind, stage, index = action.kind, action.stage_index, action.microbatch_index
        if kind == "forward":
            return [Done("forward", source, index) for source in self.sources[stage]]
        if kind == "backward_weight":
            return [Done("backward", stage, index)]
        return [Done("forward", stage, index), *(Done("backward", reader, index) for reader in self.readers[stage])]


def result_of(action: Action) -> Done | None:
    """Return what others can wait for once `action` has run, None for the gradients of parameters."""
    if action.kind == "backward_weight":
        return None
    return Done("forward" if action.kind == "forward" else "backward", action.stage_index, action.microbatch_index)


class Waiting(NamedTuple):
    """The action with which a rank waits, and a pass that it waits for."""

    action: Action
    missing: Done


def run_order(schedule: Schedule, edges: Edges) -> tuple[list[tuple[int, Action]], dict[int, Waiting]]:
    """Return (rank, action) in an order in which all can run, and where each rank hangs that does not come to its end.

    Sends do not block: a rank waits for what it receives alone.
    """
    order: list[tuple[int, Action]] = []
    done: set[Done] = set()
    positions = [0] * schedule.num_ranks
    waiting: dict[int, Waiting] = {}
    ready = list(range(schedule.num_ranks))
    while ready:
        rank = ready.pop()
        waiting.pop(rank, None)
        for action in schedule.actions[rank][positions[rank] :]:
            missing = next((each for each in edges.inputs(action) if each not in done), None)
            if missing is not None:
                waiting[rank] = Waiting(action, missing)
                break
            positions[rank] += 1
            order.append((rank, action))
            if (result := result_of(action)) is not None:
                done.add(result)
                ready += [other for other, wait in waiting.items() if wait.missing == result and other not in ready]
    return order, waiting
