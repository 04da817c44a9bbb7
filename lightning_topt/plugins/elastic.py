"""A fit that outlives its ranks, under torchrun: ``AutoParallelStrategy(elastic=True)``.

A strategy has an `ElasticRun`, to which its hooks delegate:

    launcher              `run`: the fit, in a process that is replaced where a rank is lost
    load_checkpoint       `load`: the state that survived
    on_train_start        `begin_training`
    on_train_batch_start  `begin_batch`
    optimizer_step        `watched`, `end_update`
    teardown              `end_training`

When a rank is lost, collective calls of the others fail. Each of them has the parameters and the
optimizer state after its last step: the update comes after all gradients have arrived. One process
of each machine leaves them in memory (`execution.surviving_state`), as a checkpoint with the
position in the data. All ranks end, and begin again from the newest of these states: the processes
that wait for them fork (`communication.rank_keeper`), or torchrun starts new ones, where a process
that waits is lost, or a node. Ranks may differ by one step then; the state after it is right on
whichever rank has it.

torchrun's SIGTERM, with which it also makes room for a node that comes, ends all ranks after the
same batch (`plugins.preemption`). Then the state of all is kept, under any plan.

Where a plan shards the state a loss takes a part of it. Such a fit begins again as the user's
``ckpt_path`` says, and so does one whose ranks were all lost.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import random
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
import xxhash
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_topt.basics.forked_call import die_with
from lightning_topt.communication.rank_keeper import RANK_LOST, RankProgress, keep_rank, keep_store
from lightning_topt.communication.rank_watch import is_of_collective
from lightning_topt.execution.surviving_state import (
    FoundState,
    Place,
    SurvivingStates,
    find_newest,
    states_of,
)
from lightning_topt.plugins.exchange_guard import CHECKPOINT_KEY
from lightning_topt.plugins.lost_ranks import LostRankWatch
from lightning_topt.plugins.plan_run import PlanRun
from lightning_topt.plugins.training_data import DATA_KEY, TrainingData

log = logging.getLogger(__name__)

# How long ranks that begin again wait for each other: those that are in a step come late. Without
# one torchrun restarts all.
MEET_SECONDS, MEET_STEPS = 20.0, 4
# Whether torchrun hosts the store of the ranks, which then outlives them.
_SHARED = "TORCHELASTIC_USE_AGENT_STORE"
_CKPT_PATH, _WEIGHTS_ONLY = 4, 5  # of the arguments of Trainer._fit_impl
_STOP = "lightning_topt.should_stop"  # of a state in memory

# torch imports the first one in an optimizer's first step.
_IMPORTED_IN_STEPS = (
    "torch._dynamo",
    "lightning_topt.plugins.traced_planning",
)

_fits = itertools.count()  # of this program, which torchrun starts from its beginning
_owner: list[int] = []  # torchrun's process
_progress: list[RankProgress] = []  # of this process, where another one waits for it


class ElasticRun:
    """Lets the fits of `strategy` go on after a loss.

    Args:
        strategy: whose fits these are.
        watch: makes its process group.
        data: knows what a fit was trained on.
        plan: that runs.
    """

    def __init__(
        self, strategy: DDPStrategy, watch: LostRankWatch, data: TrainingData, plan: PlanRun
    ) -> None:
        self._strategy, self._watch, self._data, self._plan = strategy, watch, data, plan
        self._states: SurvivingStates | None = None
        self._found: FoundState | None = None
        self._draws_anew = False  # for it lacks the random states of these ranks
        self._is_asked_to_stop = False  # by trainer.should_stop, before the loss
        self._fit = 0
        # Whether hooks are asked for the state of this rank, without the others.
        self.is_alone = False
        self._is_training = self._is_updating = False
        self._steps = self._first_step = 0
        # As the batches of a step found them.
        self._buffers: dict[str, Tensor] = {}
        self._stopped_before = False
        self._ckpt_path: object = None  # the user's
        self._has_warned = False

    # ---- the fit ---------------------------------------------------------------------------------

    def run(
        self,
        trainer: pl.Trainer,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run `function` of `trainer`; a fit from the state that survived, if one did.

        In another process, if nothing keeps this one from being forked.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return function(*args, **kwargs)
        self._check(trainer)
        self._fit = next(_fits)
        self._ckpt_path, self._has_warned = args[_CKPT_PATH], False
        forks = _may_fork()
        if forks:
            _fork()
        elif not _progress:
            log.info(
                "torchrun restarts this process after a loss. It cannot be forked: it has threads "
                "(OMP_NUM_THREADS=1 leaves out those of torch), a device in use, or a process "
                "group before the fit"
            )
        within = None
        if forks and _progress[0].restarts > 0:
            longest = _progress[0].longest_seconds
            within = timedelta(seconds=max(MEET_SECONDS, MEET_STEPS * longest))
        assert self._strategy.accelerator is not None
        self._strategy.accelerator.setup_device(self._strategy.root_device)
        self._watch.meet(self._strategy, is_restarted=True, within=within)
        self._find()
        if self._found is not None:
            args = (*args[:_CKPT_PATH], str(self._found.path), False, *args[_WEIGHTS_ONLY + 1 :])
            log.info("training goes on after step %d, from memory", self._found.place.step)
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if not is_of_collective(error):
                raise
            self._leave(trainer, error)
            if not _progress:
                raise
            log.warning("rank %d begins again: %s", trainer.global_rank, str(error)[:300])
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(RANK_LOST)

    def _check(self, trainer: pl.Trainer) -> None:
        environment = self._strategy.cluster_environment
        if not isinstance(environment, TorchElasticEnvironment):
            raise ValueError(
                "elastic=True needs ranks that torchrun starts, which outlives them: "
                "torchrun --standalone --nproc-per-node 2 --max-restarts 3 train.py"
            )
        device, backend = self._strategy.root_device.type, self._strategy.process_group_backend
        if device != "cpu" or backend not in (None, "gloo"):
            raise ValueError(
                f'elastic=True was tried with accelerator="cpu" and gloo only, not with {device} '
                f"and {backend or 'its default'}: leave elastic out, and let torchrun restart from "
                "ckpt_path"
            )
        if not trainer.lightning_module.automatic_optimization:
            raise ValueError(
                "elastic=True needs automatic optimization: between the steps of several "
                "optimizers a loss leaves no state that all ranks have"
            )
        if trainer.early_stopping_callbacks:
            raise ValueError(
                "elastic=True cannot have EarlyStopping: a loss changes the means of the epoch "
                "that it reads. Use max_epochs or max_steps"
            )

    def _check_training(self) -> None:
        """Raise ValueError for data and schedulers whose state a loss takes. A collective call."""
        if any(each.reduce_on_plateau for each in self._strategy.lr_scheduler_configs):
            raise ValueError(
                "elastic=True cannot have ReduceLROnPlateau: a loss changes the means of the epoch "
                "that it reads. Use a scheduler that counts steps or epochs"
            )
        lengths = self._data.lengths
        if lengths is None:
            raise ValueError(
                "elastic=True needs training data that can go on where they were: map-style data "
                "sets with shuffle=True or False and the samplers of torch and Lightning"
            )
        if self._found is not None:
            return
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, lengths)
        if any(each != lengths for each in found):
            raise ValueError(
                f"elastic=True needs ranks with equally many batches, and they have {found}: one "
                "of them knows the position of all. Use torch's DistributedSampler, which repeats "
                "samples"
            )

    def _find(self) -> None:
        """Find the newest state that survived. A collective call."""
        # Not the device's group: states travel between hosts.
        group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        self._states = states_of(_owner[0] if _owner else os.getppid())
        self._found = find_newest(self._states, fit=self._fit, group=group)
        if group is not None:
            dist.destroy_process_group(group)

    def load(self, path: Any) -> Any:
        """Return the checkpoint at `path` if that is the state that survived, else None."""
        if self._found is None or str(path) != str(self._found.path):
            return None
        checkpoint = self._found.load()
        states = checkpoint[CHECKPOINT_KEY][DATA_KEY]["random"]
        self._draws_anew = len(states) != self._strategy.world_size
        self._is_asked_to_stop = checkpoint.pop(_STOP, False)
        return checkpoint

    # ---- steps -----------------------------------------------------------------------------------

    def begin_training(self) -> None:
        """Know that all of the state is there."""
        trainer = self._trainer
        self._check_training()
        self._is_training, self._is_updating = True, False
        self._steps = self._first_step = trainer.global_step
        if self._found is not None and self._draws_anew:
            self._seed(self._found.place)
            _end_epoch(trainer, is_asked=self._is_asked_to_stop)
        self.begin_plan()

    def begin_plan(self) -> None:
        """Warn where the plan that runs keeps no state that outlives a loss."""
        if self._ckpt_path is None and not self._has_warned and not self._is_replicated():
            self._has_warned = True
            rank_zero_warn(
                "elastic=True: under this plan each rank has a part of the state, so after a loss "
                'training begins again from the start. Give fit ckpt_path="last" and a '
                'ModelCheckpoint, or plan="ddp"'
            )

    def _seed(self, place: Place) -> None:
        """Draw other random numbers than before the loss, different ones on each rank."""
        text = f"{torch.initial_seed()} {place} {self._strategy.global_rank}"
        seed = xxhash.xxh32_intdigest(text.encode())
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)

    def begin_batch(self) -> None:
        """Know that a batch begins: the state is that after the last step."""
        if not self._is_training:
            return
        trainer = self._trainer
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        done = progress.current.processed
        if done % trainer.accumulate_grad_batches == 0:
            self._buffers = copy_buffers(trainer.lightning_module)
            self._stopped_before = trainer.should_stop
        step = trainer.global_step
        if step == self._steps:
            return
        # Somebody's gradients of this process group have arrived: all ranks have begun.
        if self._steps == self._first_step and self._states is not None:
            self._states.remove_before(self._place())
            self._found = None
        self._steps = step
        if _progress:
            _progress[0].step()

    def watched(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return `closure` of a step, after which the optimizer updates parameters."""

        def run() -> Any:
            result = closure()
            self._is_updating = True
            return result

        return run

    def end_update(self) -> None:
        """Know that the optimizer has updated all parameters."""
        self._is_updating = False

    def end_training(self) -> None:
        """Forget the fit."""
        self._is_training, self._found, self._buffers = False, None, {}

    # ---- what is left of it ----------------------------------------------------------------------

    @property
    def _trainer(self) -> pl.Trainer:
        assert self._strategy.lightning_module is not None
        return self._strategy.lightning_module.trainer

    def _place(self) -> Place:
        return Place(self._fit, self._trainer.global_step, self._data.batches)

    def _leave(self, trainer: pl.Trainer, error: BaseException) -> None:
        """Leave the state after the last step, for ranks that begin again, where it is whole."""
        why_not = self._why_not()
        if why_not is None:
            try:
                place = self._place()
                assert self._states is not None
                self._states.write(place, lambda: self._own_state(trainer))
                log.info("rank %d leaves the state after step %d", trainer.global_rank, place.step)
            except Exception as failure:  # of memory, or of the user's hooks
                why_not = f"{type(failure).__name__}: {failure}"
        if why_not is not None:
            log.warning("rank %d leaves no state: %s", trainer.global_rank, why_not)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.save()

    def _why_not(self) -> str | None:
        """Return why this rank has no state that others could go on from, None if it has."""
        if not self._is_training:
            return "training had not begun"
        if self._is_updating:
            return "it was in an update"
        if not self._is_replicated():
            return "under this plan it has a part of it; training goes on from ckpt_path"
        return None

    def _is_replicated(self) -> bool:
        """Return whether this rank has all of the state."""
        engine = self._plan.engine
        if engine is not None and not engine.is_replicated:
            return False
        return not any(
            hasattr(each, "consolidate_state_dict") for each in self._strategy.optimizers
        )

    def _own_state(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Return the checkpoint of this rank as it was between two steps."""
        is_trained = _between_batches(trainer)
        # What forward passes have changed since the last step.
        if not (is_trained and self._data.begins_window):
            set_buffers(trainer.lightning_module, self._buffers)
            trainer.should_stop = self._stopped_before
        self.is_alone = True
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        checkpoint = self._data.with_state(checkpoint, alone=True)
        return {**checkpoint, _STOP: trainer.should_stop}

    def keep(self) -> None:
        """Keep the state of all ranks in memory, between two steps. A collective call."""
        assert self._states is not None
        # Rank 0 collects it, under any plan.
        checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        checkpoint = self._data.with_state(checkpoint)
        if self._trainer.is_global_zero:
            try:
                self._states.write(self._place(), lambda: checkpoint)
            except (OSError, RuntimeError) as error:  # of memory
                log.warning("no state is kept in memory: %s", error)
        self._strategy.barrier("elastic")


def _may_fork() -> bool:
    """Return whether this process can be forked: its children can do what it could."""
    if dist.is_initialized() or torch.cuda.is_initialized():
        return False
    # OpenMP's threads (libgomp) are lost in a fork, and the next parallel region would hang.
    # So are those of others: Python's, of loggers and data, and BLAS's.
    return len(os.listdir("/proc/self/task")) == 1


def _fork() -> None:
    """Stay behind, and return in the processes that train."""
    _owner[:] = [os.getppid()]
    die_with(_owner[0])  # torchrun may be killed, and then nobody would end what waits
    if os.environ.get(_SHARED) != "True":
        if os.environ["RANK"] == "0":
            keep_store(int(os.environ["MASTER_PORT"]))
        os.environ[_SHARED] = "True"
    # Once, rather than in each process that trains.
    for module in _IMPORTED_IN_STEPS:
        importlib.import_module(module)
    _progress[:] = [keep_rank()]


def copy_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of all buffers of `module` by their names, of shared ones by each name."""
    return {
        name: each.detach().clone()
        for name, each in module.named_buffers(remove_duplicate=False)
        if each.device.type != "meta"
    }


def set_buffers(module: nn.Module, values: dict[str, Tensor]) -> None:
    """Let `values` be the buffers of these names, whichever tensors user code has put there."""
    for name, value in values.items():
        owner, _, own_name = name.rpartition(".")
        module.get_submodule(owner)._buffers[own_name] = value


def check_elastic(
    *,
    checkpoint: str,
    async_checkpoint: bool,
    uneven: str | None,
    allow_staleness: object,
    start_method: str,
) -> None:
    """Raise ValueError for options of a strategy with which a fit cannot outlive its ranks."""
    if async_checkpoint:
        raise ValueError(
            "elastic=True ends processes while a checkpoint may be written in the background: "
            "leave out async_checkpoint"
        )
    if checkpoint != "full":
        raise ValueError(
            'elastic=True keeps the state of all ranks in one piece: use checkpoint="full"'
        )
    if start_method != "popen":
        raise ValueError(
            "elastic=True needs ranks that torchrun starts, one process each: leave "
            f"start_method={start_method!r} out"
        )
    if uneven not in (None, "join"):
        raise ValueError(
            "elastic=True needs ranks that have read equally many batches at a loss, so that one "
            "knows the position of all: leave uneven out"
        )
    if allow_staleness is not False:
        raise ValueError(
            "elastic=True needs steps between which nothing is in flight, which asynchronous "
            "pipelines do not have: leave allow_staleness out"
        )


def _between_batches(trainer: pl.Trainer) -> bool:
    """Let Lightning's counts be those between two batches; return whether the last one counts.

    A batch without an update comes again. So does a validation that was cut off, whole. After the
    last batch of an epoch its end is still to come (`_end_epoch`).
    """
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    progress: Any = loop.batch_progress
    evaluation: Any = loop.val_loop.batch_progress
    assert fetcher is not None
    is_trained: bool = progress.current.processed == progress.current.ready
    is_ended = progress.current.completed == progress.current.processed
    is_due = is_trained and (
        trainer.validating or (not is_ended and loop._should_check_val_fx(fetcher))
    )
    if not is_trained:
        progress.is_last_batch = False
    for part in (progress.total, progress.current):
        part.ready = part.started = part.completed = part.processed
    if is_due:
        # As Lightning knows a validation that was cut off: its first batch had begun.
        evaluation.total.processed = evaluation.total.completed
        evaluation.current.processed = evaluation.current.completed = 0
        for part in (evaluation.total, evaluation.current):
            part.ready = part.started = part.completed + 1
    elif not is_trained and loop._should_check_val_fx(fetcher) and not loop._should_accumulate():
        # Lightning will go through the end of the last batch once more, without its validation.
        loop._batches_that_stepped -= 1
    return is_trained


def _end_epoch(trainer: pl.Trainer, *, is_asked: bool) -> None:
    """Let an epoch whose batches are all trained on end, unless a validation is to come.

    Lightning would read another batch first. So ends one in which the trainer `is_asked` to stop.
    """
    loop = trainer.fit_loop.epoch_loop
    is_over = loop.restarting and loop.batch_progress.is_last_batch
    validates = loop.val_loop.restarted_mid_evaluation

    def begin(fetcher: Any) -> None:
        del loop.__dict__["advance"]
        trainer.should_stop |= is_asked
        if not validates and (is_over or (is_asked and trainer.fit_loop._can_stop_early)):
            raise StopIteration
        loop.advance(fetcher)

    if is_asked or (is_over and not validates):
        loop.advance = begin  # type: ignore[method-assign, assignment]
