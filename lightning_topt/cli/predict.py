"""`topt predict` says what given plans would cost, without a search: rows of a CSV file, a plan of
a model, recorded runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from lightning_topt.cli.predict_plan import predict_plan
from lightning_topt.cli.predict_rows import predict_rows
from lightning_topt.cli.predict_runs import predict_runs
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.plain_values import shown
from lightning_topt.plugins.read_options import read_cluster


def run(config: DictConfig) -> None:
    """Predict what `config` describes, and print it.

    Raises ValueError for files that cannot be read, options that contradict one another, and plans
    that cannot be.
    """
    if (config.runs is None) == (config.plan is None):
        raise ValueError(
            "say what is to be predicted, one of the two: runs=FILE.csv (or a folder with run.json "
            "files), or plan=FILE.yaml"
        )
    cluster, console = _cluster(config), Console()
    if config.plan is not None:
        _refuse(config, ("calibrate_on", "save_cluster"), why="of runs")
        predict_plan(config, _known(cluster), console=console)
    elif _path(config.runs, "runs").is_dir():
        _refuse(config, ("calibrate_on", "out", "ranks"), why="of a CSV file or a plan")
        save = None if config.save_cluster is None else _path(config.save_cluster, "save_cluster")
        predict_runs(_path(config.runs, "runs"), cluster, save=save, console=console)
    else:
        _refuse(config, ("ranks",), why="of a plan")
        paths = {
            name: _path(config[name], name)
            for name in ("calibrate_on", "out", "save_cluster")
            if config[name]
        }
        predict_rows(_path(config.runs, "runs"), _known(cluster), **paths, console=console)


def _cluster(config: DictConfig) -> Cluster | None:
    # a list, of which Hydra keeps the last
    if not isinstance(HydraConfig.get().runtime.choices.get("cluster"), str):
        raise ValueError(
            "a prediction is for one cluster: give one name, and predict for each of them"
        )
    if config.cluster_file is None:
        value: Any = None if config.cluster is None else OmegaConf.to_container(config.cluster)
        return read_cluster(value)
    if config.cluster is not None:
        raise ValueError("cluster and cluster_file are two clusters: leave out one of them")
    return read_cluster(str(config.cluster_file))


def _known(cluster: Cluster | None) -> Cluster:
    if cluster is None:
        raise ValueError(
            "say for which machines: cluster=NAME of the group (topt predict --help lists them), "
            "or cluster_file=FILE, such as topt calibrate writes"
        )
    return cluster


def _refuse(config: DictConfig, names: tuple[str, ...], *, why: str) -> None:
    for name in names:
        if config[name] is not None:
            raise ValueError(f"{name} belongs to the prediction {why}: leave it out")


def _path(value: Any, name: str) -> Path:
    if not isinstance(value, str | Path):
        raise ValueError(f"{name} is the path of a file, got {shown(value)}")
    return Path(value)
