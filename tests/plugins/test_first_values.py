"""Fits of models that begin on the meta device: as those of their twins, made whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_topt import read_sharded_checkpoint
from lightning_topt.execution.sharded_checkpoint import write_module
from tests.models import GPT
from tests.plugins.trainer_ranks import OwnShare, RecordingGPT, loader, on_ranks, topt_trainer
from tests.techniques.test_first_values import gpt2, llama

CLUSTER = Path(__file__).parents[2] / "conf" / "cluster" / "local_cpu.yaml"
UNEVEN = {"layers": 1, "width": 6, "vocab": 33, "tied": True}
WIDE = {"layers": 2, "width": 128}


class LateGPT(RecordingGPT):
    """Makes its layers when the fit begins."""

    def __init__(self, on_meta: bool, **kwargs: Any) -> None:
        L.LightningModule.__init__(self)
        self.on_meta, self.kwargs, self.losses = on_meta, kwargs, []
        self.net: GPT | None = None
        self.first: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta" if self.on_meta else "cpu"):
                self.net = GPT(**self.kwargs)

    def forward(self, tokens: Tensor) -> Tensor:
        assert self.net is not None
        return self.net(tokens)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", LateGPT.training_step(self, batch, batch_idx), sync_dist=True)

    test_step = validation_step

    def on_fit_start(self) -> None:
        self.first = full(self)


class ByHand(LateGPT):
    """Optimizes manually."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss.detach()}


def full(module: nn.Module) -> dict[str, Tensor]:
    named = module.named_parameters()
    return {
        n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in named
    }


def fit(plan: Any, on_meta: bool = True, *, kind: Any = LateGPT, seed: int = 3, **rest: Any) -> Any:
    made, path = rest.pop("made", WIDE), rest.pop("path", None)
    torch.manual_seed(seed)
    module = kind(on_meta, **made)
    trainer = topt_trainer(plan, **{"max_steps": 6, "use_distributed_sampler": False, **rest})
    trainer.fit(module, OwnShare(8, length=48), loader(8, length=8), ckpt_path=path)
    return module, trainer


def same(rank: int, plans: tuple[Any, ...], options: dict[str, Any]) -> list[str]:
    """Fit under `plans`; return the summaries of these."""
    whole, summaries = fit("ddp", False, **options)[0], []
    for plan in plans:
        asked = plan if isinstance(plan, dict) else {}
        module, trainer = fit(None if asked else plan, **{"options": asked, **options})
        assert module.first.keys() == whole.first.keys()
        for name, value in whole.first.items():
            assert torch.equal(module.first[name], value), name
        # up to the order of additions in reduced gradients
        assert module.losses == pytest.approx(whole.losses, rel=1e-6)
        assert len(module.losses) == 6
        summaries.append(trainer.strategy.parallel_plan.summary())
        if "ZeRO-3" in summaries[-1]:
            kept = sum(p.to_local().numel() for p in module.parameters() if isinstance(p, DTensor))
            assert kept <= 0.51 * sum(p.numel() for p in module.parameters())
    return summaries


def test_fits_are_those_of_whole_models() -> None:
    on_ranks(same, ("zero3", "zero2", "zero3+recompute", "zero1"), {})


@pytest.mark.thorough
def test_plans_that_are_searched() -> None:
    least = {"objective": "memory", "cluster": CLUSTER}
    (found,) = on_ranks(same, (least,), {"made": {"layers": 6, "width": 256}})[0]
    assert "ZeRO-3" in found or "ZeRO-2" in found, found


def test_uneven_and_tied_parameters() -> None:
    on_ranks(same, ("zero3", "zero2"), {"made": UNEVEN})


def test_manual_optimization() -> None:
    on_ranks(same, ("zero3",), {"kind": ByHand})


class Causal(LateGPT):
    """A model of transformers, which `make` makes."""

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta" if self.on_meta else "cpu"):
                self.net = self.kwargs["make"]()

    def forward(self, tokens: Tensor) -> Tensor:
        assert self.net is not None
        return self.net(tokens, use_cache=False).logits


def test_models_of_transformers() -> None:
    on_ranks(same, ("zero3",), {"kind": Causal, "made": {"make": gpt2}})


def from_files(rank: int, folder: Path) -> str:
    if rank == 0:
        torch.manual_seed(4)
        llama().save_pretrained(folder)
    dist.barrier()
    options = {"first_values": str(folder)}
    for plan in ("zero3", "zero1"):
        module = fit(plan, kind=Causal, made={"make": llama}, options=options)[0]
        torch.manual_seed(4)
        for name, value in llama().named_parameters():
            assert torch.equal(module.first[f"net.{name}"], value)
    return said(lambda: fit("zero3", False, kind=Causal, made={"make": llama}, options=options))


def test_weights_of_transformers_on_a_disk(tmp_path: Path) -> None:
    for refused in on_ranks(from_files, tmp_path):
        assert "first_values is for a model on the meta device, and this one has" in refused


def other_seeds(rank: int) -> None:
    whole = fit("ddp", False, seed=3)[0]
    module = fit("zero3", seed=3 + rank)[0]
    assert all(torch.equal(module.first[name], value) for name, value in whole.first.items())
    assert module.losses == pytest.approx(whole.losses, rel=1e-6)


def test_values_are_rank_0s() -> None:
    on_ranks(other_seeds)


def with_loaders(rank: int) -> None:
    """Loaders draw when a fit begins: after the values, as where a whole model was made."""

    def fit_of(plan: str, on_meta: bool) -> tuple[LateGPT, Tensor]:
        torch.manual_seed(3)
        module = LateGPT(on_meta, **WIDE)
        topt_trainer(plan, max_steps=4).fit(module, loader(4, length=48), loader(8, length=8))
        return module, torch.rand(4)

    whole, after = fit_of("ddp", False)
    module, drawn = fit_of("zero3", True)
    assert all(torch.equal(module.first[name], value) for name, value in whole.first.items())
    assert module.losses == pytest.approx(whole.losses, rel=1e-6)
    assert torch.equal(drawn, after)


def test_values_where_loaders_draw() -> None:
    on_ranks(with_loaders)


# ---- checkpoints and the end ---------------------------------------------------------------------


def save_and_resume(rank: int, folder: Path, form: str) -> None:
    expected = fit("ddp", False, max_steps=-1, max_epochs=2)[0]
    keep = ModelCheckpoint(folder, filename="end", save_on_train_epoch_end=True)
    options = {"options": {"checkpoint": form}, "enable_checkpointing": True, "callbacks": [keep]}
    module, trainer = fit("zero3", max_steps=-1, **options)
    after = full(module)
    assert isinstance(next(module.parameters()), DTensor)
    trainer.save_checkpoint(folder / "after.ckpt")
    for path in (folder / "end.ckpt", folder / "after.ckpt"):
        if form == "sharded":
            stored = read_sharded_checkpoint(path)["state_dict"]
        else:
            dist.barrier()
            stored = torch.load(path, weights_only=False)["state_dict"]
        assert {*stored} == {*after}
        assert all(torch.equal(stored[key], value) for key, value in after.items())
        # goes on in a model on the meta device, and in one with values
        for plan, on_meta in (("zero3", True), ("zero2", True), ("ddp", False)):
            resumed = fit(
                plan,
                on_meta,
                seed=9,
                path=path,
                max_steps=-1,
                max_epochs=2,
                options={"checkpoint": form},
            )[0]
            assert resumed.losses == pytest.approx(expected.losses[6:], rel=1e-5)


@pytest.mark.parametrize("form", ["sharded", pytest.param("full", marks=pytest.mark.thorough)])
def test_checkpoints_are_resumed_on_the_meta_device(form: str, tmp_path: Path) -> None:
    on_ranks(save_and_resume, tmp_path, form)


def one_file(rank: int, folder: Path) -> None:
    made: dict[str, Any] = {"kind": Causal, "made": {"make": llama}}
    module, trainer = fit("zero3", options={"checkpoint": "sharded"}, **made)
    trainer.save_checkpoint(folder / "end.ckpt")
    after = full(module)
    if rank == 0:
        write_module(
            folder / "end.ckpt", folder / "model.safetensors", module="net", most_bytes=5000
        )
        module.net.config.save_pretrained(folder)
        assert len([*folder.glob("model-*-of-*.safetensors")]) > 1
        kind: Any = type(module.net)
        for name, value in kind.from_pretrained(folder).named_parameters():
            assert torch.equal(after[f"net.{name}"], value)
    dist.barrier()
    again = fit("zero2", seed=9, options={"first_values": folder}, **made)[0]
    assert all(torch.equal(again.first[name], value) for name, value in after.items())


def test_one_file_is_that_of_transformers(tmp_path: Path) -> None:
    on_ranks(one_file, tmp_path)


class Reading(LateGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (2 if loss.item() > 1e9 else 1)


class Early(LateGPT):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.configure_model()


def evaluations(rank: int, path: Path, form: str) -> None:
    options: dict[str, Any] = {"options": {"checkpoint": form}}
    module, trainer = fit("zero3", **options, val_check_interval=2, check_val_every_n_epoch=None)
    within = trainer.callback_metrics["val_loss"].item()
    trainer.save_checkpoint(path)
    whole = LateGPT(False, **WIDE)
    data, expected = loader(8, length=8), topt_trainer("ddp", **options)
    expected.test(whole, data, ckpt_path=path, verbose=False)
    value = expected.callback_metrics["val_loss"].item()
    assert within == pytest.approx(value, rel=1e-6)
    new, least = LateGPT(True, **WIDE), topt_trainer(options={"memory_limit": "1GiB"})
    for own, tester, given in (
        *((module, trainer, None), (module, trainer, path), (LateGPT(True, **WIDE), trainer, path)),
        *((new, least, path), (new, least, None)),  # which stays in shards
    ):
        tester.validate(own, data, ckpt_path=given, verbose=False)
        assert tester.callback_metrics["val_loss"].item() == pytest.approx(value, rel=1e-6)
        assert {type(p.data) for p in own.parameters()} == {DTensor}
    blocks = least.strategy.parallel_plan.blocks
    assert {block.block for block in blocks} == {"", "net.blocks.0", "net.blocks.1"}
    found = torch.cat(least.predict(new, data, ckpt_path=path))
    assert torch.equal(found, torch.cat(expected.predict(whole, data, ckpt_path=path)))


@pytest.mark.parametrize("form", ["sharded", pytest.param("full", marks=pytest.mark.thorough)])
def test_evaluations_outside_of_a_fit_run_in_shards(form: str, tmp_path: Path) -> None:
    on_ranks(evaluations, tmp_path / "end.ckpt", form)


def said(call: Any) -> str:
    with pytest.raises(Exception) as caught:  # rank 0's own error, or its message elsewhere
        call()
    return " ".join(str(caught.value).split())


def refusals(rank: int) -> list[str]:
    module, trainer = fit("zero3")
    return [
        said(lambda: fit(None)),
        said(lambda: fit({"mesh": {"tensor": 2}})),
        said(lambda: fit({"mesh": {"pipeline": 2}})),
        said(lambda: fit("zero3", kind=Early, callbacks=[StochasticWeightAveraging(0.1)])),
        said(lambda: fit(None, kind=Reading, options={"memory_limit": "1GiB", "cluster": CLUSTER})),
        said(lambda: topt_trainer().test(LateGPT(True, **WIDE), loader(8), verbose=False)),
        said(lambda: trainer.fit(module, OwnShare(8))),
    ]


WORDS = (
    "on the meta device: a plan of data axes gives it values .*plan='zero3', memory_limit",
    "on the meta device, which data axes alone give values",
    "on the meta device, which data axes alone give values",
    "copies parameters on the meta device before they have values",
    "reads the values of a tensor|_local_scalar_dense.* cannot be captured",
    "on the meta device: a plan of data axes gives it values",
    "in shards already, of a fit before",
)


def test_what_cannot_run_is_said() -> None:
    for rank in on_ranks(refusals):
        for words, message in zip(WORDS, rank, strict=True):
            assert re.search(words, message), (words, message)
