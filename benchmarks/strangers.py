"""Predicted and measured step time and memory of twelve model families that no other benchmark
uses.

    python -m benchmarks.strangers           # 12 families, 7 plans each; about 15 minutes
    python -m benchmarks.strangers --only vit --only llama
    python -m benchmarks.strangers --quick   # three steps of each plan: enough for memory
    python -m benchmarks.strangers --fresh   # forget what an interrupted run has measured

Two constants of the cost model were read from these families: the reserve of sharded plans and the
LSTM's workspace. Two gloo ranks with one thread each, fresh processes for each plan. "limit kept":
the smallest `memory_limit` under which the plan would have been chosen is its prediction with the
default margin; measured bytes must not exceed it.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import RESULTS, machine, mib
from benchmarks.strangers_models import FAMILIES
from benchmarks.strangers_run import RANKS, Case, measure, predict
from tests.launch import run_ranks

LIMITED = [Case(plan, True) for plan in ("ddp", "zero1", "zero2", "zero3", "zero3+recompute")]
FREE = [Case("ddp", False), Case("ddp+recompute", False)]
MARGIN = 0.05
STORE = RESULTS / "strangers.json"


def run_family(family: str, *, steps: int, warmup: int) -> list[dict[str, Any]]:
    """One row per case."""
    predictions = run_ranks(predict, RANKS, family, [*LIMITED, *FREE], 4.0, timeout_seconds=300)[0]
    rows = []
    for case, predicted in predictions.items():
        args = (family, predicted.plan, case.limited, steps, warmup)
        measured = run_ranks(measure, RANKS, *args, timeout_seconds=300)[0]
        row = {
            "family": family,
            "plan": case.name,
            "limited": case.limited,
            "predicted_seconds": predicted.step_seconds,
            "seconds": measured.step_seconds,
            "predicted_bytes": predicted.peak_bytes,
            "bytes": max(measured.peak_bytes),
            "peak_phase": predicted.peak_phase,
        }
        rows.append(row)
        print(line(row), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    time_error = row["predicted_seconds"] / row["seconds"] - 1
    memory_error = row["predicted_bytes"] / row["bytes"] - 1
    kept = "" if not row["limited"] else ("yes" if is_kept(row) else "NO")
    memory = f"{mib(row['predicted_bytes'])} | {mib(row['bytes'])} | {100 * memory_error:+.1f} %"
    return (
        f"| {row['family']} | {row['plan']} | {row['predicted_seconds']:.3f} | "
        f"{row['seconds']:.3f} | {100 * time_error:+.0f} % | {memory} | {kept} |"
    )


def is_kept(row: dict[str, Any]) -> bool:
    """Whether the measured bytes are within the smallest limit under which the plan could be
    chosen.
    """
    return bool(row["bytes"] <= row["predicted_bytes"] * (1 + MARGIN))


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Errors, limits and rank correlation, of plans with a limit and without one."""
    lines = []
    for limited, title in ((True, "with a limit"), (False, "without a limit")):
        chosen = [row for row in rows if row["limited"] == limited]
        if not chosen:
            continue
        for what, unit in (("seconds", "time"), ("bytes", "memory")):
            errors = np.array([row[f"predicted_{what}"] / row[what] - 1 for row in chosen])
            rank_correlation = spearman(
                [row[f"predicted_{what}"] for row in chosen], [row[what] for row in chosen]
            )
            lines.append(
                f"- {title}, {unit}: median |error| {100 * np.median(abs(errors)):.1f} %, 90th "
                f"percentile {100 * np.quantile(abs(errors), 0.9):.1f} %, median error "
                f"{100 * np.median(errors):+.1f} %, Spearman {rank_correlation:.3f}"
            )
        if limited:
            kept = sum(is_kept(row) for row in chosen)
            lines.append(f"- limits kept: {kept} of {len(chosen)}")
            within = [
                spearman([r["predicted_seconds"] for r in same], [r["seconds"] for r in same])
                for family in dict.fromkeys(row["family"] for row in chosen)
                if len(same := [row for row in chosen if row["family"] == family]) > 2
            ]
            lines.append(
                "- Spearman of the times of a family's plans: median "
                f"{np.median(within or [1.0]):.2f}"
            )
    return lines


def spearman(one: list[float], other: list[float]) -> float:
    """Correlation of ranks."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def write(rows: list[dict[str, Any]], path: Path, *, steps: int) -> None:
    """The report."""
    text = ["# Predictions on twelve other model families", "", machine(), ""]
    text += [f"- 2 gloo ranks, one thread each; median of {steps} steps", "", *summary(rows), ""]
    text += [
        "| family | plan | predicted s | measured s | error | predicted MiB | measured MiB | error "
        "| limit kept |"
    ]
    text += ["|---|---|---|---|---|---|---|---|---|", *map(line, rows)]
    path.write_text("\n".join(text) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=list(FAMILIES))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--fresh", action="store_true")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    steps, warmup = (2, 2) if options.quick else (7, 3)
    done: dict[str, Any] = (
        json.loads(STORE.read_text()) if STORE.exists() and not options.fresh else {}
    )
    for family in options.only or FAMILIES:
        key = f"{family} {steps}"
        if key not in done or options.only:
            done[key] = run_family(family, steps=steps, warmup=warmup)
            STORE.write_text(json.dumps(done, indent=1))
    rows = [row for family in FAMILIES for row in done.get(f"{family} {steps}", [])]
    print("\n".join(summary(rows)))
    write(rows, RESULTS / "strangers.md", steps=steps)


if __name__ == "__main__":
    main()
