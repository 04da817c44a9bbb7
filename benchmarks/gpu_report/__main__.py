"""Everything one GPU can show about this project, in a few minutes, whatever breaks.

    python -m benchmarks.gpu_report --out FOLDER                  # all parts, one after another
    python -m benchmarks.gpu_report --out FOLDER --only 4,3 --seconds 4=60   # in this order, again
    python -m benchmarks.gpu_report --out FOLDER --device cpu --quick   # a rehearsal

Each part is a process of its own with a deadline, forked from this one, which has imported what
they import. `gpu_report.jsonl` has a line per figure and per
failure, written at once; `summary.md` is renewed after each part; `log.txt` has what parts printed.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import ROOT
from benchmarks.gpu_report.reporting import START_METHOD, read_lines, summarize


@dataclass(frozen=True)
class Part:
    """One module of this folder and the seconds it may take."""

    number: int
    module: str
    seconds: float


PARTS = [
    Part(0, "probe", 25),
    Part(1, "gpu_tests", 65),
    Part(2, "constants", 60),
    Part(3, "models", 90),
    Part(4, "fake_groups", 75),
    Part(5, "two_processes", 50),
    Part(6, "one_rank_nccl", 35),
    Part(7, "compression", 40),
    Part(8, "memory_fractions", 50),
    Part(9, "fits", 110),
    Part(10, "compiled", 120),
]
_LEAST_SECONDS, _GRACE, _TRIAL_SECONDS = 4.0, 1.0, 20.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="numbers of parts in their order, such as 3,4")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--budget", type=float, default=570, help="seconds for all parts")
    parser.add_argument("--seconds", default="", help="deadlines of parts, such as 3=60,8=45")
    parser.add_argument("--stretch", type=float, default=1.0, help="factor on each deadline")
    parser.add_argument("--fresh", action="store_true", help="a new Python for each part")
    options = parser.parse_args()
    end = time.time() - _age() + options.budget
    order = [int(number) for number in options.only.split(",") if number]
    parts = [PARTS[number] for number in order] if order else PARTS
    given = dict(pair.split("=") for pair in options.seconds.split(",") if pair)
    deadlines = {int(number): float(seconds) for number, seconds in given.items()}

    options.out.mkdir(parents=True, exist_ok=True)
    results, log = (options.out / name for name in ("gpu_report.jsonl", "log.txt"))
    options.out, options.results, options.log = (
        path.resolve() for path in (options.out, results, log)
    )
    kept = [line for line in read_lines(results) if line["part"] not in {p.module for p in parts}]
    results.write_text("".join(json.dumps(line) + "\n" for line in kept))
    os.environ.update(_environment())
    warmed = set() if options.fresh else warm_up(parts, options)
    for part in parts:
        seconds = deadlines.get(part.number, part.seconds) * options.stretch
        seconds = min(seconds, end - time.time())
        start = time.monotonic()
        if seconds < _LEAST_SECONDS:
            status = "skipped, the budget is spent"
        else:
            status = run(part, options, seconds, fork=part.module in warmed)
        wall = round(time.monotonic() - start, 1)
        print(f"part {part.number} {part.module}: {status}, {wall} s", flush=True)
        line: dict[str, Any] = {"part": part.module, "kind": "end", "at": wall, "status": status}
        if status != "done":
            line |= {"kind": "failure", "name": "the process", "error": status}
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        (options.out / "summary.md").write_text(summarize(_in_order(read_lines(results))))
    print((options.out / "summary.md").read_text())


def warm_up(parts: list[Part], options: argparse.Namespace) -> set[str]:
    """Import the parts, so that their processes can be forked; return the names of these.

    Imports take a quarter of a minute on a new machine. CUDA does not outlive a fork once it was
    begun, so a fork tries first whether it works there.
    """
    start = time.monotonic()
    warmed = set()
    for part in parts:
        try:
            importlib.import_module(f"benchmarks.gpu_report.{part.module}")
            warmed.add(part.module)
        except BaseException:  # a new Python will say what is wrong
            traceback.print_exc()
    imported = time.monotonic() - start
    gc.collect()
    gc.freeze()
    job = _forked(lambda: _use(options.device), options.log)
    works = _wait(job, _TRIAL_SECONDS) == 0
    _signal(job, signal.SIGKILL)
    print(f"imports: {imported:.1f} s; parts are forked: {works}", flush=True)
    if not works:
        os.environ[START_METHOD] = "spawn"
    return warmed if works else set()


def _use(device: str) -> None:
    importlib.import_module("torch").ones(1, device=device).add_(1).item()


def run(part: Part, options: argparse.Namespace, seconds: float, *, fork: bool) -> str:
    """Run one part to its end or deadline; return how it ended."""
    arguments = [f"--device={options.device}", f"--out={options.results}"]
    arguments += [f"--deadline={seconds:.1f}", *(["--quick"] if options.quick else [])]
    name = f"benchmarks.gpu_report.{part.module}"
    with options.log.open("a") as output:
        print(f"\n==== part {part.number}: {part.module} ====", file=output, flush=True)

    def begin() -> None:
        sys.argv = [name, *arguments]
        sys.modules[name].main()

    if fork:
        job = _forked(begin, options.log)
    else:
        job = _forked(
            lambda: os.execv(sys.executable, [sys.executable, "-um", name, *arguments]), options.log
        )
    code = _wait(job, seconds)
    if code is None:
        _signal(job, signal.SIGTERM)
        time.sleep(_GRACE)
    _signal(job, signal.SIGKILL)
    if code is None:
        os.waitpid(job, 0)
        return f"ended at its deadline of {seconds:.0f} s"
    return "done" if code == 0 else f"exit status {code}"


def _forked(call: Callable[[], None], log: Path) -> int:
    """Let a process do this; what it prints goes to the log, its children are of its session."""
    sys.stdout.flush()
    sys.stderr.flush()
    job = os.fork()
    if job:
        return job
    code = 1
    try:
        os.setsid()
        os.chdir(ROOT)
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.enable()
        call()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _wait(job: int, seconds: float) -> int | None:
    """Return how a process ended, None if it did not in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(job, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    return None


def _environment() -> dict[str, str]:
    return {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_SHOW_CPP_STACKTRACES": "0",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # begins no CUDA in the process that is forked
    }


def _age() -> float:
    return time.time() - psutil.Process().create_time()


def _signal(job: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(job, number)


def _in_order(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines with the parts in their order, also after some were run again."""
    numbers = {part.module: part.number for part in PARTS}
    return sorted(lines, key=lambda line: numbers.get(line["part"], len(PARTS)))


if __name__ == "__main__":
    main()
