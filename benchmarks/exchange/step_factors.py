"""How many more steps than dense training does a way of training need, to the same loss?

    python -m benchmarks.exchange.step_factors            # runs that are not made yet
    python -m benchmarks.exchange.step_factors --report   # page and table of the runs so far

Ranks are simulated in one process (`adam_simulator`): each has its own samples and gradient. A
learning rate rises for 50 steps and then stays, so the loss of a run falls to any value sooner or
later. Every way and every rank count shares samples and first weights with the dense run of a
seed. Each has the better of its learning rates. A factor is the steps until the dense run's lowest
loss, divided by the steps of the dense run until then: one for each seed. None: not reached.

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

from benchmarks.common import RESULTS, ROOT, machine
from benchmarks.exchange import adam_simulator as methods
from benchmarks.exchange.adam_simulator import Model, Text, bits_per_byte, gradients

RUNS = RESULTS / "step_factors.json"
TABLE = ROOT / "lightning_topt" / "plan" / "step_factors.json"
SEEDS, SEQUENCES, STEPS, LONGEST, EVERY, WARMUP = 3, 8, 1000, 2, 50, 50
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


class Key(NamedTuple):
    model: str
    way: str
    ranks: int

    def __str__(self) -> str:
        return "|".join(map(str, self))


def all_keys() -> Iterator[Key]:
    """Every batch of runs: two ranks of all models first."""
    for ranks in RANKS:
        for model in MODELS:
            if ranks == 2:
                yield Key(model, DENSE, 1)
            for way in WAYS:
                if way != DENSE:
                    yield Key(model, way, ranks)


def train(key: Key) -> dict[str, Any]:
    """Train `SEEDS` runs at each learning rate; return rates, seeds and validation curves."""
    torch.set_num_threads(1)
    model, way = MODELS[key.model], WAYS[key.way]
    steps = STEPS if key.way == DENSE else STEPS * LONGEST
    pairs = [(rate, seed) for rate in way.rates for seed in range(SEEDS)]
    setting = methods.Setting(model, key.ranks, tuple(rate for rate, _ in pairs), steps)
    method = way.make(setting, torch.stack([model.initial(seed) for _, seed in pairs]))
    text = Text.read(model, validation=256)
    generators = [np.random.default_rng(seed) for _, seed in pairs]
    curve, start = [], time.perf_counter()
    going = torch.ones(setting.runs, dtype=torch.bool)
    for step in range(steps):
        tokens = text.batch(generators, ranks=key.ranks, size=SEQUENCES // key.ranks)
        gradient = gradients(model, method.replicas(), tokens).view(setting.runs, key.ranks, -1)
        going &= gradient.isfinite().flatten(1).all(1)
        gradient[~going] = 0.0  # one that diverged stops; the others go on
        method.step(gradient, step, share=min(1.0, (step + 1) / WARMUP))
        if (step + 1) % EVERY == 0:
            bits = bits_per_byte(model, method.consensus(), text)
            curve.append(
                [step + 1, [round(b, 5) if g else None for b, g in zip(bits, going, strict=True)]]
            )
    return {
        "rates": [rate for rate, _ in pairs],
        "seeds": [seed for _, seed in pairs],
        "curve": curve,
        "date": datetime.date.today().isoformat(),
        "seconds": round(time.perf_counter() - start, 1),
    }


# ---- factors


def steps_to(curve: Sequence[tuple[float, float]], loss: float) -> float | None:
    """Return the step at which a curve first reaches `loss`, on a line between two points."""
    before: tuple[float, float] | None = None
    for step, value in curve:
        if value <= loss:
            if before is None:
                return step
            return before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - value)
        before = step, value
    return None


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


def best_dense(run: Mapping[str, Any]) -> dict[int, list[tuple[float, float]]]:
    """Return the dense curves at the learning rate whose median lowest loss is lowest."""
    found = [curves_of(run, rate) for rate in dict.fromkeys(run["rates"])]
    return min(found, key=lambda of: statistics.median(min(v for _, v in c) for c in of.values()))


def factors(run: Mapping[str, Any], dense: Mapping[str, Any]) -> tuple[float, list[float | None]]:
    """Return the learning rate that is soonest at the dense losses, and a factor for each seed."""
    goals = {}
    for seed, curve in best_dense(dense).items():
        step, loss = min(curve, key=lambda point: point[1])
        goals[seed] = (loss, step)
    found = []
    for rate in dict.fromkeys(run["rates"]):
        reached = {s: steps_to(c, goals[s][0]) for s, c in curves_of(run, rate).items()}
        shares = [None if r is None else round(r / goals[s][1], 4) for s, r in reached.items()]
        found.append(
            (statistics.median(math.inf if f is None else f for f in shares), rate, shares)
        )
    _, rate, shares = min(found, key=lambda each: each[0])
    return rate, shares


def table_rows(runs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the table: seeds of all models that are not held out, together."""
    rows = []
    for ranks in RANKS:
        for name, way in WAYS.items():
            shares: list[float | None] = []
            models = []
            for model in MODELS:
                key = str(Key(model, name, ranks))
                if model != HELD_OUT and key in runs:
                    shares += factors(runs[key], runs[str(Key(model, DENSE, 1))])[1]
                    models.append(model)
            if models:
                rows.append(
                    {
                        "method": way.method,
                        "options": dict(way.options),
                        "optimizer": OPTIMIZER,
                        "ranks": ranks,
                        "staleness": 0,
                        "steps": STEPS,
                        "factors": shares,
                        "model": f"byte-level GPT, {' and '.join(models)}",
                        "source": f"benchmarks/results/{RUNS.name}",
                        "date": max(runs[str(Key(m, name, ranks))]["date"] for m in models),
                    }
                )
    return rows


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
            row = next((r for r in rows if is_way(r, ours) and r["ranks"] == 2), None)
            runs = [r for key, r in lab["trainings"].items() if key.split("|")[0] == name]
            if name != DENSE:  # the mean of two validations, as in `adam_lab`
                goal = dense["losses"][-1][1]
                ends = ((r, statistics.mean(loss for _, loss in r["losses"][-2:])) for r in runs)
                runs = [r for r, end in ends if end <= goal]
            if (row is None and name != DENSE) or not runs:
                continue
            factor = 1.0 if row is None else median_factor(row["factors"])
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
    lines = [
        "# Steps to the dense run's loss",
        "",
        "`python -m benchmarks.exchange.step_factors`",
        "",
        machine(),
        "",
        f"A byte-level GPT under AdamW, {SEQUENCES} sequences of 32 bytes per step on all ranks "
        f"together, {SEEDS} seeds. The dense run has {STEPS} steps, the others up to "
        f"{STEPS * LONGEST}. Factor: steps to the dense run's lowest loss by its steps until then; "
        "each at the better of two learning rates, which are constant after a warm-up.",
        "",
        "| model | method | ranks | learning rate | factor of each seed |",
        "|---|---|---|---|---|",
    ]
    for key in map(str, all_keys()):
        model, way, ranks = key.split("|")
        dense = runs.get(str(Key(model, DENSE, 1)))
        if way != DENSE and key in runs and dense is not None:
            rate, shares = factors(runs[key], dense)
            shown = ", ".join("not reached" if s is None else f"{s:.2f}" for s in shares)
            lines.append(f"| {model} | {way} | {ranks} | {rate:g} | {shown} |")
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
            runs[str(key)] = train(key)
            RUNS.write_text(json.dumps(runs) + "\n")
            print(f"{key}: {runs[str(key)]['seconds']} s", flush=True)
    rows = [*table_rows(runs), *pipeline_rows()]
    TABLE.write_text(json.dumps({"version": 1, "rows": rows}, indent=1) + "\n")
    write_page(runs, rows)


if __name__ == "__main__":
    main()
