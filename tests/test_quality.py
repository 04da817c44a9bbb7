"""`benchmarks.exchange.quality` on a module of the user's, on two ranks."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.exchange import quality
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

class Validated(L.LightningModule):
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

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

class Rows(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(rows(64, 0), batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(rows(16, 1), batch_size=8)
"""


def measured(folder, *words: str) -> Ended:
    (folder / "mine.py").write_text(MINE)

    def main() -> None:
        sys.path.append(str(folder))
        sys.argv = ["quality", *words, "--folder", "run"]
        quality.main()

    return forked(main, folder=folder)[0]


OVERRIDES = (
    *("--overrides", "data=own", "data._target_=mine.Rows"),
    *("model=own", "model._target_=mine.Validated"),
)


def test_factors_of_ways_are_kept_and_runs_not_made_twice(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    few = "{method:topk,density:0.01,error_feedback:false,dense_steps:2}"
    words = "bf16", few, "--steps", "20", *OVERRIDES
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
