"""A part of the matrix of benchmarks/pipelines/equality.py, and that it finds what is not equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.equality import cell, compare
from benchmarks.pipelines.equality import COMPARISON, MODELS, PLANS, against_one_process, run_plan
from tests.launch import run_on_pool

BY_NAME = {plan.name: plan for plan in PLANS}
# tests/execution/test_nccl_order.py has others, where works wait as over NCCL
FAST = {"T5": "gpipe 4"}


def parts(rank: int) -> Any:
    found = []
    for model, name in FAST.items():
        found += compare(rank, comparison=COMPARISON, cases=[(BY_NAME[name], model)])
    plan, model = BY_NAME["1f1b 4"], MODELS["ResNet"]
    step = run_plan(rank, model, plan)
    fewer = replace(plan, microbatches=plan.microbatches // 2)
    return found, against_one_process(step, model, fewer) if rank == 0 else None


def test_pipelines_are_one_process() -> None:
    found, wrong = run_on_pool(parts, 4)[0]
    assert len(found) == len(FAST)
    for name, model, value in found:
        text = cell(value)
        assert text[0].isdigit() and "**" not in text, (name, model, value)
    assert "**" in cell(wrong), "statistics of other microbatches count as equal"
