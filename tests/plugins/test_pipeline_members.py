"""Ranks of a pipeline that bring a batch each train as under ddp, whatever the step does with its
batch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_topt.costs.cluster import Link
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.plugins.default_search import why_not_cut
from lightning_topt.plugins.requirements import SEARCHED_STAGES, Fit, why_not
from tests.models import GPT
from tests.plugins.test_turns import (
    CLIPPED,
    FAST,
    Case,
    OwnBatches,
    Rich,
    assert_equal,
    cluster,
    results_of,
)
from tests.plugins.trainer_ranks import (
    DDPWithExactMeans,
    loader,
    make_trainer,
    on_ranks,
    topt_trainer,
)

SLOW = Link(1e-5, 1e6)


class Staged(Rich):
    """Without statistics of batches; draws in the loss as well, and keeps generators' numbers."""

    def __init__(self, width: int = 16, dropout: float = 0.1) -> None:
        super().__init__(width, dropout)
        self.batch_norm = nn.Identity()  # type: ignore[assignment]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        name = outputs["name"]
        super().on_train_batch_end(
            {**outputs, "name": name if isinstance(name, str) else f"rank {name}"}, batch, batch_idx
        )

    def losses(self, batch: Any) -> Any:
        words, within, logits = super().losses(batch)
        return words + 0.01 * torch.rand(()) * logits.square().mean(), within, logits


class Wordless(OwnBatches):
    """Batches of one shape that consist of tensors."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in super().__iter__():
            tokens, targets = (tensor[:3, :6] for tensor in (batch["tokens"], batch["nested"][0]))
            yield {"tokens": tokens, "nested": [targets, {"name": torch.tensor(dist.get_rank())}]}


def staged_plan(
    data: int, *, storage: str = "ddp", recompute: bool = False, schedule: str = "1f1b"
) -> dict[str, Any]:
    first = [
        {"block": "tokens", "storage": storage},
        {"block": "blocks.0", "storage": storage, "recompute": recompute},
    ]
    second = [
        {"block": "blocks.1", "storage": storage, "recompute": recompute},
        {"block": "", "storage": storage},
    ]
    mesh = [{"name": "pipeline", "size": 2, "scope": "inter"}, {"name": "data", "size": data}]
    stages = [{"blocks": first}, {"blocks": second}]
    rest = {"schedule": schedule, "num_microbatches": 2, "own_batches": True}
    return {"version": 2, "mesh": mesh, **rest, "stages": stages}


def both(rank: int, case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    found = []
    for topt in (False, True):
        torch.manual_seed(rank)
        module = Staged(case.width)
        rest = {"max_epochs": 2, "num_sanity_val_steps": 0, **case.trainer}
        strategy = topt_trainer(case.given, options=case.options, **rest) if topt else None
        trainer = strategy or make_trainer(DDPWithExactMeans(), devices=case.ranks, **rest)
        found.append(results_of(trainer, module, 10 + rank, OwnBatches if case.given else Wordless))
    return found[0], found[1]


def check(case: Case, *, relative: float = 1e-6) -> dict[str, Any]:
    results = on_ranks(both, case, world_size=case.ranks)
    for rank, (expected, found) in enumerate(results):
        assert_equal(expected, found, rank=rank)
        losses = [[output[0] for output in each["outputs"]] for each in (expected, found)]
        assert losses[1] == pytest.approx(losses[0], rel=relative)
        for name, value in expected["state"].items():
            torch.testing.assert_close(found["state"][name], value, rtol=relative, atol=relative)
    return results[0][1]


@pytest.mark.parametrize(
    "case",
    [
        Case(2, staged_plan(1, recompute=True)),
        Case(4, staged_plan(2, storage="zero1"), {**CLIPPED, "accumulate_grad_batches": 2}),
    ],
)
def test_a_fit_in_stages_is_that_of_ddp(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    ("case", "summary", "reason"),
    [
        (
            Case(2, options={"cluster": cluster(1, 2, SLOW)}, width=64),
            "2 stages",
            "the model is cut into stages",
        ),
        (
            Case(4, None, CLIPPED, {"cluster": cluster(1, 4, SLOW)}, 64),
            "pipeline 2 x data 2, 2 stages",
            "the model is cut into stages",
        ),
        (Case(2, options={"cluster": cluster(1, 2, FAST)}), "5 x DDP", "As fast as any plan"),
    ],
)
def test_pipelines_are_found_where_they_are_best(case: Case, summary: str, reason: str) -> None:
    found = check(case)
    assert found["planned"][1] == "search"
    assert summary in found["planned"][0] and reason in found["planned"][2]
    assert found["plan"].get("own_batches", False) == ("stages" in summary)


class Unnumbered(GPT):
    """Takes no index."""

    def __init__(self) -> None:
        super().__init__(width=16, heads=2)
        self.losses: list[float] = []

    def training_step(self, batch: Any) -> Any:
        return super().training_step(batch, 0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", super().training_step(batch, 0), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


class Averaging(Unnumbered):
    """Keeps a mean that steps change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def training_step(self, batch: Any) -> Any:
        self.mean.mul_(0.9)
        return super().training_step(batch)


def resumed(rank: int, folder: Path) -> Any:
    given = {"topt": staged_plan(1, schedule="gpipe"), "ddp": None}

    def fit(name: str, epochs: int, path: Path | None = None, **options: Any) -> Unnumbered:
        torch.manual_seed(0)
        rest = {"max_epochs": epochs, "num_sanity_val_steps": 0, **options}
        trainer = (
            make_trainer("ddp", devices=2, **rest)
            if given[name] is None
            else topt_trainer(given[name], **rest)
        )
        module = Unnumbered()
        trainer.fit(module, loader(4, length=24), loader(4, length=8), ckpt_path=path)
        return module

    halves = {}
    for name in given:
        # Before an evaluation is over: the parameters are whole.
        saving = ModelCheckpoint(folder / name, filename="half", save_on_train_epoch_end=False)
        halves[name] = fit(name, 1, callbacks=[saving], enable_checkpointing=True).losses
    found = {}
    for first, then in (("ddp", "ddp"), ("topt", "ddp"), ("ddp", "topt")):
        module = fit(then, 2, folder / first / "half.ckpt")
        found[first, then] = halves[first] + module.losses, dict(module.state_dict())
    with pytest.raises(PlanError, match="change the buffer 'mean'"):
        topt_trainer(given["topt"]).fit(Averaging(), loader(4))
    return found


def test_checkpoints_go_on_under_ddp_and_back(tmp_path: Path) -> None:
    for found in on_ranks(resumed, tmp_path):
        losses, state = found["ddp", "ddp"]
        assert len(losses) == 6
        for own_losses, own_state in found.values():
            assert own_losses == pytest.approx(losses, rel=1e-5)
            for name, value in state.items():
                torch.testing.assert_close(own_state[name], value, rtol=1e-5, atol=1e-5)


class Warming(Unnumbered):
    """Another step would call other modules."""

    def training_step(self, batch: Any) -> Any:
        return super().training_step(batch) * min(1, self.global_step)


class Branching(Unnumbered):
    def training_step(self, batch: Any) -> Any:
        factor = random.choice([1, 1])
        return super().training_step(batch) * factor


class Valued(Unnumbered):
    def training_step(self, batch: Any) -> Any:
        return super().training_step(batch) * int(batch[0].sum() >= 0)


def reasons(rank: int) -> dict[str, Any]:
    found = {}
    for module in (Unnumbered(), Averaging(), Branching(), Valued()):
        trainer = topt_trainer()
        module.trainer, module._trainer = trainer, trainer
        trainer.strategy.connect(module)
        plan = ParallelPlan.from_dict(staged_plan(1))
        found[type(module).__name__] = why_not_cut(trainer, next(iter(loader(4))), plan)
    trainer.strategy.connect(Warming())
    found["Warming"] = why_not(Fit(trainer), SEARCHED_STAGES)
    return found


def test_steps_that_cannot_be_cut_are_seen_before_they_run() -> None:
    for found in on_ranks(reasons):
        assert found["Unnumbered"] is None
        assert "change the buffer 'mean'" in found["Averaging"]
        assert "draws numbers of Python" in found["Branching"]
        assert "reads values of its batch" in found["Valued"]
        assert "reads global_step" in found["Warming"]
