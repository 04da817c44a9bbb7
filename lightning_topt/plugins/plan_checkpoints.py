"""Checkpoints of a strategy whose plan comes with the first training batch, or later.

    full      the plain file of ddp: rank 0 collects the state of all ranks
    sharded   a folder, to which every rank writes what it keeps

Both have the plan, and are loaded under any plan and number of ranks; before, with and after the
engine that runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.optim import Optimizer

from lightning_topt.basics.argument_checks import check_choice
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.sharded_checkpoint import (
    StoredOptimizer,
    holds_shards,
    open_sharded,
    save_sharded,
)
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plugins.exchange_guard import CHECKPOINT_KEY, ExchangeGuard
from lightning_topt.plugins.step_runner import PlainRunner, StepRunner


class PlanCheckpoints:
    """Saves and loads what a plan runs.

    `engine` is that of the present plan, also once it is released. A state that is loaded before
    there is one is kept for it.

    Args:
        form: ``"full"`` or ``"sharded"``: which are written; both are read.
        guard: of the exchange whose state is saved too.

    Raises ValueError for another form.
    """

    def __init__(self, form: str, guard: ExchangeGuard) -> None:
        check_choice(form, name="checkpoint", allowed=("full", "sharded"))
        self.form = form
        self.engine: Engine | None = None
        # Whether optimizers that are loaded get all but their tensors, until there is an engine:
        # the device may not have room for unsharded ones.
        self.defers_states = False
        self.guard = guard
        self._runner: StepRunner = PlainRunner()
        # That of the last fit, which knows its optimizers: an evaluation may have one of its own.
        self._fitted: Engine | None = None
        self._resumed: Mapping[str, Any] | None = None

    @property
    def are_full(self) -> bool:
        """Whether plain files are written."""
        return self.form == "full"

    # ---- a fit, and its plan ---------------------------------------------------------------------

    def begin_fit(self, *, defers_states: bool) -> None:
        """Forget the last fit, and take over whether this one `defers_states`."""
        for engine in (self.engine, self._fitted):
            if engine is not None:
                engine.close()
        self.defers_states = defers_states
        self.engine = self._fitted = self._resumed = None
        self._runner = PlainRunner()

    def begin_plan(self, engine: Engine) -> None:
        """Know the engine of the present plan."""
        if self.engine is not None and self.engine is not self._fitted:  # of an evaluation
            self.engine.close()
        self.engine = engine

    def end_plan(self) -> None:
        """Know that nothing runs the plan any more; its engine still has the states."""
        self._runner = PlainRunner()

    def attach_optimizers(self, runner: StepRunner, optimizers: Sequence[Optimizer]) -> None:
        """Let the engine of `runner` run the optimizers of this fit."""
        assert runner.engine is not None
        runner.engine.attach_optimizers(optimizers)
        self._fitted, self._runner = runner.engine, runner

    def load_resumed(self, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        """Give a new engine what was loaded before it was there."""
        assert self.engine is not None
        checkpoint, self._resumed = self._resumed, None
        if checkpoint is None:
            return
        # The tensors that optimizers did not get; their options are the present ones.
        if self.defers_states:
            for optimizer, state in zip(optimizers, checkpoint["optimizer_states"], strict=False):
                # user code may have changed them since
                options = [dict(group) for group in optimizer.param_groups]
                self.engine.load_optimizer_state(optimizer, state)
                for group, before in zip(optimizer.param_groups, options, strict=True):
                    group.update(
                        {name: value for name, value in before.items() if name != "params"}
                    )
            _optimizers_to_device(optimizers, device)
        self._load_own(checkpoint)

    # ---- states ----------------------------------------------------------------------------------

    def optimizer_state(
        self,
        optimizer: Optimizer,
        optimizers: Sequence[Optimizer],
        *,
        without_plan: Callable[[Optimizer], dict[str, Any]],
    ) -> dict[str, Any]:
        """Return the state of one of `optimizers`; that of `without_plan` where none has begun."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        # Loaded before there was an engine, and not used since.
        if self.engine is None and self.defers_states and self._resumed is not None:
            return _whole(self._resumed["optimizer_states"][optimizers.index(optimizer)])
        if self._fitted is None:
            return without_plan(optimizer)
        return self._fitted.optimizer_state(optimizer, full=self.are_full)

    def load_optimizer_states(
        self,
        checkpoint: Mapping[str, Any],
        strategy: Strategy,
        *,
        without_plan: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Load the states of the optimizers, of the exchange and of the runner.

        By `without_plan` where no plan has begun.
        """
        states, optimizers = checkpoint["optimizer_states"], strategy.optimizers
        # The engine takes full and sharded states.
        if self.engine is not None:
            for optimizer, state in zip(optimizers, states, strict=False):
                self.engine.load_optimizer_state(optimizer, state)
            self._load_own(checkpoint)
            _optimizers_to_device(optimizers, strategy.root_device)
            return
        # Optimizers get learning rates and the like now, and the tensors with the engine.
        if self.defers_states:
            for optimizer, state in zip(optimizers, states, strict=False):
                optimizer.load_state_dict({"state": {}, "param_groups": state["param_groups"]})
        else:
            without_plan({**checkpoint, "optimizer_states": [_whole(state) for state in states]})
        self._resumed = {
            name: checkpoint[name]
            for name in ("optimizer_states", CHECKPOINT_KEY)
            if name in checkpoint
        }

    def _load_own(self, checkpoint: Mapping[str, Any]) -> None:
        self.guard.load_state(checkpoint)
        self._runner.load_state_dict(checkpoint.get(CHECKPOINT_KEY, {}))

    # ---- files and folders -----------------------------------------------------------------------

    def save(
        self,
        checkpoint: dict[str, Any],
        path: Any,
        storage_options: Any | None,
        strategy: Strategy,
        *,
        plan: ParallelPlan | None,
        runner: StepRunner,
        as_file: Callable[..., None],
    ) -> None:
        """Save `checkpoint` of `strategy` with the `plan` that `runner` runs.

        One that is no folder is saved by `as_file`.

        A collective call.
        """
        # A checkpoint of a Trainer names Lightning's version; bare weights (sent back by forked
        # ranks) stay bare.
        is_bare, module = "pytorch-lightning_version" not in checkpoint, strategy.lightning_module
        if plan is not None and not is_bare:
            # The user's hooks were given `checkpoint`, and may keep it.
            own = {"plan": plan.to_dict(), **runner.state_dict()}
            checkpoint = {**checkpoint, CHECKPOINT_KEY: own}
            if self.are_full:
                self.guard.add_state(checkpoint, module)
        if is_bare or self.are_full:
            as_file(checkpoint, path, storage_options=storage_options)
        elif storage_options is not None or type(strategy.checkpoint_io) is not TorchCheckpointIO:
            # torch.distributed.checkpoint writes for all ranks.
            raise ValueError(
                "sharded checkpoints are written by torch.distributed.checkpoint, which takes "
                "neither storage_options nor a "
                'checkpoint_io plugin: leave them out, or use checkpoint="full"'
            )
        else:
            self._save_folder(checkpoint, path, strategy)

    def load(self, path: Any, load: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
        """Return the checkpoint at `path`, a file or a folder, of which `load` reads plain files.

        `args` are those of `load` after the path.
        """
        if not holds_shards(path):
            return load(path, *args)
        return open_sharded(path, lambda rest: load(rest, *args))

    def _save_folder(self, checkpoint: dict[str, Any], folder: Any, strategy: Strategy) -> None:
        """Let every rank write what it keeps of `checkpoint`."""
        if "://" in str(folder):
            raise ValueError(
                "sharded checkpoints are folders on a file system that all ranks see, and "
                f"{str(folder)!r} is none: save to "
                'a path there, or use checkpoint="full"'
            )
        rest = {
            name: value
            for name, value in checkpoint.items()
            if name not in ("state_dict", "optimizer_states")
        }
        exchange = self.guard.exchange
        save_sharded(
            folder,
            module=checkpoint["state_dict"],
            optimizers=checkpoint.get("optimizer_states", []),
            exchange=exchange.own_state_dict()
            if exchange and self.guard.saves_state(checkpoint, strategy.lightning_module)
            else None,
            rest=rest,
            save_rest=strategy.checkpoint_io.save_checkpoint,
        )


def release_engine(
    engine: Engine,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    device: torch.device,
    failed: bool,
) -> None:
    """Unshard `module`, and the state of optimizers that are used after the fit.

    Where the run has `failed`, other ranks may be anywhere: states stay where they are.
    """
    # The device may not hold the unsharded parameters beside the state.
    if device.type != "cpu":
        engine.optimizer_state_to_host()
    engine.release()
    for optimizer in optimizers:
        if not failed and _is_held_by(module, optimizer):
            engine.return_optimizer_state(optimizer)


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
