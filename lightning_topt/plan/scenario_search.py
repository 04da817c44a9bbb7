"""The search of one scenario: with the whole batch at once, and as micro-batches whose gradients
are added up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_topt.plan.choose import NoPlanFitsError, choose, fitting_points
from lightning_topt.plan.parallel_plan import PlanError
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint
from lightning_topt.plan.plan_search import search_plans
from lightning_topt.plan.scenarios import Estimate, ModelFacts, Scenario, Work, estimate
from lightning_topt.plan.search_request import SearchRequest

_MOST_MICROBATCHES = 256
_MOST_SHOWN = 100  # of a frontier


@dataclass(frozen=True)
class Found:
    """`Found` is what a search of a scenario found: `estimates` of its frontiers, one for each
    number of micro-batches, thinned out; the chosen one and its frontier.
    """

    scenario: Scenario
    estimates: tuple[Estimate, ...]
    chosen: Estimate
    frontier: PlanFrontier
    facts: ModelFacts

    def on_spot(self, *, work: Work | None) -> Found:
        """Return the same plans on spot devices."""
        scenario = replace(self.scenario, spot=True)

        def of(each: Estimate) -> Estimate:
            return estimate(
                scenario, each.point, facts=self.facts, work=work, accumulate=each.accumulate
            )

        return replace(
            self,
            scenario=scenario,
            estimates=tuple(map(of, self.estimates)),
            chosen=of(self.chosen),
        )


def search_scenario(
    request: SearchRequest,
    scenario: Scenario,
    *,
    objective: str = "time",
    memory_limit: float | None = None,
    memory_margin: float = 0.05,
    accumulate: Sequence[int] | None = None,
    work: Work | None = None,
) -> Found:
    """Return the plans of `request`, on one number of devices, and the best that fits.

    `accumulate` are numbers of micro-batches to try; None: 1, and powers of 2 until more of them
    take longer. Pipelines cut their batches themselves and are searched with one alone. Raises what
    `search_plans` and `choose` raise.
    """
    limit = request.cluster.device.memory_bytes if memory_limit is None else memory_limit
    facts = ModelFacts.of(request.graph, request.optimizer, request.cluster)
    best: tuple[Estimate, PlanFrontier] | None = None
    shown: list[Estimate] = []
    unfit: NoPlanFitsError | None = None
    by, before = _peak if objective == "memory" else _time, math.inf
    stopped = False  # more micro-batches took longer
    for count, asked in _requests(request, accumulate):
        if stopped and asked.split is None:
            continue
        try:
            frontier = search_plans(asked)
        except (PlanError, ValueError):
            if best is None and unfit is None:
                raise
            continue

        def of(point: PlanPoint, count: int = count) -> Estimate:
            return estimate(scenario, point, facts=facts, work=work, accumulate=count)

        fits = fitting_points(frontier.points, memory_limit=limit, memory_margin=memory_margin)
        shown += [of(point) for point in fits[:: max(len(fits) // _MOST_SHOWN, 1)]]
        try:
            goal = objective if objective in ("time", "memory") else "time"
            chosen = of(
                choose(
                    frontier.candidates,
                    objective=goal,
                    memory_limit=limit,
                    memory_margin=memory_margin,
                )
            )
        except NoPlanFitsError as none:
            unfit = none
            continue
        if best is None or by(chosen) < by(best[0]):
            best = chosen, frontier
        stopped |= accumulate is None and count > 1 and by(chosen) >= before
        # the first one has stages to choose from too
        before = by(chosen) if count > 1 else math.inf
    if best is None:
        assert unfit is not None
        raise unfit
    return Found(scenario, tuple(shown), *best, facts)


def of_microbatches(request: SearchRequest, count: int) -> SearchRequest:
    """Return what is searched for one of `count` micro-batches of `request`."""
    if count == 1:
        return request
    return replace(
        request, global_batch_size=request.global_batch_size // count, pipelines=None, stale=None
    )


def _time(each: Estimate) -> float:
    return each.step_seconds


def _peak(each: Estimate) -> float:
    return each.peak_bytes


def _requests(
    request: SearchRequest, accumulate: Sequence[int] | None
) -> Iterator[tuple[int, SearchRequest]]:
    """Numbers of micro-batches with what is searched for each. Where nobody says which, meshes with
    a tensor axis are looked at for the first and the last alone: the others cost searches and are
    in between.
    """
    batch, (devices,) = request.global_batch_size, request.device_counts
    if accumulate and (wrong := [count for count in accumulate if batch % count]):
        raise ValueError(
            f"a batch of {batch} samples cannot be cut into {wrong[0]} equal micro-batches "
            "(accumulate)"
        )
    least = (
        max(devices // request.cluster.devices_per_node, 1)
        if request.split is not None
        else devices
    )
    least = least if request.mesh is None else request.mesh.data_parallel_size
    powers = [2**k for k in range(_MOST_MICROBATCHES.bit_length()) if batch % 2**k == 0]
    counts = [count for count in accumulate or powers if count == 1 or batch // count >= least]
    for count in counts:
        if count == 1:
            yield 1, request
        elif request.pipelines is None or not request.pipelines.is_given:
            plain = of_microbatches(request, count)
            if accumulate or request.mesh is not None or count == counts[-1]:
                yield count, plain
            elif batch // count >= devices:
                yield count, replace(plain, split=None)
