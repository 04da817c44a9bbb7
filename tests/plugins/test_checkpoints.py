"""Checkpoints: one plain file whatever the plan, resumed under any other with the same loss."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_topt import read_sharded_checkpoint
from lightning_topt.plan.parallel_plan import ParallelPlan
from tests.plugins.trainer_ranks import (
    OwnShare,
    RecordingGPT,
    loader,
    make_trainer,
    on_ranks,
    topt_trainer,
)

GLOBAL_BATCH = 8
PLANS = ["ddp", "zero1", "zero2", "zero3+recompute"]


class SavedState(L.Callback):
    """A callback, data and hyper-parameters have state that a checkpoint must bring back."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


class Data(L.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.loads = 0

    def train_dataloader(self) -> Any:
        self.loads += 1
        return OwnShare(GLOBAL_BATCH, length=32)

    def state_dict(self) -> dict[str, Any]:
        return {"loads": self.loads}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loads = state["loads"]


class SavedGPT(RecordingGPT):
    def __init__(self, layers: int = 2) -> None:
        super().__init__(layers=layers)
        self.save_hyperparameters()


def trainer_for(plan: str | None, **kwargs: Any) -> L.Trainer:
    if not dist.is_initialized():
        return make_trainer(**kwargs)
    if plan == "lightning":
        return make_trainer(DDPStrategy(), devices=dist.get_world_size(), **kwargs)
    return topt_trainer(plan, **kwargs)


def save(rank: int, plan: str | None, path: str) -> list[float]:
    torch.manual_seed(0)
    module, data, saved = SavedGPT(), Data(), SavedState()
    trainer = trainer_for(plan, max_epochs=1, callbacks=[saved])
    trainer.fit(module, data)
    trainer.save_checkpoint(path)  # after the fit: the strategy has already taken the plan back
    return module.losses


def resume(rank: int, plan: str | None, path: str) -> Any:
    torch.manual_seed(1)
    module, data, saved = SavedGPT(), Data(), SavedState()
    trainer = trainer_for(plan, max_epochs=2, callbacks=[saved])
    trainer.fit(module, data, ckpt_path=path)
    rates = (
        trainer.lr_scheduler_configs[0].scheduler.get_last_lr()
        if trainer.lr_scheduler_configs
        else None
    )
    return module.losses, module.state_dict(), saved.batches, data.loads, rates, trainer.global_step


def save_each(rank: int, folder: Path) -> None:
    for plan in (*PLANS, "lightning"):
        save(rank, plan, str(folder / f"{plan}.ckpt"))


# Each file is resumed by another, and each strategy resumes another's file.
FILES: list[str] = [*PLANS, "lightning", "one process"]
RESUMED = [(one, FILES[(i + 1) % len(FILES)]) for i, one in enumerate(FILES)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("checkpoints")
    on_ranks(save_each, folder)
    save(0, None, str(folder / "one process.ckpt"))
    return {path.stem: str(path) for path in folder.iterdir()}


@pytest.fixture(scope="module")
def uninterrupted() -> Any:
    """Two epochs in one process: losses of the second, final parameters."""
    torch.manual_seed(0)
    module = SavedGPT()
    make_trainer(max_epochs=2).fit(module, Data())
    return module.losses[4:], module.state_dict()


@pytest.mark.parametrize(("source", "target"), RESUMED)
def test_resume_with_the_same_loss(
    checkpoints: dict[str, str], uninterrupted: Any, source: str, target: str
) -> None:
    results = (
        [resume(0, None, checkpoints[source])]
        if target == "one process"
        else on_ranks(resume, target, checkpoints[source])
    )
    for losses, state, batches, loads, rates, steps in results:
        assert losses == pytest.approx(uninterrupted[0], rel=1e-5)
        assert (batches, loads, steps) == (8, 2, 8)
        assert rates is None or rates == pytest.approx([1e-2 / 4] * 2)
        for name, value in uninterrupted[1].items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("plan", PLANS)
def test_file_is_plain_and_holds_the_plan(checkpoints: dict[str, str], plan: str) -> None:
    ours = torch.load(checkpoints[plan], weights_only=True)
    theirs = torch.load(checkpoints["lightning"], weights_only=True)
    stored = ParallelPlan.from_dict(ours.pop("lightning_topt")["plan"])
    assert {block.config.storage.level for block in stored.blocks} == {PLANS.index(plan)}
    assert ours.keys() == theirs.keys() and [*ours["state_dict"]] == [*theirs["state_dict"]]
    for name, value in theirs["state_dict"].items():
        assert type(ours["state_dict"][name]) is Tensor
        torch.testing.assert_close(ours["state_dict"][name], value, rtol=1e-4, atol=2e-6)
    state, expected = ours["optimizer_states"][0], theirs["optimizer_states"][0]
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    for index, values in expected["state"].items():
        for key, value in values.items():
            assert (
                type(state["state"][index][key]) is Tensor
                and not state["state"][index][key].is_meta
            )
            torch.testing.assert_close(state["state"][index][key], value, rtol=1e-4, atol=1e-6)
    restored = SavedGPT.load_from_checkpoint(checkpoints[plan])
    assert restored.hparams == {"layers": 2}


def test_other_world_size(checkpoints: dict[str, str], uninterrupted: Any) -> None:
    found = on_ranks(resume, "zero3", checkpoints["zero3+recompute"], world_size=4)
    for losses, state, *_ in found:
        assert losses == pytest.approx(uninterrupted[0], rel=1e-5)
        torch.testing.assert_close(
            state["head.weight"], uninterrupted[1]["head.weight"], rtol=1e-4, atol=2e-6
        )


# ---- ModelCheckpoint -----------------------------------------------------------------------------


class Worsening(RecordingGPT):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", float(self.current_epoch), sync_dist=True)


def model_checkpoint(rank: int, folder: Path) -> Any:
    torch.manual_seed(0)
    keep = ModelCheckpoint(
        folder, filename="{epoch}", monitor="score", mode="min", save_top_k=2, save_last=True
    )
    trainer = topt_trainer("zero3", callbacks=[keep], enable_checkpointing=True, max_epochs=3)
    module = Worsening()
    trainer.fit(module, loader(16), loader(16))
    files = sorted(path.name for path in folder.iterdir())
    tested = trainer.test(module, loader(16), ckpt_path="best", verbose=False)[0]["test_loss"]
    new = topt_trainer("zero3").test(
        RecordingGPT(), loader(16), ckpt_path=keep.best_model_path, verbose=False
    )
    return files, Path(keep.best_model_path).name, tested, new[0]["test_loss"]


def test_model_checkpoint_keeps_the_best_and_the_last(tmp_path: Path) -> None:
    for files, best, tested, new in on_ranks(model_checkpoint, tmp_path):
        assert files == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
        assert best == "epoch=0.ckpt"
        assert tested == pytest.approx(new, rel=1e-6)


# ---- hyper parameters that hold modules ----------------------------------------------------------


class Composed(L.LightningModule):
    """As in lightning-hydra-template: its arguments, modules among them, are hyper parameters."""

    def __init__(self, net: nn.Module, heads: list[nn.Module], optimizer: Any) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net, self.head = net, heads[0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.net(batch[0].float())).square().mean()

    def configure_optimizers(self) -> Any:
        return self.hparams["optimizer"](self.parameters())


def parts() -> dict[str, Any]:
    """New arguments of `Composed`; weights of a layer and of the head are one."""
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8), nn.BatchNorm1d(8))
    head = nn.Linear(64, 8)
    net[2].weight = head.weight
    return {"net": net, "heads": [nn.Sequential(nn.Linear(8, 64), head)]}


def save_composed(rank: int, plan: str, folder: Path, form: str) -> list[str]:
    keep = ModelCheckpoint(folder, filename="middle", every_n_train_steps=2)
    trainer = topt_trainer(
        plan, options={"checkpoint": form}, callbacks=[keep], enable_checkpointing=True, max_steps=3
    )
    torch.manual_seed(0)
    module = Composed(**parts(), optimizer=partial(torch.optim.AdamW, lr=1e-2))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        trainer.fit(module, loader(8))
    trainer.save_checkpoint(folder / "after.ckpt")
    return [str(one.message) for one in warned if "hyper parameters" in str(one.message)]


@pytest.mark.parametrize(("plan", "form"), [("tensor", "full"), ("zero3", "sharded")])
def test_modules_among_hyper_parameters_are_left_out(plan: str, form: str, tmp_path: Path) -> None:
    (warning, *_), _ = on_ranks(save_composed, plan, tmp_path, form)
    assert "load_from_checkpoint(path, net=..., heads=...)" in warning
    path = tmp_path / "middle.ckpt"
    if form == "sharded":
        saved = read_sharded_checkpoint(path, weights_only=False)
        torch.save(saved, path := tmp_path / "full.ckpt")
    else:
        saved = torch.load(path, weights_only=False)
    assert [*saved["hyper_parameters"]] == ["optimizer"]
    loaded = Composed.load_from_checkpoint(path, weights_only=False, **parts())
    assert torch.equal(loaded.net[0].weight, saved["state_dict"]["net.0.weight"])
