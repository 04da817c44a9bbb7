"""Adapters by peft on a model of transformers: under every plan as under ddp, saved and merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_topt import AutoParallelStrategy
from lightning_topt.plan.parallel_plan import PlanError
from tests.plugins.trainer_ranks import OwnShare, make_trainer, mean_over_ranks, on_ranks

peft = pytest.importorskip("peft", reason="no peft")
transformers = pytest.importorskip("transformers", reason="no transformers")

PLANS = ["ddp", "zero1", "zero2", "zero3", "zero2+recompute"]
EPOCHS = 2


def base_model() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=8, n_layer=3, n_embd=16, n_head=2, use_cache=False
    )
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, name, 0.0)
    return transformers.GPT2LMHeadModel(config)


class FineTuning(L.LightningModule):
    """A user's: adapters are trained, and checkpoints hold these alone."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        config = peft.LoraConfig(
            r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False
        )
        base = base_model()
        torch.manual_seed(1)
        self.model = peft.get_peft_model(base, config)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(mean_over_ranks(outputs["loss"]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: state[name] for name in state if "lora_" in name}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def fit(plan: str | None, *, path: str | None = None, epochs: int = EPOCHS) -> Any:
    strategy = DDPStrategy() if plan is None else AutoParallelStrategy(plan=plan)
    trainer = make_trainer(strategy, devices=2, max_epochs=epochs)
    module = FineTuning()
    trainer.fit(module, OwnShare(8, length=40), ckpt_path=path, weights_only=False)
    return module, trainer


def beside_ddp(rank: int, plan: str, folder: str) -> Any:
    (plain, _), (ours, trainer) = fit(None), fit(plan)
    # a checkpoint of the adapters, resumed; and peft's own files
    _, trainer = fit(plan, epochs=1)
    trainer.save_checkpoint(f"{folder}/adapters.ckpt")
    later, _ = fit("zero2", path=f"{folder}/adapters.ckpt")
    if rank == 0:
        ours.model.save_pretrained(f"{folder}/adapters")
    states = [dict(each.state_dict()) for each in (plain, ours, later)]
    return states, plain.losses, ours.losses


@pytest.mark.parametrize("plan", PLANS)
def test_adapters_are_trained_saved_and_merged(plan: str, tmp_path: Path) -> None:
    for states, losses, own in on_ranks(beside_ddp, plan, str(tmp_path)):
        assert own == pytest.approx(losses, rel=1e-5) and len(own) == 10
        for state in states[1:]:
            assert state.keys() == states[0].keys()
            for name, value in states[0].items():
                torch.testing.assert_close(state[name], value, rtol=1e-4, atol=2e-6, msg=name)
    saved = torch.load(tmp_path / "adapters.ckpt", weights_only=False)["state_dict"]
    assert saved and all("lora_" in name for name in saved)
    # merged, the base model computes what the fit ended with
    merged = peft.PeftModel.from_pretrained(base_model(), tmp_path / "adapters").merge_and_unload()
    trained = FineTuning()
    trained.load_state_dict(states[1])
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(
        merged.eval()(tokens).logits, trained.model.eval()(tokens).logits, rtol=1e-4, atol=1e-5
    )


class SavesItself(FineTuning):
    """Calls peft in a hook, where a rank has shards."""

    def on_train_epoch_end(self) -> None:
        if self.global_rank == 0:
            self.model.save_pretrained("adapters")


def refused(rank: int) -> str:
    trainer = make_trainer(AutoParallelStrategy(plan="zero3"), devices=2)
    with pytest.raises(PlanError) as caught:
        trainer.fit(SavesItself(), OwnShare(8, length=40))
    return str(caught.value)


def test_a_hook_that_needs_whole_adapters_is_named() -> None:
    for sentence in on_ranks(refused):
        assert "SavesItself.on_train_epoch_end" in sentence
