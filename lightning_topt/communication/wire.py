"""What travels: selected values and their indices, or all values in few bits.

Two formats; sizes are known from the number of values alone, because all ranks send equally many
bytes (gloo's all-gather needs that):

- `SparseMessage`: k values of `numel` and their ascending indices;
- `LevelFormat`: all values in 2, 4 or 8 bits, also of the values of a `SparseMessage`.

Sections of a `SparseMessage`, each padded to 4 bytes: header (first byte 1: the sender's gradient
was not finite) | values | low bits | upper bits. The indices are in the smallest of

    bitmap       n bits
    Elias-Fano   (Elias 1974) the low 4 or 8 bits of each index as they are, and the upper ones in
                 unary: bit (upper part + i) is set for the i-th index, at most k + n / 2**low bits.
                 9.4 bits per index at a density of 1 %, 5.6 at 10 %
    int32        4 bytes per index

A `LevelFormat` has a few levels for each group of values, in bfloat16, then codes:

    2 bits   the sign, and whether the magnitude is above the group's mean; levels: the mean of
             those below and of those above
    4, 8     -7 .. 7, -127 .. 127 in steps of the largest magnitude / 7 (/ 127)

What rounding takes away is for the caller's residual. On a CPU kernels at the end, compiled by
Numba, pass once over values while they are in the first-level cache, where torch takes up to
fifteen passes over all of them; on other devices plain torch does the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_topt.basics.jit import compiled, kernel
from lightning_topt.communication.selection_kernels import lowest_one

HEADER_BYTES = 4
BITMAP, INT32 = 0, 32  # besides 4 and 8, the number of low bits
GROUP = 64  # values with levels of their own
BITS = (2, 4, 8)
WORD_BITS = 32  # index sections are padded to these


@dataclass(frozen=True)
class SparseMessage:
    """Where everything is in the message of `k` of `numel` elements.

    Values are float32, or in `bits` each by the levels of a `LevelFormat`.
    """

    numel: int
    k: int
    bits: int | None = None

    @classmethod
    def of_share(
        cls, numel: int, *, compressible: float, density: float, bits: int | None
    ) -> SparseMessage:
        """Return the message of the share `density` of `compressible` elements among `numel`.

        At least one value travels where any element is compressible.
        """
        return cls(numel, max(1, round(density * compressible)) if compressible else 0, bits)

    @cached_property
    def levels(self) -> LevelFormat | None:
        """The form of the values; None: float32."""
        return None if self.bits is None else LevelFormat(self.k, self.bits)

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
        """How indices are encoded: 0 a bitmap, 4 or 8 Elias-Fano, 32 plain."""
        return min((BITMAP, 4, 8, INT32), key=lambda low_bits: sum(self._index_bytes(low_bits)))

    @cached_property
    def cuts(self) -> tuple[int, int, int]:
        """First byte of the low bits, of the upper bits, and the size of the message."""
        if not self.k:
            return HEADER_BYTES, HEADER_BYTES, HEADER_BYTES
        low = HEADER_BYTES + (4 * self.k if self.levels is None else self.levels.nbytes)
        low_bytes, upper_bytes = self._index_bytes(self.low_bits)
        return low, low + low_bytes, low + low_bytes + upper_bytes

    @property
    def nbytes(self) -> int:
        """Size of the message; equal on all ranks."""
        return self.cuts[2]

    def pack(self, values: Tensor, indices: Tensor, *, out: Tensor) -> None:
        """Write `values` (k,) at ascending `indices` (k,) into `out`, uint8, at least (nbytes,).

        Values are rounded by this.
        """
        # header, values, indices
        low, upper, end = self.cuts
        out[:HEADER_BYTES].zero_()
        if not self.k:
            return
        if self.levels is None:
            out[HEADER_BYTES:low].view(torch.float32).copy_(values)
        else:
            self.levels.encode(values, out=out[HEADER_BYTES:low])
        if self.low_bits == INT32:
            out[low:upper].view(torch.int32).copy_(indices)
            return
        out[low:end].zero_()
        if out.device.type == "cpu":
            lows, words = out[low:upper].numpy(), out[upper:end].numpy().view(np.uint32)
            _pack_sorted(indices.numpy(), self.low_bits, lows, words)
        else:
            self._pack_indices(indices.long(), out)

    def _pack_indices(self, indices: Tensor, out: Tensor) -> None:
        # Do what `_pack_sorted` does, in torch; into an `out` that is zeros there
        low, upper, end = self.cuts
        # one byte for each bit of the upper section
        bits = torch.zeros(8 * (end - upper), dtype=torch.uint8, device=out.device)
        if self.low_bits == BITMAP:
            bits.index_fill_(0, indices, 1)
        else:
            # low bits of one or two indices to a byte, the first in the lowest bits
            lows, each = indices & (1 << self.low_bits) - 1, 8 // self.low_bits
            lows = torch.nn.functional.pad(lows, (0, -self.k % each)).view(-1, each)
            shifts = torch.arange(0, 8, self.low_bits, device=out.device)
            packed = (lows << shifts).sum(dim=1).to(torch.uint8)
            out[low : low + packed.numel()].copy_(packed)
            # upper bits in unary
            places = (indices >> self.low_bits) + torch.arange(self.k, device=out.device)
            bits.index_fill_(0, places, 1)
        out[upper:end].copy_(pack_bits(bits))

    def pack_nonfinite(self, *, out: Tensor) -> None:
        """Write the message of a rank whose gradient is not finite: k values of NaN, somewhere."""
        indices = torch.arange(self.k, dtype=torch.int32, device=out.device)
        self.pack(torch.zeros(self.k, device=out.device), indices, out=out)
        # the bits of NaN as float32, and as levels in bfloat16
        out[HEADER_BYTES : self.cuts[0]].fill_(255)
        out[0] = 1

    def values(self, message: Tensor) -> Tensor:
        """Read the values (k,) of a message, as float32."""
        part = message[HEADER_BYTES : self.cuts[0]]
        return part.view(torch.float32) if self.levels is None else self.levels.decode(part)

    def unpack(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values (k,), float32, and the ascending indices (k,), int64, of a message.

        It is uint8, at least (nbytes,), 4-byte aligned. Its header is not looked at, for which the
        host would wait.

        Raises:
            ValueError: where it has fewer entries than k.
        """
        low, upper, end = self.cuts
        if not self.k:
            empty = torch.empty(0, device=message.device)
            return empty, empty.long()
        values = self.values(message)
        if self.low_bits == INT32:
            return values, message[low:upper].view(torch.int32).long()
        if message.device.type != "cpu":
            return values, self._unpack_indices(message)
        lows, words = message[low:upper].numpy(), message[upper:end].numpy().view(np.uint32)
        indices = torch.empty(self.k, dtype=torch.int64)
        if _unpack_sorted(lows, words, self.low_bits, indices.numpy()) < self.k:
            raise ValueError(
                f"a message of {self.k} entries has fewer: it is of another number of elements, or "
                "damaged"
            )
        return values, indices

    def _unpack_indices(self, message: Tensor) -> Tensor:
        # Do what `_unpack_sorted` does, in torch
        low, upper, end = self.cuts
        bits = unpack_codes(message[upper:end], 1, 8 * (end - upper))
        # the i-th set bit is at upper part + i
        positions = torch.nonzero_static(bits, size=self.k).view(-1)
        if self.low_bits == BITMAP:
            return positions
        # one low part for each index
        lows = unpack_codes(message[low:upper], self.low_bits, self.k).long()
        return (positions - torch.arange(self.k, device=message.device) << self.low_bits) | lows


class ScatterMean:
    """Adds up messages, in the order of `add`, into a bucket's buffer, in float32."""

    def __init__(self, buffer: Tensor, *, scale: float) -> None:
        self.buffer, self.scale = buffer, scale
        # the buffer itself where it is float32
        in_place = buffer.dtype == torch.float32
        self.total = buffer if in_place else torch.empty(buffer.shape, device=buffer.device)
        self.total.zero_()

    def add(self, message: Tensor, *, form: SparseMessage, start: int = 0) -> None:
        """Add one message about the elements from `start`."""
        values, indices = form.unpack(message)
        self.total[start : start + form.numel].index_add_(0, indices, values.mul_(self.scale))

    def write(self) -> None:
        """Write the sum to the buffer, in its dtype."""
        if self.total is not self.buffer:
            self.buffer.copy_(self.total)


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
            _encode_groups(flat, self.bits, self.group, levels, levels.view(np.int32), codes)
            out[: self.level_bytes].view(torch.bfloat16)[: levels.size].copy_(
                torch.from_numpy(levels)
            )
        else:
            self._encode_torch(values, out)

    def _encode_torch(self, values: Tensor, out: Tensor) -> None:
        # Do what `_encode_groups` does, in torch
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
            _decode_groups(levels.numpy(), packed, self.bits, self.group, result.numpy())
            return result
        return self._decode_torch(levels.view(self.groups, -1), message)

    def _decode_torch(self, levels: Tensor, message: Tensor) -> Tensor:
        # Do what `_decode_groups` does, in torch
        codes = unpack_codes(message[self.level_bytes : self.nbytes], self.bits, self.numel)
        # (numel, levels each)
        of_group = levels.repeat_interleave(self.group, dim=0)[: self.numel]
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
        # 2 bits: the means below and above the mean
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


def check_bits(bits: int) -> None:
    """Raise ValueError where `bits` is none of `BITS`."""
    if isinstance(bits, bool) or bits not in BITS:
        raise ValueError(f"bits is one of {', '.join(map(str, BITS))}; got {bits!r}")


def warm_up(bits: int | None) -> None:
    """Compile the CPU kernels now rather than in the first step."""
    form, indices = SparseMessage(1000, 10, bits), torch.arange(10, dtype=torch.int32)
    message = torch.empty(form.nbytes, dtype=torch.uint8)
    form.pack(torch.zeros(10), indices, out=message)
    form.unpack(message)


# ---- kernels for a CPU: the first value is in the lowest bit
#
# indices: sections are zeros before
# levels: `levels` (groups * levels each,) float32 and `level_bits`, the same memory as int32, hold
# numbers of bfloat16; `codes` are bytes


def _level_kernel(function: Any) -> Any:
    return compiled(function, error_model="numpy", boundscheck=False, fastmath={"reassoc"})


@kernel
def _pack_sorted(indices: Any, low_bits: int, lows: Any, words: Any) -> None:
    """Write ascending `indices` (k,) into the bytes `lows` and the uint32 `words`."""
    for j in range(indices.shape[0]):
        index = indices[j]
        if low_bits == 4:
            lows[j >> 1] |= (index & 15) << (4 * (j & 1))
        elif low_bits == 8:
            lows[j] = index & 255
        place = (index >> low_bits) + j if low_bits else index
        words[place // WORD_BITS] |= 1 << (place % WORD_BITS)


@kernel
def _unpack_sorted(lows: Any, words: Any, low_bits: int, indices: Any) -> int:
    """Write the first k indices of a message into `indices` (k,); return how many there are."""
    word: int
    count, k = 0, indices.shape[0]
    for number in range(words.shape[0]):
        word = words[number]
        while word != 0 and count < k:
            place = number * WORD_BITS + lowest_one(word)
            word &= word - 1
            upper = (place - count if low_bits else place) << low_bits
            if low_bits == 4:
                indices[count] = upper | ((lows[count >> 1] >> (4 * (count & 1))) & 15)
            elif low_bits == 8:
                indices[count] = upper | lows[count]
            else:
                indices[count] = upper
            count += 1
    return count


@_level_kernel
def _round_level(level_bits: Any, place: int) -> None:
    # Round a level to bfloat16: to nearest, ties to even
    bits = level_bits[place]
    level_bits[place] = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000


@_level_kernel
def _pack_group(unpacked: Any, count: int, bits: int, codes: Any, first: int) -> None:
    # Pack the codes of one group into bytes from `first`; those beyond `count` are zeros
    each = 8 // bits
    for place in range((count + each - 1) // each):
        byte = np.uint8(0)
        for j in range(each):
            if place * each + j < count:
                byte |= np.uint8(unpacked[place * each + j] << (bits * j))
        codes[first + place] = byte


@_level_kernel
def _encode_steps(
    values: Any,
    start: int,
    stop: int,
    half: Any,
    levels: Any,
    level_bits: Any,
    group: int,
    out: Any,
) -> None:
    # Write the values of one group as signed steps of the largest magnitude / half
    largest = np.float32(0)
    for i in range(start, stop):
        largest = max(largest, abs(values[i]))
    levels[group] = largest / half
    _round_level(level_bits, group)
    inverse = np.float32(1) / levels[group] if levels[group] > 0 else np.float32(0)
    for i in range(start, stop):
        scaled = np.rint(values[i] * inverse)
        out[i - start] = np.uint8(min(max(scaled, -half), half) + half)


@_level_kernel
def _encode_halves(
    values: Any, start: int, stop: int, levels: Any, level_bits: Any, group: int, out: Any
) -> None:
    """Write signs and whether magnitudes are above the group's mean.

    The two levels are the means of those below and of those above.
    """
    total, count = np.float32(0), np.float32(stop - start)
    for i in range(start, stop):
        total += abs(values[i])
    mean = total / count
    high, above = np.float32(0), 0
    for i in range(start, stop):
        is_above = abs(values[i]) > mean
        high += abs(values[i]) if is_above else np.float32(0)
        above += is_above
        out[i - start] = np.uint8(values[i] < 0) + 2 * np.uint8(is_above)
    low = max(total - high, np.float32(0)) / max(count - np.float32(above), np.float32(1))
    levels[2 * group] = low
    levels[2 * group + 1] = high / np.float32(above) if above else low
    _round_level(level_bits, 2 * group)
    _round_level(level_bits, 2 * group + 1)


@_level_kernel
def _encode_groups(
    values: Any, bits: int, size: int, levels: Any, level_bits: Any, codes: Any
) -> None:
    """Write the levels and codes of `values` (n,) in groups of `size`, a multiple of 8."""
    numel, unpacked = values.shape[0], np.zeros(size, np.uint8)
    half = np.float32((1 << (bits - 1)) - 1)
    for group in range((numel + size - 1) // size):
        start = group * size
        stop = min(start + size, numel)
        if bits == 2:
            _encode_halves(values, start, stop, levels, level_bits, group, unpacked)
        else:
            _encode_steps(values, start, stop, half, levels, level_bits, group, unpacked)
        _pack_group(unpacked, stop - start, bits, codes, start * bits // 8)


@_level_kernel
def _decode_groups(levels: Any, codes: Any, bits: int, size: int, out: Any) -> None:
    """Write the values (n,) that `levels` and `codes` stand for into `out`."""
    half, mask = (1 << (bits - 1)) - 1, (1 << bits) - 1
    table = np.zeros(256, np.float32)
    for group in range((out.shape[0] + size - 1) // size):
        start = group * size
        if bits == 2:
            table[0], table[1] = levels[2 * group], -levels[2 * group]
            table[2], table[3] = levels[2 * group + 1], -levels[2 * group + 1]
        for i in range(start, min(start + size, out.shape[0])):
            place = i * bits
            code = (np.int32(codes[place >> 3]) >> (place & 7)) & mask
            out[i] = table[code] if bits < 3 else np.float32(code - half) * levels[group]
