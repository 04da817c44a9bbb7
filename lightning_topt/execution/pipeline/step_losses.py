"""Losses of a step come from the last stage, one for each microbatch, and go to all ranks of the
pipeline.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication.rank_watch import PeerLostError
from lightning_topt.execution.pipeline.pipeline_groups import PipelineGroups


def loss_of_step(result: Any) -> Tensor:
    """Return the loss that a step returned. Raises ValueError where it is none."""
    if not isinstance(result, Tensor) or result.numel() != 1:
        raise ValueError(
            "a step under a plan with stages returns its loss, one number, for every microbatch; "
            f"got {type(result).__name__}"
        )
    return result


def share_losses(values: Tensor, groups: PipelineGroups, *, source: int) -> None:
    """Give all ranks of the pipeline the `values` of rank `source`, which runs the last stage.

    By messages, since gloo takes longer to begin a collective call. Raises PeerLostError where a
    rank is gone.
    """
    row, own = groups.row, groups.rank
    try:
        if own == source:
            others = (rank for rank in range(len(groups.pipeline)) if rank != own)
            works = [row.send([values], rank, 0) for rank in others]
        else:
            works = [row.recv([values], source, 0)]
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise PeerLostError(
            f"rank {dist.get_rank()} exchanged the losses of the step with rank "
            f"{groups.pipeline[source]}, which runs the last stage: a rank is gone, stopped or "
            f"late ({error})"
        ) from error
