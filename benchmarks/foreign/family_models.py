"""Twelve model families that no other benchmark uses, with their batches and optimizers.

Small faithful versions of vision, speech, text and tabular models, for
`benchmarks.foreign.model_families`. A network takes a batch and returns its loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional


class FamilyModule(L.LightningModule):
    """A network that returns its loss, with the optimizer that `optimizer` makes."""

    def __init__(self, net: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.net, self.make_optimizer = net, optimizer

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        loss: Tensor = self.net(batch)
        return loss

    def training_step(self, batch: Sequence[Tensor], batch_index: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


@dataclass(frozen=True)
class Family:
    """How to make a family's module and a batch of `batch_size` samples."""

    net: Callable[[], nn.Module]
    batch: Callable[[int], Sequence[Tensor]]
    batch_size: int
    optimizer: Callable[[Any], torch.optim.Optimizer]

    def module(self) -> FamilyModule:
        """The module, with equal parameters in every process."""
        torch.manual_seed(0)
        return FamilyModule(self.net(), self.optimizer)

    def example(self, seed: int) -> Sequence[Tensor]:
        """One batch."""
        torch.manual_seed(seed)
        return self.batch(self.batch_size)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def adam_foreach(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-4, foreach=True)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=1e-4)


def tokens(*shapes: tuple[int, int]) -> Callable[[int], Sequence[Tensor]]:
    """Batches of random tokens, one tensor per (length, vocabulary)."""
    return lambda n: tuple(
        torch.randint(0, vocabulary, (n, length)) for length, vocabulary in shapes
    )


def clicks(n: int) -> Sequence[Tensor]:
    return torch.rand(n, 13), torch.randint(0, 20000, (n, 12)), torch.randint(0, 2, (n,)).float()


# ---- vision --------------------------------------------------------------------------------------


class ResidualPair(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a shortcut (He et al., arXiv 1512.03385)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        return functional.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-18 for 64 x 64 images."""

    def __init__(self, classes: int = 100) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 5, 2, 2, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        pairs = [(a, b, s) for a, b, s in widths] + [(b, b, 1) for _, b, _ in widths]
        self.layers = nn.Sequential(
            *(ResidualPair(*pair) for pair in sorted(pairs, key=lambda p: (p[1], -p[2], p[0])))
        )
        self.head = nn.Linear(512, classes)

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        images, labels = batch
        features = self.layers(self.stem(images)).mean(dim=(2, 3))
        return functional.cross_entropy(self.head(features), labels)


class ConvNextBlock(nn.Module):
    """Depthwise 7x7, LayerNorm, an inverted bottleneck and a layer scale.

    Source: Liu et al., arXiv 2201.03545.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(functional.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """Four stages for 64 x 64 images."""

    def __init__(
        self, widths: Sequence[int] = (64, 128, 256, 512), depths: Sequence[int] = (2, 2, 4, 2)
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 4, 4)
        self.stages = nn.ModuleList(
            nn.Sequential(*(ConvNextBlock(width) for _ in range(depth)))
            for width, depth in zip(widths, depths, strict=True)
        )
        self.downs = nn.ModuleList(nn.Conv2d(a, b, 2, 2) for a, b in itertools.pairwise(widths))
        self.head = nn.Linear(widths[-1], 100)

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        images, labels = batch
        x = self.stages[0](self.stem(images))
        for down, stage in zip(self.downs, self.stages[1:], strict=False):
            x = stage(down(x))
        return functional.cross_entropy(self.head(x.mean(dim=(2, 3))), labels)


class VitBlock(nn.Module):
    """Pre-norm attention and MLP (Dosovitskiy et al., arXiv 2010.11929)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Vit(nn.Module):
    """Patches of 8 x 8 pixels of 64 x 64 images."""

    def __init__(self, width: int = 320, heads: int = 5, depth: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.position = nn.Parameter(torch.randn(1, 65, width) * 0.02)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.blocks = nn.ModuleList(VitBlock(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 100)

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        images, labels = batch
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)[:, 0]), labels)


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution, squeeze-and-excitation, projection.

    Source: Howard et al., arXiv 1905.02244.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        width = 6 * inputs
        self.expand = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.Hardswish()
        )
        self.depthwise = nn.Sequential(
            nn.Conv2d(width, width, 5, stride, 2, groups=width, bias=False),
            nn.BatchNorm2d(width),
            nn.Hardswish(),
        )
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(width, width // 4, 1),
            nn.ReLU(),
            nn.Conv2d(width // 4, width, 1),
        )
        self.project = nn.Sequential(
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        )
        self.same = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.expand(x))
        y = self.project(y * functional.hardsigmoid(self.squeeze(y)))
        return x + y if self.same else y


class MobileNet(nn.Module):
    """Inverted residuals for 96 x 96 images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 24, 3, 2, 1, bias=False), nn.BatchNorm2d(24), nn.Hardswish()
        )
        widths = [
            (24, 32, 2),
            (32, 32, 1),
            (32, 64, 2),
            (64, 64, 1),
            (64, 128, 2),
            *[(128, 128, 1)] * 3,
        ]
        widths += [(128, 192, 2), *[(192, 192, 1)] * 2]
        self.layers = nn.Sequential(*(InvertedResidual(*shape) for shape in widths))
        self.head = nn.Sequential(
            nn.Linear(192, 1024), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(1024, 100)
        )

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(
            self.head(self.layers(self.stem(images)).mean(dim=(2, 3))), labels
        )


def double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    """Two 3x3 convolutions with GroupNorm and SiLU."""
    return nn.Sequential(
        *(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU()),
        *(nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU()),
    )


class UNet(nn.Module):
    """Four resolutions with skips, for segmentation of 64 x 64 images.

    Source: Ronneberger et al., arXiv 1505.04597.
    """

    def __init__(self, widths: Sequence[int] = (32, 64, 128, 256, 512)) -> None:
        super().__init__()
        self.downs = nn.ModuleList(
            double_convolution(a, b) for a, b in zip((3, *widths), widths, strict=False)
        )
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs)
        self.joins = nn.ModuleList(double_convolution(2 * b, b) for _, b in pairs)
        self.head = nn.Conv2d(widths[0], 10, 1)

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        images, labels = batch
        skips, x = [], images
        for index, down in enumerate(self.downs):
            x = down(x if index == 0 else functional.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for up, join in zip(self.ups, self.joins, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], dim=1))
        return functional.cross_entropy(self.head(x), labels)


class ConvVae(nn.Module):
    """A convolutional variational autoencoder of 64 x 64 images.

    Source: Kingma & Welling, arXiv 1312.6114.
    """

    def __init__(self, widths: Sequence[int] = (48, 96, 192, 384), latent: int = 256) -> None:
        super().__init__()
        downs, ups = (
            zip((3, *widths), widths, strict=False),
            zip(widths[::-1], (*widths[-2::-1], 32), strict=True),
        )
        self.encoder = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.LeakyReLU(0.2))
                for a, b in downs
            )
        )
        self.inner = widths[-1] * 16
        self.statistics = nn.Linear(self.inner, 2 * latent)
        self.start = nn.Linear(latent, self.inner)
        self.decoder = nn.Sequential(
            *(
                nn.Sequential(
                    nn.ConvTranspose2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.LeakyReLU(0.2)
                )
                for a, b in ups
            )
        )
        self.head = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        (images,) = batch
        mean, log_variance = self.statistics(self.encoder(images).flatten(1)).chunk(2, dim=1)
        sample = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        decoded = self.head(self.decoder(self.start(sample).view(len(images), -1, 4, 4)))
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()
        return functional.mse_loss(decoded, images) + 1e-3 * divergence


def images(batch_size: int, side: int, **labels: Any) -> tuple[Tensor, ...]:
    """Random images, with labels of `classes` for each image or, with `dense`, for each pixel."""
    x = torch.rand(batch_size, 3, side, side)
    if not labels:
        return (x,)
    shape = (batch_size, side, side) if labels.get("dense") else (batch_size,)
    return x, torch.randint(0, labels["classes"], shape)


# ---- speech, text and tables ---------------------------------------------------------------------


class Recognizer(nn.Module):
    """Convolutions and bidirectional LSTMs over filter banks, with a label per frame.

    Source: Graves et al., arXiv 1303.5778.
    """

    def __init__(self, width: int = 320, layers: int = 3) -> None:
        super().__init__()
        self.front = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 32, 3, (2, 1), 1), nn.BatchNorm2d(32), nn.ReLU()),
        )
        sizes = [32 * 20] + [2 * width] * (layers - 1)
        self.layers = nn.ModuleList(
            nn.LSTM(size, width, batch_first=True, bidirectional=True) for size in sizes
        )
        self.norms = nn.ModuleList(nn.LayerNorm(2 * width) for _ in sizes)
        self.head = nn.Linear(2 * width, 48)

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        features, labels = batch  # (sample, 80, frame), (sample, frame / 2)
        x = self.front(features[:, None]).flatten(1, 2).transpose(1, 2)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x)[0])
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class WaveBlock(nn.Module):
    """Post-norm attention and feed-forward as in wav2vec 2.0 (Baevski et al., arXiv 2006.11477)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm1(x + functional.dropout(self.out(y), 0.1, self.training))
        return self.norm2(x + self.down(functional.gelu(self.up(x))))


class WaveEncoder(nn.Module):
    """Strided convolutions over the waveform, a convolutional position, then attention.

    Masked frames are predicted.
    """

    def __init__(self, width: int = 320, depth: int = 6, channels: int = 128) -> None:
        super().__init__()
        strides = [(10, 5), (3, 2), (3, 2), (3, 2), (2, 2)]
        inputs = [1] + [channels] * (len(strides) - 1)
        self.front = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv1d(size, channels, kernel, stride), nn.GroupNorm(8, channels), nn.GELU()
                )
                for size, (kernel, stride) in zip(inputs, strides, strict=True)
            )
        )
        self.project = nn.Linear(channels, width)
        self.position = nn.Conv1d(width, width, 31, padding=15, groups=16)
        self.blocks = nn.ModuleList(WaveBlock(width, 5) for _ in range(depth))
        self.head = nn.Linear(width, 320)

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        waves, labels = batch  # (sample, time), (sample, frame)
        x = self.project(self.front(waves[:, None]).transpose(1, 2))
        x = x + functional.gelu(self.position(x.transpose(1, 2))).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(
            self.head(x).flatten(0, 1), labels[:, : x.shape[1]].flatten()
        )


class Translator(nn.Module):
    """torch's own encoder-decoder transformer with tied embeddings.

    Source: Vaswani et al., arXiv 1706.03762.
    """

    def __init__(self, width: int = 256, vocabulary: int = 6000, length: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.transformer = nn.Transformer(width, 4, 4, 4, 4 * width, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length - 1))

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        source, target = batch
        encoded = self.embed(source) + self.position[: source.shape[1]]
        decoded = self.embed(target[:, :-1]) + self.position[: target.shape[1] - 1]
        logits = self.head(
            self.transformer(encoded, decoded, tgt_mask=self.mask, tgt_is_causal=True)
        )
        return functional.cross_entropy(
            logits.flatten(0, 1), target[:, 1:].flatten(), label_smoothing=0.1
        )


class RmsNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-5) * self.weight


class LlamaBlock(nn.Module):
    """Rotary positions, grouped key-value heads, SwiGLU (Touvron et al., arXiv 2307.09288)."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, size = heads, groups, width // heads
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * size, bias=False) for _ in range(2))
        self.norm1, self.norm2, inner = RmsNorm(width), RmsNorm(width), 8 * width // 3
        self.gate, self.up = (
            nn.Linear(width, inner, bias=False),
            nn.Linear(width, inner, bias=False),
        )
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            f(y).unflatten(2, (n, -1)).transpose(1, 2)
            for f, n in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.groups, dim=1) for t in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of (sample, head, position, 2 * pair)."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Llama(nn.Module):
    """A decoder of Llama's form."""

    def __init__(
        self, width: int = 384, depth: int = 6, vocabulary: int = 4096, length: int = 128
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, 6, 2) for _ in range(depth))
        self.norm, self.head = RmsNorm(width), nn.Linear(width, vocabulary, bias=False)
        angles = torch.outer(torch.arange(length), 10000.0 ** -(torch.arange(0, 64, 2) / 64))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        (tokens,) = batch
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, self.cos[: x.shape[1]], self.sin[: x.shape[1]])
        return functional.cross_entropy(
            self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten()
        )


class Experts(nn.Module):
    """A switch layer with a fixed capacity per expert, dispatched by one-hot products.

    Source: Fedus et al., arXiv 2101.03961.
    """

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width) * (4 * width) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.flatten(0, 1)  # (token, width)
        capacity = x.shape[0] * 5 // (4 * self.up.shape[0])
        gates, chosen = self.router(x).softmax(dim=-1).max(dim=-1)
        choice = functional.one_hot(chosen, self.up.shape[0]).to(x.dtype)
        place = ((choice.cumsum(dim=0) - 1) * choice).sum(dim=-1)
        kept = (place < capacity).to(x.dtype)
        slots = functional.one_hot(place.long().clamp(max=capacity - 1), capacity).to(x.dtype)
        # (token, expert, slot)
        dispatch = choice[:, :, None] * slots[:, None] * kept[:, None, None]
        inside = torch.einsum("tes,tw->esw", dispatch, x)
        inside = functional.gelu(inside @ self.up) @ self.down
        return torch.einsum("tes,esw->tw", dispatch * gates[:, None, None], inside).view(shape)


class MixtureBlock(nn.Module):
    """Attention, then experts."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.experts = Experts(width, experts)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.experts(self.norm2(x))


class Mixture(nn.Module):
    """A masked language model whose feed-forwards are mixtures of eight experts."""

    def __init__(
        self, width: int = 256, depth: int = 6, experts: int = 8, vocabulary: int = 4096
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(128, width) * 0.02)
        self.blocks = nn.ModuleList(MixtureBlock(width, experts) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        tokens, labels = batch
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Recommender(nn.Module):
    """Embeddings of categories, dot products between features, and two MLPs.

    Source: Naumov et al., arXiv 1906.00091.
    """

    def __init__(self, tables: int = 12, rows: int = 20000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(
            *(
                nn.Linear(13, 512),
                nn.ReLU(),
                nn.Linear(512, 256),
                nn.ReLU(),
                nn.Linear(256, width),
                nn.ReLU(),
            )
        )
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            *(nn.Linear(pairs + width, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()),
            *(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)),
        )
        self.register_buffer("pairs", torch.triu_indices(tables + 1, tables + 1, 1))

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        numbers, categories, clicked = batch
        dense = self.bottom(numbers)
        features = torch.stack(
            [dense, *(t(categories[:, i]) for i, t in enumerate(self.tables))], dim=1
        )
        products = (features @ features.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits = self.top(torch.cat([dense, products], dim=1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logits, clicked)


# ---- the twelve families -------------------------------------------------------------------------

FAMILIES: dict[str, Family] = {
    "resnet": Family(ResNet, lambda n: images(n, 64, classes=100), 24, momentum),
    "convnext": Family(ConvNext, lambda n: images(n, 64, classes=100), 16, adamw),
    "vit": Family(Vit, lambda n: images(n, 64, classes=100), 16, fused_adamw),
    "mobilenet": Family(MobileNet, lambda n: images(n, 96, classes=100), 8, momentum),
    "unet": Family(UNet, lambda n: images(n, 64, dense=True, classes=10), 4, adam_foreach),
    "vae": Family(ConvVae, lambda n: images(n, 64), 24, fused_adamw),
    "recognizer": Family(
        Recognizer, lambda n: (torch.rand(n, 80, 200), torch.randint(0, 48, (n, 100))), 8, adamw
    ),
    "wave": Family(
        WaveEncoder, lambda n: (torch.randn(n, 16000), torch.randint(0, 320, (n, 200))), 6, adamw
    ),
    "translator": Family(Translator, tokens((48, 6000), (64, 6000)), 12, adam_foreach),
    "llama": Family(Llama, tokens((129, 4096)), 8, fused_adamw),
    "mixture": Family(Mixture, tokens((64, 4096), (64, 4096)), 8, adamw),
    "recommender": Family(Recommender, clicks, 1024, fused_adamw),
}
