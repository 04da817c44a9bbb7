"""`topt plan` for machines that nobody has yet, over clusters, devices and batches.

    topt plan 'cluster=[a100_8x8,h100_2x8]' 'batch_size=[512,1024]' work.tokens=3e11 \
        limits.deadline=20d

Every combination of choices is a scenario, and each has a search of its own. `read_searches`
captures the step once, `search_all` searches several scenarios at a time. One is chosen by the
objective within the limits, and all are reported.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from lightning_topt.basics.argument_checks import check_real, check_whole
from lightning_topt.basics.core_wait import usable_cores
from lightning_topt.basics.units import parse_seconds
from lightning_topt.cli.calibrate import start_method
from lightning_topt.cli.example_step import has_accelerators
from lightning_topt.cli.main import CLUSTER_FILES
from lightning_topt.cli.plan_steps import PlanSetup, SearchedMeshes, UnpricedSearch, report_plan
from lightning_topt.communication.started_ranks import leave_to_rank_0
from lightning_topt.costs.cluster import Cluster, ClusterError
from lightning_topt.costs.communication import check_world_size
from lightning_topt.plan.choose import OBJECTIVES, NoPlanFitsError, check_objective
from lightning_topt.plan.plan_search import SearchRequest
from lightning_topt.plan.scenarios import (
    SCENARIO_OBJECTIVES,
    Limits,
    Scenario,
    ScenarioResult,
    Workload,
    check_asked,
    choose_estimate,
    default_objective,
    of_microbatches,
    print_scenarios,
    save_scenarios,
    search_scenario,
)
from lightning_topt.plugins.plan_request import PlanRequest
from lightning_topt.plugins.searched_plan import Planning
from topt_console.status_line import STATUS

# Plans that others beat by less than this in time and memory may be left out: predictions are not
# that good.
EPSILON = 0.01
_SECONDS = 3.0  # of the search of one scenario with one number of micro-batches
_MOST_PROCESSES = 8  # each has its own captures: 1.3 GB for 70 B parameters
_CLUSTER_WORD = re.compile(r"^[+~]*(clusters?)(=|$)")  # of the group itself, not of an entry
_CHOICES = ("clusters", "batch_size", "accumulate")
Search = tuple[Scenario, SearchRequest]


def is_asked(config: DictConfig) -> bool:
    """Return whether a configuration of `topt plan` asks more than which plan is best here."""
    given = [config[name] for name in _CHOICES]
    given += [*config.work.values(), *config.limits.values()]
    is_new = config.objective in SCENARIO_OBJECTIVES and config.objective not in OBJECTIVES
    return any(value is not None for value in given) or is_new


def run(config: DictConfig) -> None:
    """Search every scenario that `config` describes, choose one, and report all.

    Files go to Hydra's run folder.

    Raises:
        ValueError: options contradict one another.
        NoPlanFitsError: no scenario keeps the limits.
    """
    asked = WhatIfOptions.read(config)
    check_asked(asked.objective or "time", asked.limits, has_work=asked.work is not None)
    searches, request = read_searches(config, asked)
    check_objective(request.objective)
    results, notes = search_all(searches, request, asked)

    # the choice; where none keeps the limits, the estimates are written all the same
    estimates = [each.chosen for each in results]
    objective = asked.objective or default_objective(
        estimates, asked.limits, given=request.objective
    )
    folder = Path(HydraConfig.get().runtime.output_dir)
    save = functools.partial(
        save_scenarios, folder / "scenarios.json", estimates, limits=asked.limits, notes=notes
    )
    try:
        chosen, reason = choose_estimate(estimates, objective=objective, limits=asked.limits)
    except NoPlanFitsError:
        save(None, reason="")
        raise
    save(chosen, reason=reason)

    # the plan of the chosen scenario, then the scenarios
    STATUS.show("writing the report")
    best = next(each for each in results if each.chosen is chosen)
    search = next(search for scenario, search in searches if scenario == chosen.scenario)
    search = of_microbatches(search, chosen.point.plan.accumulate)
    best.frontier.save(folder / "frontier.json")
    planning = Planning(best.frontier, chosen.point, search.graph)
    report_plan(planning, search, request, folder=folder, notes=notes, ends=False)
    console = Console()
    print_scenarios(estimates, chosen, limits=asked.limits, console=console)
    precision = config.trainer.get("precision") or "32-true"
    notes.append(f"All in {precision}: trainer.precision= changes it.")
    for line in (reason, *notes, f"run folder: {folder}"):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


# ---- what is asked


@dataclass(frozen=True)
class WhatIfOptions:
    """The choices, what a run takes, and its limits.

    None stands for what the configuration has.
    """

    batch_sizes: tuple[int, ...] | None = None
    clusters: tuple[str, ...] | None = None
    accumulate: tuple[int, ...] | None = None
    work: Workload | None = None
    limits: Limits = field(default_factory=Limits)
    objective: str | None = None

    @classmethod
    def read(cls, config: DictConfig) -> WhatIfOptions:
        """Read the options of a configuration.

        Raises:
            ValueError: for what they cannot mean.
        """
        work, limits = (
            {str(name): value for name, value in config[group].items() if value is not None}
            for group in ("work", "limits")
        )
        if "deadline" in limits:
            limits["deadline"] = parse_seconds(limits["deadline"], name="limits.deadline")
        for group, values in (("work", work), ("limits", limits)):
            for name, value in values.items():
                values[name] = check_real(value, name=f"{group}.{name}", positive=True)
        return cls(
            batch_sizes=_read_numbers(config.batch_size, name="batch_size"),
            clusters=_read_names(config.clusters),
            accumulate=_read_numbers(config.accumulate, name="accumulate"),
            work=Workload(**work) if work else None,
            limits=Limits(**limits),
            objective=config.objective,
        )


# one number or a list of them, each once
def _read_numbers(value: Any, *, name: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    several = list(value) if OmegaConf.is_list(value) else [value]
    if not several:
        raise ValueError(f"{name} is a number or a list of numbers; the list is empty")
    return tuple(dict.fromkeys(check_whole(each, name=name) for each in several))


# one name of a cluster or a list of them, each once
def _read_names(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    several: Any = [value] if isinstance(value, str | Mapping) else list(value)
    if not several or not all(isinstance(each, str) for each in several):
        raise ValueError(
            "clusters are names of cluster files, such as 'cluster=[a100_8x8,h100_2x8]'"
        )
    return tuple(dict.fromkeys(several))


# ---- from a configuration to searches


def read_clusters(names: Sequence[str] | None, *, default: Cluster | None) -> list[Cluster | None]:
    """Return the clusters of these names, in their order.

    Overrides of a cluster's entries (``cluster.device.price_per_hour=2``) hold for each.

    Args:
        names: choices of the group `cluster`, or files; None: `default` alone.
        default: the cluster of the configuration.

    Returns:
        A cluster for each name; None is the machine that this runs on.

    Raises:
        ClusterError: a file or choice that is no cluster; what Hydra raises for unknown names.
    """
    if names is None:
        return [default]
    return [
        Cluster.load(name) if name.endswith(CLUSTER_FILES) else _composed(name) for name in names
    ]


def _composed(name: str) -> Cluster | None:
    # Compose the configuration of this command once more, with one choice of `cluster`
    hydra = HydraConfig.get()
    given = [word for word in hydra.overrides.task if not _CLUSTER_WORD.match(word)]
    config = compose(hydra.job.config_name or "plan", overrides=[*given, f"cluster={name}"])
    cluster = config.get("cluster")
    if cluster is None:
        return None
    if not isinstance(cluster, DictConfig):
        raise ClusterError(f"the cluster {name!r} is not a mapping")
    return Cluster.from_dict(instantiate(cluster, _convert_="all"))


def read_searches(config: DictConfig, asked: WhatIfOptions) -> tuple[list[Search], PlanRequest]:
    """Return every scenario with its search, and what the user asked of the planner."""
    setup = PlanSetup.of(config)
    clusters = read_clusters(asked.clusters, default=setup.request.cluster)
    if None not in clusters:  # else ranks of torchrun or srun measure it together
        leave_to_rank_0()
    # within a scenario the fastest plan is also the cheapest and soonest
    objective = asked.objective or setup.request.objective
    if objective not in OBJECTIVES:
        objective = "time"
    request = dataclasses.replace(setup.request, objective=objective)
    requests = [dataclasses.replace(request, cluster=cluster) for cluster in clusters]
    return [*_searches(config, asked, setup, requests)], request


# clusters, then numbers of devices, then batches
def _searches(
    config: DictConfig, asked: WhatIfOptions, setup: PlanSetup, requests: Sequence[PlanRequest]
) -> Iterator[Search]:
    # meshes first: whether any of them has a tensor axis decides how the step is captured
    meshes = [SearchedMeshes.read(config, request, setup.trainer) for request in requests]
    for searched, request in zip(meshes, requests, strict=True):
        if request.cluster is None:  # too few devices of a known one leave out single scenarios
            searched.check_devices(None, setup.trainer)
    length = config.model.get("seq_len")
    length = length if isinstance(length, int) else None
    if length is None and asked.work is not None and asked.work.tokens is not None:
        raise ValueError(
            "work.tokens needs the tokens of a sample, and the model has no entry model.seq_len: "
            "give work.samples, or +model.seq_len=512 where the class takes it"
        )
    STATUS.show(f"capturing the step of {type(setup.model).__name__}")
    example = setup.capture(
        splits=any(each.tensor for each in meshes),
        accelerator=has_accelerators(*(request.cluster for request in requests)),
    )
    STATUS.clear()
    for request, searched in zip(requests, meshes, strict=True):
        unpriced = UnpricedSearch.of(
            setup,
            searched,
            example,
            request,
            epsilon=EPSILON,
            capture_seconds=example.capture_seconds,
        )
        search = setup.with_costs(
            functools.partial(unpriced.request, global_batch_size=example.samples),
            request,
            example.batch,
        )
        if search is None:  # another rank of torchrun or srun goes on
            raise SystemExit(0)
        # the costs of a cluster serve all its scenarios
        search = dataclasses.replace(search, max_seconds=_SECONDS)
        for count in searched.device_counts:
            ranks = searched.data_ranks or count
            for batch in asked.batch_sizes or (example.samples * ranks,):
                one = dataclasses.replace(search, device_counts=(count,), global_batch_size=batch)
                yield Scenario(search.cluster, count, batch, length), one


# ---- the searches


def search_all(
    searches: Sequence[Search], request: PlanRequest, asked: WhatIfOptions
) -> tuple[list[ScenarioResult], list[str]]:
    """Search every scenario, one on each core of this machine.

    Returns:
        What was found, and notes on scenarios without a plan, which are left out.

    Raises:
        ValueError: the first error, where no scenario has a plan.
    """
    search = functools.partial(_search, request, asked)
    processes = min(usable_cores(), len(searches), _MOST_PROCESSES)
    if processes < 2 or start_method("cpu") != "fork":
        outcomes = [search(each, progress=STATUS.show) for each in searches]
    else:
        STATUS.show(f"searching {len(searches)} scenarios in {processes} processes")
        # helpers find the searches in the memory that they are forked with, and compute with one
        # thread: a forked process would wait for threads that it does not have
        _FORKED.extend(functools.partial(search, each) for each in searches)
        try:
            with ProcessPoolExecutor(
                processes, get_context("fork"), torch.set_num_threads, (1,)
            ) as pool:
                outcomes = [*pool.map(_search_forked, range(len(searches)))]
        finally:
            _FORKED.clear()
    STATUS.clear()

    # a scenario alone may have no plan, or none that fits
    results = [outcome for outcome in outcomes if not isinstance(outcome, ValueError)]
    pairs = [(scenario, outcome) for (scenario, _), outcome in zip(searches, outcomes, strict=True)]
    errors = [(scenario, error) for scenario, error in pairs if isinstance(error, ValueError)]
    if not results:
        raise errors[0][1]
    return results, [f"Left out: {scenario}: {error}" for scenario, error in errors]


_FORKED: list[Callable[[], ScenarioResult | ValueError]] = []


def _search_forked(place: int) -> ScenarioResult | ValueError:
    return _FORKED[place]()


def _search(
    request: PlanRequest,
    asked: WhatIfOptions,
    of: Search,
    *,
    progress: Callable[[str], None] | None = None,
) -> ScenarioResult | ValueError:
    scenario, search = of
    gc.collect(0)  # what the search before left
    try:
        check_world_size(search.cluster, world_size=scenario.devices)
        return search_scenario(
            search,
            scenario,
            objective=request.objective,
            memory_limit=request.memory_limit,
            memory_margin=request.margin_on(search.cluster),
            difference=request.difference_on(search.cluster),
            confidence=request.confidence,
            accumulate=asked.accumulate,
            work=asked.work,
            progress=progress,
        )
    except ValueError as error:
        return error
