"""The tables and the figure of `benchmarks.adam_compression`, from what it measured."""

from __future__ import annotations

import math
import statistics
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.adam_simulator import Model
from benchmarks.common import RESULTS, machine


def report(found: dict[str, dict[str, Any]]) -> None:
    """Write tables and figure of all runs so far."""
    lines = ["# Compression under AdamW", "", machine(), "", _introduction(), ""]
    if found["runs"]:
        lines += [*_runs(found), "", "![loss against traffic](adam_compression.png)", ""]
        _figure(found["runs"])
    if found["lengths"]:
        lines += [
            "## Shorter trainings, at the learning rates of long ones",
            "",
            *_lengths(found["lengths"]),
            "",
        ]
    for kind, title in (("tuning", "Learning rates"), ("trials", "Short trials")):
        lines += [f"## {title}, one seed", "", *_rates(found[kind]), ""]
    (RESULTS / "adam_compression.md").write_text("\n".join(lines))
    print("\n".join(lines))


def _introduction() -> str:
    model = Model()
    return (
        f"A byte-level GPT of {model.numel} parameters ({model.layers} layers, hidden "
        f"{model.hidden}), AdamW, 8 sequences of {model.seq_len} bytes in all per step, 5 seeds: "
        "bits per byte on validation text. Ranks are simulated (each has its own samples and its "
        "own gradient). Traffic: bytes sent by a rank, as a share of what float32 all-reduces in "
        "every step send. Each method at its best learning rate of those below, after equally many "
        "steps; a star: at another, of short trials."
    )


def _runs(found: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "| method | ranks | traffic | steps | learning rate | median | best | worst | within the "
        "dense spread |",
        "|---" * 9 + "|",
    ]
    dense = found["runs"].get("dense|1")
    worst_dense = max(dense["curve"][-1][1]) if dense else float("nan")
    for key, run in sorted(
        found["runs"].items(), key=lambda item: (_ranks(item[0]), item[1]["traffic"])
    ):
        steps, finals = run["curve"][-1]
        name, rate = key.split("|")[0], run["rates"][0]
        held = (
            "-"
            if name == "dense"
            else "yes"
            if statistics.median(finals) <= worst_dense
            else "**no**"
        )
        star = "" if rate == best_rate(found["tuning"], key) else "*"
        lines.append(
            f"| {name} | {_shown_ranks(key)} | {run['traffic']:.2%} | {steps} | {rate:g}{star} | "
            f"{statistics.median(finals):.4f} | {min(finals):.4f} | {max(finals):.4f} | {held} |"
        )
    return lines


def _lengths(found: dict[str, Any]) -> list[str]:
    lines = ["| steps | method | ranks | median | best | worst |", "|---" * 6 + "|"]
    for key, run in sorted(found.items(), key=lambda item: item[1]["curve"][-1][0]):
        steps, finals = run["curve"][-1]
        shown = f"{statistics.median(finals):.4f} | {min(finals):.4f} | {max(finals):.4f}"
        lines.append(f"| {steps} | {key.split('|')[0]} | {_shown_ranks(key)} | {shown} |")
    return lines


def best_rate(tuning: dict[str, Any], key: str) -> float | None:
    """The learning rate that ended lowest, on average where several seeds were: with so many ranks,
    or any where only one number was tried; None where none was.
    """
    tuned = tuning.get(key) or next(
        (run for other, run in tuning.items() if other.startswith(key.split("|")[0] + "|")), None
    )
    means = mean_by_rate(tuned) if tuned else {}
    return min(
        means,
        key=lambda rate: means[rate] if means[rate] == means[rate] else math.inf,
        default=None,
    )


def _rates(tuned: dict[str, Any]) -> list[str]:
    """A row for each method and number of ranks."""
    lines = ["| method | ranks | traffic | steps | learning rate: bits |", "|---|---|---|---|---|"]
    for key, run in tuned.items():
        steps = run["curve"][-1][0]
        seeds = {rate: run["rates"].count(rate) for rate in run["rates"]}
        each = ", ".join(
            f"{rate:g}: {mean:.3f}" + (f" (mean of {seeds[rate]})" if seeds[rate] > 1 else "")
            for rate, mean in mean_by_rate(run).items()
        )
        lines.append(
            f"| {key.split('|')[0]} | {_shown_ranks(key)} | {run['traffic']:.2%} | {steps} | "
            f"{each} |"
        )
    return lines


def mean_by_rate(run: dict[str, Any]) -> dict[float, float]:
    """Bits per byte at the end, by learning rate, the mean over its seeds."""
    finals = list(zip(run["rates"], run["curve"][-1][1], strict=True))
    return {
        rate: statistics.mean(bits for r, bits in finals if r == rate)
        for rate in sorted(set(run["rates"]))
    }


def _shown_ranks(key: str) -> str:
    return "any" if _ranks(key) == 1 else str(_ranks(key))


def _ranks(key: str) -> int:
    return int(key.split("|")[1])


def _figure(runs: dict[str, Any]) -> None:
    counts = sorted({_ranks(key) for key in runs} - {1}) or [4]
    figure, axes = plt.subplots(
        1, len(counts), figsize=(6 * len(counts), 5), sharey=True, squeeze=False
    )
    names = list(dict.fromkeys(key.split("|")[0] for key in runs if key != "dense|1"))
    for axis, count in zip(axes[0], counts, strict=True):
        if "dense|1" in runs:
            finals = runs["dense|1"]["curve"][-1][1]
            axis.axhspan(min(finals), max(finals), color="0.85", label="dense")
        for number, name in enumerate(names):
            run = runs.get(f"{name}|{count}")
            if run:
                finals = run["curve"][-1][1]
                middle = statistics.median(finals)
                error = [[middle - min(finals)], [max(finals) - middle]]
                style = {"color": f"C{number % 10}", "marker": "os^v"[number // 10], "label": name}
                axis.errorbar(run["traffic"], middle, yerr=error, linestyle="", **style)
        axis.axvline(0.03, color="0.6", linestyle=":")
        axis.set(
            xscale="log", title=f"{count} ranks", xlabel="traffic / dense", ylabel="bits per byte"
        )
    axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(RESULTS / "adam_compression.png", dpi=110)
