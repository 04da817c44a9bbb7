"""User code may ask a split tensor for more than a computation: its shape is the whole one, the
rest the local tensor's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_topt.techniques.tensor_parallel.layout import layout_of, numel, with_layout


def _shape(tensor: Tensor) -> torch.Size:
    layout = layout_of(tensor)
    assert layout is not None
    return torch.Size(layout.shape)


def _size(tensor: Tensor, dim: int | None = None) -> Any:
    return _shape(tensor) if dim is None else _shape(tensor)[dim]


def _gradient(tensor: Tensor) -> Tensor | None:
    """The gradient is where the tensor is."""
    gradient, layout = tensor.grad, layout_of(tensor)
    return gradient if gradient is None or layout is None else with_layout(gradient, layout)


_TENSOR: Any = torch.Tensor  # its attributes are descriptors, which type checkers take for values

ATTRIBUTES: dict[Callable[..., Any], Callable[..., Any]] = {
    _TENSOR.shape.__get__: _shape,
    torch.Tensor.size: _size,
    torch.Tensor.numel: lambda tensor: numel(_shape(tensor)),
    torch.Tensor.nelement: lambda tensor: numel(_shape(tensor)),
    torch.numel: lambda tensor: numel(_shape(tensor)),
    torch.Tensor.__len__: lambda tensor: _shape(tensor)[0],
    _TENSOR.grad.__get__: _gradient,
}

_GETTERS = (
    "dtype device requires_grad grad_fn is_leaf is_cuda is_cpu is_meta is_sparse is_quantized "
    "is_mps is_nested layout ndim _version names itemsize is_inference output_nr retains_grad "
    "is_mkldnn is_xpu is_sparse_csr _backward_hooks name _grad_fn"
)
_METHODS = (
    "dim ndimension is_floating_point is_complex is_contiguous is_signed element_size data_ptr "
    "get_device requires_grad_ retain_grad is_inference storage_offset __hash__ is_conj is_neg "
    "is_pinned is_shared untyped_storage register_hook register_post_accumulate_grad_hook "
    "is_set_to has_names detach_ new_zeros new_ones new_empty new_full new_tensor"
)


def _functions() -> set[Callable[..., Any]]:
    found: set[Callable[..., Any]] = set()
    for name in _GETTERS.split():
        if hasattr(getattr(_TENSOR, name, None), "__get__"):
            found.add(getattr(_TENSOR, name).__get__)
    found.update(
        function
        for name in _METHODS.split()
        if (function := getattr(torch.Tensor, name, None)) is not None
    )
    found.update(
        {
            _TENSOR.requires_grad.__set__,
            _TENSOR.grad.__set__,
            torch.is_floating_point,
            torch.is_complex,
            torch.is_tensor,
        }
    )
    found.add(torch.Tensor.backward)
    return found


LOCAL = _functions()  # run on the local tensor as they are


_VIEWS = (
    "view select narrow squeeze unsqueeze transpose permute t swapaxes swapdims movedim moveaxis "
    "adjoint expand expand_as view_as unbind split split_with_sizes chunk tensor_split diagonal "
    "unfold detach unflatten __getitem__ __iter__"
)


def _aliases() -> set[Callable[..., Any]]:
    names = [*_VIEWS.split(), "real", "imag", "data", "T", "mT", "H", "mH"]
    found = {
        function
        for name in names
        for place in (torch, _TENSOR)
        if (function := getattr(place, name, None)) is not None
    }
    return {each.__get__ if not callable(each) else each for each in found}


ALIASES = _aliases()  # their results are views of their first argument
