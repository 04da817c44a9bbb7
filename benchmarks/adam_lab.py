"""Time to the dense run's final loss under AdamW, over links of 1 Gb/s, 200 and 50 Mb/s: a lab of two nodes on this machine.

    sudo python -m benchmarks.adam_lab                 # about an hour on 2 quiet cores
    sudo python -m benchmarks.adam_lab --smoke         # a few steps of everything; nothing is kept
    python -m benchmarks.adam_lab --report             # the table from what was measured

How the loss falls with the steps does not depend on the link, so each method trains once, at 1 Gb/s, until its validation loss
is that of the dense run's end (at its best learning rate of those in `METHODS`); over the slower links some steps are timed,
and the time is that of as many such steps. Results are kept in benchmarks/results/adam_lab.json one by one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import RESULTS, machine
from benchmarks.lab import Lab, end_on_signals
from benchmarks.lab_nodes import LabError

FILE = RESULTS / "adam_lab.json"
RATES = ("1gbit", "200mbit", "50mbit")
STEPS, MOST_STEPS = 200, 600
ADAM = (2.5e-4, 5e-4, 1e-3)  # the results so far lack 2.5e-4, at which dense training ends lower


@dataclass(frozen=True)
class Contender:
    """A method as a mapping (None: DDP), the learning rates to try, and steps that show its time, outer ones too."""

    method: dict[str, Any] | None
    rates: tuple[float, ...] = ADAM
    timed: int = 12


METHODS: dict[str, Contender] = {
    "dense": Contender(None, timed=6),
    "bf16": Contender({"method": "bf16"}, timed=6),
    "PowerSGD, rank 4": Contender({"method": "powersgd", "rank": 4}),
    "top-k 1 %": Contender({"method": "topk", "density": 0.01}),
    "sign": Contender({"method": "sign"}),
    "DiLoCo, 50 steps": Contender({"method": "local_steps", "every": 50}, timed=104),
    "DeMo 1 %, 2 bits": Contender({"method": "demo"}, rates=(1.25e-4, *ADAM)),
    "SparseLoCo, 15 steps": Contender({"method": "sparse_loco"}, timed=34),
    "4 bits, 8 steps": Contender(
        {"method": "quantized_steps", "outer_learning_rate": 0.7, "outer_momentum": 0.6}, timed=20
    ),
}


def run(contender: Contender, *, link: str, learning_rate: float, **options: Any) -> dict[str, Any]:
    """One job on two nodes of one rank."""
    with Lab(2, rate=link) as lab:
        return lab.run_module(
            "benchmarks.adam_lab_run",
            ranks_per_node=1,
            timeout=1800,
            method=json.dumps(contender.method),
            rate=learning_rate,
            **options,
        )


def measure(names: Sequence[str]) -> None:
    """Every run that is not kept yet."""
    target = _train("dense", float("-inf"))
    for name in names:
        _train(name, target)
        for link in RATES[1:]:
            key = f"{name}|{link}"
            if key not in load():
                contender = METHODS[name]
                keep(key, run(contender, link=link, learning_rate=contender.rates[0], steps=contender.timed, every=0))


def _train(name: str, target: float) -> float:
    """Train under a method at each of its learning rates, up to `target`; the lowest loss at the end."""
    contender, lowest = METHODS[name], float("inf")
    for rate in contender.rates:
        key = f"{name}|{RATES[0]}|{rate:g}"
        if key not in load():
            steps = STEPS if name == "dense" else MOST_STEPS
            keep(key, run(contender, link=RATES[0], learning_rate=rate, steps=steps, loss=target))
        lowest = min(lowest, load()[key]["losses"][-1][1])
    return lowest


def load() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found


def keep(key: str, result: dict[str, Any]) -> None:
    FILE.write_text(json.dumps(load() | {key: result}) + "\n")
    print(key, f"{result['steps']} steps of {result['step_seconds']:.3f} s, {result['losses'][-1:]}", flush=True)


def report(found: dict[str, Any]) -> str:
    """The table."""
    runs = {key: run for key, run in found.items() if key.count("|") == 2}
    ends = [run["losses"][-1][1] for key, run in runs.items() if key.startswith("dense|")]
    lines = [
        "# Time to the dense run's loss under AdamW, over slow links",
        "",
        machine(),
        "",
        *_introduction(runs, ends),
        "",
    ]
    lines += [
        "| method | learning rate | steps | MB per step | equal on all ranks | "
        + " | ".join(RATES)
        + " | times dense |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    dense = _seconds("dense", found, min(ends, default=0.0))
    for name in METHODS:
        best = _best(name, found, min(ends, default=0.0))
        if best is None:
            continue
        key, run_, steps = best
        seconds = _seconds(name, found, min(ends))
        times = " / ".join(f"{d / s:.1f}" if d and s else "-" for d, s in zip(dense, seconds, strict=True))
        shown = " | ".join(f"{s:.0f} s" if s else "-" for s in seconds)
        reached = f"{steps}" if steps else f"not in {run_['steps']} ({run_['losses'][-1][1]:.3f})"
        equal = {True: "yes", False: "**no**", None: "-"}[run_["equal"]]
        rate = key.split("|")[2]
        lines.append(f"| {name} | {rate} | {reached} | {run_['node_bytes'] / 1e6:.3f} | {equal} | {shown} | {times} |")
    return "\n".join([*lines, ""])


def _introduction(runs: dict[str, Any], ends: list[float]) -> list[str]:
    if not runs:
        return []
    size = next(iter(runs.values()))["parameters"]
    return [
        f"A GPT of {size / 1e6:.1f} M parameters, 4 sequences of 32 bytes per rank, two nodes of one rank. The dense run has "
        f"{STEPS} steps and ends at {min(ends, default=0):.3f} nats per byte of validation text. Seconds at 1 Gb/s: steps to "
        "that loss (mean of two validations), times the mean step; over the slower links the same steps, times their mean "
        "step. A row is the learning rate with the fewest steps.",
    ]


def _best(name: str, found: dict[str, Any], target: float) -> tuple[str, dict[str, Any], int | None] | None:
    """Key and run of the learning rate that needs the fewest steps, and these; None for steps where none gets there."""
    best: tuple[str, dict[str, Any], int | None] | None = None
    for rate in METHODS[name].rates:
        key = f"{name}|{RATES[0]}|{rate:g}"
        run_ = found.get(key)
        if run_ is None:
            continue
        last = [loss for _, loss in run_["losses"][-2:]]
        reached = name == "dense" or sum(last) / len(last) <= target
        steps = run_["steps"] if reached else None
        better = best is None or (steps or 10**9, run_["losses"][-1][1]) < (best[2] or 10**9, best[1]["losses"][-1][1])
        best = (key, run_, steps) if better else best
    return best


def _seconds(name: str, found: dict[str, Any], target: float) -> list[float | None]:
    """Seconds to the target at each rate."""
    best = _best(name, found, target)
    if best is None or best[2] is None:
        return [None] * len(RATES)
    slower = [found.get(f"{name}|{link}") for link in RATES[1:]]
    return [best[2] * run_["step_seconds"] if run_ else None for run_ in (best[1], *slower)]


def smoke(names: Sequence[str]) -> None:
    """A few steps of every method; raises where one fails or ranks differ."""
    for name in names:
        contender = METHODS[name]
        every = (contender.method or {}).get("every", 15 if "SparseLoCo" in name else 8)
        steps = every + 1 if "steps" in name and every < 50 else 5
        result = run(contender, link="1gbit", learning_rate=contender.rates[0], steps=steps, every=2, held_out=2)
        print(name, result, flush=True)
        if result["equal"] is not True:
            raise LabError(f"{name}: parameters differ between ranks")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args(arguments)
    end_on_signals()
    try:
        if options.smoke:
            smoke(options.methods)
            return
        if not options.report:
            measure(options.methods)
    except LabError as error:
        sys.exit(f"adam_lab: {error}")
    text = report(load())
    (RESULTS / "adam_lab.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
