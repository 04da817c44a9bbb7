"""Wrong arguments of constructors: one sentence where they are given, not later and not never."""

from __future__ import annotations

import inspect
import math
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from omegaconf import OmegaConf

from lightning_topt import (
    AutoParallelStrategy,
    CompressedDDPStrategy,
    LocalSteps,
    LocalStepsStrategy,
    ParallelOptimizerStep,
)
from lightning_topt.communication import ExchangeSettings, TopK
from lightning_topt.costs.accuracy import Accuracy, ErrorFigure
from lightning_topt.costs.cluster import Cluster
from lightning_topt.plugins import plan_request
from lightning_topt.plugins.cached_data import CachedDataModule, CachePartition
from lightning_topt.plugins.coordinated_data import CoordinatedDataModule
from lightning_topt.plugins.monitors import ExchangeMonitor, StallMonitor, StepMonitor
from lightning_topt.plugins.plan_options import (
    check_planner_options,
    read_device_counts,
    read_memory_limit,
)
from tests.models import GPT
from tests.plugins.trainer_ranks import on_ranks

CLUSTER = Cluster.load(Path(__file__).parents[2] / "conf" / "cluster" / "cloud_25gbe_16x8.yaml")

NAN, INF = math.nan, math.inf
NO_COUNT: list[Any] = [0, -1, 1.5, 2.0, NAN, True, "2", [2]]
NO_NUMBER: list[Any] = [NAN, INF, -INF, "0.5", True, [0.5], None]
NO_FLAG: list[Any] = [1, 0, "yes", "false", 0.0, []]
EXCHANGE: dict[str, list[Any]] = {
    "density": [0, -0.1, 1.1, *NO_NUMBER[:-1]],
    "bits": [3, 16, True, "2", [2]],
    "hierarchical": NO_FLAG,
    "error_feedback": [*NO_FLAG, None],
    "dense_steps": NO_COUNT,
    "exempt": ["norm", 3, None, [1], ["norm", None], {"norm"}],
}
SETTINGS: dict[str, list[Any]] = {"nonfinite": ["stop", 1], "timeout_seconds": [0, -1, *NO_NUMBER]}
METHOD = {"method": ["top", 3, None, ["topk"], {"method": 3}, {"method": ["topk"]}]}
LOCAL: dict[str, list[Any]] = {
    "every": NO_COUNT,
    "outer_learning_rate": [0, -1, *NO_NUMBER],
    "outer_momentum": [-0.1, 1, *NO_NUMBER],
}
STEP: dict[str, list[Any]] = {
    "always": [*NO_FLAG, None],
    "rule": ["rows", 1, True],
    "timeout_seconds": [0, -1, *NO_NUMBER],
}


def data_module(kind: Any) -> Any:
    return partial(kind, pl.LightningDataModule(), directory="folder", memory_bytes=1 << 20)


CACHED, COORDINATED = data_module(CachedDataModule), data_module(CoordinatedDataModule)
NO_SIZE: list[Any] = [True, -1, 1.5, NAN, "", "-8GiB", "8GiB/s", [1]]
NO_SECONDS: list[Any] = [True, 0, NAN, INF, "5", None]
NO_WHOLE: list[Any] = [True, 1.5, NAN, "1", [1]]
NO_TEXT: list[Any] = ["", b"1", 1.5, ["1"]]
OF_DATA: dict[Any, dict[str, list[Any]]] = {
    CACHED: {
        "directory": ["", 3, b"cache", "a\0b"],
        "memory_bytes": NO_SIZE,
        "disk_bytes": NO_SIZE,
        "data_version": NO_TEXT,
        "partition": ["nodes", 1, 1.5, {"port": 1}, CachePartition],
    },
    CachePartition: {
        "interface": [*NO_TEXT, 3],
        "port": [*NO_WHOLE, -1, 70000, None],
        "seed": [*NO_WHOLE, None],
        "timeout_seconds": NO_SECONDS,
        "retry_seconds": NO_SECONDS,
    },
    COORDINATED: {
        "directory": ["", 3, None],
        "memory_bytes": [*NO_SIZE, 0, None],
        "seed": [*NO_WHOLE, None],
        "data_version": NO_TEXT,
        "timeout_seconds": NO_SECONDS,
    },
    StallMonitor: {"every_n_steps": [*NO_WHOLE, 0, -1]},
}


def cases(kind: Any, wrong: dict[str, list[Any]], **others: Any) -> list[Any]:
    return [
        pytest.param(
            kind, {**others, name: value}, name, id=f"{name_of(kind)}-{name}-{value!r}"[:60]
        )
        for name, values in wrong.items()
        for value in values
    ]


def name_of(kind: Any) -> str:
    return getattr(kind, "func", kind).__name__


@pytest.mark.parametrize(
    ("kind", "arguments", "name"),
    [
        *cases(TopK, EXCHANGE),
        *cases(ExchangeSettings, SETTINGS),
        *cases(
            CompressedDDPStrategy,
            METHOD | SETTINGS | {"nodes": NO_COUNT, "ranks_per_node": NO_COUNT},
        ),
        *cases(LocalSteps, LOCAL),
        *cases(AutoParallelStrategy, {"objective": ["fastest"], "plan": ["zero4"]}),
        *cases(AutoParallelStrategy, {"memory_limit": ["1GiB"]}, plan="ddp"),
        *cases(LocalStepsStrategy, METHOD | {"timeout_seconds": SETTINGS["timeout_seconds"]}),
        *cases(ParallelOptimizerStep, STEP),
        *cases(ExchangeMonitor, {"every_n_steps": NO_COUNT}),
        *cases(StepMonitor, {"warmup_steps": NO_COUNT}),
        *(case for kind, wrong in OF_DATA.items() for case in cases(kind, wrong)),
    ],
)
def test_wrong_arguments(kind: Any, arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError) as caught:
        kind(**arguments)
    message = str(caught.value)
    assert "\n" not in message and name in message


@pytest.mark.parametrize("kind", OF_DATA)
def test_every_argument_of_data_is_in_the_list(kind: Any) -> None:
    names = set(inspect.signature(getattr(kind, "func", kind)).parameters)
    assert names - {"datamodule"} == OF_DATA[kind].keys()


@pytest.mark.parametrize("datamodule", [None, torch.utils.data.DataLoader([1]), "Data"])
@pytest.mark.parametrize("make", [CACHED, COORDINATED])
def test_only_a_datamodule_is_wrapped(make: Any, datamodule: Any) -> None:
    with pytest.raises(TypeError, match="wraps a LightningDataModule"):
        make.func(datamodule, **make.keywords)


@pytest.mark.parametrize(
    "counts", [[], [0], [-2], [1.5], [True], ["2"], "2", 2, 0, {2: 3}, [2, None]]
)
def test_wrong_device_counts(counts: Any) -> None:
    with pytest.raises(ValueError, match="device_counts"):
        read_device_counts(counts, default=2)
    if isinstance(counts, list):
        with pytest.raises(ValueError, match="device_counts"):
            read_device_counts(OmegaConf.create({"a": counts}).a, default=2)


@pytest.mark.parametrize(
    "limit", [0, -1, NAN, INF, True, "0", "-1GiB", "8 GiBs", [1], "1" * 10**6, 10**400]
)
def test_wrong_memory_limits(limit: Any) -> None:
    with pytest.raises(ValueError, match="memory_limit") as caught:
        read_memory_limit(limit)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("plan", ["pipeline", {"mesh": {"data": 2}}, {"mesh": {"pipeline": 2}}])
def test_memory_limits_beside_plans_that_are_searched(plan: Any) -> None:
    assert AutoParallelStrategy(memory_limit="1GiB", plan=plan).request.memory_limit == 2**30


def test_the_least_memory_beside_a_plan_that_runs_as_it_is() -> None:
    with pytest.warns(UserWarning, match="chooses among plans that are searched"):
        AutoParallelStrategy(objective="memory", plan="zero1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AutoParallelStrategy(objective="memory", plan="pipeline")
        AutoParallelStrategy(objective="time", plan="zero1")


@pytest.mark.parametrize("share", [-0.1, 1, NAN, INF, "0.1", True])
@pytest.mark.parametrize("name", ["memory_margin", "equal_within", "confidence"])
def test_wrong_shares(name: str, share: Any) -> None:
    with pytest.raises(ValueError, match=name):
        check_planner_options(**{"memory_margin": None, "objective": "time", name: share})


def test_a_margin_follows_from_the_cluster_and_the_confidence() -> None:
    def margin(accuracy: Accuracy | None, **options: Any) -> float:
        request = AutoParallelStrategy(**options).request
        return request.margin_on(replace(CLUSTER, accuracy=accuracy))

    known = Accuracy(ErrorFigure(0.1, 0.2, 9), ErrorFigure(0.1, 0.3, 99, above=0.25))
    assert margin(known) == 0.25 and margin(known, memory_margin=0.1) == 0.1
    assert margin(known, confidence=0.5) < 0.12 < 0.25 < margin(known, confidence=0.99)
    assert margin(None) == margin(Accuracy(ErrorFigure(0.1, 0.2, 9))) == 0.05
    assert margin(None, confidence=0) == 0
    request = AutoParallelStrategy().request
    assert request.margin_on(None) == 0.05 and request.difference_on(CLUSTER) is None
    pairs = replace(known, difference=ErrorFigure(0.07, 0.3, 9))
    machines = replace(CLUSTER, accuracy=pairs)
    assert request.difference_on(machines) == 0.07
    assert AutoParallelStrategy(equal_within=0.0).request.difference_on(machines) == 0.0


def needed(rank: int, usable: list[float], views: bool) -> tuple[bool, str]:
    module, said = GPT(), list[str]()
    size = sum(parameter.nbytes for parameter in module.parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_request, "usable_memory_bytes", lambda *_, **__: usable[rank] * size)
        patch.setattr(plan_request, "rank_zero_info", said.append)
        request = plan_request.PlanRequest(gradients_are_views=views)
        cpu = torch.device("cpu")
        return plan_request.needs_plan(request, module, cpu, ranks=2), "".join(said)


@pytest.mark.parametrize(
    ("usable", "views", "needs", "says"),
    [
        ([5.0, 5.0], False, False, ""),  # parameters, gradients, buckets, two moments
        ([4.9, 4.9], False, True, "more than a rank may use: a plan is searched"),
        ([5.0, 4.9], False, True, "a plan is searched"),
        ([4.0, 4.0], True, False, ""),
    ],
)
def test_what_cannot_fit_under_ddp_needs_a_plan_on_all_ranks(
    usable: list[float], views: bool, needs: bool, says: str
) -> None:
    for found, said in on_ranks(needed, usable, views):
        assert found == needs and says in said and bool(says) == bool(said)
