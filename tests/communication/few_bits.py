"""Values in few bits by definition: the slow twin of `LevelFormat`."""

from __future__ import annotations

import torch


def _bf16(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32).bfloat16())


def in_few_bits(values: list[float], bits: int, group: int) -> list[float]:
    """Group by group, number by number."""
    result: list[float] = []
    for start in range(0, len(values), group):
        part = values[start : start + group]
        mean = sum(map(abs, part)) / len(part)
        low = [abs(v) for v in part if abs(v) <= mean]
        high = [abs(v) for v in part if abs(v) > mean]
        for v in part:
            sign = -1 if v < 0 else 1
            if bits == 2:
                members = high if abs(v) > mean else low
                result.append(sign * _bf16(sum(members) / len(members)))
            else:
                half = 2 ** (bits - 1) - 1
                step = _bf16(max(map(abs, part)) / half)
                result.append(max(-half, min(half, round(v / step))) * step if step else 0.0)
    return result
