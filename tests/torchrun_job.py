"""An elastic fit under torchrun: its script, its processes, and what it wrote down."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.preloaded import preloaded_topt

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
            elif kind == "fail":
                raise ValueError("of the user")
            elif kind == "kill_first_that_saves":
                self.on_save_checkpoint = self.kill_first
            elif kind == "hold":
                (folder / "held").write_text(f"{os.getpid()} {os.getppid()}")
                time.sleep(60)
    def kill_first(self, checkpoint):
        try:
            (folder / "first").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)]

model = Module()
loader = DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=options["workers"])
callbacks = []
if options["saves"]:
    callbacks = [ModelCheckpoint(folder, save_last=True, every_n_train_steps=2, save_top_k=0)]
trainer = L.Trainer(
    accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    strategy=AutoParallelStrategy(elastic=True, plan=options["plan"]), logger=False,
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
                [preloaded_topt(), "-m", "torch.distributed.run", *command, script, *arguments],
                env={
                    **os.environ,
                    "PYTHONPATH": str(Path(__file__).parents[1]),
                    "OMP_NUM_THREADS": "1",
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


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Any]:
    """Makes jobs, which end with the test."""
    made: list[Job] = []

    def make(events: list[list[Any]], **options: Any) -> Job:
        made.append(Job(tmp_path / str(len(made)), events, **options))
        return made[-1]

    yield make
    for job in made:
        job.close()


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
