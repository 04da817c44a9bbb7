"""What goes wrong ends with a clear error on every rank, and never with a wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_topt import AutoParallelStrategy, ParallelPlan
from lightning_topt.plan.choose import NoPlanFitsError
from lightning_topt.plan.parallel_plan import PlanError, uniform_plan
from lightning_topt.plugins.planning import RemotePlanningError
from tests.models import GPT
from tests.plugins.trainer_ranks import RecordingGPT, loader, make_trainer, on_ranks, topt_trainer

GOOD = uniform_plan(2, data_parallel_size=2, blocks=["blocks.0"])


def fit_error(rank: int, options: dict[str, Any], module: L.LightningModule) -> tuple[str, str]:
    try:
        make_trainer(AutoParallelStrategy(**options), devices=2).fit(module, loader(4))
    except Exception as error:
        return type(error).__name__, str(error) + "".join(getattr(error, "__notes__", []))
    raise AssertionError("the fit went through")


# ---- plans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (": : :", "not YAML"),
        ("version: 99", "version"),
        (GOOD.to_yaml().replace("shard(0)", "shard(x)", 1), "shard"),
        (GOOD.to_yaml().split("stages:")[0], "missing"),
    ],
)
def test_corrupt_or_foreign_plan_file(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(PlanError, match=says) as error:
        AutoParallelStrategy(plan=path)
    assert "plan.yaml" in str(error.value)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (uniform_plan(0, data_parallel_size=4), "4 ranks, this run has 2"),
        (uniform_plan(3, data_parallel_size=2, blocks=["encoder.0"]), "encoder.0"),
        (
            ParallelPlan.of_blocks(
                GOOD.blocks, mesh=2, model="Other", fingerprint="0123456789abcdef"
            ),
            "made for another model",
        ),
    ],
)
def test_plan_of_another_run(plan: ParallelPlan, says: str) -> None:
    for name, message in on_ranks(fit_error, {"plan": plan}, RecordingGPT()):
        assert name in ("PlanError", "RemotePlanningError") and says in message


def test_no_plan_meets_the_limit() -> None:
    first, second = on_ranks(fit_error, {"memory_limit": "4KiB"}, RecordingGPT())
    assert first[0] == NoPlanFitsError.__name__ and second[0] == RemotePlanningError.__name__
    assert "4.00 KiB" in first[1] and "on data 1 x tensor 2" in first[1]  # the smallest plan
    assert first[1] in second[1]


# ---- modules -------------------------------------------------------------------------------------


class MyError(Exception):
    pass


class Raising(GPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise MyError("from the user's code")


class RaisesOnce(GPT):
    fits = 0

    def on_train_start(self) -> None:
        self.fits += 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.fits == 1:
            raise MyError("in the first fit")
        return super().training_step(batch, batch_idx)


def second_fit(rank: int) -> str | None:
    trainer, module = topt_trainer(limit_train_batches=2), RaisesOnce()
    with pytest.raises(MyError):
        trainer.fit(module, loader(4))
    trainer.fit(module, loader(4))
    return trainer.strategy.planned_by


def test_a_fit_after_one_that_failed_is_as_the_first() -> None:
    assert set(on_ranks(second_fit)) == {"clock"}


def test_what_user_code_raises_before_a_fit_has_its_line() -> None:
    for name, message in on_ranks(fit_error, {"memory_limit": "1GiB"}, Raising()):
        assert name in ("StepError", "RemotePlanningError")
        assert "MyError: from" in message and f"{__file__}:" in message
        assert "in training_step: raise MyError" in message and 'Choose plan="ddp"' in message


# ---- ranks ---------------------------------------------------------------------------------------


def differing(rank: int, what: str) -> tuple[str, str]:
    module = RecordingGPT(width=16 + 16 * (rank == 1 and what == "model"))
    return fit_error(rank, {"memory_margin": 0.1 * (rank == 1 and what == "options")}, module)


@pytest.mark.parametrize(
    ("what", "says"), [("model", "tokens.weight"), ("options", "memory_margin=0.1")]
)
def test_ranks_that_differ(what: str, says: str) -> None:
    for name, message in on_ranks(differing, what):
        assert name == "RuntimeError" and "rank 0 and rank 1 differ" in message and says in message
