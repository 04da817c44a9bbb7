"""Checkpoints of a strategy, whatever plan runs.

    full      the plain file of ddp: rank 0 collects the state of all ranks
    sharded   a folder, to which every rank writes what it keeps

Both have the plan, and are loaded under any plan and number of ranks. So are plain files of other
strategies. Full ones are written beside training by Lightning's plugin `AsyncCheckpointIO`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_topt.basics.argument_checks import check_choice
from lightning_topt.plugins.data_parallel_hooks import ExchangeGuard
from lightning_topt.plugins.plan_run import PlanRun
from lightning_topt.plugins.training_data import CHECKPOINT_KEY


class PlanCheckpoints:
    """Saves and loads what a plan runs.

    Args:
        form: ``"full"`` or ``"sharded"``: which are written; both are read.
        run: of the plan.
        guard: of the exchange whose state is saved too.

    Raises ValueError for another form.
    """

    def __init__(self, form: str, run: PlanRun, guard: ExchangeGuard) -> None:
        check_choice(form, name="checkpoint", allowed=("full", "sharded"))
        self.form, self._run, self._guard = form, run, guard

    @property
    def are_full(self) -> bool:
        """Whether plain files are written."""
        return self.form == "full"

    # ---- states ----------------------------------------------------------------------------------

    def module_state(
        self, module: pl.LightningModule | None, *, without_plan: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the state of the module, in the form of checkpoints."""
        engine = self._run.engine_of_module
        trains_alone = engine is not None and engine.plan.local_steps is not None
        # Before ranks meet: the others may be anywhere.
        if trains_alone and module is not None and module.trainer.interrupted:
            raise RuntimeError(
                "ranks were training alone when the fit was interrupted, so that each has other "
                "parameters: go on from the last checkpoint"
            )
        self._run.runner.drain()  # for files that user code writes when it likes
        return without_plan() if engine is None else engine.module_state(full=self.are_full)

    def load_module_state(
        self, checkpoint: Mapping[str, Any], *, without_plan: Callable[..., None], strict: bool
    ) -> None:
        """Load the state of the module, of either form."""
        state = checkpoint["state_dict"]
        if self._run.engine is not None:
            self._run.engine.load_module_state(state, strict=strict)
            return
        if not isinstance(state, dict):  # stored in a checkpoint folder
            checkpoint = {**checkpoint, "state_dict": state.read()}
        without_plan(checkpoint, strict=strict)

    def optimizer_state(
        self, optimizer: Optimizer, *, without_plan: Callable[[Optimizer], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the state of an optimizer; that of `without_plan` where no plan runs it."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if (engine := self._run.last_engine) is None:
            return without_plan(optimizer)
        return engine.optimizer_state(optimizer, full=self.are_full)

    def load_optimizer_states(
        self,
        checkpoint: Mapping[str, Any],
        strategy: Strategy,
        *,
        without_plan: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Load the states of the optimizers, of the exchange and of the runner.

        By `without_plan` where no plan runs.
        """
        optimizers = strategy.optimizers
        states = [*map(_numbered, checkpoint["optimizer_states"])]
        checkpoint = {**checkpoint, "optimizer_states": states}
        # The engine takes full and sharded states.
        if (engine := self._run.last_engine) is not None:
            for optimizer, state in zip(optimizers, states, strict=False):
                engine.load_optimizer_state(optimizer, state)
            self._guard.load_state(checkpoint)
            self._run.runner.load_state_dict(checkpoint.get(CHECKPOINT_KEY, {}))
            _optimizers_to_device(optimizers, strategy.root_device)
            return
        # else a state is stored in a checkpoint folder
        full = [dict(each) if isinstance(each, dict) else each.read() for each in states]
        without_plan({**checkpoint, "optimizer_states": full})

    # ---- files and folders -----------------------------------------------------------------------

    def save(
        self,
        checkpoint: dict[str, Any],
        path: Any,
        storage_options: Any | None,
        strategy: Strategy,
        *,
        as_file: Callable[..., None],
    ) -> None:
        """Save `checkpoint` of `strategy` with the plan that runs.

        One that is no folder is saved by `as_file`.

        A collective call.
        """
        run = self._run
        # A checkpoint of a Trainer names Lightning's version; bare weights (sent back by forked
        # ranks) stay bare.
        is_bare, module = "pytorch-lightning_version" not in checkpoint, strategy.lightning_module
        if run.plan is not None and not is_bare:
            # The user's hooks were given `checkpoint`, and may keep it.
            own = {"plan": run.plan.to_dict(), **run.runner.state_dict()}
            own = {**checkpoint.get(CHECKPOINT_KEY, {}), **own}
            checkpoint = {**checkpoint, CHECKPOINT_KEY: own}
        if not is_bare and run.last_engine is not None and module is not None:
            checkpoint = _without_modules(checkpoint, module)
        if is_bare or self.are_full:
            save_file(strategy, checkpoint, path, as_file, storage_options=storage_options)
        else:
            self._save_sharded(checkpoint, path, storage_options, strategy)

    def load(self, path: Any, load: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
        """Return the checkpoint at `path`, a file or a folder, of which `load` reads plain files.

        `args` are those of `load` after the path.
        """
        from lightning_topt.execution.sharded_checkpoint import is_folder, open_sharded  # noqa: PLC0415  (resumed)

        if not is_folder(path):
            return load(path, *args)
        return open_sharded(path, lambda rest: load(rest, *args))

    def remove(self, path: Any, remove: Callable[[Any], None], strategy: Strategy) -> None:
        """Remove the checkpoint at `path`, on rank 0; by `remove` where it is no folder of ours."""
        from lightning_topt.execution.checkpoint_files import holds_shards, remove_folder  # noqa: PLC0415  (a folder)

        if strategy.is_global_zero:
            (remove_folder if holds_shards(path) else remove)(path)

    def _save_sharded(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any, strategy: Strategy
    ) -> None:
        from lightning_topt.execution.sharded_checkpoint import save_sharded  # noqa: PLC0415

        if storage_options is not None or type(strategy.checkpoint_io) is not TorchCheckpointIO:
            # torch.distributed.checkpoint writes for all ranks.
            raise ValueError(
                "sharded checkpoints are written by torch.distributed.checkpoint, which takes "
                "neither storage_options nor a checkpoint_io plugin: leave them out (fsspec reads "
                "options of an object store from its own configuration files and the environment), "
                'or use checkpoint="full"'
            )
        exchange = self._guard.exchange
        saves_exchange = self._guard.saves_state(checkpoint, strategy.lightning_module)
        save_sharded(
            path,
            module=checkpoint["state_dict"],
            optimizers=checkpoint.get("optimizer_states", []),
            exchange=exchange.own_state_dict() if exchange and saves_exchange else None,
            rest={
                name: value
                for name, value in checkpoint.items()
                if name not in ("state_dict", "optimizer_states")
            },
            save_rest=strategy.checkpoint_io.save_checkpoint,
        )


def save_file(
    strategy: Strategy, checkpoint: dict[str, Any], path: Any, save: Any, **options: Any
) -> None:
    """Save a full checkpoint by ``save(checkpoint, path, **options)``.

    A sharded one that is at `path` stays until the file is whole. Lightning would write the file
    into its folder.
    """
    from lightning_topt.execution.checkpoint_files import holds_shards, replace_by_file  # noqa: PLC0415  (a folder)

    if not strategy.is_global_zero or not holds_shards(path):
        save(checkpoint, path, **options)
        return
    if type(strategy.checkpoint_io) is not TorchCheckpointIO:
        raise ValueError(
            f"{str(path)!r} is the folder of a sharded checkpoint, which a checkpoint_io plugin "
            "does not replace by a file: remove it, or save under another name"
        )
    replace_by_file(path, lambda file: save(checkpoint, file, **options))


def load_whole(path: Any, weights_only: bool | None = None, *, load: Any) -> dict[str, Any]:
    """Return the checkpoint at `path`, a file or a folder, as one process has it."""
    from lightning_topt.execution.sharded_checkpoint import is_folder, read_sharded_checkpoint  # noqa: PLC0415  (resumed)

    if is_folder(path):
        return read_sharded_checkpoint(path, weights_only=weights_only is not False)
    checkpoint: dict[str, Any] = load(path, weights_only)
    return checkpoint


def _without_modules(checkpoint: dict[str, Any], module: pl.LightningModule) -> dict[str, Any]:
    # `checkpoint` without the hyper parameters that hold modules of the running `module`. A plan
    # changes those in place, and the state is in the checkpoint anyway
    key, running = pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, set(module.modules())
    stored = checkpoint.get(key) or {}
    if not isinstance(stored, dict):  # OmegaConf's hold no modules
        return checkpoint
    held = [name for name, value in stored.items() if running & {*_modules_of(value)}]
    if not held:
        return checkpoint
    given = ", ".join(f"{name}=..." for name in held)
    rank_zero_warn(
        f"checkpoints leave out the hyper parameters {held}, which hold modules of the model: load "
        f"them by load_from_checkpoint(path, {given})"
    )
    return {**checkpoint, key: {name: v for name, v in stored.items() if name not in held}}


def _modules_of(value: object) -> Iterator[nn.Module]:
    # Yield the modules that `value` is, or has in it as a container, and theirs
    if isinstance(value, nn.Module):
        yield from value.modules()
    elif isinstance(value, (Mapping, list, tuple, set)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _modules_of(part)


def _numbered(state: Any) -> Any:
    # The state of an optimizer by the positions of its parameters, as ddp has it. Lightning's
    # FSDPStrategy numbers them in the module's order, or names them
    if not isinstance(state, dict):  # stored in a checkpoint folder
        return state
    indices = [index for group in state["param_groups"] for index in group["params"]]
    if indices == list(range(len(indices))):
        return state
    position = {index: place for place, index in enumerate(indices)}
    return {
        **state,
        "state": {position[index]: values for index, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [position[index] for index in group["params"]]}
            for group in state["param_groups"]
        ],
    }
