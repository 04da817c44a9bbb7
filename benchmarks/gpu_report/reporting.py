"""Lines of the GPU report: rows, failures with their tracebacks, timing, memory, and the summary.

A part is a module with `run(report)` that calls `run_part` as its program:

    def run(report: Report) -> None:
        for size in sizes:
            with report.attempt(f"copy {size}", bytes=size) as row:
                row["predicted_seconds"] = ...
                row["measured_seconds"] = ...

    if __name__ == "__main__":
        run_part("calibration", run, __doc__)

A row with `predicted_X` and `measured_X` gets `ratio_X`; the summary has the medians of these. An
exception becomes a line of its own and the part goes on. Every line is on disk before the next.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import math
import multiprocessing as mp
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

START_METHOD = "GPU_REPORT_START"  # variable: how parts begin their processes; fork if not given
TRACEBACK_LINES = 30
MIB = 2**20
_LEAST_SECONDS, _BATCHES = 4e-3, 5  # of one timed batch of calls, and how many of them
_NOT_COLUMNS = ("part", "kind", "at", "traceback")


@dataclass(frozen=True)
class Report:
    """Where a part writes its lines, and what it was asked for."""

    part: str
    path: Path
    device: torch.device
    quick: bool
    deadline: float  # seconds from `started`; the driver ends the part then
    started: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Seconds until the driver ends this part."""
        return self.deadline - (time.monotonic() - self.started)

    def row(self, name: str, **columns: Any) -> None:
        """Write one row of this part's table."""
        self.write("row", {"name": name, **_with_ratios(columns)})

    def note(self, name: str, **values: Any) -> None:
        """Write what belongs into the JSON and not into the table."""
        self.write("note", {"name": name, **values})

    def failure(self, name: str, error: BaseException, **columns: Any) -> None:
        """Write an exception with the end of its traceback."""
        lines = "".join(traceback.format_exception(error)).splitlines()
        text = f"{type(error).__name__}: {error}".strip()
        print(f"FAILED {name}", *lines, sep="\n", file=sys.stderr, flush=True)
        columns = {**columns, "error": text[:600], "traceback": lines[-TRACEBACK_LINES:]}
        self.write("failure", {"name": name, **columns})

    @contextmanager
    def attempt(self, name: str, **columns: Any) -> Iterator[dict[str, Any]]:
        """Give a row to fill; write it at the end, or the failure with what was filled so far."""
        row = dict(columns)
        start = time.monotonic()
        print(f"begin {name}, {self.left():.0f} s left", flush=True)
        try:
            yield row
        except Exception as error:
            self.failure(name, error, **row)
        else:
            self.row(name, **row, wall_s=round(time.monotonic() - start, 2))
        free_memory(self.device)

    def rows_written(self) -> list[dict[str, Any]]:
        """Return all lines of this part so far, also those of its other processes."""
        return [line for line in read_lines(self.path) if line["part"] == self.part]

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Write one line of any kind, and print it unless it is a failure."""
        at = round(time.monotonic() - self.started, 2)
        line = {"part": self.part, "kind": kind, "at": at, **values}
        text = json.dumps(_plain(line)) + "\n"
        # One write in append mode: processes of one part may share the file.
        with self.path.open("ab", buffering=0) as file:
            file.write(text.encode())
            os.fsync(file.fileno())
        if kind != "failure":
            print(text, end="", flush=True)


def run_part(
    part: str, run: Callable[[Report], None], description: str | None, *, forks: bool = False
) -> None:
    """Run one part as a program: ``--device cuda --out FILE.jsonl [--quick] [--deadline S]``.

    `forks`: it forks processes that use CUDA, so this one must not begin to. They say by
    `faulthandler` where they hang, this one does not.
    """
    parser = argparse.ArgumentParser(description=(description or part).splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--deadline", type=float, default=600)
    options = parser.parse_args()
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    importing = time.time() - psutil.Process().create_time()  # has been paid for already
    started = time.monotonic() - importing
    report = Report(part, options.out, device, options.quick, options.deadline, started)
    # A part that hangs says where before it is ended.
    if not forks:  # whose faulthandler would wait for a thread that is not forked
        faulthandler.dump_traceback_later(max(1.0, report.left() - 3))
    try:
        if options.device == "cuda" and not forks:
            torch.cuda.set_device(device)
            torch.cuda.init()
        run(report)
    except BaseException as error:
        report.failure("the part itself", error)
        if not isinstance(error, Exception):
            raise
    if not forks:
        faulthandler.cancel_dump_traceback_later()


def in_own_process(report: Report, name: str, call: Callable[[Report], None]) -> None:
    """Let a forked process do this of a part that `forks`; it is ended before the part's deadline.

    What it would take long to give back, such as communicators, ends with it.
    """
    job = processes().Process(target=_own_process, args=(report, name, call))
    job.start()
    job.join(max(1.0, report.left() - 1.5))
    if job.exitcode is None:
        job.kill()
        report.failure(name, TimeoutError("not done at the deadline"))
    elif job.exitcode:
        report.failure(name, RuntimeError(f"exit status {job.exitcode}"))


def processes() -> Any:
    """Return how a part that `forks` begins its processes, as modules of `multiprocessing` do."""
    return mp.get_context(os.environ.get(START_METHOD, "fork"))


def _own_process(report: Report, name: str, call: Callable[[Report], None]) -> None:
    faulthandler.dump_traceback_later(max(1.0, report.left() - 3))
    try:
        if report.device.type == "cuda":
            torch.cuda.set_device(report.device)
        call(report)
    except Exception as error:
        report.failure(name, error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# ---- timing --------------------------------------------------------------------------------------


def device_seconds(
    call: Callable[[], Any],
    device: torch.device,
    *,
    least_seconds: float = _LEAST_SECONDS,
    batches: int = _BATCHES,
) -> float:
    """Seconds of one call on the device's own clock: the median of several batches of calls.

    On CUDA a batch lies between two events and is long enough that launches run ahead of it;
    calls that the host cannot launch fast enough are timed as slow as they are launched.
    """
    call()
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    once = max(time.perf_counter() - start, 1e-7)
    count = max(1, min(20_000, math.ceil(least_seconds / once)))
    if device.type != "cuda":
        times = []
        for _ in range(batches):
            start = time.perf_counter()
            for _ in range(count):
                call()
            times.append((time.perf_counter() - start) / count)
        return statistics.median(times)
    times = []
    for _ in range(batches):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(count):
            call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) * 1e-3 / count)
    return statistics.median(times)


def graph_seconds(call: Callable[[], Any], *, calls: int = 20, batches: int = _BATCHES) -> float:
    """Seconds of one call in a replayed CUDA graph of `calls` calls: no launch by the host."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    seconds = device_seconds(graph.replay, torch.device("cuda"), batches=batches)
    return seconds / calls


def host_seconds(call: Callable[[], Any], device: torch.device, *, calls: int = 200) -> float:
    """Seconds the host takes to issue one call, without waiting for the device."""
    call()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = (time.perf_counter() - start) / calls
    synchronize(device)
    return seconds


def synchronize(device: torch.device) -> None:
    """Wait for everything that was issued to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- memory --------------------------------------------------------------------------------------


def free_memory(device: torch.device) -> None:
    """Collect garbage and give the allocator's cache back."""
    gc.collect()
    if device.type == "cuda":
        try:
            torch.cuda.empty_cache()
        except Exception as error:  # a device error seen late: the next attempt fails by itself
            print(f"empty_cache: {error}", file=sys.stderr, flush=True)


def reset_peaks(device: torch.device) -> None:
    """Start measuring peaks anew."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def memory_columns(device: torch.device) -> dict[str, int]:
    """Bytes: peaks of the allocator, and what all of the device's users hold now."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
        "used_bytes": total - free,
        "alloc_retries": stats.get("num_alloc_retries", 0),
    }


# ---- the summary ---------------------------------------------------------------------------------


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a report; a line cut short by a killed process is left out."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def summarize(lines: Sequence[Mapping[str, Any]], *, title: str = "GPU report") -> str:
    """Markdown: a table per part, median ratios per part, failures one line each."""
    parts = list(dict.fromkeys(line["part"] for line in lines))
    text = [f"# {title}", ""]
    for part in parts:
        rows = [line for line in lines if line["part"] == part and line["kind"] == "row"]
        text += [f"## {part}", "", *(_table(rows) if rows else ["no rows"]), ""]
    text += ["## Predicted / measured", "", "| part | of | rows | median | least | greatest |"]
    text += ["|---|---|---|---|---|---|"]
    for part in parts:
        rows = [line for line in lines if line["part"] == part and line["kind"] == "row"]
        names = dict.fromkeys(key for row in rows for key in row if key.startswith("ratio_"))
        for name in names:
            values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
            if values:
                figures = statistics.median(values), min(values), max(values)
                cells = [part, name[6:], str(len(values)), *(f"{v:.3f}" for v in figures)]
                text.append("| " + " | ".join(cells) + " |")
    failures = [line for line in lines if line["kind"] == "failure"]
    text += ["", f"## Failures: {len(failures)}", ""]
    text += [
        f"- {line['part']}: {line['name']}: {' '.join(str(line['error']).split())[:300]}"
        for line in failures
    ]
    return "\n".join(text) + "\n"


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = dict.fromkeys(key for row in rows for key in row if key not in _NOT_COLUMNS)
    head = [column.replace("_bytes", "_MiB").replace("_seconds", "_ms") for column in columns]
    text = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    text += ["| " + " | ".join(_cell(c, row.get(c)) for c in columns) + " |" for row in rows]
    return text


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not column.startswith("ratio_"):
            if column.endswith("_bytes"):
                return f"{value / MIB:.1f}"
            if column.endswith("_seconds"):
                return f"{value * 1e3:.4g}"
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(str(value).split()).replace("|", "\\|")[:200]


def _with_ratios(columns: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(columns)
    for key, predicted in columns.items():
        what = key.removeprefix("predicted_")
        measured = columns.get(f"measured_{what}")
        both = isinstance(predicted, int | float) and isinstance(measured, int | float)
        if what != key and both and measured:
            result[f"ratio_{what}"] = predicted / measured
    return result


def _plain(value: Any) -> Any:
    """Return what JSON can hold; floats that it cannot become text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)
