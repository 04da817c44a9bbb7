"""The names users select the strategy by: registry, environment, Lightning's CLI, the other package."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import lightning as L
import pytest
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_topt import AutoParallelStrategy


def run(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    return result.stdout + result.stderr


@pytest.mark.parametrize(("name", "start_method"), [("topt", "popen"), ("topt_fork", "fork"), ("topt_spawn", "spawn")])
def test_names(name: str, start_method: str) -> None:
    assert name in StrategyRegistry.available_strategies()
    strategy = L.Trainer(strategy=name, accelerator="cpu", devices=2, logger=False).strategy
    assert isinstance(strategy, AutoParallelStrategy) and isinstance(strategy, DDPStrategy)
    assert strategy._start_method == start_method


def test_environment_variable() -> None:
    output = run(
        """
        import lightning as L, lightning_topt
        print(type(L.Trainer(accelerator="cpu", devices=2, logger=False).strategy).__name__)
        """,
        PL_TRAINER_STRATEGY="topt",
    )
    assert "AutoParallelStrategy" in output


def test_class_path_in_lightnings_cli() -> None:
    pytest.importorskip("jsonargparse")
    output = run(
        """
        from lightning.pytorch.cli import LightningCLI
        from lightning.pytorch.demos.boring_classes import BoringModel
        cli = LightningCLI(BoringModel, run=False, save_config_callback=None, args=[
            "--trainer.strategy=lightning_topt.AutoParallelStrategy", "--trainer.strategy.memory_limit=1GiB",
            "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false"])
        print("limit", cli.trainer.strategy.request.memory_limit)
        """
    )
    assert f"limit {float(2**30)}" in output or f"limit {2**30}" in output


def test_pytorch_lightning_users_get_one_sentence() -> None:
    output = run(
        """
        import pytorch_lightning as pl, lightning_topt
        try:
            pl.Trainer(strategy="topt", accelerator="cpu", devices=2)
        except ImportError as error:
            print("SAYS", error)
        """
    )
    assert "SAYS lightning_topt supports `import lightning`" in output


def test_import_does_not_touch_import_torch() -> None:
    assert "fine" in run("import torch; import sys; assert 'lightning_topt' not in sys.modules; print('fine')")


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"memroy_limit": "1GiB"}, TypeError, "memroy_limit"),
        ({"objective": "fastest"}, ValueError, "fastest"),
        ({"memory_margin": 2}, ValueError, "between 0 and 1"),
        ({"memory_limit": "1 parsec"}, ValueError, "parsec"),
        ({"plan": "zero4"}, ValueError, "zero4"),
        ({"cluster": "nowhere.yaml"}, ValueError, "nowhere.yaml"),
    ],
)
def test_wrong_options_are_refused_at_once(options: dict[str, object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        AutoParallelStrategy(**options)
