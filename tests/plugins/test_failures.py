"""What goes wrong ends with a clear error on every rank, and never with a wait."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_topt import AutoParallelStrategy, ParallelPlan
from lightning_topt.costs.measuring import RemotePlanningError
from lightning_topt.plan.choose import NoPlanFitsError
from lightning_topt.plan.parallel_plan import PlanError, uniform_plan
from tests.models import GPT
from tests.plugins.test_arguments import CLUSTER
from tests.plugins.trainer_ranks import RecordingGPT, loader, make_trainer, on_ranks, topt_trainer

GOOD = uniform_plan(2, data_parallel_size=2, blocks=["blocks.0"])


def fit_error(rank: int, options: dict[str, Any], module: L.LightningModule) -> tuple[str, str]:
    try:
        make_trainer(AutoParallelStrategy(**options), devices=2).fit(module, loader(4))
    except Exception as error:
        return type(error).__name__, str(error) + "".join(getattr(error, "__notes__", []))
    raise AssertionError("the fit went through")


# ---- plans ---------------------------------------------------------------------------------------


def test_a_plan_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("version: 99")
    with pytest.raises(PlanError, match=r"plan.yaml.*version"):
        AutoParallelStrategy(plan=path)


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


SMALL = replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=4096))


@pytest.mark.parametrize(
    ("options", "smallest"),
    [({"memory_limit": "4KiB"}, "on data 1 x tensor 2"), ({"cluster": SMALL}, "")],
)
def test_no_plan_meets_the_limit(options: dict[str, Any], smallest: str) -> None:
    first, second = on_ranks(fit_error, options, RecordingGPT())
    assert first[0] == NoPlanFitsError.__name__ and second[0] == RemotePlanningError.__name__
    assert "4.00 KiB" in first[1] and smallest in first[1]
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
    over = "ddp: the fit was over before it was decided whether ranks share the update"
    assert set(on_ranks(second_fit)) == {over}  # no clock ran


class Full(GPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_a_full_device_has_a_way_out() -> None:
    for name, message in on_ranks(fit_error, {}, Full()):
        assert name == "OutOfMemoryError" and "memory_limit=...) searches" in message


def test_what_user_code_raises_before_a_fit_has_its_line() -> None:
    for name, message in on_ranks(fit_error, {"memory_limit": "1GiB"}, Raising()):
        assert name in ("StepError", "RemotePlanningError")
        assert "MyError: from" in message and f"{__file__}:" in message
        assert "in training_step: raise MyError" in message and 'Choose plan="ddp"' in message


# ---- ranks ---------------------------------------------------------------------------------------


def differing(rank: int, what: str) -> tuple[str, str]:
    module = RecordingGPT(width=16 + 16 * (rank == 1 and what == "model"))
    if rank == 1 and what == "order":
        module._modules["tokens"] = module._modules.pop("tokens")  # comes last now
    return fit_error(rank, {"memory_margin": 0.1 * (rank == 1 and what == "options")}, module)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("model", "tokens.weight"),
        ("order", "in the same order: rank 1 has parameter "),
        ("options", "memory_margin=0.1"),
    ],
)
def test_ranks_that_differ(what: str, says: str) -> None:
    for name, message in on_ranks(differing, what):
        assert name == "ValueError" and "the same set-up" in message and says in message
