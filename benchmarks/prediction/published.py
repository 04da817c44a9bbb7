"""Predictions of training runs that others published.

    python -m benchmarks.prediction.published PATH/rows.csv [--more PATH/many_nodes.csv]

Each row is predicted twice: with the constants of the cluster files, and with constants that the
rows of all other sources say (leave one source out). These are three: the rates of matrix products
and of attention, and memory bandwidth. They start from round shares of the data sheet (`NEUTRAL`),
whatever the cluster files have. Intervals are those of the second kind, at 90 %.

`--more` has rows of another table, such as VIA-Research/vTrain's of many nodes, on 80 GB A100s.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.common import RESULTS, machine
from benchmarks.prediction.error_figures import domain_of, figure_of
from benchmarks.prediction.fitted_constants import Constant, fit_constants
from benchmarks.prediction.run_prices import RunPrices, clusters_of, completed
from benchmarks.prediction.training_runs import TrainingRun, read_run_file
from lightning_topt.costs.accuracy import Accuracy, Interval
from lightning_topt.costs.cluster import Cluster

# TFLOP/s of the data sheets in bfloat16 (dense), and bytes/s of memory
PEAKS = {"a100": (312e12, 2.04e12), "h100": (989e12, 3.35e12)}
# of the 40 GB A100, and of an H100 with HBM2e and 500 W
MEMORY = {"a100_40gb": 1.56e12, "h100_96gb_hbm2e_500w": 2.4e12}
POWER = {"h100_96gb_hbm2e_500w": 0.85}
# shares of a peak that programs get: products, attention (of the products' rate), memory
NEUTRAL = 0.65, 0.5, 0.8
CONSTANTS = (
    Constant("device", "flops", 0.3),
    Constant("device", "attention_flops", 0.5),
    Constant("device", "memory_bandwidth", 0.15),
)


@dataclass(frozen=True)
class Judged:
    """A run, what the files say of it, and what other sources say, with an interval."""

    run: TrainingRun
    source: str
    of_files: float
    peak: float
    of_others: float
    interval: Interval


def source_of(run: TrainingRun) -> str:
    """The table or paper that a row is from."""
    known = ("llm-foundry", "torchtitan", "nanotron", "vTrain")
    paper = re.search(r"arXiv (\d{4}\.\d{5})", run.source)
    return paper[1] if paper else next((k for k in known if k in run.source), run.source)


def neutral(cluster: Cluster, gpu: str) -> Cluster:
    """The cluster with round shares of the data sheet."""
    peak, memory = PEAKS[gpu[:4]]
    products, attention, bandwidth = NEUTRAL
    rate = products * peak * POWER.get(gpu, 1.0)
    device = replace(
        cluster.device,
        flops={**cluster.device.flops, "bfloat16": rate, "float16": rate},
        attention_flops=attention * rate,
        memory_bandwidth=bandwidth * MEMORY.get(gpu, memory),
    )
    return replace(cluster, device=device)


def factors_of(
    runs: Sequence[TrainingRun], clusters: Mapping[str, Cluster], kind: str
) -> dict[str, float]:
    """Factors of the neutral constants of a kind of GPU that runs on it say; 1 without any."""
    own = [run for run in runs if run.gpu.startswith(kind)]
    if len(own) < 2:
        return {f"{c.part}.{c.entry}": 1.0 for c in CONSTANTS}
    # one fit for all GPUs of a kind: rates of the others follow from those of the first
    first = next(iter({run.gpu for run in own}))

    def priced(changed: Cluster) -> list[float]:
        found = []
        for run in own:
            cluster = neutral(clusters[run.gpu], run.gpu)
            for constant in CONSTANTS:
                factor = constant.of(changed) / constant.of(neutral(clusters[first], first))
                cluster = constant.scaled(cluster, factor)
            found.append(RunPrices(cluster).step_seconds(run))
        return found

    measured = [run.seconds for run in own if run.seconds is not None]
    base = neutral(clusters[first], first)
    return dict(fit_constants(base, priced, measured, constants=CONSTANTS).factors)


def judge(runs: Sequence[TrainingRun], clusters: Mapping[str, Cluster]) -> list[Judged]:
    """Predict each run with the files' constants, and with those of all other sources."""
    files = {gpu: RunPrices(cluster) for gpu, cluster in clusters.items()}
    found: list[Judged] = []
    predicted: list[tuple[TrainingRun, str, float]] = []
    for source in dict.fromkeys(map(source_of, runs)):
        others = [run for run in runs if source_of(run) != source]
        factors = {kind: factors_of(others, clusters, kind) for kind in PEAKS}
        for run in (run for run in runs if source_of(run) == source):
            cluster = neutral(clusters[run.gpu], run.gpu)
            for constant in CONSTANTS:
                name = f"{constant.part}.{constant.entry}"
                cluster = constant.scaled(cluster, factors[run.gpu[:4]][name])
            predicted.append((run, source, RunPrices(cluster).step_seconds(run)))
    for run, source, seconds in predicted:
        # errors of all other sources, each predicted from the others
        rest = [each for each in predicted if each[1] != source]
        figure = figure_of(
            [each[2] for each in rest],
            [each[0].seconds or 1.0 for each in rest],
            groups=[each[1] for each in rest],
        )
        domain = domain_of([each[0] for each in rest])
        interval = Accuracy(figure, domain=domain).interval(seconds, run.sizes, run.techniques)
        cost = files[run.gpu].price(run)
        found.append(Judged(run, source, cost.step_seconds, cost.peak_bytes, seconds, interval))
    return found


def table(rows: Sequence[Judged], clusters: Mapping[str, Cluster]) -> str:
    """A line for each source, and for all."""
    lines = [
        "| source | rows | files: median, largest, mean signed | others: median, largest | in the "
        "interval | fit the memory |",
        "|---|---|---|---|---|---|",
    ]
    sources = [*dict.fromkeys(row.source for row in rows)]
    for name in [*sources, "all"]:
        own = [row for row in rows if name in (row.source, "all")]
        known = [row for row in own if row.run.seconds]
        of_files, of_others = (
            [getattr(row, which) / (row.run.seconds or 1.0) - 1 for row in known]
            for which in ("of_files", "of_others")
        )
        fits = sum(row.peak <= clusters[row.run.gpu].device.memory_bytes for row in own)
        inside = sum((row.run.seconds or 0.0) in row.interval for row in known)
        absolute = [*map(abs, of_files)], [*map(abs, of_others)]
        lines.append(
            f"| {name} | {len(own)} | {statistics.median(absolute[0]):.1%}, "
            f"{max(absolute[0]):.1%}, {statistics.mean(of_files):+.1%} | "
            f"{statistics.median(absolute[1]):.1%}, {max(absolute[1]):.1%} | "
            f"{inside} of {len(known)} | {fits} of {len(own)} |"
        )
    return "\n".join(lines)


def each_row(rows: Sequence[Judged]) -> str:
    """A line for each run."""
    lines = [
        "| source | run | measured s | files | others | interval | peak, GiB (measured) |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        run = row.run
        plan = f"tp {run.tensor} pp {run.pipeline} dp {run.data}"
        model = f"{run.model.kind} {run.model.parameters / 1e9:.1f}B"
        size = f"{run.gpus} x {run.gpu.split('_hbm')[0]}, {run.sequence} tokens"
        measured = "" if run.bytes is None else f" ({run.bytes / 2**30:.1f})"
        lines.append(
            f"| {row.source} | {model}, {size}, {plan} | {run.seconds:.3g} | {row.of_files:.3g} | "
            f"{row.of_others:.3g} | {row.interval.low:.3g} to {row.interval.high:.3g} | "
            f"{row.peak / 2**30:.1f}{measured} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Predict, judge, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="CSV of published runs")
    parser.add_argument("--more", type=Path, help="CSV of runs on 80 GB A100s")
    options = parser.parse_args()
    runs = [run for run in read_run_file(options.path).runs if run.seconds is not None]
    if options.more is not None:
        added = [
            replace(run, gpu="a100_80gb", source="vTrain")
            for run in read_run_file(options.more).runs
        ]
        runs += completed(added, clusters_of(added, None))
    clusters = clusters_of(runs, None)
    rows = judge(runs, clusters)
    print(table(rows, clusters))
    print(each_row(rows))
    more = f" --more {options.more.name}" if options.more else ""
    (RESULTS / "published_predictions.md").write_text(
        f"""# Predictions of training runs that others published

`python -m benchmarks.prediction.published {options.path.name}{more}`: {len(rows)} rows,
on A100 and H100. "Files": with the constants of `conf/cluster`, for which these rows were looked
at. "Others": with rates of products, attention and memory that the rows of all other sources say,
from round shares of the data sheet. Intervals (90 %) are of the latter, each from the errors of the
other sources.

{machine()}

{table(rows, clusters)}

## Each row

{each_row(rows)}
"""
    )


if __name__ == "__main__":
    main()
