"""Pipelines whose ranks bring a batch each, where they are found."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_topt.costs.cluster import Link
from tests.plugins.test_group_steps import CLIPPED, Case, Wordless, check, cluster

EXACT: dict[str, Any] = {"relative": 1e-6, "batches": Wordless}
SLOW = Link(1e-5, 1e6)


@pytest.mark.parametrize(
    ("case", "summary", "reason"),
    [
        (
            Case(2, options={"cluster": cluster(1, 2, SLOW)}, width=64, **EXACT),
            "2 stages",
            "the model is cut into stages",
        ),
        (
            Case(4, None, CLIPPED, {"cluster": cluster(1, 4, SLOW)}, 64, **EXACT),
            "pipeline 2 x data 2, 2 stages",
            "the model is cut into stages",
        ),
    ],
)
def test_pipelines_are_found_where_they_are_best(case: Case, summary: str, reason: str) -> None:
    found = check(case)
    assert found["planned"][1] == "search"
    assert summary in found["planned"][0] and reason in found["planned"][2]
    assert found["plan"]["own_batches"]
