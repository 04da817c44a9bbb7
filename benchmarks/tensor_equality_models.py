"""Five small models, and where their parameters may be cut: what `tensor_equality` compares.

A model is a module whose forward takes a part of the batch and returns its mean loss. Sizes divide
by 8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from lightning_topt.cli.tasks.byte_lm import ByteGPT
from lightning_topt.graph.op_config import Shard

BATCH = 16
OUT, IN, FUSED = Shard(0), Shard(1), Shard(0, parts=3)
Part = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Model:
    """`blocks` are the repeated modules, by name; `cuts` says along which dim parameters are cut
    whose name ends so, by what they are part of. `by_part`: its loss is of each part of the batch
    by itself (statistics of batches).
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], Part]
    blocks: Sequence[str]
    cuts: Mapping[str, Mapping[str, Shard]]
    by_part: bool = False


def _numbers(*shape: int, high: int) -> Tensor:
    return torch.randint(2, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def tokens() -> Part:
    """Tokens in and out."""
    return _numbers(BATCH, 16, high=64), _numbers(BATCH, 16, high=64)


def images() -> Part:
    """Images of 16 x 16 and their classes."""
    values = torch.randn((BATCH, 3, 16, 16), generator=torch.Generator().manual_seed(1))
    return values, _numbers(BATCH, high=8)


class GPT(nn.Module):
    """The byte-level GPT of the console; tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.net = ByteGPT(num_layers=2, hidden=32, num_heads=8, seq_len=16, tied_head=True)

    def forward(self, part: Part) -> Tensor:
        """Return the loss."""
        return F.cross_entropy(self.net(part[0]).flatten(0, 1), part[1].flatten())


class Text(nn.Module):
    """A model of transformers on tokens."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, part: Part) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.net(input_ids=part[0], labels=part[1]).loss
        return loss


class Images(nn.Module):
    """A model of transformers on images."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, part: Part) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.net(pixel_values=part[0], labels=part[1]).loss
        return loss


class Residual(nn.Module):
    """Two convolutions around norms of groups and of batches."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)
        )
        self.groups, self.batches = nn.GroupNorm(8, channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape."""
        return F.relu(x + self.batches(self.second(F.relu(self.groups(self.first(x))))))


class ConvNet(nn.Module):
    """A small residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Residual(32) for _ in range(2))
        self.head = nn.Linear(32, 8)

    def forward(self, part: Part) -> Tensor:
        """Return the loss."""
        x = self.stem(part[0])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), part[1])


def llama() -> nn.Module:
    """Grouped heads."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=4
    )  # fmt: skip
    return Text(transformers.LlamaForCausalLM(config))


def t5() -> nn.Module:
    """Encoder and decoder, tied embeddings."""
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=8,
        decoder_start_token_id=0, dropout_rate=0.0,
        use_cache=False,  # a block that is recomputed must not find its keys there
    )  # fmt: skip
    return Text(transformers.T5ForConditionalGeneration(config))


def vit() -> nn.Module:
    """Patches of 4 x 4."""
    config = transformers.ViTConfig(
        image_size=16, patch_size=4, hidden_size=32, num_hidden_layers=2, num_attention_heads=8,
        intermediate_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        num_labels=8,
    )  # fmt: skip
    return Images(transformers.ViTForImageClassification(config))


def _both(names: str, shard: Shard) -> dict[str, Shard]:
    return {f"{name}.{kind}": shard for name in names.split() for kind in ("weight", "bias")}


def _weights(names: str, shard: Shard) -> dict[str, Shard]:
    return {f"{name}.weight": shard for name in names.split()}


MODELS: dict[str, Model] = {
    "GPT": Model(
        GPT,
        tokens,
        [f"net.blocks.{index}" for index in range(2)],
        {
            "attention": {**_both("query_key_value", FUSED), "attention_out.weight": IN},
            "perceptron": {**_both("mlp_in", OUT), "mlp_out.weight": IN},
            "rest": {
                "net.embedding.weight": OUT,
                "net.head.weight": OUT,
                "net.positions.weight": IN,
            },
        },
    ),
    "Llama": Model(
        llama,
        tokens,
        [f"net.model.layers.{index}" for index in range(2)],
        {
            "attention": {**_weights("q_proj k_proj v_proj", OUT), "o_proj.weight": IN},
            "perceptron": {**_weights("gate_proj up_proj", OUT), "down_proj.weight": IN},
            "rest": _weights("embed_tokens lm_head", OUT),
        },
    ),
    "T5": Model(
        t5,
        tokens,
        [f"net.{part}.block.{index}" for part in ("encoder", "decoder") for index in range(2)],
        {
            "attention": {
                **_weights("Attention.q Attention.k Attention.v", OUT),
                **_weights("Attention.o relative_attention_bias", IN),
            },
            "perceptron": {"wi.weight": OUT, "wo.weight": IN},
            "rest": _weights("shared embed_tokens lm_head", OUT),
        },
    ),
    "ViT": Model(
        vit,
        images,
        [f"net.vit.layers.{index}" for index in range(2)],
        {
            "attention": {**_both("q_proj k_proj v_proj", OUT), "o_proj.weight": IN},
            "perceptron": {**_both("fc1", OUT), "fc2.weight": IN},
            "rest": {**_both("projection", OUT), "net.classifier.weight": IN},
        },
    ),
    "conv": Model(
        ConvNet,
        images,
        [f"blocks.{index}" for index in range(2)],
        {
            "attention": {"first.weight": OUT, **_both("groups", OUT)},
            "perceptron": {"second.weight": IN},
            "rest": {**_both("stem", OUT), "head.weight": IN},
        },
        by_part=True,
    ),
}


def made(model: Model, *, seed: int) -> Any:
    """Return the module with the parameters of `seed`, in training mode."""
    torch.manual_seed(seed)
    return model.make().train()
