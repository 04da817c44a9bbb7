"""How far predictions of bytes, and of differences of times, are from what was measured.

    python -m benchmarks.prediction.uncertainty ROWS.csv ONE_NODE.csv MANY_NODES.csv

The first file has published runs on A100 and H100, the others VIA-Research/vTrain's on A100. What
this says is in the files of clusters (`accuracy`) and in `costs.cluster` (`CPU_BYTES`):

    bytes, GPUs    published runs with a measured peak
    bytes, CPUs    tables of our own: predictions.md and memory_limits.md
    difference     pairs of runs of one job, predicted within 25 % of one another: the ratio of the
                   two predicted times against that of the measured ones

Rates of the cluster are the same for both runs of a pair. So vTrain's runs on one node are
predicted with constants that are fitted to the other half of their jobs. Those on many nodes and
the published ones are predicted with the constants of the cluster files.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.common import RESULTS, machine
from benchmarks.prediction.error_figures import domain_of, figure_of
from benchmarks.prediction.published import source_of
from benchmarks.prediction.run_prices import (
    RunPrice,
    RunPrices,
    cluster_named,
    clusters_of,
    completed,
    difference_of,
    fit_runs,
    measured_runs,
)
from benchmarks.prediction.training_runs import TrainingRun, read_run_file
from lightning_topt.costs.accuracy import ErrorFigure

Priced = tuple[TrainingRun, RunPrice]
Choice = Callable[[Sequence[Priced]], TrainingRun]
WITHIN = 0.0, 0.03, 0.06, 0.1, 0.15, 0.2, 0.27, 0.4
TABLES = "predictions.md", "memory_limits.md"
# predicted and measured seconds, then bytes, of a row of these tables
ROW = re.compile(r"\| [\d.]+ \| [\d.]+ \| [-+][\d.]+ % \| (\d+) \| (\d+) \| [-+][\d.]+ % \|")


def published(path: Path) -> list[Priced]:
    """Return published runs with measured times, priced with the files' constants."""
    runs = [run for run in read_run_file(path).runs if run.seconds is not None]
    prices = {gpu: RunPrices(cluster) for gpu, cluster in clusters_of(runs, None).items()}
    return [(replace(run, source=source_of(run)), prices[run.gpu].price(run)) for run in runs]


def many_nodes(path: Path) -> list[Priced]:
    """Return vTrain's runs on many nodes, priced with the file's constants."""
    runs = [replace(run, source="vTrain, many nodes") for run in measured_runs(path)]
    clusters = clusters_of(runs, cluster_named("a100_64x8"))
    prices = RunPrices(clusters[""])
    return [(run, prices.price(run)) for run in completed(runs, clusters)]


def one_node(path: Path) -> list[Priced]:
    """Return vTrain's runs on one node, priced with constants of the other half of the jobs."""
    cluster = cluster_named("a100_64x8")
    runs = [replace(run, source="vTrain, one node") for run in measured_runs(path)]
    runs = [*completed(runs, {"": cluster})]
    jobs = list(dict.fromkeys(run.job for run in runs))
    random.Random(0).shuffle(jobs)
    found = []
    for own, others in ((jobs[::2], jobs[1::2]), (jobs[1::2], jobs[::2])):
        fitted = fit_runs(cluster, [run for run in runs if run.job in {*others}])
        prices = RunPrices(fitted.cluster)
        found += [(run, prices.price(run)) for run in runs if run.job in {*own}]
    return found


def cpu_bytes() -> ErrorFigure:
    """Return the errors of peaks on CPU ranks, from tables of our own."""
    lines = [line for name in TABLES for line in (RESULTS / name).read_text().splitlines()]
    pairs = [(float(row[1]), float(row[2])) for line in lines if (row := ROW.search(line))]
    return ErrorFigure.of(*zip(*pairs, strict=True), above=True)


def cpu_kept(margin: float) -> str:
    """Return how many of these plans stay below a limit that they fit with this margin."""
    lines = [line for name in TABLES for line in (RESULTS / name).read_text().splitlines()]
    rows = [row for line in lines if (row := ROW.search(line))]
    kept = sum(float(row[2]) <= float(row[1]) * (1 + margin) for row in rows)
    return f"{kept} of {len(rows)}"


def gpu_bytes(runs: Sequence[Priced]) -> ErrorFigure:
    """Return the errors of peaks of published runs."""
    known = [(price.peak_bytes, run.bytes, run.source) for run, price in runs if run.bytes]
    predicted, measured, sources = zip(*known, strict=True)
    return figure_of(predicted, measured, groups=sources, above=True)


def gpu_domain(runs: Sequence[Priced]) -> str:
    """Return what the published runs with a measured peak were like."""
    known = [run for run, _ in runs if run.bytes]
    domain = domain_of(known)
    sizes = ", ".join(f"{name} {a:.4g} to {b:.4g}" for name, (a, b) in domain.sizes.items())
    return f"{sizes}; {', '.join(domain.techniques)}"


# ---- differences


def jobs_of(runs: Sequence[Priced]) -> list[list[Priced]]:
    """Return the runs of each job that has several."""
    found: dict[tuple[object, ...], list[Priced]] = {}
    for run, price in runs:
        found.setdefault((run.source, run.gpu, *run.job), []).append((run, price))
    return [several for several in found.values() if len(several) > 1]


def choices(within: float) -> dict[str, Choice]:
    """Return ways to choose among the runs that are predicted to be as fast as the fastest."""

    def close(several: Sequence[Priced]) -> list[Priced]:
        least = min(price.step_seconds for _, price in several)
        return [each for each in several if each[1].step_seconds <= least * (1 + within)]

    def mechanism(each: Priced) -> tuple[bool, bool]:
        return each[0].pipeline > 1, each[0].tensor > 1

    def waits(each: Priced) -> float:
        # what of communication a table's runs tell: exchange of gradients, waiting for stages
        price = each[1]
        return round(100 * (price.seconds["once"] + price.seconds["pipeline"]) / price.step_seconds)

    def by(key: Callable[[Priced], tuple[float, ...]]) -> Choice:
        return lambda several: min(close(several), key=key)[0]

    return {
        "waits least": by(lambda e: (waits(e), e[1].peak_bytes)),
        "simplest, then fastest": by(lambda e: (*mechanism(e), e[1].step_seconds)),
        "simplest, then waits least": by(lambda e: (*mechanism(e), waits(e), e[1].peak_bytes)),
    }


def regrets(runs: Sequence[Priced]) -> Iterator[str]:
    """Yield a line for each share: how much slower the chosen run was than the fastest."""
    jobs = jobs_of(runs)
    for within in WITHIN:
        cells = []
        for choose in choices(within).values():
            lost = [
                (choose(several).seconds or 0.0) / min(run.seconds or 0.0 for run, _ in several) - 1
                for several in jobs
            ]
            cells.append(f"{statistics.mean(lost):.1%}, {max(lost):.0%}")
        yield f"| {within:.0%} | {' | '.join(cells)} |"


def difference_lines(runs: Sequence[Priced]) -> Iterator[str]:
    """Yield a line for each source, and for all."""
    sources = [*dict.fromkeys(run.source for run, _ in runs)]
    for name in (*sources, "all"):
        own = [each for each in runs if name in (each[0].source, "all")]
        seconds = [price.step_seconds for _, price in own]
        figure = difference_of([run for run, _ in own], seconds)
        if figure is not None:
            yield f"| {name} | {figure.runs} | {figure.median:.1%} | {figure.p90:.1%} |"


def line(label: str, figure: ErrorFigure) -> str:
    """Return a line of the table of bytes."""
    assert figure.above is not None
    return (
        f"| {label} | {figure.runs} | {figure.median:.1%} | {figure.p90:.1%} | {figure.above:.1%} |"
    )


def main() -> None:
    """Compare, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("rows", "one_node", "many_nodes"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    rows = published(given.rows)
    runs = [*rows, *one_node(given.one_node), *many_nodes(given.many_nodes)]
    head = "| share that counts as equal | " + " | ".join(choices(0.0)) + " |"
    text = f"""# How far bytes and differences of times are off

`python -m benchmarks.prediction.uncertainty {given.rows.name} {given.one_node.name} \\
{given.many_nodes.name}`

{machine()}

## Bytes

Median and 90th percentile of the errors, as factors less 1; "above": nine of ten measured peaks
were above the predicted one by at most this. Of so few runs as on GPUs these are the largest.

| runs | number | median | p90 | above |
|---|---|---|---|---|
{line("H100, published", gpu_bytes(rows))}
{line("CPU ranks, our own", cpu_bytes())}

Published runs were of {gpu_domain(rows)}.

With a margin of 5 %, {cpu_kept(0.05)} of the plans on CPU ranks stay below a limit that they fit.

## Differences

Pairs of runs for one job, predicted within 25 % of one another: by how much the ratio of the two
predicted times is off. Jobs count alike.

| source | pairs | median | p90 |
|---|---|---|---|
{chr(10).join(difference_lines(runs))}

The tail is long: nine of ten pairs would make plans equal that are not. So plans count as equally
fast up to the median. Chosen among these runs, of {len(jobs_of(runs))} jobs with several, the plan
was slower than the fastest by (mean, largest):

{head}
|{"---|" * (1 + len(choices(0.0)))}
{chr(10).join(regrets(runs))}
"""
    print(text)
    (RESULTS / "uncertainty.md").write_text(text)


if __name__ == "__main__":
    main()
