"""Checkpoints of a strategy whose plan comes with the first training batch, or later.

    full      the plain file of ddp: rank 0 collects the state of all ranks
    sharded   a folder, to which every rank writes what it keeps

Both have the plan, and are loaded under any plan and number of ranks; before, with and after the
engine that runs it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_topt.basics.argument_checks import check_choice
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.sharded_checkpoint import (
    StoredOptimizer,
    holds_shards,
    open_sharded,
    read_sharded_checkpoint,
    replace_by_file,
    save_sharded,
)
from lightning_topt.graph.module_copy import is_on_meta
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
        self._arguments = _ModuleArguments()
        self._runner: StepRunner = PlainRunner()
        # That of the last fit, which knows its optimizers: an evaluation may have one of its own.
        self._fitted: Engine | None = None
        self._resumed: Mapping[str, Any] | None = None

    @property
    def are_full(self) -> bool:
        """Whether plain files are written."""
        return self.form == "full"

    # ---- a fit, and its plan ---------------------------------------------------------------------

    def begin_fit(self, module: pl.LightningModule, *, defers_states: bool) -> None:
        """Forget the last fit, and take over whether this one, of `module`, `defers_states`."""
        self._arguments = _ModuleArguments(module)
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
            own = {**checkpoint.get(CHECKPOINT_KEY, {}), **own}
            checkpoint = {**checkpoint, CHECKPOINT_KEY: own}
            if self.are_full:
                self.guard.add_state(checkpoint, module)
        if not is_bare and strategy.is_global_zero:  # which saves them
            checkpoint = self._arguments.replaced(checkpoint, fill=self.are_full)
        if is_bare or self.are_full:
            save_file(strategy, checkpoint, path, as_file, storage_options=storage_options)
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


def save_file(
    strategy: Strategy, checkpoint: dict[str, Any], path: Any, save: Any, **options: Any
) -> None:
    """Save a full checkpoint by ``save(checkpoint, path, **options)``.

    A sharded one that is at `path` stays until the file is whole. Lightning would write the file
    into its folder.
    """
    if not strategy.is_global_zero or not holds_shards(path):
        save(checkpoint, path, **options)
        return
    if type(strategy.checkpoint_io) is not TorchCheckpointIO:
        raise ValueError(
            f"{str(path)!r} is the folder of a sharded checkpoint, which a checkpoint_io plugin "
            "does not replace by a file: remove it, or save under another name"
        )
    replace_by_file(Path(path), lambda file: save(checkpoint, file, **options))


def load_whole(path: Any, weights_only: bool | None = None, *, load: Any) -> dict[str, Any]:
    """Return the checkpoint at `path`, a file or a folder, as one process has it."""
    if holds_shards(path):
        return read_sharded_checkpoint(path, weights_only=weights_only is not False)
    checkpoint: dict[str, Any] = load(path, weights_only)
    return checkpoint


class _ModuleArguments:
    """Hyper parameters that hold modules of the model which a fit runs, as the fit found them.

    A plan changes those modules in place, for instance their classes. ddp saves them whole, and so
    does a full checkpoint: copies without memory, made here, get the tensors of its state.

    Args:
        module: whose they are; None where there is no fit.
    """

    def __init__(self, module: pl.LightningModule | None = None) -> None:
        # by name: the value, and its copy, or None where it cannot be copied
        self._found: dict[str, tuple[object, Any]] = {}
        self._stand_ins: dict[str, Tensor] = {}  # of parameters and buffers, by their names
        hparams = {} if module is None else module.hparams
        if module is None or not isinstance(hparams, dict):  # OmegaConf's hold no modules
            return
        running = set(module.modules()) - {module}
        held = {name: value for name, value in hparams.items() if running & {*_modules_of(value)}}
        if not held:
            return
        memo: dict[int, Any] = {}
        for prefix, part in module.named_modules():
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                is_saved = tensor is not None and name not in part._non_persistent_buffers_set
                if is_saved and id(tensor) not in memo:
                    stand_in = torch.empty(0, device="meta")
                    if isinstance(tensor, nn.Parameter):
                        stand_in = nn.Parameter(stand_in, requires_grad=tensor.requires_grad)
                    memo[id(tensor)] = stand_in
                    self._stand_ins[f"{prefix}.{name}" if prefix else name] = stand_in
        for name, value in held.items():
            self._found[name] = value, _copied(value, memo)

    def replaced(self, checkpoint: dict[str, Any], *, fill: bool) -> dict[str, Any]:
        """Return `checkpoint` with copies in the place of modules, which get its state.

        Without `fill`, and where there is no copy or not all of the state, they are left out.
        """
        key = pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY
        # what hooks of the user have left in the checkpoint
        stored = dict(checkpoint.get(key) or {})
        names = [name for name, (value, _) in self._found.items() if stored.get(name) is value]
        if not names:
            return checkpoint
        memo: dict[int, Any] = {}
        for name, stand_in in self._stand_ins.items():
            if fill and isinstance(tensor := checkpoint["state_dict"].get(name), Tensor):
                is_parameter = isinstance(stand_in, nn.Parameter)
                memo[id(stand_in)] = (
                    nn.Parameter(tensor, stand_in.requires_grad) if is_parameter else tensor
                )
        missing = []
        for name in names:
            # one memo: what the values share is shared by their copies
            stored[name] = copied = _copied(self._found[name][1], memo)
            if copied is None or any(is_on_meta(part) for part in _modules_of(copied)):
                del stored[name]
                missing.append(name)
        if missing:
            given = ", ".join(f"{name}=..." for name in missing)
            rank_zero_warn(
                f"checkpoints leave out the hyper parameters {missing}, which hold modules of the "
                f"model: load them by load_from_checkpoint(path, {given}). "
                f"self.save_hyperparameters(ignore={missing}) leaves them out without this warning"
            )
        return {**checkpoint, key: stored}


def _modules_of(value: object) -> Iterator[nn.Module]:
    """Yield the modules that `value` is, or has in it as a container, and theirs."""
    if isinstance(value, nn.Module):
        yield from value.modules()
    elif isinstance(value, (Mapping, list, tuple, set)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _modules_of(part)


def _copied(value: object, memo: dict[int, Any]) -> Any:
    """Return a deep copy of `value`, in which `memo` replaces objects; None where it has none."""
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # whatever code of a user's class raises
        return None


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
