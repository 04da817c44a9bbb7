"""The example batch: its size, a second one of another size, both without memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_topt.graph.errors import WAY_OUT, CaptureError
from lightning_topt.graph.structures import map_tensors, tensors_in


def batch_sizes(batch: Any, second_batch: Any | None) -> tuple[int, int]:
    """Return the samples in the two batches; where there is no second one, it is taken to be twice
    as large.

    With two batches the batch size is whatever differs between their tensors, in any dimension;
    with one it is the size of dimension 0, which all tensors that have one must share. Raises
    CaptureError with advice otherwise.
    """
    leaves = list(tensors_in(batch))
    if not leaves:
        raise CaptureError(f"the batch holds no tensor, so its size is unknown. {WAY_OUT}")
    if second_batch is None:
        sizes = {tensor.shape[0] for tensor in leaves if tensor.dim()}
        if len(sizes) != 1 or 0 in sizes:
            raise CaptureError(
                "the tensors of the batch have no common size in dimension 0 (they are "
                f"{_shapes(leaves)}), so the batch size is unknown. Pass a second batch of another "
                f"size: capture(..., second_batch=...). {WAY_OUT}"
            )
        size = sizes.pop()
        return size, 2 * size
    others = list(tensors_in(second_batch))
    if len(others) != len(leaves) or any(
        a.dim() != b.dim() for a, b in zip(leaves, others, strict=True)
    ):
        raise CaptureError(
            f"the two batches differ in more than their sizes: {_shapes(leaves)} and "
            f"{_shapes(others)}"
        )
    pairs = {
        (m, n)
        for a, b in zip(leaves, others, strict=True)
        for m, n in zip(a.shape, b.shape, strict=True)
        if m != n
    }
    if len(pairs) != 1:
        raise CaptureError(
            "two batches must differ in exactly one size, the number of samples; they are "
            f"{_shapes(leaves)} and {_shapes(others)}"
        )
    return pairs.pop()


def common_size(batch: Any) -> int:
    """Return the size of dimension 0 that all tensors of `batch` share, 1 where there is none."""
    sizes = {tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()}
    return max(sizes.pop(), 1) if len(sizes) == 1 else 1


def fake_batch(batch: Any, *, samples: tuple[int, int], device: torch.device) -> Any:
    """Return `batch` with empty tensors on `device`; call it under a fake mode.

    Args:
        samples: (m, n) makes n samples of m along dimension 0; nothing changes when they are equal.
    """
    have, want = samples
    return map_tensors(batch, _resize(have, want, device))


def _resize(have: int, want: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    def resize(tensor: Tensor) -> Tensor:
        shape, stride = list(tensor.shape), list(tensor.stride())
        if have != want and shape:
            shape[0] = want
            # Dimensions outside of the batch dimension in memory move apart.
            stride = [step * want // have if step > stride[0] else step for step in stride]
        fake = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=device)
        return fake.requires_grad_(tensor.requires_grad)

    return resize


def _shapes(tensors: list[Tensor]) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
