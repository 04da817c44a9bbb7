"""Options of a run that are not part of its plan; execution and the plugins read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_topt.communication.topology import Topology


@dataclass(frozen=True)
class RunOptions:
    """What a run brings besides its plan.

    Args:
        ddp: arguments of torch's DistributedDataParallel
        hook: the user's communication hook for it, with its `hook_state`
        topology: of the plan's gradient exchange; None: from the environment
        nonfinite: what the exchange does with gradients that are not finite, see `ExchangeSettings`
    """

    ddp: Mapping[str, Any] = field(default_factory=dict)
    hook: Callable[..., Any] | None = None
    hook_state: Any = None
    topology: Topology | None = None
    nonfinite: str = "error"
