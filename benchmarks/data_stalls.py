"""Predictions of `topt stalls` against real runs: measured once at 1 Gb/s, one worker, no cache;
the rest predicted, then run.

    sudo python -m benchmarks.data_stalls              # 5 rounds, half an hour on 2 quiet cores
    sudo python -m benchmarks.data_stalls --rounds 1   # a look; printed, not kept
    python -m benchmarks.data_stalls --report          # the table from what was measured

Crops of photographs as JPEG behind an HTTP server in another network namespace, whose link has the
rate (`lab`). Each round measures, and runs every set-up on the Trainer, with the cache full;
latency is a server that takes its time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

from benchmarks.common import RESULTS, machine
from benchmarks.lab import Lab, end_on_signals
from benchmarks.lab_nodes import LabError
from lightning_topt.data.stalls.model import SetUp, StallCosts, least_cache, samples_per_second

NUMBER = 2000  # files
BURSTS = {
    "1gbit": "16kb",
    "200mbit": "4kb",
}  # of links: little, so that they are slow for one picture too, as a cable is
RATES = {"1gbit": 1e9 / 8, "200mbit": 2e8 / 8}
FILE = RESULTS / "data_stalls.json"


class Case(NamedTuple):
    """A set-up to predict and to run."""

    workers: int = 1
    share: float = 0.0
    cores: int = 2
    rate: str = "1gbit"
    delay_seconds: float = 0.0

    def words(self) -> str:
        changed = []
        if self == Case():
            return "as measured: 1 Gb/s, 1 worker, 2 cores, no cache"
        if self.share:
            changed.append(f"cache {100 * self.share:.0f} %")
        if self.workers != 1:
            changed.append(f"{self.workers} workers")
        if self.cores != 2:
            changed.append(f"{self.cores} core")
        if self.rate != "1gbit":
            changed.append("200 Mb/s")
        if self.delay_seconds:
            changed.append(f"{1e3 * self.delay_seconds:g} ms more latency")
        return ", ".join(changed)

    def setup(self, costs: StallCosts) -> SetUp:
        """What `topt stalls` is asked."""
        return SetUp(
            self.workers,
            self.cores,
            memory_share=self.share,
            link_bytes_per_second=None if self.rate == "1gbit" else RATES[self.rate],
            latency_seconds=costs.latency_seconds + self.delay_seconds,
        )


CASES = [
    Case(),
    *(Case(share=share) for share in (0.25, 0.5, 0.75, 1.0)),
    Case(workers=0),
    Case(workers=2),
    Case(cores=1),
    Case(delay_seconds=0.01),
    Case(workers=2, delay_seconds=0.01),
    Case(workers=2, share=0.5),
    Case(rate="200mbit"),
    Case(rate="200mbit", workers=0),
    Case(rate="200mbit", workers=2),
    Case(rate="200mbit", share=0.5),
]


def make_crops(folder: Path, number: int) -> None:
    """Crops of scikit-learn's photographs (640 x 427), of sizes as users' pictures have them, as
    JPEG; made once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [Image.fromarray(picture) for picture in load_sample_images().images]
    for index in range(number):
        path = folder / f"{index:06d}.jpg"
        if path.exists():
            continue
        rng = np.random.default_rng(index)
        picture = pictures[index % len(pictures)]
        height = int(rng.integers(240, 420))
        width = height * 4 // 3
        left, top = int(rng.integers(640 - width + 1)), int(rng.integers(427 - height + 1))
        temporary = path.with_suffix(".part")
        picture.crop((left, top, left + width, top + height)).save(temporary, "JPEG", quality=92)
        temporary.rename(path)


def run_round(folder: Path) -> dict[str, Any]:
    """Everything once: the measurement, and samples/s of every case."""
    measured: dict[str, Any] = {}
    runs: dict[str, Any] = {}
    entry_bytes = 0
    for rate in RATES:
        cases = [case for case in CASES if case.rate == rate]
        with Lab(2, rate=rate, burst=BURSTS[rate]) as lab:
            if rate == "1gbit":
                measured = run_jobs(lab, folder, [], measure={"workers": 1})["measured"]
                entry_bytes = round(measured["costs"]["entry_bytes"])
            for cores in sorted({case.cores for case in cases}):
                some = [case for case in cases if case.cores == cores]
                with on_cores(cores):
                    done = run_jobs(lab, folder, some, entry_bytes=entry_bytes)["setups"]
                runs |= {case.words(): result for case, result in zip(some, done, strict=True)}
    return {"measured": measured, "runs": runs}


@contextlib.contextmanager
def on_cores(number: int) -> Iterator[None]:
    """Let what is started use so many cores, the server too: they stand for a machine's."""
    every = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(every)[:number])
    try:
        yield
    finally:
        os.sched_setaffinity(0, every)


def run_jobs(
    lab: Lab, folder: Path, cases: list[Case], *, entry_bytes: int = 0, measure: Any = None
) -> Any:
    with tempfile.TemporaryDirectory() as temporary:
        jobs, out = Path(temporary) / "jobs.json", Path(temporary) / "out.json"
        setups = [case._asdict() for case in cases]
        jobs.write_text(
            json.dumps({"setups": setups, "measure": measure, "entry_bytes": entry_bytes})
        )
        arguments = [f"--folder={folder}", f"--number={NUMBER}", f"--server={lab.address(1)}"]
        lab.run(
            ["-m", "benchmarks.data_stalls_run", *arguments, f"--jobs={jobs}", f"--out={out}"],
            timeout=1500,
        )
        return json.loads(out.read_text())


def costs_of(measured: dict[str, Any]) -> StallCosts:
    return StallCosts(
        **{name: inf if value is None else value for name, value in measured["costs"].items()}
    )


def report(rounds: list[dict[str, Any]], *, where: str) -> str:
    """The table: medians over rounds; the error of a round is that of its own measurement against
    its own run.
    """
    lines = [
        "# Predictions of `topt stalls`", "", where, "",
        f"{NUMBER} JPEG pictures of 320 x 240 to 560 x 420 over HTTP, 224 x 224 when prepared, "
        "batches of 32; measured at",
        f"1 Gb/s with one worker and no cache, all else predicted from that; {len(rounds)} rounds, "
        "medians (lowest to",
        "highest). Others: share of the cores' time taken by anything but the training process and "
        "its workers (the server,",
        "the kernel, other users).",
        "",
        "| set-up | predicted samples/s | run samples/s | error | others |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for case in CASES:
        predicted, runs, errors, others = [], [], [], []
        for measured in rounds:
            costs, run = costs_of(measured["measured"]), measured["runs"][case.words()]
            predicted.append(samples_per_second(costs, case.setup(costs)))
            runs.append(run["samples_per_second"])
            errors.append(100 * (predicted[-1] / runs[-1] - 1))
            others.append(100 * run["others"])
        cells = [
            _median(predicted),
            _median(runs),
            f"{_median(errors, sign=True)} %",
            f"{statistics.median(others):.0f} %",
        ]
        lines.append(f"| {case.words()} | {' | '.join(cells)} |")
    return "\n".join([*lines, *_measured(rounds)]) + "\n"


def _measured(rounds: list[dict[str, Any]]) -> list[str]:
    lines = [
        "",
        "Measured, per sample unless said:",
        "",
        "| cost | median (lowest to highest) |",
        "|---|---|",
    ]
    all_costs = [costs_of(measured["measured"]) for measured in rounds]
    for name, words, factor in (
        ("latency_seconds", "latency, ms", 1e3),
        ("link_bytes_per_second", "rate of the link, Mb/s", 8e-6),
        ("source_bytes", "bytes from the source, kB", 1e-3),
        ("prepare_seconds", "core to fetch and prepare, ms", 1e3),
        ("hit_seconds", "core of a cache hit, ms", 1e3),
        ("collate_seconds", "collating in the training process, ms per batch", 1e3),
        ("worker_seconds", "core of a worker besides samples, ms per batch", 1e3),
        ("receive_seconds", "receiving from a worker, ms per batch", 1e3),
        ("step_seconds", "step, ms per batch", 1e3),
        ("contention", "contention (all cores busy against one)", 1.0),
    ):
        lines.append(
            f"| {words} | "
            f"{_median([factor * getattr(costs, name) for costs in all_costs], digits=2)} |"
        )
    shares = [100 * least_cache(costs, Case().setup(costs)) for costs in all_costs]
    lines.append(f"| least cache worth having, % of the items | {_median(shares)} |")
    return lines


def _median(values: list[float], *, sign: bool = False, digits: int = 0) -> str:
    spec = f"{'+' if sign else ''}.{1 if sign else digits}f"
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:{spec}}" + (f" ({low:{spec}} to {high:{spec}})" if len(values) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "topt-pictures"
    )
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    end_on_signals()
    known = json.loads(FILE.read_text()) if FILE.exists() else {"machine": machine(), "rounds": []}
    if not options.report:
        known = {"machine": machine(), "rounds": []}
        make_crops(options.folder, NUMBER)
        for number in range(options.rounds):
            try:
                known["rounds"].append(run_round(options.folder))
            except LabError as error:
                sys.exit(f"lab: {error}")
            print(f"round {number + 1} of {options.rounds} done", flush=True)
            if options.rounds > 1:
                FILE.write_text(json.dumps(known, indent=1) + "\n")
    text = report(known["rounds"], where=known["machine"])
    print(text)
    if options.rounds > 1 or options.report:
        FILE.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
