"""What travels: selected values and their indices, or all values in few bits.

Three formats; sizes are known from the number of values alone, because all ranks send equally many
bytes (gloo's all-gather needs that):

- `MessageFormat`: k values of `numel` and their ascending indices;
- `LevelFormat`: all values in 1, 2, 4 or 8 bits;
- `LevelMessage`: indices as in the first, values as in the second.

Sections of a `MessageFormat`, each padded to 4 bytes: header (first byte 1: the sender's gradient
was not finite) | values | low bits | upper bits. The indices are in the smallest of

    bitmap       n bits
    Elias-Fano   (Elias 1974) the low 4, 8 or 16 bits of each index as they are, and the upper
                 ones in unary: bit (upper part + i) is set for the i-th index, at most
                 k + n / 2**low bits. 9.4 bits per index at a density of 1 %, 5.6 at 10 %
    int32        4 bytes per index

A `LevelFormat` has a few levels for each group of values, in bfloat16, then codes:

    1 bit    the sign; level: the mean magnitude
    2 bits   the sign, and whether the magnitude is above the group's mean; levels: the mean of
             those below and of those above
    4, 8     -7 .. 7, -127 .. 127 in steps of the largest magnitude / 7 (/ 127)

What rounding takes away is for the caller's residual. On a CPU `wire_kernels` does the packing,
elsewhere plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_topt.communication.wire_kernels import (
    decode_groups,
    encode_groups,
    pack_indices,
    unpack_indices,
)

HEADER_BYTES = 4
BITMAP, INT32 = 0, 32  # besides 4, 8 and 16, the number of low bits
GROUP = 128  # values with levels of their own
BITS = (1, 2, 4, 8)


def message_of_share(
    numel: int,
    *,
    compressible: float,
    density: float,
    value_dtype: torch.dtype,
    bits: int | None = None,
) -> MessageFormat | LevelMessage:
    """Return the message of the share `density` of `compressible` elements among `numel`.

    At least one value travels where any element is compressible; values have `bits` each (None:
    `value_dtype`).
    """
    k = max(1, round(density * compressible)) if compressible else 0
    return MessageFormat(numel, k, value_dtype) if bits is None else LevelMessage(numel, k, bits)


class Unpacked(NamedTuple):
    """A message that was read.

    `finite` says whether the sender's gradient was. `values` (k,) are float32, `indices` (k,)
    int64, ascending.
    """

    finite: bool
    values: Tensor
    indices: Tensor


@dataclass(frozen=True)
class MessageFormat:
    """Where everything is in the message of `k` of `numel` elements.

    Without a `value_dtype` it is a message of indices alone; the values travel in another form.
    """

    numel: int
    k: int
    value_dtype: torch.dtype | None = torch.float32

    def _index_bytes(self, low_bits: int) -> tuple[int, int]:
        # The bytes of the two index sections
        if low_bits == BITMAP:
            return 0, _padded(-(-self.numel // 8))
        if low_bits == INT32:
            return 4 * self.k, 0
        upper = ((self.numel - 1) >> low_bits) + self.k
        return _padded(-(-low_bits * self.k // 8)), _padded(-(-upper // 8))

    @cached_property
    def low_bits(self) -> int:
        """How indices are encoded: 0 a bitmap, 4, 8 or 16 Elias-Fano, 32 plain."""
        return min((BITMAP, 4, 8, 16, INT32), key=lambda low_bits: sum(self._index_bytes(low_bits)))

    @cached_property
    def cuts(self) -> tuple[int, int, int]:
        """First byte of the low bits, of the upper bits, and the size of the message."""
        if not self.k:
            return HEADER_BYTES, HEADER_BYTES, HEADER_BYTES
        value_bytes = 0 if self.value_dtype is None else self.k * self.value_dtype.itemsize
        low = HEADER_BYTES + _padded(value_bytes)
        low_bytes, upper_bytes = self._index_bytes(self.low_bits)
        return low, low + low_bytes, low + low_bytes + upper_bytes

    @property
    def nbytes(self) -> int:
        """Size of the message; equal on all ranks."""
        return self.cuts[2]

    def round(self, values: Tensor) -> Tensor:
        """Return what of float32 `values` arrives, in `value_dtype`; finite values stay finite."""
        if self.value_dtype == torch.float16:
            values = values.clamp(-65504.0, 65504.0)
        return values if self.value_dtype is None else values.to(self.value_dtype)

    def pack(self, values: Tensor, indices: Tensor, *, out: Tensor) -> None:
        """Write `values` (k,) at ascending `indices` (k,) into `out`, uint8, at least (nbytes,).

        Values are rounded by this.
        """
        # header, values, indices
        low, upper, end = self.cuts
        out[:HEADER_BYTES].zero_()
        if not self.k:
            return
        if self.value_dtype is not None:
            out[HEADER_BYTES:low].view(self.value_dtype)[: self.k].copy_(self.round(values))
        if self.low_bits == INT32:
            out[low:upper].view(torch.int32).copy_(indices)
            return
        out[low:end].zero_()
        if out.device.type == "cpu":
            lows, words = out[low:upper].numpy(), out[upper:end].numpy().view(np.uint32)
            pack_indices(indices.numpy(), self.low_bits, lows, words)
        else:
            self._pack_indices(indices.long(), out)

    def _pack_indices(self, indices: Tensor, out: Tensor) -> None:
        # Do what `pack_indices` does, in torch; into an `out` that is zeros there
        low, upper, end = self.cuts
        # one byte for each bit of the upper section
        bits = torch.zeros(8 * (end - upper), dtype=torch.uint8, device=out.device)
        if self.low_bits == BITMAP:
            bits.index_fill_(0, indices, 1)
        else:
            # low bits of several indices to a word, the first in the lowest bits
            lows, each = indices & (1 << self.low_bits) - 1, 16 // self.low_bits
            lows = torch.nn.functional.pad(lows, (0, -self.k % each)).view(-1, each)
            shifts = torch.arange(0, 16, self.low_bits, device=out.device)
            words = (lows << shifts).sum(dim=1).to(torch.int16)
            out[low:upper].view(torch.int16)[: words.numel()].copy_(words)
            # upper bits in unary
            places = (indices >> self.low_bits) + torch.arange(self.k, device=out.device)
            bits.index_fill_(0, places, 1)
        out[upper:end].copy_(pack_bits(bits))

    def pack_nonfinite(self, *, out: Tensor) -> None:
        """Write the message of a rank whose gradient is not finite."""
        out[: self.nbytes].zero_()
        out[0] = 1

    def values(self, message: Tensor) -> Tensor:
        """Read the values (k,) as float32; none where they travel in another form."""
        if self.value_dtype is None:
            return torch.empty(0, device=message.device)
        return message[HEADER_BYTES : self.cuts[0]].view(self.value_dtype)[: self.k].float()

    def unpack(self, message: Tensor, *, known_finite: bool = False) -> Unpacked:
        """Read a message: uint8, at least (nbytes,), 4-byte aligned.

        With `known_finite` its header is not looked at, for which the host would wait.

        Raises:
            ValueError: where it has fewer entries than k.
        """
        low, upper, end = self.cuts
        # nothing, or of a gradient that is not finite
        finite = known_finite or not message[0]
        if not self.k or not finite:
            empty = torch.empty(0, device=message.device)
            return Unpacked(finite, empty, empty.long())
        values = self.values(message)
        if self.low_bits == INT32:
            return Unpacked(True, values, message[low:upper].view(torch.int32).long())
        if message.device.type != "cpu":
            return Unpacked(True, values, self._unpack_indices(message))
        lows, words = message[low:upper].numpy(), message[upper:end].numpy().view(np.uint32)
        indices = torch.empty(self.k, dtype=torch.int64)
        if unpack_indices(lows, words, self.low_bits, indices.numpy()) < self.k:
            raise ValueError(
                f"a message of {self.k} entries has fewer: it is of another number of elements, or "
                "damaged"
            )
        return Unpacked(True, values, indices)

    def _unpack_indices(self, message: Tensor) -> Tensor:
        # Do what `unpack_indices` does, in torch
        low, upper, end = self.cuts
        bits = unpack_codes(message[upper:end], 1, 8 * (end - upper))
        # the i-th set bit is at upper part + i
        positions = torch.nonzero_static(bits, size=self.k).view(-1)
        if self.low_bits == BITMAP:
            return positions
        # (words, indices per word), then one low part for each index
        shifts = torch.arange(0, 16, self.low_bits, device=message.device)
        words = message[low:upper].view(torch.int16).long().view(-1, 1)
        lows = ((words >> shifts) & (1 << self.low_bits) - 1).view(-1)[: self.k]
        return (positions - torch.arange(self.k, device=message.device) << self.low_bits) | lows


def pack_bits(bits: Tensor) -> Tensor:
    """Pack eight 0/1 bytes into one, the first in the lowest bit."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.view(-1, 8) << shifts).sum(dim=1, dtype=torch.uint8)


def _padded(nbytes: int) -> int:
    return -(-nbytes // 4) * 4


@dataclass(frozen=True)
class LevelFormat:
    """`numel` values in `bits` each, with levels for each `group` of them (a multiple of 8)."""

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
        """Write float32 finite `values` (numel,) into `out` (nbytes,), uint8.

        `out` is 4-byte aligned.
        """
        assert self.group % 8 == 0
        out.zero_()
        if out.device.type == "cpu":
            # levels are rounded to bfloat16 by the kernel, and cut to 16 bits here
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
        # Do what `encode_groups` does, in torch
        padded = torch.nn.functional.pad(values, (0, self.groups * self.group - self.numel))
        levels, codes = self._levels_and_codes(padded.view(-1, self.group))
        out[: self.level_bytes].view(torch.bfloat16)[: levels.numel()].copy_(levels.view(-1))
        packed = _pack(codes.view(-1)[: self.numel], self.bits)
        out[self.level_bytes : self.level_bytes + packed.numel()].copy_(packed)

    def decode(self, message: Tensor) -> Tensor:
        """Return the values (numel,), float32, of a message (nbytes,)."""
        count = self.groups * self.levels_each
        levels = message[: self.level_bytes].view(torch.bfloat16)[:count].float()
        if message.device.type == "cpu":
            result = torch.empty(self.numel)
            packed = message[self.level_bytes : self.nbytes].numpy()
            decode_groups(levels.numpy(), packed, self.bits, self.group, result.numpy())
            return result
        return self._decode_torch(levels.view(self.groups, -1), message)

    def _decode_torch(self, levels: Tensor, message: Tensor) -> Tensor:
        # Do what `decode_groups` does, in torch
        codes = unpack_codes(message[self.level_bytes : self.nbytes], self.bits, self.numel)
        # (numel, levels each)
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
        """Return levels (groups, levels each), bfloat16, and uint8 codes (groups, group).

        `rows` (groups, group) are the values, the last row padded with zeros.
        """
        # (groups, 1): how many values each row really has
        sizes = torch.full((rows.shape[0], 1), self.group, dtype=torch.float32, device=rows.device)
        sizes[-1] = self.numel - (self.groups - 1) * self.group
        magnitudes = rows.abs()
        negative = (rows < 0).to(torch.uint8)
        # 4, 8 bits: steps of the largest magnitude / half
        if self.bits > 2:
            half = _half_range(self.bits)
            steps = (magnitudes.amax(1, keepdim=True) / half).to(torch.bfloat16)
            inverse = torch.where(steps > 0, 1 / steps.float(), 0.0)
            # shifted by half, so that codes are not negative
            return steps, (rows * inverse).round_().clamp_(-half, half).add_(half).to(torch.uint8)
        total = magnitudes.sum(1, keepdim=True)
        mean = total / sizes
        # 1 bit: the mean magnitude; 2 bits: the means below and above it
        if self.bits == 1:
            return mean.to(torch.bfloat16), negative
        above = magnitudes > mean
        count = above.sum(1, keepdim=True)
        high_total = (magnitudes * above).sum(1, keepdim=True)
        low = (total - high_total).clamp_(min=0) / (sizes - count).clamp_(min=1)
        high = torch.where(count > 0, high_total / count.clamp(min=1), low)
        return torch.cat([low, high], 1).to(torch.bfloat16), negative + 2 * above.to(torch.uint8)


def _half_range(bits: int) -> int:
    # The largest code of a magnitude: codes are -half .. half.
    return int(2 ** (bits - 1)) - 1


def _pack(codes: Tensor, bits: int) -> Tensor:
    # Pack codes (m,) below 2 ** bits, several to a byte
    each = 8 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.numel() % each)).view(-1, each)
    packed = codes[:, 0].clone()
    for place in range(1, each):
        packed |= codes[:, place] << (bits * place)
    return packed


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the first `count` codes of `bits` each."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes: Tensor = (packed.unsqueeze(1) >> shifts) & (2**bits - 1)
    return codes.view(-1)[:count]


@dataclass(frozen=True)
class LevelMessage:
    """`k` of `numel` elements, in `bits` each (1, 2, 4 or 8) by levels of `group` values."""

    numel: int
    k: int
    bits: int
    group: int = 64

    @cached_property
    def form(self) -> MessageFormat:
        """Where header and indices are."""
        return MessageFormat(self.numel, self.k, None)

    @cached_property
    def levels(self) -> LevelFormat:
        """The values, behind header and indices."""
        return LevelFormat(self.k, self.bits, self.group)

    @cached_property
    def nbytes(self) -> int:
        """Size of the message; equal on all ranks."""
        return self.form.nbytes + self.levels.nbytes

    def pack(self, values: Tensor, indices: Tensor, *, out: Tensor) -> None:
        """Write `values` (k,) at ascending `indices` (k,) into `out`, uint8, at least (nbytes,).

        Values are rounded by this.
        """
        self.form.pack(values, indices, out=out)
        self.levels.encode(values, out=out[self.form.nbytes : self.nbytes])

    def pack_nonfinite(self, *, out: Tensor) -> None:
        """Write the message of a rank whose gradient is not finite."""
        self.form.pack_nonfinite(out=out)

    def unpack(self, message: Tensor, *, known_finite: bool = False) -> Unpacked:
        """Read a message: uint8, at least (nbytes,), 4-byte aligned; as that of a `form`."""
        found = self.form.unpack(message, known_finite=known_finite)
        return found._replace(values=self.values(message)) if found.finite else found

    def values(self, message: Tensor) -> Tensor:
        """Read the values (k,) of a message, as float32."""
        return self.levels.decode(message[self.form.nbytes : self.nbytes])


def check_bits(bits: int) -> None:
    """Raise ValueError where `bits` is none of `BITS`."""
    if isinstance(bits, bool) or bits not in BITS:
        raise ValueError(f"bits is one of {', '.join(map(str, BITS))}; got {bits!r}")


def warm_up_wire() -> None:
    """Compile the CPU kernels for indices now rather than in the first step."""
    form, indices = MessageFormat(1000, 10), torch.arange(10, dtype=torch.int32)
    message = torch.empty(form.nbytes, dtype=torch.uint8)
    form.pack(torch.zeros(10), indices, out=message)
    form.unpack(message)


def warm_up_levels(bits: int) -> None:
    """Compile the CPU kernels for levels now rather than in the first step."""
    LevelFormat(10, bits).round(torch.arange(10.0))
