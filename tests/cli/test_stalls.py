"""`topt stalls` as users run it, and the data module that it serves batches through."""

from __future__ import annotations

import json
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_topt.cli.stalls import QUIET, measure
from tests.forked_command import finished
from tests.forked_command import forked_topt as topt

SMALL = ["experiment=demo", "data.max_bytes=100000", "model.num_layers=1", "model.hidden=32"]


def test_the_demo(tmp_path):
    arguments = [
        *SMALL,
        "seconds=0.3",
        "data.batch_size=16",
        f"hydra.run.dir={tmp_path}/run",
    ]
    output = finished(topt("stalls", *arguments, folder=tmp_path))
    assert "of training waits for data" in output and "fetching" in output
    record = json.loads((tmp_path / "run" / "stalls.json").read_text())
    assert record["schema_version"] == 2 and record["batch_size"] == 16
    assert record["runs"]["cold"]["batches"] > 0 and record["num_workers"] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*SMALL, "trainer.devices=2"], "set trainer.devices=1"),
        ([*SMALL, "data.batch_size=500"], "at least 8 batches"),
    ],
)
def test_wrong_use(arguments, words, tmp_path):
    status, output = topt("stalls", *arguments, folder=tmp_path)
    assert status == 2 and words in output and "Traceback" not in output


class Rows(pl.LightningDataModule):
    """Counts what is called; its hook of the batch's transfer adds 1."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.zeros(200, 2), batch_size=4)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch + 1


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.seen: set[float] = set()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen |= set(batch.flatten().tolist())
        return self.layer(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_trainer(**options: Any) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", **{"devices": 1, **QUIET, **options})


def test_the_data_module_is_set_up_once_and_its_hooks_work():
    module, net = Rows(), Net()
    result = measure(net, module, trainer=make_trainer, seconds=0.05, memory_bytes=1 << 20)
    assert module.calls == ["prepare_data", "setup fit"]
    assert net.seen == {1.0}, "also in the synthetic run, whose batches are used again and again"
    assert result.num_items == 200
    assert isinstance(module.train_dataloader(), DataLoader)
