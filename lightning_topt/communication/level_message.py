"""The message of a selection whose values travel in few bits: indices as in `wire`, then levels and
codes as in `levels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from lightning_topt.communication.levels import LevelFormat
from lightning_topt.communication.wire import MessageFormat, Unpacked

HALF_BITS = 16  # bfloat16, without levels


@dataclass(frozen=True)
class LevelMessage:
    """A `LevelMessage` is of some of `numel` elements in `bits` each: 1, 2, 4, 8 in groups of
    `group` values, or 16.

    `segments` are numbers of values, one after the other (of a parameter each): groups begin anew
    in each, so that rounding does not depend on what else is in the message.
    """

    numel: int
    segments: tuple[int, ...]
    bits: int
    group: int = 64

    @property
    def k(self) -> int:
        """Number of values."""
        return sum(self.segments)

    @cached_property
    def form(self) -> MessageFormat:
        """Return where header and indices are, and values of 16 bits."""
        return MessageFormat(self.numel, self.k, torch.bfloat16 if self.bits == HALF_BITS else None)

    @cached_property
    def parts(self) -> tuple[tuple[slice, slice, LevelFormat], ...]:
        """Return values, bytes and format of each segment; nothing where values have 16 bits."""
        if self.bits == HALF_BITS:
            return ()
        forms = [LevelFormat(count, self.bits, self.group) for count in self.segments if count]
        values, nbytes = [0], [self.form.nbytes]
        for form in forms:
            values.append(values[-1] + form.numel)
            nbytes.append(nbytes[-1] + form.nbytes)
        ranges = zip(pairwise(values), pairwise(nbytes), forms, strict=True)
        return tuple(
            (slice(*of_values), slice(*of_bytes), form) for of_values, of_bytes, form in ranges
        )

    @property
    def nbytes(self) -> int:
        """Size of the message; equal on all ranks."""
        return self.parts[-1][1].stop if self.parts else self.form.nbytes

    def round(self, values: Tensor) -> Tensor:
        """Return what of float32 `values` (k,) arrives, as float32."""
        if not self.parts:
            return self.form.round(values).float()
        return torch.cat([form.round(values[of_values]) for of_values, _, form in self.parts])

    def pack(self, values: Tensor, indices: Tensor, *, out: Tensor) -> None:
        """Write `values` (k,), rounded by this, at ascending `indices` (k,) into `out`, uint8, at
        least (nbytes,).
        """
        self.form.pack(values, indices, out=out)
        for of_values, of_bytes, form in self.parts:
            form.encode(values[of_values], out=out[of_bytes])

    def pack_nonfinite(self, *, out: Tensor) -> None:
        """Write the message of a rank whose gradient is not finite."""
        self.form.pack_nonfinite(out=out)

    def unpack(self, message: Tensor) -> Unpacked:
        """Read a message, uint8, at least (nbytes,), 4-byte aligned."""
        found = self.form.unpack(message)
        return (
            Unpacked(True, self.values(message), found.indices)
            if self.parts and found.finite
            else found
        )

    def values(self, message: Tensor) -> Tensor:
        """Read the values (k,) of a message, as float32."""
        if not self.parts:
            return self.form.values(message)
        return torch.cat([form.decode(message[of_bytes]) for _, of_bytes, form in self.parts])


def message_of_share(
    numel: int,
    *,
    compressible: float,
    density: float,
    value_dtype: torch.dtype,
    bits: int | None = None,
) -> MessageFormat | LevelMessage:
    """Return the message about `numel` elements that has the share `density` of the `compressible`
    ones, in `bits` each.
    """
    k = max(1, round(density * compressible)) if compressible else 0
    return MessageFormat(numel, k, value_dtype) if bits is None else LevelMessage(numel, (k,), bits)
