"""Batches that should be equal on all ranks of a group: checked, and sent if they are not."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_topt.communication.value_exchange import value_of_rank

_COMPARED_ELEMENTS = 512  # of each tensor, by `checksum`


class AgreedBatches:
    """Batches of the ranks in `group`, which must be equal: those of a pipeline's stages."""

    def __init__(self, group: dist.ProcessGroup, *, device: torch.device) -> None:
        self._group, self._device = group, device
        self._differ = False

    @property
    def differ(self) -> bool:
        """Whether batches were found to differ."""
        return self._differ

    def agreed(self, batch: Any) -> Any:
        """Return `batch`, or that of the first rank if batches differ now or did before.

        Some elements of each tensor are compared, and texts and numbers. A collective call.
        """
        if not self._differ:
            # One number per rank.
            own = torch.tensor([checksum(batch)], device=self._device)
            everyone = own.new_empty(dist.get_world_size(self._group))
            of_ranks = list(everyone.split(1))  # views
            dist.all_gather(of_ranks, own, group=self._group)
            self._differ = bool((everyone != own).any())
            if self._differ:
                rank_zero_warn(
                    "topt: the ranks of a pipeline got different batches, so each of these is sent "
                    "from the first rank to the others. That takes time: leave "
                    "use_distributed_sampler=True, or let loaders shuffle, and transforms draw, "
                    "from a generator with the same seed on all ranks"
                )
        if not self._differ:
            return batch
        return value_of_rank(batch, self._group, place=0, device=self._device)


def checksum(batch: Any) -> int:
    """Return a number that very likely differs for batches that differ, if only in a shape."""
    found = 0
    for piece in _pieces(batch):
        found = zlib.crc32(piece, found)
    return found


def _pieces(value: Any) -> Iterator[bytes]:
    # Yield the parts of a batch that its checksum is made of
    if isinstance(value, Tensor):
        yield f"{tuple(value.shape)} {value.dtype}".encode()
        if value.layout == torch.strided and value.numel():
            flat = (
                value.detach().reshape(-1)
                if value.is_contiguous()
                else value.detach().contiguous().view(-1)
            )
            # about 512 elements, evenly spread
            sample = flat[:: max(1, len(flat) // _COMPARED_ELEMENTS)].contiguous().cpu()
            yield sample.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield repr(name).encode()
            yield from _pieces(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _pieces(entry)
    elif isinstance(value, str | bytes | int | float | complex | bool | None):
        yield repr(value).encode()
    elif hasattr(value, "__dict__"):
        yield from _pieces(vars(value))
