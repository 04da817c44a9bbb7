"""The names of the strategy: registry, environment, Lightning's CLI, the other package."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import lightning as L
import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_topt import AutoParallelStrategy, CompressedDDPStrategy, PipelineStrategy
from lightning_topt.plugins import data_parallel_hooks
from tests.preloaded import preloaded_python


def run(code: str, *, python: str = sys.executable, **environment: str) -> str:
    result = subprocess.run(
        [python, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    return result.stdout + result.stderr


STARTS = [("", "popen"), ("_fork", "fork"), ("_spawn", "spawn"), ("_notebook", "fork")]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("topt", AutoParallelStrategy),
        ("topt_full_spawn", AutoParallelStrategy),
        ("topt_compressed_notebook", CompressedDDPStrategy),
        ("topt_pipeline_fork", PipelineStrategy),
    ],
)
def test_names(name: str, kind: type[DDPStrategy]) -> None:
    strategy = L.Trainer(strategy=name, accelerator="cpu", devices=2, logger=False).strategy
    assert isinstance(strategy, kind) and isinstance(strategy, DDPStrategy)
    _, _, start = name.partition("_")
    assert strategy._start_method == dict(STARTS).get(f"_{start.rpartition('_')[2]}", "popen")
    assert strategy._ddp_kwargs.get("find_unused_parameters", False) is False


@pytest.mark.parametrize("start", [start for start, _ in STARTS])
@pytest.mark.parametrize(
    "unused", ["_find_unused_parameters_true", "_find_unused_parameters_false"]
)
def test_every_name_of_ddp_has_its_twins(start: str, unused: str) -> None:
    expected = StrategyRegistry.get(f"ddp{start}{unused}")
    for name, kind in (("topt", AutoParallelStrategy), ("topt_compressed", CompressedDDPStrategy)):
        ours = StrategyRegistry.get(f"{name}{start}{unused}")
        assert type(ours) is kind and ours._start_method == expected._start_method
        asked = expected._ddp_kwargs["find_unused_parameters"]
        assert ours._ddp_kwargs.get("find_unused_parameters", False) is asked
    if unused.endswith("false"):  # what DDP does anyway keeps no plan out
        assert not StrategyRegistry.get(f"topt{start}{unused}").request.only_replicated
    names = {name for name in StrategyRegistry.available_strategies() if name.startswith("ddp")}
    assert {name.replace("ddp", "topt", 1) for name in names} <= set(
        StrategyRegistry.available_strategies()
    )


def test_the_classes_are_imported_when_they_are_used() -> None:
    """In a new interpreter, where a stand-in for Lightning is all that an import needs."""
    output = run(
        """
        import sys, types
        for name in ("lightning", "lightning.pytorch", "lightning.pytorch.strategies"):
            module = sys.modules[name] = types.ModuleType(name)
        module.StrategyRegistry = types.SimpleNamespace(register=lambda *_, **__: None)
        before, own = set(sys.modules), (*sys.stdlib_module_names, "topt_console")
        import lightning_topt
        added = set(sys.modules) - before
        print("ADDED", sorted(name for name in added if name.partition(".")[0] not in own))
        """
    )
    ours = ("basics", "plugins", "plugins.register")
    assert f"ADDED {['lightning_topt', *(f'lightning_topt.{name}' for name in ours)]}" in output


@pytest.mark.parametrize("numbers", ["0,1", "0,2"])
def test_ranks_that_follow_each_other_on_other_nodes_are_known(
    monkeypatch: pytest.MonkeyPatch, numbers: str
) -> None:
    """As ``srun --distribution=cyclic`` numbers those of two nodes with two tasks each."""
    said: list[str] = []
    monkeypatch.setattr(
        data_parallel_hooks.log, "warning", lambda text, *args: said.append(text % args)
    )
    monkeypatch.setenv("SLURM_GTIDS", numbers)
    strategy = AutoParallelStrategy()
    strategy.cluster_environment = LightningEnvironment()
    data_parallel_hooks.check_devices(strategy)
    assert not said
    for name, value in {"NTASKS": "4", "NTASKS_PER_NODE": "2", "PROCID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    strategy.cluster_environment = SLURMEnvironment()
    data_parallel_hooks.check_devices(strategy)
    assert bool(said) == (numbers == "0,2")
    assert all("first node has ranks 0, 2" in text for text in said)


def test_class_path_in_lightnings_cli() -> None:
    pytest.importorskip("jsonargparse")
    output = run(
        """
        from lightning.pytorch.cli import LightningCLI
        from lightning.pytorch.demos.boring_classes import BoringModel
        def strategy(*args):
            trainer = "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false"
            return LightningCLI(
                BoringModel, run=False, save_config_callback=None, args=[*args, *trainer]
            ).trainer.strategy
        planned = strategy(
            "--trainer.strategy=lightning_topt.AutoParallelStrategy",
            "--trainer.strategy.memory_limit=1GiB")
        print("limit", planned.request.memory_limit)
        compressed = strategy(
            "--trainer.strategy=lightning_topt.CompressedDDPStrategy",
            '--trainer.strategy.method={"method": "topk", "density": 0.05, "exempt": ["bias"]}')
        print("density", compressed.method.density, compressed.method.exempt)
        """,
        python=preloaded_python(),
    )
    assert f"limit {float(2**30)}" in output or f"limit {2**30}" in output
    assert "density 0.05 ('bias',)" in output


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"memroy_limit": "1GiB"}, TypeError, "memroy_limit"),
        ({"cluster": "nowhere.yaml"}, ValueError, "nowhere.yaml"),
    ],
)
def test_wrong_options_are_refused_at_once(
    options: dict[str, object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        AutoParallelStrategy(**options)
