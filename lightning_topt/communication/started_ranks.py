"""Ranks that srun or torchrun has started, before they have a process group.

    started_rank()      this rank, and how many there are      their variables
    leave_to_rank_0()   the others end here                    a command that one rank does
    give_step_port()    MASTER_PORT of a SLURM step            where ranks of several steps meet
    run_name(name, of)  one name of a run on all ranks         folders, which had the rank's time

srun says who is a rank by the variables of the step, torchrun by its own. A process that a rank of
srun starts by torchrun is a rank of torchrun.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

# Lightning's port of a job is in 15000-24999; the kernel gives ports from 32768 to connections.
_FIRST_PORT, _PORTS = 25000, 7000
_NAME_SECONDS = 60.0  # for torchrun's store to answer


def started_rank(environment: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Return this rank and the number of ranks that torchrun or srun has started; else 0 and 1."""
    environment = os.environ if environment is None else environment
    if "TORCHELASTIC_RUN_ID" in environment:
        return int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if (tasks := int(environment.get("SLURM_STEP_NUM_TASKS", 1))) > 1:
        return int(environment["SLURM_PROCID"]), tasks
    return 0, 1


def leave_to_rank_0() -> None:
    """End this process, with success, where it is another rank that torchrun or srun started."""
    if started_rank()[0] > 0:
        raise SystemExit(0)


# ---- the port of a SLURM step


def give_step_port(environment: MutableMapping[str, str] | None = None) -> None:
    """Set MASTER_PORT where this is a later step of a SLURM job, which may run beside others.

    Lightning's port is that of the job, so that of all its steps; the first one keeps it. Ranks
    find the port without a word to each other: it comes from the numbers of job and step.
    """
    environment = os.environ if environment is None else environment
    job, step = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_STEP_ID", "")
    if "MASTER_PORT" in environment or "TORCHELASTIC_RUN_ID" in environment:
        return
    # some numbers stand for steps that srun has not started, such as the batch script
    if job.isdecimal() and step.isdecimal() and 0 < int(step) < 2**31:
        # neighbours differ: steps of one job by 1, jobs by a prime
        environment["MASTER_PORT"] = str(_FIRST_PORT + (int(job) * 101 + int(step)) % _PORTS)


@contextmanager
def named_port() -> Generator[None, None, None]:
    """Let an error of a port that is in use say what gives ranks another one."""
    try:
        yield
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = os.environ.get("MASTER_PORT", "of MASTER_PORT")
        raise dist.DistNetworkError(
            f"port {port}, where ranks are to meet, is in use on this machine, as by another step "
            "of the same job that was given MASTER_PORT: give each step its own, such as "
            f"MASTER_PORT=$((20000 + RANDOM % 10000)) srun ... ({error})"
        ) from error


# ---- one name of a run


def run_name(
    name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
) -> str:
    """Return the name of a run that all its ranks have, by the words of its `command`.

    Of a SLURM step it has the numbers of job and step, so a requeued job finds its folder again. Of
    torchrun it is the `name` of the first rank that asks, in a restart too. Else `name` itself.
    Other commands of the same step, or under the same torchrun, have other names: their words
    differ. The same command, given again, goes on in its folder.
    """
    environment = os.environ if environment is None else environment
    if started_rank(environment)[1] == 1:
        return name
    of_command = hashlib.sha256("\0".join(command).encode()).hexdigest()[:6]
    if "TORCHELASTIC_RUN_ID" in environment:
        return _first_name(name, of_command, environment)
    job = environment.get("SLURM_ARRAY_JOB_ID")
    job = f"{job}_{environment['SLURM_ARRAY_TASK_ID']}" if job else environment["SLURM_JOB_ID"]
    return f"slurm_{job}.{environment['SLURM_STEP_ID']}_{of_command}"


def _first_name(name: str, of_command: str, environment: Mapping[str, str]) -> str:
    # The first name that a rank has left for a command in the store of torchrun's agent
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return name  # rank 0 makes a store later
    store = TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=_NAME_SECONDS),
    )
    return store.compare_set(f"lightning_topt/run_name/{of_command}", "", name).decode()
