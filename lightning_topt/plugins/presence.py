"""Which ranks have a batch: agreed before a step, and who counts in what that step averages.

Ranks whose loaders have a length agree once, when an epoch begins (`gather_counts`). Where one has
none, all of them vote at each batch, beside the computation (`Votes`).
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_topt.communication.topology import destroy_groups

log = logging.getLogger(__name__)

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
        # Whether ranks may have had different numbers of samples.
        self.differs_in_training = self.differs_in_evaluation = False
        self._groups: dict[tuple[Ranks, int], dist.ProcessGroup | None] = {}
        self._votes: list[Votes | None] = []

    @property
    def is_partial(self) -> bool:
        """Whether a rank has no batch in this step."""
        return self.ranks is not None

    @property
    def may_differ(self) -> bool:
        """Whether ranks may have had different numbers of samples, in what is under way."""
        return self.differs_in_training or self.differs_in_evaluation

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
            for each in module.modules():
                if isinstance(each, Metric):
                    each._computed = None  # of these ranks alone, or of an earlier step

    @contextmanager
    def everyone(self) -> Generator[None, None, None]:
        """Let all ranks take part within, also in a step that only some have a batch for."""
        before = self.ranks, self.group, self.weight
        self.ranks, self.group, self.weight = None, None, 1.0
        try:
            yield
        finally:
            self.ranks, self.group, self.weight = before

    def votes(self, strategy: DDPStrategy) -> Votes | None:
        """Return what ranks vote by; None on all of them where they cannot. A collective call."""
        if not self._votes:
            made = None
            try:
                made = Votes(timeout=strategy._timeout)
            except RuntimeError as error:  # no network interface, most often
                log.warning("ranks do not agree on the ends of their data: %s", error)
            can = strategy.reduce_boolean_decision(made is not None)
            self._votes.append(made if can else None)
        return self._votes[0]

    def close(self) -> None:
        """End the groups. A collective call."""
        for votes in self._votes:
            if votes is not None:
                votes.close()
        self._votes.clear()
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


def gather_rows(
    tensor: Tensor, group: dist.ProcessGroup | None, gather: Callable[[Tensor], Tensor]
) -> tuple[Tensor, bool]:
    """Return the tensors of all ranks of a group, stacked, and whether rows were repeated.

    Where each sample is evaluated once some ranks have a row less than others. As many rows as
    there would be under Lightning's sampler are returned, which gives rank r every n-th sample
    from r on, and begins anew at its end: the same rows are repeated. A collective call.

    Args:
        tensor: of this rank: (rows, ...).
        group: None: all ranks.
        gather: stacks tensors of one shape.

    Raises ValueError on all ranks for tensors that differ in more than that.
    """
    kind = zlib.crc32(str(tensor.dtype).encode())
    shape = [*tensor.shape, *[-1] * _MOST_DIMENSIONS][:_MOST_DIMENSIONS]
    found = gather_counts([kind, *shape], device=tensor.device, group=group)
    if all(each == found[0] for each in found):
        return gather(tensor), False
    forms = [each[:1] + each[2:] for each in found]
    counts, ranks = [int(each[1]) for each in found], len(found)
    whole = sum(counts)
    shares = [len(range(rank, whole, ranks)) for rank in range(ranks)]
    if counts != shares or any(form != forms[0] for form in forms):
        raise ValueError(_different_shapes(found, group))
    most = shares[0]
    missing = most - len(tensor)
    stacked = gather(torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]))
    # (rows, ranks, ...), in the order of the samples; the sampler begins anew where they end
    samples = stacked.transpose(0, 1).flatten(0, 1)
    order = torch.arange(most * ranks, device=tensor.device) % whole
    rows = samples[order].reshape(most, ranks, *tensor.shape[1:])
    return rows.transpose(0, 1).contiguous(), True


def _different_shapes(found: list[list[float]], group: dist.ProcessGroup | None) -> str:
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    forms = ", ".join(
        f"rank {rank} {[int(size) for size in row[1:] if size >= 0]}"
        for rank, row in zip(ranks, found, strict=True)
    )
    return (
        f"self.all_gather was given tensors of different shapes or dtypes: {forms}. Ranks may have "
        "different numbers of samples: gather tensors of equal shapes (padded, or reduced first), "
        "or set pad_evaluation=True"
    )


_MOST_DIMENSIONS = 8  # that are compared


class Votes:
    """Says which ranks have another batch, where nobody knows how many there will be.

    Votes travel on a group of the host's own, beside what is computed until they are read.
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
