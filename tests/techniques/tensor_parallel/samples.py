"""Calls of every kind, as users write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.techniques.tensor_parallel.simulated import Sample

NN: Any = torch._C._nn
T = Tensor


def r(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=_GENERATOR) * 0.8 + 0.1


def i(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=_GENERATOR)


def mask(*shape: int) -> Tensor:
    return r(*shape) > 0.5


_GENERATOR = torch.Generator().manual_seed(0)
S = Sample

ELEMENTWISE = [
    S(torch.add, r(4, 8), r(8), alpha=2),
    S(T.__add__, r(4, 1, 8), r(4, 1)),
    S(torch.mul, r(4, 8), r(4, 8), parts=(1, 2)),
    S(torch.where, mask(4, 8), r(4, 8), r(8)),
    S(torch.where, mask(4, 8), r(4, 8), 0.0),
    S(T.masked_fill, r(2, 4, 8, 8), mask(2, 1, 8, 8), -1e9),
    S(T.masked_fill_, r(4, 8), mask(4, 1), 0.0),
    S(torch.clamp, r(4, 8), min=0.3, max=0.6),
    S(torch.addcmul, r(4, 8), r(8), r(4, 1), value=0.5),
    S(T.add_, r(4, 8), r(8)),
    S(F.relu, r(4, 8) - 0.5, inplace=True),
    S(F.gelu, r(4, 8), approximate="tanh"),
    S(F.prelu, r(4, 8) - 0.5, r(1)),
    S(torch.zeros_like, r(4, 8)),
    S(T.copy_, r(4, 8), r(8)),
    S(T.__rsub__, r(4, 8), 1.0),
    S(T.to, r(4, 8), torch.float32),
    S(T.to, r(4, 8), r(3).float()),
    S(torch.broadcast_tensors, r(4, 1), r(8), r(4, 8)),
    S(T.type_as, r(4, 8), r(2, 2).float()),
]
RANDOM = [
    S(F.dropout, r(4, 8), 0.5),
    S(F.dropout, r(4, 8), p=0.5, training=True, inplace=True),
    S(F.dropout, r(4, 8), training=False),
    S(torch.dropout, r(4, 8), 0.3, True),
    S(torch.rand_like, r(4, 8)),
    S(torch.randn_like, input=r(4, 8)),
    S(T.normal_, torch.zeros(4, 8), 0.0, 2.0),
]
PRODUCTS = [
    S(F.linear, r(2, 4, 8), r(12, 8), r(12), parts=(1, 3)),
    S(F.linear, r(4, 8), r(12, 8)),
    S(F.linear, r(8), r(4, 8), bias=r(4)),
    S(F.linear, input=r(2, 8), weight=r(4, 8), bias=None),
    S(torch.addmm, r(12), r(4, 8), r(8, 12), parts=(1, 3)),
    S(torch.matmul, r(2, 4, 6, 8), r(2, 4, 8, 4)),
    S(T.__matmul__, r(2, 4, 6, 8), r(8, 4)),
    S(T.matmul, r(4, 8), r(2, 8, 4)),
    S(torch.matmul, r(4, 1, 6, 8), r(2, 8, 4)),
    S(torch.bmm, r(4, 6, 8), r(4, 8, 2)),
    S(torch.bmm, r(8, 6, 8), r(8, 8, 2), parts=(1, 2)),
    S(
        torch._grouped_mm,
        r(6, 16).float(),
        r(4, 16, 16).float(),
        offs=torch.tensor([1, 1, 4, 6], dtype=torch.int32),
    ),
    S(
        F.grouped_mm,
        r(6, 16).float(),
        r(4, 16, 16).float(),
        offs=torch.tensor([3, 6, 6, 6], dtype=torch.int32),
    ),
    S(torch.einsum, "bqhd,bkhd->bhqk", r(2, 4, 4, 8), r(2, 6, 4, 8)),
    S(torch.einsum, "ij, jk -> ik", r(4, 8), r(8, 2)),
    S(F.embedding, i(8, 4, 6), r(8, 4)),
    S(F.embedding, i(8, 4), r(8, 4), padding_idx=-1),
    S(F.embedding, i(8, 4), r(8, 4), padding_idx=0),
]
ATTENTION = [
    S(F.scaled_dot_product_attention, r(2, 4, 6, 8), r(2, 4, 6, 8), r(2, 4, 6, 8), is_causal=True),
    S(
        F.scaled_dot_product_attention,
        r(2, 2, 8, 4),
        r(2, 2, 8, 4),
        r(2, 2, 8, 4),
        is_causal=True,
        parts=(1, 2),
    ),
    S(
        F.scaled_dot_product_attention,
        r(2, 2, 8, 4),
        r(2, 2, 5, 4),
        r(2, 2, 5, 4),
        None,
        0.3,
        True,
        parts=(1, 2),
    ),
    S(
        F.scaled_dot_product_attention,
        r(2, 4, 6, 8),
        r(2, 4, 5, 8),
        r(2, 4, 5, 8),
        attn_mask=mask(2, 1, 6, 5),
    ),
    S(
        F.scaled_dot_product_attention,
        r(2, 4, 6, 8),
        r(2, 4, 5, 8),
        r(2, 4, 5, 8),
        attn_mask=r(4, 6, 5),
    ),
    S(
        F.scaled_dot_product_attention,
        r(2, 8, 6, 8),
        r(2, 4, 6, 8),
        r(2, 4, 6, 8),
        enable_gqa=True,
        scale=0.2,
    ),
    S(F.scaled_dot_product_attention, r(2, 4, 6, 8), r(2, 4, 6, 8), r(2, 4, 6, 8), None, 0.3, True),
    S(
        F.scaled_dot_product_attention,
        r(2, 4, 3, 8),
        r(2, 4, 5, 8),
        r(2, 4, 5, 8),
        torch.zeros(3, 5).bool(),
        0.3,
    ),
    S(
        F.scaled_dot_product_attention,
        r(2, 8, 6, 8),
        r(2, 4, 6, 8),
        r(2, 4, 6, 8),
        dropout_p=0.3,
        enable_gqa=True,
    ),
]
REDUCTIONS = [
    S(torch.sum, r(4, 8, 6)),
    S(T.sum, r(4, 8, 6), -1, True),
    S(T.sum, r(4, 8, 6), dim=(0, 2)),
    S(T.mean, r(4, 8, 6), (1, -1), keepdim=True),
    S(torch.mean, r(4, 8, 6), parts=(1, 2)),
    S(torch.amax, r(4, 8), 1),
    S(T.argmax, r(4, 8), dim=-1),
    S(T.any, mask(4, 8), 1),
    S(torch.logsumexp, r(4, 8), dim=0, keepdim=True),
    S(T.std, r(4, 8), -1),
    S(T.var, r(4, 8, 6), (0, 2), correction=0, keepdim=True),
    S(torch.var, r(4, 8, 6), -1, False, True),
    S(torch.var_mean, r(4, 8), 1),
    S(torch.linalg.vector_norm, r(4, 8), 2, 1, True),
    S(torch.linalg.vector_norm, r(4, 8), dim=(0,)),
    S(torch.max, r(4, 8), 1, keepdim=True),
    S(T.max, r(4, 8, 6), 1),
    S(torch.max, r(4, 8), r(8)),
    S(T.min, r(4, 8), dim=0),
    S(F.softmax, r(4, 8), dim=1),
    S(F.softmax, r(4, 8, 6)),
    S(F.softmax, r(4, 8, 6, 2)),
    S(T.log_softmax, r(4, 8), -1),
    S(torch.cumsum, r(4, 8), 1),
    S(T.cumprod, r(4, 8), dim=0),
    S(torch.cummax, r(4, 8), 1),
    S(T.sort, r(4, 8), descending=True),
    S(torch.topk, r(4, 8), 3),
    S(T.topk, r(4, 8), 2, 0),
    S(T.topk, r(4, 8), 2, dim=-2),
    S(torch.argsort, r(4, 8), 0),
    S(F.glu, r(4, 8), parts=(1, 2, 4)),
    S(F.glu, r(4, 8), 0),
    S(F.layer_norm, r(4, 6, 8), (8,), r(8), r(8)),
    S(F.layer_norm, r(4, 6, 8), [6, 8]),
    S(F.rms_norm, r(4, 6, 8), (8,), weight=r(8), eps=1e-6),
    S(F.group_norm, r(4, 8, 6), 4, r(8), r(8)),
    S(F.group_norm, r(4, 8, 6, 2), num_groups=8),
]
SHAPES = [
    S(T.view, r(2, 4, 8), 2, 4, 4, 2),
    S(T.view, r(2, 4, 8), (8, 8)),
    S(T.view, r(2, 4, 24), 2, 4, 3, 4, 2, parts=(1, 3)),
    S(torch.reshape, r(2, 4, 4, 2), (2, 4, -1), parts=(1, 2, 4)),
    S(T.reshape, r(4, 2, 8), -1, 8, parts=(1, 4)),
    S(T.flatten, r(2, 4, 8), 1),
    S(T.unflatten, r(2, 24), -1, (3, 8), parts=(1, 3)),
    S(T.view_as, r(2, 4, 8), r(2, 4, 4, 2)),
    S(T.transpose, r(2, 4, 8), 1, -1),
    S(T.permute, r(2, 4, 8), 2, 0, 1),
    S(torch.permute, r(2, 4, 8), (2, 0, 1)),
    S(T.t, r(4, 8), parts=(1, 2)),
    S(T.squeeze, r(4, 1, 8), 1),
    S(T.squeeze, r(4, 1, 8)),
    S(torch.unsqueeze, r(4, 8), dim=-1),
    S(T.expand, r(4, 1, 8), 2, -1, 6, -1),
    S(T.expand_as, r(1, 8), r(4, 8)),
    S(torch.repeat_interleave, r(4, 8), 2, dim=1),
    S(T.repeat_interleave, r(2, 4, 8), 3, 1),
    S(torch.cat, [r(4, 8), r(4, 8)], dim=-1),
    S(torch.cat, (r(4, 8), r(2, 8))),
    S(torch.cat, (r(0), r(2, 8)), 1, parts=(1, 2)),
    S(torch.stack, [r(4, 8), r(4, 8)], 1),
    S(torch.stack, [r(4, 8), r(4, 8)], dim=-1),
    S(T.split, r(4, 24), 8, -1, parts=(1, 3)),
    S(torch.split, r(4, 24), [8, 16], dim=1, parts=(1, 3)),
    S(T.chunk, r(4, 24), 3, dim=-1, parts=(1, 3, 6)),
    S(torch.chunk, r(24, 4), 2, parts=(1, 2)),
    S(T.unbind, r(3, 4, 8)),
    S(torch.unbind, r(4, 3, 8), 1),
    S(T.__iter__, r(2, 4, 8)),
]
INDEX = [
    S(T.__getitem__, r(4, 8, 6), (slice(None), -1)),
    S(T.__getitem__, r(4, 8, 6), (..., None, slice(0, 3))),
    S(T.__getitem__, r(4, 8, 6), (None, slice(1, 3), ..., None)),
    S(T.__getitem__, r(4, 8, 6), 0),
    S(T.__getitem__, r(4, 8, 6), i(4, 5)),
    S(T.__getitem__, r(4, 8, 6), torch.tensor(2)),
    S(T.__getitem__, r(4, 8, 6, 2), (slice(None), i(8, 5), i(6, 3, 1))),
    S(T.__getitem__, r(4, 8, 6, 2), (slice(None), i(8, 5), slice(0, 4), 1)),
    S(T.__getitem__, r(4, 8, 6), (i(4, 2, 5), slice(None), None)),
    S(T.__getitem__, r(4, 8), (slice(0, 4), slice(None)), parts=(1, 2)),
    S(T.__setitem__, r(4, 8, 6), (slice(None), 1), r(4, 6)),
    S(T.__setitem__, r(4, 8, 6), (slice(None), 1), 0.0),
    S(T.__setitem__, r(4, 8, 6), (..., slice(0, 3)), r(8, 3)),
    S(T.__setitem__, r(8, 6), torch.tensor([0, 3, 5]), r(3, 6)),
    S(torch.select, r(4, 8, 6), 1, 0),
    S(T.narrow, r(4, 8), 1, 2, 3),
    S(torch.index_select, r(4, 8), 0, i(4, 3)),
    S(T.gather, r(4, 8), 1, i(8, 4, 3)),
    S(torch.gather, r(4, 8), -1, i(8, 4, 8)),
    S(torch.take_along_dim, r(4, 8), i(8, 4, 2), dim=1),
    S(T.scatter, r(4, 8), 1, i(8, 4, 2), 1.0),
    S(T.scatter_add, r(4, 8), 1, i(8, 4, 2), r(4, 2)),
    S(T.scatter_, r(4, 8), 1, i(8, 4, 1), 2.0),
    S(T.index_add_, r(4, 8), 0, i(4, 3), r(3, 8)),
    S(torch.index_add, r(4, 8), 1, i(8, 3), r(4, 3), alpha=2),
    S(T.index_copy, r(4, 8), 0, torch.tensor([2, 0]), r(2, 8)),
    S(T.index_fill, r(4, 8), 1, torch.tensor([2, 0]), 1.0),
    S(NN.one_hot, i(5, 4, 2), 5),
]
LOSSES = [
    S(NN.mse_loss, r(4, 8), r(4, 8), 1),
    S(NN.mse_loss, r(4, 8), r(4, 8), 2),
    S(NN.l1_loss, r(4, 8), r(4, 8), 0),
    S(NN.smooth_l1_loss, r(4, 8), r(4, 8), 1, 0.5),
    S(NN.huber_loss, r(4, 8), r(4, 8), 1, 0.5),
    S(torch.kl_div, r(4, 8), r(4, 8), 2, log_target=True),
    S(NN.binary_cross_entropy, r(4, 8), r(4, 8), r(8), 1, fixed=(2,)),
    S(torch.binary_cross_entropy_with_logits, r(4, 8), r(4, 8), None, r(8), 1, fixed=(2,)),
    S(NN.soft_margin_loss, r(4, 8), r(4, 8).sign(), 1, fixed=(1,)),
]
CONVOLUTIONS = [
    S(torch.conv1d, r(2, 4, 9), r(8, 4, 3), r(8)),
    S(torch.conv2d, r(2, 4, 6, 6), r(8, 4, 3, 3), r(8), (2, 2), (1, 1), (1, 1), 1),
    S(torch.conv2d, r(2, 4, 6, 6), r(8, 4, 3, 3), None, 1, "same"),
    S(torch.conv2d, r(4, 6, 6), r(8, 4, 3, 3), bias=r(8)),
    S(torch.conv2d, r(2, 4, 6, 6), r(8, 1, 3, 3), r(8), groups=4),
    S(torch.conv2d, r(2, 8, 6, 6), r(8, 2, 3, 3), None, 1, 0, 1, 4),
    S(torch.conv2d, r(2, 4, 6, 6), r(12, 4, 1, 1), r(12), parts=(1, 3)),
    S(torch.conv3d, r(2, 4, 4, 4, 4), r(4, 4, 2, 2, 2)),
    S(torch.conv_transpose1d, r(2, 4, 9), r(4, 8, 3), r(8), 2),
    S(
        torch.conv_transpose2d,
        r(2, 4, 6, 6),
        r(4, 8, 3, 3),
        r(8),
        (2, 2),
        (1, 1),
        (1, 1),
        1,
        (1, 1),
    ),
    S(torch.conv_transpose2d, r(2, 8, 6, 6), r(8, 2, 3, 3), r(8), groups=4),
    S(F.max_pool2d, r(2, 4, 6, 6), 2),
    S(F.max_pool2d_with_indices, r(2, 4, 6, 6), 2),
    S(NN.avg_pool2d, r(4, 6, 6), 2),
    S(F.adaptive_avg_pool2d, r(2, 4, 6, 6), (1, 1)),
    S(F.pad, r(2, 4, 6), (1, 2)),
    S(F.pad, r(2, 4, 6), (0, 0, 1, 0)),
    S(F.pad, r(2, 4, 6, 6), [1, 1, 1, 1], mode="reflect"),
    S(F.batch_norm, r(4, 8, 3), None, None, r(8), r(8), True),
    S(F.batch_norm, r(4, 8), r(8), r(8), fixed=(1, 2), weight=r(8), bias=r(8), training=False),
]
SAMPLES = [
    *(*ELEMENTWISE, *RANDOM, *PRODUCTS, *ATTENTION, *REDUCTIONS),
    *(*SHAPES, *INDEX, *LOSSES, *CONVOLUTIONS),
]
