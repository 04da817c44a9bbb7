"""Predictions of measured iterations of Megatron GPTs.

    python -m benchmarks.prediction.vtrain PATH/a100_megatron_sample.csv [--other PATH/more.csv]

Predictions come from a data sheet, and from fitted constants. The rows are those of github
VIA-Research/vTrain (MIT), `data/ground_truth_single.csv`. Constants are fitted to 40 of them and
tested on all others, six times. `--other` rows are never fitted to; they are predicted with
constants that are fitted to all of the first file. Nothing here is a model of its own: rows are
priced with the code of the search (`run_prices`).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.common import RESULTS, ROOT, machine
from benchmarks.prediction.fitted_constants import CONSTANTS, FittedConstants
from benchmarks.prediction.gpu_cost_model import FITTED, SPLITS, judge
from benchmarks.prediction.run_prices import (
    RunPrices,
    cluster_for,
    completed,
    fit_runs,
    measured_runs,
)
from benchmarks.prediction.training_runs import TrainingRun
from lightning_topt.costs.cluster import Cluster

CLUSTER = ROOT / "conf" / "cluster" / "a100_64x8.yaml"
HEADER = (
    "| constants | rows | mean error | p90 | regret | Kendall's tau |\n|---|---|---|---|---|---|"
)
KINDS: dict[str, Callable[[TrainingRun], object]] = {
    "tensor parallel size": lambda row: row.tensor,
    "pipeline parallel size": lambda row: row.pipeline,
    "data parallel size": lambda row: row.data,
    "micro batch": lambda row: row.samples,
    "hidden size": lambda row: row.model.hidden,
    "GPUs": lambda row: row.gpus,
}


def predictor(cluster: Cluster, rows: Sequence[TrainingRun]) -> Callable[[TrainingRun], float]:
    """What the cluster's constants say of each of `rows`."""
    costs = RunPrices(cluster_for(rows, cluster))
    known = {id(row): costs.step_seconds(row) for row in rows}
    return lambda row: known[id(row)]


def cells(
    label: str, rows: Sequence[TrainingRun], cluster: Cluster
) -> tuple[str, dict[str, float]]:
    """A line of the table, and its numbers."""
    found = judge(rows, predictor(cluster, rows))  # type: ignore[arg-type]
    return line(label, len(rows), found), found


def line(label: str, rows: int, found: dict[str, float]) -> str:
    """A line of the table."""
    numbers = (
        f"{found['error']:.1%} | {found['p90']:.1%} | {found['regret']:.1%} | {found['tau']:.2f}"
    )
    return f"| {label} | {rows} | {numbers} |"


def splits(
    rows: Sequence[TrainingRun], cluster: Cluster
) -> tuple[list[str], list[FittedConstants]]:
    """A line for each split and their mean, and what was fitted."""
    lines, results, fits = [], [], []
    for seed in range(SPLITS):
        shuffled = random.Random(seed).sample(rows, len(rows))
        fits.append(fit_runs(cluster, shuffled[:FITTED]))
        text, found = cells(
            f"fitted to {FITTED} other rows, split {seed}", shuffled[FITTED:], fits[-1].cluster
        )
        lines.append(text)
        results.append(found)
        print(text, flush=True)
    mean = {key: statistics.mean(each[key] for each in results) for key in results[0]}
    lines.append(line("**mean of the splits**", len(rows) - FITTED, mean))
    print(lines[-1], flush=True)
    return lines, fits


def constants_table(cluster: Cluster, fits: Sequence[FittedConstants]) -> str:
    """The constants that were found."""
    lines = ["| constant | cluster file | fitted: median | least | most |", "|---|---|---|---|---|"]
    for constant in CONSTANTS:
        name = f"{constant.part}.{constant.entry}"
        if name in fits[0].factors:
            values = sorted(constant.of(each.cluster) for each in fits)
            shown = (constant.of(cluster), statistics.median(values), values[0], values[-1])
            lines.append(f"| {name} | {' | '.join(f'{value:.3g}' for value in shown)} |")
    return "\n".join(lines)


def by_kind(rows: Sequence[TrainingRun], cluster: Cluster) -> str:
    """Signed and absolute errors by what rows have in common."""
    predict = predictor(cluster, rows)
    lines = [
        "| rows with | number | mean of predicted / measured - 1 | mean error |",
        "|---|---|---|---|",
    ]
    for kind, value_of in KINDS.items():
        groups: dict[object, list[float]] = defaultdict(list)
        for row in rows:
            assert row.seconds is not None
            groups[value_of(row)].append(predict(row) / row.seconds - 1)
        for value, errors in sorted(groups.items(), key=str):
            size = statistics.mean(map(abs, errors))
            lines.append(
                f"| {kind} {value} | {len(errors)} | {statistics.mean(errors):+.1%} | {size:.1%} |"
            )
    return "\n".join(lines)


def _completed(rows: Sequence[TrainingRun], cluster: Cluster) -> Sequence[TrainingRun]:
    return completed(rows, {"": cluster_for(rows, cluster)})


def main() -> None:
    """Predict, test, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="CSV of measured iterations")
    parser.add_argument("--other", type=Path, help="CSV of iterations that nothing is fitted to")
    parser.add_argument("--cluster", type=Path, default=CLUSTER, help="a cluster file")
    options = parser.parse_args()
    cluster = Cluster.load(options.cluster)
    rows, other = (
        [] if path is None else [*_completed(measured_runs(path), cluster)]
        for path in (options.path, options.other)
    )
    start = time.perf_counter()
    sheet, _ = cells("the cluster file's, nothing fitted", rows, cluster)
    seconds = time.perf_counter() - start
    print(sheet, flush=True)
    lines, fits = splits(rows, cluster)
    whole = fit_runs(cluster, rows)
    lines.append(cells("fitted to all rows", rows, whole.cluster)[0])
    if other:
        both = fit_runs(cluster_for(other, cluster), [*rows, *other])
        for label, constants in (
            ("the file's", cluster),
            ("fitted to the first file", whole.cluster),
            ("fitted to both files, these rows among them", both.cluster),
        ):
            lines.append(cells(f"{label}, {options.other.name}", other, constants)[0])
            print(lines[-1], flush=True)
    (RESULTS / "vtrain_predictions.md").write_text(
        f"""# Predictions of Megatron runs that others measured

`python -m benchmarks.prediction.vtrain {options.path.name}`: {len(rows)} iterations of
Megatron-DeepSpeed GPTs on 2 to 8 GPUs of one node (VIA-Research/vTrain, a sample of
`ground_truth_single.csv`), priced by the model that the search uses, on
`conf/cluster/{options.cluster.name}`. Error: mean of |predicted / measured - 1|. Regret: how much
slower the plan of a job (model, GPUs, batch) that is predicted to be the quickest is than the
quickest, over jobs with several plans among the tested rows; tau over the same. The first
prediction of all rows took {seconds:.1f} s, captures included.

{machine()}

{HEADER}
{sheet}
{chr(10).join(lines)}

## Constants

{constants_table(cluster, fits)}

## Where the errors are

Rows that nothing was fitted to, from the cluster file:

{by_kind(rows, cluster)}

Fitted to all rows:

{by_kind(rows, whole.cluster)}
"""
    )


if __name__ == "__main__":
    main()
