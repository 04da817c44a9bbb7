"""Time to the dense run's final loss under AdamW, over links of 1 Gb/s, 200 and 50 Mb/s: a lab of
two nodes on this machine.

    sudo python -m benchmarks.adam_lab           # 90 minutes; the second half wants 2 quiet cores
    sudo python -m benchmarks.adam_lab --train   # the first half alone, in which nothing is timed
    sudo python -m benchmarks.adam_lab --smoke   # a few steps of everything; nothing is kept
    python -m benchmarks.adam_lab --report       # the table from what was measured

How the loss falls with the steps does not depend on the link, so each method trains once at each of
its learning rates, on a link without a limit, until its validation loss is that of the dense run's
end; then some of its steps are timed over every link, all methods in turn, and the time is that of
as many such steps. Results are kept in benchmarks/results/adam_lab.json one by one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import RESULTS, machine
from benchmarks.lab import Lab, end_on_signals
from benchmarks.lab_nodes import LabError

FILE = RESULTS / "adam_lab.json"
# of timed steps; over 50 Mb/s the link alone decides, within 1 %
ROUNDS = {"1gbit": 5, "200mbit": 5, "50mbit": 2}
STEPS, MOST_STEPS = 200, 400
ADAM = (6.25e-5, 1.25e-4, 2.5e-4)
HIGH = (*ADAM[1:], 5e-4)
RATES = (3.125e-5, *ADAM, 5e-4)


@dataclass(frozen=True)
class Contender:
    """A method as a mapping (None: DDP), steps that show its time, outer ones too, and the learning
    rates to try.
    """

    method: dict[str, Any] | None
    timed: int = 12
    rates: tuple[float, ...] = ADAM


METHODS: dict[str, Contender] = {
    "dense": Contender(None, timed=5, rates=RATES[1:]),
    "bf16": Contender({"method": "bf16"}, timed=5),
    "PowerSGD, rank 4": Contender({"method": "powersgd", "rank": 4}),
    "PowerSGD, rank 16": Contender({"method": "powersgd", "rank": 16}),
    "top-k 1 %": Contender({"method": "topk", "density": 0.01}),
    "top-k 8 %, 2 bits": Contender({"method": "topk", "density": None, "bits": 2}, rates=RATES[:4]),
    "sign": Contender({"method": "sign"}),
    "DiLoCo, 50 steps": Contender(
        {"method": "local_steps", "every": 50}, timed=53, rates=RATES[:4]
    ),
    "DeMo 1 %, 2 bits": Contender({"method": "demo"}),
    "SparseLoCo, 15 steps": Contender({"method": "sparse_loco"}, timed=33, rates=HIGH),
    "SparseLoCo, 5 steps, 10 %": Contender(
        {"method": "sparse_loco", "every": 5, "density": 0.1}, timed=18, rates=HIGH
    ),
    "SparseLoCo, 5 steps, 10 %, decay 0.8": Contender(
        {"method": "sparse_loco", "every": 5, "density": 0.1, "residual_decay": 0.8},
        timed=18,
        rates=HIGH,
    ),
    "4 bits, 8 steps": Contender(
        {"method": "quantized_steps", "outer_learning_rate": 0.7, "outer_momentum": 0.6}, timed=19
    ),
}


def run(
    contender: Contender, *, link: str | None, learning_rate: float, **options: Any
) -> dict[str, Any]:
    """One job on two nodes of one rank."""
    with Lab(2, rate=link) as lab:
        return lab.run_module(
            "benchmarks.adam_lab_run",
            ranks_per_node=1,
            timeout=7200,
            method=json.dumps(contender.method),
            rate=learning_rate,
            **options,
        )


def train(names: Sequence[str]) -> None:
    """Every training that is not kept yet."""
    target = min(
        _trained("dense", rate, STEPS, float("-inf"))["losses"][-1][1]
        for rate in METHODS["dense"].rates
    )
    for name in names:
        for rate in METHODS[name].rates:
            _trained(name, rate, MOST_STEPS, target)


def _trained(name: str, rate: float, steps: int, target: float) -> dict[str, Any]:
    key = f"{name}|{rate:g}"
    kept = load()
    if key not in kept["trainings"]:
        result = run(METHODS[name], link=None, learning_rate=rate, steps=steps, loss=target)
        del result["step_seconds"]  # of a link without a limit, perhaps beside other work
        kept["trainings"][key] = result
        keep(kept)
        print(key, f"{result['steps']} steps, {result['losses'][-1:]}", flush=True)
    found: dict[str, Any] = kept["trainings"][key]
    return found


def measure(names: Sequence[str]) -> None:
    """Every round of timed steps that is not kept yet, all methods in turn."""
    for link, rounds in ROUNDS.items():
        for number in range(rounds):
            for name in names:
                kept = load()
                seconds = kept["seconds"].setdefault(link, {}).setdefault(name, [])
                if len(seconds) <= number:
                    contender = METHODS[name]
                    result = run(
                        contender, link=link, learning_rate=ADAM[0], steps=contender.timed, every=0
                    )
                    seconds.append(result["step_seconds"])
                    kept["bytes"][name] = result["node_bytes"]
                    keep(kept)
                    print(link, name, f"{seconds[-1]:.3f} s", flush=True)


def load() -> dict[str, Any]:
    found: dict[str, Any] = {"trainings": {}, "seconds": {}, "bytes": {}}
    return found | (json.loads(FILE.read_text()) if FILE.exists() else {})


def keep(results: dict[str, Any]) -> None:
    FILE.write_text(json.dumps(results) + "\n")


def report(found: dict[str, Any]) -> str:
    """The table."""
    ends = [
        run["losses"][-1][1] for key, run in found["trainings"].items() if key.startswith("dense|")
    ]
    lines = ["# Time to the dense run's loss under AdamW, over slow links", "", machine(), ""]
    if not ends:
        return "\n".join(lines)
    lines += [*_introduction(found, min(ends)), ""]
    links = " | ".join(ROUNDS)
    lines += [
        f"| method | learning rate | steps | MB per step | equal on all ranks | {links} | times "
        "dense |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    dense = _seconds("dense", found, min(ends))
    for name in METHODS:
        best = _best(name, found, min(ends))
        if best is None:
            continue
        key, training, steps = best
        seconds = _seconds(name, found, min(ends))
        times = " / ".join(
            f"{d[0] / s[0]:.1f}" if d and s else "-" for d, s in zip(dense, seconds, strict=True)
        )
        shown = " | ".join(
            f"{s[0]:.0f} s ({s[1]:.0f} to {s[2]:.0f})" if s else "-" for s in seconds
        )
        reached = (
            f"{steps}" if steps else f"not in {training['steps']} ({training['losses'][-1][1]:.3f})"
        )
        equal = {True: "yes", False: "**no**", None: "-"}[training["equal"]]
        size = f"{found['bytes'][name] / 1e6:.3f}" if name in found["bytes"] else "-"
        lines.append(
            f"| {name} | {key.split('|')[1]} | {reached} | {size} | {equal} | {shown} | {times} |"
        )
    return "\n".join([*lines, "", *_all_rates(found, min(ends)), ""])


def _introduction(found: dict[str, Any], target: float) -> list[str]:
    size = next(iter(found["trainings"].values()))["parameters"]
    rounds = ", ".join(f"at least {number} over {link}" for link, number in ROUNDS.items())
    return [
        f"A GPT of {size / 1e6:.1f} M parameters, 4 sequences of 32 bytes per rank, two nodes of "
        f"one rank. The dense run has {STEPS} steps and ends at {target:.3f} nats per byte of "
        "validation text. Seconds: steps to that loss (mean of two validations), times the step's "
        f"time over that link, median (range) of interleaved rounds ({rounds}). A row is the "
        "learning rate with the fewest steps.",
    ]


def _all_rates(found: dict[str, Any], target: float) -> list[str]:
    """The steps at each learning rate."""
    lines = [
        "Steps at each learning rate; in brackets the loss at the end where the target was not "
        "reached:",
        "",
        "| method | " + " | ".join(f"{rate:g}" for rate in RATES) + " |",
        "|---|" + "---|" * len(RATES),
    ]
    for name in METHODS:
        trainings = [found["trainings"].get(f"{name}|{rate:g}") for rate in RATES]
        cells = [
            "-"
            if training is None
            else str(training["steps"])
            if name != "dense" and _reaches(training, target)
            else f"{training['steps']} ({training['losses'][-1][1]:.3f})"
            for training in trainings
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _reaches(training: dict[str, Any], target: float) -> bool:
    return bool(statistics.mean(loss for _, loss in training["losses"][-2:]) <= target)


def _best(
    name: str, found: dict[str, Any], target: float
) -> tuple[str, dict[str, Any], int | None] | None:
    """Key and training of the learning rate that needs the fewest steps, and these; None for steps
    where none gets there.
    """
    best: tuple[tuple[float, float], str, dict[str, Any], int | None] | None = None
    for rate in METHODS[name].rates:
        key = f"{name}|{rate:g}"
        training = found["trainings"].get(key)
        if training is None:
            continue
        steps = training["steps"] if name == "dense" or _reaches(training, target) else None
        order = (steps or float("inf"), training["losses"][-1][1])
        if best is None or order < best[0]:
            best = (order, key, training, steps)
    return best and best[1:]


def _seconds(
    name: str, found: dict[str, Any], target: float
) -> list[tuple[float, float, float] | None]:
    """Seconds to the target over each link: median, lowest, highest."""
    best = _best(name, found, target)
    steps = best and best[2]
    rounds = [found["seconds"].get(link, {}).get(name) for link in ROUNDS]
    return [
        (statistics.median(taken) * steps, min(taken) * steps, max(taken) * steps)
        if steps and taken
        else None
        for taken in rounds
    ]


def smoke(names: Sequence[str]) -> None:
    """A few steps of every method; raises where one fails or ranks differ."""
    for name in names:
        contender = METHODS[name]
        every = (contender.method or {}).get("every", 15 if "SparseLoCo" in name else 8)
        steps = every + 1 if "steps" in name and every < 50 else 5
        result = run(
            contender, link="1gbit", learning_rate=ADAM[0], steps=steps, every=2, held_out=2
        )
        print(name, result, flush=True)
        if result["equal"] is not True:
            raise LabError(f"{name}: parameters differ between ranks")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--train", action="store_true", help="nothing is timed")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args(arguments)
    end_on_signals()
    try:
        if options.smoke:
            smoke(options.methods)
            return
        if not options.report:
            train(options.methods)
        if not options.report and not options.train:
            measure(options.methods)
    except LabError as error:
        sys.exit(f"adam_lab: {error}")
    text = report(load())
    (RESULTS / "adam_lab.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
