"""Every configuration composes and builds what it names; every cluster file is a cluster."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from hydra_plugins.lightning_topt_searchpath import conf_dir
from lightning_topt import (
    AutoParallelStrategy,
    CompressedDDPStrategy,
    LocalSteps,
    LocalStepsStrategy,
    PipelineStrategy,
)
from lightning_topt.communication import DeMo, PowerSGD, QuantizedSteps, Sign, SparseLoCo, TopK
from lightning_topt.communication.method_registry import method_classes
from lightning_topt.costs.cluster import Cluster
from lightning_topt.prediction import PREDICTIONS
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES, SCHEDULES


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def composed(command: str, *overrides: str):
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose(command, overrides=list(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    return config


@pytest.mark.parametrize("experiment", choices("experiment"))
def test_every_experiment_builds(experiment, tmp_path):
    config = composed("train", f"experiment={experiment}", f"hydra.runtime.output_dir={tmp_path}")
    assert isinstance(instantiate(config.model), pl.LightningModule)
    assert isinstance(instantiate(config.data), pl.LightningDataModule)
    for callback in config.callbacks.values():
        assert isinstance(instantiate(callback), pl.Callback)
    strategy = instantiate(config.strategy, _convert_="all")
    assert isinstance(strategy, AutoParallelStrategy)
    trainer = instantiate(config.trainer, strategy=strategy, logger=False, _convert_="all")
    assert trainer.world_size == 2


@pytest.mark.parametrize("experiment", choices("experiment"))
def test_every_experiment_can_be_planned(experiment):
    config = composed("plan", f"experiment={experiment}")
    assert {"model", "data", "trainer", "strategy", "device_counts"} <= set(config)


@pytest.mark.parametrize("strategy", choices("strategy"))
def test_every_strategy_is_taken_by_the_trainer(strategy):
    config = composed("train", f"strategy={strategy}")
    strategy = (
        config.strategy
        if isinstance(config.strategy, str)
        else instantiate(config.strategy, _convert_="all")
    )
    trainer = instantiate(config.trainer, strategy=strategy, logger=False, _convert_="all")
    assert trainer.world_size == (1 if config.strategy == "auto" else 2)


@pytest.mark.parametrize("exchange", choices("gradient_exchange"))
def test_every_gradient_exchange_is_one(exchange):
    config = composed("train", "strategy=topt_compressed", f"gradient_exchange={exchange}")
    strategy = instantiate(config.strategy, _convert_="all")
    local = exchange in ("diloco", "sparse_diloco", "sparse_loco", "quantized_steps")
    assert isinstance(strategy, LocalStepsStrategy if local else CompressedDDPStrategy)
    assert (
        instantiate(config.trainer, strategy=strategy, logger=False, _convert_="all").world_size
        == 2
    )


def test_every_method_of_exchange_has_a_configuration():
    composed_methods = {
        composed(
            "train", "strategy=topt_compressed", f"gradient_exchange={name}"
        ).gradient_exchange.method
        for name in choices("gradient_exchange")
    }
    assert set(method_classes()) == composed_methods


def test_gradient_exchange_values_are_overridden_like_any_other():
    config = composed(
        "train",
        "strategy=topt_compressed",
        "gradient_exchange=powersgd",
        "gradient_exchange.rank=4",
    )
    assert instantiate(config.strategy).method == PowerSGD(rank=4)


@pytest.mark.parametrize("schedule", choices("schedule"))
def test_every_schedule_is_one(schedule):
    config = composed("train", "strategy=topt_pipeline", f"schedule={schedule}")
    strategy = instantiate(config.strategy, _convert_="all")
    assert isinstance(strategy, PipelineStrategy) and strategy.request.plan.schedule == schedule
    assert {*choices("schedule")} == {*SCHEDULES, *CONTINUOUS_SCHEDULES}


def test_every_rule_of_weights_has_a_configuration():
    given = ["strategy=topt_pipeline", "schedule=continuous"]
    configs = {
        name: composed("train", *given, f"prediction={name}").strategy
        for name in choices("prediction")
    }
    rules = {
        name: instantiate(config, _convert_="all").request.plan.prediction
        for name, config in configs.items()
    }
    assert rules.pop("default") is None
    assert {name: rule.name for name, rule in rules.items()} == {name: name for name in PREDICTIONS}
    with pytest.raises(HydraException, match="prediction"):
        composed("train", "strategy=topt", "prediction=spectrain")


def test_gradient_exchange_belongs_to_topt_compressed():
    with pytest.raises(HydraException, match="gradient_exchange"):
        composed("train", "strategy=ddp", "gradient_exchange=powersgd")


@pytest.mark.parametrize("name", [name for name in choices("cluster") if name != "measured"])
def test_every_cluster_is_one(name):
    cluster = Cluster.load(conf_dir() / "cluster" / f"{name}.yaml")
    assert cluster.source, "says where its numbers come from"
    config = composed("plan", f"cluster={name}")
    strategy = instantiate(config.strategy, _convert_="all")
    assert strategy.request.cluster == cluster


def test_measured_means_none():
    assert composed("plan", "cluster=measured").cluster is None


def test_values_that_yaml_repeats_are_the_constructors():
    """A default is written once; where YAML shows it for orientation, the two must agree."""
    assert (
        instantiate(composed("train").strategy, _convert_="all").request
        == AutoParallelStrategy().request
    )
    pipeline = instantiate(composed("train", "strategy=topt_pipeline").strategy, _convert_="all")
    assert pipeline.request == PipelineStrategy().request
    for name, method in (
        ("topk", TopK()),
        ("powersgd", PowerSGD()),
        ("sign", Sign()),
        ("topk_bf16", TopK(value_dtype="bfloat16")),
        ("topk_few_bits", TopK(density=None, bits=2)),
        ("topk_hierarchical", TopK(hierarchical=True)),
        ("diloco", LocalSteps()),
        ("demo", DeMo()),
        ("sparse_loco", SparseLoCo()),
        ("quantized_steps", QuantizedSteps()),
    ):
        config = composed("train", "strategy=topt_compressed", f"gradient_exchange={name}")
        assert instantiate(config.strategy, _convert_="all").method == method


def test_another_hydra_app_finds_our_groups(tmp_path):
    (tmp_path / "app.yaml").write_text(
        "defaults:\n  - strategy: topt\n  - cluster: local_cpu\n  - _self_\n"
    )
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        config = compose("app")
    assert config.strategy._target_ == "lightning_topt.AutoParallelStrategy"
    assert config.cluster.device.name


def test_the_strategy_group_needs_no_cluster_group(tmp_path):
    (tmp_path / "app.yaml").write_text("defaults:\n  - strategy: topt\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        config = compose("app")
    assert OmegaConf.to_container(config, resolve=True)["strategy"]["cluster"] is None


def test_another_hydra_app_finds_gradient_exchanges(tmp_path):
    (tmp_path / "app.yaml").write_text("defaults:\n  - strategy: topt_compressed\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        config = compose("app", overrides=["gradient_exchange=sign"])
    assert instantiate(config.strategy).method == Sign()


def test_conf_dir_is_the_repository_or_the_package():
    assert (Path(conf_dir()) / "train.yaml").exists()
