"""Jobs of a Hydra sweep (``--multirun``), one after the other in a process that starts ranks.

Lightning starts rank 1 by running the command line again. In a sweep that would be the whole sweep,
so ranks are started with the overrides of their job instead:

    python train.py -m lr=0.1,0.2 hydra/launcher=joblib
    python train.py lr=0.2 hydra/launcher=joblib hydra.mode=RUN hydra.run.dir=...   rank 1 of job 1

A process that starts ranks has their environment variables and their process group from then on.
The next job begins without them: `begin_job`, from a strategy's constructor.

Under srun or torchrun every rank runs the whole sweep, job by job with the others. On SLURM
submitit starts the ranks of each job.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

log = logging.getLogger(__name__)

END_SECONDS = 60.0  # that ranks of a job have to end, after their main process has
_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")
_MULTIRUN = ("-m", "--multirun")
# Launchers whose jobs run in the user's program, whose command line is known there.
_LAUNCHERS = (".BasicLauncher", ".JoblibLauncher")
# What a rank is given by its job, in place of the user's.
_OF_THE_JOB = ("hydra.mode", "hydra.run.", "hydra.sweep.", "hydra.output_subdir", "hydra.job.")


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
        if word not in _MULTIRUN
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
