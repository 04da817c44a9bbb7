"""What a user's own Hydra app gets from the search-path plugin."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

from tests.forked_command import forked_ranks
from tests.preloaded import preloaded_python

ROOT = Path(__file__).parents[2]


def run_app(folder, body, *, python, config="defaults:\n  - topt/strategy@strategy: topt\n"):
    (folder / "app.yaml").write_text(config)
    (folder / "app.py").write_text(body)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [python, "app.py", f"hydra.run.dir={folder}/run"]
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.split()


def test_a_name_is_enough_where_lightning_is_imported_at_the_top(tmp_path):
    body = """
import hydra
import lightning.pytorch as pl

@hydra.main(version_base="1.3", config_path=".", config_name="app")
def main(config):
    trainer = pl.Trainer(
        strategy="topt", accelerator="cpu", devices=2, logger=False, enable_checkpointing=False
    )
    print(type(trainer.strategy).__name__, config.strategy.confidence)

main()
"""
    assert run_app(tmp_path, body, python=preloaded_python()) == ["AutoParallelStrategy", "0.9"]


# As made from lightning-hydra-template: its own model=gpt, and a Trainer whose strategy is a word.
TEMPLATE = {
    "configs/train.yaml": "defaults:\n  - model: gpt\n  - trainer: default\n  - _self_\n",
    "configs/model/gpt.yaml": "_target_: template.Net\nwidth: 8\n",
    "configs/trainer/default.yaml": """
_target_: lightning.pytorch.trainer.Trainer
strategy: ddp
accelerator: cpu
devices: 2
max_steps: 6
logger: false
enable_checkpointing: false
enable_progress_bar: false
""",
    "template.py": """
import hydra
import lightning as L
import torch

class Net(L.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(config):
    model = hydra.utils.instantiate(config.model)
    trainer = hydra.utils.instantiate(config.trainer)
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4))
    found = type(model).__name__, type(trainer.strategy).__name__, trainer.global_step
    print("RAN", *found, getattr(trainer.strategy, "planned_by", None))

if __name__ == "__main__":
    main()
""",
}


def test_a_template_app_trains_its_own_model(tmp_path):
    overrides = ["+topt/strategy@trainer.strategy=topt", "+topt/cluster=local_cpu"]
    for name, text in TEMPLATE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def main():
        sys.path.insert(0, str(tmp_path))
        sys.argv = ["template.py", *overrides, "hydra.run.dir=run"]
        os.environ["HYDRA_FULL_ERROR"] = "1"
        runpy.run_path("template.py", run_name="__main__")

    for status, output in forked_ranks(main, 2, folder=tmp_path):
        assert status == 0 and "RAN Net AutoParallelStrategy 6" in output, output


def test_an_app_without_lightning_pays_nothing(tmp_path):
    body = """
import sys
import hydra

@hydra.main(version_base="1.3", config_path=".", config_name="app")
def main(config):
    print("torch" in sys.modules, config.strategy._target_)

main()
"""
    assert run_app(tmp_path, body, python=sys.executable) == [
        "False",
        "lightning_topt.AutoParallelStrategy",
    ]
