"""Plans that gather in bfloat16: by name and by file, with the precision that they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_topt import AutoParallelStrategy
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError, uniform_plan
from lightning_topt.plugins.plan_options import UniformPlan, read_plan_option
from tests.plugins.trainer_ranks import OwnShare, RecordingGPT, make_trainer, on_ranks


def fits(rank: int, *cases: tuple[Any, str]) -> list[tuple[list[float], str] | str]:
    return [fit(rank, plan, precision) for plan, precision in cases]


def fit(rank: int, plan: Any, precision: str) -> tuple[list[float], str] | str:
    torch.manual_seed(0)
    module, strategy = RecordingGPT(layers=2), AutoParallelStrategy(plan=plan)
    try:
        make_trainer(strategy, devices=2, limit_train_batches=3, precision=precision).fit(
            module, OwnShare(8)
        )
    except PlanError as error:
        return str(error)
    assert strategy.parallel_plan is not None
    return module.losses, strategy.parallel_plan.summary()


def test_losses_are_those_without_it_and_the_plan_says_so(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(uniform_plan(3, data_parallel_size=2).to_yaml() + "gather_dtype: bfloat16\n")
    plans = ("zero3", "zero3+bf16_gathers", "zero2+recompute+bf16_gathers", file)
    for (plain, _), *others in on_ranks(fits, *[(plan, "bf16-mixed") for plan in plans]):
        for (losses, summary), plan in zip(others, plans[1:], strict=True):
            assert summary.endswith("gathers in bfloat16")
            # nothing of this model is rounded that autocast does not round: positions are a table
            assert losses == plain, plan


def test_another_precision_is_refused() -> None:
    precisions = ("32-true", "bf16-true")
    for found in on_ranks(fits, *[("zero2+bf16_gathers", each) for each in precisions]):
        for said, each in zip(found, precisions, strict=True):
            assert isinstance(said, str) and 'precision="bf16-mixed"' in said and each in said


def test_names_and_what_they_mean() -> None:
    given = read_plan_option("hybrid+bf16_gathers+recompute")
    assert isinstance(given, UniformPlan) and given.recompute
    assert given.preset.inner and given.preset.gather_dtype == "bfloat16"
    assert isinstance(plain := read_plan_option("zero3+recompute"), UniformPlan)
    assert plain.preset.gather_dtype is None and plain.recompute
    with pytest.raises(PlanError, match="zero1 gathers no parameters: leave out '\\+bf16_gathers'"):
        read_plan_option("zero1+bf16_gathers")
    with pytest.raises(PlanError, match="neither a file nor one of"):
        read_plan_option("zero3+bf16")
    assert ParallelPlan.from_yaml(uniform_plan(2, data_parallel_size=2).to_yaml()).gather_dtype is (
        None
    )
