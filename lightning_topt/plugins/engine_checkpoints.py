"""Checkpoints of a strategy whose engine comes with the first training batch.

    full      the plain file of ddp: rank 0 collects the state of all ranks
    sharded   a folder, to which every rank writes what it keeps

Both have the plan, and are loaded under any plan and number of ranks; before, with and after the
engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt.communication.hook import CompressedExchange, ExchangeStatistics
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.sharded_checkpoint import (
    REST,
    StoredModule,
    StoredOptimizer,
    holds_shards,
    open_sharded,
    save_sharded,
)
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plugins.ddp_options import name_own_strategy
from lightning_topt.plugins.exchange_guard import CHECKPOINT_KEY, ExchangeGuard
from lightning_topt.plugins.lost_ranks import LostRankWatch


class EngineCheckpoints(DDPStrategy):
    """Checkpoints of a strategy whose engine comes with the first training batch.

    Files are those of ``ddp`` with the plan beside them, whenever they are written; or folders of
    shards. `checkpoint_form` (``"full"`` or ``"sharded"``) says which are written; both are read.
    `_engine` runs the plan while `_running`; `_fitted` is that of the last fit, which knows its
    optimizers: an evaluation may have one of its own. A state that is loaded before there is an
    engine is kept in `_resumed` for it; where `_holds_back`, optimizers get all but their tensors,
    which may be too large to be whole on the device.
    """

    parallel_plan: ParallelPlan | None = None
    checkpoint_form = "full"
    _engine: Engine | None = None
    _fitted: Engine | None = None
    _running = False
    _holds_back = False
    _resumed: Mapping[str, Any] | None = None

    def __init__(self, **ddp_options: Any) -> None:
        super().__init__(**ddp_options)
        self.rank_watch = LostRankWatch()
        self._guard = ExchangeGuard(self.rank_watch)

    @property
    def exchange(self) -> CompressedExchange | None:
        """The exchange of the plan's gradients, None where that has none."""
        return self._guard.exchange

    def exchange_statistics(self) -> ExchangeStatistics | None:
        """Return what was exchanged since the last call; None without an exchange."""
        return self._guard.statistics()

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
        super().setup_environment()
        self.rank_watch.begin()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._guard.give_up(exception)
        self.rank_watch.name(exception)
        super().on_exception(exception)
        name_own_strategy(exception, type(self).__name__)

    @override
    def teardown(self) -> None:
        if self._start_method != "popen":  # such ranks end without running what `atexit` holds
            self._guard.close()
        with self.rank_watch.last():
            super().teardown()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._guard.errors():
            return super().training_step(*args, **kwargs)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        self._guard.begin_backward(self.precision_plugin)
        with self._guard.errors():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._guard.end_step(self.precision_plugin)
        return output

    def _load_exchange(self, checkpoint: Mapping[str, Any]) -> None:
        self._guard.load_state(checkpoint)

    def _attach_optimizers(self) -> None:
        """Let the engine run the optimizers of this fit."""
        assert self._engine is not None
        self._engine.attach_optimizers(self.optimizers)
        self._fitted = self._engine

    def _release_engine(self, *, failed: bool = False) -> None:
        """Unshard the module if an engine runs it.

        So is the state of optimizers that are used after the fit. Where it has `failed`, other
        ranks may be anywhere: states stay where they are.
        """
        if self._engine is None or not self._running:
            return
        # The device may not hold the unsharded parameters beside the state.
        if self.root_device.type != "cpu":
            self._engine.optimizer_state_to_host()
        self._running = False
        model, self.model = self.model, self.lightning_module
        self._engine.release()
        for optimizer in self.optimizers:
            if not failed and self.model is not None and _is_held_by(self.model, optimizer):
                self._engine.return_optimizer_state(optimizer)
        if isinstance(model, DistributedDataParallel):
            self.model = model  # the superclass unwraps it

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._engine is not None and self._running:
            return self._engine.module_state(full=self.checkpoint_form == "full")
        return super().lightning_module_state_dict()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._engine is not None and self._running:
            self._engine.load_module_state(checkpoint["state_dict"], strict=strict)
            return
        state = checkpoint["state_dict"]
        if isinstance(state, StoredModule):
            checkpoint = {**checkpoint, "state_dict": state.read()}
        super().load_model_state_dict(checkpoint, strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        # Loaded before there was an engine, and not used since.
        if self._engine is None and self._holds_back and self._resumed is not None:
            return _whole(self._resumed["optimizer_states"][self.optimizers.index(optimizer)])
        if self._fitted is None:
            return super().optimizer_state(optimizer)
        return self._fitted.optimizer_state(optimizer, full=self.checkpoint_form == "full")

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        # The engine takes full and sharded states.
        if self._engine is not None:
            for optimizer, state in zip(self.optimizers, states, strict=False):
                self._engine.load_optimizer_state(optimizer, state)
            self._load_exchange(checkpoint)
            _optimizers_to_device(self.optimizers, self.root_device)
            return
        # Optimizers get learning rates and the like now, and the tensors with the engine.
        if self._holds_back:
            for optimizer, state in zip(self.optimizers, states, strict=False):
                optimizer.load_state_dict({"state": {}, "param_groups": state["param_groups"]})
        else:
            super().load_optimizer_state_dict(
                {**checkpoint, "optimizer_states": [_whole(state) for state in states]}
            )
        self._resumed = {
            name: checkpoint[name]
            for name in ("optimizer_states", CHECKPOINT_KEY)
            if name in checkpoint
        }

    def _load_resumed(self) -> None:
        """Give a new engine what was loaded before it was there."""
        assert self._engine is not None
        checkpoint, self._resumed = self._resumed, None
        if checkpoint is None:
            return
        # The tensors that optimizers did not get; their options are the present ones.
        if self._holds_back:
            for optimizer, state in zip(
                self.optimizers, checkpoint["optimizer_states"], strict=False
            ):
                # user code may have changed them since
                options = [dict(group) for group in optimizer.param_groups]
                self._engine.load_optimizer_state(optimizer, state)
                for group, before in zip(optimizer.param_groups, options, strict=True):
                    group.update(
                        {name: value for name, value in before.items() if name != "params"}
                    )
            _optimizers_to_device(self.optimizers, self.root_device)
        self._load_exchange(checkpoint)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        # A checkpoint of a Trainer names Lightning's version; bare weights (sent back by forked
        # ranks) stay bare.
        if self.parallel_plan is not None and "pytorch-lightning_version" in checkpoint:
            # The user's hooks were given `checkpoint`, and may keep it.
            checkpoint = {**checkpoint, CHECKPOINT_KEY: self._own_state()}
            if self.checkpoint_form == "full":
                self._guard.add_state(checkpoint, self.lightning_module)
        if self.checkpoint_form == "sharded" and "pytorch-lightning_version" in checkpoint:
            self._save_folder(checkpoint, filepath, storage_options)
            return
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def _own_state(self) -> dict[str, Any]:
        """Return what the strategy adds to a file: its plan."""
        assert self.parallel_plan is not None
        return {"plan": self.parallel_plan.to_dict()}

    def _save_folder(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None
    ) -> None:
        # torch.distributed.checkpoint writes for all ranks.
        if storage_options is not None or type(self.checkpoint_io) is not TorchCheckpointIO:
            raise ValueError(
                "sharded checkpoints are written by torch.distributed.checkpoint, which takes "
                "neither storage_options nor a "
                'checkpoint_io plugin: leave them out, or use checkpoint="full"'
            )
        if "://" in str(filepath):
            raise ValueError(
                "sharded checkpoints are folders on a file system that all ranks see, and "
                f"{str(filepath)!r} is none: save to "
                'a path there, or use checkpoint="full"'
            )
        rest = {
            name: value
            for name, value in checkpoint.items()
            if name not in ("state_dict", "optimizer_states")
        }
        save_sharded(
            filepath,
            module=checkpoint["state_dict"],
            optimizers=checkpoint.get("optimizer_states", []),
            exchange=self.exchange.own_state_dict()
            if self.exchange and self._guard.saves_state(checkpoint, self.lightning_module)
            else None,
            rest=rest,
            save_rest=self.checkpoint_io.save_checkpoint,
        )

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if not holds_shards(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, *args, **kwargs)
        rest = super().load_checkpoint(Path(checkpoint_path) / REST, *args, **kwargs)
        return open_sharded(checkpoint_path, rest)


def _whole(state: Mapping[str, Any]) -> dict[str, Any]:
    return state.whole() if isinstance(state, StoredOptimizer) else dict(state)


def _is_held_by(module: nn.Module, optimizer: Optimizer) -> bool:
    """Return whether an attribute of `module` is, or directly holds, `optimizer`.

    Then it may be used after the fit.
    """
    for submodule in module.modules():
        for value in vars(submodule).values():
            held = (
                value.values()
                if isinstance(value, dict)
                else value
                if isinstance(value, (list, tuple))
                else (value,)
            )
            if any(item is optimizer for item in held):
                return True
    return False
