"""How many more steps do ways of training need than dense training, on a model of your own?

    python -m benchmarks.exchange.quality bf16 '{method:topk,density:0.05}' --steps 400
    python -m benchmarks.exchange.quality '{schedule:continuous,prediction:spectrain}' --devices 2
    python -m benchmarks.exchange.quality bf16 --overrides experiment=byte_lm data.batch_size=4

A way is a method of gradient exchange, or a pipeline whose weights miss updates. It is the name of
a method or of a file in conf/gradient_exchange, or options as Hydra reads them. `paired_runs` says
which runs are made, and `paired_fits` makes one on ranks of this machine.

`--overrides` are Hydra's, of the groups of `topt train`. Of these, `model`, `data`, `trainer`,
`metric` and `experiment` count. Classes of your own are found on PYTHONPATH. Configurations of your
own are found with `hydra.searchpath=[file:///their/folder]`.

The factors go to a table of the user's, which ``objective=time_to_loss`` reads. ``quality.json`` in
the folder of the runs has all curves. The same command with the same `--folder` makes the runs that
are missing.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from benchmarks.exchange.paired_fits import PairedFit, facts_of, fit_on_ranks
from benchmarks.exchange.paired_runs import (
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
from hydra_plugins.lightning_topt_searchpath import conf_dir
from lightning_topt.basics.argument_checks import check_choice, check_real, check_whole
from lightning_topt.basics.own_files import made
from lightning_topt.basics.units import format_duration, parse_seconds
from lightning_topt.cli.calibrate import start_method
from lightning_topt.cli.example_step import plain_value
from lightning_topt.communication.exchange_method import (
    ExchangeMethod,
    GradientMethod,
    LocalMethod,
    method_classes,
    read_method,
)
from lightning_topt.plan.plan_frontier import factor_words
from lightning_topt.plan.step_factors import missing_updates, own_file
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES
from lightning_topt.weight_prediction import make_prediction, prediction_to_value

_CHECKS = 20  # of a dense run, where --check-every does not say
_METHOD_GROUP = "gradient_exchange"


def main() -> None:
    """Measure the factors of ways of training; wrong values end with one sentence."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("ways", nargs="+", help="names, or options such as '{method:topk,density:0.05}'")
    option("--accelerator", choices=["cpu", "cuda"], default="cpu")
    option("--devices", type=int, default=2, help="ranks of this machine to start")
    option("--steps", type=int, default=400, help="of the dense runs, as planned to train")
    option("--longest", type=float, default=2.0, help="times as many steps as a run has at most")
    option("--seeds", type=int, default=2, help="runs of each way")
    option("--seed", type=int, default=0, help="the first of them")
    option("--rates", type=float, nargs="+", help="learning rates that every way is tried with")
    option("--rate-option", default="model.learning_rate", help="where the model takes its rate")
    option("--check-every", type=int, help="steps between two values; else a 20th of --steps")
    option("--timeout", default="30min", help="a run fails that gives no value for so long")
    option("--folder", type=Path, help="of the runs; those that are in it are not made again")
    option("--overrides", nargs="+", default=[], help="of Hydra: model, data, trainer, experiment")
    given = parser.parse_args()
    try:
        measure_quality(given)
    except (ValueError, HydraException) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def measure_quality(given: argparse.Namespace) -> None:
    """Measure the factors of all ways, print them and add them to the user's table.

    Raises:
        ValueError: options contradict one another, or the dense run does not train.
    """
    pairing = _pairing(given)
    ways = read_ways([_as_hydra_reads(word) for word in given.ways], ranks=given.devices)
    table = own_file()
    if table is None:
        raise ValueError(
            "this user has no home for a table of step factors: set XDG_CACHE_HOME to a folder"
        )
    folder = given.folder or Path("outputs", "quality", time.strftime("%Y-%m-%d_%H-%M-%S"))
    trials = Trials(given, pairing, folder)

    def keep(way: Way, factors: Sequence[float | None]) -> None:
        row = row_of(
            way,
            factors,
            optimizer=trials.facts["optimizer"],
            steps=given.steps,
            model=trials.facts["model"],
            source=str(table),
        )
        made(table.parent)
        keep_row(table, row)

    found = race(ways, trials, pairing=pairing, say=partial(print, flush=True), keep=keep)

    # what was found, for people
    print(f"\n{trials.facts['model']} under {trials.facts['optimizer']}, {given.steps} steps:")
    for way in ways:
        print(f"  {way.words}: {_words(way, found.factors, found.failed)}")
        if way in found.dropped:
            print(f"    dropped: {found.dropped[way]}")
    print(f"kept in {table}" if found.factors else "nothing was kept")
    print(f"folder of the runs: {folder}")


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


def _pairing(given: argparse.Namespace) -> Pairing:
    check_whole(given.steps, name="--steps", least=4)
    check_whole(given.seeds, name="--seeds")
    check_whole(given.seed, name="--seed", least=0)
    if check_real(given.longest, name="--longest", positive=True) < 1:
        raise ValueError(f"--longest {given.longest:g}: a run needs at least the dense run's steps")
    if given.check_every is not None:
        check_whole(given.check_every, name="--check-every", most=given.steps // 2)
    rates = [check_real(rate, name="--rates", positive=True) for rate in given.rates or ()]
    seeds = tuple(range(given.seed, given.seed + given.seeds))
    return Pairing(given.steps, given.longest, seeds, tuple(rates) or (None,))


# ---- ways of training


def _as_hydra_reads(word: str) -> Any:
    """Return a word as Hydra reads the value of an override."""
    return OverridesParser.create().parse_override(f"way={word}").value()


def read_ways(given: Sequence[object], *, ranks: int) -> list[Way]:
    """Return the ways of training that a command line names.

    Each is the name of a method, or of a configuration in the group `gradient_exchange`; or a
    mapping with `method` and its options, or with a continuous `schedule` and its `prediction`.

    Raises:
        ValueError: for what is no such way, for exact ones and for one that is there twice.
    """
    check_whole(ranks, name="--devices")
    if ranks < 2:
        raise ValueError("one rank exchanges nothing: say --devices 2 or more")
    ways: dict[str, Way] = {}
    for each in given:
        is_stale = isinstance(each, Mapping) and "schedule" in each
        way = _stale_way(each, ranks=ranks) if is_stale else _exchange_way(each, ranks=ranks)
        if way.words in ways:
            raise ValueError(f"{way.words} is there twice: leave one out")
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
            "compared with: leave it out"
        )
    options = _changed_options(method)
    words = method.words + "".join(f", {name} {value}" for name, value in options.items())
    return Way(words, method.name, options, ranks, how={"method": method.name, **options})


def _method(given: object) -> ExchangeMethod:
    """Return a method from the name of a method or of a configuration, or from its options."""
    if isinstance(given, str):
        group = {path.stem for path in (conf_dir() / _METHOD_GROUP).glob("*.yaml")}
        check_choice(given, name="way", allowed=sorted(group | {*method_classes()}))
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


# ---- runs


def _composed(given: argparse.Namespace) -> DictConfig:
    """Return the configuration of `topt train`, on the ranks that were asked for."""
    words = f"trainer.accelerator={given.accelerator}", f"trainer.devices={given.devices}"
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("train", overrides=[*given.overrides, *words])


class Trials:
    """Makes runs, and keeps their curves in a folder; those that it has are not made again.

    `facts` has the model and the optimizer, as soon as a run was made.
    """

    def __init__(self, given: argparse.Namespace, pairing: Pairing, folder: Path) -> None:
        self.given, self.pairing, self.folder = given, pairing, folder
        self.config = _composed(given)
        self.patience = parse_seconds(given.timeout, name="--timeout")
        parts = ("model", "data", "trainer", "metric")
        settings = {name: plain_value(self.config.get(name)) for name in parts}
        options = ("steps", "longest", "check_every", "rates", "rate_option")
        settings |= {name: getattr(given, name) for name in options}
        self.path, self.facts = folder / "quality.json", {}
        self.record: dict[str, Any] = {"settings": settings, "runs": {}}
        if self.path.is_file():
            record = json.loads(self.path.read_text())
            if record.get("settings") != json.loads(json.dumps(settings)):
                raise ValueError(f"{folder} has runs with other settings: choose another folder")
            self.record = record
            self.facts = record.get("facts", {})

    def __call__(self, key: RunKey, target: Target | None) -> Curve:
        """Return the curve of a run. Raises WayFailedError."""
        name = json.dumps([key.way.ranks, dict(key.way.how), key.seed, key.rate])
        runs: dict[str, Any] = self.record["runs"]
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
        config, accelerator = self.config.copy(), self.given.accelerator
        if key.rate is not None:
            OmegaConf.update(config, self.given.rate_option, key.rate, force_add=True)
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
            start_method=start_method(accelerator),
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
        every: int = self.given.check_every or max(self.pairing.steps // _CHECKS, 1)
        method = read_method(way.how) if "method" in way.how else None
        if isinstance(method, LocalMethod):
            every = math.ceil(every / method.every) * method.every
        if every > self.pairing.steps:
            raise WayFailedError(f"it exchanges once in {every} steps: say --steps {2 * every}")
        return every


if __name__ == "__main__":
    main()
