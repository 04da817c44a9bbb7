"""Versions of a stage's weights that passes in flight have used: those that weight stashing keeps
beside the newest one.
"""

from __future__ import annotations

from lightning_topt.schedules.schedule import Action, Schedule


class KeptVersions:
    """Counts the copies of a stage's weights, from one of its actions to the next.

    A copy is made when an update is to replace weights that a forward pass in flight has used, and
    given up after the last backward pass of those that did.
    """

    def __init__(self) -> None:
        self._used: dict[int, int] = {}  # version by minibatch
        self._newest = 0

    def change(self, action: Action) -> int:
        """Return how many copies more there are with this action, -1 to 1."""
        if action.kind == "forward":
            self._used[action.microbatch_index] = self._newest
        elif action.kind in ("backward", "backward_weight"):
            version = self._used.pop(action.microbatch_index, self._newest)
            return -1 if version != self._newest and version not in self._used.values() else 0
        elif action.kind == "update":
            self._newest += 1
            return int(self._newest - 1 in self._used.values())
        return 0


def kept_versions(schedule: Schedule) -> tuple[int, ...]:
    """Return the most copies of each stage's weights at once under weight stashing (PipeDream),
    (stages,).
    """
    stages = [KeptVersions() for _ in range(schedule.num_stages)]
    now, most = [0] * len(stages), [0] * len(stages)
    for action in (action for actions in schedule.actions for action in actions):
        stage = action.stage_index
        now[stage] += stages[stage].change(action)
        most[stage] = max(most[stage], now[stage])
    return tuple(most)
