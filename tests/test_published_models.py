"""Models of transformers from their configurations: those of papers are as large as these say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hydra.utils import instantiate

from benchmarks.common import PUBLISHED_MODELS
from examples.hugging_face import HuggingFaceModel, RandomInputs
from lightning_topt.graph.module_copy import build_on_meta, is_on_meta
from tests.test_conf import composed

BILLIONS = {
    "llama3_8b": 8.03,
    "llama3_70b": 70.55,
    "llama3_405b": 405.85,
    "mistral_7b": 7.24,
    "gpt2_xl": 1.56,
    "gpt3_175b": 174.6,
    "bert_large": 0.335,
    "t5_3b": 2.85,
    "vit_h14": 0.632,
}
SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
TINY: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        **SMALL,
        "num_key_value_heads": 1,
        "architectures": ["LlamaForCausalLM"],
    },
    "bert": {"model_type": "bert", **SMALL, "architectures": ["BertForMaskedLM"]},
    "t5": {
        "model_type": "t5",
        "vocab_size": 32,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
    }
    | {"decoder_start_token_id": 0, "architectures": ["T5ForConditionalGeneration"]},
    "vit": {
        "model_type": "vit",
        **SMALL,
        "image_size": 16,
        "patch_size": 8,
        "architectures": ["ViTForImageClassification"],
    },
}


@pytest.mark.parametrize("name", BILLIONS)
def test_models_are_as_large_as_they_are_known(name: str) -> None:
    config = composed("plan", PUBLISHED_MODELS, f"model={name}")
    model = build_on_meta(lambda: instantiate(config.model))
    assert is_on_meta(model), "planned without memory"
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(
        BILLIONS[name], rel=0.01
    )
    assert config.trainer.precision == "bf16-mixed" and isinstance(
        instantiate(config.data), RandomInputs
    )


@pytest.mark.parametrize("kind", TINY)
def test_models_train_on_random_inputs(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY[kind]))
    torch.manual_seed(0)
    data = RandomInputs(str(path), seq_len=8, batch_size=2, num_samples=4)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = HuggingFaceModel(TINY[kind], seq_len=8)
    before = [p.detach().clone() for p in model.parameters()]
    trainer.fit(model, data)
    assert (
        trainer.callback_metrics["train_loss"].isfinite()
        and trainer.callback_metrics["val_loss"].isfinite()
    )
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_command_line_takes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY["llama"]))
    config = composed(
        "plan", PUBLISHED_MODELS, "model=hf", f"model.config={path}", "model.seq_len=16"
    )
    assert instantiate(config.data).samples[0]["input_ids"].shape == (16,)
    assert isinstance(instantiate(config.model), HuggingFaceModel)
