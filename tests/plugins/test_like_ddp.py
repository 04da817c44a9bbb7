"""A program under a plan has the losses and parameters of Lightning's ``ddp``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_topt import AutoParallelStrategy
from tests.models import TunedGPT
from tests.plugins.trainer_ranks import (
    LoggingGPT,
    OwnShare,
    SaveAfterEpoch,
    make_trainer,
    mean_over_ranks,
    on_ranks,
    once_on_ranks,
)

# bfloat16 keeps 8 bits: sums in another order differ by a few of its steps
TOLERANCES = {"32-true": 1e-5, "64-true": 1e-10, "bf16-mixed": 2e-3, "bf16-true": 3e-2}


class Tuning(TunedGPT):
    """Trains adapters on a frozen model, and saves these alone."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__(layers=3)
        self.losses: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(mean_over_ranks(outputs["loss"]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: state[name] for name in state if "lora_" in name}


class ByMatrix(LoggingGPT):
    """Trains its matrices by Muon, which reads them whole; rows that two ranks cannot share."""

    def __init__(self) -> None:
        super().__init__(vocab=33)
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.dim() == 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.Muon([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Compiled(L.LightningModule):
    """Compiles its network, or is compiled."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        torch._dynamo.reset()
        self.net: Any = nn.Sequential(nn.Linear(8, 33), nn.GELU(), nn.Linear(33, 8))
        self.losses: list[float] = []
        if inside:
            self.net = torch.compile(self.net, backend="aot_eager")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs = batch[0] / 32
        loss: Tensor = (self.net(inputs) - inputs).square().mean()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(mean_over_ranks(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


PROGRAMS: dict[str, Callable[[], Any]] = {
    "gpt": lambda: LoggingGPT(layers=3),
    "adapters": Tuning,
    "muon": ByMatrix,
    "compiled network": lambda: Compiled(inside=True),
    "compiled module": lambda: torch.compile(Compiled(inside=False), backend="aot_eager"),
}
Result = tuple[list[float], dict[str, Tensor]]


def fit(
    rank: int, program: str, plan: str | None, precision: str = "32-true", accumulate: int = 1,
    clip: str | None = None, **options: Any,
) -> Result:  # fmt: skip
    """Losses and parameters of a fit; as ``ddp`` where the plan is ``"Lightning"``."""
    torch.manual_seed(0)
    module = PROGRAMS[program]()
    strategy = DDPStrategy() if plan == "Lightning" else AutoParallelStrategy(plan=plan)
    if clip is not None:
        value = 0.1 if clip == "norm" else 1e-3
        options |= {"gradient_clip_algorithm": clip, "gradient_clip_val": value}
    trainer = make_trainer(
        strategy, devices=2, precision=precision, accumulate_grad_batches=accumulate, **options
    )
    trainer.fit(module, OwnShare(8, length=24))
    module = getattr(module, "_orig_mod", module)
    return module.losses, {name: p.detach().clone() for name, p in module.named_parameters()}


def assert_like_ddp(program: str, plan: str | None, *case: Any) -> None:
    """Compare a fit under a plan with ``ddp``, rank by rank."""
    # Muon multiplies in bfloat16
    relative = TOLERANCES["bf16-mixed" if program == "muon" else case[0] if case else "32-true"]
    ddp = once_on_ranks(fit, program, "Lightning", *case)
    for (losses, state), found in zip(ddp, on_ranks(fit, program, plan, *case), strict=True):
        assert found[0] == pytest.approx(losses, rel=relative) and len(losses) == 3
        assert_equal(found[1], state, relative=relative)


def assert_equal(
    found: dict[str, Tensor], expected: dict[str, Tensor], *, relative: float = 1e-5
) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # sums of two ranks in another order, which Adam's division lets grow
        torch.testing.assert_close(
            found[name], value, rtol=10 * relative, atol=max(2e-6, relative), msg=name
        )


SHARDED = ("zero1", "zero3")
CASES: dict[tuple[str, tuple[Any, ...]], Any] = {
    ("gpt", ()): ("ddp", "zero1+recompute", "zero2", "zero3", "zero3+recompute"),
    ("gpt", ("32-true", 2, "norm")): SHARDED,
    ("gpt", ("32-true", 1, "value")): ("zero3",),
    ("gpt", ("64-true",)): ("zero3",),
    ("gpt", ("bf16-mixed",)): ("zero3",),
    ("gpt", ("bf16-true",)): ("zero3",),
    ("adapters", ()): ("zero1", "zero3+recompute"),
    ("muon", ()): SHARDED,
    ("compiled network", ()): (None, "zero3"),
    ("compiled module", ()): SHARDED,
}


@pytest.mark.parametrize(
    ("program", "case", "plan"), [(*key, plan) for key, plans in CASES.items() for plan in plans]
)
def test_losses_and_parameters(program: str, case: tuple[Any, ...], plan: str | None) -> None:
    assert_like_ddp(program, plan, *case)


# ---- a part of the parameters in a checkpoint ----------------------------------------------------


def two_epochs(rank: int) -> Result:
    return fit(rank, "adapters", "Lightning", max_epochs=2)


def resumed(rank: int, path: Path, first: str, second: str, form: str) -> Result:
    torch.manual_seed(0)
    strategy = AutoParallelStrategy(plan=first, checkpoint=form)
    make_trainer(strategy, devices=2, callbacks=[SaveAfterEpoch(path)]).fit(
        Tuning(), OwnShare(8, length=24)
    )
    torch.manual_seed(0)
    later = Tuning()
    trainer = make_trainer(AutoParallelStrategy(plan=second), devices=2, max_epochs=2)
    trainer.fit(later, OwnShare(8, length=24), ckpt_path=path, weights_only=False)
    return later.losses, {n: p.detach() for n, p in later.named_parameters()}


@pytest.mark.parametrize(
    ("first", "second", "form"), [("zero2", "zero3", "sharded"), ("zero3", "ddp", "full")]
)
def test_adapters_alone_are_saved_and_resumed(
    first: str, second: str, form: str, tmp_path: Path
) -> None:
    path = tmp_path / "adapters.ckpt"
    rest = on_ranks(resumed, path, first, second, form)
    for (losses, state), (found, parameters) in zip(once_on_ranks(two_epochs), rest, strict=True):
        assert found == pytest.approx(losses[3:], rel=1e-5)
        assert_equal(parameters, state)
    if form == "full":
        saved = torch.load(path, weights_only=False)["state_dict"]
        assert saved and all("lora_" in name for name in saved)
