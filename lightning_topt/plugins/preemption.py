"""Signals that end a fit: all ranks stop after the same batch, save together, and end.

A scheduler's signal reaches ranks at different batches, or only some of them, and a save may be a
collective call. So a signal only leaves a note. Before each batch ranks exchange their notes by an
all-reduce of two numbers, which is looked at one batch later, when it has long arrived. It takes
the place of Lightning's broadcast from rank 0, for which each batch waits. The `TrainingData` of a
strategy begins and ends it with a fit's training.

When training has ended well, ranks exchange their notes once more and wait for them: a signal in
the last batches or the last validation ends the fit too, before ``on_train_end`` as under
Lightning.

A fit of one rank ends before a batch is read (`before_fetch`). SIGTERM is handled, and under SLURM
the signal for which Lightning queues the job again (SIGUSR1).
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_topt.communication.topology import host_group

log = logging.getLogger(__name__)

_TERM, _REQUEUE = range(2)  # what a note asks for


class Preemption:
    """Ends a fit at a signal, after a save: for SLURM's requeue, or beside the user's last one."""

    def __init__(self) -> None:
        self._may_stop: Callable[[], bool] = bool
        self._trainer: pl.Trainer | None = None
        self._note = torch.zeros(2, dtype=torch.int32)
        self._agreed = torch.zeros(2, dtype=torch.int32)
        self._sent: tuple[dist.Work, torch.Tensor] | None = None
        self._group: dist.ProcessGroup | None = None
        self._process = 0

    def begin(
        self, trainer: pl.Trainer, *, may_stop: Callable[[], bool], asks_loaders: bool
    ) -> None:
        """Handle signals of a fit that begins to train. A collective call.

        Args:
            trainer: of the fit.
            may_stop: whether the last batch could be the last one, which all ranks know equally.
            asks_loaders: whether all loaders can say where they are. A fit of one rank without
                that is left to Lightning.
        """
        self.end()
        self._may_stop = may_stop
        if trainer.world_size == 1 and not asks_loaders:
            return
        self._trainer, self._process = trainer, os.getpid()
        self._note.zero_()
        self._agreed.zero_()
        self._note[_TERM] = int(trainer.received_sigterm)  # since the fit began
        if trainer.world_size > 1:
            # notes travel between hosts, whatever gradients do; else signals stay Lightning's
            self._group = host_group()
            if self._group is None:
                self._trainer = None
                return
        loop = trainer.fit_loop
        loop.epoch_loop._broadcast_sigterm_tensor = self.exchange  # type: ignore[method-assign]
        loop.on_run_end = self._end_training  # type: ignore[method-assign]
        if threading.current_thread() is not threading.main_thread():
            return
        # Lightning has set its handlers, and restores the user's when the fit ends.
        self._handle(signal.SIGTERM, _TERM)
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            assert environment.requeue_signal is not None
            self._handle(environment.requeue_signal, _REQUEUE)

    def end(self) -> None:
        """Leave signals to Lightning."""
        trainer, self._trainer, self._sent, self._group = self._trainer, None, None, None
        if trainer is not None:
            trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)
            trainer.fit_loop.__dict__.pop("on_run_end", None)

    # ---- a signal --------------------------------------------------------------------------------

    def _handle(self, number: int, kind: int) -> None:
        # Let signal `number` leave a note, beside what handlers of the user do
        trainer, before = self._trainer, signal.getsignal(number)
        assert trainer is not None
        connector = trainer._signal_connector
        composed = getattr(before, "signal_handlers", [before])
        if kind == _REQUEUE and not any(
            getattr(each, "__self__", None) in (connector, self) for each in composed
        ):
            return  # a handler of the user, which replaces Lightning's
        users = [
            each
            for each in composed
            if callable(each) and getattr(each, "__self__", None) is not connector
        ]

        def handler(received: int, frame: Any) -> None:
            if os.getpid() != self._process:  # a worker, before it has handlers of its own
                signal.signal(received, signal.SIG_DFL)
                os.kill(os.getpid(), received)
            if self._trainer is not trainer:
                if callable(before):
                    before(received, frame)
                return
            is_first = not self._note[kind]
            self._note[kind] = 1
            if kind == _TERM and is_first and trainer.strategy.launcher is not None:
                # the ranks that this process has started
                trainer.strategy.launcher.kill(received)
            for each in users:
                each(received, frame)

        signal.signal(number, handler)

    # ---- between two batches ---------------------------------------------------------------------

    def before_fetch(self) -> None:
        """End the fit of one rank here, if it was asked to."""
        if self._trainer is not None and self._trainer.world_size == 1:
            self.exchange()

    def exchange(self) -> None:
        """Learn what ranks were asked before the last batch, and send what this one was since.

        Raises SIGTERMException on all ranks, after the save, when one was asked to end.
        """
        assert self._trainer is not None
        if self._trainer.world_size == 1:
            self._agreed |= self._note
        else:
            self._receive()
            notes = self._note.clone()
            work = dist.all_reduce(notes, dist.ReduceOp.MAX, self._group, async_op=True)
            assert work is not None
            self._sent = work, notes
        if bool(self._agreed.any()) and self._may_stop():
            self._stop(self._trainer)

    def _receive(self) -> None:
        # Wait for the notes that were sent last
        if self._sent is not None:
            (work, notes), self._sent = self._sent, None
            work.wait()
            self._agreed |= notes

    def _end_training(self) -> None:
        # Stop after the last batch, if a rank was asked to; else end training as Lightning does.
        # All ranks have the same batches, so they come here alike
        trainer = self._trainer
        assert trainer is not None
        self._may_stop = lambda: True  # no batch follows
        self.exchange()
        self._receive()
        if bool(self._agreed.any()):
            self._stop(trainer)
        type(trainer.fit_loop).on_run_end(trainer.fit_loop)

    def _stop(self, trainer: pl.Trainer) -> None:
        trainer._signal_connector.received_sigterm = True
        requeues = bool(self._agreed[_REQUEUE])
        path = requeue_path(trainer) if requeues else last_path(trainer)
        # one path: ranks may see each other's files, or not
        path = trainer.strategy.broadcast(path)
        if path is not None:
            for logger in trainer.loggers:
                logger.finalize("finished")
            rank_zero_info(f"a signal ends this fit, which saves {path} first")
            trainer.save_checkpoint(path)
            trainer.strategy.checkpoint_io.teardown()  # which may write beside training
        if requeues and trainer.is_global_zero:
            requeue_job()
        raise SIGTERMException()


def requeue_path(trainer: pl.Trainer) -> str:
    """Return the file that Lightning goes on from in a job that SLURM has queued again."""
    return str(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))


def last_path(trainer: pl.Trainer) -> str | None:
    """Return a file beside the user's last one, named like it; None without such a callback."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.save_last and callback.dirpath:
            name = f"{callback.CHECKPOINT_NAME_LAST}-signal"
            place = {"epoch": trainer.current_epoch, "step": trainer.global_step}
            metrics = {key: torch.tensor(value) for key, value in place.items()}
            return callback.format_checkpoint_name({**trainer.callback_metrics, **metrics}, name)
    return None


def requeue_job() -> None:
    """Queue this SLURM job again, as Lightning does."""
    array = os.getenv("SLURM_ARRAY_JOB_ID")
    job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        log.warning("SLURM job %s could not be queued again: %s", job, error)
    else:
        log.info("queued SLURM job %s again", job)
