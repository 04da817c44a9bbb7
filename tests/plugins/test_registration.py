"""The names users select the strategy by: registry, environment, Lightning's CLI, the other package."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import lightning as L
import pytest
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_topt import AutoParallelStrategy, CompressedDDPStrategy


def run(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    return result.stdout + result.stderr


@pytest.mark.parametrize(("suffix", "start_method"), [("", "popen"), ("_fork", "fork"), ("_spawn", "spawn")])
@pytest.mark.parametrize(("name", "kind"), [("topt", AutoParallelStrategy), ("topt_compressed", CompressedDDPStrategy)])
def test_names(name: str, kind: type[DDPStrategy], suffix: str, start_method: str) -> None:
    assert name + suffix in StrategyRegistry.available_strategies()
    strategy = L.Trainer(strategy=name + suffix, accelerator="cpu", devices=2, logger=False).strategy
    assert isinstance(strategy, kind) and isinstance(strategy, DDPStrategy)
    assert strategy._start_method == start_method


def test_local_steps_have_no_name() -> None:
    """How many local steps is for the user to say."""
    assert not any("local" in name for name in StrategyRegistry.available_strategies())


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
        def strategy(*args):
            return LightningCLI(BoringModel, run=False, save_config_callback=None, args=[
                *args, "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false"]).trainer.strategy
        planned = strategy(
            "--trainer.strategy=lightning_topt.AutoParallelStrategy", "--trainer.strategy.memory_limit=1GiB")
        print("limit", planned.request.memory_limit)
        compressed = strategy(
            "--trainer.strategy=lightning_topt.CompressedDDPStrategy", "--trainer.strategy.density=0.05",
            "--trainer.strategy.exempt=[bias]")
        print("density", compressed.options.density, compressed.options.exempt)
        """
    )
    assert f"limit {float(2**30)}" in output or f"limit {2**30}" in output
    assert "density 0.05 ('bias',)" in output


def test_pytorch_lightning_users_get_one_sentence() -> None:
    output = run(
        """
        import pytorch_lightning as pl, lightning_topt
        for name in ("topt", "topt_compressed"):
            try:
                pl.Trainer(strategy=name, accelerator="cpu", devices=2)
            except ImportError as error:
                print("SAYS", error)
        """
    )
    assert output.count("SAYS lightning_topt supports `import lightning`") == 2


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
