"""The outer gradient of local steps: how far a rank's parameters went from where all ranks last
agreed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_topt.communication.named_tensors import NamedTensors


class OuterGradient:
    """Elements `start` to `stop` (None: the end) of anchor - parameters, float32, computed where
    they are read.

    `anchor` (n,) counts as rounded to the parameters' dtypes: what they lose by that is not how far
    they went.
    """

    def __init__(
        self, parameters: NamedTensors, anchor: Tensor, *, start: int = 0, stop: int | None = None
    ) -> None:
        self.anchor, self.start = anchor, start
        self.stop = parameters.numel if stop is None else stop
        # where each parameter begins, and itself (numel,)
        self._parts: list[tuple[int, Tensor]] = []
        first = 0
        for tensor in parameters.tensors.values():
            if first < self.stop and first + tensor.numel() > start:
                self._parts.append((first, tensor.detach().reshape(-1)))
            first += tensor.numel()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def whole(self) -> Tensor:
        """Return all of it (numel,), in memory of its own."""
        return self._write(self.start, self.anchor.new_empty(self.numel))

    def blocks(self, size: int) -> Iterator[Tensor]:
        """Yield pieces of `size` elements, the last one perhaps shorter; each takes the memory of
        the one before.
        """
        buffer = self.anchor.new_empty(min(size, self.numel))
        for start in range(self.start, self.stop, size):
            yield self._write(start, buffer[: self.stop - start])

    @torch.no_grad()
    def _write(self, start: int, out: Tensor) -> Tensor:
        stop = start + out.numel()
        for first, flat in self._parts:
            low, high = max(first, start), min(first + flat.numel(), stop)
            if low < high:
                tensor, part = flat[low - first : high - first], out[low - start : high - start]
                if tensor.dtype == torch.float32:
                    torch.sub(self.anchor[low:high], tensor, out=part)
                else:
                    part.copy_(self.anchor[low:high].to(tensor.dtype)).sub_(tensor)
        return out
