"""`topt advise`: which batch, how many devices, what is slow, what is worth allowing?

    scale       other batches and fewer devices         searched again
    bottleneck  what the chosen plan's time is made of
    data        the wait for data                       from ``stalls.json`` of `topt stalls`
    exchange    servers, compression, bounded loss      uniform plans, searched again

Every number says where it is from. Nothing is trained.
"""

from __future__ import annotations

import csv
import math
import statistics
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import lightning.pytorch as pl
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console
from rich.markdown import Markdown

from lightning_topt.basics.argument_checks import check_real
from lightning_topt.cli.what_if import WhatIfOptions, read_searches, search_all
from lightning_topt.costs.plain_values import parse_json, read_text
from lightning_topt.costs.sizes import parameter_bytes
from lightning_topt.plan.advice import (
    Advice,
    advise_batch,
    advise_bounded_loss,
    advise_compression,
    advise_devices,
    advise_servers,
    save_advice,
)
from lightning_topt.plan.advice_bottlenecks import MeasuredStalls, advise_bottleneck, advise_data
from lightning_topt.plan.choose import fitting_points
from lightning_topt.plan.plan_frontier import PlanPoint
from lightning_topt.plan.plan_search import SearchRequest, search_plans
from lightning_topt.plan.scenario_report import plan_in_words
from lightning_topt.plan.scenarios import (
    Scenario,
    ScenarioResult,
    of_microbatches,
    step_of_microbatches,
)
from lightning_topt.plugins.plan_request import AllowedExchanges, PlanRequest

_BATCHES = (0.25, 0.5, 1, 2, 4)  # of the given one
_MOST_COUNTS = 6


def run(config: DictConfig) -> None:
    """Give advice on what `config` describes; files go to Hydra's run folder.

    Raises what searching and reading raise.
    """
    pl.seed_everything(config.seed, workers=True)
    options, asked = AdviceOptions.read(config), WhatIfOptions.read(config)
    searches, request = read_searches(config, asked)
    if len(searches) > 1:
        raise ValueError(
            "topt advise is about one batch_size, seq_len and number of devices, and looks at "
            "other batches and fewer devices by itself; topt plan compares several"
        )

    # the plan that the advice is about: `at` is what was found, `chosen` the search of its batches
    (at, *_), notes = search_all(searches, request, asked)
    ((_, search),) = searches
    chosen = of_microbatches(search, at.chosen.accumulate)

    advice = _advise_scale(at, search, request, asked, options)
    advice += advise_bottleneck(chosen, at.chosen, at.frontier, limit=_memory_limit(at, request))
    advice += advise_data(at.chosen, options.stalls)
    # how gradients are exchanged: by servers, compressed, with lost messages
    size = float(sum(map(parameter_bytes, search.graph.parameters)))
    points, why = _compressed_points(at, chosen, request)
    within = request.equal_within
    advice += [
        advise_servers(at.chosen, parameter_bytes=size),
        advise_compression(points, at=at.chosen, why_none=why, equal_within=within),
        advise_bounded_loss(at.chosen, tail=options.exchange_tail, equal_within=within),
    ]

    # files and the terminal
    title = f"Advice on {search.graph.model or 'the model'}: {at.scenario}"
    notes = [f"The plan: {plan_in_words(at.chosen)}.", at.chosen.point.plan.reason, *notes]
    folder = Path(HydraConfig.get().runtime.output_dir)
    text = save_advice(folder, advice, title=title, notes=notes)
    at.chosen.point.plan.save(folder / "plan.yaml")
    console = Console()
    console.print(Markdown(text))
    console.print(f"run folder: {folder}", highlight=False, soft_wrap=True)


# ---- options


@dataclass(frozen=True)
class AdviceOptions:
    """The options of `topt advise` beside those of `topt plan`.

    Args:
        efficiency: the share of linear speed-up that more devices must keep.
        stalls: what `topt stalls` has measured.
        noise_scale: of gradients, in samples.
        exchange_tail: the slowest exchange over the median one.
    """

    efficiency: float
    stalls: MeasuredStalls | None
    noise_scale: float | None
    exchange_tail: float | None

    @classmethod
    def read(cls, config: DictConfig) -> AdviceOptions:
        """Read and check them.

        Raises:
            ValueError: for what they cannot be.
        """
        wanted = check_real(config.efficiency, name="efficiency", positive=True)
        if wanted >= 1:
            raise ValueError(
                f"efficiency is a share between 0 and 1, such as 0.8; got {config.efficiency}"
            )
        tail = config.exchange_tail
        if tail is not None and (tail := check_real(tail, name="exchange_tail")) < 1:
            raise ValueError(
                f"exchange_tail is at least 1: the slowest exchange over the median one; got {tail}"
            )
        # given, or read from a log
        noise = config.noise_scale
        if noise is not None:
            noise = check_real(noise, name="noise_scale", positive=True)
        elif config.log is not None:
            noise = read_noise_scale(str(config.log), column=str(config.noise_column))
        stalls = None if config.stalls is None else read_stalls(str(config.stalls))
        return cls(wanted, stalls, noise, tail)


def read_stalls(path: str) -> MeasuredStalls:
    """Return what a ``stalls.json`` holds.

    Raises:
        ValueError: the file is none.
    """
    try:
        return MeasuredStalls.read(parse_json(read_text(path)))
    except OSError as error:
        raise ValueError(f"stalls: cannot read {path!r}: {error.strerror}") from error


def read_noise_scale(path: str, *, column: str) -> float:
    """Return the gradient noise scale, in samples, that a ``metrics.csv`` has logged.

    It is the median of the second half of `column`.

    Raises:
        ValueError: the file has no such column, or no positive numbers in it.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = [*csv.DictReader(file)]
    except (OSError, ValueError, csv.Error) as error:
        raise ValueError(f"log: cannot read {path!r}: {error}") from error
    columns = list(rows[0]) if rows else []
    if column not in columns:
        raise ValueError(
            f"log: {path!r} has no column {column!r}, the gradient noise scale in samples, but "
            f"{', '.join(columns[:8])}: name another with noise_column=, give noise_scale=, or "
            "leave out log"
        )
    # of the second half: the first steps are not typical
    values = [float(row[column]) for row in rows if row[column]]
    values = [value for value in values[len(values) // 2 :] if value > 0]
    if not values:
        raise ValueError(f"log: the column {column!r} of {path!r} has no positive numbers")
    return statistics.median(values)


# ---- searches again


def _advise_scale(
    at: ScenarioResult,
    search: SearchRequest,
    request: PlanRequest,
    asked: WhatIfOptions,
    options: AdviceOptions,
) -> list[Advice]:
    """Search again for other batches, and for fewer devices, and advise on both.

    Tensor axes are searched where the plan has one.
    """
    scenario = at.scenario
    # steps on slices take captures: only where the plan has some
    search = search if at.chosen.point.plan.mesh.tensor_axes else replace(search, split=None)
    # other batches, where it is known how a step grows with them
    others: list[tuple[Scenario, SearchRequest]] = []
    sizes = {round(search.global_batch_size * factor) for factor in _BATCHES}
    for batch in sorted(sizes) if search.graph.batch_scaling else []:
        if 0 < batch != search.global_batch_size:
            others.append(
                (replace(scenario, batch_size=batch), replace(search, global_batch_size=batch))
            )
    # halves of the number of devices, halves of these, and so on, as long as they are whole
    count = scenario.devices
    for _ in range(_MOST_COUNTS if search.mesh is None else 0):
        if count % 2:
            break
        count //= 2
        others.append((replace(scenario, devices=count), replace(search, device_counts=(count,))))

    # they are searched side by side
    found: list[ScenarioResult] = []
    if others:
        with suppress(ValueError):  # none of them has a plan
            found, _ = search_all(others, request, asked)
    batches = [each.chosen for each in found if each.scenario.devices == scenario.devices]
    counts = [each.chosen for each in found if each.scenario.devices != scenario.devices]
    advice = advise_batch([at.chosen, *batches], noise_scale=options.noise_scale)
    return advice + advise_devices([at.chosen, *counts], at=at.chosen, wanted=options.efficiency)


def _compressed_points(
    at: ScenarioResult, search: SearchRequest, request: PlanRequest
) -> tuple[list[PlanPoint], str]:
    """Return the uniform plans that fit and keep gradients unsharded, compressed or not.

    Their times are those of a step, as the plan's are. The text says why there are none.
    """
    if search.mesh is not None or at.scenario.devices == 1:
        return [], "it is for gradients that data ranks exchange, on a mesh that is not given"
    # all methods of compression, in a search of data parallelism alone
    candidates = AllowedExchanges.read(True).held(search.optimizer, steps=math.inf, say=False)
    asked = replace(
        search,
        exchanges=candidates,
        local_steps=(),
        split=None,
        pipelines=None,
        stale=None,
        shards=False,
    )
    try:
        found = search_plans(asked)
    except ValueError as error:
        return [], str(error).rstrip(".")
    points = [
        step_of_microbatches(point, accumulate=at.chosen.accumulate, facts=at.facts)
        for point in found.candidates
        if point.plan.keeps_gradients_whole
    ]
    fits = fitting_points(
        points,
        memory_limit=_memory_limit(at, request),
        memory_margin=request.margin_on(at.scenario.cluster),
    )
    why = "it is for whole gradients, and no plan that keeps these whole fits into memory"
    return fits, "" if fits else why


def _memory_limit(at: ScenarioResult, request: PlanRequest) -> float:
    """Return the bytes per device that a plan may take."""
    device = at.scenario.cluster.device.memory_bytes
    return device if request.memory_limit is None else request.memory_limit
