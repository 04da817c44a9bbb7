"""Signs of float32 values as bits: Numba on the CPU (plain torch takes about five times as long),
torch elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_topt.basics.jit import Function, compiled

Array = npt.NDArray[Any]

# values summed in float32 before they are added to the float64 total; loops over rows of a matrix
# vectorise
ROW = 64


def packed_bytes(count: int) -> int:
    """Return the bytes of the bits of `count` values."""
    return -(-count // 8)


def mean_abs(parts: Sequence[Tensor]) -> Tensor:
    """Return the mean absolute value of each of several flat tensors, float32 (number of parts,); 0
    of an empty one.
    """
    if parts[0].device.type == "cpu":
        return torch.tensor(
            [_sum_abs(part.numpy()) / max(1, part.numel()) for part in parts], dtype=torch.float32
        )
    sizes = torch.tensor(
        [max(1, part.numel()) for part in parts], dtype=torch.float32, device=parts[0].device
    )
    return torch.stack(torch._foreach_norm(list(parts), 1)).div_(sizes)


def take_signs(values: Tensor, *, step: float, packed: Tensor) -> None:
    """Write the signs of `values` (n,) into `packed` (packed_bytes(n),), and ``values -= step *
    sign``.

    A bit is 1 for a negative value, the first in the lowest bit; the last byte is filled with 0.
    The sign of 0 is plus.
    """
    if values.device.type == "cpu":
        _take_signs(values.numpy(), np.float32(step), packed.numpy())
    else:
        take_signs_torch(values, step=step, packed=packed)


def add_signs(packed: Tensor, *, step: float, values: Tensor) -> None:
    """Do ``values += step * sign`` (n,) with the signs in `packed` (packed_bytes(n),)."""
    if values.device.type == "cpu":
        _add_signs(packed.numpy(), np.float32(step), values.numpy())
    else:
        add_signs_torch(packed, step=step, values=values)


def take_signs_torch(values: Tensor, *, step: float, packed: Tensor) -> None:
    """Do what `take_signs` does, on any device."""
    negative = values < 0
    bits = torch.zeros(8 * packed.numel(), dtype=torch.uint8, device=values.device)
    bits[: values.numel()] = negative
    shifts = torch.arange(8, dtype=torch.uint8, device=values.device)
    torch.sum(bits.view(-1, 8) << shifts, dim=1, dtype=torch.uint8, out=packed)
    values.add_(torch.where(negative, step, -step))


def add_signs_torch(packed: Tensor, *, step: float, values: Tensor) -> None:
    """Do what `add_signs` does, on any device."""
    shifts = torch.arange(8, dtype=torch.uint8, device=values.device)
    bits = ((packed.unsqueeze(1) >> shifts) & 1).view(-1)[: values.numel()]
    values.add_(torch.where(bits.bool(), -step, step))


def _kernel(function: Function) -> Function:
    return compiled(function, fastmath={"reassoc"})


@_kernel
def _sum_abs(values: Array) -> float:
    whole = values.size // ROW
    rows = values[: ROW * whole].reshape(whole, ROW)
    total = 0.0
    for i in range(whole):
        part: Any = np.float32(0)
        for j in range(ROW):
            part += np.abs(rows[i, j])
        total += part
    for i in range(ROW * whole, values.size):
        total += np.abs(values[i])
    return total


@_kernel
def _take_signs(values: Array, step: np.float32, packed: Array) -> None:
    whole = values.size // 8
    rows = values[: 8 * whole].reshape(whole, 8)
    for i in range(whole):
        byte = np.uint8(0)
        for j in range(8):
            negative = rows[i, j] < 0
            byte |= np.uint8(negative) << j
            rows[i, j] -= -step if negative else step
        packed[i] = byte
    if values.size > 8 * whole:
        byte = np.uint8(0)
        for j in range(8 * whole, values.size):
            negative = values[j] < 0
            byte |= np.uint8(negative) << (j - 8 * whole)
            values[j] -= -step if negative else step
        packed[whole] = byte


@_kernel
def _add_signs(packed: Array, step: np.float32, values: Array) -> None:
    whole = values.size // 8
    rows = values[: 8 * whole].reshape(whole, 8)
    for i in range(whole):
        byte = np.int32(packed[i])
        for j in range(8):
            rows[i, j] += -step if (byte >> j) & 1 else step
    for j in range(8 * whole, values.size):
        values[j] += -step if (packed[whole] >> (j - 8 * whole)) & 1 else step
