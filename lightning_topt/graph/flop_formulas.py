"""The FLOPs of low-level operator calls: the formulas of torch.utils.flop_counter, and those that
it lacks.

2 per multiply-add, as there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> int:
    shapes = grad.shape, query.shape, key.shape, value.shape
    return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]


def _matrix_vector(matrix: Tensor, vector: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * matrix.numel()


def _add_matrix_vector(
    start: Tensor, matrix: Tensor, vector: Tensor, *args: Any, **kwargs: Any
) -> int:
    return 2 * matrix.numel()


def _add_matrices(start: Tensor, left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * left.numel() * right.shape[-1]


def _product_of_groups(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> int:
    # each has some of the columns
    groups = left.shape[0] if left.ndim == 3 and right.ndim == 2 else 1
    return 2 * left.numel() // groups * right.shape[-1]


def _rnn_layer(x: Tensor, w_input: Tensor, w_hidden: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(x.shape[:-1]) * (w_input.numel() + w_hidden.numel())


def _rnn_layer_backward(*args: Any, **kwargs: Any) -> int:
    return 2 * _rnn_layer(*args)


def _extra_formulas() -> dict[Any, Callable[..., int]]:
    formulas: dict[str, Callable[..., int]] = {
        "_scaled_dot_product_flash_attention_for_cpu": _attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
        "_scaled_dot_product_fused_attention_overrideable": _attention,
        "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
        "dot": _matrix_vector,
        "vdot": _matrix_vector,
        "mv": _matrix_vector,
        "addmv": _add_matrix_vector,
        "addbmm": _add_matrices,
        "_addmm_activation": _add_matrices,
        "_grouped_mm": _product_of_groups,
        "mkldnn_rnn_layer": _rnn_layer,
        "mkldnn_rnn_layer_backward": _rnn_layer_backward,
    }
    aten = torch.ops.aten
    return {
        getattr(aten, name): formula for name, formula in formulas.items() if hasattr(aten, name)
    }


# By operator, all overloads alike; a formula takes the call's arguments, and what the call returned
# as `out_val`.
FLOPS: dict[Any, Callable[..., int]] = {**_extra_formulas(), **flop_registry}
