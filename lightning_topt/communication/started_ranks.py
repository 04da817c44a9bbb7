"""Ranks that srun or torchrun has started, before they have a process group.

    started_rank()      this rank, and how many there are      their variables
    leave_to_rank_0()   the others end here                    a command that one rank does
    run_name(name, of)  one name of a run on all ranks         folders, which had the rank's time

srun says who is a rank by the variables of the step, torchrun by its own. A process that a rank of
srun starts by torchrun is a rank of torchrun.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

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
