"""Which compression holds under AdamW? Loss against traffic, with simulated ranks.

    M=benchmarks.exchange.adam_compression
    python -m $M --tune               # learning rates on one seed, about 40 minutes
    python -m $M                      # runs that are not made yet; 100 minutes
    python -m $M --steps 24000        # longer: shorter runs are made again
    python -m $M --lengths 3000 6000  # dense, and top-k in few bits; 5 minutes
    python -m $M --report             # table and figure of the runs so far

A byte-level GPT is trained with five seeds. All numbers of ranks share one global batch, so the
dense runs are the same for all. Finished runs are kept in benchmarks/results/adam_compression.json,
so the benchmark may be stopped and continued. A method counts as within the dense spread when the
median of its seeds is not worse than the worst dense seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch

from benchmarks.common import RESULTS, machine
from benchmarks.exchange import adam_simulator as methods
from benchmarks.exchange.adam_simulator import DeMo, Model, Text, bits_per_byte, gradients, rate

RUNS = RESULTS / "adam_compression.json"
SEEDS, SEQUENCES, STEPS, TRIAL_STEPS, CURVE = 5, 8, 12000, 1500, 12
TUNED_RANKS = 4
ADAM_RATES = (2e-3, 4e-3, 8e-3)
LOCAL_RATES = (1e-3, 2e-3, 4e-3)
SIGN_RATES = (2.4e-3, 4.8e-3, 9.6e-3)

Make = Callable[..., methods.Method]
Job = tuple[str, str, dict[str, Any]]  # kind of result, its key, arguments of `train`
METHODS: dict[str, Make] = {
    "dense": methods.Mean,
    "DeMo, 2 bits": partial(DeMo, density=1 / 8, bits=2),
    "DeMo, 16 bits": partial(DeMo, density=1 / 16),
    "SparseLoCo, 15 steps, 3 %": partial(methods.SparseLoCo, every=15, density=0.03),
    "4 bits, 8 steps, outer momentum": partial(
        methods.FewBits, every=8, bits=4, outer_rate=0.7, outer_momentum=0.6
    ),
    "top-k 1 %": partial(methods.TopK, density=0.01),
    "top-k 16 % / ranks, 2 bits": partial(methods.FewBitsTopK, density=0.16, bits=2),
    "DiLoCo, 50 steps": partial(methods.LocalSteps, every=50, outer_rate=0.7, outer_momentum=0.9),
    "sign": methods.Sign,
    "PowerSGD, rank 1": methods.PowerSGD,
    "bf16": methods.Half,
    "rotating 2 bits, 1/3": partial(methods.RotatingBits, parts=3, bits=2),
    "rotating mean, 1/25": partial(methods.RotatingMean, parts=25),
    "top-k 1 % in Adam's metric": partial(methods.MetricTopK, density=0.01),
}
# Others that were tried on one seed.
TRIED: dict[str, Make] = {
    "top-k 1 %, chunks": partial(methods.TopK, density=0.01, chunk=1024),
    "top-k 1 %, warm-up": partial(methods.TopK, density=0.01, warmup=0.1),
    "DiLoCo, 16 steps": partial(methods.LocalSteps, every=16, outer_rate=0.7, outer_momentum=0.9),
    "DeMo, 16 bits, Adam of signs": partial(DeMo, density=1 / 16, applied="adam"),
    "DeMo, 16 bits, Adam of sums": partial(DeMo, density=1 / 16, applied="sum"),
    "DeMo, 16 bits, no cosines": partial(DeMo, density=1 / 16, cosine=False),
    "DeMo, 2 bits, decay 0.99": partial(DeMo, density=1 / 8, bits=2, decay=0.99),
    "SparseLoCo, 4 steps, 12 %": partial(methods.SparseLoCo, every=4, density=0.125),
    "1 bit, 2 steps": partial(methods.FewBits, every=2, bits=1),
    "2 bits, 4 steps": partial(methods.FewBits, every=4, bits=2),
    "4 bits, 8 steps": partial(methods.FewBits, every=8, bits=4),
    "rotating 1 bit, 1/2": partial(methods.RotatingBits, parts=2, bits=1),
    "1 bit both ways": partial(methods.RotatingBits, parts=1, bits=1),
}


def train(
    name: str, *, ranks: int, rates: Sequence[float], seeds: Sequence[int], steps: int
) -> dict[str, Any]:
    """Train one run for each of `rates` and `seeds`; return curves and traffic.

    Curves are in bits per byte, traffic is a share of dense. A run that diverged has NaN from there
    on.
    """
    torch.set_num_threads(1)
    model = Model()
    ranks = 1 if name == "dense" else ranks
    setting = methods.Setting(model, ranks, tuple(rates), steps)
    method = {**METHODS, **TRIED}[name](
        setting, torch.stack([model.initial(seed) for seed in seeds])
    )
    text, generators = Text.read(model), [np.random.default_rng(seed) for seed in seeds]
    curve, start, going = [], time.perf_counter(), torch.ones(setting.runs, dtype=torch.bool)
    for step in range(steps):
        tokens = text.batch(generators, ranks=ranks, size=SEQUENCES // ranks)
        gradient = gradients(model, method.replicas(), tokens).view(setting.runs, ranks, -1)
        going &= gradient.isfinite().flatten(1).all(1)
        gradient[~going] = 0.0  # one that diverged stops; the others go on
        method.step(gradient, step, share=rate(step, steps))
        if (step + 1) % (steps // CURVE) == 0 or step + 1 == steps:
            bits = zip(bits_per_byte(model, method.consensus(), text), going.tolist(), strict=True)
            curve.append(
                [step + 1, [round(value, 5) if goes else math.nan for value, goes in bits]]
            )
    seconds = time.perf_counter() - start
    return {
        "rates": list(rates),
        "seeds": list(seeds),
        "traffic": method.traffic,
        "curve": curve,
        "seconds": seconds,
    }


def load() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(RUNS.read_text()) if RUNS.exists() else {}
    return {"runs": {}, "tuning": {}, "trials": {}, "lengths": {}, **found}


def is_local(name: str) -> bool:
    """Return whether ranks step on their own.

    The best learning rate then depends on their number.
    """
    make = METHODS[name]
    method: type[methods.Method] = make.func if isinstance(make, partial) else make  # type: ignore[assignment]
    return method.local


def key_of(name: str, ranks: int) -> str:
    return f"{name}|{1 if name == 'dense' else ranks}"


def tuned_rate(name: str, ranks: int) -> float:
    """Raises SystemExit for a method that was not tuned."""
    tuning, key = load()["tuning"], key_of(name, ranks if is_local(name) else TUNED_RANKS)
    found = best_rate(tuning, key)
    if key not in tuning or found is None:
        raise SystemExit(f"{name} has no learning rate: run with --tune first")
    return found


def rates_to_try(name: str) -> Sequence[float]:
    """A grid of powers of two; sign updates and local steps have their own."""
    if name.startswith("DeMo") and "sums" not in name and "Adam" not in name:
        return SIGN_RATES
    return LOCAL_RATES if name in METHODS and is_local(name) else ADAM_RATES


def not_made(
    run: dict[str, Any] | None, pairs: Iterable[tuple[float, int]], steps: int
) -> list[tuple[float, int]]:
    """The pairs of learning rate and seed without a run of at least so many steps."""
    made = (
        zip(run["rates"], run["seeds"], strict=True)
        if run is not None and run["curve"][-1][0] >= steps
        else ()
    )
    return sorted(set(pairs) - set(made))


def merged(run: dict[str, Any] | None, more: dict[str, Any]) -> dict[str, Any]:
    """Runs of equal length as one; shorter ones are left behind."""
    if run is None or run["curve"][-1][0] != more["curve"][-1][0]:
        return more
    curve = [[step, a + b] for (step, a), (_, b) in zip(run["curve"], more["curve"], strict=True)]
    return {
        **more,
        "curve": curve,
        **{key: run[key] + more[key] for key in ("rates", "seeds", "seconds")},
    }


def measure(jobs: list[Job], *, processes: int) -> None:
    """Run in so many processes; each result is written as it comes."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(train, **arguments): (kind, key) for kind, key, arguments in jobs}
        for future in as_completed(futures):
            kind, key = futures[future]
            runs = load()
            result = future.result()
            runs[kind][key] = merged(runs[kind].get(key), result) if kind == "tuning" else result
            RUNS.write_text(json.dumps(runs) + "\n")
            print(
                f"{kind} {key}: {result['curve'][-1][1]}, {result['traffic']:.3%}, "
                f"{result['seconds']:.0f} s",
                flush=True,
            )


def trial_jobs(names: Sequence[str]) -> list[Job]:
    known, jobs = load()["trials"], []
    for name in names:
        key, rates = key_of(name, TUNED_RANKS), rates_to_try(name)
        arguments = {
            "name": name,
            "ranks": TUNED_RANKS,
            "rates": rates,
            "seeds": [0] * len(rates),
            "steps": TRIAL_STEPS,
        }
        if key not in known:
            jobs.append(("trials", key, arguments))
    return jobs


def tuning_jobs(
    names: Sequence[str], *, ranks: Sequence[int], rates: Sequence[float] | None, seeds: int
) -> list[Job]:
    """At all of the steps: the best rate of a short trial is too high for a long training."""
    known, jobs = load()["tuning"], {}
    for name in names:
        for count in ranks if is_local(name) else [TUNED_RANKS]:
            key, pairs = (
                key_of(name, count),
                itertools.product(rates or rates_to_try(name), range(seeds)),
            )
            if missing := not_made(known.get(key), pairs, STEPS):
                arguments = {
                    "rates": [rate for rate, _ in missing],
                    "seeds": [seed for _, seed in missing],
                }
                jobs[key] = (
                    "tuning",
                    key,
                    {"name": name, "ranks": count, "steps": STEPS, **arguments},
                )
    return list(jobs.values())


def grid_jobs(names: Sequence[str], *, ranks: Sequence[int], steps: int) -> list[Job]:
    return _seed_jobs(
        "runs", [(key_of(name, count), name, count, steps) for count in ranks for name in names]
    )


def length_jobs(lengths: Sequence[int]) -> list[Job]:
    """At the learning rates of long trainings."""
    pairs = itertools.product(lengths, ("dense", "top-k 16 % / ranks, 2 bits"))
    wanted = [
        (f"{key_of(name, TUNED_RANKS)}|{steps}", name, TUNED_RANKS, steps) for steps, name in pairs
    ]
    return _seed_jobs("lengths", wanted)


def _seed_jobs(kind: str, wanted: Iterable[tuple[str, str, int, int]]) -> list[Job]:
    """Jobs with all seeds of each (key, method, ranks, steps) that is not made at the best rate."""
    known, jobs, seeds = load()[kind], {}, list(range(SEEDS))
    for key, name, ranks, steps in wanted:
        rate = tuned_rate(name, ranks)
        if not_made(known.get(key), [(rate, seed) for seed in seeds], steps):
            arguments = {
                "name": name,
                "ranks": ranks,
                "rates": [rate] * SEEDS,
                "seeds": seeds,
                "steps": steps,
            }
            jobs[key] = (kind, key, arguments)
    return list(jobs.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = {**METHODS, **TRIED}
    parser.add_argument("--methods", nargs="+", choices=every, default=None)
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 2, 8])
    parser.add_argument("--steps", type=int, default=STEPS, help="of the runs")
    parser.add_argument("--rates", nargs="+", type=float, default=None, help="others, with --tune")
    parser.add_argument("--seeds", type=int, default=1, help="of --tune")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--trial", action="store_true", help="short runs of one seed")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=None, help="steps of shorter trainings"
    )
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    if options.trial:
        measure(trial_jobs(options.methods or list(every)), processes=options.processes)
    elif options.tune:
        names = options.methods or list(METHODS)
        jobs = tuning_jobs(names, ranks=options.ranks, rates=options.rates, seeds=options.seeds)
        measure(jobs, processes=options.processes)
    elif options.lengths:
        measure(length_jobs(options.lengths), processes=options.processes)
    elif not options.report:
        jobs = grid_jobs(options.methods or list(METHODS), ranks=options.ranks, steps=options.steps)
        measure(jobs, processes=options.processes)
    report(load())


# ---- the page and the figure ---------------------------------------------------------------------


def report(found: dict[str, dict[str, Any]]) -> None:
    """Write tables and figure of all runs so far."""
    lines = ["# Compression under AdamW", "", machine(), "", _introduction(), ""]
    if found["runs"]:
        lines += [*_runs(found), "", "![loss against traffic](adam_compression.png)", ""]
        _figure(found["runs"])
    if found["lengths"]:
        lines += [
            "## Shorter trainings, at the learning rates of long ones",
            "",
            *_lengths(found["lengths"]),
            "",
        ]
    for kind, title in (("tuning", "Learning rates"), ("trials", "Short trials")):
        lines += [f"## {title}, one seed", "", *_rates(found[kind]), ""]
    (RESULTS / "adam_compression.md").write_text("\n".join(lines))
    print("\n".join(lines))


def _introduction() -> str:
    model = Model()
    return (
        f"A byte-level GPT of {model.numel} parameters ({model.layers} layers, hidden "
        f"{model.hidden}), AdamW, 8 sequences of {model.seq_len} bytes in all per step, 5 seeds: "
        "bits per byte on validation text. Ranks are simulated (each has its own samples and its "
        "own gradient). Traffic: bytes sent by a rank, as a share of what float32 all-reduces in "
        "every step send. Each method at its best learning rate of those below, after equally many "
        "steps; a star: at another, of short trials."
    )


def _runs(found: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "| method | ranks | traffic | steps | learning rate | median | best | worst | within the "
        "dense spread |",
        "|---" * 9 + "|",
    ]
    dense = found["runs"].get("dense|1")
    worst_dense = max(dense["curve"][-1][1]) if dense else float("nan")
    for key, run in sorted(
        found["runs"].items(), key=lambda item: (_ranks(item[0]), item[1]["traffic"])
    ):
        steps, finals = run["curve"][-1]
        name, rate = key.split("|")[0], run["rates"][0]
        held = (
            "-"
            if name == "dense"
            else "yes"
            if statistics.median(finals) <= worst_dense
            else "**no**"
        )
        star = "" if rate == best_rate(found["tuning"], key) else "*"
        lines.append(
            f"| {name} | {_shown_ranks(key)} | {run['traffic']:.2%} | {steps} | {rate:g}{star} | "
            f"{statistics.median(finals):.4f} | {min(finals):.4f} | {max(finals):.4f} | {held} |"
        )
    return lines


def _lengths(found: dict[str, Any]) -> list[str]:
    lines = ["| steps | method | ranks | median | best | worst |", "|---" * 6 + "|"]
    for key, run in sorted(found.items(), key=lambda item: item[1]["curve"][-1][0]):
        steps, finals = run["curve"][-1]
        shown = f"{statistics.median(finals):.4f} | {min(finals):.4f} | {max(finals):.4f}"
        lines.append(f"| {steps} | {key.split('|')[0]} | {_shown_ranks(key)} | {shown} |")
    return lines


def best_rate(tuning: dict[str, Any], key: str) -> float | None:
    """Return the learning rate that ended lowest, on average where there were several seeds.

    Trials with so many ranks count, or any where only one number of ranks was tried; None without
    trials.
    """
    tuned = tuning.get(key) or next(
        (run for other, run in tuning.items() if other.startswith(key.split("|")[0] + "|")), None
    )
    means = mean_by_rate(tuned) if tuned else {}
    return min(
        means,
        key=lambda rate: means[rate] if means[rate] == means[rate] else math.inf,
        default=None,
    )


def _rates(tuned: dict[str, Any]) -> list[str]:
    """A row for each method and number of ranks."""
    lines = ["| method | ranks | traffic | steps | learning rate: bits |", "|---|---|---|---|---|"]
    for key, run in tuned.items():
        steps = run["curve"][-1][0]
        seeds = {rate: run["rates"].count(rate) for rate in run["rates"]}
        each = ", ".join(
            f"{rate:g}: {mean:.3f}" + (f" (mean of {seeds[rate]})" if seeds[rate] > 1 else "")
            for rate, mean in mean_by_rate(run).items()
        )
        lines.append(
            f"| {key.split('|')[0]} | {_shown_ranks(key)} | {run['traffic']:.2%} | {steps} | "
            f"{each} |"
        )
    return lines


def mean_by_rate(run: dict[str, Any]) -> dict[float, float]:
    """Bits per byte at the end, by learning rate, the mean over its seeds."""
    finals = list(zip(run["rates"], run["curve"][-1][1], strict=True))
    return {
        rate: statistics.mean(bits for r, bits in finals if r == rate)
        for rate in sorted(set(run["rates"]))
    }


def _shown_ranks(key: str) -> str:
    return "any" if _ranks(key) == 1 else str(_ranks(key))


def _ranks(key: str) -> int:
    return int(key.split("|")[1])


def _figure(runs: dict[str, Any]) -> None:
    counts = sorted({_ranks(key) for key in runs} - {1}) or [4]
    figure, axes = plt.subplots(
        1, len(counts), figsize=(6 * len(counts), 5), sharey=True, squeeze=False
    )
    names = list(dict.fromkeys(key.split("|")[0] for key in runs if key != "dense|1"))
    for axis, count in zip(axes[0], counts, strict=True):
        if "dense|1" in runs:
            finals = runs["dense|1"]["curve"][-1][1]
            axis.axhspan(min(finals), max(finals), color="0.85", label="dense")
        for number, name in enumerate(names):
            run = runs.get(f"{name}|{count}")
            if run:
                finals = run["curve"][-1][1]
                middle = statistics.median(finals)
                error = [[middle - min(finals)], [max(finals) - middle]]
                style = {"color": f"C{number % 10}", "marker": "os^v"[number // 10], "label": name}
                axis.errorbar(run["traffic"], middle, yerr=error, linestyle="", **style)
        axis.axvline(0.03, color="0.6", linestyle=":")
        axis.set(
            xscale="log", title=f"{count} ranks", xlabel="traffic / dense", ylabel="bits per byte"
        )
    axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(RESULTS / "adam_compression.png", dpi=110)


if __name__ == "__main__":
    main()
