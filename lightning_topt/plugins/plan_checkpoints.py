"""Checkpoints of a strategy, whatever plan runs.

    full      the plain file of ddp: rank 0 collects the state of all ranks
    sharded   a folder, to which every rank writes what it keeps

Both have the plan, and are loaded under any plan and number of ranks. So are plain files of other
strategies. During a fit they may be written in the background, while it
goes on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_topt.basics.argument_checks import check_choice
from lightning_topt.communication.topology import destroy_groups
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plugins.exchange_guard import CHECKPOINT_KEY, ExchangeGuard
from lightning_topt.plugins.step_runner import PlainRunner, StepRunner

if TYPE_CHECKING:
    from lightning_topt.execution.background_save import BackgroundSaves
    from lightning_topt.execution.engine import Engine

FAILED_SECONDS = 30.0  # that a fit which failed waits for saves in the background


class PlanCheckpoints:
    """Saves and loads what a plan runs.

    `engine` is that of the present plan, also once it is released.

    Args:
        form: ``"full"`` or ``"sharded"``: which are written; both are read.
        guard: of the exchange whose state is saved too.
        in_background: whether a fit goes on while they are written.

    Raises ValueError for another form.
    """

    def __init__(self, form: str, guard: ExchangeGuard, *, in_background: bool) -> None:
        check_choice(form, name="checkpoint", allowed=("full", "sharded"))
        if not isinstance(in_background, bool):
            raise ValueError(f"async_checkpoint is True or False, not {in_background!r}")
        self.form, self._in_background = form, in_background
        self._background: BackgroundSaves | None = None
        self._group: dist.ProcessGroup | None = None  # of the thread that writes
        self.engine: Engine | None = None
        self.guard = guard
        self._arguments = _ModuleArguments()
        self._runner: StepRunner = PlainRunner()
        # That of the last fit, which knows its optimizers: an evaluation may have one of its own.
        self._fitted: Engine | None = None

    @property
    def are_full(self) -> bool:
        """Whether plain files are written."""
        return self.form == "full"

    # ---- a fit, and its plan ---------------------------------------------------------------------

    def begin_fit(self, module: pl.LightningModule) -> None:
        """Forget the last fit; this one is of `module`."""
        self._arguments = _ModuleArguments(module)
        for engine in (self.engine, self._fitted):
            if engine is not None:
                engine.close()
        self.engine = self._fitted = None
        self._runner = PlainRunner()

    def begin_plan(self, engine: Engine) -> None:
        """Know the engine of the present plan."""
        if self.engine is not None and self.engine is not self._fitted:  # of an evaluation
            self.engine.close()
        self.engine = engine

    def end_plan(self) -> None:
        """Know that nothing runs the plan any more; its engine still has the states."""
        self._runner = PlainRunner()

    def begin_steps(self, runner: StepRunner) -> None:
        """Know what runs the steps of this fit: its engine has the optimizers by now."""
        self._fitted, self._runner = runner.engine, runner

    # ---- states ----------------------------------------------------------------------------------

    def optimizer_state(
        self,
        optimizer: Optimizer,
        *,
        without_plan: Callable[[Optimizer], dict[str, Any]],
    ) -> dict[str, Any]:
        """Return the state of an optimizer; that of `without_plan` where no plan runs it."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
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

        By `without_plan` where no plan runs.
        """
        optimizers = strategy.optimizers
        states = [*map(_numbered, checkpoint["optimizer_states"])]
        checkpoint = {**checkpoint, "optimizer_states": states}
        # The engine takes full and sharded states.
        if self.engine is not None:
            for optimizer, state in zip(optimizers, states, strict=False):
                self.engine.load_optimizer_state(optimizer, state)
            self._load_own(checkpoint)
            _optimizers_to_device(optimizers, strategy.root_device)
            return
        without_plan({**checkpoint, "optimizer_states": [_whole(state) for state in states]})

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
        later = not is_bare and self._may_go_on(strategy)
        self._meet_background(strategy, waits=not later)
        if later:
            self._save_later(checkpoint, path, storage_options, strategy)
        elif is_bare or self.are_full:
            if _writes_later(strategy):  # by its plugin, which is to write now
                as_file = partial(_save_now, strategy)
            save_file(strategy, checkpoint, path, as_file, storage_options=storage_options)
        else:
            from lightning_topt.execution.sharded_checkpoint import write_state  # noqa: PLC0415

            state, save_rest = self._collected(checkpoint, storage_options, strategy)
            write_state(path, state, save_rest=save_rest)

    def load(self, path: Any, load: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
        """Return the checkpoint at `path`, a file or a folder, of which `load` reads plain files.

        `args` are those of `load` after the path.
        """
        from lightning_topt.execution.sharded_checkpoint import (  # noqa: PLC0415  (resumed)
            is_folder,
            open_sharded,
        )

        if self._background is not None:
            self._background.wait()
        if not is_folder(path):
            return load(path, *args)
        return open_sharded(path, lambda rest: load(rest, *args))

    def remove(self, path: Any, remove: Callable[[Any], None], strategy: Strategy) -> None:
        """Remove the checkpoint at `path`, on rank 0; by `remove` where it is no folder of ours.

        Where newer ones are still being written, it stays until they are complete.
        """

        def act() -> None:
            from lightning_topt.execution.checkpoint_files import (  # noqa: PLC0415  (a folder)
                holds_shards,
                remove_folder,
            )

            if holds_shards(path):
                remove_folder(path)
            else:
                remove(path)

        if not strategy.is_global_zero:
            return
        if self._background is None:
            act()
        else:
            self._background.then(act)

    def _collected(
        self, checkpoint: dict[str, Any], storage_options: Any, strategy: Strategy
    ) -> tuple[dict[str, Any], Callable[..., None]]:
        # What ranks write of a sharded checkpoint, and what writes the rest of it
        from lightning_topt.execution.sharded_checkpoint import collect_state  # noqa: PLC0415

        plain_io = _plain_io(strategy)
        if storage_options is not None or type(plain_io) is not TorchCheckpointIO:
            # torch.distributed.checkpoint writes for all ranks.
            raise ValueError(
                "sharded checkpoints are written by torch.distributed.checkpoint, which takes "
                "neither storage_options nor a checkpoint_io plugin but AsyncCheckpointIO: leave "
                "them out (fsspec reads options of an object store from its own configuration "
                'files and the environment), or use checkpoint="full"'
            )
        rest = {
            name: value
            for name, value in checkpoint.items()
            if name not in ("state_dict", "optimizer_states")
        }
        exchange = self.guard.exchange
        state = collect_state(
            module=checkpoint["state_dict"],
            optimizers=checkpoint.get("optimizer_states", []),
            exchange=exchange.own_state_dict()
            if exchange and self.guard.saves_state(checkpoint, strategy.lightning_module)
            else None,
            rest=rest,
        )
        return state, plain_io.save_checkpoint

    # ---- in the background -----------------------------------------------------------------------

    def _may_go_on(self, strategy: Strategy) -> bool:
        """Return whether the fit goes on while a checkpoint is written. A collective call.

        Not where it ends after this one: by a signal, of which ranks may know at different times.
        """
        assert strategy.lightning_module is not None
        trainer = strategy.lightning_module.trainer
        return (
            (self._in_background or _writes_later(strategy))
            and trainer.state.fn == TrainerFn.FITTING
            and trainer.state.status == TrainerStatus.RUNNING
            and not strategy.reduce_boolean_decision(trainer.received_sigterm, all=False)
        )

    def _save_later(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any, strategy: Strategy
    ) -> None:
        # Copy what this rank keeps of `checkpoint`, which a thread writes. A collective call.
        from lightning_topt.execution.background_save import BackgroundSaves  # noqa: PLC0415

        if self._background is None:
            self._background = BackgroundSaves()
        if self.are_full:
            save = partial(_plain_io(strategy).save_checkpoint, storage_options=storage_options)
            if strategy.is_global_zero:
                write = partial(save_file, strategy, path=path, save=save)
                self._background.submit(checkpoint, write, name=str(path))
            return
        from lightning_topt.execution.sharded_checkpoint import write_state  # noqa: PLC0415

        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        state, save_rest = self._collected(checkpoint, storage_options, strategy)
        write = partial(write_state, path, save_rest=save_rest, group=self._group)
        self._background.submit(state, write, name=str(path))

    def _meet_background(self, strategy: Strategy, *, waits: bool) -> None:
        """Raise on all ranks what a save in the background has raised on one. A collective call.

        With `waits`, once none is left.
        """
        if self._background is None:
            return
        if waits:
            self._background.wait()
        if strategy.reduce_boolean_decision(self._background.has_failed, all=False):
            self._background.wait()
            error = self._background.take_error()
            why = "see the error of another rank" if error is None else f"{error!r}"
            raise RuntimeError(
                f"a checkpoint could not be written in the background: {why}"
            ) from error

    def end_training(self, strategy: Strategy) -> None:
        """Wait for what is written in the background. A collective call."""
        self._meet_background(strategy, waits=True)
        if self._group is not None:
            destroy_groups([self._group], meets=True)
            self._group = None

    def end_fit(self) -> None:
        """Leave what is written in the background, which after an error may take some seconds."""
        background, self._background = self._background, None
        self._group = None
        if background is None:
            return
        try:
            background.wait(FAILED_SECONDS)
        except TimeoutError as late:
            rank_zero_warn(str(late))
        error = background.take_error()
        if error is not None:
            rank_zero_warn(f"a checkpoint could not be written in the background: {error!r}")


def _writes_later(strategy: Strategy) -> bool:
    return isinstance(strategy.checkpoint_io, AsyncCheckpointIO)


def _plain_io(strategy: Strategy) -> CheckpointIO:
    # What writes files, without the plugin that lets it write later
    plugin = strategy.checkpoint_io
    if isinstance(plugin, AsyncCheckpointIO):
        assert plugin.checkpoint_io is not None
        return plugin.checkpoint_io
    return plugin


def _save_now(strategy: Strategy, checkpoint: dict[str, Any], path: Any, **options: Any) -> None:
    if strategy.is_global_zero:
        _plain_io(strategy).save_checkpoint(checkpoint, path, **options)


def save_file(
    strategy: Strategy, checkpoint: dict[str, Any], path: Any, save: Any, **options: Any
) -> None:
    """Save a full checkpoint by ``save(checkpoint, path, **options)``.

    A sharded one that is at `path` stays until the file is whole. Lightning would write the file
    into its folder.
    """
    from lightning_topt.execution.checkpoint_files import (  # noqa: PLC0415  (a folder)
        holds_shards,
        replace_by_file,
    )

    if not strategy.is_global_zero or not holds_shards(path):
        save(checkpoint, path, **options)
        return
    if type(_plain_io(strategy)) is not TorchCheckpointIO:
        raise ValueError(
            f"{str(path)!r} is the folder of a sharded checkpoint, which a checkpoint_io plugin "
            "does not replace by a file: remove it, or save under another name"
        )
    replace_by_file(path, lambda file: save(checkpoint, file, **options))


def load_whole(path: Any, weights_only: bool | None = None, *, load: Any) -> dict[str, Any]:
    """Return the checkpoint at `path`, a file or a folder, as one process has it."""
    from lightning_topt.execution.sharded_checkpoint import (  # noqa: PLC0415  (resumed)
        is_folder,
        read_sharded_checkpoint,
    )

    if is_folder(path):
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
            if copied is None or _has_no_memory(copied):
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
    # Yield the modules that `value` is, or has in it as a container, and theirs
    if isinstance(value, nn.Module):
        yield from value.modules()
    elif isinstance(value, (Mapping, list, tuple, set)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _modules_of(part)


def _copied(value: object, memo: dict[int, Any]) -> Any:
    # A deep copy of `value`, in which `memo` replaces objects; None where it has none
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


def _has_no_memory(value: object) -> bool:
    return any(
        tensor.is_meta
        for part in _modules_of(value)
        for tensor in (*part.parameters(), *part.buffers())
    )


def _whole(state: Any) -> dict[str, Any]:
    # else it is stored in a checkpoint folder
    return dict(state) if isinstance(state, dict) else state.read()


def _numbered(state: Any) -> Any:
    """Return the state of an optimizer by the positions of its parameters, as ddp has it.

    Lightning's FSDPStrategy numbers them in the module's order, or names them.
    """
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
