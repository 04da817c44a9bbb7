"""Ten benchmarks and the start of Python, in two checkouts that alternate.

    python -m benchmarks.before_after ../before [--rounds 5] [--only start,import]

About 40 minutes on two quiet cores. Each checkout runs its own short form of a benchmark, which
needs root for the slow link of `network`. Use clean clones of both: benchmarks write their pages.
The table has the median of each figure, and the median and range of the ratios of neighbours. All
figures are seconds of work, so a ratio below 1 is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import RESULTS, ROOT, machine

Figures = dict[str, float]  # name of a figure: seconds, or what is proportional to them
OUT = "{out}"  # in a command: a file for its result


@dataclass(frozen=True)
class Case:
    """A benchmark: its command in both checkouts, and how its output becomes figures.

    Args:
        command: arguments of Python.
        read: figures from the file `OUT` where there is one, else from what was printed; None:
            the processor time of the process counts.
        warm_up: run it once in each checkout before it counts, for what is kept between runs.
        rounds: at most so many, of one that has rounds of its own or takes minutes.
    """

    command: tuple[str, ...]
    read: Callable[[str], Figures] | None
    warm_up: bool = False
    rounds: int = 100


def rows(
    label: int, columns: dict[str, int], *, keep: str = "", rate: bool = False
) -> Callable[[str], Figures]:
    """Read printed tables: a row is named by its first cells, figures are in later ones.

    Of rows with one name the first counts.

    Args:
        label: how many cells name the row.
        columns: what a figure is, and its cell, of which the first number counts.
        keep: only rows whose name matches.
        rate: cells are work per second; figures are the inverse.
    """

    def read(text: str) -> Figures:
        found: Figures = {}
        for line in text.splitlines():
            cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
            name = " ".join(cells[:label])
            if not line.startswith("|") or not re.search(keep, name):
                continue
            for what, column in columns.items():
                number = re.match(r"-?[\d.]+", cells[column]) if column < len(cells) else None
                if number:
                    value = float(number[0])
                    found.setdefault(f"{name}: {what}", 1 / value if rate else value)
        return found

    return read


def total(text: str) -> Figures:
    """The sum of the last column of all printed rows."""
    last = re.findall(r"\| ([\d.e-]+) \|$", text, flags=re.MULTILINE)
    return {"CPU seconds of all chains": sum(map(float, last))}


def record(text: str) -> Figures:
    """Read the record of one start, a JSON object with `seconds`."""
    return {"fit to the end of the first step": float(json.loads(text)["seconds"])}


def step(text: str) -> Figures:
    """Read what `run_gpt` measured."""
    return {"step": float(json.loads(text)["step_seconds"])}


GPT = (
    "import json; from benchmarks.common import run_gpt; print(json.dumps(run_gpt(strategy='topt', "
    "plan='ddp', layers=4, hidden=256, heads=8, seq_len=128, batch_size=8, steps=40, warmup=10)))"
)
START = ("--model", "26 M", "--strategy", "topt", "--out", OUT)
TENSOR = ("--width", "256", "--rounds", "6")
PIPELINE = ("--ranks", "2", "--width", "128", "--rounds", "4", "--out", OUT)
FLUSHING = ("--schedules", "1f1b", "interleaved", "zero_bubble", *PIPELINE)
CONTINUOUS = ("--ranks", "2", "--width", "384", "--rounds", "1", "--out", OUT, "--theirs")
STEP = ("--only", "AdamW, fused", "--rounds", "3", "--methods", "plain", "ours, split")
NETWORK = ("--quick", "--only", "1x 1gbit gpt")
DATA = ("--known-best", "--number", "2000", "--rounds", "1")
WHAT_IF = ("--only", "without tensor axes")
CASES = {
    "import": Case(("-c", "import lightning_topt"), None),
    "help": Case(("-m", "lightning_topt.cli.main", "--help"), None),
    "start": Case(("-m", "benchmarks.foreign.start", *START), record, warm_up=True),
    "overhead": Case(("-c", GPT), step),
    "tensor_overhead": Case(
        ("-m", "benchmarks.tensor.overhead", *TENSOR), rows(1, {"ms": 1, "ms of the thread": 4})
    ),
    "pipeline_overhead": Case(
        ("-m", "benchmarks.pipelines.overhead", *FLUSHING),
        rows(3, {"ms": 3, "processor time, of torch's": 6}),
    ),
    "continuous_overhead": Case(
        ("-m", "benchmarks.pipelines.continuous_overhead", *CONTINUOUS),
        rows(3, {"s per sequence": 4}, rate=True),
        rounds=3,
    ),
    "frontier_search": Case(
        ("-c", "from benchmarks.search.frontier import growth; growth()"), total, rounds=3
    ),
    "what_if_search": Case(
        ("-m", "benchmarks.search.what_if", *WHAT_IF), rows(1, {"CPU s": 1, "GiB": 3})
    ),
    "optimizer_step": Case(
        ("-m", "benchmarks.optimizer.step", *STEP), rows(1, {"ms": 1}, keep="ours"), rounds=3
    ),
    "network": Case(
        ("-m", "benchmarks.exchange.network", *NETWORK),
        rows(1, {"ms": 1}, keep=r"^ours, [^:]*$"),
        rounds=3,
    ),
    "data_throughput": Case(
        ("-m", "benchmarks.data.throughput", *DATA),
        rows(1, {"s per sample": 2}, keep="ours", rate=True),
        rounds=3,
    ),
}


def run(case: Case, checkout: Path, cache: Path) -> Figures:
    """Run a command with the package of `checkout`, and return its figures.

    Raises:
        RuntimeError: it failed, or printed nothing that could be read.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(checkout),
        "XDG_CACHE_HOME": str(cache),
    }
    with tempfile.TemporaryDirectory() as folder:
        out, printed = Path(folder) / "out", Path(folder) / "printed"
        words = [str(out) if word == OUT else word for word in case.command]
        with printed.open("w") as file:
            job = subprocess.Popen(
                [sys.executable, *words],
                cwd=checkout,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            _, status, used = os.wait4(job.pid, 0)
            job.returncode = os.waitstatus_to_exitcode(status)
        text = printed.read_text()
        if job.returncode == 0 and case.read is None:
            return {"processor time": used.ru_utime + used.ru_stime}
        if job.returncode == 0 and case.read is not None:
            figures = case.read(out.read_text() if out.exists() else text)
            if figures:
                return figures
        raise RuntimeError(f"{' '.join(words)} in {checkout}: {text[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="names, with commas between them")
    options = parser.parse_args()
    checkouts = {"before": options.before.resolve(), "now": ROOT}
    heads = {
        name: subprocess.run(
            ["git", "log", "-1", "--format=%h"],
            cwd=checkout,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for name, checkout in checkouts.items()
    }
    lines = [
        "# Ten benchmarks before and after",
        "",
        f"`python -m benchmarks.before_after <clone of {heads['before']}> --rounds "
        f"{options.rounds}`, now: {heads['now']}",
        "",
        machine(),
        "",
        "Medians of rounds that alternate, 3 where a benchmark has rounds of its own or takes "
        "minutes; the ratio of neighbours with its range. The table gives seconds, milliseconds "
        "or, for rates, seconds per unit.",
        "",
        "| benchmark | figure | before | now | now / before |",
        "|---|---|---|---|---|",
    ]
    chosen = options.only.split(",") if options.only else list(CASES)
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            for line in compare(name, checkouts, Path(folder), options.rounds):
                lines.append(line)
                print(line, flush=True)
    if not options.only:
        (RESULTS / "before_after.md").write_text("\n".join(lines) + "\n")


def compare(name: str, checkouts: dict[str, Path], folder: Path, rounds: int) -> list[str]:
    """Rows of one benchmark, whose runs in both checkouts alternate."""
    case, found = CASES[name], dict[str, list[Figures]](before=[], now=[])
    rounds = min(rounds, case.rounds)
    for index in range(rounds + case.warm_up):
        order = list(checkouts) if index % 2 else list(reversed(checkouts))
        for which in order:
            figures = run(case, checkouts[which], folder / which)
            print(f"  {name}, {which}: {figures}", flush=True)
            if index >= case.warm_up:
                found[which].append(figures)
    lines = []
    for label in found["now"][0]:
        if any(label not in figures for figures in (*found["before"], *found["now"])):
            lines.append(f"| {name} | {label} | | | not in both |")
            continue
        old, new = ([figures[label] for figures in found[which]] for which in ("before", "now"))
        ratios = [b / a for a, b in zip(old, new, strict=True)]
        lines.append(
            f"| {name} | {label} | {statistics.median(old):.4g} | {statistics.median(new):.4g} | "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |"
        )
    return lines


if __name__ == "__main__":
    main()
