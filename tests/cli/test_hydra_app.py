"""What a user's own Hydra app gets from the search-path plugin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.preloaded import preloaded_python

ROOT = Path(__file__).parents[2]


def run_app(folder, body, *, python, config="defaults:\n  - strategy: topt\n"):
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
    print(type(trainer.strategy).__name__, config.strategy.memory_margin)

main()
"""
    assert run_app(tmp_path, body, python=preloaded_python()) == ["AutoParallelStrategy", "0.05"]


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
