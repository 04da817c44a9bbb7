"""The ranks of a row of a pipeline run one batch: where loaders gave them different ones, all get
that of the first.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_topt.plugins.member_batches import value_of_member

_ELEMENTS = 512  # of each tensor that are compared


class RowBatches:
    """Batches of the ranks in `group`, which must be equal."""

    def __init__(self, group: dist.ProcessGroup, *, device: torch.device) -> None:
        self._group, self._device = group, device
        self._differ = False

    @property
    def differ(self) -> bool:
        """Whether batches were found to differ."""
        return self._differ

    def agreed(self, batch: Any) -> Any:
        """Return `batch`, or that of the group's first rank if they differ now or did before. A
        collective call.

        Some elements of each tensor are compared, and texts and numbers.
        """
        if not self._differ:
            own = torch.tensor([checksum(batch)], device=self._device)
            everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
            dist.all_gather(everyone, own, group=self._group)
            self._differ = not all(torch.equal(other, own) for other in everyone)
            if self._differ:
                rank_zero_warn(
                    "topt: the ranks of a pipeline got different batches, so each of these is sent "
                    "from the first rank to the others. That takes time: leave "
                    "use_distributed_sampler=True, or let loaders shuffle, and transforms draw, "
                    "from a generator with the same seed on all ranks"
                )
        return (
            value_of_member(batch, self._group, member=0, device=self._device)
            if self._differ
            else batch
        )


def checksum(batch: Any) -> int:
    """Return a number that differs, very likely, for batches that differ, also in the shape of a
    tensor.
    """
    found = 0
    for piece in _pieces(batch):
        found = zlib.crc32(piece, found)
    return found


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield f"{tuple(value.shape)} {value.dtype}".encode()
        if value.layout == torch.strided and value.numel():
            flat = (
                value.detach().reshape(-1)
                if value.is_contiguous()
                else value.detach().contiguous().view(-1)
            )
            sample = flat[:: max(1, len(flat) // _ELEMENTS)].contiguous().cpu()
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
