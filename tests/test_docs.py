"""The plain-PyTorch loops in the documentation run as they are written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks

PAGE = Path(__file__).parent.parent / "docs" / "how_to" / "plain_pytorch.md"
LOOPS = [
    code
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    if "for step in range" in code
]


def run(rank: int, code: str) -> tuple[float, list[float]]:
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names["loss"].item(), [
        float(parameter.detach().sum()) for parameter in names["module"].parameters()
    ]


@pytest.mark.parametrize(
    "code",
    LOOPS,
    ids=lambda code: re.search(r"CompressedExchange|OuterSteps|install_parallel_step", code)[0],
)
def test_loop_trains_and_ranks_end_equal(code: str) -> None:
    first, second = run_ranks(run, 2, code)
    assert first[1] == second[1] and first[0] < 0.1


def test_all_loops_are_found() -> None:
    assert len(LOOPS) == 3
