"""Steps of pipelines as the simulator expects them, and as measured: 2 and 4 ranks on one machine
and on nodes at 1 Gb/s.

sudo python -m benchmarks.pipeline_predictions            # --rate, --steps, --settings
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, machine, mib
from benchmarks.lab import Lab, end_on_signals
from benchmarks.lab_nodes import LabError

RUN = "benchmarks.pipeline_predictions_run"
SETTINGS = {
    "1 node of 2": (1, 2),
    "1 node of 4": (1, 4),
    "2 nodes of 1": (2, 1),
    "4 nodes of 1": (4, 1),
}


def errors(row: dict[str, Any]) -> tuple[float, float]:
    """Return the relative errors of seconds, and of the bytes of the rank with the largest one."""
    pairs = zip(row["expected_bytes"], row["bytes"], strict=True)
    return row["expected_seconds"] / row["seconds"] - 1, max((a / b - 1 for a, b in pairs), key=abs)


def line(setting: str, row: dict[str, Any]) -> str:
    """Return a row of the table."""
    of_time, of_bytes = (f"{100 * error:+.1f} %" for error in errors(row))
    peaks = f"{mib(max(row['expected_bytes']))} | {mib(max(row['bytes']))}"
    seconds = f"{row['expected_seconds']:.3f} | {row['seconds']:.3f}"
    return f"| {setting} | {row['case']} | {seconds} | {of_time} | {peaks} | {of_bytes} |"


def shares(values: Sequence[float]) -> str:
    """Return median and largest as text."""
    return f"{100 * statistics.median(values):.1f} % (median), {100 * max(values):.1f} % (largest)"


def main() -> None:
    """Measure and write the table."""
    end_on_signals()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--out", type=Path, default=RESULTS / "pipeline_predictions.md")
    options = parser.parse_args()
    rows: list[tuple[str, dict[str, Any]]] = []
    for setting in options.settings:
        nodes, per_node = SETTINGS[setting]
        with Lab(nodes, rate=options.rate if nodes > 1 else None) as lab:
            found = lab.run_module(RUN, ranks_per_node=per_node, steps=options.steps)
        for row in found:
            rows.append((setting, row))
            print(line(setting, row), flush=True)
            passes = {
                kind: [round(1e3 * s, 1) for s in values]
                for kind, values in row["passes"].items()
                if values
            }
            print(
                f"    ms of passes {passes}, of a transfer {1e3 * row['transfer']:.2f}", flush=True
            )
    of_time, of_bytes = zip(*(map(abs, errors(row)) for _, row in rows), strict=True)
    lines = [
        "# Steps of pipelines simulated and measured",
        "",
        f"`sudo python -m benchmarks.pipeline_predictions --rate {options.rate} --steps "
        f"{options.steps}`",
        "",
        machine(),
        "",
        f"- {len(rows)} runs: |error| of time {shares(of_time)}; of peak bytes {shares(of_bytes)}",
        "",
        "Eight Transformer layers, one thread per rank, 8 microbatches; forward and backward. "
        "Seconds of passes come from",
        "short runs of another schedule with 4 and 6 microbatches, those of transfers from tensors "
        "of the same size sent",
        "back and forth, bytes from the peaks of the short runs. MiB: of the rank with the most; "
        "error: the largest of a rank.",
        "",
        "| setting | schedule | simulated s | measured s | error | simulated MiB | measured MiB | "
        "error |",
        "|---" * 8 + "|",
        *(line(setting, row) for setting, row in rows),
    ]
    options.out.write_text("\n".join(lines) + "\n")
    print(lines[6])


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        sys.exit(str(error))
