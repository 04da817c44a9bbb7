"""Every configuration composes and builds what it names; every cluster file is a cluster."""

from __future__ import annotations

import dataclasses
import inspect

import hydra
import lightning.pytorch as pl
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.utils import instantiate
from lightning.pytorch.strategies import DDPStrategy

from hydra_plugins.lightning_topt_searchpath import conf_dir
from hydra_plugins.lightning_topt_searchpath.strategies import STRATEGIES
from lightning_topt import (
    AutoParallelStrategy,
    CompressedDDPStrategy,
    LocalSteps,
    LocalStepsStrategy,
    PipelineStrategy,
)
from lightning_topt.communication import BF16, SparseLoCo, TopK
from lightning_topt.communication.exchange_method import method_classes
from lightning_topt.costs.cluster import Cluster
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES, SCHEDULES
from lightning_topt.weight_prediction import PREDICTIONS


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
    # under a strategy without options of ours, too
    plain = composed("train", f"experiment={experiment}", "strategy=ddp").strategy
    assert isinstance(instantiate(plain, _convert_="all"), DDPStrategy)


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
    local = exchange in ("diloco", "sparse_loco")
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


@pytest.mark.parametrize(
    "name", [name for name in choices("cluster") if name not in ("measured", "slurm")]
)
def test_every_cluster_is_one(name):
    cluster = Cluster.load(conf_dir() / "cluster" / f"{name}.yaml")
    assert cluster.source, "says where its numbers come from"
    config = composed("plan", f"cluster={name}")
    strategy = instantiate(config.strategy, _convert_="all")
    assert strategy.request.cluster == cluster


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
        ("topk_few_bits", TopK(density=None, bits=2)),
        ("topk_hierarchical", TopK(hierarchical=True)),
        ("diloco", LocalSteps()),
        ("sparse_loco", SparseLoCo()),
    ):
        config = composed("train", "strategy=topt_compressed", f"gradient_exchange={name}")
        assert instantiate(config.strategy, _convert_="all").method == method


@pytest.mark.parametrize("name", STRATEGIES)
def test_defaults_of_typed_strategies_are_those_of_the_constructors(name):
    typed = STRATEGIES[name]()
    target = hydra.utils.get_method(typed._target_)
    kinds = (CompressedDDPStrategy, LocalStepsStrategy) if name == "topt_compressed" else (target,)
    options = {f.name: f.default for f in dataclasses.fields(typed) if not f.name.startswith("_")}
    for kind in kinds:
        known = {
            name: each.default
            for name, each in inspect.signature(kind).parameters.items()
            if each.kind != each.VAR_KEYWORD
        }
        if "cluster" in options:
            assert options["cluster"] == "${oc.select:topt.cluster,null}"
            options["cluster"] = None
        if kind is LocalStepsStrategy:
            known["method"] = "topk"  # the method chooses the strategy
        if name == "topt_full":
            known["plan"] = "search"
        assert options.items() <= known.items()
    if len(kinds) == 1:
        assert options.keys() == known.keys()


# ---- a user's own app, with the composition of lightning-hydra-template


@pytest.fixture
def app(tmp_path):
    """Compose it with some overrides."""
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "default.yaml").write_text(
        "_target_: lightning.pytorch.Trainer\nstrategy: auto\naccelerator: cpu\ndevices: 2\n"
        "logger: false\n"
    )

    (tmp_path / "app.yaml").write_text("defaults:\n  - trainer: default\n  - _self_\n")

    def composed_app(*overrides: str):
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            return compose("app", overrides=list(overrides))

    return composed_app


STRATEGY = "+topt/strategy@trainer.strategy"
METHOD = "+topt/gradient_exchange@trainer.strategy.method"


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        (["trainer.strategy=topt"], AutoParallelStrategy),
        ([f"{STRATEGY}=topt_compressed"], CompressedDDPStrategy),
        ([f"{STRATEGY}=topt_compressed", f"{METHOD}=diloco"], LocalStepsStrategy),
        ([f"{STRATEGY}=topt_pipeline", "trainer.strategy.stages=2"], PipelineStrategy),
    ],
    ids=str,
)
def test_another_app_gets_the_strategies(overrides, kind, app):
    config = app(*overrides)
    assert set(config) == {"trainer"}
    assert type(instantiate(config.trainer).strategy) is kind


def test_another_app_sets_options_of_a_strategy(app):
    config = app(
        f"{STRATEGY}=topt",
        "+topt/cluster@trainer.strategy.cluster=h100_2x8",
        "trainer.strategy.memory_limit=2GiB",
        "+trainer.strategy.find_unused_parameters=true",
    )
    request = instantiate(config.trainer).strategy.request
    assert request.cluster == Cluster.load(conf_dir() / "cluster" / "h100_2x8.yaml")
    assert request.memory_limit == 2**31
    apart = app(f"{STRATEGY}=topt", "+topt/cluster=h100_2x8")
    assert apart.trainer.strategy.cluster.num_nodes == 2
    bf16 = app(f"{STRATEGY}=topt_compressed", f"{METHOD}=bf16")
    assert instantiate(bf16.trainer).strategy.method == BF16()


def test_types_of_options_are_checked(app):
    with pytest.raises(HydraException) as error:
        app(f"{STRATEGY}=topt_pipeline", "trainer.strategy.recompute=maybe")
    assert "not a valid bool" in str(error.value.__cause__)


def test_a_name_that_no_strategy_takes_is_refused(app):
    config = app(f"{STRATEGY}=topt", "+trainer.strategy.memory_limt=2GiB")
    with pytest.raises(HydraException, match="does not take 'memory_limt'"):
        instantiate(config.trainer)


@pytest.mark.parametrize(
    "entry",
    [
        *("model: gpt", "strategy: topt", "topt/model: gpt", "topt/strategy: ddp"),
        "topt/cluster: measured",
    ],
)
def test_another_app_gets_nothing_else_of_ours(entry, tmp_path):
    (tmp_path / "app.yaml").write_text(f"defaults:\n  - {entry}\n")
    with (
        initialize_config_dir(str(tmp_path), version_base="1.3"),
        pytest.raises(HydraException, match="Could not find"),
    ):
        compose("app")
