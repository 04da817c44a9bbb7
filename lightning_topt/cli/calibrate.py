"""`topt calibrate`: measure this machine anew, keep it for later runs, and say how sure that is.

With ``quality=[...]`` it measures instead how many more steps ways of training need on a model:

    a way       a method of gradient exchange, or a pipeline whose weights miss updates
    a run       ranks of this machine that fit the module under it      plugins/paired_fits.py
    the race    which runs are made, and the factors                    plan/paired_runs.py

The factors go to a table of the user's, which ``objective=time_to_loss`` reads. ``quality.json``
in the run folder has all curves; the same command in the same folder makes those that are missing.

It writes a cluster file (``output``), which is used elsewhere with ``strategy.cluster=FILE``, and
``calibration.json`` (docs/reference/schemas.md). It prints two tables: how far the finished table
is from what is measured a second time, and what changed since an earlier calibration.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from hydra_plugins.lightning_topt_searchpath import conf_dir
from lightning_topt.basics.argument_checks import check_choice, check_real, check_whole
from lightning_topt.basics.own_files import made
from lightning_topt.basics.units import format_duration, parse_seconds
from lightning_topt.cli.example_step import plain_value
from lightning_topt.cli.local_processes import run_on_ranks, start_method
from lightning_topt.communication.exchange_method import ExchangeMethod, GradientMethod, LocalMethod
from lightning_topt.communication.method_registry import method_classes, read_method
from lightning_topt.communication.started_ranks import started_rank
from lightning_topt.costs.calibration_check import (
    Change,
    CheckedPoint,
    changes_between,
    check_calibration,
    largest_and_median,
    summarize,
)
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.measurements import Measurements
from lightning_topt.plan.paired_runs import (
    Curve,
    Pairing,
    RunKey,
    Target,
    Way,
    WayFailedError,
    keep_row,
    race,
    row_of,
    write_whole,
)
from lightning_topt.plan.plan_frontier import factor_words
from lightning_topt.plan.step_factors import missing_updates, own_file
from lightning_topt.plugins.paired_fits import PairedFit, facts_of, fit_on_ranks
from lightning_topt.prediction import make_prediction, prediction_to_value
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES

SCHEMA_VERSION = QUALITY_VERSION = 1
_CHECKS = 20  # of a dense run, where check_every does not say
_METHOD_GROUP = "gradient_exchange"
_OF_MACHINE = ("accelerator", "devices", "output", "quality")


def run(config: DictConfig) -> None:
    """Measure, write ``config.output`` and the report, and print how well the table holds.

    Raises:
        ValueError: the machine lacks what `config` asks for.
    """
    _check_overrides(config)
    if config.quality is not None:
        measure_quality(config)
        return
    found = run_on_ranks(_measure, accelerator=config.accelerator, devices=config.devices)
    if found is None:  # another rank of torchrun or srun writes it
        return

    # files
    cluster, output = found.cluster, Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    cluster.save(output)
    folder = Path(HydraConfig.get().runtime.output_dir)
    _save_report(folder / "calibration.json", found)

    # the terminal
    _print_tables(found.points, found.changes)
    nodes = f"{cluster.num_nodes} node(s) x {cluster.devices_per_node} device(s)"
    print(f"measured {cluster.name}: {nodes}, in {found.seconds:.1f} s")
    if found.kept is not None and cluster.busy_share:
        print(
            f"the machine was busy: in {100 * cluster.busy_share:.0f} % of the time a rank waited "
            f"while other programs had its core. Measure again when it is quiet. {found.kept} "
            "keeps what was measured on a quiet machine before; without that, runs use this one "
            "until they find it quiet"
        )
    elif found.kept is not None:
        print(
            f"runs of {cluster.num_devices} rank(s) with equal settings on this machine use it "
            f"from {found.kept}"
        )
    print(f"written to {output}; use it elsewhere with strategy.cluster={output}")


def _check_overrides(config: DictConfig) -> None:
    """Raise ValueError for an option that the measurement that is asked for has no use for."""
    given = [word.lstrip("+~").partition("=")[0] for word in HydraConfig.get().overrides.task]
    for name in given:
        if config.quality is None and name not in _OF_MACHINE:
            raise ValueError(
                f"{name} belongs to the measurement of a model: say quality='[bf16]' or other ways "
                "of training, or leave it out"
            )
        if config.quality is not None and name == "output":
            raise ValueError(
                "output is the cluster file of a measured machine: leave it out with quality, "
                "whose factors go to the user's table"
            )


class Calibration(NamedTuple):
    """What the ranks have measured.

    - `kept`: the file that later runs read; None: it could not be written;
    - `points`: the table against what was measured again;
    - `changes`: since an earlier calibration; None: there was none;
    - `seconds`: that all of it took.
    """

    cluster: Cluster
    kept: Path | None
    points: list[CheckedPoint]
    changes: list[Change] | None
    seconds: float


def _measure(device: torch.device, num_nodes: int) -> Calibration:
    """Measure on every rank, and check the table that comes of it."""
    start = time.perf_counter()
    # refresh: what is kept on this machine is measured anew
    measurements = Measurements.open(
        device=device, num_nodes=num_nodes, refresh=True, progress=print
    )
    # an earlier calibration is not used, but compared with
    before, cluster = measurements.cluster_before, measurements.cluster()
    # measured a second time, at the table's points: how well it holds
    points = check_calibration(cluster, device=device)
    # the file is there only where the folder of measurements can be written
    kept = (
        measurements.path if measurements.path is not None and measurements.path.is_file() else None
    )
    changes = None if before is None else changes_between(before, cluster)
    return Calibration(cluster, kept, points, changes, time.perf_counter() - start)


# ---- reports


def _save_report(path: Path, found: Calibration) -> None:
    """Write all points and changes as JSON."""
    record = {
        "schema_version": SCHEMA_VERSION,
        "seconds": found.seconds,
        "busy_share": found.cluster.busy_share,
        "constants": [each.to_dict() for each in summarize(found.points)],
        "points": [asdict(point) for point in found.points],
        "changes": None if found.changes is None else [each.to_dict() for each in found.changes],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


def _print_tables(points: Sequence[CheckedPoint], changes: Sequence[Change] | None) -> None:
    """Print the errors of each constant, then what changed since an earlier calibration."""
    # the table against a second measurement
    console = Console()
    columns = ["constant", "points", "median error", "largest", "where"]
    table = _table("the table against what was measured again", columns)
    for each in summarize(points):
        errors = _percent(each.median), _percent(each.largest)
        table.add_row(each.constant, str(each.points), *errors, each.at)
    console.print(table)
    if changes is None:
        console.print(
            "No calibration of these ranks was kept before, so there is none to compare this one "
            "with."
        )
        return

    # against an earlier calibration; shares of time are shown as they are
    columns = ["constant", "before", "now", "largest change", "median", "where"]
    table = _table("since the calibration before", columns)
    for change in changes:
        values = f"{change.before:.4g}", f"{change.now:.4g}"
        shown = (
            f"{v:.3f}" if change.is_share else _percent(v) for v in (change.largest, change.median)
        )
        table.add_row(change.constant, *values, *shown, change.at)
    console.print(table)
    if (found := largest_and_median(changes)) is not None:
        worst, median = found
        where = f" ({worst.at})" if worst.at else ""
        console.print(
            f"Half of the constants changed by at most {_percent(median)}; the most, "
            f"{worst.constant}{where}, by {_percent(worst.largest)}.",
            highlight=False,
        )


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="left" if name in ("constant", "where") else "right")
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


# ---- the steps that ways of training need on a model


def measure_quality(config: DictConfig) -> None:
    """Measure the factors of ``config.quality``, print them and add them to the user's table.

    Raises:
        ValueError: options contradict one another, or the dense run does not train.
    """
    if started_rank()[1] > 1:
        raise ValueError(
            "topt calibrate quality= starts its own ranks on this machine: run it without torchrun "
            "and srun, with devices=<ranks>"
        )
    if (config.trainer.devices, config.trainer.accelerator) != (config.devices, config.accelerator):
        raise ValueError("say devices= and accelerator=, which trainer.* of the runs follow")
    pairing = _pairing(config)
    ways = read_ways(plain_value(config.quality), ranks=config.devices)
    table = own_file()
    if table is None:
        raise ValueError(
            "this user has no home for a table of step factors: set XDG_CACHE_HOME to a folder"
        )
    folder = Path(HydraConfig.get().runtime.output_dir)
    trials = Trials(config, pairing, folder)

    def keep(way: Way, factors: Sequence[float | None]) -> None:
        row = row_of(
            way,
            factors,
            optimizer=trials.facts["optimizer"],
            steps=config.steps,
            model=trials.facts["model"],
            source=str(table),
        )
        made(table.parent)
        keep_row(table, row)

    found = race(ways, trials, pairing=pairing, say=_say, keep=keep)

    # what was found, for people
    print(f"\n{trials.facts['model']} under {trials.facts['optimizer']}, {config.steps} steps:")
    for way in ways:
        print(f"  {way.words}: {_words(way, found.factors, found.failed)}")
        if way in found.dropped:
            print(f"    dropped: {found.dropped[way]}")
    print(f"kept in {table}" if found.factors else "nothing was kept")
    print(f"run folder: {folder}")


def _say(line: str) -> None:
    print(line, flush=True)


def _words(
    way: Way, factors: Mapping[Way, Sequence[float | None]], failed: Mapping[Way, str]
) -> str:
    if way in failed:
        return f"cannot run: {failed[way]}"
    values = [math.inf if value is None else value for value in factors[way]]
    if all(map(math.isinf, values)):
        return "did not reach the dense run's loss"
    middle = sorted(values)[len(values) // 2]
    return f"{factor_words(middle, min(values), max(values))} the steps"


def read_ways(given: object, *, ranks: int) -> list[Way]:
    """Return the ways of training that a command line names.

    Each is the name of a method, or of a configuration in the group `gradient_exchange`; or a
    mapping with `method` and its options, or with a continuous `schedule` and its `prediction`.

    Raises:
        ValueError: for what is no such way, for exact ones and for one that is there twice.
    """
    if not isinstance(given, list) or not given:
        raise ValueError(
            "quality is a list of ways of training, such as quality='[bf16,topk_few_bits]' or "
            f"quality='[{{method:topk,density:0.01}}]'; got {given!r}"
        )
    check_whole(ranks, name="devices")
    if ranks < 2:
        raise ValueError("one rank exchanges nothing: say devices=2 or more")
    ways: dict[str, Way] = {}
    for each in given:
        is_stale = isinstance(each, Mapping) and "schedule" in each
        way = _stale_way(each, ranks=ranks) if is_stale else _exchange_way(each, ranks=ranks)
        if way.words in ways:
            raise ValueError(f"quality has {way.words} twice: leave one out")
        ways[way.words] = way
    return [*ways.values()]


def _stale_way(given: Mapping[str, Any], *, ranks: int) -> Way:
    """Return a pipeline without flush, a stage on each rank."""
    check_choice(given["schedule"], name="schedule", allowed=CONTINUOUS_SCHEDULES)
    if set(given) != {"schedule", "prediction"}:
        raise ValueError(
            "a way with stale weights has a schedule and a rule, as in "
            f"{{schedule:continuous,prediction:spectrain}}; got {dict(given)}"
        )
    made = make_prediction(given["prediction"])
    rule = prediction_to_value(made)
    in_flight = (ranks - 1) * CONTINUOUS_SCHEDULES[given["schedule"]]
    missed = missing_updates(made, in_flight)
    words = f"{missed} missing updates by {rule} ({given['schedule']}, {ranks} stages)"
    how = {**given, "stages": ranks}
    return Way(words, staleness=missed, prediction=rule, how=how)


def _exchange_way(given: object, *, ranks: int) -> Way:
    """Return a way of gradient exchange, or of ranks that train alone."""
    method = _method(given)
    if isinstance(method, GradientMethod) and method.is_exact:
        raise ValueError(
            f"{method.words} trains as dense synchronous training does, which every way is "
            "compared with: leave it out of quality"
        )
    options = _changed_options(method)
    words = method.words + "".join(f", {name} {value}" for name, value in options.items())
    return Way(words, method.name, options, ranks, how={"method": method.name, **options})


def _method(given: object) -> ExchangeMethod:
    """Return a method from the name of a method or of a configuration, or from its options."""
    if isinstance(given, str):
        group = {path.stem for path in (conf_dir() / _METHOD_GROUP).glob("*.yaml")}
        check_choice(given, name="quality", allowed=sorted(group | {*method_classes()}))
        given = _options_in_group(given) if given in group else given
    elif not isinstance(given, Mapping) or "method" not in given:
        raise ValueError(
            f"{given!r} is no way of training: name a method, as in {{method:topk,density:0.01}}, "
            "or a rule for stale weights, as in {schedule:continuous,prediction:spectrain}"
        )
    return read_method(given)


def _options_in_group(name: str) -> dict[str, Any]:
    """Return the options of a configuration, and of those that it begins with."""
    own = plain_value(OmegaConf.load(conf_dir() / _METHOD_GROUP / f"{name}.yaml"))
    options: dict[str, Any] = {}
    for each in own.pop("defaults", ["_self_"]):
        options |= own if each == "_self_" else _options_in_group(each)
    return options


def _changed_options(method: ExchangeMethod) -> dict[str, Any]:
    """Return the options of a method that are not its defaults."""
    default = type(method)().as_mapping()
    return {n: value for n, value in method.as_mapping().items() if value != default[n]}


def _pairing(config: DictConfig) -> Pairing:
    check_whole(config.steps, name="steps", least=4)
    check_whole(config.seeds, name="seeds")
    longest = check_real(config.longest, name="longest", positive=True)
    if longest < 1:
        raise ValueError(f"longest={longest:g}: a run needs at least the dense run's steps")
    if config.check_every is not None:
        check_whole(config.check_every, name="check_every", most=config.steps // 2)
    rates: tuple[float | None, ...] = (None,)
    if config.learning_rates is not None:
        _, values = _rate_option(config)
        rates = tuple(check_real(v, name="learning_rates", positive=True) for v in values)
    seeds = tuple(range(config.seed, config.seed + config.seeds))
    return Pairing(config.steps, longest, seeds, rates)


def _rate_option(config: DictConfig) -> tuple[str, list[Any]]:
    """Return the option that holds the learning rate, and the rates to try."""
    given = plain_value(config.learning_rates)
    if not isinstance(given, dict) or len(given) != 1:
        raise ValueError(
            "learning_rates is one option of the model and its values, such as "
            f"learning_rates='{{model.lr:[0.001,0.002]}}'; got {given!r}"
        )
    ((name, values),) = given.items()
    if not isinstance(values, list) or not values or not str(name).startswith("model."):
        raise ValueError(f"learning_rates has {name}: {values!r}; say {{model.<option>:[...]}}")
    return name, values


class Trials:
    """Makes runs, and keeps their curves in a folder; those that it has are not made again.

    `facts` has the model and the optimizer, as soon as a run was made.
    """

    def __init__(self, config: DictConfig, pairing: Pairing, folder: Path) -> None:
        self.config, self.pairing, self.folder = config, pairing, folder
        self.patience = parse_seconds(config.timeout, name="timeout")
        names = (
            *("model", "data", "trainer", "metric", "accelerator", "devices"),
            *("steps", "longest", "check_every", "learning_rates"),
        )
        settings = {name: plain_value(config.get(name)) for name in names}
        self.path, self.facts = folder / "quality.json", {}
        self.record = {"schema_version": QUALITY_VERSION, "settings": settings, "runs": {}}
        if self.path.is_file():
            record = json.loads(self.path.read_text())
            if record.get("settings") != json.loads(json.dumps(settings)):
                raise ValueError(f"{folder} has runs with other settings: choose another folder")
            self.record = record
            self.facts = record.get("facts", {})

    def __call__(self, key: RunKey, target: Target | None) -> Curve:
        """Return the curve of a run. Raises WayFailedError."""
        name = json.dumps([key.way.ranks, dict(key.way.how), key.seed, key.rate])
        runs: dict[str, Any] = self.record["runs"]  # type: ignore[assignment]
        if name not in runs:
            start = time.perf_counter()
            curve = self._run(key, target, self.folder / "runs" / str(len(runs)))
            seconds = round(time.perf_counter() - start, 1)
            runs[name] = {"curve": curve, "seconds": seconds}
            self.record["facts"] = self.facts
            write_whole(self.path, json.dumps(self.record) + "\n")
            if target is None and len(runs) == 1:
                print(f"a dense run takes {format_duration(seconds)}", flush=True)
        return [(step, value) for step, value in runs[name]["curve"]]

    def _run(self, key: RunKey, target: Target | None, folder: Path) -> list[tuple[float, float]]:
        """Start ranks, wait for them, and return the curve that they left."""
        config: DictConfig = self.config.copy()
        if key.rate is not None:
            OmegaConf.update(config, _rate_option(config)[0], key.rate, force_add=True)
        made_of = {
            name: OmegaConf.to_container(config[name], resolve=True)
            for name in ("model", "data", "trainer")
        }
        job = PairedFit(
            make_model=partial(instantiate, made_of["model"]),
            make_data=partial(instantiate, made_of["data"]),
            make_trainer=partial(instantiate, made_of["trainer"], _convert_="all"),
            metric=plain_value(config.get("metric")) or {},
            how=key.way.how,
            ranks=key.way.how.get("stages", key.way.ranks),
            accelerator=config.accelerator,
            start_method=start_method("cpu" if config.accelerator == "cpu" else "cuda"),
            accumulate=config.trainer.get("accumulate_grad_batches") or 1,
            seed=key.seed,
            every=self._checks_every(key.way),
            last=self.pairing.steps if target is None else self.pairing.most_steps,
            most_steps=self.pairing.most_steps,
            target=target,
            folder=folder,
        )
        curve = fit_on_ranks(job, patience=self.patience)
        if target is None:
            self.facts = facts_of(job)
        return curve

    def _checks_every(self, way: Way) -> int:
        """Return the steps between two checks; whole rounds of ranks that train alone."""
        every: int = self.config.check_every or max(self.pairing.steps // _CHECKS, 1)
        method = read_method(way.how) if "method" in way.how else None
        if isinstance(method, LocalMethod):
            every = math.ceil(every / method.every) * method.every
        if every > self.pairing.steps:
            raise WayFailedError(f"it exchanges once in {every} steps: say steps={2 * every}")
        return every
