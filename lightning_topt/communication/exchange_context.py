"""An exchange runs somewhere: its ranks and device, and how it waits, which its method does not
say.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch.distributed.distributed_c10d import Store

from lightning_topt.basics.argument_checks import check_choice, check_flag, check_real
from lightning_topt.communication.node.node_exchange import CollectiveNodeExchange, NodeExchange
from lightning_topt.communication.node.node_memory import SharedMemoryNodeExchange
from lightning_topt.communication.node.page import NodeMemoryUnavailable
from lightning_topt.communication.topology import Groups, Topology

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExchangeSettings:
    """`ExchangeSettings` say how a run waits, checks and treats infinities, whatever the method;
    alike on all ranks.

    - ``nonfinite``: "error" raises FloatingPointError on all ranks; "skip" makes the gradient NaN
      on all ranks, so that a GradScaler skips the step;
    - ``timeout_seconds``: for every wait on another rank;
    - ``debug``: before each exchange compare all parameters across ranks, bit for bit.

    Raises ValueError for anything else.
    """

    nonfinite: str = "error"
    timeout_seconds: float = 300.0
    debug: bool = False

    def __post_init__(self) -> None:
        check_choice(self.nonfinite, name="nonfinite", allowed=("error", "skip"))
        check_real(self.timeout_seconds, name="timeout_seconds", positive=True)
        check_flag(self.debug, name="debug")


@dataclass(frozen=True)
class ExchangeContext:
    """An exchange is made for these ranks and this device.

    `store` is that of the run, with keys of this exchange's own; None where there is none (in
    tests).
    """

    topology: Topology
    groups: Groups
    device: torch.device
    timeout_seconds: float = ExchangeSettings.timeout_seconds
    store: Store | None = None


def make_node_exchange(context: ExchangeContext) -> NodeExchange:
    """Collective call: through memory where CPU ranks share one machine, else by collectives."""
    topology, groups = context.topology, context.groups
    assert groups.node_scatter is not None and groups.node_gather is not None
    if context.device.type == "cpu" and topology.ranks_per_node > 1:
        try:
            return SharedMemoryNodeExchange(
                groups.node_gather, timeout_seconds=context.timeout_seconds
            )
        except NodeMemoryUnavailable as error:
            log.warning("%s; gradients are exchanged inside the node by collectives", error)
    return CollectiveNodeExchange(
        local_rank=topology.local_rank,
        local_size=topology.ranks_per_node,
        scatter_group=groups.node_scatter,
        gather_group=groups.node_gather,
    )
