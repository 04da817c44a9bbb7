"""Which ranks have a batch: agreed before a step, and who counts in what that step averages.

Ranks whose loaders have a length agree once, when an epoch begins (`gather_counts`). Where one has
none, all of them vote, two batches ahead and beside the computation (`Votes`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_topt.communication.topology import destroy_groups

Ranks = tuple[int, ...]


class Presence:
    """The ranks that have a batch in the step under way.

    `ranks` is None in most steps: all of them have one. Else averages and gathers of user code are
    among them alone (`group`), and gradients count by `weight`.

    Args:
        sharing: the ranks among which this one's samples are split now; None: all.
    """

    def __init__(self, sharing: Callable[[], dist.ProcessGroup | None]) -> None:
        self._sharing = sharing
        self.ranks: Ranks | None = None
        self.group: dist.ProcessGroup | None = None
        self.weight = 1.0
        self._groups: dict[tuple[Ranks, int], dist.ProcessGroup | None] = {}

    @property
    def is_partial(self) -> bool:
        """Whether a rank has no batch in this step."""
        return self.ranks is not None

    @property
    def has_batch(self) -> bool:
        """Whether this rank has one."""
        return self.ranks is None or dist.get_rank() in self.ranks

    def replaces(self, group: Any) -> bool:
        """Return whether `group` means all ranks, and only some of them take part now."""
        return self.ranks is not None and (group is None or group is dist.group.WORLD)

    @contextmanager
    def among(
        self,
        ranks: Ranks,
        module: nn.Module,
        *,
        timeout: timedelta | None = None,
    ) -> Generator[None, None, None]:
        """Let only `ranks` take part within. All ranks of the run enter it together.

        Args:
            ranks: that have a batch.
            module: whose metrics, and synchronized batch norms, count these ranks.
            timeout: of the calls among them.
        """
        sharing = self._sharing()
        group = self._group_of(ranks, sharing, timeout)
        swapped = _counting(module, sharing) if group is not None else []
        self.ranks, self.group = ranks, group
        self.weight = dist.get_world_size() / len(ranks)
        for each, _ in swapped:
            each.process_group = group
        try:
            yield
        finally:
            self.ranks, self.group, self.weight = None, None, 1.0
            for each, before in swapped:
                each.process_group = before

    @contextmanager
    def everyone(self) -> Generator[None, None, None]:
        """Let all ranks take part within, also in a step that only some have a batch for."""
        before = self.ranks, self.group, self.weight
        self.ranks, self.group, self.weight = None, None, 1.0
        try:
            yield
        finally:
            self.ranks, self.group, self.weight = before

    def close(self) -> None:
        """End the groups. A collective call."""
        groups, self._groups = self._groups, {}
        destroy_groups([group for group in groups.values() if group is not None])

    def _group_of(
        self, ranks: Ranks, sharing: dist.ProcessGroup | None, timeout: timedelta | None
    ) -> dist.ProcessGroup | None:
        """Return the group of those of `ranks` that share samples with this one; None if absent."""
        key = (ranks, id(sharing))
        if key not in self._groups:
            mates = set(ranks if sharing is None else dist.get_process_group_ranks(sharing))
            own = tuple(rank for rank in ranks if rank in mates)
            # All ranks make all groups, in one order.
            wanted: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(wanted, own)
            group = None
            for each in sorted({tuple(each) for each in wanted if each}):
                made = dist.new_group(list(each), timeout=timeout)
                if dist.get_rank() in each:
                    group = made
            self._groups[key] = group
        return self._groups[key]


def _counting(
    module: nn.Module, sharing: dist.ProcessGroup | None
) -> list[tuple[Any, dist.ProcessGroup | None]]:
    """Return what in `module` talks to the ranks of a group by itself, with that group."""
    found = []
    for each in module.modules():
        if isinstance(each, Metric | nn.SyncBatchNorm):
            group = cast("dist.ProcessGroup | None", each.process_group)
            if group is None or group is dist.group.WORLD or group is sharing:
                found.append((each, group))
    return found


def gather_counts(
    counts: Sequence[float], *, device: torch.device, group: dist.ProcessGroup | None = None
) -> list[list[float]]:
    """Return the counts of all ranks of a group: (ranks, n). A collective call."""
    own = torch.tensor(counts, dtype=torch.float64, device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    found: list[list[float]] = torch.stack(gathered).tolist()
    return found


def check_shapes(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    """Raise ValueError on all ranks of a group whose tensors are of different forms.

    A collective call. To gather such tensors would end the process, or never return.
    """
    kind = zlib.crc32(str(tensor.dtype).encode())
    shape = [*tensor.shape, *[-1] * _MOST_DIMENSIONS][:_MOST_DIMENSIONS]
    rows = gather_counts([kind, *shape], device=tensor.device, group=group)
    if all(row == rows[0] for row in rows):
        return
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    forms = ", ".join(
        f"rank {rank} {[int(size) for size in row[1:] if size >= 0]}"
        for rank, row in zip(ranks, rows, strict=True)
    )
    raise ValueError(
        f"self.all_gather was given tensors of different shapes or dtypes: {forms}. Ranks may have "
        "different numbers of samples: gather tensors of equal shapes (padded, or reduced first), "
        "or set pad_evaluation=True"
    )


_MOST_DIMENSIONS = 8  # that are compared


class Votes:
    """Says which ranks have another batch, where nobody knows how many there will be.

    A vote is sent at one batch and read at the next one, on a group of the host's own.
    """

    def __init__(self, *, timeout: timedelta | None = None) -> None:
        self._size, self._rank = dist.get_world_size(), dist.get_rank()
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._sent: tuple[Any, Tensor] | None = None

    def send(self, value: int) -> None:
        """Send this rank's vote. All ranks do, before anyone reads it."""
        self._drain()
        votes = torch.zeros(self._size, dtype=torch.int32)
        votes[self._rank] = value
        self._sent = dist.all_reduce(votes, group=self._group, async_op=True), votes

    def read(self) -> list[int]:
        """Return the last vote of every rank."""
        assert self._sent is not None, "no vote was sent"
        (work, votes), self._sent = self._sent, None
        work.wait()
        found: list[int] = votes.tolist()
        return found

    def close(self) -> None:
        """End the group, once all ranks have come here. A collective call."""
        self._drain()
        dist.barrier(group=self._group)
        destroy_groups([self._group])

    def _drain(self) -> None:
        """Wait for a vote that nobody reads: the epoch has ended before its data."""
        if self._sent is not None:
            self.read()
