"""Models of Hugging Face's transformers from small configurations, as their users train them."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import transformers as hf
from torch import Tensor
from transformers import modeling_utils

from tests.foreign.shelf import image, label, loader, program, tokens

VOCAB, LENGTH = 32, 8


class Pretrained(L.LightningModule):
    """The usual wrapper: the model computes its own loss."""

    def __init__(self, model: modeling_utils.PreTrainedModel, scheduled: bool = False) -> None:
        super().__init__()
        self.model, self.scheduled = model, scheduled

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        no_decay = ("bias", "norm.weight", "LayerNorm.weight")
        groups = [
            {
                "params": [p for n, p in self.named_parameters() if not n.endswith(no_decay)],
                "weight_decay": 0.01,
            },
            {
                "params": [p for n, p in self.named_parameters() if n.endswith(no_decay)],
                "weight_decay": 0.0,
            },
        ]
        # The gradient of a key bias is zero but for rounding; a tiny eps would turn that noise into
        # steps.
        optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-4)
        if not self.scheduled:
            return optimizer
        scheduler = hf.get_linear_schedule_with_warmup(
            optimizer, 1, self.trainer.estimated_stepping_batches
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def language(source: torch.Generator, index: int) -> dict[str, Tensor]:
    """A text whose end is padding for every second sample."""
    ids, mask = tokens(source, LENGTH, VOCAB), torch.ones(LENGTH, dtype=torch.long)
    if index % 2:
        mask[-3:], ids[-3:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def translation(source: torch.Generator, index: int) -> dict[str, Tensor]:
    return {**language(source, index), "labels": tokens(source, 6, VOCAB)}


def sentence_and_label(source: torch.Generator, index: int) -> dict[str, Tensor]:
    return {**language(source, index), "labels": label(source)}


def picture_and_label(source: torch.Generator, index: int) -> dict[str, Tensor]:
    return {"pixel_values": image(source, size=16), "labels": label(source)}


def picture_and_text(source: torch.Generator, index: int) -> dict[str, Any]:
    return {
        "pixel_values": image(source, size=16),
        "input_ids": tokens(source, LENGTH, VOCAB),
        "return_loss": True,
    }


def without_flags(batch: list[dict[str, Any]]) -> dict[str, Any]:
    stacked = {
        key: torch.stack([entry[key] for entry in batch]) for key in ("pixel_values", "input_ids")
    }
    return {**stacked, "return_loss": True}


def segmentation(source: torch.Generator, index: int) -> dict[str, Tensor]:
    return {
        "pixel_values": image(source, size=32),
        "labels": torch.randint(0, 3, (32, 32), generator=source),
    }


def sound_and_text(source: torch.Generator, index: int) -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(8, 16, generator=source),
        "labels": tokens(source, 6, VOCAB),
    }


# one layer: only GPT-2 and T5 have two alike
LAYERS = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL = {**LAYERS, "vocab_size": VOCAB}
HALVES = {**SMALL, "intermediate_size": 32, "max_position_embeddings": 16, "num_key_value_heads": 1}
PATCHES = {**LAYERS, "intermediate_size": 32, "image_size": 16, "patch_size": 8}


@program()
def gpt2() -> Any:
    config = hf.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    return Pretrained(hf.GPT2LMHeadModel(config), scheduled=True), loader(language)


@program()
def llama() -> Any:
    return Pretrained(hf.LlamaForCausalLM(hf.LlamaConfig(**HALVES))), loader(language)


@program()
def bert() -> Any:
    config = hf.BertConfig(**SMALL, intermediate_size=32, max_position_embeddings=16, num_labels=5)
    return Pretrained(hf.BertForSequenceClassification(config)), loader(sentence_and_label)


@program()
def t5() -> Any:
    config = hf.T5Config(
        vocab_size=VOCAB,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return Pretrained(hf.T5ForConditionalGeneration(config)), loader(translation)


@program()
def mixtral() -> Any:
    config = hf.MixtralConfig(
        **HALVES, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
    )
    return Pretrained(hf.MixtralForCausalLM(config)), loader(language)


@program()
def convnext() -> Any:
    config = hf.ConvNextConfig(
        num_channels=3,
        patch_size=2,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_stages=2,
        num_labels=5,
    )
    return Pretrained(hf.ConvNextForImageClassification(config)), loader(picture_and_label)


@program()
def clip() -> Any:
    config = hf.CLIPConfig(
        text_config={
            **SMALL,
            "intermediate_size": 32,
            "max_position_embeddings": 16,
            "eos_token_id": 1,
        },
        vision_config=PATCHES,
        projection_dim=8,
    )
    return Pretrained(hf.CLIPModel(config)), loader(picture_and_text, collate_fn=without_flags)


@program()
def segformer() -> Any:
    config = hf.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        num_labels=3,
    )
    return Pretrained(hf.SegformerForSemanticSegmentation(config)), loader(segmentation)


@program()
def whisper() -> Any:
    config = hf.WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=8,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=1,
    )
    return Pretrained(hf.WhisperForConditionalGeneration(config)), loader(sound_and_text)
