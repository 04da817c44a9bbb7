"""The low-level operators that may be called again on invented arguments: all that cannot misread
them.

A tensor is made again by shape, stride and dtype, with random or zero values. A kernel that takes
lengths, offsets, packed weights, reserved space or the state of a generator from such a tensor may
read or write beyond its memory, and ends the process. So what may run is listed: arithmetic on
dense tensors, and lookups, for which index zero is valid.
"""

from __future__ import annotations

import functools

import torch
from torch._ops import OpOverload

_MATRIX = (
    "mm bmm addmm baddbmm addbmm _addmm_activation dot vdot mv addmv addr ger outer linear "
    "_cdist_forward"
)
_CONVOLUTION = (
    "convolution convolution_overrideable _convolution mkldnn_convolution cudnn_convolution "
    "miopen_convolution _slow_conv2d_forward slow_conv3d_forward conv_depthwise3d "
    "_conv_depthwise2d convolution_backward convolution_backward_overrideable im2col col2im"
)
_NORMALIZATION = (
    "native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward "
    "native_batch_norm native_batch_norm_backward _native_batch_norm_legit "
    "_native_batch_norm_legit_no_training _fused_rms_norm _fused_rms_norm_backward "
    "cudnn_batch_norm _weight_norm_interface _weight_norm_interface_backward"
)
_SOFTMAX = (
    "_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax "
    "_masked_softmax _masked_softmax_backward logsumexp _logcumsumexp"
)
_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention "
    "_scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_efficient_attention_backward _scaled_dot_product_attention_math"
)
_LOSSES = (
    "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss "
    "mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward "
    "binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits"
)
_REDUCTIONS = (
    "sum mean prod amax amin max min argmax argmin all any var var_mean std std_mean norm "
    "linalg_vector_norm nansum aminmax count_nonzero median cumsum cumprod logcumsumexp cummax "
    "cummin sort topk"
)
_COPIES = (
    "clone copy copy_ _to_copy contiguous cat stack repeat constant_pad_nd flip roll tril triu "
    "tril_ triu_ diagonal_copy select_backward slice_backward diagonal_backward select_scatter "
    "slice_scatter diagonal_scatter as_strided_copy split_with_sizes_copy unfold_backward "
    "channel_shuffle pixel_shuffle pixel_unshuffle native_channel_shuffle reflection_pad1d "
    "reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d "
    "reflection_pad1d_backward reflection_pad2d_backward replication_pad1d_backward "
    "replication_pad2d_backward view_as_real view_as_complex _conj_physical"
)
_FILLED = (
    "arange full full_like ones ones_like zeros zeros_like new_full new_ones new_zeros "
    "scalar_tensor eye linspace fill_ zero_ zero fill rand rand_like randn randn_like randint "
    "randint_like bernoulli bernoulli_ uniform_ normal_ random_ exponential_ native_dropout "
    "native_dropout_backward _fused_dropout"
)
_LOOKUPS = (
    "embedding embedding_dense_backward index index_select gather gather_backward index_put "
    "index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put index_add index_add_ index_fill "
    "index_fill_ index_copy index_copy_ scatter scatter_ scatter_add scatter_add_ scatter_reduce "
    "scatter_reduce_ index_select_backward"
)
_POOLING = (
    "max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices "
    "max_pool3d_with_indices_backward avg_pool2d avg_pool2d_backward avg_pool3d "
    "avg_pool3d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d "
    "_adaptive_avg_pool3d_backward upsample_nearest1d upsample_nearest2d upsample_nearest3d "
    "upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward "
    "upsample_bilinear2d upsample_bilinear2d_backward upsample_linear1d upsample_linear1d_backward "
    "upsample_trilinear3d upsample_trilinear3d_backward upsample_bicubic2d "
    "upsample_bicubic2d_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward"
)
_GROUPS = (
    _MATRIX,
    _CONVOLUTION,
    _NORMALIZATION,
    _SOFTMAX,
    _ATTENTION,
    _LOSSES,
    _REDUCTIONS,
    _COPIES,
    _FILLED,
    _LOOKUPS,
)
NAMES = {f"aten::{name}" for group in (*_GROUPS, _POOLING) for name in group.split()}


@functools.cache
def is_replayable(func: OpOverload) -> bool:
    """Return whether `func` may be called on tensors of the right shapes with any values."""
    if func.namespace != "aten":
        return False
    return func._schema.name in NAMES or torch.Tag.pointwise in func.tags
