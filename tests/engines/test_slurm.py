"""Fits under a SLURM of one machine, two nodes: `slurm_up.sh` says what it is made of."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from lightning_topt.costs.cluster import Cluster
from lightning_topt.plan.parallel_plan import ParallelPlan
from tests.cli.test_sweeps import notes_of, sweep_of
from tests.engines.slurm_job import SAMPLES, Run, Slurm, wait_for

pytestmark = pytest.mark.timeout(400)  # each rank imports torch and Lightning anew


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    cluster = Slurm(tmp_path_factory.mktemp("slurm") / "cluster")
    if missing := cluster.start():
        pytest.skip(missing)
    try:
        yield cluster
    finally:
        cluster.stop()


SRUN = "srun --nodes=2 --ntasks-per-node=1 --kill-on-bad-exit=0"


def batch(run: Run) -> str:
    return f"{SRUN} {shlex.join(run.command())}\n"


@pytest.fixture(scope="module")
def undisturbed(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses under `ddp` of two ranks, by steps."""
    run = Run(tmp_path_factory.mktemp("undisturbed") / "run", kinds=["ddp"])
    slurm.call("srun", "--nodes=2", "--ntasks-per-node=1", *run.command())
    return run.losses("ddp")


def check_samples(run: Run) -> None:
    """Each step was made once, and each sample was in one step of each epoch."""
    steps = Counter((note["step"], note["rank"]) for note in run.notes() if "step" in note)
    assert set(steps.values()) == {1}, steps
    counts = Counter(index for note in run.notes() for index in note.get("samples", []))
    assert counts == dict.fromkeys(range(SAMPLES), 2), counts


def test_a_script_trains_under_srun_as_under_ddp(slurm, tmp_path):
    run = Run(tmp_path / "run", devices=2, kinds=["ddp", "topt"])
    output = slurm.call("srun", "--nodes=2", "--ntasks-per-node=2", *run.command())
    assert "--distribution=block" not in output, output
    check_samples(run)
    assert run.losses() == pytest.approx(run.losses("ddp"), rel=1e-4)
    ends = {note["rank"]: note for note in run.notes() if "ended" in note}
    assert sorted(ends) == [0, 1, 2, 3]
    for rank, note in ends.items():
        node, local = divmod(rank, 2)  # ranks are numbered node by node
        assert (note["world"], note["environment"]) == (4, "SLURMEnvironment")
        assert (note["node_rank"], note["local_rank"]) == (node, local)
        assert note["variables"] == ["node1", str(local), str(node)]
        assert note["host"] == f"node{node + 1}" and note["ended"] == 12
    ddp = next(note for note in run.notes("ddp") if "ended" in note)
    assert ends[0]["val_loss"] == pytest.approx(ddp["val_loss"], rel=1e-4)


def test_ranks_that_are_dealt_out_in_turn_are_known(slurm):
    """The variable that the strategies read; what they say then is tested without SLURM."""
    words = (
        "srun",
        "--nodes=2",
        "--ntasks-per-node=2",
        "--distribution=cyclic",
        "--label",
        "sh",
        "-c",
    )
    output = slurm.call(*words, "echo $SLURM_GTIDS")
    # srun says it where a job has to wait, as for the nodes of the job before
    lines = [line for line in output.splitlines() if not line.startswith("srun: job ")]
    assert sorted(lines) == ["0: 0,2", "1: 1,3", "2: 0,2", "3: 1,3"], output


def test_a_requeued_job_goes_on_after_its_last_batch(slurm, tmp_path, undisturbed):
    """The signal comes by itself before the time limit; SLURM may be a minute early with it."""
    run = Run(tmp_path / "run", kinds=["topt"], holds_at=6)
    options = "--nodes=2", "--ntasks-per-node=1", "--requeue", "--time=3", "--signal=USR1@60"
    job = slurm.submit(batch(run), run.folder, *options)
    wait_for((run.folder / "holds").exists, lambda: run.output() + slurm.logs())
    wait_for((run.folder / "hpc_ckpt_1.ckpt").exists, run.output)
    (run.folder / "held").touch()
    state = slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), run.output()
    check_samples(run)
    assert run.losses() == pytest.approx(undisturbed, rel=1e-4)
    before = [note["step"] for note in run.notes() if note["restarts"] == 0]
    after = [note["step"] for note in run.notes() if note["restarts"] == 1 and "step" in note]
    assert 6 <= max(before) <= 8 and min(after) == max(before) + 1, (before, after)


def test_jobs_go_on_after_a_killed_rank_and_after_scancel(slurm, tmp_path, undisturbed):
    folder = tmp_path / "run"
    killed = Run(folder, killed=[1, 6])
    options = "--nodes=2", "--ntasks-per-node=1"
    job = slurm.submit(batch(killed), folder, *options)
    assert slurm.wait(job, "COMPLETED", "FAILED")["JobState"] == "FAILED"
    assert "rank 1" in killed.output(), killed.output()  # of the error of rank 0
    assert max(killed.losses()) == 6

    # another job, which is told to end: it saves beside the last checkpoint
    (folder / "notes").unlink()
    cancelled = Run(folder, holds_at=10)
    job = slurm.submit(batch(cancelled), folder, *options)
    wait_for((folder / "holds").exists, cancelled.output)
    slurm.call("scancel", job)
    assert slurm.wait(job, "COMPLETED", "CANCELLED")["JobState"] == "CANCELLED"
    (folder / "held").touch()
    assert (folder / "last-signal.ckpt").exists(), cancelled.output()
    made = sorted(cancelled.losses())
    assert made[0] == 5 and 10 <= made[-1] <= 12, made  # every fourth step was saved

    last = Run(folder)
    slurm.wait(slurm.submit(batch(last), folder, *options), "COMPLETED", "FAILED")
    assert sorted(last.losses()) == list(range(5, 25)), last.output()
    expected = {step: loss for step, loss in undisturbed.items() if step > 4}
    assert last.losses() == pytest.approx(expected, rel=1e-4)


TOPT = f"{sys.executable} -m lightning_topt.cli.main"
TINY = (
    "model.num_layers=2 model.hidden=32 model.num_heads=2 model.seq_len=32 data.max_bytes=40000 "
    "trainer.limit_val_batches=2"
)
ARRAY = f"""
SIZES=(4 6)
{SRUN} {TOPT} train {TINY} trainer.devices=1 trainer.num_nodes=2 trainer.max_steps=16 \
    data.batch_size=${{SIZES[$SLURM_ARRAY_TASK_ID]}} \
    "+callbacks.hold={{_target_:tests.engines.slurm_job.Hold,folder:$PWD,step:9,array_task:0}}" \
    hydra.run.dir=runs/$SLURM_ARRAY_TASK_ID
"""


def test_an_array_of_the_command_whose_first_job_is_requeued(slurm, tmp_path):
    """Each job has a folder; a file to go on from is found by its own job alone."""
    options = "--nodes=2", "--ntasks-per-node=1", "--requeue", f"--chdir={tmp_path}"
    job = slurm.submit(ARRAY, tmp_path / "output", "--array=0-1", *options)

    def output() -> str:
        return "\n".join(path.read_text()[-6000:] for path in tmp_path.glob("output/output-*"))

    wait_for((tmp_path / "holds").exists, output)
    slurm.call("scancel", "--signal=USR1", f"{job}_0")
    hpc = tmp_path / "runs" / "0" / "hpc_ckpt_1.ckpt"
    wait_for(hpc.exists, output)
    (tmp_path / "held").touch()
    for task, batch_size in enumerate((4, 6)):
        state = slurm.wait(f"{job}_{task}", "COMPLETED", "FAILED", "CANCELLED")
        found = state["JobState"], state["Restarts"]
        assert found == ("COMPLETED", str(1 - task)), output()
        record = json.loads((tmp_path / "runs" / str(task) / "run.json").read_text())
        assert (record["world_size"], record["global_step"]) == (2, 16)
        assert f"data.batch_size={batch_size}" in record["command"]
        logs = (tmp_path / "output" / f"output-{task}").read_text()
        assert (f"Restored all states from the checkpoint at {hpc}" in logs) == (task == 0), logs
    assert not [*tmp_path.glob("*.ckpt"), *tmp_path.glob("runs/1/*.ckpt")]


TWO_STEPS = f"""
for seed in 1 2; do
    srun --exact --nodes=2 --ntasks=2 --ntasks-per-node=1 {TOPT} train {TINY} trainer.devices=1 \
        trainer.num_nodes=2 trainer.max_steps=6 strategy=topt_compressed seed=$seed &
done
wait
"""


def test_steps_of_a_job_run_side_by_side_each_in_a_folder(slurm, tmp_path):
    """Each step has a port, and its ranks share a folder that nobody has named."""
    options = "--nodes=2", "--ntasks-per-node=2", f"--chdir={tmp_path}"
    job = slurm.submit(TWO_STEPS, tmp_path / "output", *options)
    logs = tmp_path / "output" / "output-4294967294"  # no array
    state = slurm.wait(job, "COMPLETED", "FAILED")
    assert state["JobState"] == "COMPLETED", logs.read_text()
    folders = sorted((tmp_path / "outputs" / "train").iterdir())
    names = [folder.name.rpartition("_")[0] for folder in folders]
    assert names == [f"slurm_{job}.0", f"slurm_{job}.1"]
    check_folders(folders)


def check_folders(folders):
    """Each is of one run of two ranks, which made six steps."""
    for folder in folders:
        record = json.loads((folder / "run.json").read_text())
        assert (record["world_size"], record["global_step"]) == (2, 6)
        assert {"train.log", "train_rank_1.log"} <= {path.name for path in folder.iterdir()}


def test_one_rank_plans_where_the_cluster_is_given(slurm, tmp_path):
    words = f"plan {TINY} tensor=false pipeline=false cluster=local_cpu hydra.run.dir={tmp_path}"
    command = f"{SRUN} --label {TOPT} {words}".split()
    output = slurm.call(*command)
    said = [line for line in output.splitlines() if "run folder" in line]
    assert len(said) == 1 and said[0].startswith("0:"), output
    assert (tmp_path / "plan.yaml").is_file()


def test_a_sweep_by_ranks_of_srun(slurm, tmp_path):
    command = sweep_of(tmp_path, "rate=0.1,0.2")
    slurm.call("srun", "--nodes=1", "--ntasks-per-node=2", *command)
    check_ranks(notes_of(tmp_path))


def check_ranks(jobs):
    for ranks, rate in zip(jobs.values(), (0.1, 0.2), strict=True):
        assert [(rank["rate"], rank["ranks"]) for rank in ranks] == [(rate, 2)] * 2
        assert ranks[0]["loss"] == ranks[1]["loss"]


def test_the_command_under_submitit(slurm, tmp_path):
    """The second rank is a task of SLURM; all jobs are in the folder that the command has named."""
    pytest.importorskip(
        "hydra_plugins.hydra_submitit_launcher", reason="no hydra-submitit-launcher"
    )
    words = f"train -m {TINY} trainer.devices=2 trainer.max_steps=6 seed=1,2"
    launcher = "hydra/launcher=submitit_slurm hydra.launcher.tasks_per_node=2"
    command = f"{TOPT} {words} {launcher} hydra.launcher.timeout_min=5"
    slurm.call("env", f"--chdir={tmp_path}", *command.split())
    [sweep] = (tmp_path / "outputs" / "train").iterdir()
    records = [json.loads((sweep / n / "run.json").read_text()) for n in "01"]
    for record in records:
        assert (record["world_size"], record["global_step"]) == (2, 6)
    assert records[0]["metrics"] != records[1]["metrics"]  # of two seeds


def test_a_plan_is_for_the_nodes_and_devices_of_the_job(slurm, tmp_path):
    # Lightning would refuse 4 tasks of the batch script, and their number for the trainer's
    options = "--nodes=2", "--gpus-per-node=2", "--ntasks=4"
    words = f"plan {TINY} tensor=false pipeline=false cluster=a100_8x8"
    words += " cluster.num_nodes=$SLURM_JOB_NUM_NODES cluster.devices_per_node=$SLURM_GPUS_ON_NODE"
    script = f"{TOPT} {words} hydra.run.dir={tmp_path}/run\n"
    slurm.submit(script, tmp_path / "output", "--wait", *options)
    output = "\n".join(path.read_text() for path in (tmp_path / "output").glob("output-*"))
    assert "Planning for all 4 devices of a100_8x8, in " in output, output
    assert ParallelPlan.load(tmp_path / "run" / "plan.yaml").mesh.size == 4


def test_a_calibration_joins_the_tasks_of_srun(slurm, tmp_path):
    path = tmp_path / "cluster.yaml"
    words = [*TOPT.split(), "calibrate", "accelerator=cpu", f"output={path}"]
    words.append(f"hydra.run.dir={tmp_path}/run")
    slurm.call("srun", "--nodes=2", "--ntasks-per-node=1", *words)
    cluster = Cluster.load(path)
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 1)
    assert cluster.inter is not None
