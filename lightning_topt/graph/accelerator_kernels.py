"""Kernels that an accelerator would run, where a step for it is captured on a CPU.

Most operators are the same on every device. Attention is not: on CPUs
`torch.nn.functional.scaled_dot_product_attention` with dropout takes the path that writes all
scores, which costs several times the memory. CUDA chooses among these (torch 2.11 to 2.14,
`sdp_utils.cpp`, defaults):

    half precision, no mask, heads of at most 256     flash attention
    else, up to four dims                             memory-efficient attention
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

_WIDEST_HEAD = 256  # of flash attention


@dataclass(frozen=True)
class OnAccelerator:
    """The context of a step, made by `forward_context`, as it would run on an accelerator."""

    forward_context: Callable[[], AbstractContextManager[object]]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Enter both."""
        with self.forward_context(), self.kernels():
            yield

    def kernels(self) -> AbstractContextManager[object]:
        """Return what of it holds for the backward pass as well: which kernels run."""
        return AcceleratorAttention()


class AcceleratorAttention(TorchFunctionMode):
    """Within, attention of fake or meta tensors on a CPU calls the kernel that CUDA would."""

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if query.dim() != 4:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    # autocast lowers all that attention is given, as it does for the function that is replaced
    query, key, value = (_lowered(each) for each in (query, key, value))
    if enable_gqa and key.shape[1] != query.shape[1]:  # heads that share keys
        count = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(count, dim=1) for each in (key, value))
    aten = torch.ops.aten
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    if attn_mask is None and is_half and query.shape[-1] <= _WIDEST_HEAD:
        flash = aten._scaled_dot_product_flash_attention
        found: Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return found
    if attn_mask is not None:
        shape = *query.shape[:3], key.shape[2]
        attn_mask = attn_mask.to(query.dtype).expand(shape)
    efficient = aten._scaled_dot_product_efficient_attention
    found = efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
    return found


def _lowered(tensor: Tensor) -> Tensor:
    # `tensor` in the dtype of autocast where that is on; float64 stays
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))
