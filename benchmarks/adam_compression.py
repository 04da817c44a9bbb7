"""Which compression holds under AdamW? A byte-level GPT, simulated ranks, five seeds: loss against traffic.

    python -m benchmarks.adam_compression --tune       # learning rates of each method on one seed, about 20 minutes on 2 cores
    python -m benchmarks.adam_compression              # every run that has not been made; about 1 hour on 2 cores
    python -m benchmarks.adam_compression --steps 24000  # longer: runs with fewer steps are made again
    python -m benchmarks.adam_compression --report     # table and figure of the runs so far

All numbers of ranks share one global batch, so the dense runs are the same for all. Finished runs are kept in
benchmarks/results/adam_compression.json; the benchmark may be stopped and continued. A method counts as within the dense spread
when the median of its seeds is not worse than the worst dense seed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch

from benchmarks import adam_local_steps as local_steps
from benchmarks import adam_methods as methods
from benchmarks.adam_simulator import Model, Text, bits_per_byte, gradients, rate
from benchmarks.common import RESULTS, machine
from benchmarks.decoupled_momentum import DeMo

RUNS = RESULTS / "adam_compression.json"
SEEDS, SEQUENCES, STEPS, TUNING_STEPS, CURVE = 5, 8, 12000, 1500, 12
ADAM_RATES = (4e-3, 8e-3, 1.6e-2)
SIGN_RATES = (4.8e-3, 9.6e-3, 1.92e-2)

Make = Callable[..., methods.Method]
METHODS: dict[str, Make] = {
    "dense": methods.Mean,
    "DeMo, 2 bits": partial(DeMo, density=1 / 8, bits=2),
    "DeMo, 16 bits": partial(DeMo, density=1 / 16),
    "SparseLoCo, 15 steps, 3 %": partial(local_steps.SparseLoCo, every=15, density=0.03),
    "4 bits, 8 steps, outer momentum": partial(
        local_steps.FewBits, every=8, bits=4, outer_rate=0.7, outer_momentum=0.6
    ),
    "top-k 1 %": partial(methods.TopK, density=0.01),
    "DiLoCo, 50 steps": partial(local_steps.LocalSteps, every=50, outer_rate=0.7, outer_momentum=0.9),
    "sign": methods.Sign,
    "PowerSGD, rank 1": methods.PowerSGD,
    "bf16": methods.Half,
    "rotating 2 bits, 1/3": partial(methods.RotatingBits, parts=3, bits=2),
    "rotating mean, 1/25": partial(local_steps.RotatingMean, parts=25),
    "top-k 1 % in Adam's metric": partial(methods.MetricTopK, density=0.01),
}
# Others that were tried on one seed.
TRIED: dict[str, Make] = {
    "top-k 1 %, chunks": partial(methods.TopK, density=0.01, chunk=1024),
    "top-k 1 %, warm-up": partial(methods.TopK, density=0.01, warmup=0.1),
    "DiLoCo, 16 steps": partial(local_steps.LocalSteps, every=16, outer_rate=0.7, outer_momentum=0.9),
    "DeMo, 16 bits, Adam of signs": partial(DeMo, density=1 / 16, applied="adam"),
    "DeMo, 16 bits, Adam of sums": partial(DeMo, density=1 / 16, applied="sum"),
    "DeMo, 16 bits, no cosines": partial(DeMo, density=1 / 16, cosine=False),
    "DeMo, 2 bits, decay 0.99": partial(DeMo, density=1 / 8, bits=2, decay=0.99),
    "SparseLoCo, 4 steps, 12 %": partial(local_steps.SparseLoCo, every=4, density=0.125),
    "1 bit, 2 steps": partial(local_steps.FewBits, every=2, bits=1),
    "2 bits, 4 steps": partial(local_steps.FewBits, every=4, bits=2),
    "4 bits, 8 steps": partial(local_steps.FewBits, every=8, bits=4),
    "rotating 1 bit, 1/2": partial(methods.RotatingBits, parts=2, bits=1),
    "1 bit both ways": partial(methods.RotatingBits, parts=1, bits=1),
}


def train(name: str, *, ranks: int, rates: Sequence[float], seeds: Sequence[int], steps: int) -> dict[str, Any]:
    """Train one run for each of `rates` and `seeds`; curve of bits per byte, traffic as a share of dense.

    What diverged has NaN from there on.
    """
    torch.set_num_threads(1)
    model = Model()
    ranks = 1 if name == "dense" else ranks
    setting = methods.Setting(model, ranks, tuple(rates), steps)
    method = {**METHODS, **TRIED}[name](setting, torch.stack([model.initial(seed) for seed in seeds]))
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
            curve.append([step + 1, [round(value, 5) if goes else math.nan for value, goes in bits]])
    seconds = time.perf_counter() - start
    return {"rates": list(rates), "seeds": list(seeds), "traffic": method.traffic, "curve": curve, "seconds": seconds}


def load() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(RUNS.read_text()) if RUNS.exists() else {}
    return {"runs": {}, "tuning": {}, **found}


def best_rate(name: str) -> float:
    """The learning rate that ended lowest when it was tuned."""
    tuned = load()["tuning"].get(name)
    if tuned is None:
        raise SystemExit(f"{name} has no learning rate: run with --tune first")
    finals = [value if value == value else float("inf") for value in tuned["curve"][-1][1]]
    return float(tuned["rates"][finals.index(min(finals))])


def rates_to_try(name: str) -> Sequence[float]:
    """A grid of powers of two; sign updates need smaller ones."""
    return SIGN_RATES if name.startswith("DeMo") and "sums" not in name and "Adam" not in name else ADAM_RATES


def steps_of(run: dict[str, Any] | None) -> int:
    """Steps of a run that was made; 0 for none."""
    return 0 if run is None else int(run["curve"][-1][0])


def measure(jobs: list[tuple[str, str, dict[str, Any]]], *, processes: int) -> None:
    """Run (kind, key, arguments of `train`) in so many processes; each result is written as it comes."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(train, **arguments): (kind, key) for kind, key, arguments in jobs}
        for future in as_completed(futures):
            kind, key = futures[future]
            runs = load()
            runs[kind][key] = result = future.result()
            RUNS.write_text(json.dumps(runs) + "\n")
            print(
                f"{kind} {key}: {result['curve'][-1][1]}, {result['traffic']:.3%}, {result['seconds']:.0f} s",
                flush=True,
            )


def tuning_jobs(names: Sequence[str], *, steps: int) -> list[tuple[str, str, dict[str, Any]]]:
    known = load()["tuning"]
    return [
        ("tuning", name, {"name": name, "ranks": 4, "rates": rates, "seeds": [0] * len(rates), "steps": steps})
        for name in names
        if steps > steps_of(known.get(name)) and (rates := rates_to_try(name))
    ]


def grid_jobs(names: Sequence[str], *, ranks: Sequence[int], steps: int) -> list[tuple[str, str, dict[str, Any]]]:
    known, jobs = load()["runs"], []
    for count in ranks:
        for name in names:
            key = f"{name}|{1 if name == 'dense' else count}"
            if steps <= steps_of(known.get(key)) or any(key == job[1] for job in jobs):
                continue
            seeds, rates = list(range(SEEDS)), [best_rate(name)] * SEEDS
            jobs.append(("runs", key, {"name": name, "ranks": count, "rates": rates, "seeds": seeds, "steps": steps}))
    return jobs


def report() -> None:
    """Table and figure of all runs so far."""
    found = load()
    dense = found["runs"].get("dense|1")
    worst_dense = max(dense["curve"][-1][1]) if dense else float("nan")
    lines = ["# Compression under AdamW", "", machine(), "", *_introduction(found), ""]
    lines += [
        "| method | ranks | traffic | steps | learning rate | median | best | worst | within the dense spread |",
        "|---" * 9 + "|",
    ]
    for key, run in sorted(found["runs"].items(), key=lambda item: (_ranks(item[0]), item[1]["traffic"])):
        finals = run["curve"][-1][1]
        held = "-" if key == "dense|1" else "yes" if statistics.median(finals) <= worst_dense else "**no**"
        name, ranks = key.split("|")
        lines.append(
            f"| {name} | {'any' if key == 'dense|1' else ranks} | {run['traffic']:.2%} | {steps_of(run)} | "
            f"{run['rates'][0]:g} | {statistics.median(finals):.4f} | {min(finals):.4f} | {max(finals):.4f} | {held} |"
        )
    lines += ["", "![loss against traffic](adam_compression.png)"] if found["runs"] else []
    lines += ["", "## Learning rates, one seed", ""]
    lines += [
        "4 ranks; bits per byte at the end.",
        "",
        "| method | traffic | steps | learning rate: bits |",
        "|---|---|---|---|",
    ]
    for name, run in found["tuning"].items():
        each = ", ".join(f"{r:g}: {v:.3f}" for r, v in zip(run["rates"], run["curve"][-1][1], strict=True))
        lines.append(f"| {name} | {run['traffic']:.2%} | {steps_of(run)} | {each} |")
    (RESULTS / "adam_compression.md").write_text("\n".join([*lines, ""]))
    if found["runs"]:
        _figure(found["runs"])
    print("\n".join(lines))


def _introduction(found: dict[str, dict[str, Any]]) -> list[str]:
    model = Model()
    return [
        f"A byte-level GPT of {model.numel} parameters ({model.layers} layers, hidden {model.hidden}), AdamW, "
        f"{SEQUENCES} sequences of {model.seq_len} bytes in all per step, {SEEDS} seeds: bits per byte on "
        "validation text. Ranks are simulated (each has its own samples and its own gradient). Traffic: bytes sent by a rank, "
        "as a share of what float32 all-reduces in every step send. Each method at its best learning rate of those below.",
        *([] if found["runs"] else ["", "No such run was made yet; the learning rates alone were looked for."]),
    ]


def _ranks(key: str) -> int:
    return int(key.split("|")[1])


def _figure(runs: dict[str, Any]) -> None:
    counts = sorted({_ranks(key) for key in runs} - {1}) or [4]
    figure, axes = plt.subplots(1, len(counts), figsize=(6 * len(counts), 5), sharey=True, squeeze=False)
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
        axis.set(xscale="log", title=f"{count} ranks", xlabel="traffic / dense", ylabel="bits per byte")
    axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(RESULTS / "adam_compression.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = {**METHODS, **TRIED}
    parser.add_argument("--methods", nargs="+", choices=every, default=None)
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 2, 8])
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    if options.tune:
        measure(
            tuning_jobs(options.methods or list(every), steps=options.steps or TUNING_STEPS),
            processes=options.processes,
        )
    elif not options.report:
        jobs = grid_jobs(options.methods or list(METHODS), ranks=options.ranks, steps=options.steps or STEPS)
        measure(jobs, processes=options.processes)
    report()


if __name__ == "__main__":
    main()
