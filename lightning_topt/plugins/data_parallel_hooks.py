"""What strategies on Lightning's DDPStrategy share: lost ranks, training data, equal batches.

    rank_watch        names the rank that is lost (`lost_ranks`)
    _training_data    where in an epoch a checkpoint was made (`training_data`)
    _batches          ranks end an epoch together (`equal_batches`)

`DataParallelHooks` has no state of its own: a strategy makes the three, and begins and ends them.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_topt import plugins
from lightning_topt.communication.topology import Topology
from lightning_topt.plugins.ddp_options import check_devices
from lightning_topt.plugins.equal_batches import EqualBatches
from lightning_topt.plugins.lost_ranks import LostRankWatch
from lightning_topt.plugins.monitors import add_monitor
from lightning_topt.plugins.training_data import TrainingData


class DataParallelHooks(DDPStrategy):
    """The hooks of Lightning that only hand on to the three parts above."""

    rank_watch: LostRankWatch
    _training_data: TrainingData
    _batches: EqualBatches

    # ---- life cycle ------------------------------------------------------------------------------

    @property
    @override
    def launcher(self) -> Any:
        return self.rank_watch.launcher(self, super().launcher)

    @override
    def setup_distributed(self) -> None:
        self.rank_watch.meet(self)
        super().setup_distributed()

    @override
    def setup_environment(self) -> None:
        check_devices(self)
        with self.rank_watch.meeting():
            super().setup_environment()
        self.rank_watch.begin()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._training_data.check_checkpoint(trainer)
        self._batches.begin(trainer)
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            add_monitor(trainer)

    @override
    def teardown(self) -> None:
        with self.rank_watch.last():
            super().teardown()

    # ---- training data ---------------------------------------------------------------------------

    @override
    def process_dataloader(self, dataloader: object) -> object:
        self._training_data.track(dataloader)
        return super().process_dataloader(dataloader)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._training_data.begin()

    # ---- checkpoints -----------------------------------------------------------------------------

    def add_state(self, checkpoint: dict[str, Any]) -> None:
        """Add what the strategy keeps to a checkpoint that is saved. A collective call."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        checkpoint = dict(self._training_data.with_state(checkpoint))  # hooks may keep theirs
        self.add_state(checkpoint)
        as_file = partial(super().save_checkpoint, storage_options=storage_options)
        if os.path.isdir(filepath) or "://" in str(filepath):
            plugins.save_file(self, checkpoint, filepath, as_file)
        else:
            as_file(checkpoint, filepath)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        load = super().load_checkpoint
        if os.path.isdir(checkpoint_path) or "://" in str(checkpoint_path):
            load = partial(plugins.load_whole, load=load)
        checkpoint = load(checkpoint_path, *args, **kwargs)
        self._training_data.take(checkpoint)
        return checkpoint


def make_topology(
    *, nodes: int | None, ranks_per_node: int | None, rank: int, trainer_nodes: int, world_size: int
) -> Topology:
    """Return the topology that is given, or that of the Trainer.

    Where one of its two numbers is missing it follows from the other.

    Raises ValueError where it has not `world_size` ranks.
    """
    given = f"nodes={nodes} and ranks_per_node={ranks_per_node}"
    if nodes is None and ranks_per_node is None:
        nodes = trainer_nodes
    # One of the two numbers follows from the other.
    ranks_per_node = ranks_per_node or world_size // (nodes or 1)
    nodes = nodes or world_size // ranks_per_node
    if nodes * ranks_per_node != world_size:
        raise ValueError(
            f"the world size is {world_size}, which is not nodes x ranks_per_node: {given}; give "
            "numbers that fit, or neither, for those of the Trainer"
        )
    return Topology(nodes, ranks_per_node, rank)
