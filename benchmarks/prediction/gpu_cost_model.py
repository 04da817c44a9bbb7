"""Which terms does a cost model of GPUs need? Fitted to 40 iterations, tested on all others.

    python -m benchmarks.prediction.gpu_cost_model PATH/a100_megatron_sample.csv

The rows are iterations of Megatron-DeepSpeed on 2 to 8 GPUs of one node (github
VIA-Research/vTrain, MIT, `data/ground_truth_single.csv`; the columns are those of that file). Every
set of terms is fitted to the same rows by least squares of logarithms (scipy, which scikit-learn
brings). Symbols: b micro batch, s sequence, h hidden, a heads, l layers of a stage, t tensor, d
data, p pipeline parallel size, m micro batches.

    a layer's forward pass, per rank:
      flops  (24 b s h^2 + 4 b s^2 h) / t             Narayanan et al., SC 2021, section 3
      bytes  2 (10 + 24 / t) s b h + 10 a s^2 b / t   Korthikanti et al., 2022, section 4.1
      two all-reduces of 2 b s h bytes over t ranks   Shoeybi et al., 2019, section 3
    backward                  twice the flops and bytes, the same all-reduces
    head, on the last stage   2 b s h v flops, three times
    iteration                 (m - 1) slowest stage + all stages once
                              + all-reduce of gradients over d + update
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import kendalltau

from benchmarks.common import RESULTS, machine
from benchmarks.prediction.training_runs import TrainingRun, read_run_file
from lightning_topt.costs.cluster import Link
from lightning_topt.costs.communication import ring_seconds
from lightning_topt.costs.compute import SHARPNESS, host_bound_seconds

VOCABULARY, FITTED, SPLITS = 51_200, 40, 6
# how far, as a factor, a constant that the rows say nothing about strays from its usual value
SURE = 2.0


# Constants with their usual values on an A100 (see conf/cluster/a100_8x8.yaml); `launch` is of one
# layer and direction.
USUAL = {
    "flops": 150e12,
    "bandwidth": 100e9,
    "memory": 1e12,
    "launch": 1e-3,
    "half": 1e10,  # flops of a layer's forward pass at which matrix products run at half their rate
    "sharpness": SHARPNESS,
    "launch8": 1e-3,
    "micro": 1e-3,
    "step": 5e-3,
    "tensor_bandwidth": 100e9,
    "data_bandwidth": 100e9,
    "update": 1e12,
    "backward": 2.0,
    "tensor_latency": 1e-5,
}
ADDED = {"sharpness": 1.0}  # host and device one after the other
TERMS: dict[str, tuple[str, ...]] = {
    "FLOP/s, one bandwidth": ("flops", "bandwidth"),
    "+ kernels bound by memory": ("memory",),
    "+ the host's launch time": ("launch",),
    "+ efficiency of matrix products by size": ("half",),
    "+ sharpness of the maximum, launch at t = 8, per micro batch and per step": (
        "sharpness",
        "launch8",
        "micro",
        "step",
    ),
    "+ links of tensor and data axes, update, backward": (
        "tensor_bandwidth",
        "data_bandwidth",
        "update",
        "backward",
        "tensor_latency",
    ),
}
Constants = dict[str, float]


def direction_seconds(
    row: TrainingRun, c: Constants, *, layers: float, heads: int, backward: bool
) -> float:
    """Seconds of one micro batch in a stage of so many layers and `heads` (0 or 1)."""
    b, s, h, t = row.samples, row.sequence, row.model.hidden, row.tensor
    times = c.get("backward", 2.0) if backward else 1.0
    flops = (24 * b * s * h**2 + 4 * b * s**2 * h) / t
    rate = c["flops"] / (1 + c["half"] / flops) if "half" in c else c["flops"]
    device = layers * flops / rate + heads * 2 * b * s * h * VOCABULARY / t / rate
    if "memory" in c:
        device += (
            layers
            * (2 * (10 + 24 / t) * s * b * h + 10 * row.model.heads * s**2 * b / t)
            / c["memory"]
        )
    device *= times
    link = Link(c.get("tensor_latency", 0.0), c.get("tensor_bandwidth", c["bandwidth"]))
    device += (
        2 * layers * ring_seconds("all_reduce", size=2 * b * s * h, ranks=t, link=link)
        if t > 1
        else 0.0
    )
    if "launch" not in c:
        return device
    launch = c.get("launch8", c["launch"]) if t == 8 else c["launch"]
    return host_bound_seconds(
        device, host_seconds=layers * launch, sharpness=c.get("sharpness", SHARPNESS)
    )


def iteration_seconds(row: TrainingRun, c: Constants) -> float:
    """Seconds of an iteration of `row` as the constants say."""
    layers, count = row.model.layers / row.pipeline, row.batch // (row.data * row.samples)

    def stage(heads: int) -> float:
        both = (
            direction_seconds(row, c, layers=layers, heads=heads, backward=backward)
            for backward in (False, True)
        )
        return sum(both) + c.get("micro", 0.0)

    slowest = stage(1)
    passes = (count - 1) * slowest + slowest + (row.pipeline - 1) * stage(0)
    message = 2 * row.samples * row.sequence * row.model.hidden
    sent = 2 * (row.pipeline - 1) * message / c["bandwidth"]
    parameters = (12 * row.model.hidden**2 * layers + row.model.hidden * VOCABULARY) / row.tensor
    link = Link(0.0, c.get("data_bandwidth", c["bandwidth"]))
    exchange = (
        ring_seconds("all_reduce", size=2 * parameters, ranks=row.data, link=link)
        if row.data > 1
        else 0.0
    )
    update = 28 * parameters / c["update"] if "update" in c else 0.0
    return passes + sent + exchange + update + c.get("step", 0.0)


def fit(
    rows: Sequence[TrainingRun], names: Sequence[str], *, given: Constants | None = None
) -> Constants:
    """Return the constants that fit `rows` best, beside those `given`.

    A constant far from its usual value costs a little.
    """
    given = given or {}
    usual = np.log([USUAL[name] for name in names])

    def residuals(x: np.ndarray) -> np.ndarray:
        constants = given | dict(zip(names, np.exp(usual + x), strict=True))
        errors = [math.log(iteration_seconds(row, constants) / row.seconds) for row in rows]
        return np.array([*errors, *(0.05 * x / math.log(SURE))])

    starts = [np.zeros(len(names)), *np.random.default_rng(0).normal(0, 1, (3, len(names)))]
    found = min(
        (least_squares(residuals, start, loss="soft_l1", f_scale=0.1) for start in starts),
        key=lambda f: f.cost,
    )
    return given | dict(zip(names, np.exp(usual + found.x), strict=True))


def judge(rows: Sequence[TrainingRun], predict: Callable[[TrainingRun], float]) -> dict[str, float]:
    """Errors over `rows`; regret and Kendall's tau over the plans of each job that has several."""
    errors = [abs(predict(row) / row.seconds - 1) for row in rows]
    jobs = defaultdict(list)
    for row in rows:
        jobs[row.job].append(row)
    several = [plans for plans in jobs.values() if len(plans) > 1]
    regrets = [
        min(plans, key=predict).seconds / min(row.seconds for row in plans) - 1 for plans in several
    ]
    taus = [
        kendalltau([predict(row) for row in plans], [row.seconds for row in plans]).statistic
        for plans in several
    ]
    return {
        "error": statistics.mean(errors),
        "p90": float(np.quantile(errors, 0.9)),
        "regret": statistics.mean(regrets),
        "tau": statistics.mean(float(tau) for tau in taus if not math.isnan(tau)),
    }


def table_row(
    rows: Sequence[TrainingRun], term: str, names: Sequence[str], *, given: Constants | None = None
) -> tuple[str, list[Constants]]:
    """A line of the table, the mean over all splits, and the constants of each."""
    fits, results = [], []
    for seed in range(SPLITS):
        shuffled = random.Random(seed).sample(rows, len(rows))
        fits.append(fit(shuffled[:FITTED], names, given=given))
        results.append(judge(shuffled[FITTED:], partial(iteration_seconds, c=fits[-1])))
    mean = {key: statistics.mean(result[key] for result in results) for key in results[0]}
    cells = f"{mean['error']:.1%} | {mean['p90']:.1%} | {mean['regret']:.1%} | {mean['tau']:.2f}"
    line = f"| {term} | {len(names)} | {cells} |"
    print(line, flush=True)
    return line, fits


def tables(rows: Sequence[TrainingRun]) -> str:
    """The terms one after another, and the constants of the host."""
    lines = [
        "| terms | constants | mean error | p90 | regret | Kendall's tau |",
        "|---|---|---|---|---|---|",
    ]
    names: tuple[str, ...] = ()
    found: dict[str, list[float]] = {}
    for term, more in TERMS.items():
        names += more
        line, fits = table_row(rows, term, names)
        lines.append(line)
        found |= {name: sorted(constants[name] for constants in fits) for name in more}
        if more == ("launch",):
            lines.append(
                table_row(rows, "(the same, host and device added: q = 1)", names, given=ADDED)[0]
            )
    launch, sharpness = found["launch"], found["sharpness"]
    host = (
        "The host's time for one layer and direction with four constants: "
        f"{1e3 * statistics.median(launch):.2f} ms\n"
        f"(median; {1e3 * launch[0]:.2f} to {1e3 * launch[-1]:.2f}). The exponent q of the maximum "
        "with nine constants: "
        f"{statistics.median(sharpness):.1f} ({sharpness[0]:.1f} to {sharpness[-1]:.1f});\nwith "
        f"fewer it is {SHARPNESS}."
    )
    return "\n".join([*lines, "", host])


def main() -> None:
    """Fit, test, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="CSV of measured iterations")
    rows = read_run_file(parser.parse_args().path, need_times=True).runs
    text = f"""# Terms of a cost model of GPUs

`python -m benchmarks.prediction.gpu_cost_model a100_megatron_sample.csv`: {len(rows)} iterations of
Megatron-DeepSpeed GPTs on 2 to 8 GPUs of one node (VIA-Research/vTrain, a sample of
`ground_truth_single.csv`), fitted to {FITTED}, tested on the others, mean of {SPLITS} splits.
Error: mean of |predicted / measured - 1|. Regret: how much slower the plan of a job that is
predicted to be the quickest is than the quickest, over jobs with several plans among the tested
rows; tau over the same.

The fit ran on

{machine()}

{tables(rows)}
"""
    (RESULTS / "gpu_cost_model.md").write_text(text)


if __name__ == "__main__":
    main()
