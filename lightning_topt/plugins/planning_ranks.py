"""Planning by several ranks: they start alike, and end with one result or with an error on every
rank.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from lightning_topt.communication.rank_watch import is_of_collective
from lightning_topt.graph.errors import may_need_values
from lightning_topt.plugins.plan_request import PlanRequest

T = TypeVar("T")


def check_agreement(request: PlanRequest, module: nn.Module) -> None:
    """Raise RuntimeError on every rank when ranks differ in versions, options or model. A
    collective call.
    """
    mine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": version("lightning"),
        "options of the strategy": repr(request),
        "parameters of the model": [
            (name, tuple(p.shape), str(p.dtype)) for name, p in module.named_parameters()
        ],
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, other in enumerate(everyone):
        for name, value in everyone[0].items():
            if other[name] != value:
                first, second = _first_difference(value, other[name])
                raise RuntimeError(
                    f"rank 0 and rank {rank} differ in {name}: {first} against {second}"
                )


def _first_difference(one: Any, two: Any) -> tuple[Any, Any]:
    if not isinstance(one, list):
        return one, two
    for a, b in zip(one, two, strict=False):
        if a != b:
            return a, b
    return f"{len(one)} entries", f"{len(two)} entries"


class RemotePlanningError(RuntimeError):
    """Planning failed on another rank; the message is that rank's, and so is `needs_values` (see
    `CaptureError`).
    """

    needs_values = False


def on_rank_0(function: Callable[[], T]) -> T:
    """Run `function` on rank 0 and give every rank its result, or an error on every rank. A
    collective call.
    """
    return _share(function, only_rank_0=True)


def on_every_rank(function: Callable[[], T]) -> T:
    """Run `function` on every rank; when one fails, all raise. A collective call (and `function`
    may hold some).
    """
    return _share(function, only_rank_0=False)


def _share(function: Callable[[], T], *, only_rank_0: bool) -> T:
    result: Any = None
    error: BaseException | None = None
    if dist.get_rank() == 0 or not only_rank_0:
        try:
            result = function()
        except Exception as caught:
            if is_of_collective(caught):
                raise  # a rank is gone: the next collective call would wait for it again
            error = caught
    mine = None if error is None else (f"{type(error).__name__}: {error}", may_need_values(error))
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, mine)
    if error is not None:
        raise error
    for rank, problem in enumerate(problems):
        if problem is not None:
            remote = RemotePlanningError(f"planning failed on rank {rank}: {problem[0]}")
            remote.needs_values = problem[1]
            raise remote
    if only_rank_0:
        box = [result]
        dist.broadcast_object_list(box, 0)
        result = box[0]
    return cast(T, result)
