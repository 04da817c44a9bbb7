"""A rank that is lost is named in the errors of the others, and the end is orderly.

When a rank dies, hangs or is stopped, the others get an error of a collective call that says
nothing of it; here that error says which rank is lost, and why (`communication.rank_watch`),
however ranks were started. A strategy has a `LostRankWatch`, as `rank_watch`, to which its hooks
delegate.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
    subprocess_script,
)
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_topt.communication.rank_watch import (
    GRACE_SECONDS,
    STORE_SECONDS,
    PeerLostError,
    RankWatch,
    init_attempt,
    is_of_collective,
    shares_store_between_attempts,
    watch_ranks,
)

log = logging.getLogger(__name__)

# Called with the Trainer, its function, and the function's arguments.
Runs = Callable[[pl.Trainer, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
LAST_SECONDS = (
    2 * GRACE_SECONDS + STORE_SECONDS + 5
)  # for the main process to end with its own error

_END_SECONDS = 5.0  # for a process group to end after an error, and for ranks after an interrupt
_cut_off: list[bool] = []  # whether an error has ended the last run

# ---- of sweeps
END_SECONDS = 60.0  # that ranks of a job have to end, after their main process has
_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")
# Launchers whose jobs run in the user's program, whose command line is known there.
_LAUNCHERS = (".BasicLauncher", ".JoblibLauncher")
# What a rank is given by its job, in place of the user's.
_OF_THE_JOB = ("hydra.mode", "hydra.run.", "hydra.sweep.", "hydra.output_subdir", "hydra.job.")


class LostRankWatch:
    """Watches all ranks of a strategy's run, and says which one is lost in the error that ends it.

    `begin` comes with ``setup_environment``, `end` with ``teardown``. `ranks` is the watch of the
    present run, None where there is none.
    """

    def __init__(self) -> None:
        check_job()
        begin_job()
        self.ranks: RankWatch | None = None
        self._ended_with_error = False
        self._launchers: tuple[Any, Any] = (None, None)  # Lightning's, and ours in its place

    def launcher(self, strategy: DDPStrategy, own: Any, *, runs: Runs | None = None) -> Any:
        """Return a launcher of ranks that lets them end with the name of a lost one.

        Args:
            strategy: starts its ranks.
            own: the launcher that Lightning has made for it.
            runs: what runs the functions of a Trainer in ranks as processes, in place of a call.
        """
        before, ours = self._launchers
        if own is before:
            return ours
        # Ranks as processes; else by fork or spawn.
        if isinstance(own, _SubprocessScriptLauncher):
            assert strategy.cluster_environment is not None
            ours = PatientLauncher(
                strategy.cluster_environment, strategy.num_processes, strategy.num_nodes
            )
            ours.runs = runs
        elif isinstance(own, _MultiProcessingLauncher):
            ours = NamingLauncher(strategy, start_method=own._start_method)
        else:
            ours = own
        self._launchers = own, ours
        return ours

    def meet(self, strategy: DDPStrategy, *, is_restarted: bool = False) -> None:
        """Let restarted ranks meet in the store of those before them, before Lightning begins.

        `is_restarted`: ranks may have been started again by others than torchrun.
        """
        if dist.is_initialized() or not (is_restarted or shares_store_between_attempts()):
            return
        strategy.set_world_ranks()
        device = None if strategy.root_device.type == "cpu" else strategy.root_device
        init_attempt(
            strategy._get_process_group_backend(),
            rank=strategy.global_rank,
            world_size=strategy.world_size,
            timeout=strategy._timeout or default_pg_timeout,
            device_id=device,
        )

    def begin(self) -> None:
        """Watch the ranks of this process group, which ends before the interpreter does."""
        # That of an earlier fit.
        self.end()
        self.ranks, self._ended_with_error = watch_ranks(), False
        atexit.register(destroy_process_group)
        _cut_off.clear()

    def end(self) -> None:
        """Stop watching."""
        ranks, self.ranks = self.ranks, None
        if ranks is not None:
            ranks.stop()

    def name(self, error: BaseException) -> None:
        """Let `error`, which ends the run, say which rank is lost."""
        self._ended_with_error = True
        _cut_off[:] = [True]
        name_lost(error, self.ranks)

    def diagnose(self, error: BaseException) -> PeerLostError | None:
        """Return who is lost, now that a collective call has ended with `error`."""
        return None if self.ranks is None else self.ranks.diagnose(error)

    @contextmanager
    def last(self) -> Generator[None]:
        """Return the context of the strategy's teardown, after which nobody watches."""
        try:
            yield
        except RuntimeError as error:
            # Where a backward pass was cut off, parameters may not be moved any more: that must not
            # hide what cut it off.
            if not self._ended_with_error:
                raise
            log.warning("the module stays as the error left it: %s", error)
        finally:
            self.end()


def name_lost(error: BaseException, watch: RankWatch | None) -> None:
    """Let `error` of a collective call say which rank is lost.

    Of any other error word is left for the other ranks.
    """
    # Somebody has said it already.
    if watch is None or (isinstance(error, PeerLostError) and error.diagnosed):
        return
    if is_of_collective(error):
        error.args = watch.diagnose(error).args
    else:
        watch.tell(error)


class NamingLauncher(_MultiProcessingLauncher):
    """Lightning's start of ranks by fork or spawn, whose errors reach the strategy.

    Lightning's own asks it in the main process only, and leaves ranks running where an interrupt
    reaches that alone, as in a notebook. What ranks have decided comes back with the weights.
    """

    @override
    def launch(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().launch(*args, **kwargs)
        except KeyboardInterrupt:
            try:
                self._end_ranks(signal.SIGINT)  # as Ctrl-C ends them
            finally:  # also where the user interrupts this
                self._end_ranks(signal.SIGKILL)
            raise

    def _end_ranks(self, number: signal.Signals) -> None:
        self.kill(number)
        deadline = time.monotonic() + _END_SECONDS
        for process in self.procs:
            process.join(max(deadline - time.monotonic(), 0.0))

    @override
    def get_extra_results(self, trainer: pl.Trainer) -> dict[str, Any]:
        results = super().get_extra_results(trainer)
        decided = getattr(trainer.strategy, "decided", None)
        return results if decided is None else {**results, "decided": decided}

    @override
    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        if "decided" in extra:
            trainer.strategy.decided = extra["decided"]  # type: ignore[attr-defined]

    @override
    def _wrapping_function(self, process_idx: int, trainer: Any, *args: Any, **kwargs: Any) -> None:
        try:
            super()._wrapping_function(process_idx, trainer, *args, **kwargs)
        except Exception as error:
            strategy = self._strategy if trainer is None else trainer.strategy
            name_lost(error, strategy.rank_watch.ranks)  # type: ignore[union-attr]
            raise


class PatientLauncher(_SubprocessScriptLauncher):
    """Lightning's start of ranks as processes, whose main one may end by itself.

    When a rank has died the main process says who, with its own error. Lightning's own kills the
    main process as soon as it has noticed, within five seconds.

    Attributes:
        runs: what runs a Trainer's function; None: it is called.
    """

    runs: Runs | None = None

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        # As in Lightning, but for the observer.
        self.cluster_environment.validate_settings(
            num_devices=self.num_processes, num_nodes=self.num_nodes
        )
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            observer = PatientObserver(main_pid=os.getpid(), child_processes=self.procs)
            observer.start()
            know_ranks(self.procs, observer.stop)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        if self.runs is not None and trainer is not None:
            return self.runs(trainer, function, args, kwargs)
        return function(*args, **kwargs)

    @override
    def _call_children_scripts(self) -> None:
        with _commands_of_jobs():
            super()._call_children_scripts()


@contextmanager
def _commands_of_jobs() -> Generator[None]:
    # Let Lightning start the ranks of a job of a sweep, not of all of the sweep
    if job_folder() is None:
        yield
        return
    scripts: Any = subprocess_script
    own, scripts._hydra_subprocess_cmd = scripts._hydra_subprocess_cmd, rank_command
    try:
        yield
    finally:
        scripts._hydra_subprocess_cmd = own


class PatientObserver(_ChildProcessObserver):
    """Kills what is left of a run only where its main process has not ended by itself."""

    def stop(self) -> None:
        """Let the main process go on without these ranks, with the next job of a sweep."""
        self._finished = True

    @override
    def _terminate_all(self) -> None:
        # The main process waits in a collective call until that names the lost rank.
        main, deadline = threading.main_thread(), time.monotonic() + LAST_SECONDS
        while main.is_alive() and not self._finished and time.monotonic() < deadline:
            time.sleep(0.1)
        if self._finished:
            return
        if main.is_alive():
            super()._terminate_all()
            return
        for process in self._child_processes:
            process.send_signal(self._termination_signal)


def destroy_process_group() -> None:
    """Destroy the process group, for `atexit`.

    Lightning does this for NCCL only; threads of a gloo group that outlives the interpreter can
    abort it. A thread of the group drops the tensors of the last collective call after that has
    returned, for which it needs the interpreter. Trainers and models refer to the group in cycles:
    it ends with a collection, which takes a fifth of a second.

    After an error gloo waits for calls that other ranks have left, which may wait for this one to
    end. So the process ends then, after a few seconds.
    """
    if not dist.is_initialized():
        return
    if _cut_off:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # its thread needs no interpreter, which a call into gloo may hold
        nowhere = open(os.devnull, "w")  # noqa: SIM115
        faulthandler.dump_traceback_later(_END_SECONDS, exit=True, file=nowhere)
    dist.destroy_process_group()
    gc.collect()
    if _cut_off:
        faulthandler.cancel_dump_traceback_later()


# ---- jobs of a Hydra sweep -----------------------------------------------------------------------
#
# Lightning starts rank 1 by running the command line again. In a sweep (``--multirun``) that would
# be all of its jobs, so ranks are started with the overrides of their job instead:
#
#     python train.py -m lr=0.1,0.2 hydra/launcher=joblib
#     python train.py lr=0.2 hydra/launcher=joblib hydra.mode=RUN hydra.run.dir=...  rank 1 of job 1
#
# A process that starts ranks has their environment variables and their process group from then on.
# The next job begins without them: `begin_job`, from a strategy's constructor. Under srun or
# torchrun every rank runs all jobs, one by one with the others. On SLURM submitit starts the ranks.


@dataclass(frozen=True)
class _Started:
    """A job whose ranks this process has started."""

    folder: str
    processes: Sequence[subprocess.Popen[bytes]]
    stop_watching: Callable[[], None]


_started: list[_Started] = []  # the last one


def job_folder() -> str | None:
    """Return the folder of the job of a sweep that this process runs; None outside of sweeps."""
    hydra = sys.modules.get("hydra.core.hydra_config")  # loaded by the user's program, or not
    if hydra is None or not hydra.HydraConfig.initialized():
        return None
    job = hydra.HydraConfig.get()
    if job.mode is None or job.mode.name != "MULTIRUN":  # None: composed by a program itself
        return None
    return str(job.runtime.output_dir)


def rank_command(local_rank: int) -> tuple[list[str], str]:
    """Return the command that runs this job once more, as another rank, and the folder for it."""
    job = sys.modules["hydra.core.hydra_config"].HydraConfig.get()
    launcher = str(job.launcher.get("_target_", ""))
    if not launcher.endswith(_LAUNCHERS):
        raise ValueError(
            f"jobs of {launcher} cannot start ranks by a command line: give the strategy "
            'start_method="spawn", or the Trainer devices=1'
        )
    given = {
        "hydra.mode": "RUN",
        "hydra.run.dir": _quoted(job.runtime.output_dir),
        # What a user's configuration may read of the sweep.
        "hydra.sweep.dir": _quoted(job.sweep.dir),
        "hydra.sweep.subdir": _quoted(job.sweep.subdir),
        "hydra.job.num": job.job.num,
        "hydra.job.id": _quoted(job.job.id),
        # As Lightning does: ranks write no configuration, and logs of their own.
        "hydra.output_subdir": "null",
        "hydra.job.name": f"{job.job.name}_rank_{local_rank}",
    }
    command = [
        *_program(job.runtime.cwd),
        *_without_overrides(sys.argv[1:]),
        *job.overrides.task,
        *(word for word in job.overrides.hydra if not word.lstrip("+~").startswith(_OF_THE_JOB)),
        *(f"{name}={value}" for name, value in given.items()),
    ]
    return command, job.runtime.cwd


def _program(folder: str) -> list[str]:
    # How Python runs the user's program from a folder, in workers of a launcher too
    # In a worker of a launcher `__main__` is another program, and the arguments are the user's.
    path = os.path.join(folder, sys.argv[0])
    for name in ("__mp_main__", "__main__"):
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if spec is not None and spec.origin == path:
            return [sys.executable, "-m", spec.name]
    return [sys.executable, path]


def _without_overrides(words: Sequence[str]) -> list[str]:
    # What is left of a Hydra command line: commands, and options but that of the sweep
    return [
        word
        for word in words
        if word not in ("-m", "--multirun")
        and (word.startswith("-") or not (word.startswith("~") or "=" in word))
    ]


def _quoted(value: object) -> str:
    # A text as Hydra reads it in an override
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def know_ranks(
    processes: Sequence[subprocess.Popen[bytes]], stop_watching: Callable[[], None]
) -> None:
    """Know the ranks that were started for the present job, which the next one does without."""
    folder = job_folder()
    if folder is not None:
        _started[:] = [_Started(folder, processes, stop_watching)]


def check_job() -> None:
    """Raise ValueError where the ranks of srun or torchrun would not run the same jobs in turn."""
    if job_folder() is None:
        return
    from lightning_topt.communication.started_ranks import started_rank  # noqa: PLC0415  (sweeps)

    job = sys.modules["hydra.core.hydra_config"].HydraConfig.get()
    launcher, sweeper = (str(job[kind].get("_target_", "")) for kind in ("launcher", "sweeper"))
    if started_rank()[1] == 1 or "submitit" in launcher:
        return
    if not (launcher.endswith(".BasicLauncher") and sweeper.endswith(".BasicSweeper")):
        raise ValueError(
            "each rank of srun or torchrun runs the whole sweep, and with this launcher or sweeper "
            "not the same jobs in turn: start the sweep in one process, or leave out "
            "hydra/launcher and hydra/sweeper"
        )


def begin_job() -> None:
    """Let a job of a sweep start its own ranks, if this process has those of another one."""
    if not _started or job_folder() in (None, _started[0].folder):
        return
    last = _started.pop()
    last.stop_watching()
    # Ranks end with their job; one that hangs is killed.
    deadline = time.monotonic() + END_SECONDS
    for process in last.processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("process %d of the last job has not ended: it is killed", process.pid)
            process.kill()
            process.wait()
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in _VARIABLES:
        os.environ.pop(name, None)
