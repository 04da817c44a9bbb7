"""`benchmarks.exchange.quality` on a module of the user's, on two ranks."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.exchange import quality
from benchmarks.exchange.quality import read_ways
from lightning_topt.plan.step_factors import StepTable, own_file
from tests.forked_command import Ended, finished, forked

MINE = """
import torch
import lightning as L
from torch.utils.data import DataLoader, TensorDataset

def rows(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator)
    return TensorDataset(x, x @ torch.arange(1.0, 7.0).view(6, 1))

class Net(L.LightningModule):
    def __init__(self, lr=0.02):
        super().__init__()
        self.lr, self.layer = lr, torch.nn.Linear(6, 1)

    def loss(self, batch):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

class Validated(Net):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

class Fails(Net):
    def training_step(self, batch, batch_idx):
        if type(self.trainer.strategy).__name__ == "LocalStepsStrategy":
            raise RuntimeError("not this way")
        return super().training_step(batch, batch_idx)

class Rows(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(rows(64, 0), batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(rows(16, 1), batch_size=8)
"""
FOLDER = "--folder", "run"


def measured(folder, *words: str) -> Ended:
    (folder / "mine.py").write_text(MINE)

    def main() -> None:
        sys.path.append(str(folder))
        sys.argv = ["quality", *words, *FOLDER]
        quality.main()

    return forked(main, folder=folder)[0]


def on_mine(module: str, *overrides: str) -> tuple[str, ...]:
    data = "data=own", "data._target_=mine.Rows"
    return "--overrides", *data, "model=own", f"model._target_=mine.{module}", *overrides


def test_factors_of_ways_are_kept_and_runs_not_made_twice(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    few = "{method:topk,density:0.01,error_feedback:false,warmup_steps:0}"
    words = "bf16", few, "--steps", "20", *on_mine("Validated")
    output = finished(measured(tmp_path, *words))
    model = "Validated of 7 parameters"
    rows = {row.method: row for row in StepTable.read(own_file()).rows}
    assert {(r.model, r.optimizer, r.ranks, r.steps) for r in rows.values()} == {
        (model, "SGD", 2, 20)
    }
    # 16 bits are nearly as good as 32; one entry of seven without feedback is not
    assert len(rows["bf16"].factors) == 2
    assert all(f == pytest.approx(1.0, abs=0.1) for f in rows["bf16"].factors)
    assert None in rows["topk"].factors or min(rows["topk"].factors) > 1.2
    assert rows["bf16"] in StepTable.of_model(model).rows
    assert f"{model} under SGD, 20 steps" in output and str(own_file()) in output

    # curves of a seed begin alike: first weights and samples are those of the dense run
    runs = json.loads((tmp_path / "run" / "quality.json").read_text())["runs"]
    first = {name: run["curve"][0] for name, run in runs.items()}
    dense, half = (first[json.dumps([2, how, 0, None])] for how in ({}, {"method": "bf16"}))
    assert dense[0] == half[0] == 1 and dense[1] == pytest.approx(half[1], rel=0.02)
    # another seed has other ones
    assert first[json.dumps([2, {}, 1, None])][1] != pytest.approx(dense[1], rel=1e-3)

    # once more in the same folder: the runs are there
    again = finished(measured(tmp_path, *words))
    assert json.loads((tmp_path / "run" / "quality.json").read_text())["runs"] == runs
    assert "a dense run takes" in output and "a dense run takes" not in again


def test_training_loss_rates_and_a_way_that_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    ways = "bf16", "{method:local_steps,every:4}", "{method:local_steps,every:50}"
    rates = "--rates", "0.02", "1e20", "--rate-option", "model.lr"
    lengths = "--steps", "20", "--seeds", "1", "--check-every", "2"
    mine = on_mine("Fails", "+model.lr=0.5")
    output = finished(measured(tmp_path, *ways, *rates, *lengths, *mine))
    assert "cannot run: RuntimeError: not this way" in output
    assert "exchanges once in 50 steps: say --steps 100" in output
    assert "learning rate 1e+20: lowest loss" in output
    (row,) = StepTable.read(own_file()).rows
    assert row.method == "bf16" and row.factors == (pytest.approx(1.0, abs=0.1),)


def test_stale_weights_of_a_pipeline(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    way = "{schedule:continuous,prediction:spectrain}"
    lengths = "--steps", "40", "--seeds", "1", "--check-every", "10"
    model = "model.num_layers=2", "model.hidden=16", "model.num_heads=2", "model.seq_len=16"
    sizes = "experiment=byte_lm", *model, "data.max_bytes=20000", "trainer.limit_val_batches=4"
    output = finished(measured(tmp_path, way, *lengths, "--overrides", *sizes))
    (row,) = StepTable.read(own_file()).rows
    assert (row.method, row.staleness, row.prediction, row.ranks) == ("dense", 1, "spectrain", 1)
    assert len(row.factors) == 1 and "1 missing updates by spectrain" in output


def test_a_dense_run_that_fails_says_why(tmp_path):
    mine = on_mine("Validated", "metric.name=accuracy")
    status, output = measured(tmp_path, "bf16", "--steps", "20", *mine)
    said = " ".join(output.split())
    assert status == 2 and "validation logs no 'accuracy'" in said and "one of val_loss" in said


@pytest.mark.parametrize(
    "given",
    [
        ["bf17"],
        [{"density": 0.1}],
        ["dense"],
        ["bf16", {"method": "bf16"}],
        [{"schedule": "1f1b", "prediction": "none"}],
    ],
)
def test_unknown_ways_are_refused(given):
    with pytest.raises(ValueError):
        read_ways(given, ranks=2)
