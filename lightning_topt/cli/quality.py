"""`topt calibrate quality=[...]`: how many more steps do ways of training need on this model?

    a way       a method of gradient exchange, or a pipeline whose weights miss updates
    a run       ranks of this machine that fit the user's module under it, and leave a loss curve
    the race    which runs are made, and the factors: plan/paired_runs.py

The factors go to a table of the user's, which ``objective=time_to_loss`` reads. ``quality.json``
in the run folder has all curves; the same command in the same folder makes those that are missing.
"""

from __future__ import annotations

import json
import math
import os
import random
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.multiprocessing as mp
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from hydra_plugins.lightning_topt_searchpath import conf_dir
from lightning_topt.basics.argument_checks import check_choice, check_real, check_whole
from lightning_topt.basics.own_files import made
from lightning_topt.basics.units import format_duration, parse_seconds
from lightning_topt.cli.example_step import plain_value
from lightning_topt.cli.local_processes import start_method
from lightning_topt.communication.exchange_method import ExchangeMethod, GradientMethod
from lightning_topt.communication.local_sgd import LocalMethod
from lightning_topt.communication.method_registry import method_classes, read_method
from lightning_topt.communication.rank_watch import is_of_collective
from lightning_topt.communication.started_ranks import started_rank
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
from lightning_topt.plan.step_factors import StepFactor, model_words, own_file
from lightning_topt.plugins.local_steps_strategy import compressed_strategy
from lightning_topt.plugins.pipeline_strategy import PipelineStrategy
from lightning_topt.prediction import make_prediction, prediction_to_value
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES

SCHEMA_VERSION = 1
_POLL_SECONDS = 0.2
_END_SECONDS = 30.0  # for ranks that are told to end
_PORTS = range(20000, 32000)  # the kernel gives none of these to connections
_CHECKS = 20  # of a dense run, where check_every does not say
_METHOD_GROUP = "gradient_exchange"


def run(config: DictConfig) -> None:
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
    table = own_file() if config.table is None else Path(config.table)
    if table is None:
        raise ValueError("this user has no home for a table of step factors: say table=<file>")
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
        if config.table is None:
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
    return f"{StepFactor(middle, min(values), max(values), 'runs').words} the steps"


# ---- what is asked


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
    value = prediction_to_value(make_prediction(given["prediction"]))
    rule = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    missed = (ranks - 1) * CONTINUOUS_SCHEDULES[given["schedule"]]
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
    return read_method(given)  # type: ignore[arg-type]


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


# ---- runs, on ranks of this machine


@dataclass(frozen=True)
class Job:
    """All that a rank must know of a run.

    `how` is that of its `Way`, empty for dense synchronous training. It ends after `last` steps.
    """

    model: Any
    data: Any
    trainer: Any
    metric: Any
    how: Mapping[str, Any]
    ranks: int
    accelerator: str
    seed: int
    every: int
    last: int
    most_steps: int
    target: Target | None
    folder: Path


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
        self.record = {"schema_version": SCHEMA_VERSION, "settings": settings, "runs": {}}
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
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():  # of a run that was killed
            path.unlink()
        values = {
            name: OmegaConf.to_container(config[name], resolve=True) for name in ("model", "data")
        }
        job = Job(
            **values,
            trainer=OmegaConf.to_container(config.trainer, resolve=True),
            metric=plain_value(config.get("metric")),
            how=key.way.how,
            ranks=key.way.how.get("stages", key.way.ranks),
            accelerator=config.accelerator,
            seed=key.seed,
            every=self._checks_every(key.way),
            last=self.pairing.steps if target is None else self.pairing.most_steps,
            most_steps=self.pairing.most_steps,
            target=target,
            folder=folder,
        )
        _wait(_started(job), job, patience=self.patience)
        if target is None:
            self.facts = json.loads((folder / "facts.json").read_text())
        return _curve_in(folder)

    def _checks_every(self, way: Way) -> int:
        """Return the steps between two checks; whole rounds of ranks that train alone."""
        every: int = self.config.check_every or max(self.pairing.steps // _CHECKS, 1)
        method = read_method(way.how) if "method" in way.how else None
        if isinstance(method, LocalMethod):
            every = math.ceil(every / method.every) * method.every
        if every > self.pairing.steps:
            raise WayFailedError(f"it exchanges once in {every} steps: say steps={2 * every}")
        return every


def _started(job: Job) -> Any:
    """Start the ranks of a run."""
    start: Any = mp.start_processes  # type: ignore[attr-defined]
    kind = "cpu" if job.accelerator == "cpu" else "cuda"
    return start(
        _run_rank, args=(job, _free_port()), nprocs=job.ranks, join=False,
        start_method=start_method(kind),
    )  # fmt: skip


def _wait(ranks: Any, job: Job, *, patience: float) -> None:
    """Wait for the ranks of a run to end.

    Raises:
        WayFailedError: one failed, or nothing came of the run for `patience` seconds.
    """
    curve, seen, since = job.folder / "curve.jsonl", -1, time.monotonic()
    try:
        while any(process.exitcode != 0 for process in ranks.processes):
            if any(process.exitcode for process in ranks.processes):
                _note_failure(job)
                return
            size = curve.stat().st_size if curve.exists() else 0
            if size != seen:
                seen, since = size, time.monotonic()
            if time.monotonic() - since > patience:
                raise WayFailedError(
                    f"nothing came of it for {format_duration(patience)}: say a longer timeout=, "
                    f"or see {job.folder / 'log.txt'}"
                )
            time.sleep(_POLL_SECONDS)
    finally:
        for process in ranks.processes:
            if process.is_alive():
                process.kill()
        for process in ranks.processes:
            process.join(_END_SECONDS)


def _note_failure(job: Job) -> None:
    """Add a point to the curve of a run that diverged. Raises WayFailedError for other failures."""
    # whoever waited for a rank that failed has failed later, and says less
    found = [json.loads(path.read_text()) for path in job.folder.glob("error_*.json")]
    found.sort(key=lambda error: (error["of_others"], error["time"]))
    if not found:
        raise WayFailedError(f"a rank was killed; see {job.folder / 'log.txt'}")
    if found[0]["type"] != FloatingPointError.__name__:
        why = f"{found[0]['type']}: {found[0]['message']}"
        raise WayFailedError(f"{why} (see {job.folder / 'log.txt'})")
    curve = _curve_in(job.folder)
    _append(job.folder, (curve[-1][0] if curve else 0) + job.every, math.inf)


def _free_port() -> int:
    """Return a port of this machine on which nobody listens."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise ValueError("100 ports of this machine are in use: end what listens there")


def _append(folder: Path, step: float, value: float) -> None:
    with (folder / "curve.jsonl").open("a") as file:
        file.write(json.dumps([step, value]) + "\n")


def _curve_in(folder: Path) -> list[tuple[float, float]]:
    path = folder / "curve.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(step, value) for step, value in map(json.loads, lines)]


# ---- one rank


def _run_rank(rank: int, job: Job, port: int) -> None:
    """Be a rank of a run. What it prints goes to a file."""
    log = os.open(job.folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.ranks),
        "LOCAL_WORLD_SIZE": str(job.ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "topt_quality",
    }
    _set_num_threads_if_needed(num_processes=job.ranks)
    try:
        _fit(job)
    except BaseException as error:
        cause = {
            "type": type(error).__name__,
            "message": " ".join(str(error).split()),
            "of_others": is_of_collective(error),
            "time": time.time(),
        }
        (job.folder / f"error_{rank}.json").write_text(json.dumps(cause))
        raise


def _fit(job: Job) -> None:
    """Fit the user's module as the run asks."""
    pl.seed_everything(job.seed, workers=True)
    datamodule: pl.LightningDataModule = instantiate(job.data)
    model: pl.LightningModule = instantiate(job.model)
    accumulate = job.trainer.get("accumulate_grad_batches") or 1
    trainer: pl.Trainer = instantiate(
        job.trainer,
        strategy=_strategy(job),
        devices=job.ranks,
        num_nodes=1,
        callbacks=[LossCurve(job)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        # the length that schedulers see is that of the longest run, for all runs
        max_steps=job.most_steps,
        max_epochs=-1,
        val_check_interval=job.every * accumulate,
        check_val_every_n_epoch=None,
        _convert_="all",
    )
    trainer.fit(model, datamodule=datamodule)


def _strategy(job: Job) -> Any:
    if "schedule" in job.how:
        return PipelineStrategy(**job.how)
    if job.ranks == 1:
        return "auto"
    return compressed_strategy(dict(job.how) or "dense")


class _Sum(NamedTuple):
    """Losses of the batches since a check."""

    value: float = 0.0
    batches: int = 0


class LossCurve(pl.Callback):
    """Keeps the curve of a run, and ends it when its target says so.

    The loss is the metric that validation logs, or the mean of the training loss since the last
    check where the module has no validation. It is the mean over the ranks.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.curve: list[tuple[float, float]] = []
        self._sum, self._step, self._model = _Sum(), 0, ""

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        parameters = sum(parameter.numel() for parameter in pl_module.parameters())
        self._model = model_words(type(pl_module).__name__, parameters)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"factors are measured of one optimizer, and {type(pl_module).__name__} has "
                f"{len(trainer.optimizers)}"
            )
        if "schedule" in self.job.how and not trainer.enable_validation:
            raise ValueError(
                "a pipeline without flush returns losses late, so its way is compared by what "
                "validation_step logs: give the module one"
            )
        if trainer.is_global_zero:
            facts = {"model": self._model, "optimizer": type(trainer.optimizers[0]).__name__}
            (self.job.folder / "facts.json").write_text(json.dumps(facts))

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.enable_validation:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not torch.is_tensor(loss):
            raise ValueError(
                "the training step returns no loss, and nothing is validated: let validation_step "
                "log a metric, and say metric.name=<its name>"
            )
        self._sum = _Sum(self._sum.value + float(loss), self._sum.batches + 1)
        step, before = trainer.global_step, self._step
        self._step = step
        if step != before and step % self.job.every == 0:
            value, self._sum = self._sum.value / self._sum.batches, _Sum()
            self._check(trainer, step, value)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        name = (self.job.metric or {}).get("name")
        if name not in trainer.callback_metrics:
            raise ValueError(
                f"validation logs no {name!r}: say metric.name=, one of "
                f"{', '.join(sorted(trainer.callback_metrics)) or 'what validation_step logs'}"
            )
        sign = -1.0 if self.job.metric.get("mode") == "max" else 1.0
        self._check(trainer, trainer.global_step, sign * float(trainer.callback_metrics[name]))

    def _check(self, trainer: pl.Trainer, step: int, value: float) -> None:
        """Add a point, which is equal on all ranks, and end the run where that is due."""
        if self.curve and step <= self.curve[-1][0]:
            return
        own = torch.tensor(value, device=trainer.strategy.root_device, dtype=torch.float32)
        mean = float(trainer.strategy.reduce(own, reduce_op="mean"))
        value = mean if math.isfinite(mean) else math.inf
        self.curve.append((step, value))
        if trainer.is_global_zero:
            _append(self.job.folder, step, value)
        target = self.job.target
        ends = not math.isfinite(value) if target is None else target.verdict(self.curve)
        if ends or step >= self.job.last:
            trainer.should_stop = True
