"""An event simulation of a pipeline with a clock and a queue per link: the twin of `simulate`."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from lightning_topt.schedules.schedules import Action, Schedule
from lightning_topt.schedules.timing import StageCosts


class SlowSimulator:
    """Ranks and links are processes that wake one another."""

    def __init__(self, schedule: Schedule, costs: StageCosts) -> None:
        self.schedule, self.costs = schedule, costs
        stages, ranks = range(schedule.num_stages), range(schedule.num_ranks)
        self.edges = (
            list(itertools.pairwise(stages))
            if costs.transfer_seconds is None
            else list(costs.transfer_seconds)
        )
        self.work = [deque(actions) for actions in schedule.actions]
        self.busy = [False for _ in ranks]
        self.done: set[Any] = set()
        self.arrived: set[Any] = set()
        self.links: dict[tuple[int, int], deque[Any]] = {}
        self.link_busy: set[tuple[int, int]] = set()
        self.now, self.events, self.counter = 0.0, [], itertools.count()
        self.spans: dict[Action, tuple[float, float]] = {}

    def run(self) -> float:
        for rank in range(self.schedule.num_ranks):
            self.wake(rank)
        while self.events:
            self.now, _, happen = heapq.heappop(self.events)
            happen()
        assert not any(self.work), "hangs"
        return self.now

    def tensors(self, action: Action, *, out: bool) -> list[Any]:
        """Return (source, target, gradient, microbatch) of what an action moves between ranks."""
        back, rank_of = action.kind != "forward", self.schedule.rank_of_stage
        if action.kind in ("backward_weight", "update"):
            return []
        # forward goes out at the edge's source, a gradient at its target
        end = 0 if out != back else 1
        return [
            (*edge, back, action.microbatch_index)
            for edge in sorted(self.edges)
            if edge[end] == action.stage_index and rank_of[edge[0]] != rank_of[edge[1]]
        ]

    def at(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.counter), happen))

    def seconds_of(self, tensor: Any) -> float:
        source, target, back, _ = tensor
        table = self.costs.transfer_seconds
        if back and self.costs.gradient_seconds is not None:
            table = self.costs.gradient_seconds
        return 0.0 if table is None else table[source, target]

    def ends_of(self, tensor: Any) -> tuple[int, int]:
        source, target, back, _ = tensor
        ranks = self.schedule.rank_of_stage[source], self.schedule.rank_of_stage[target]
        return ranks[::-1] if back else ranks

    def wake(self, rank: int) -> None:
        if self.busy[rank] or not self.work[rank]:
            return
        action = self.work[rank][0]
        if all(each in self.arrived for each in self.tensors(action, out=False)):
            self.start(rank, action)

    def occupy(self, rank: int, seconds: float, then: Callable[[], None]) -> None:
        self.work[rank].popleft()
        self.busy[rank] = True

        def end() -> None:
            self.busy[rank] = False
            then()
            self.wake(rank)

        self.at(seconds, end)

    def start(self, rank: int, action: Action) -> None:
        stage, costs, begun = action.stage_index, self.costs, self.now

        def end() -> None:
            self.spans[action] = begun, self.now
            for tensor in self.tensors(action, out=True):
                self.links.setdefault(self.ends_of(tensor), deque()).append(tensor)
                self.pump(self.ends_of(tensor))

        self.occupy(rank, (getattr(costs, action.kind) or [0.0] * 99)[stage], end)

    def pump(self, link: tuple[int, int]) -> None:
        if link in self.link_busy or not self.links[link]:
            return
        tensor = self.links[link].popleft()
        self.link_busy.add(link)

        def end() -> None:
            self.arrived.add(tensor)
            self.link_busy.remove(link)
            self.pump(link)
            self.wake(link[1])

        self.at(self.seconds_of(tensor), end)
