"""Parameters gathered among the CPU ranks of one node.

`node_rows` makes a `NodeRows` where all ranks share one machine. Rows stay where they are in every
process: what a rank needs is read there (`process_vm_readv`) in one copy. On two ranks of one
machine this takes a fraction of the time of gloo's collectives, which go through sockets (figures:
benchmarks/results/optimizer_step.md). For optimizers whose step is divided among ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication.node.node_channel import (
    CHANNEL_WORDS,
    NodeChannel,
    NodeMemoryUnavailable,
    NodePage,
    Operation,
)
from lightning_topt.communication.node.node_kernels import Array, gather_tables

log = logging.getLogger(__name__)


def node_rows(
    group: dist.ProcessGroup, *, device: torch.device, num_nodes: int, timeout_seconds: float
) -> NodeRows | None:
    """Collective call: `NodeRows` where CPU ranks share one node, None where they do not.

    Where one node's ranks cannot share memory, the log says so.
    """
    if device.type != "cpu" or num_nodes != 1 or dist.get_world_size(group) < 2:
        return None
    try:
        return NodeRows(group, timeout_seconds=timeout_seconds)
    except NodeMemoryUnavailable as error:
        log.warning("%s; parameters are exchanged inside the node by collectives", error)
        return None


class NodeRows:
    """Gathers rows in place, through memory. Making one is a collective call.

    Methods are called alike on all ranks of `group`, which are those of one node.

    Args:
        group: the ranks of the node.
        timeout_seconds: how long a wait lasts for a rank that is alive; one that is gone is noticed
            at once.

    Raises:
        NodeMemoryUnavailable: on all ranks, where they are not on one machine or may not read each
            other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, *, timeout_seconds: float) -> None:
        self.page = NodePage(group, words=CHANNEL_WORDS, timeout_seconds=timeout_seconds)
        self.rank, self.size = self.page.rank, self.page.size
        self.tables = NodeChannel(self.page, base=0)

    def gather_rows(self, parts: Mapping[int, Sequence[Tensor]]) -> Operation:
        """Give ``parts[r]``, contiguous CPU tensors, the values that they have on rank r.

        All ranks have as many tensors of the same sizes. They must not be written, nor given other
        memory, before ``wait()`` has returned.
        """
        per_rank = [list(parts.get(rank, ())) for rank in range(self.size)]
        assert all(
            part.is_contiguous() and part.device.type == "cpu"
            for of_rank in per_rank
            for part in of_rank
        )
        # addresses here and bytes of all parts, those of rank r from starts[r] on
        flat = [part for of_rank in per_rank for part in of_rank]
        targets = np.array([part.data_ptr() for part in flat], dtype=np.int64)
        sizes = np.array([part.nbytes for part in flat], dtype=np.int64)
        counts = [len(of_rank) for of_rank in per_rank]
        starts = np.cumsum([0, *counts], dtype=np.int64)
        # What is published is a table of this rank's addresses, never empty.
        table = torch.from_numpy(np.append(targets[starts[self.rank] : starts[self.rank + 1]], 0))
        read_table = np.empty(max(counts) + 1, dtype=np.int64)

        def read(processes: Array, sources: Array) -> tuple[int, int]:
            vector = self.page.vector_address
            return gather_tables(
                processes, sources, read_table, targets, sizes, starts, self.rank, vector
            )

        expected = [8 * (count + 1) for count in counts]
        return Operation(
            self.tables, sent=table, expected=expected, read=read, outcome=lambda: table
        )

    def close(self) -> None:
        """Leave: other ranks' waits for this one end with an error. May be called twice."""
        self.page.leave()
