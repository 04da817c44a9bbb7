"""`topt plan` for machines that nobody has yet, over clusters, devices, batches and lengths.

    topt plan 'cluster=[a100_8x8,h100_2x8]' 'batch_size=[512,1024]' work.tokens=3e11 \
        limits.deadline=20d

Every combination of choices is a scenario, and each has a search of its own. `read_searches`
captures the step once for each length, `search_all` searches several scenarios at a time. One is
chosen by the objective within the limits, and all are reported.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_topt.basics.argument_checks import check_flag, check_real, check_whole
from lightning_topt.basics.units import parse_seconds
from lightning_topt.cli.example_step import has_accelerators
from lightning_topt.cli.local_processes import most_processes, outcomes_of
from lightning_topt.cli.plan_steps import PlanSetup, UnpricedSearch, report_plan
from lightning_topt.cli.report import model_name
from lightning_topt.cli.search_space import SearchedMeshes
from lightning_topt.cli.several_clusters import read_clusters
from lightning_topt.communication.started_ranks import leave_to_rank_0
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.communication import check_world_size
from lightning_topt.plan.choose import OBJECTIVES, NoPlanFitsError, check_objective
from lightning_topt.plan.plan_search import SearchRequest
from lightning_topt.plan.scenario_report import print_scenarios, save_scenarios
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
    search_scenario,
    unpriced,
)
from lightning_topt.plugins.plan_request import PlanRequest
from lightning_topt.plugins.planning import Planning
from topt_console.status_line import STATUS

# Plans that others beat by less than this in time and memory may be left out: predictions are not
# that good.
EPSILON = 0.01
_SECONDS = 3.0  # of the search of one scenario with one number of micro-batches
_CHOICES = ("clusters", "batch_size", "seq_len", "accumulate")


def is_asked(config: DictConfig) -> bool:
    """Return whether a configuration of `topt plan` asks more than which plan is best here."""
    limits = (value for name, value in config.limits.items() if name != "currency")
    given = [*(config[name] for name in _CHOICES), *config.work.values(), *limits]
    is_new = config.objective in SCENARIO_OBJECTIVES and config.objective not in OBJECTIVES
    return any(value is not None for value in given) or config.spot is not False or is_new


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
    found, left_out = search_all(searches, request, asked)

    # the objective, and what it cannot judge
    estimates = [each.chosen for each in found]
    objective = asked.objective or default_objective(
        estimates, asked.limits, given=request.objective
    )
    notes = [*left_out]
    clusters = {str(estimate.scenario.cluster.name) for estimate in estimates}
    if objective == "money" and (without := unpriced(estimates)) and len(without) < len(clusters):
        notes.append(f"Without a price, and left out of the choice: {', '.join(without)}.")

    # the choice; where none keeps the limits, the estimates are written all the same
    folder = Path(HydraConfig.get().runtime.output_dir)
    shown = [estimate for each in found for estimate in each.estimates]
    given: dict[str, Any] = {"limits": asked.limits, "notes": notes}
    given["model"] = model_name(searches[0][1].graph)
    try:
        chosen, reason = choose_estimate(estimates, objective=objective, limits=asked.limits)
    except NoPlanFitsError:
        save_scenarios(folder, shown, estimates, None, reason="", **given)
        raise

    # the plan of the chosen scenario, then the scenarios
    STATUS.show("writing the report")
    best = next(each for each in found if each.chosen is chosen)
    planned = dataclasses.replace(best.scenario, spot=False)
    search = next(search for scenario, search in searches if scenario == planned)
    search = of_microbatches(search, chosen.accumulate)
    best.frontier.save(folder / "frontier.json")
    planning = Planning(best.frontier, chosen.point, search.graph)
    report_plan(planning, search, request, folder=folder, notes=notes, ends=False)
    console = Console()
    save_scenarios(folder, shown, estimates, chosen, reason=reason, **given)
    print_scenarios(estimates, chosen, limits=asked.limits, console=console)
    for line in (reason, *notes, f"run folder: {folder}"):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


# ---- what is asked


@dataclass(frozen=True)
class WhatIfOptions:
    """The choices, what a run takes, and its limits.

    None stands for what the configuration has. `spot` None means both, on spot devices and not.
    `processes` search; None: one on each core.
    """

    batch_sizes: tuple[int, ...] | None = None
    seq_lens: tuple[int, ...] | None = None
    clusters: tuple[str, ...] | None = None
    accumulate: tuple[int, ...] | None = None
    processes: int | None = None
    spot: bool | None = False
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
            {str(name): value for name, value in config.get(group, {}).items() if value is not None}
            for group in ("work", "limits")
        )
        spot = config.get("spot", False)
        if spot not in (None, True, False):
            raise ValueError(f"spot is true, false or null (both); got {spot!r}")
        return cls(
            batch_sizes=_read_numbers(config.batch_size, name="batch_size"),
            seq_lens=_read_numbers(config.seq_len, name="seq_len"),
            clusters=_read_names(config.get("clusters")),
            accumulate=_read_numbers(config.accumulate, name="accumulate"),
            processes=None
            if config.processes is None
            else check_whole(config.processes, name="processes"),
            spot=spot,
            work=Workload(
                **{k: check_real(v, name=f"work.{k}", positive=True) for k, v in work.items()}
            )
            if work
            else None,
            limits=Limits(
                **{k: _read_limit(k, v) for k, v in limits.items()}  # type: ignore[arg-type]
            ),
            objective=config.objective,
        )


def _read_numbers(value: Any, *, name: str) -> tuple[int, ...] | None:
    """Return one number or a list of them, each once."""
    if value is None:
        return None
    several = (
        list(value) if OmegaConf.is_list(value) or isinstance(value, list | tuple) else [value]
    )
    if not several:
        raise ValueError(f"{name} is a number or a list of numbers; the list is empty")
    return tuple(dict.fromkeys(check_whole(each, name=name) for each in several))


def _read_names(value: Any) -> tuple[str, ...] | None:
    """Return one name of a cluster or a list of them, each once."""
    if value is None:
        return None
    several = (
        [value] if isinstance(value, str) else list(value) if not isinstance(value, Mapping) else []
    )
    if not several or not all(isinstance(each, str) for each in several):
        raise ValueError(
            "clusters are names of cluster files, such as 'cluster=[a100_8x8,h100_2x8]'"
        )
    return tuple(dict.fromkeys(several))


def _read_limit(name: str, value: float | str) -> float | str:
    if name == "currency":
        return str(value)
    if name in ("deadline", "step_seconds"):
        return parse_seconds(value, name=f"limits.{name}")
    return check_real(value, name=f"limits.{name}", positive=True)


# ---- from a configuration to searches


def read_searches(
    config: DictConfig, asked: WhatIfOptions
) -> tuple[list[tuple[Scenario, SearchRequest]], PlanRequest]:
    """Return every scenario with its search, and what the user asked of the planner.

    The step is captured once for each length.
    """
    searches: list[tuple[Scenario, SearchRequest]] = []
    request: PlanRequest | None = None
    # another length is another model, with a step of its own
    for length in asked.seq_lens or (None,):
        setup = PlanSetup.of(_of_length(config, length))
        clusters = read_clusters(asked.clusters, default=setup.request.cluster)
        if None not in clusters:  # else ranks of torchrun or srun measure it together
            leave_to_rank_0()
        # within a scenario the fastest plan is also the cheapest and soonest
        objective = asked.objective or setup.request.objective
        if objective not in ("time", "memory", "devices"):
            objective = "time"
        request = dataclasses.replace(setup.request, objective=objective)
        own_length = config.model.get("seq_len")
        shown_length = length or (own_length if isinstance(own_length, int) else None)
        searches += _on_clusters(config, asked, setup, clusters, length=shown_length)
    assert request is not None
    return searches, request


def _of_length(config: DictConfig, length: int | None) -> DictConfig:
    """Return the configuration with a model for samples of so many tokens."""
    if length is None:
        return config
    if "seq_len" not in config.model:
        raise ValueError(
            "seq_len is that of a model with the entry model.seq_len, which this one does not have"
        )
    changed: DictConfig = config.copy()
    with open_dict(changed):
        changed.model.seq_len = length
    return changed


def _on_clusters(
    config: DictConfig,
    asked: WhatIfOptions,
    setup: PlanSetup,
    clusters: list[Cluster | None],
    *,
    length: int | None,
) -> Iterator[tuple[Scenario, SearchRequest]]:
    """Yield the scenarios of one length: clusters, then numbers of devices, then batches."""
    requests = [dataclasses.replace(setup.request, cluster=cluster) for cluster in clusters]
    # meshes first: whether any of them has a tensor axis decides how the step is captured
    meshes = [SearchedMeshes.read(config, request, setup.trainer) for request in requests]
    STATUS.show(f"capturing the step of {type(setup.model).__name__}")
    example, capture_seconds = setup.capture(
        splits=any(each.tensor for each in meshes),
        accelerator=has_accelerators(*clusters),
        compiled=bool(check_flag(config.get("compiled", False), name="compiled")),
    )
    STATUS.clear()

    for request, searched in zip(requests, meshes, strict=True):
        unpriced = UnpricedSearch.of(
            setup, searched, example, request, epsilon=EPSILON, capture_seconds=capture_seconds
        )
        search = setup.with_costs(
            functools.partial(unpriced.request, global_batch_size=example.samples), request
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
    searches: Sequence[tuple[Scenario, SearchRequest]], request: PlanRequest, asked: WhatIfOptions
) -> tuple[list[ScenarioResult], list[str]]:
    """Search every scenario, several at a time, behind a progress bar.

    Returns:
        What was found, and notes on scenarios without a plan, which are left out.

    Raises:
        ValueError: the first error, where no scenario has a plan.
    """
    outcomes: dict[int, ScenarioResult | ValueError] = {}
    processes = asked.processes or most_processes(len(searches))
    # of several scenarios a bar says how many are done, of one a line what is searched
    alone = len(searches) < 2
    search = functools.partial(_search, request, asked, STATUS.show if alone else None)
    # helpers are forked here, before the bar starts a thread
    coming = outcomes_of(search, searches, processes=min(processes, len(searches)))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, disable=alone, transient=True, console=Console(stderr=True))
    with bar:
        for index, outcome in bar.track(coming, total=len(searches), description="searching"):
            outcomes[index] = outcome
    STATUS.clear()

    # a scenario alone may have no plan, or none that fits
    each = [(scenario, outcomes[index]) for index, (scenario, _) in enumerate(searches)]
    errors = [(scenario, outcome) for scenario, outcome in each if isinstance(outcome, ValueError)]
    found = [outcome for _, outcome in each if not isinstance(outcome, ValueError)]
    if not found:
        raise errors[0][1]
    return _with_spot(found, asked), [
        f"Left out: {scenario}: {error}" for scenario, error in errors
    ]


def _search(
    request: PlanRequest,
    asked: WhatIfOptions,
    progress: Callable[[str], None] | None,
    of: tuple[Scenario, SearchRequest],
) -> ScenarioResult:
    scenario, search = of
    gc.collect(0)  # what the search before left
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


def _with_spot(found: list[ScenarioResult], asked: WhatIfOptions) -> list[ScenarioResult]:
    """Add the scenarios on spot devices, or return these alone, as ``spot`` says.

    Plans do not change there; prices and failures do.
    """
    if asked.spot is False:
        return found
    spot = [
        each.on_spot(work=asked.work)
        for each in found
        if each.scenario.cluster.device.spot_price_per_hour is not None
    ]
    if asked.spot and not spot:
        name = found[0].scenario.cluster.name
        raise ValueError(
            f"spot=true, but the cluster {name!r} has no cluster.device.spot_price_per_hour: give "
            "one"
        )
    return spot if asked.spot else [*found, *spot]
