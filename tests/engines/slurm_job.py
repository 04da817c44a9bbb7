"""Jobs of the SLURM that `slurm_up.sh` starts on one machine, and the script they train with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SAMPLES = 96
SECONDS = 150  # that a job may take; most of it are imports of torch by all ranks on a few cores
# Trains as its options say, and writes a line for each batch. A rank may wait, fail or be killed.
SCRIPT = """
import json, os, signal, socket, sys, time
from pathlib import Path
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset
from lightning_topt import AutoParallelStrategy
from tests.engines.slurm_job import Hold
from tests.plugins.trainer_ranks import mean_over_ranks

torch.set_num_threads(1)
folder, options, SAMPLES = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])

class Numbers(Dataset):
    def __len__(self):
        return SAMPLES
    def __getitem__(self, index):
        values = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return index, values, values.sum()[None]

class Module(L.LightningModule):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(5)
        self.kind = kind
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[1]), batch[2])
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[1]), batch[2]), sync_dist=True)
    def on_train_batch_end(self, outputs, batch, batch_idx):
        step = self.trainer.global_step
        loss = mean_over_ranks(outputs["loss"])
        self.note(step=step, loss=loss, samples=batch[0].tolist())
        if self.kind == "topt" and options["killed"] == [self.global_rank, step]:
            os.kill(os.getpid(), signal.SIGKILL)
    def on_fit_end(self):
        names = "MASTER_ADDR", "SLURM_LOCALID", "SLURM_NODEID"
        val_loss = self.trainer.callback_metrics["val_loss"].item()
        self.note(
            ended=self.trainer.global_step, val_loss=val_loss, host=socket.gethostname(),
            environment=type(self.trainer.strategy.cluster_environment).__name__,
            local_rank=self.local_rank, node_rank=self.trainer.node_rank,
            variables=[os.environ[name] for name in names],
            planned_by=getattr(self.trainer.strategy, "planned_by", None),
        )
    def note(self, **values):
        line = {"kind": self.kind, "rank": self.global_rank, "world": self.trainer.world_size}
        line["restarts"] = int(os.environ.get("SLURM_RESTART_COUNT", 0))
        with open(folder / "notes", "a") as file:
            file.write(json.dumps({**line, **values}) + chr(10))
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)

for kind in options["kinds"]:
    strategy = "ddp" if kind == "ddp" else AutoParallelStrategy(elastic=options["elastic"])
    saves, callbacks = kind == "topt", []
    if saves:
        callbacks = [ModelCheckpoint(folder, save_last=True, every_n_train_steps=4, save_top_k=0)]
        callbacks.append(Hold(folder, options["holds_at"]))
    trainer = L.Trainer(
        accelerator="cpu", devices=options["devices"], num_nodes=2, strategy=strategy,
        logger=False, callbacks=callbacks, enable_checkpointing=saves,
        default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False,
        max_epochs=2, num_sanity_val_steps=0,
    )
    torch.manual_seed(1)
    os.environ["PL_GLOBAL_SEED"] = "1"
    saved = sorted(folder.glob("*.ckpt"), key=os.path.getmtime) if saves else []
    trainer.fit(
        Module(kind), DataLoader(Numbers(), batch_size=4, shuffle=True),
        DataLoader(Numbers(), batch_size=16), ckpt_path=saved[-1] if saved else None,
        weights_only=True,
    )
"""


class Slurm:
    """The SLURM of one machine, whose files are in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = [name for name in os.environ if name.startswith(("SLURM_", "MASTER_"))]
        self.environment = {name: os.environ[name] for name in os.environ if name not in names}
        self.environment |= {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])  # launchers of Hydra
            ),
            "OMP_NUM_THREADS": "1",
        }

    def start(self) -> str | None:
        """Start it. Returns None, or a sentence that says what is missing here."""
        try:
            self._script("slurm_up.sh")
        except subprocess.CalledProcessError as error:
            if error.returncode != 3:
                raise AssertionError(error.stderr) from error
            return str(error.stderr).strip()
        return None

    def stop(self) -> None:
        """End it with all of its jobs."""
        self._script("slurm_down.sh")

    def _script(self, name: str) -> None:
        output = self.folder.parent / f"{name}.output"  # a pipe would stay open with the daemons
        with open(output, "w") as file:
            ended = subprocess.run(
                [HERE / name, self.folder],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=90,
                check=False,
            )
        if ended.returncode:
            text = output.read_text()
            raise subprocess.CalledProcessError(ended.returncode, name, stderr=text)

    def call(self, *words: str, succeeds: bool | None = True, **variables: str) -> str:
        """Run a command of SLURM, and return what it and its job write."""
        ended = subprocess.run(
            words,
            env={**self.environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        if succeeds is not None:
            assert (ended.returncode == 0) is succeeds, ended.stdout[-6000:]
        return ended.stdout

    def submit(self, script: str, folder: Path, *options: str, **variables: str) -> str:
        """Hand a batch script to `sbatch`, and return the number of its job."""
        folder.mkdir(exist_ok=True)
        path = folder / "job.sh"
        path.write_text("#!/bin/bash\n" + script)
        words = ["sbatch", "--parsable", f"--output={folder}/output-%a", "--open-mode=append"]
        return self.call(*words, *options, str(path), **variables).strip()

    def state(self, job: str) -> dict[str, str]:
        """Return the entries of `scontrol show job`."""
        text = self.call("scontrol", "show", "job", "--oneliner", job)
        return dict(word.partition("=")[::2] for word in text.split() if "=" in word)

    def wait(self, job: str, *states: str) -> dict[str, str]:
        """Wait until a job is in one of these states, and return its entries."""
        found: dict[str, str] = {}

        def arrived() -> bool:
            found.update(self.state(job))
            return found["JobState"] in states

        wait_for(arrived, lambda: f"{found}\n{self.logs()}")
        return found

    def logs(self) -> str:
        return "\n".join(path.read_text()[-1500:] for path in self.folder.glob("slurm*.log"))


class Hold(Callback):
    """Wait after a step until a signal has come; but not where a file ``held`` is there."""

    def __init__(self, folder: str | Path, step: int | None, array_task: int | None = None) -> None:
        self.folder, self.step, self.array_task = Path(folder), step, array_task

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        is_other = str(self.array_task) != os.environ.get("SLURM_ARRAY_TASK_ID", "None")
        if trainer.global_step != self.step or is_other or (self.folder / "held").exists():
            return
        strategy: Any = trainer.strategy
        end = time.monotonic() + SECONDS
        if trainer.is_global_zero:
            (self.folder / "holds").touch()
        while not strategy._training_data._preemption._note.any() and time.monotonic() < end:
            time.sleep(0.02)


class Run:
    """A fit of `SCRIPT` in a folder, as words for `srun`."""

    def __init__(self, folder: Path, **options: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.options: dict[str, Any] = {
            "devices": 1,
            "kinds": ["topt"],
            "elastic": False,
            "holds_at": None,
            "killed": None,
            **options,
        }

    def command(self) -> list[str]:
        script = self.folder / "train.py"
        script.write_text(SCRIPT)
        options = json.dumps(self.options)
        return [sys.executable, str(script), str(self.folder), options, str(SAMPLES)]

    def notes(self, kind: str = "topt") -> list[dict[str, Any]]:
        lines = (self.folder / "notes").read_text().splitlines()
        return [note for note in map(json.loads, lines) if note["kind"] == kind]

    def losses(self, kind: str = "topt") -> dict[int, float]:
        return {note["step"]: note["loss"] for note in self.notes(kind) if "step" in note}

    def output(self) -> str:
        return "\n".join(path.read_text()[-6000:] for path in self.folder.glob("output-*"))


def wait_for(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    """Wait until something is so, at most as long as a job may take."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.1)
