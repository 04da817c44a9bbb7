"""A part of the matrix of benchmarks/tensor/equality.py, and that it finds what is not equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.equality import MODELS, Refusal, cell, compare
from benchmarks.tensor.equality import COMPARISON, PLANS, against_one_process, run_plan
from tests.launch import run_ranks

BY_NAME = {plan.name: plan for plan in PLANS}
# tests/execution/test_nccl_order.py has others
FAST = {
    "T5": ("tensor_2d 4 + recomputation",),
    "ViT": ("context 4",),
    "conv": ("ZeRO-3 x tensor 2, bfloat16",),
}


def parts(rank: int) -> Any:
    found = []
    for model, names in FAST.items():
        found += compare(
            rank, comparison=COMPARISON, cases=[(BY_NAME[name], model) for name in names]
        )
    plan, model = BY_NAME["ZeRO levels mixed x tensor 2"], MODELS["conv"]
    step = run_plan(rank, model, plan)
    expected = (plan, replace(plan, clip=0.5))
    return found, [against_one_process(step, model, each) for each in expected if rank == 0]


def test_plans_and_models_are_those_of_one_process() -> None:
    for model, names in FAST.items():
        for name in names:  # layouts are found once for all ranks
            BY_NAME[name].refusal(MODELS[model])
    found, (right, wrong) = run_ranks(parts, 4)[0]
    for name, model, value in (*found, ("ZeRO levels mixed x tensor 2", "conv", right)):
        if name == "context 4":  # 17 patches of an image
            assert isinstance(value, Refusal) and "splits dim 1" in value
            continue
        text = cell(value)
        assert text[0].isdigit() and "**" not in text, (name, model, value)
    assert "**" in cell(wrong), "clipped gradients count as equal"
