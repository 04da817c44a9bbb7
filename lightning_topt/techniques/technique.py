"""What a technique is: one way to place blocks on a mesh, in one file with three faces.

    face                  methods
    what is legal         configs, places
    what it costs         lifetimes, plan_lifetimes, add_seconds, plan_seconds, update_share

The planner and the engine share the registry of techniques (`techniques.registry`) and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from lightning_topt.costs.lifetimes import Lifetime
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import Block, Parameter


@dataclass
class BlockSeconds:
    """What techniques add to the computation of a block, in seconds.

    Exchanges are split into foreground (in the way of computation) and background (beside it, on the network); gathers come
    before the forward and before the backward of the block, its reduction starts after its backward. `recompute` is forward
    computation within backward, `update` the optimizer step and what follows it, `broadcast` the exchange of its results.
    """

    recompute: float = 0.0
    gather_foreground: list[float] = field(default_factory=lambda: [0.0, 0.0])  # in forward, in backward
    gather_background: list[float] = field(default_factory=lambda: [0.0, 0.0])
    reduce_foreground: float = 0.0
    reduce_background: float = 0.0
    update: float = 0.0
    broadcast: float = 0.0


@dataclass(frozen=True)
class Neighbours:
    """The blocks with sharded gradients around one of them, in the order of forward: after whose reduction, with whose gather,
    its buffers go. None: there is none, or (`previous`) all before it are reduced when the backward pass is over.
    """

    previous: str | None = None
    following: str | None = None


ALONE = Neighbours()


class Technique(ABC):
    """One way to treat the blocks of a model on a mesh."""

    @abstractmethod
    def places(self, config: OpConfig, mesh: Mesh) -> bool:
        """Return whether `config` on `mesh` is (also) this technique's business."""

    # ---- what is legal ----------------------------------------------------------------------------------------------

    @abstractmethod
    def configs(self, step: TrainingStep, block: Block, so_far: Sequence[OpConfig]) -> list[OpConfig]:
        """Return the configurations that it makes legal for `block`, beside those of earlier techniques, `so_far`."""

    # ---- what it costs ----------------------------------------------------------------------------------------------

    @abstractmethod
    def lifetimes(self, step: TrainingStep, block: str, config: OpConfig, beside: Neighbours) -> Iterator[Lifetime]:
        """Yield what a block under `config`, between the sharded blocks `beside` it, keeps in memory."""

    @abstractmethod
    def plan_lifetimes(self, step: TrainingStep, blocks: Collection[str]) -> Iterator[Lifetime]:
        """Yield what a plan that places `blocks` by this technique keeps beside what each of them does."""

    @abstractmethod
    def add_seconds(self, seconds: BlockSeconds, step: TrainingStep, block: str, config: OpConfig) -> None:
        """Add to `seconds` what a block under `config` takes beside the computation of its operators."""

    @abstractmethod
    def plan_seconds(self, step: TrainingStep, blocks: Collection[str]) -> float:
        """Return the seconds of the update that a plan takes beside what each of `blocks` does."""

    @abstractmethod
    def update_share(self, step: TrainingStep, parameter: Parameter, config: OpConfig) -> float:
        """Return the largest share of `parameter` that one rank updates at once, as far as this technique decides it."""
