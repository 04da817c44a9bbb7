"""Fits that go on after a loss, under real torchrun: which steps they make, on which samples, and
what they leave behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from lightning_topt import AutoParallelStrategy
from lightning_topt.execution.surviving_state import MEMORY
from lightning_topt.plugins.elastic import ElasticRun, copy_buffers, set_buffers
from tests.launch import free_port, run_ranks
from tests.preloaded import preloaded_python

SAMPLES = 48
# Writes a line for each batch that was trained on. Does what ``events`` says: [[event, step, rank],
# ...], each once, where that rank begins, or ends, the batch that makes that step.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset
from lightning_topt import AutoParallelStrategy
from lightning_topt.execution.surviving_state import SurvivingStates
from tests.plugins.trainer_ranks import mean_over_ranks

folder, options, SAMPLES = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])

class Numbers(Dataset):
    def __len__(self):
        return SAMPLES
    def __getitem__(self, index):
        values = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return index, values, values.sum()[None]

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        first = nn.Linear(8, 16, bias=False)
        self.net = nn.Sequential(first, nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
        self.register_buffer("count", torch.zeros(1))
    def training_step(self, batch, batch_idx):
        self.count = self.count + 1
        self.event("odd" if batch_idx % 2 else "even", self.trainer.global_step + 1)
        self.event("in", self.trainer.global_step + 1)
        _, values, sums = batch
        return nn.functional.mse_loss(self.net(values), sums)
    def validation_step(self, batch, batch_idx):
        self.event("validate", self.trainer.global_step)
        loss = nn.functional.mse_loss(self.net(batch[1]), batch[2])
        self.log("val_loss", loss, sync_dist=True)
    def on_validation_end(self):
        if not self.trainer.sanity_checking:
            self.note(validated=self.trainer.global_step)
    def on_train_batch_end(self, outputs, batch, batch_idx):
        step = self.trainer.global_step
        self.event("end", step)
        loss = mean_over_ranks(outputs["loss"])
        self.note(step=step, loss=loss, samples=batch[0].tolist(), epoch=self.current_epoch)
    def note(self, **values):
        line = {"rank": self.global_rank, "world": self.trainer.world_size, **values}
        with open(folder / "notes", "a") as file:
            file.write(json.dumps(line) + chr(10))
    def event(self, place, step):
        for number, (event, at, rank) in enumerate(options["events"]):
            done = folder / f"event-{number}-{self.global_rank}"
            if at != step or rank not in (None, self.global_rank) or done.exists():
                continue
            kind, _, where = event.partition(" ")
            if where != place:
                continue
            done.touch()
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif kind == "kill_torchrun_rank":
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(60)  # it ends with the other process
            elif kind == "stop":
                self.trainer.should_stop = True
            elif kind == "fail":
                raise ValueError("of the user")
            elif kind == "damage":
                SurvivingStates.write = damaged
            elif kind == "kill_first_that_saves":
                self.on_save_checkpoint = self.kill_first
            elif kind == "hold":
                held = folder / f"held-{at}-{os.environ['AGENT']}"
                held.write_text(f"{os.getpid()} {os.getppid()}")
                note = self.trainer.strategy._training_data._preemption._note
                while not (note.any() or (folder / f"go-{at}").exists()):
                    time.sleep(0.01)
    def kill_first(self, checkpoint):
        try:
            (folder / "first").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)]

write = SurvivingStates.write
def damaged(states, place, make):
    write(states, place, make)
    _, path = states.newest(place.fit)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)

model = Module()
loader = DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=options["workers"])
callbacks = []
if options["saves"]:
    callbacks = [ModelCheckpoint(folder, save_last=True, every_n_train_steps=2, save_top_k=0)]
trainer = L.Trainer(
    accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    strategy=AutoParallelStrategy(
        elastic=True, plan=options["plan"], uneven=options["uneven"]
    ), logger=False,
    callbacks=callbacks, enable_checkpointing=options["saves"],
    enable_progress_bar=False, enable_model_summary=False,
    max_epochs=2, accumulate_grad_batches=options["accumulate"], num_sanity_val_steps=0,
)
trainer.fit(
    model, loader, DataLoader(Numbers(), batch_size=16) if options["validates"] else None,
    ckpt_path="last" if options["saves"] else None,
)
if trainer.is_global_zero:
    torch.save(model.state_dict(), folder / "end.pt")
"""


class Job:
    """A torchrun that runs `SCRIPT` in a folder."""

    def __init__(self, folder: Path, events: list[list[Any]], **options: Any) -> None:
        self.folder = folder
        self.options: dict[str, Any] = {
            "events": events,
            "plan": "ddp",
            "uneven": None,
            "accumulate": 1,
            "workers": 0,
            "saves": False,
            "validates": False,
            **options,
        }
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *torchrun: str, is_parent: bool = False) -> subprocess.Popen[str]:
        """Start torchrun. Where it `is_parent` of the ranks, as ever, their imports take longer."""
        self.folder.mkdir(exist_ok=True)
        script = str(self.folder / "train.py")
        Path(script).write_text(SCRIPT)
        output = open(self.folder / f"output-{len(self.processes)}", "w")  # noqa: SIM115
        with output:
            command = [*torchrun, "--no-python", sys.executable] if is_parent else [*torchrun]
            arguments = [str(self.folder), json.dumps(self.options), str(SAMPLES)]
            process = subprocess.Popen(
                [preloaded_python(), "-m", "torch.distributed.run", *command, script, *arguments],
                env={
                    **os.environ,
                    "PYTHONPATH": str(Path(__file__).parents[2]),
                    "OMP_NUM_THREADS": "1",
                    "AGENT": str(len(self.processes)),
                    # else torch 2.13 lets a node that comes later wait in vain
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int("--nnodes" in torchrun)),
                },
                text=True,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def run(self, ranks: int, *, restarts: int = 0, succeeds: bool = True) -> None:
        process = self.start(
            *("--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)),
            is_parent=restarts > 0,
        )
        process.wait(timeout=180)
        assert (process.returncode == 0) is succeeds, self.output()

    def output(self) -> str:
        return "\n".join(path.read_text()[-6000:] for path in sorted(self.folder.glob("output-*")))

    def notes(self) -> list[dict[str, Any]]:
        path = self.folder / "notes"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def losses(self) -> dict[int, float]:
        return {note["step"]: note["loss"] for note in self.notes() if "step" in note}

    def check_samples(self, *, epochs: int = 2) -> None:
        """Each sample was trained on once in each epoch."""
        for epoch in range(epochs):
            counts = Counter(
                index
                for note in self.notes()
                if note.get("epoch") == epoch
                for index in note["samples"]
            )
            assert counts == Counter(range(SAMPLES)), (epoch, counts, self.output())

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def left_in_memory() -> list[Path]:
    return list(MEMORY.glob(f"topt-elastic-{os.getuid()}-*"))


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Any]:
    """Makes jobs, after which nothing is left in memory."""
    before, made = set(left_in_memory()), []

    def make(events: list[list[Any]], **options: Any) -> Job:
        made.append(Job(tmp_path / str(len(made)), events, **options))
        return made[-1]

    yield make
    for job in made:
        job.close()
    deadline = time.monotonic() + 20
    while set(left_in_memory()) - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not set(left_in_memory()) - before


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = Job(tmp_path_factory.mktemp("undisturbed") / "job", [])
    job.run(3)
    job.check_samples()
    return job


def check_same(job: Job, other: Job) -> None:
    """The runs made the same steps, and have the same weights at their ends."""
    assert job.losses() == pytest.approx(other.losses(), rel=1e-4), job.output()
    check_same_end(job, other)


def check_same_end(job: Job, other: Job) -> None:
    ends = [torch.load(each.folder / "end.pt") for each in (job, other)]
    for name, value in ends[0].items():
        # statistics of BatchNorm are those of the rank that has left them
        if "running" not in name:
            torch.testing.assert_close(value, ends[1][name], rtol=1e-3, atol=1e-4)


def test_losses_of_ranks_change_nothing(jobs: Any, undisturbed: Job) -> None:
    """In the first step of all, twice in one step, in the last batch of an epoch, in the first one
    of the next; with workers.
    """
    events = [["kill in", 1, 2], ["kill in", 3, 1], ["kill in", 3, 0], ["kill in", 4, 0]]
    job = jobs([*events, ["kill in", 5, 2]], workers=1)
    job.run(3)
    job.check_samples()
    check_same(job, undisturbed)
    assert len(list(job.folder.glob("event-*"))) == 5


def test_a_loss_after_an_update(jobs: Any, undisturbed: Job) -> None:
    """The ranks that are left have made the step, whatever hook they are in: it is not repeated."""
    job = jobs([["kill end", 3, 1], ["kill end", 4, 2], ["kill end", 8, 0]])
    job.run(3)
    check_same_end(job, undisturbed)
    assert job.losses().keys() | {3, 4, 8} == undisturbed.losses().keys()


def test_a_kill_while_a_state_is_written(jobs: Any, undisturbed: Job) -> None:
    """The next one writes it. Ranks with equally many batches have none to join."""
    job = jobs([["kill_first_that_saves in", 5, None], ["kill in", 6, 0]], uneven="join")
    job.run(3)
    assert (job.folder / "first").exists()
    job.check_samples()
    check_same(job, undisturbed)


def test_a_fit_that_was_asked_to_stop_does(jobs: Any) -> None:
    job = jobs([["stop end", 3, None], ["kill end", 3, 1]], validates=True)
    job.run(2)
    assert job.losses().keys() == {1, 2}, job.output()
    assert {note["validated"] for note in job.notes() if "validated" in note} == {3}
    assert torch.load(job.folder / "end.pt")["count"] == 3


def test_a_window_that_is_not_full_comes_again(jobs: Any) -> None:
    plain, disturbed = jobs([], accumulate=2), jobs([["kill odd", 3, 1]], accumulate=2)
    for job in (plain, disturbed):
        job.run(2)
    check_same_end(disturbed, plain)
    assert disturbed.losses().keys() == plain.losses().keys()


def test_a_loss_in_a_validation_lets_all_of_it_come_again(jobs: Any) -> None:
    plain = jobs([], validates=True)
    disturbed = jobs([["kill validate", 6, 1], ["kill validate", 12, 0]], validates=True)
    for job in (plain, disturbed):
        job.run(2)
        job.check_samples()
    check_same(disturbed, plain)
    for job in (plain, disturbed):
        validated = Counter(note["validated"] for note in job.notes() if "validated" in note)
        assert validated == {6: 2, 12: 2}, job.output()


def test_damaged_states_are_left_out(jobs: Any) -> None:
    """Then the fit begins again from its ckpt_path."""
    plain, job = jobs([], saves=True), jobs([["kill in", 6, 1], ["damage in", 6, 0]], saves=True)
    for each in (plain, job):
        each.run(2)
    assert "is damaged, and is left out" in job.output()
    check_same(job, plain)
    steps = Counter(note["step"] for note in job.notes())
    assert [step for step in steps if steps[step] == 4] == [5]  # saved after step 4


def test_sharded_plans_go_on_from_the_last_checkpoint(jobs: Any) -> None:
    plain, job = (
        jobs([], plan="zero2", saves=True),
        jobs([["kill in", 6, 1]], plan="zero2", saves=True),
    )
    for each in (plain, job):
        each.run(2)
    assert "it has a part of it" in job.output()
    assert "training begins again from the start" not in job.output()
    check_same(job, plain)
    steps = Counter(note["step"] for note in job.notes())
    assert [step for step in steps if steps[step] == 4] == [5]  # saved after step 4


def test_torchrun_restarts_what_waits_and_the_state_survives(jobs: Any, undisturbed: Job) -> None:
    job = jobs([["kill_torchrun_rank in", 5, 1], ["fail in", 7, 2]])
    job.run(3, restarts=2)
    job.check_samples()
    check_same(job, undisturbed)


def test_an_error_of_the_user_ends_the_job(jobs: Any) -> None:
    job = jobs([["fail in", 3, 1]])
    job.run(2, succeeds=False)
    assert "of the user" in job.output()


def test_ranks_shrink_to_a_node_and_grow_back(jobs: Any) -> None:
    """A node is killed with all that is on it; another one comes."""
    job = jobs([["hold in", 5, None], ["hold in", 12, None]])
    port = free_port()
    agent = (
        *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"),
        *("--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"127.0.0.1:{port}"),
        *("--rdzv-conf", "last_call_timeout=5,keep_alive_interval=1"),
    )
    first = job.start(*agent, is_parent=True)
    wait_for(lambda: is_listening(port), job)  # it has the store
    second = job.start(*agent, is_parent=True)
    held = [job.folder / f"held-5-{number}" for number in (0, 1)]
    wait_for(lambda: all(path.exists() and path.read_text() for path in held), job)
    for process in (second.pid, *map(int, held[1].read_text().split())):
        os.kill(process, signal.SIGKILL)
    (job.folder / "go-5").touch()
    wait_for(lambda: (job.folder / "held-12-0").exists(), job)  # until torchrun asks it to end
    job.start(*agent, is_parent=True)
    assert first.wait(timeout=180) == 0, job.output()
    worlds = {note["step"]: note["world"] for note in job.notes()}
    assert [worlds[step] for step in sorted(worlds)] == [2] * 4 + [1] * 8 + [2] * 4, worlds
    job.check_samples()


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def wait_for(condition: Any, job: Job) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, job.output()
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint": "sharded"}, "in one piece"),
        ({"uneven": "stop"}, "leave uneven out"),
        ({"start_method": "spawn"}, "leave start_method='spawn' out"),
        ({"allow_staleness": True}, "leave allow_staleness out"),
    ],
)
def test_options_that_cannot_hold_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AutoParallelStrategy(elastic=True, **options)


def test_without_torchrun_it_is_refused() -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=AutoParallelStrategy(elastic=True),
        logger=False,
        enable_checkpointing=False,
    )
    with pytest.raises(ValueError, match="torchrun --standalone"):
        trainer.fit(BoringModel())


def elastic_run(
    *,
    device: str = "cpu",
    backend: str | None = None,
    on_plateau: bool = False,
    lengths: list[float] | None = None,
    is_replicated: bool = True,
) -> ElasticRun:
    strategy: Any = SimpleNamespace(
        cluster_environment=object.__new__(TorchElasticEnvironment),
        root_device=torch.device(device),
        process_group_backend=backend,
        lr_scheduler_configs=[SimpleNamespace(reduce_on_plateau=on_plateau)],
        optimizers=[],
    )
    data: Any = SimpleNamespace(lengths=lengths)
    plan: Any = SimpleNamespace(engine=SimpleNamespace(is_replicated=is_replicated))
    return ElasticRun(strategy, SimpleNamespace(), data, plan)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "stops_early", "message"),
    [
        ({"device": "cuda"}, False, "leave elastic out"),
        ({"backend": "mpi"}, False, "leave elastic out"),
        ({}, True, "EarlyStopping"),
    ],
)
def test_fits_that_were_not_tried_are_refused(
    options: dict[str, Any], stops_early: bool, message: str
) -> None:
    trainer: Any = SimpleNamespace(
        lightning_module=SimpleNamespace(automatic_optimization=True),
        early_stopping_callbacks=[object()] * stops_early,
    )
    with pytest.raises(ValueError, match=message):
        elastic_run(**options)._check(trainer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_plateau": True, "lengths": [6]}, "ReduceLROnPlateau"),
        ({"lengths": None}, "map-style data"),
    ],
)
def test_states_that_a_loss_takes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        elastic_run(**options)._check_training()


def _check_lengths(rank: int, lengths: list[list[float]]) -> str | None:
    try:
        elastic_run(lengths=lengths[rank])._check_training()
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("lengths", [[[6], [6]], [[6], [5]]])
def test_ranks_need_equally_many_batches(lengths: list[list[float]]) -> None:
    for error in run_ranks(_check_lengths, 2, lengths):
        assert (error is None) is (lengths[0] == lengths[1])
        assert error is None or "equally many batches, and they have [[6], [5]]" in error


def test_a_plan_that_shards_warns_without_ckpt_path(recwarn: pytest.WarningsRecorder) -> None:
    elastic_run(is_replicated=True).begin_plan()
    assert not recwarn
    run = elastic_run(is_replicated=False)
    for _ in range(2):
        run.begin_plan()
    assert ["begins again from the start" in str(each.message) for each in recwarn] == [True]


def test_buffers_are_those_before_whatever_was_put_there() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Module())
    shared = torch.zeros(2)
    module.register_buffer("first", shared)
    module[1].register_buffer("second", shared)
    before = copy_buffers(module)
    module[0](torch.randn(4, 2))  # in place
    module.first = shared + 1
    module[1].second = torch.ones(3)
    set_buffers(module, before)
    state = module.state_dict()
    assert state["0.num_batches_tracked"] == 0
    assert torch.equal(state["0.running_mean"], torch.zeros(2))
    assert torch.equal(state["first"], shared) and torch.equal(state["1.second"], shared)
