"""That pipelines which are left out without a search would have added no plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_topt.costs.cluster import Cluster, Link
from lightning_topt.plan.known_plans import KnownPlans
from lightning_topt.plan.plan_search import SearchRequest, search_plans


def check_that_none_is_dropped(
    request: SearchRequest, nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the plans on `nodes`, with their links and with fast ones, with those of a search of
    every pipeline.
    """
    for cluster in (nodes, replace(nodes, inter=Link(1e-6, 1e11))):
        found = []
        for decide in (KnownPlans.may_gain_above, lambda *_: True):
            monkeypatch.setattr(KnownPlans, "may_gain_above", decide)
            points = search_plans(replace(request, cluster=cluster)).points
            found.append([(point.step_seconds, point.peak_bytes) for point in points])
            monkeypatch.undo()
        assert found[0] == found[1]
