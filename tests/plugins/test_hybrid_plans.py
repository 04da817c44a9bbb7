"""Hand-written plans on 2 x 2 ranks under a Trainer: as one process, whatever it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lightning_topt.plan.parallel_plan import ParallelPlan
from tests.plugins.trainer_ranks import (
    OwnShare,
    RecordingGPT,
    loader,
    make_trainer,
    on_ranks,
    topt_trainer,
)

PLAN = """
version: 2
mesh: [{name: data_replicate, size: 2, scope: inter}, {name: data_shard, size: 2, scope: intra}]
stages:
- blocks:
  - {block: blocks.0, storage: hybrid, recompute: true}
  - {block: blocks.1, storage: hybrid_zero2}
  - {block: blocks.2, storage: zero3}
  - {block: head, storage: zero1}
  - {block: "", storage: ddp}
"""
OPTIONS: dict[str, dict[str, Any]] = {
    "clip by norm": {"gradient_clip_val": 0.1},
    "accumulate, clip by value": {
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 1e-3,
        "gradient_clip_algorithm": "value",
    },
}


class Evaluated(RecordingGPT):
    """With a buffer that would grow apart; its overflowing loss is that of one rank."""

    def __init__(self, overflow: bool = False, fused: bool = False) -> None:
        super().__init__(layers=3)
        self.register_buffer("seen", torch.zeros(()))
        self.overflow, self.fused, self.scales = overflow, fused, list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) + 0 * self.seen
        self.seen += self.global_rank
        return loss * (
            float("inf") if self.overflow and batch_idx == 3 and self.global_rank == 1 else 1.0
        )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if (scaler := getattr(self.trainer.precision_plugin, "scaler", None)) is not None:
            self.scales.append(scaler.get_scale())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4, fused=self.fused)


def one_process(options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    module = Evaluated()
    make_trainer(**options).fit(module, loader(8, length=32))
    return module.losses, module.state_dict()


def fit(
    plan: Any, rank: int, options: dict[str, Any], **kwargs: Any
) -> tuple[L.Trainer, Evaluated]:
    torch.manual_seed(rank)
    trainer, module = topt_trainer(plan, **options), Evaluated(**kwargs)
    trainer.fit(module, OwnShare(8, length=32))
    return trainer, module


def parameters(module: L.LightningModule) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def overflow(rank: int, plan: Any, *, fused: bool) -> Any:
    """Precision 16-mixed; the gradients of one rank overflow in the fourth batch."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    options = {"plugins": [plugin]} | ({} if fused else {"gradient_clip_val": 0.1})
    _, module = fit(plan, rank, options, overflow=True, fused=fused)
    assert "_unscale_grads_" not in vars(plugin.scaler) and "clip_grad_by_norm" not in vars(plugin)
    return module.losses[:3], module.scales, parameters(module)


def on_four_ranks(rank: int, path: Path) -> Any:
    plan = ParallelPlan.load(path)
    assert ParallelPlan.from_yaml(plan.to_yaml()) == plan
    fits = {}
    for name, options in OPTIONS.items():
        trainer, module = fit(str(path) if name == "clip by norm" else plan, rank, options)
        tested = trainer.test(module, loader(4), verbose=False)[0]["test_loss"]
        fits[name] = module.losses, parameters(module), tested
    overflows = [
        (overflow(rank, plan, fused=f), overflow(rank, "ddp", fused=f)) for f in (False, True)
    ]
    return fits, overflows


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    path.write_text(PLAN)
    return on_ranks(on_four_ranks, path, world_size=4)


@pytest.mark.parametrize("option", OPTIONS)
def test_as_one_process(ranks: Any, option: str) -> None:
    losses, state = one_process(OPTIONS[option])
    for fits, _ in ranks:
        rank_losses, rank_state, tested = fits[option]
        assert rank_losses == pytest.approx(losses, rel=1e-5)
        assert tested == pytest.approx(ranks[0][0][option][2], rel=1e-6)
        for name, value in rank_state.items():
            torch.testing.assert_close(
                value, state[name], rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Any, fused: bool) -> None:
    for _, overflows in ranks:
        (losses, scales, state), (ddp_losses, ddp_scales, ddp_state) = overflows[fused]
        assert losses == pytest.approx(ddp_losses, rel=1e-3)
        assert scales == ddp_scales == [1024.0] * 3 + [512.0]
        for name, value in state.items():
            assert torch.equal(value, ranks[0][1][fused][0][2][name])
            torch.testing.assert_close(value, ddp_state[name], rtol=1e-2, atol=2e-3)
