"""That pipelines which are left out without a search would have added no plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lightning_topt.costs.cluster import Cluster, Link
from lightning_topt.plan.chains import KnownPlans
from lightning_topt.plan.plan_search import SearchRequest, search_plans


def check_that_none_is_dropped(
    request: SearchRequest, nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the plans on `nodes`, with their links and with fast ones, with those of a search of
    every pipeline: neither has a plan that the other does not have, or a better one.
    """
    for cluster in (nodes, replace(nodes, inter=Link(1e-6, 1e11))):
        found = []
        for decide in (KnownPlans.may_gain_above, lambda *_: True):
            monkeypatch.setattr(KnownPlans, "may_gain_above", decide)
            # CPU seconds are no limit: what is not searched on a busy machine has no plans
            points = search_plans(replace(request, cluster=cluster, max_seconds=1e3)).points
            found.append([(point.step_seconds, point.peak_bytes) for point in points])
            monkeypatch.undo()
        for some, others in (found, found[::-1]):
            assert all(is_beaten(costs, others) for costs in some)


def is_beaten(costs: tuple[float, float], others: Sequence[tuple[float, float]]) -> bool:
    """Return whether one of `others` is as good.

    Of plans whose seconds differ by the rounding of sums a search keeps one, which may have more
    bytes: 3 % of them were seen.
    """
    seconds, size = costs[0] * (1 + 1e-9), costs[1] * 1.05
    return any(each[0] <= seconds and each[1] <= size for each in others)
