"""Models of at least eight parts in a row, for pipelines: what `pipeline_equality` compares.

As in `tensor_equality_models`; `blocks` are the units that stages are made of, in the order of
their calls. Units that no stage names (an embedding, a head) run with the named one before them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from benchmarks.tensor_equality_models import MODELS as SPLIT_MODELS
from benchmarks.tensor_equality_models import Model, Part, Text
from lightning_topt.cli.tasks.byte_lm import ByteGPT
from lightning_topt.graph.op_config import Shard

BATCH, DEPTH = 24, 8


def tokens() -> Part:
    """Tokens in and out."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(2, 64, (2, BATCH, 12), generator=generator)
    return values[0], values[1]


def images() -> Part:
    """Images of 16 x 16 and their classes."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn((BATCH, 3, 16, 16), generator=generator), torch.randint(
        8, (BATCH,), generator=generator
    )


def masks() -> Part:
    """Images of 16 x 16 and the class of each of their points."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn((BATCH, 3, 16, 16), generator=generator), torch.randint(
        4, (BATCH, 16, 16), generator=generator
    )


class GPT(nn.Module):
    """The byte-level GPT of the console. Tied embeddings: the last stage reads the weights of the
    first.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.net = ByteGPT(
            num_layers=DEPTH, hidden=32, num_heads=4, seq_len=16, tied_head=True, dropout=dropout
        )

    def forward(self, part: Part) -> Tensor:
        """Return the loss."""
        return F.cross_entropy(self.net(part[0]).flatten(0, 1), part[1].flatten())


class Residual(nn.Module):
    """Two convolutions with norms over the microbatch; `stride` halves the image, and then the
    channels double.
    """

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        width = channels * stride
        self.first = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.down = nn.Conv2d(channels, width, 1, stride=stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, width, H / stride, W / stride)."""
        y = F.relu(self.norm1(self.first(x)))
        return F.relu(self.down(x) + self.norm2(self.second(y)))


class ResNet(nn.Module):
    """Eight residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        channels, blocks = 8, []
        for index in range(DEPTH):
            stride = 2 if index in (3, 6) else 1
            blocks.append(Residual(channels, stride))
            channels *= stride
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, 8)

    def forward(self, part: Part) -> Tensor:
        """Return the loss."""
        x = F.relu(self.norm(self.stem(part[0])))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), part[1])


class Convolutions(nn.Module):
    """Two convolutions and a norm of groups."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.Conv2d(outputs, outputs, 3, padding=1),
        )
        self.norm = nn.GroupNorm(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, outputs, H, W)."""
        return F.relu(self.second(F.relu(self.norm(self.first(x)))))


class UNet(nn.Module):
    """Four levels down and up again; what a level makes on the way down is read on the way up,
    stages later.
    """

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 8, 16, 16, 16)
        self.down = nn.ModuleList(map(Convolutions, widths, widths[1:]))
        self.middle = Convolutions(16, 16)
        self.up = nn.ModuleList(
            [Convolutions(32, 16), Convolutions(32, 16), Convolutions(32, 16), Convolutions(24, 8)]
        )
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, part: Part) -> Tensor:
        """Return the loss."""
        x, skips = part[0], []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, skip in zip(self.up, reversed(skips), strict=True):
            x = up(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1))
        return F.cross_entropy(self.head(x), part[1])


def gpt() -> nn.Module:
    """Without dropout."""
    return GPT(0.0)


def gpt_dropout() -> nn.Module:
    """Masks are drawn on every stage."""
    return GPT(0.1)


def llama() -> nn.Module:
    """Grouped heads."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=DEPTH,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return Text(transformers.LlamaForCausalLM(config))


def t5() -> nn.Module:
    """Encoder and decoder of four blocks each: all decoder stages read what the encoder made, and
    position biases.
    """
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=DEPTH // 2, num_heads=4,
        decoder_start_token_id=0, dropout_rate=0.0, use_cache=False,
    )  # fmt: skip
    return Text(transformers.T5ForConditionalGeneration(config))


def _cuts(names: str) -> dict[str, dict[str, Shard]]:
    """Along a tensor axis: the convolution before the norm by outputs, with it, and the other one
    by inputs.
    """
    norms = {f"{name}.{kind}": Shard(0) for name in names.split() for kind in ("weight", "bias")}
    first = {"first.weight": Shard(0), "first.bias": Shard(0), "second.weight": Shard(1)}
    return {"attention": {}, "perceptron": {**first, **norms}, "rest": {}}


_GPT_BLOCKS = [f"net.blocks.{index}" for index in range(DEPTH)]
_LEVELS = range(DEPTH // 2)
MODELS: dict[str, Model] = {
    "GPT": Model(gpt, tokens, _GPT_BLOCKS, SPLIT_MODELS["GPT"].cuts),
    "Llama": Model(
        llama,
        tokens,
        [f"net.model.layers.{index}" for index in range(DEPTH)],
        SPLIT_MODELS["Llama"].cuts,
    ),
    "T5": Model(
        t5,
        tokens,
        [f"net.{part}.block.{index}" for part in ("encoder", "decoder") for index in _LEVELS],
        SPLIT_MODELS["T5"].cuts,
    ),
    "ResNet": Model(
        ResNet, images, [f"blocks.{index}" for index in range(DEPTH)], _cuts("norm1"), by_part=True
    ),
    "U-Net": Model(
        UNet,
        masks,
        [*(f"down.{index}" for index in _LEVELS), "middle", *(f"up.{index}" for index in _LEVELS)],
        _cuts("norm"),
    ),
    "GPT, dropout": Model(gpt_dropout, tokens, _GPT_BLOCKS, SPLIT_MODELS["GPT"].cuts),
}
