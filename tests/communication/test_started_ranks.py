"""What ranks of srun and torchrun know of each other before they have a process group."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_topt.communication.started_ranks import leave_to_rank_0, run_name, started_rank
from tests.launch import free_port

STEP = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "3", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1)),
        ({**STEP, "SLURM_PROCID": "1"}, (1, 2)),
        ({**STEP, "SLURM_PROCID": "1", **TORCHRUN}, (3, 4)),  # torchrun as a task of srun
        ({"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, (0, 1)),  # sbatch
        ({"RANK": "1", "WORLD_SIZE": "2"}, (0, 1)),  # a rank that Lightning has started
    ],
)
def test_the_started_rank(variables: dict[str, str], expected: tuple[int, int]) -> None:
    assert started_rank(variables) == expected


def test_other_ranks_leave_with_success(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**STEP, "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    leave_to_rank_0()
    monkeypatch.setenv("SLURM_PROCID", "1")
    with pytest.raises(SystemExit) as left:
        leave_to_rank_0()
    assert left.value.code == 0


COMMAND = ["seed=1"]


def test_a_run_of_slurm_is_named_by_its_step_and_its_command() -> None:
    assert run_name("noon", COMMAND, {}) == "noon"
    step = {**STEP, "SLURM_PROCID": "1"}
    name = run_name("noon", COMMAND, step)
    assert name.startswith("slurm_4711.0_")
    assert run_name("one", COMMAND, {**step, "SLURM_PROCID": "0"}) == name
    assert run_name("noon", ["seed=2"], step) != name
    assert run_name("noon", ["seed=", "1"], step) != name
    array = {"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "2"}
    assert run_name("noon", COMMAND, {**step, **array}).startswith("slurm_4700_2.0_")


def test_a_run_of_torchrun_has_the_first_name_that_a_rank_leaves() -> None:
    store = dist.TCPStore("localhost", free_port(), is_master=True, wait_for_workers=False)
    variables = {
        **TORCHRUN,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
    }
    names: list[str] = []
    ranks = [
        threading.Thread(target=lambda n=n: names.append(run_name(f"at {n}", COMMAND, variables)))
        for n in range(3)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timedelta(seconds=60).total_seconds())
    assert len(names) == 3 and len(set(names)) == 1 and names[0].startswith("at ")
    assert run_name("after a restart", COMMAND, variables) == names[0]
    assert run_name("at 3", ["seed=2"], variables) == "at 3"  # another command
    own_store = {**variables, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert run_name("noon", COMMAND, own_store) == "noon"
