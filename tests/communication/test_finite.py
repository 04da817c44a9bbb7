"""What is finite, for every dtype of gradients; sums of finite values may not be."""

from __future__ import annotations

import pytest
import torch

from lightning_topt.communication.bucket import is_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("size", [1, 1000])
def test_as_torch_says(dtype: torch.dtype, value: float, size: int) -> None:
    largest = torch.finfo(dtype).max
    tensor = torch.full((size,), largest, dtype=dtype)  # whose sum is infinite
    tensor[size // 2] = value
    assert is_finite(tensor) == bool(torch.isfinite(tensor).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nothing_is_finite(dtype: torch.dtype) -> None:
    assert is_finite(torch.empty(0, dtype=dtype))
