"""One rank's part of a GPT as Megatron-LM runs it, in plain torch; to be captured, not trained.

`megatron_rows` captures it on the meta device; a model is a subject of its own. Parameters and
activations are float16. Column- and row-parallel products (Shoeybi et al., arXiv 1909.08053,
section 3) hold the slices of one rank; their all-reduces are shown to the capture:

    column-parallel   qkv, up           all-reduce of the input's gradient    (`enter_ranks`)
    row-parallel      projection, down  all-reduce of the output              (`sum_over_ranks`)

Scale, mask and softmax are one kernel where Megatron's own takes the shape (`takes_fused_softmax`);
elsewhere, as there, they are five. Dropout is on, as in training.

Shapes: positions S, samples B, hidden H, heads of the rank N.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from lightning_topt.graph.kernels import show_collective

DROPOUT = 0.1
# of GPT-2's vocabulary; Megatron pads it to a multiple of this on every rank
WORDS, MULTIPLE = 50_257, 128


@dataclass(frozen=True)
class GPTSizes:
    """The sizes of a GPT and of its tensor group; `fused` says what `takes_fused_softmax` says."""

    hidden: int
    heads: int
    sequence: int
    layers: int
    tensor: int = 1
    fused: bool = True

    @property
    def vocabulary(self) -> int:
        """The words of one rank."""
        return -(-WORDS // (MULTIPLE * self.tensor)) * MULTIPLE


def takes_fused_softmax(*, samples: int, heads: int, sequence: int) -> bool:
    """Return whether Megatron's kernel for causal softmax takes the scores of a rank.

    It is `is_kernel_available` there.
    """
    batches = samples * heads
    per_block = (128 // 32) * (1 if sequence > 128 else 2)  # warps of a block, rows of a warp
    return (
        16 < sequence <= 16_384
        and sequence % 4 == 0
        and batches % 4 == 0
        and batches % per_block == 0
    )


class MegatronGPT(nn.Module):
    """A rank's slices of a GPT with tied embeddings; `training_step` takes tokens (B, S+1).

    Activations are (S, B, H), as Megatron has them: products read heads without a copy.
    """

    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.words = nn.Embedding(sizes.vocabulary, sizes.hidden, dtype=torch.float16)
        self.positions = nn.Embedding(sizes.sequence, sizes.hidden, dtype=torch.float16)
        self.layers = nn.ModuleList(MegatronLayer(sizes) for _ in range(sizes.layers))
        self.norm = _norm(sizes)
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(sizes.sequence, sizes.sequence, dtype=torch.bool))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of the next tokens."""
        tokens, targets = batch[:, :-1].t(), batch[:, 1:].t()  # (S, B)
        # the embedding is split by words: each rank looks up its own, the rest are zeros
        x = self.words(tokens)
        if self.sizes.tensor > 1:
            x = sum_over_ranks(x)
        x = _dropped(x + self.positions.weight.unsqueeze(1))
        for layer in self.layers:
            x = layer(x, self.mask)
        # the head has the embedding's weights, so its logits are split by words too
        x = self.norm(x)
        if self.sizes.tensor > 1:
            x = enter_ranks(x)
        logits = F.linear(x, self.words.weight)
        is_split = self.sizes.tensor > 1
        loss: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
            logits, targets, is_split
        )
        return loss.mean()


class MegatronLayer(nn.Module):
    """Attention and MLP of a rank."""

    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        hidden, tensor = sizes.hidden, sizes.tensor
        self.heads, self.is_split, self.fused = sizes.heads // tensor, tensor > 1, sizes.fused
        self.norm1, self.norm2 = _norm(sizes), _norm(sizes)
        self.qkv = nn.Linear(hidden, 3 * hidden // tensor, dtype=torch.float16)
        self.projection = nn.Linear(hidden // tensor, hidden, dtype=torch.float16)
        self.up = nn.Linear(hidden, 4 * hidden // tensor, dtype=torch.float16)
        self.down = nn.Linear(4 * hidden // tensor, hidden, dtype=torch.float16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Map (S, B, H) to (S, B, H); `mask` (S, S) is true where nothing is to be seen."""
        attended = self._attention(self._entered(self.norm1(x)), mask)
        x = x + _dropped(self._summed(self.projection(attended)))
        inner = F.gelu(self.up(self._entered(self.norm2(x))))
        return x + _dropped(self._summed(self.down(inner)))

    def _attention(self, x: Tensor, mask: Tensor) -> Tensor:
        positions, samples, _ = x.shape
        parts = self.qkv(x).view(positions, samples * self.heads, -1).transpose(0, 1)
        query, key, value = parts.chunk(3, dim=-1)  # 3 x (B x N, S, H/N)
        scores = torch.bmm(query, key.transpose(1, 2))  # (B x N, S, S)
        if self.fused:
            weights = torch.softmax(scores, dim=-1)
        else:  # scale, mask and softmax, with copies to float32 and back
            weights = torch.softmax(
                (scores.float() * 0.125).masked_fill(mask, -10_000.0), dim=-1
            ).half()
        context = torch.bmm(_dropped(weights), value)
        return context.transpose(0, 1).reshape(positions, samples, -1)

    def _entered(self, x: Tensor) -> Tensor:
        return enter_ranks(x) if self.is_split else x

    def _summed(self, x: Tensor) -> Tensor:
        return sum_over_ranks(x) if self.is_split else x


def enter_ranks(x: Tensor) -> Tensor:
    """Return `x`, which all ranks have; its gradient is summed over them."""
    return _EnterRanks.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def sum_over_ranks(x: Tensor) -> Tensor:
    """Return the sum of what the ranks have."""
    return _SumOverRanks.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class _EnterRanks(Function):
    """Nothing in forward, an all-reduce of the gradient."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        show_collective(gradient, op="all_reduce", axis=0)
        return gradient


class _SumOverRanks(Function):
    """An all-reduce in forward, nothing for the gradient."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        show_collective(x, op="all_reduce", axis=0)
        return x.detach()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class _CrossEntropy(Function):
    """Megatron's loss of logits that are split by words (S, B, words of the rank).

    Three small all-reduces in forward; the probabilities are kept for backward.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, is_split: bool) -> Tensor:
        # softmax over the words of all ranks: the maximum, then the sum of exponentials
        scores = logits.float()
        highest = scores.amax(dim=-1)
        if is_split:
            show_collective(highest, op="all_reduce", axis=0)
        scores.sub_(highest.unsqueeze(-1))
        chosen = scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        weights = scores.exp_()
        total = weights.sum(dim=-1)
        if is_split:
            show_collective(chosen, op="all_reduce", axis=0)
            show_collective(total, op="all_reduce", axis=0)
        weights.div_(total.unsqueeze(-1))
        ctx.save_for_backward(weights, targets)
        return total.log() - chosen

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # probabilities minus one at the target
        weights, targets = ctx.saved_tensors
        weights.scatter_add_(-1, targets.unsqueeze(-1), -torch.ones_like(gradient).unsqueeze(-1))
        weights.mul_(gradient.unsqueeze(-1))
        return weights.half(), None, None  # of logits, targets, is_split


def _dropped(x: Tensor) -> Tensor:
    return torch.native_dropout(x, DROPOUT, True)[0]


def _norm(sizes: GPTSizes) -> nn.LayerNorm:
    return nn.LayerNorm(sizes.hidden, dtype=torch.float16)
