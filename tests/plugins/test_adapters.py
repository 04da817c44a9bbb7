"""Fine-tuning of adapters on a frozen model: equal to ddp under every plan; what is frozen takes
nothing but its memory, except at level 3, which shards it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_topt import AutoParallelStrategy
from tests.models import TunedGPT
from tests.plugins.test_pipeline_fits import pipeline
from tests.plugins.trainer_ranks import OwnShare, loader, make_trainer, mean_over_ranks, on_ranks

PLANS = ["ddp", "zero1", "zero2", "zero3", "zero2+recompute", "zero3+recompute", "pipeline"]


class Tuning(TunedGPT):
    """Keeps its losses, and saves the adapters alone."""

    strict_loading = False

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(layers=3)
        self.losses: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(mean_over_ranks(outputs["loss"]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: state[name] for name in state if "lora_" in name}


class Look(L.Callback):
    """Which frozen parameters are in shards, and how many elements of states a rank has."""

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        named = dict(pl_module.named_parameters())
        self.sharded = {n for n, p in named.items() if isinstance(p, DTensor)}
        (optimizer,) = trainer.strategy.optimizers
        states = [v for state in optimizer.state.values() for v in state.values()]
        tensors = [v.to_local() if isinstance(v, DTensor) else v for v in states]
        self.elements = sum(v.numel() for v in tensors if v.dim())


def fit(plan: Any, **options: Any) -> tuple[Tuning, Look]:
    strategy = DDPStrategy() if plan is None else AutoParallelStrategy(plan=plan)
    data: Any = OwnShare(8, length=40)
    if plan == "pipeline":  # whose ranks have the same batch
        strategy, data = pipeline(2, microbatches=2), loader(8, length=40)
        options["use_distributed_sampler"] = False
    module, look = Tuning(), Look()
    devices = dist.get_world_size()
    trainer = make_trainer(strategy, devices=devices, callbacks=[look], **options)
    trainer.fit(module, data)
    return module, look


def beside_ddp(rank: int, plan: Any) -> tuple[Any, ...]:
    before = {n: p.detach().clone() for n, p in Tuning().named_parameters()}
    (plain, _), (ours, look) = fit(None), fit(plan)
    state = dict(ours.named_parameters())
    assert all(torch.equal(state[n], p) for n, p in before.items() if "lora_" not in n)
    expected = {n: p.detach() for n, p in plain.named_parameters()}
    found = {n: p.detach() for n, p in state.items()}
    return plain.losses, ours.losses, expected, found, look.sharded, look.elements


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_trains_adapters_as_ddp_does(plan: str) -> None:
    trained = sum(p.numel() for p in Tuning().parameters() if p.requires_grad)
    held = 0
    for losses, own, expected, found, sharded, elements in on_ranks(beside_ddp, plan):
        assert own == pytest.approx(losses, rel=1e-5) and len(own) == 5
        assert_equal(found, expected)
        held += elements
        frozen = {name for name in sharded if "lora_" not in name}
        assert bool(sharded) == (plan[:5] in ("zero2", "zero3"))
        assert bool(frozen) == plan.startswith("zero3")
    # two moments of each trained parameter, on both ranks or once
    assert held == 2 * trained * (2 if plan == "ddp" else 1)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-6, msg=name)


# ---- checkpoints of the adapters alone -----------------------------------------------------------


def resumed(rank: int, folder: str, plans: tuple[str, str], form: str) -> tuple[Any, ...]:
    straight, _ = fit(None, max_epochs=2)
    first, second = plans
    module, path = Tuning(), f"{folder}/adapters.ckpt"
    strategy = AutoParallelStrategy(plan=first, checkpoint=form)
    trainer = make_trainer(strategy, devices=dist.get_world_size(), callbacks=[Saver(path)])
    trainer.fit(module, OwnShare(8, length=40))
    later = Tuning()
    trainer = make_trainer(
        AutoParallelStrategy(plan=second), devices=dist.get_world_size(), max_epochs=2
    )
    trainer.fit(later, OwnShare(8, length=40), ckpt_path=path, weights_only=False)
    expected, found = straight.state_dict(), later.state_dict()
    return expected, found, straight.losses[5:], later.losses


class Saver(L.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("plans", [("zero2", "zero3"), ("zero3", "zero2"), ("zero1", "ddp")])
def test_adapters_alone_are_saved_and_resumed(
    plans: tuple[str, str], form: str, tmp_path: Path
) -> None:
    for expected, found, losses, own in on_ranks(resumed, str(tmp_path), plans, form):
        assert own == pytest.approx(losses, rel=1e-5)
        assert_equal(found, expected)
    if form == "full":
        saved = torch.load(tmp_path / "adapters.ckpt", weights_only=False)["state_dict"]
        trained = {n: p.shape for n, p in Tuning().named_parameters() if p.requires_grad}
        assert {name: value.shape for name, value in saved.items()} == trained
