"""Numbers and texts that all ranks of the default process group agree on. Without a group one
process is alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class MeasuringError(RuntimeError):
    """A measurement failed on another rank; the message says on which one and why."""


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own_rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if world_size() > 1 else 0


def average(values: Sequence[float]) -> list[float]:
    """Return the mean over ranks, bit for bit the same on all of them. Collective."""
    if world_size() == 1 or not values:
        return list(values)
    device = "cpu" if dist.get_backend() == "gloo" else "cuda"
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)  # an all_reduce need not give all ranks the same last bit
    return [float(value) / world_size() for value in tensor.tolist()]


def gather(value: T) -> list[T]:
    """Return every rank's `value`, which must pickle, in rank order. Collective."""
    if world_size() == 1:
        return [value]
    everyone: list[Any] = [None] * world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def from_rank_0(value: T) -> T:
    """Return rank 0's `value`, which must pickle. Collective."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]


def on_all_ranks(function: Callable[[], T]) -> T:
    """Return this rank's result of `function`, which calls no collective; where it fails on one
    rank, all raise. Collective.

    Raises the error itself where it happened, MeasuringError with its text elsewhere.
    """
    result: Any = None
    error: Exception | None = None
    try:
        result = function()
    except Exception as caught:
        error = caught
    messages = gather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise MeasuringError(f"measuring failed on rank {rank}: {message}")
    return result  # type: ignore[no-any-return]
