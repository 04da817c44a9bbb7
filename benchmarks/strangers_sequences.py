"""Speech, text and tabular families of the prediction benchmark: small faithful versions, written
here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class Recognizer(nn.Module):
    """Convolutions and bidirectional LSTMs over filter banks, a label per frame (Graves et al.,
    arXiv 1303.5778).
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
    """Strided convolutions over the waveform, a convolutional position, then attention; masked
    frames are predicted.
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
    """torch's own encoder-decoder transformer with tied embeddings (Vaswani et al., arXiv
    1706.03762).
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
    """A switch layer with a fixed capacity per expert (Fedus et al., arXiv 2101.03961), dispatched
    by one-hot products.
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
    """Embeddings of categories, dot products between features, two MLPs (Naumov et al., arXiv
    1906.00091).
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
