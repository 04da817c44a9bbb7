"""A fit that outlives its ranks, under torchrun: ``AutoParallelStrategy(elastic=True)``.

A strategy has an `ElasticRun`, to which its hooks delegate:

    launcher              `run`: the fit, in a process that is replaced where a rank is lost
    load_checkpoint       `load`: the state that survived
    on_train_start        `begin_training`
    on_train_batch_start  `begin_batch`
    optimizer_step        `watched`, `end_update`
    teardown              `end_training`

The process that torchrun has started stays behind (`_Keeper`): it forks the one that trains, and
has memory for a state. When a rank is lost, collective calls of the others fail. Each of them has
the parameters and the optimizer state after its last step: the update comes after all gradients
have arrived. One process of each machine leaves them in that memory (`_Memory`), as a checkpoint
with the position in the data. All end with `RANK_LOST`, and the keepers fork again: all imports are
done, and torchrun sees nothing of it. Ranks may differ by one step then; the state after it is
right on whichever rank has it.

Every other end is passed on, so torchrun restarts as ever, and the fit begins as the user's
``ckpt_path`` says. So it does where a plan shards the state, of which a loss takes a part.
"""

from __future__ import annotations

import fcntl
import importlib
import io
import logging
import mmap
import os
import random
import signal
import sys
import time
import zlib
from collections.abc import Callable
from types import FrameType
from typing import IO, Any, NamedTuple, NoReturn

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_topt.basics.forked_call import die_with
from lightning_topt.communication.collectives import values_of_group
from lightning_topt.communication.rank_watch import is_of_collective, own_identity
from lightning_topt.plugins.lost_ranks import LostRankWatch
from lightning_topt.plugins.plan_run import PlanRun
from lightning_topt.plugins.training_data import TrainingData

log = logging.getLogger(__name__)

RANK_LOST = 75  # exit status; EX_TEMPFAIL of sysexits.h
MOST_LOSSES_WITHOUT_STEP = 3  # then torchrun is to restart
LOCK_SECONDS = 60.0  # that a process waits while another one of its machine writes its state
IN_MEMORY = "memory of the ranks that are left"  # in place of a path
_CKPT_PATH, _WEIGHTS_ONLY = 4, 5  # of the arguments of Trainer._fit_impl
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Imported once, before the fork: torch imports the first one in an optimizer's first step.
_IMPORTED_IN_STEPS = ("torch._dynamo", "lightning_topt.plugins.planning")

_keeper: list[_Keeper] = []  # of this process, once a fit has begun


class Place(NamedTuple):
    """How far a fit was, in optimizer steps and batches: the larger one is the newer one."""

    step: int
    batches: int


class ElasticRun:
    """Lets the fit of `strategy` go on after a loss.

    Args:
        strategy: whose fit it is.
        watch: makes its process group.
        data: knows what the fit was trained on.
        plan: that runs.
    """

    def __init__(
        self, strategy: DDPStrategy, watch: LostRankWatch, data: TrainingData, plan: PlanRun
    ) -> None:
        self._strategy, self._watch, self._data, self._plan = strategy, watch, data, plan
        self._memory: _Memory | None = None  # of this machine
        self._checkpoint: dict[str, Any] | None = None  # that survived, until it is loaded
        self._goes_on = self._has_path = False
        # While one rank saves its state, without the others.
        self.is_alone = False
        self._is_training = self._is_updating = False
        self._steps = self._first_step = 0
        self._buffers: dict[str, Tensor] = {}  # before the batches of a step

    # ---- the fit ---------------------------------------------------------------------------------

    def run(
        self,
        trainer: pl.Trainer,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run `function` of `trainer`; a fit in a forked process, from the state that survived."""
        if trainer.state.fn != TrainerFn.FITTING:
            return function(*args, **kwargs)
        self._check(trainer)
        for module in _IMPORTED_IN_STEPS:
            importlib.import_module(module)
        _keeper[:] = [_Keeper()]
        _keeper[0].keep()
        # From here on in a process that trains.
        assert self._strategy.accelerator is not None
        self._strategy.accelerator.setup_device(self._strategy.root_device)
        self._watch.meet(self._strategy, is_restarted=True)
        place = self._find()
        if place is not None:
            args = (*args[:_CKPT_PATH], IN_MEMORY, False, *args[_WEIGHTS_ONLY + 1 :])
            log.info("training goes on after step %d, from memory", place.step)
        self._has_path = args[_CKPT_PATH] is not None
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if not is_of_collective(error):
                raise
            self._leave(trainer)
            log.warning("rank %d begins again: %s", trainer.global_rank, str(error)[:300])
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(RANK_LOST)

    def _check(self, trainer: pl.Trainer) -> None:
        environment = self._strategy.cluster_environment
        if (
            not isinstance(environment, TorchElasticEnvironment)
            or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        ):
            raise ValueError(
                "elastic=True needs ranks and a store of torchrun, which outlive them: "
                "torchrun --standalone --nproc-per-node 2 --max-restarts 3 train.py"
            )
        device, backend = self._strategy.root_device.type, self._strategy.process_group_backend
        if device != "cpu" or backend not in (None, "gloo"):
            raise ValueError('elastic=True runs with accelerator="cpu" and gloo: leave elastic out')
        if not trainer.lightning_module.automatic_optimization:
            raise ValueError("elastic=True needs automatic optimization")
        if trainer.early_stopping_callbacks:
            raise ValueError(
                "elastic=True cannot have EarlyStopping, which reads means of the epoch: use "
                "max_epochs or max_steps"
            )
        if _keeper:
            raise ValueError("elastic=True runs one fit in a program: start another program")
        # Threads of OpenMP (libgomp), loggers and BLAS are lost in a fork, and their users hang.
        if dist.is_initialized() or len(os.listdir("/proc/self/task")) > 1:
            raise ValueError(
                "elastic=True forks this process, which has threads or a process group: set "
                "OMP_NUM_THREADS=1, and start loggers and groups in the fit"
            )

    def _find(self) -> Place | None:
        # Find the newest state that survived. A collective call.
        # The memory of a machine is that of its first rank.
        memories = values_of_group((_machine(), _keeper[0].memory))
        self._memory = next(memory for machine, memory in memories if machine == _machine())
        places = values_of_group(self._memory.place())
        newest: Place | None = max(filter(None, places), default=None)
        if newest is None:
            return None
        # The first rank with the newest state sends it to machines without.
        has_newest, sent = places[dist.get_rank()] == newest, [b""]
        if any(place != newest for place in places):
            source = places.index(newest)
            if dist.get_rank() == source:
                sent = [self._memory.read()]
            dist.broadcast_object_list(sent, source)
        file = self._memory.path if has_newest else io.BytesIO(sent[0])
        # Pickles are of this run, so that they may hold code.
        self._checkpoint = torch.load(file, map_location="cpu", weights_only=False)
        self._goes_on = True
        return newest

    def load(self, path: Any) -> Any:
        """Return the checkpoint at `path` if that is the state that survived, else None."""
        checkpoint, self._checkpoint = self._checkpoint, None
        return checkpoint if path == IN_MEMORY else None

    # ---- steps -----------------------------------------------------------------------------------

    def begin_training(self) -> None:
        """Note that all of the state is there."""
        trainer = self._data.trainer
        self._check_training()
        if not self._has_path and not self._is_replicated():
            rank_zero_warn(
                "elastic=True: under this plan a loss lets training begin again from the start. "
                'Give fit ckpt_path="last" and a ModelCheckpoint, or plan="ddp"'
            )
        self._is_training, self._is_updating = True, False
        self._steps = self._first_step = trainer.global_step
        if self._goes_on:
            # Other random numbers than before the loss, different ones on each rank.
            text = f"{torch.initial_seed()} {self._place()} {self._strategy.global_rank}"
            seed = zlib.crc32(text.encode())
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            _end_epoch(trainer)

    def _check_training(self) -> None:
        # Raise ValueError for data and schedulers whose state a loss takes. A collective call.
        if any(each.reduce_on_plateau for each in self._strategy.lr_scheduler_configs):
            raise ValueError(
                "elastic=True cannot have ReduceLROnPlateau, which reads means of the epoch: use a "
                "scheduler that counts steps or epochs"
            )
        lengths = self._data.lengths
        if lengths is None:
            raise ValueError(
                "elastic=True needs training data that can go on where they were: map-style data "
                "sets with shuffle=True or False and the samplers of torch and Lightning"
            )
        of_ranks = values_of_group(lengths)
        if any(each != lengths for each in of_ranks):
            raise ValueError(
                f"elastic=True needs ranks with equally many batches, and they have {of_ranks}: "
                "use torch's DistributedSampler, which repeats samples"
            )

    def begin_batch(self) -> None:
        """Note that a batch begins: the state is that after the last step."""
        if not self._is_training:
            return
        trainer = self._data.trainer
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        if progress.current.processed % trainer.accumulate_grad_batches == 0:
            buffers = trainer.lightning_module.named_buffers(remove_duplicate=False)
            self._buffers = {
                name: each.detach().clone() for name, each in buffers if each.device.type != "meta"
            }
        step = trainer.global_step
        if step == self._steps:
            return
        # Gradients of all ranks have arrived: all have loaded the state.
        if self._steps == self._first_step and self._memory is not None:
            self._memory.remove_before(self._place())
        self._steps = step
        _keeper[0].note_step()

    def watched(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return `closure` of a step, after which the optimizer updates parameters."""

        def run() -> Any:
            result = closure()
            self._is_updating = True
            return result

        return run

    def end_update(self) -> None:
        """Note that the optimizer has updated all parameters."""
        self._is_updating = False

    def end_training(self) -> None:
        """Forget the fit."""
        self._is_training, self._buffers = False, {}

    # ---- what is left of it ----------------------------------------------------------------------

    def _place(self) -> Place:
        return Place(self._data.trainer.global_step, self._data.batches)

    def _is_replicated(self) -> bool:
        # Whether this rank has all of the state
        engine = self._plan.engine
        if engine is not None and not engine.is_replicated:
            return False
        return not any(
            hasattr(each, "consolidate_state_dict") for each in self._strategy.optimizers
        )

    def _leave(self, trainer: pl.Trainer) -> None:
        # Leave the state after the last step, for ranks that begin again
        why_not = None
        if not self._is_training:
            why_not = "training had not begun"
        elif self._is_updating:
            why_not = "it was in an update"
        elif not self._is_replicated():
            why_not = "under this plan it has a part of it; training goes on from ckpt_path"
        else:
            try:
                assert self._memory is not None
                self._memory.write(self._place(), lambda: self._state(trainer))
            except Exception as failure:  # of memory, or of the user's hooks
                why_not = f"{type(failure).__name__}: {failure}"
        if why_not is not None:
            log.warning("rank %d leaves no state: %s", trainer.global_rank, why_not)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.save()

    def _state(self, trainer: pl.Trainer) -> dict[str, Any]:
        # The checkpoint of this rank as it was between two steps
        is_trained, undone = _between_batches(trainer), self._data.batches_of_window
        # Forward passes since the last step may have changed buffers. Its batches come again.
        if not is_trained or undone:
            for name, value in self._buffers.items():
                owner, _, buffer = name.rpartition(".")
                trainer.lightning_module.get_submodule(owner)._buffers[buffer] = value
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        for part in (progress.total, progress.current) if undone else ():
            part.processed -= undone
            part.ready = part.started = part.completed = part.processed
        self.is_alone = True
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        return self._data.with_state(checkpoint, alone=True)


def check_elastic(**options: bool) -> None:
    """Raise ValueError for the first option that is set, with which no fit outlives its ranks."""
    for option, is_set in options.items():
        if is_set:
            raise ValueError(f"elastic=True needs full states between steps: leave out {option}")


def _between_batches(trainer: pl.Trainer) -> bool:
    # Set Lightning's counts to those between two batches; return whether the last batch counts.
    # A batch without an update comes again. A validation that was cut off begins anew. After the
    # last batch of an epoch its end is still to come (`_end_epoch`).
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


def _end_epoch(trainer: pl.Trainer) -> None:
    # End an epoch whose batches are all trained on, unless a validation is to come: Lightning would
    # read another batch first.
    loop = trainer.fit_loop.epoch_loop
    is_over = loop.restarting and loop.batch_progress.is_last_batch

    def begin(fetcher: Any) -> None:
        del loop.__dict__["advance"]
        raise StopIteration

    if is_over and not loop.val_loop.restarted_mid_evaluation:
        loop.advance = begin  # type: ignore[method-assign, assignment]


# ---- the process that waits ----------------------------------------------------------------------


class _Keeper:
    """Waits for `process`, which trains, and forks it again after a loss.

    Signals go on to that process, and it dies with this one. What lies in `memory` goes with this
    one too, however it ends.
    """

    def __init__(self) -> None:
        self.memory = _Memory(os.getpid(), os.memfd_create("place"), os.memfd_create("state"))
        self.process = 0
        self._is_ending = False  # after a signal: no process is forked any more
        self._has_stepped = mmap.mmap(-1, 1)  # shared with the process that trains
        self._handlers: dict[int, Any] = {}

    def note_step(self) -> None:  # in the process that trains
        self._has_stepped[0] = 1

    def keep(self) -> None:
        """Fork a process that trains, as often as ranks are lost; return in each of these.

        The calling process ends as the last of them did, or by the third loss without a step.
        """
        die_with(os.getppid())  # torchrun may be killed, and then nobody would end what waits
        losses = 0
        while True:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # or both processes would write what is left
            self._has_stepped[0] = 0
            if self._fork():
                return
            status = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
            losses = 1 if self._has_stepped[0] else losses + 1
            if self._is_ending or not (status < 0 or status == RANK_LOST):
                _end(status)
            if losses >= MOST_LOSSES_WITHOUT_STEP:
                log.error("%d losses without a step: torchrun is to restart", losses)
                _end(status)

    def _fork(self) -> bool:
        # Fork the process that trains; return whether this is that one
        # Signals wait meanwhile: each process then handles them as it is to.
        before, parent = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED), os.getpid()
        try:
            self.process = os.fork()
            if self.process == 0:
                # torchrun sends signals to the group of the process that waits: each comes once
                os.setpgid(0, 0)
                die_with(parent)
                for number, handler in self._handlers.items():
                    signal.signal(number, handler)
                return True
            for number in _FORWARDED:
                self._handlers.setdefault(number, signal.getsignal(number))
                signal.signal(number, self._forward)
            return False
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._is_ending |= number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        try:
            os.kill(self.process, number)
        except ProcessLookupError:  # it has ended
            return


def _end(status: int) -> NoReturn:
    # Without what `atexit` holds: that is the training process's to run.
    os._exit(status if status >= 0 else 128 - status)


# ---- memory for a state --------------------------------------------------------------------------


class _Memory(NamedTuple):
    """Room for one state in the memory of a machine, in files without a name (memfd).

    Processes of the machine reach the files through the one that holds them. A file that is locked
    says of which place the state is; it is empty while a state is written, so a kill leaves none.
    """

    holder: int  # process
    label: int  # descriptors
    state: int

    @property
    def path(self) -> str:  # of the state
        return f"/proc/{self.holder}/fd/{self.state}"

    def _open(self) -> IO[str]:
        return open(f"/proc/{self.holder}/fd/{self.label}", "r+")

    def place(self) -> Place | None:  # None: there is no state
        with self._open() as label:
            return _read(label)

    def read(self) -> bytes:
        with open(self.path, "rb") as file:
            return file.read()

    def write(self, place: Place, make: Callable[[], Any]) -> None:
        """Write the state that `make` returns, unless there is one as new.

        One process writes at a time. `make` must not communicate with other ranks: they wait here,
        or have ended. Raises TimeoutError after `LOCK_SECONDS`.
        """
        with self._open() as label:
            _lock(label)
            before = _read(label)
            if before is not None and before >= place:
                return
            state = make()
            label.truncate(0)
            torch.save(state, self.path)
            label.seek(0)
            label.write(f"{place.step} {place.batches}")

    # frees the memory of an older state
    def remove_before(self, place: Place) -> None:
        with self._open() as label:
            _lock(label)
            before = _read(label)
            if before is not None and before < place:
                label.truncate(0)
                os.truncate(self.path, 0)


def _read(label: IO[str]) -> Place | None:
    label.seek(0)
    words = label.read().split()
    return Place(*map(int, words)) if words else None


def _lock(file: IO[str]) -> None:
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"another process has written its state for {LOCK_SECONDS:.0f} s: hooks such "
                    "as on_save_checkpoint must not communicate after a loss"
                ) from None
        time.sleep(0.01)


def _machine() -> str:
    # Its boot and its space of process numbers.
    return " ".join(own_identity().split()[:2])
