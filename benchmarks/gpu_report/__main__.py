"""Everything one GPU can show about this project, in a few minutes, whatever breaks.

    python -m benchmarks.gpu_report --out FOLDER                  # all parts, one after another
    python -m benchmarks.gpu_report --out FOLDER --only 3,4       # again, the other parts are kept
    python -m benchmarks.gpu_report --out FOLDER --device cpu --quick   # a rehearsal

Each part is a process of its own with a deadline. `gpu_report.jsonl` has a line per figure and per
failure, written at once; `summary.md` is renewed after each part; `log.txt` has what parts printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.gpu_report.reporting import read_lines, summarize


@dataclass(frozen=True)
class Part:
    """One module of this folder and the seconds it may take."""

    number: int
    module: str
    seconds: float


PARTS = [
    Part(0, "probe", 25),
    Part(1, "gpu_tests", 90),
    Part(2, "constants", 60),
    Part(3, "models", 120),
    Part(4, "fake_groups", 90),
    Part(5, "two_processes", 50),
    Part(6, "one_rank_nccl", 35),
    Part(7, "compression", 40),
    Part(8, "memory_fractions", 50),
]
_LEAST_SECONDS, _GRACE = 4.0, 2.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="numbers of parts, such as 3,4")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--budget", type=float, default=570, help="seconds for all parts")
    parser.add_argument("--stretch", type=float, default=1.0, help="factor on each deadline")
    options = parser.parse_args()
    chosen = {int(number) for number in options.only.split(",") if number}
    parts = [part for part in PARTS if not chosen or part.number in chosen]

    options.out.mkdir(parents=True, exist_ok=True)
    results, log = options.out / "gpu_report.jsonl", options.out / "log.txt"
    kept = [line for line in read_lines(results) if line["part"] not in {p.module for p in parts}]
    results.write_text("".join(json.dumps(line) + "\n" for line in kept))
    end = time.monotonic() + options.budget
    for part in parts:
        seconds = min(part.seconds * options.stretch, end - time.monotonic())
        start = time.monotonic()
        if seconds < _LEAST_SECONDS:
            status = "skipped, the budget is spent"
        else:
            status = run(part, options, results, log, seconds)
        wall = round(time.monotonic() - start, 1)
        print(f"part {part.number} {part.module}: {status}, {wall} s", flush=True)
        line: dict[str, Any] = {"part": part.module, "kind": "end", "at": wall, "status": status}
        if status != "done":
            line |= {"kind": "failure", "name": "the process", "error": status}
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        (options.out / "summary.md").write_text(summarize(_in_order(read_lines(results))))
    print((options.out / "summary.md").read_text())


def run(part: Part, options: argparse.Namespace, results: Path, log: Path, seconds: float) -> str:
    """Run one part to its end or deadline; return how it ended."""
    command = [sys.executable, "-u", "-m", f"benchmarks.gpu_report.{part.module}"]
    command += [f"--device={options.device}", f"--out={results.resolve()}"]
    command += [f"--deadline={seconds:.1f}", *(["--quick"] if options.quick else [])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_SHOW_CPP_STACKTRACES": "0",
    }
    with log.open("a") as output:
        print(f"\n==== part {part.number}: {part.module} ====", file=output, flush=True)
        job = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its children end with it
        )
        try:
            code = job.wait(seconds)
            status = "done" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            status = f"ended at its deadline of {seconds:.0f} s"
            _signal(job, signal.SIGTERM)
            time.sleep(_GRACE)
        _signal(job, signal.SIGKILL)
        job.wait()
    return status


def _signal(job: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, number)


def _in_order(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines with the parts in their order, also after some were run again."""
    numbers = {part.module: part.number for part in PARTS}
    return sorted(lines, key=lambda line: numbers.get(line["part"], len(PARTS)))


if __name__ == "__main__":
    main()
