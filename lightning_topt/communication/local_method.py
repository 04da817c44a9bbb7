"""Methods of ranks that train alone and come together every so many steps: what `OuterSteps` asks
of one.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_flag, check_real, check_whole
from lightning_topt.communication.exchange_method import ExchangeMethod
from lightning_topt.communication.outer_step import MeanOverRanks
from lightning_topt.communication.topology import Topology


@dataclass(frozen=True, kw_only=True)
class LocalMethod(ExchangeMethod):
    """A method whose ranks make ``every`` steps of their own optimizers, then one step of the outer
    one together.

    The outer optimizer is SGD with Nesterov momentum: ``outer_learning_rate``, ``outer_momentum``.
    With ``hierarchical`` the ranks of a node train one replica together: their gradients are
    averaged in every step, and outer steps are between nodes; None: where there are several nodes
    of several ranks.
    """

    every: int = 50
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    hierarchical: bool | None = False

    @override
    def check(self) -> None:
        super().check()
        check_flag(self.hierarchical, name="hierarchical", optional=True)
        check_whole(self.every, name="every (the number of local steps between outer steps)")
        for name in ("outer_learning_rate", "outer_momentum"):
            check_real(getattr(self, name), name=name)
        if not self.outer_learning_rate > 0:
            raise ValueError(f"outer_learning_rate is positive; got {self.outer_learning_rate}")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"outer_momentum is at least 0 and below 1; got {self.outer_momentum}")

    @abstractmethod
    def make_mean(
        self, numel: int, *, device: torch.device, group: dist.ProcessGroup | None
    ) -> MeanOverRanks:
        """Return what takes the mean over `group` of vectors (numel,): of how far each rank
        went.
        """

    def joins_nodes(self, topology: Topology) -> bool:
        """Return whether the ranks of each node train one replica together."""
        if self.hierarchical is not None:
            return self.hierarchical and topology.ranks_per_node > 1
        return topology.num_nodes > 1 and topology.ranks_per_node > 1

    @property
    def sent_share(self) -> float:
        """The share of entries that an outer step sends."""
        return 1.0
