"""ZBV: two stages per rank along a V, so that the first and the last stage share rank 0 and memory
is balanced.
"""

from __future__ import annotations

from lightning_topt.schedules.schedule import Action, Kind, Schedule
from lightning_topt.schedules.stage_places import v_shaped_ranks


def zbv(*, num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Return ZB-V (Qi et al., arXiv 2401.10241, section 6; its kin in arXiv 2405.15362): rank r
    runs stages r and 2P - 1 - r.

    Without bubbles but for the ramp where forward, backward_input and backward_weight take the same
    time and there are at least 2P - 1 microbatches; with fewer, it is the schedule of 2P - 1
    without those that are not there.
    """
    assert stages_per_rank == 2
    actions = tuple(_of_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
    return Schedule("zbv", num_microbatches, v_shaped_ranks(num_ranks), actions)


def _of_rank(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    planned = max(2 * num_ranks - 1, num_microbatches)
    passes = _Passes(down=rank, up=2 * num_ranks - 1 - rank)
    passes.add("F0", times=2 * (num_ranks - rank) - 1)
    passes.add("F1 F0", times=rank)
    passes.add("F1 B1 W1", times=num_ranks - rank)
    while passes.count("F1") < planned:
        passes.add("F0 B0 W0" if passes.count("F0") < planned else "B0 W0")
        passes.add("F1 B1 W1")
    passes.add("B0 B1", times=rank)
    passes.add("B0 W0", times=num_ranks - rank)
    passes.add("W1", times=planned - passes.count("W1"))
    passes.add("W0", times=planned - passes.count("W0"))
    return tuple(action for action in passes.actions if action.microbatch_index < num_microbatches)


class _Passes:
    """The actions of a rank so far. Passes are named as in the paper: F, B, W of stage 0 (down the
    V) or 1 (up).
    """

    def __init__(self, *, down: int, up: int) -> None:
        self.actions: list[Action] = []
        self._stages = {"0": down, "1": up}
        self._counts: dict[str, int] = {}

    def count(self, name: str) -> int:
        return self._counts.get(name, 0)

    def add(self, names: str, *, times: int = 1) -> None:
        """Add the next microbatches of the passes `names`, all of them in turn, `times` over."""
        kinds: dict[str, Kind] = {"F": "forward", "B": "backward_input", "W": "backward_weight"}
        for name in names.split() * times:
            self.actions.append(Action(kinds[name[0]], self._stages[name[1]], self.count(name)))
            self._counts[name] = self.count(name) + 1
