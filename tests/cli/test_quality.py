"""`topt calibrate quality=...` on a module of the user's, on two ranks; and wrong use of it."""

from __future__ import annotations

import json

import pytest

from lightning_topt.cli.calibrate import read_ways
from lightning_topt.plan.step_factors import StepTable, own_file
from tests.forked_command import finished, forked_topt

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
SHORT = "steps=20", "data=own", "data._target_=mine.Rows", "model=own", "hydra.run.dir=run"


def measured(folder, quality: str, *words: str, module: str = "Validated"):
    (folder / "mine.py").write_text(MINE)
    given = f"quality={quality}", f"model._target_=mine.{module}", *words
    return forked_topt("calibrate", *given, *SHORT, folder=folder)


def test_factors_of_ways_are_kept_and_runs_not_made_twice(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    ways = "[bf16,{method:topk,density:0.01,error_feedback:false,warmup_steps:0}]"
    output = finished(measured(tmp_path, ways))
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
    again = finished(measured(tmp_path, ways))
    assert json.loads((tmp_path / "run" / "quality.json").read_text())["runs"] == runs
    assert "a dense run takes" in output and "a dense run takes" not in again


def test_training_loss_rates_and_a_way_that_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    output = finished(
        measured(
            tmp_path,
            "[bf16,{method:local_steps,every:4},{method:local_steps,every:50}]",
            "seeds=1",
            "learning_rates={model.lr:[0.02,1e20]}",
            "check_every=2",
            "+model.lr=0.5",
            module="Fails",
        )
    )
    assert "cannot run: RuntimeError: not this way" in output
    assert "exchanges once in 50 steps: say steps=100" in output
    assert "learning rate 1e+20: lowest loss" in output
    (row,) = StepTable.read(own_file()).rows
    assert row.method == "bf16" and row.factors == (pytest.approx(1.0, abs=0.1),)


def test_stale_weights_of_a_pipeline(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    words = "seeds=1", "model.num_layers=2", "model.hidden=16", "model.num_heads=2"
    given = "quality=[{schedule:continuous,prediction:spectrain}]", "model.seq_len=16"
    sizes = "data.max_bytes=20000", "trainer.limit_val_batches=4", "steps=40", "check_every=10"
    output = finished(
        forked_topt("calibrate", *given, *words, *sizes, "hydra.run.dir=run", folder=tmp_path)
    )
    (row,) = StepTable.read(own_file()).rows
    assert (row.method, row.staleness, row.prediction, row.ranks) == ("dense", 1, "spectrain", 1)
    assert len(row.factors) == 1 and "1 missing updates by spectrain" in output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["steps=10"], "steps belongs to the measurement of a model: say quality="),
        (["quality=[bf16]", "output=x.yaml"], "output is the cluster file"),
        (["quality=[bf16]", "devices=1"], "one rank exchanges nothing"),
        (["quality=[bf16]", "trainer.devices=4"], "say devices= and accelerator="),
        (["quality=[bf16]", "learning_rates=[0.1]"], "learning_rates is one option of the model"),
        (["quality=bf16"], "quality is a list of ways"),
    ],
)
def test_wrong_use_is_one_sentence(words, says, tmp_path):
    status, output = forked_topt("calibrate", *words, "hydra.run.dir=run", folder=tmp_path)
    assert status == 2 and says in " ".join(output.split()) and "Traceback" not in output


def test_a_dense_run_that_fails_says_why(tmp_path):
    status, output = measured(tmp_path, "[bf16]", "metric.name=accuracy")
    said = " ".join(output.split())
    assert (
        status == 2 and "validation logs no 'accuracy': say metric.name=, one of val_loss" in said
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["bf17"], "bf17"),
        ([{"method": "topk", "densty": 0.1}], "has no option 'densty'"),
        (["dense"], "trains as dense synchronous training does"),
        (["bf16", {"method": "bf16"}], "twice"),
        ([{"schedule": "continuous"}], "a schedule and a rule"),
        ([], "is a list of ways"),
    ],
)
def test_unknown_ways_are_refused(given, says):
    with pytest.raises(ValueError, match=says):
        read_ways(given, ranks=2)


def test_names_are_those_of_the_group_and_of_methods():
    few, same, local = read_ways(
        ["topk_few_bits", {"method": "topk", "density": 0.07}, "diloco"], ranks=4
    )
    assert few.method == "topk"
    assert few.options["density"] is None and few.options["bits"] == 2
    assert (same.method, same.options, same.ranks) == ("topk", {"density": 0.07}, 4)
    assert local.method == "local_steps"
    (stale,) = read_ways([{"schedule": "continuous_overlapped", "prediction": "stash"}], ranks=4)
    assert (stale.method, stale.ranks, stale.staleness) == ("dense", 1, 6)
