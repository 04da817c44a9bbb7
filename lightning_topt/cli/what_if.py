"""`topt plan` for machines that nobody has yet: clusters, numbers of devices, batches and lengths;
time, memory, money.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_topt.basics.argument_checks import check_real, check_whole
from lightning_topt.basics.units import parse_seconds
from lightning_topt.cli.parallel_search import most_processes, outcomes_of
from lightning_topt.cli.plan_report import report_plan
from lightning_topt.cli.plan_setup import Asked, PlanSetup
from lightning_topt.cli.searched_meshes import SearchedMeshes
from lightning_topt.cli.several_clusters import read_clusters
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.communication import check_world_size
from lightning_topt.graph.no_trace import no_collection
from lightning_topt.plan.choose import OBJECTIVES, NoPlanFitsError
from lightning_topt.plan.plan_search import SearchRequest
from lightning_topt.plan.scenario_report import print_scenarios, save_scenarios
from lightning_topt.plan.scenarios import (
    SCENARIO_OBJECTIVES,
    Found,
    Limits,
    Scenario,
    Work,
    check_asked,
    choose_estimate,
    default_objective,
    of_microbatches,
    search_scenario,
    unpriced,
)
from lightning_topt.plugins.plan_request import PlanRequest
from lightning_topt.plugins.planning import Planning

_EPSILON = (
    # plans that others beat by less than this in time and memory may be left out: predictions are
    # not that good
    0.01
)
_SECONDS = 3.0  # of the search of one scenario with one number of micro-batches
_CHOICES = ("clusters", "batch_size", "seq_len", "accumulate")


@dataclass(frozen=True)
class WhatIf:
    """A `WhatIf` is what is asked: choices, what a run takes, and limits; None: as it is.
    `processes` search (None: one on each core).
    """

    batch_sizes: tuple[int, ...] | None = None
    seq_lens: tuple[int, ...] | None = None
    clusters: tuple[str, ...] | None = None
    accumulate: tuple[int, ...] | None = None
    processes: int | None = None
    spot: bool | None = False
    work: Work | None = None
    limits: Limits = field(default_factory=Limits)
    objective: str | None = None

    @classmethod
    def read(cls, config: DictConfig) -> WhatIf:
        """Read the options of a configuration. Raises ValueError for what they cannot mean."""
        work, limits = (
            {str(name): value for name, value in config.get(group, {}).items() if value is not None}
            for group in ("work", "limits")
        )
        spot = config.get("spot", False)
        if spot not in (None, True, False):
            raise ValueError(f"spot is true, false or null (both); got {spot!r}")
        return cls(
            _wholes(config.batch_size, name="batch_size"),
            _wholes(config.seq_len, name="seq_len"),
            _texts(config.get("clusters")),
            _wholes(config.accumulate, name="accumulate"),
            None if config.processes is None else check_whole(config.processes, name="processes"),
            spot,
            Work(**{k: check_real(v, name=f"work.{k}", positive=True) for k, v in work.items()})
            if work
            else None,
            Limits(**{name: _limit(name, value) for name, value in limits.items()}),
            config.objective,
        )


def is_asked(config: DictConfig) -> bool:
    """Return whether a configuration of `topt plan` asks more than which plan is best here."""
    given = [*(config[name] for name in _CHOICES), *config.work.values(), *config.limits.values()]
    is_new = config.objective in SCENARIO_OBJECTIVES and config.objective not in OBJECTIVES
    return any(value is not None for value in given) or config.spot is not False or is_new


# but between searches: there are millions of objects, and most of them stay to the end
@no_collection()
def run(config: DictConfig) -> None:
    """Search every scenario that `config` describes, choose one and report all; files go to Hydra's
    run folder.

    Raises ValueError for options that contradict one another, and NoPlanFitsError where no scenario
    keeps the limits.
    """
    asked = WhatIf.read(config)
    check_asked(asked.objective or "time", asked.limits, has_work=asked.work is not None)
    searches, request = read_searches(config, asked)
    found, left_out = search_all(searches, request, asked)
    estimates = [each.chosen for each in found]
    objective = asked.objective or default_objective(
        estimates, asked.limits, given=request.objective
    )
    notes = [*left_out]
    if (
        objective == "money"
        and (without := unpriced(estimates))
        and len(without) < len({*map(_name, estimates)})
    ):
        notes.append(f"Without a price, and left out of the choice: {', '.join(without)}.")
    folder = Path(HydraConfig.get().runtime.output_dir)
    shown = [estimate for each in found for estimate in each.estimates]
    try:
        chosen, reason = choose_estimate(estimates, objective=objective, limits=asked.limits)
    except NoPlanFitsError:
        save_scenarios(folder, shown, estimates, None, limits=asked.limits, reason="", notes=notes)
        raise
    best = next(each for each in found if each.chosen is chosen)
    (search, *_) = (
        search
        for scenario, search in searches
        if scenario == dataclasses.replace(best.scenario, spot=False)
    )
    console = Console()
    _report_best(best, of_microbatches(search, chosen.accumulate), request, folder, notes=notes)
    save_scenarios(
        folder, shown, estimates, chosen, limits=asked.limits, reason=reason, notes=notes
    )
    print_scenarios(estimates, chosen, limits=asked.limits, console=console)
    for line in (reason, *notes, f"run folder: {folder}"):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _name(estimate: Any) -> str:
    return str(estimate.scenario.cluster.name)


def _report_best(
    best: Found, search: SearchRequest, request: PlanRequest, folder: Path, *, notes: list[str]
) -> None:
    best.frontier.save(folder / "frontier.json")
    planning = Planning(best.frontier, best.chosen.point, search.graph)
    report_plan(
        planning, search, memory_limit=request.memory_limit, folder=folder, notes=notes, ends=False
    )
    if best.chosen.accumulate > 1:
        Console().print(
            f"A step has {best.chosen.accumulate} micro-batches: "
            f"trainer.accumulate_grad_batches={best.chosen.accumulate}.",
            highlight=False,
        )


def search_all(
    searches: Sequence[tuple[Scenario, SearchRequest]], request: PlanRequest, asked: WhatIf
) -> tuple[list[Found], list[str]]:
    """Return what was found for every scenario, and notes on those that are left out; a bar shows
    how far it is.

    Raises the first error where no scenario has a plan.
    """
    outcomes: dict[int, Found | ValueError] = {}
    processes = asked.processes or most_processes(len(searches))
    search = functools.partial(_search, request, asked)
    coming = outcomes_of(
        search, searches, processes=min(processes, len(searches))
    )  # forks, so before any thread of the bar
    with _progress(show=len(searches) > 1) as progress:
        for index, outcome in progress.track(coming, total=len(searches), description="searching"):
            outcomes[index] = outcome
    each = [(scenario, outcomes[index]) for index, (scenario, _) in enumerate(searches)]
    # A scenario alone may have no plan, or none that fits.
    errors = [(scenario, outcome) for scenario, outcome in each if isinstance(outcome, ValueError)]
    found = [outcome for _, outcome in each if not isinstance(outcome, ValueError)]
    if not found:
        raise errors[0][1]
    return _with_spot(found, asked), [
        f"Left out: {scenario}: {error}" for scenario, error in errors
    ]


def _search(request: PlanRequest, asked: WhatIf, of: tuple[Scenario, SearchRequest]) -> Found:
    scenario, search = of
    gc.collect(0)  # what the search before left
    check_world_size(search.cluster, world_size=scenario.devices)
    return search_scenario(
        search,
        scenario,
        objective=request.objective,
        memory_limit=request.memory_limit,
        memory_margin=request.memory_margin,
        accumulate=asked.accumulate,
        work=asked.work,
    )


def _with_spot(found: list[Found], asked: WhatIf) -> list[Found]:
    """The same on spot devices as well, or on these alone: plans do not change, prices and failures
    do.
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


def read_searches(
    config: DictConfig, asked: WhatIf
) -> tuple[list[tuple[Scenario, SearchRequest]], PlanRequest]:
    """Return every scenario with its search, and what the user asked of the planner; each length is
    captured once.
    """
    searches: list[tuple[Scenario, SearchRequest]] = []
    request: PlanRequest | None = None
    for length in asked.seq_lens or (None,):
        setup = PlanSetup.of(_of_length(config, length))
        clusters = read_clusters(asked.clusters, default=setup.request.cluster)
        request = dataclasses.replace(
            setup.request, objective=_plan_objective(setup.request, asked)
        )
        searches += _on_clusters(
            config, asked, setup, clusters, length=length or _length_of(config)
        )
    assert request is not None
    return searches, request


def _plan_objective(request: PlanRequest, asked: WhatIf) -> str:
    """Within a scenario the fastest plan is also the cheapest and soonest."""
    chosen = asked.objective or request.objective
    return chosen if chosen in ("time", "memory", "devices") else "time"


def _on_clusters(
    config: DictConfig,
    asked: WhatIf,
    setup: PlanSetup,
    clusters: list[Cluster | None],
    *,
    length: int | None,
) -> Iterator[tuple[Scenario, SearchRequest]]:
    requests = [dataclasses.replace(setup.request, cluster=cluster) for cluster in clusters]
    meshes = [
        SearchedMeshes.read(_counted(config, each.cluster), each, setup.trainer)
        for each in requests
    ]
    example, capture_seconds = setup.capture(splits=any(each.tensor for each in meshes))
    for request, searched in zip(requests, meshes, strict=True):
        asked_for = Asked.of(
            setup, searched, example, request, epsilon=_EPSILON, capture_seconds=capture_seconds
        )
        search = setup.with_costs(
            functools.partial(asked_for.request, global_batch_size=example.samples), request
        )
        if search is None:  # another rank of torchrun goes on
            raise SystemExit(0)
        search = dataclasses.replace(search, max_seconds=_SECONDS)
        for count in searched.device_counts:
            ranks = searched.data_ranks or count
            for batch in asked.batch_sizes or (example.samples * ranks,):
                one = dataclasses.replace(search, device_counts=(count,), global_batch_size=batch)
                yield Scenario(search.cluster, count, batch, length), one


def _counted(config: DictConfig, cluster: Cluster | None) -> DictConfig:
    """The configuration for one cluster: all of its devices where no number is given."""
    if cluster is None or config.mesh is not None or config.device_counts is not None:
        return config
    counts = [cluster.num_devices]
    return OmegaConf.merge(config, {"device_counts": counts})  # type: ignore[return-value]


def _of_length(config: DictConfig, length: int | None) -> DictConfig:
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


def _length_of(config: DictConfig) -> int | None:
    length = config.model.get("seq_len")
    return length if isinstance(length, int) else None


def _progress(*, show: bool) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, disable=not show, transient=True, console=Console(stderr=True))


def _wholes(value: Any, *, name: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    several = (
        list(value) if OmegaConf.is_list(value) or isinstance(value, list | tuple) else [value]
    )
    if not several:
        raise ValueError(f"{name} is a number or a list of numbers; the list is empty")
    return tuple(dict.fromkeys(check_whole(each, name=name) for each in several))


def _texts(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    several = (
        [value] if isinstance(value, str) else list(value) if not isinstance(value, Mapping) else []
    )
    if not several or not all(isinstance(each, str) for each in several):
        raise ValueError("clusters are names of cluster files, such as cluster=[a100_8x8,h100_2x8]")
    return tuple(dict.fromkeys(several))


def _limit(name: str, value: Any) -> float:
    if name in ("deadline", "step_seconds"):
        return parse_seconds(value, name=f"limits.{name}")
    return check_real(value, name=f"limits.{name}", positive=True)
