"""A user's own module and data, in a file of the folder that `topt` is started in."""

from __future__ import annotations

import pytest

from tests.cli.test_main import run_python
from tests.forked_command import finished, forked_topt

MINE = """
import torch
import lightning as L

class Net(L.LightningModule):
    def __init__(self, width=8):
        super().__init__()
        self.blocks = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(3)))

    def training_step(self, batch, batch_idx):
        return self.blocks(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Rows(L.LightningDataModule):
    def __init__(self, width=8, batch_size=4):
        super().__init__()
        self.width, self.batch_size = width, batch_size

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(64, self.width), batch_size=self.batch_size)
"""
WHERE = "cluster=local_cpu", "hydra.run.dir=run"
NET, ROWS = "model=own model._target_=mine.Net", "data=own data._target_=mine.Rows"


def planned(arguments: str, folder):
    (folder / "mine.py").write_text(MINE)
    return forked_topt("plan", *arguments.split(), *WHERE, folder=folder)


def test_classes_of_the_current_folder_are_planned(tmp_path):
    """By the console script: its first folder of modules is its own, not the current one."""
    (tmp_path / "mine.py").write_text(MINE)
    script = tmp_path / "bin" / "topt"
    script.parent.mkdir()
    script.write_text("from topt_console import main\nmain()\n")
    words = f"{NET} +model.width=16 {ROWS} +data.width=16".split()
    finished(run_python(str(script), "plan", *words, *WHERE, folder=tmp_path))
    assert "blocks.2" in (tmp_path / "run" / "plan.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (f"model=own model._target_=mine.Not {ROWS}", "mine.Not"),
        ("data._target_=mine.Rows", "data: Rows.__init__() got an unexpected keyword argument"),
        (f"{NET} +model.width=16 {ROWS} work.tokens=1e9", "no entry model.seq_len: give work.s"),
        (
            f"{NET} data._target_=mine.Rows",
            "'model.seq_len' not found; a value that `--cfg job` shows refers to it",
        ),
    ],
)
def test_what_is_not_there_is_one_sentence(arguments, words, tmp_path):
    status, output = planned(arguments, tmp_path)
    assert status == 2, output
    (line,) = (line for line in output.splitlines() if line.startswith("topt: "))
    assert words in line and "Traceback" not in output


def test_configurations_of_an_app_are_planned(tmp_path):
    """Groups `model` and `data` as in lightning-hydra-template, whose loaders divide the batch."""
    divides = """
    def setup(self, stage=None):
        self.batch_size //= self.trainer.world_size
"""
    (tmp_path / "mine.py").write_text(MINE + divides)
    files = {
        "model/net.yaml": "_target_: mine.Net\nwidth: ${sizes.width}\n",
        "data/rows.yaml": "_target_: mine.Rows\nwidth: ${sizes.width}\nbatch_size: 32\n",
    }
    for name, text in files.items():
        (tmp_path / "configs" / name).parent.mkdir(parents=True)
        (tmp_path / "configs" / name).write_text(text)
    words = "--config-dir configs model=net data=rows +sizes.width=16 trainer.devices=4"
    small = "cluster=h100_2x8 tensor=false pipeline=false strategy.memory_limit=20GiB"
    arguments = ["plan", *words.split(), *small.split(), "hydra.run.dir=run"]
    status, output = forked_topt(*arguments, folder=tmp_path)
    assert status == 0, output
    plan = (tmp_path / "run" / "plan.yaml").read_text()
    assert "blocks.2" in plan and "batch_size: 8" in plan
