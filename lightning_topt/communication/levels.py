"""Values in 1, 2, 4 or 8 bits: a few levels for each group of values, in bfloat16.

    1 bit    the sign; level: the mean magnitude
    2 bits   the sign, and whether the magnitude is above the group's mean; levels: the mean of
             those below and of those above
    4, 8     -7 .. 7, -127 .. 127 in steps of the largest magnitude / 7 (/ 127)

What rounding takes away is for the caller's residual. Compiled on a CPU (`level_kernels`), plain
torch elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_topt.communication.level_kernels import decode_groups, encode_groups

GROUP = 128
BITS = (1, 2, 4, 8)


@dataclass(frozen=True)
class LevelFormat:
    """A `LevelFormat` says how many bytes `numel` values take at `bits` each, in groups of `group`,
    a multiple of 8.
    """

    numel: int
    bits: int
    group: int = GROUP

    @property
    def groups(self) -> int:
        """Number of groups; the last may be smaller."""
        return -(-self.numel // self.group)

    @property
    def levels_each(self) -> int:
        """Levels sent for each group."""
        return 2 if self.bits == 2 else 1

    @property
    def level_bytes(self) -> int:
        """Bytes of all levels, padded to 4."""
        return -(-2 * self.groups * self.levels_each // 4) * 4

    @property
    def nbytes(self) -> int:
        """Bytes of levels and codes, padded to 4."""
        return self.level_bytes + -(-self.numel * self.bits // 32) * 4

    def encode(self, values: Tensor, *, out: Tensor) -> None:
        """Write `values` (numel,), float32 and finite, into `out` (nbytes,), uint8, 4-byte
        aligned.
        """
        assert self.group % 8 == 0
        out.zero_()
        if out.device.type == "cpu":
            levels = np.zeros(self.groups * self.levels_each, np.float32)
            codes = out[self.level_bytes : self.nbytes].numpy()
            flat = values.contiguous().numpy()
            encode_groups(flat, self.bits, self.group, levels, levels.view(np.int32), codes)
            out[: self.level_bytes].view(torch.bfloat16)[: levels.size].copy_(
                torch.from_numpy(levels)
            )
        else:
            self._encode_torch(values, out)

    def _encode_torch(self, values: Tensor, out: Tensor) -> None:
        rows = torch.nn.functional.pad(values, (0, self.groups * self.group - self.numel)).view(
            -1, self.group
        )
        levels, codes = self._levels_and_codes(rows)
        out[: self.level_bytes].view(torch.bfloat16)[: levels.numel()].copy_(levels.view(-1))
        packed = _pack(codes.view(-1)[: self.numel], self.bits)
        out[self.level_bytes : self.level_bytes + packed.numel()].copy_(packed)

    def decode(self, message: Tensor) -> Tensor:
        """Return the values (numel,), float32, of a message (nbytes,)."""
        count = self.groups * self.levels_each
        levels = message[: self.level_bytes].view(torch.bfloat16)[:count].float()
        if message.device.type == "cpu":
            result, packed = (
                torch.empty(self.numel),
                message[self.level_bytes : self.nbytes].numpy(),
            )
            decode_groups(levels.numpy(), packed, self.bits, self.group, result.numpy())
            return result
        return self._decode_torch(levels.view(self.groups, -1), message)

    def _decode_torch(self, levels: Tensor, message: Tensor) -> Tensor:
        codes = _unpack(message[self.level_bytes : self.nbytes], self.bits, self.numel)
        of_group = levels.repeat_interleave(self.group, dim=0)[: self.numel]
        if self.bits == 1:
            return torch.where(codes == 1, -of_group[:, 0], of_group[:, 0])
        if self.bits == 2:
            magnitude = torch.where(codes >= 2, of_group[:, 1], of_group[:, 0])
            return torch.where(codes & 1 == 1, -magnitude, magnitude)
        return (codes.float() - _half_range(self.bits)) * of_group[:, 0]

    def round(self, values: Tensor) -> Tensor:
        """Return what of `values` (numel,) arrives."""
        message = torch.empty(self.nbytes, dtype=torch.uint8, device=values.device)
        self.encode(values, out=message)
        return self.decode(message)

    def _levels_and_codes(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Levels (groups, levels each), bfloat16, and codes (groups, group), uint8, of values in
        rows; the last is padded.
        """
        sizes = torch.full((rows.shape[0], 1), self.group, dtype=torch.float32, device=rows.device)
        sizes[-1] = self.numel - (self.groups - 1) * self.group
        magnitudes = rows.abs()
        negative = (rows < 0).to(torch.uint8)
        if self.bits > 2:
            half = _half_range(self.bits)
            steps = (magnitudes.amax(1, keepdim=True) / half).to(torch.bfloat16)
            inverse = torch.where(steps > 0, 1 / steps.float(), 0.0)
            return steps, (rows * inverse).round_().clamp_(-half, half).add_(half).to(torch.uint8)
        total = magnitudes.sum(1, keepdim=True)
        mean = total / sizes
        if self.bits == 1:
            return mean.to(torch.bfloat16), negative
        above = magnitudes > mean
        count = above.sum(1, keepdim=True)
        high_total = (magnitudes * above).sum(1, keepdim=True)
        low = (total - high_total).clamp_(min=0) / (sizes - count).clamp_(min=1)
        high = torch.where(count > 0, high_total / count.clamp(min=1), low)
        return torch.cat([low, high], 1).to(torch.bfloat16), negative + 2 * above.to(torch.uint8)


def _half_range(bits: int) -> int:
    return int(2 ** (bits - 1)) - 1


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Codes (m,) below 2 ** bits, several to a byte, the first in the lowest bits."""
    each = 8 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.numel() % each)).view(-1, each)
    packed = codes[:, 0].clone()
    for place in range(1, each):
        packed |= codes[:, place] << (bits * place)
    return packed


def _unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes: Tensor = (packed.unsqueeze(1) >> shifts) & (2**bits - 1)
    return codes.view(-1)[:count]


def warm_up_levels(bits: int) -> None:
    """Compile the CPU kernels now rather than in the first step."""
    LevelFormat(10, bits).round(torch.arange(10.0))


def check_bits(bits: int, *, others: tuple[int, ...] = ()) -> None:
    """Raise ValueError for another number of bits than `LevelFormat` has, but for `others`."""
    allowed = (*BITS, *others)
    if isinstance(bits, bool) or bits not in allowed:
        raise ValueError(f"bits is one of {', '.join(map(str, allowed))}; got {bits!r}")
