"""How many more steps than dense training does a way of training need, to the same loss?

    python -m benchmarks.exchange.step_factors            # runs that are not made yet
    python -m benchmarks.exchange.step_factors --report   # page and table of the runs so far

Ranks are simulated in one process (`adam_simulator`): each has its own samples and gradient. So are
the stages of pipelines with stale weights (`ContinuousTraining`), which have dense gradients. A
learning rate rises for 50 steps and then stays, so the loss of a run falls to any value sooner or
later. Every way and every rank count shares samples and first weights with the dense run of a
seed. Each has the better of its learning rates. A factor is the steps until the dense run's lowest
loss, divided by the steps of the dense run until then: one for each seed. None: not reached. Runs
end when they have reached it. As the rate stays, the first part of a run is a shorter run, so that
the same runs give the factors of shorter trainings.

The table that plans are chosen by, lightning_topt/plan/step_factors.json, is made of the models
that are not held out. The page has that one too, and
compares with a larger model in the lab (`adam_lab`).
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from benchmarks.common import RESULTS, ROOT, machine
from benchmarks.exchange import adam_simulator as methods
from benchmarks.exchange.adam_simulator import Model, Text, bits_per_byte, gradients
from benchmarks.exchange.paired_runs import steps_to
from benchmarks.pipelines.simulators import ContinuousTraining, Step
from benchmarks.pipelines.weight_prediction import deal, gpt_pieces, make_optimizer, next_byte

RUNS = RESULTS / "step_factors.json"
TABLE = ROOT / "lightning_topt" / "plan" / "step_factors.json"
SEEDS, SEQUENCES, STEPS, LONGEST, EVERY, WARMUP = 3, 8, 1000, 2, 50, 50
LENGTHS = 250, 500, STEPS  # of dense runs whose loss the others have to reach
RANKS = 2, 4
PIPELINE_DATE = "2026-11-25"  # of time_to_quality.json
OPTIMIZER, DENSE = "AdamW", "dense"
MODELS = {"2 layers of 32": Model(), "1 layer of 48": Model(layers=1, hidden=48)}
HELD_OUT = "3 layers of 32"
MODELS[HELD_OUT] = Model(layers=3)


class Way(NamedTuple):
    """A way of training: the simulator's method, and the package's method with its options."""

    make: Callable[..., methods.Method]
    rates: tuple[float, ...]
    method: str
    options: Mapping[str, Any]


WAYS = {
    DENSE: Way(methods.Mean, (0.004, 0.008), "dense", {}),
    "bf16": Way(methods.Half, (0.004, 0.008), "bf16", {}),
    "top-k 16 % / ranks, 2 bits": Way(
        partial(methods.FewBitsTopK, density=0.16, bits=2),
        (0.004, 0.008),
        "topk",
        {"density": None, "bits": 2},
    ),
    "SparseLoCo, 5 steps, 12.5 %": Way(
        partial(methods.SparseLoCo, every=5, density=0.125, decay=0.8),
        (0.004, 0.008),
        "sparse_loco",
        {"every": 5, "density": 0.125, "residual_decay": 0.8},
    ),
    "DiLoCo, 50 steps": Way(
        partial(methods.LocalSteps, every=50, outer_rate=0.7, outer_momentum=0.9),
        (0.002, 0.004),
        "local_steps",
        {"every": 50, "outer_learning_rate": 0.7, "outer_momentum": 0.9},
    ),
}


class StaleWay(NamedTuple):
    """An asynchronous pipeline of whole batches: its stages, and its rule of weights.

    Two versions miss one update on any number of stages, so that two stages stand for all.
    """

    stages: int
    prediction: str | Mapping[str, Any]
    rates: tuple[float, ...]

    @property
    def missing(self) -> int:
        """Updates that the first stage misses."""
        return self.stages - 1


STALE_WAYS = {
    "spectrain, 2 stages": StaleWay(2, "spectrain", (0.002, 0.004)),
    "two_versions, error feedback, any stages": StaleWay(
        2, {"rule": "two_versions", "error_feedback": True}, (0.002, 0.004)
    ),
    "spectrain, 4 stages": StaleWay(4, "spectrain", (0.002, 0.004)),
}


class Key(NamedTuple):
    """Runs of a model by a name of `WAYS` on so many ranks, or of `STALE_WAYS` on one."""

    model: str
    way: str
    ranks: int

    def __str__(self) -> str:
        return "|".join(map(str, self))


def all_keys() -> Iterator[Key]:
    """Every batch of runs: a model's dense runs before its others, the model held out at last."""
    for ranks, model in itertools.product(RANKS, MODELS):
        if model != HELD_OUT:
            yield from _keys_of(model, ranks)
    for ranks in RANKS:
        yield from _keys_of(HELD_OUT, ranks)


def _keys_of(model: str, ranks: int) -> Iterator[Key]:
    if ranks == RANKS[0]:
        for way in (DENSE, *STALE_WAYS):
            yield Key(model, way, 1)
    for way in WAYS:
        if way != DENSE:
            yield Key(model, way, ranks)


def train(key: Key, dense: Mapping[str, Any] | None) -> dict[str, Any]:
    """Train `SEEDS` runs at each learning rate; return rates, seeds and validation curves.

    `dense` are the model's dense runs; None for those themselves. In a curve None stands for a loss
    that is not a number, and for what comes after a run has reached the dense loss.
    """
    torch.set_num_threads(1)
    start = time.perf_counter()
    way = STALE_WAYS[key.way] if key.way in STALE_WAYS else WAYS[key.way]
    pairs = [(rate, seed) for rate in way.rates for seed in range(SEEDS)]
    found: dict[str, Any] = {
        "rates": [rate for rate, _ in pairs],
        "seeds": [seed for _, seed in pairs],
        "curve": [],
    }
    if isinstance(way, StaleWay):
        assert dense is not None
        losses = goals(dense)
        curves = [
            stale_curve(way, MODELS[key.model], rate, seed, until=losses[seed][0])
            for rate, seed in pairs
        ]
        for place in range(max(map(len, curves))):
            of_step = [curve[place] if place < len(curve) else None for curve in curves]
            found["curve"].append([(place + 1) * EVERY, of_step])
    else:
        for point in curve_of_ranks(key, way, pairs):
            found["curve"].append(point)
            if dense is not None and None not in factors(found, dense)[1]:
                break
    return {
        **found,
        "date": datetime.date.today().isoformat(),
        "seconds": round(time.perf_counter() - start, 1),
    }


def curve_of_ranks(key: Key, way: Way, pairs: Sequence[tuple[float, int]]) -> Iterator[list[Any]]:
    """Train all pairs of a learning rate and a seed at once; give steps and validation losses."""
    model, steps = MODELS[key.model], STEPS if key.way == DENSE else STEPS * LONGEST
    setting = methods.Setting(model, key.ranks, tuple(rate for rate, _ in pairs), steps)
    method = way.make(setting, torch.stack([model.initial(seed) for _, seed in pairs]))
    text = Text.read(model, validation=256)
    generators = [np.random.default_rng(seed) for _, seed in pairs]
    going = torch.ones(setting.runs, dtype=torch.bool)
    for step in range(steps):
        tokens = text.batch(generators, ranks=key.ranks, size=SEQUENCES // key.ranks)
        gradient = gradients(model, method.replicas(), tokens).view(setting.runs, key.ranks, -1)
        going &= gradient.isfinite().flatten(1).all(1)
        gradient[~going] = 0.0  # one that diverged stops; the others go on
        method.step(gradient, step, share=min(1.0, (step + 1) / WARMUP))
        if (step + 1) % EVERY == 0:
            bits = bits_per_byte(model, method.consensus(), text)
            yield [step + 1, [round(b, 5) if g else None for b, g in zip(bits, going, strict=True)]]


def stale_curve(
    way: StaleWay,
    model: Model,
    rate: float,
    seed: int,
    *,
    until: float,
    steps: int = STEPS * LONGEST,
    every: int = EVERY,
) -> list[float]:
    """Train one run of a pipeline; return its validation losses, up to the first one of `until`.

    The stages are validated as they are, earlier ones without the updates in flight.
    """
    text, generator = Text.read(model, validation=256), [np.random.default_rng(seed)]
    stages = deal(gpt_pieces(model.module(seed)), way.stages)
    optimizers = [make_optimizer(OPTIMIZER, [*stage.parameters()], rate) for stage in stages]
    training = ContinuousTraining(
        stages,
        optimizers,
        rule=way.prediction,
        loss=next_byte,
        step=Step(lambda minibatch: min(1.0, (minibatch + 1) / WARMUP)),
    )
    drawn = [text.batch(generator, ranks=1, size=SEQUENCES)[0] for _ in range(steps)]
    whole, curve = nn.Sequential(*stages), []
    for iteration in training.iterations((each[:, :-1], each[:, 1:]) for each in drawn):
        if (iteration + 1) % every:
            continue
        with torch.no_grad():
            loss = next_byte(whole(text.validation[:, :-1]), text.validation[:, 1:])
        curve.append(round(float(loss) / math.log(2), 5))
        if not curve[-1] > until:  # reached, or not a number
            break
    return [value for value in curve if math.isfinite(value)]


# ---- factors


def curves_of(run: Mapping[str, Any], rate: float) -> dict[int, list[tuple[float, float]]]:
    """Return the curve of each seed at a learning rate; what diverged counts as no loss."""
    return {
        seed: [
            (step, math.inf if losses[place] is None else losses[place])
            for step, losses in run["curve"]
        ]
        for place, (own, seed) in enumerate(zip(run["rates"], run["seeds"], strict=True))
        if own == rate
    }


def goals(dense: Mapping[str, Any], steps: int = STEPS) -> dict[int, tuple[float, float]]:
    """Return the lowest loss of each seed's dense run within `steps`, and the step of it.

    They are those of the learning rate whose median lowest loss is lowest.
    """
    found = []
    for rate in dict.fromkeys(dense["rates"]):
        curves = curves_of(dense, rate)
        found.append(
            {seed: min((v, s) for s, v in curve if s <= steps) for seed, curve in curves.items()}
        )
    return min(found, key=lambda of: statistics.median(loss for loss, _ in of.values()))


def factors(
    run: Mapping[str, Any], dense: Mapping[str, Any], steps: int = STEPS
) -> tuple[float, list[float | None]]:
    """Return the learning rate that is soonest at the dense losses, and a factor for each seed.

    The dense runs have `steps`.
    """
    goal, found = goals(dense, steps), []
    for rate in dict.fromkeys(run["rates"]):
        reached = {s: steps_to(c, goal[s][0]) for s, c in curves_of(run, rate).items()}
        shares = [None if r is None else round(r / goal[s][1], 4) for s, r in reached.items()]
        found.append(
            (statistics.median(math.inf if f is None else f for f in shares), rate, shares)
        )
    _, rate, shares = min(found, key=lambda each: each[0])
    return rate, shares


def table_rows(runs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the table, of the models that are not held out."""
    stale = (
        (
            name,
            1,
            {
                "method": "dense",
                "options": {},
                "staleness": way.missing,
                "prediction": way.prediction,
            },
        )
        for name, way in STALE_WAYS.items()
    )
    compressed = (
        (name, ranks, {"method": way.method, "options": dict(way.options), "staleness": 0})
        for ranks in RANKS
        for name, way in WAYS.items()
        if name != DENSE
    )
    return [
        {
            **way,
            "optimizer": OPTIMIZER,
            "ranks": ranks,
            "steps": steps,
            "factors": factors(run, runs[str(Key(model, DENSE, 1))], steps)[1],
            "model": f"byte-level GPT, {model}",
            "source": f"benchmarks/results/{RUNS.name}",
            "date": run["date"],
        }
        for name, ranks, way in (*stale, *compressed)
        for model in MODELS
        if model != HELD_OUT and (run := runs.get(str(Key(model, name, ranks)))) is not None
        for steps in LENGTHS
    ]


def pipeline_rows() -> list[dict[str, Any]]:
    """Return rows of asynchronous pipelines, from time_to_quality.json.

    Its runs end with the dense ones, so the loss to reach is that of four fifths of their steps.
    """
    file = RESULTS / "time_to_quality.json"
    found = json.loads(file.read_text())
    shares: list[float | None] = []
    for dense, stale in zip(found["ddp"], found["continuous, spectrain"], strict=True):
        step, _, loss = dense[-2]
        reached = steps_to([(s, value) for s, _, value in stale], loss)
        shares.append(None if reached is None else round(reached / step, 4))
    return [
        {
            "method": "dense",
            "options": {},
            "optimizer": OPTIMIZER,
            "ranks": 1,
            "staleness": 3,
            "prediction": "spectrain",
            "steps": found["ddp"][0][-2][0],
            "factors": shares,
            "model": "byte-level LSTM on 4 stages",
            "source": f"benchmarks/results/{file.name}",
            "date": PIPELINE_DATE,
        }
    ]


# ---- how the table predicts a model that is not in it


class Held(NamedTuple):
    """A way in the lab, on a link: seconds to the loss as the table has it, and as measured."""

    link: str
    way: str
    predicted: float
    measured: float


# names of adam_lab.json beside those here; its SparseLoCo sends 10 %, the table's 12.5 %
LAB = {
    DENSE: DENSE,
    "bf16": "bf16",
    "top-k 8 %, 2 bits": "top-k 16 % / ranks, 2 bits",
    "SparseLoCo, 5 steps, 10 %, decay 0.8": "SparseLoCo, 5 steps, 12.5 %",
    "DiLoCo, 50 steps": "DiLoCo, 50 steps",
}


def lab_times(rows: Sequence[Mapping[str, Any]]) -> list[Held]:
    """Compare with adam_lab.json: a GPT of 25.5 M parameters on two ranks, which is not in `rows`.

    Seconds of a step are those of the lab for both, so what differs is the number of steps.
    """
    lab = json.loads((RESULTS / "adam_lab.json").read_text())
    dense = min(
        (run for key, run in lab["trainings"].items() if key.split("|")[0] == DENSE),
        key=lambda run: run["losses"][-1][1],
    )
    held = []
    for link in ("1gbit", "200mbit"):
        for name, ours in LAB.items():
            own = [r for r in rows if is_way(r, ours) and r["ranks"] == 2 and r["steps"] == STEPS]
            runs = [r for key, r in lab["trainings"].items() if key.split("|")[0] == name]
            if name != DENSE:  # the mean of two validations, as in `adam_lab`
                goal = dense["losses"][-1][1]
                ends = ((r, statistics.mean(loss for _, loss in r["losses"][-2:])) for r in runs)
                runs = [r for r, end in ends if end <= goal]
            if (not own and name != DENSE) or not runs:
                continue
            medians = [median_factor(row["factors"]) for row in own]
            factor = median_factor(medians) if medians else 1.0
            seconds = statistics.median(lab["seconds"][link][name])
            least = dense["steps"] if name == DENSE else min(run["steps"] for run in runs)
            held.append(Held(link, name, factor * dense["steps"] * seconds, least * seconds))
    return held


def is_way(row: Mapping[str, Any], name: str) -> bool:
    way = WAYS[name]
    return row["staleness"] == 0 and (row["method"], row["options"]) == (way.method, way.options)


def median_factor(shares: Sequence[float | None]) -> float:
    return statistics.median_high(math.inf if share is None else share for share in shares)


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Return how alike two orders are, from -1 to 1."""
    signs = [
        math.copysign(1, (a[0] - b[0]) * (a[1] - b[1])) for a, b in itertools.combinations(pairs, 2)
    ]
    return sum(signs) / len(signs)


# ---- the page and the table


def write_page(runs: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    keys = [*map(str, all_keys())]
    lines = [
        "# Steps to the dense run's loss",
        "",
        "`python -m benchmarks.exchange.step_factors`",
        "",
        machine(),
        "",
        f"A byte-level GPT under AdamW, {SEQUENCES} sequences of 32 bytes per step on all ranks "
        f"together, {SEEDS} seeds. The dense run has {STEPS} steps, the others end when they reach "
        f"its lowest loss, or after {STEPS * LONGEST}. Factor: steps to that loss by the dense "
        "run's steps until then; each at the better of two learning rates, which are constant "
        "after a warm-up. So the first steps of a run are a shorter run. Ways on one rank are "
        "asynchronous pipelines of whole batches. Two versions miss one update on any number of "
        f"stages; two stages stand for all. Of {len(keys)} batches of runs "
        f"{sum(key in runs for key in keys)} were made; the command "
        "makes those that are left.",
        "",
        f"Learning rates are those of {STEPS} steps. A table is chosen from by the nearest length.",
        "",
        "| model | method | ranks | learning rate | "
        + " | ".join(f"{steps} steps" for steps in reversed(LENGTHS))
        + " |",
        "|---" * (4 + len(LENGTHS)) + "|",
    ]
    for key in keys:
        model, way, ranks = key.split("|")
        dense = runs.get(str(Key(model, DENSE, 1)))
        if way != DENSE and key in runs and dense is not None:
            found = [factors(runs[key], dense, steps) for steps in reversed(LENGTHS)]
            cells = (
                ", ".join("not reached" if s is None else f"{s:.2f}" for s in shares)
                for _, shares in found
            )
            lines.append(f"| {model} | {way} | {ranks} | {found[0][0]:g} | {' | '.join(cells)} |")
    held = lab_times(rows)
    lines += [
        "",
        "## A model that is not in the table",
        "",
        "The GPT of 25.5 M parameters of [adam_lab.md](adam_lab.md) on two nodes. Predicted: the "
        "dense run's steps times the table's factor times the lab's seconds per step. Its "
        "SparseLoCo sends 10 %, that of the table 12.5 %.",
        "",
        "| link | method | predicted | measured |",
        "|---|---|---|---|",
        *(f"| {h.link} | {h.way} | {h.predicted:.0f} s | {h.measured:.0f} s |" for h in held),
        "",
    ]
    for link in dict.fromkeys(h.link for h in held):
        of = [h for h in held if h.link == link and math.isfinite(h.predicted)]
        chosen, best = min(of, key=lambda h: h.predicted), min(of, key=lambda h: h.measured)
        lines.append(
            f"- {link}: Kendall tau {kendall_tau([(h.predicted, h.measured) for h in of]):.2f} of "
            f"{len(of)} ways; chosen {chosen.way} ({chosen.measured:.0f} s), best {best.way} "
            f"({best.measured:.0f} s)"
        )
    RUNS.with_suffix(".md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true", help="train nothing")
    arguments = parser.parse_args()
    runs: dict[str, Any] = json.loads(RUNS.read_text()) if RUNS.exists() else {}
    for key in all_keys() if not arguments.report else ():
        if str(key) not in runs:
            runs[str(key)] = train(key, runs.get(str(Key(key.model, DENSE, 1))))
            RUNS.write_text(json.dumps(runs) + "\n")
            print(f"{key}: {runs[str(key)]['seconds']} s", flush=True)
    rows = [*table_rows(runs), *pipeline_rows()]
    TABLE.write_text(json.dumps({"version": 1, "rows": rows}, indent=1) + "\n")
    write_page(runs, rows)


if __name__ == "__main__":
    main()
