"""Passes wait for one another: `Edges` says which each needs, and `run_order` finds an order that
they can run in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from lightning_topt.schedules.schedule import Action, Kind, Schedule


class Done(NamedTuple):
    """A pass that has been run; ``"backward"`` stands for backward and backward_input, with which
    stages before can go on.
    """

    kind: str
    stage_index: int
    microbatch_index: int


class Edges:
    """Edges are tensors that stages receive: `sources` of each stage, and `readers`, from whom
    gradients come back.
    """

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

    @cached_property
    def inputs(self) -> dict[tuple[Kind, int], tuple[tuple[str, int], ...]]:
        """Results (kind, stage) of the same microbatch before which a pass (kind, stage) cannot
        run.
        """
        found: dict[tuple[Kind, int], tuple[tuple[str, int], ...]] = {}
        for stage in range(len(self.sources)):
            readers = (
                ("forward", stage),
                *(("backward", reader) for reader in self.readers[stage]),
            )
            found["forward", stage] = tuple(("forward", source) for source in self.sources[stage])
            found["backward", stage] = found["backward_input", stage] = readers
            found["backward_weight", stage] = found["update", stage] = (("backward", stage),)
        return found


class Waiting(NamedTuple):
    """The action with which a rank waits, and a pass that it waits for."""

    action: Action
    missing: Done


def run_order(
    schedule: Schedule, edges: Edges
) -> tuple[list[tuple[int, Action]], dict[int, Waiting]]:
    """Return (rank, action) in an order in which all can run, and where each rank hangs that does
    not come to its end.

    Sends do not block: a rank waits for what it receives alone.
    """
    order: list[tuple[int, Action]] = []
    done: set[tuple[str, int, int]] = set()  # plain tuples, which equal `Done`, are made faster
    positions = [0] * schedule.num_ranks
    waiting: dict[int, Waiting] = {}
    waited_for: dict[tuple[str, int, int], list[int]] = {}
    inputs, ready = edges.inputs, list(range(schedule.num_ranks))
    while ready:
        rank = ready.pop()
        waiting.pop(rank, None)
        for action in islice(schedule.actions[rank], positions[rank], None):
            kind, stage, index = action.kind, action.stage_index, action.microbatch_index
            missing = next(
                (each for each in inputs[kind, stage] if (*each, index) not in done), None
            )
            if missing is not None:
                waiting[rank] = Waiting(action, Done(*missing, index))
                waited_for.setdefault(waiting[rank].missing, []).append(rank)
                break
            positions[rank] += 1
            order.append((rank, action))
            if kind not in ("backward_weight", "update"):
                result = ("forward" if kind == "forward" else "backward", stage, index)
                done.add(result)
                ready += waited_for.pop(result, ())
    return order, waiting
