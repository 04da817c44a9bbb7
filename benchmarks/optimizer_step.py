"""Step time of the parallel optimizer step against the plain step, ZeroRedundancyOptimizer and
FSDP2.

    python -m benchmarks.optimizer_step            # all optimizers, 100 M parameters, 2 ranks
    python -m benchmarks.optimizer_step --only Muon --rounds 9
    python -m benchmarks.optimizer_step --quick    # small sizes, two rounds; printed, not kept
    python -m benchmarks.optimizer_step --report   # the tables from what was measured

Forward and backward of the model cost next to nothing, so that a step is the exchange of gradients
and the update. All methods of one optimizer run in one job and take turns, round by round, in an
order that is reversed every second round.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, machine, mib, spread
from benchmarks.optimizer_models import Shapes, count, gpt_shapes, square_shapes
from benchmarks.optimizer_ours import SETTLING_STEPS
from benchmarks.optimizer_step_run import METHODS, PLAIN, ZERO, launch

FILE = RESULTS / "optimizer_step.json"
RANKS = 2
GPT = (640, 16, 32_000)  # width, depth, vocabulary
# width, number: singular values of the perceptrons' sides would take minutes per step
SQUARE = (512, 64)
SHAMPOO = ("Shampoo", "SOAP")
STEPS = {
    "AdamW, fused": 3,
    "AdamW": 2,
    "LAMB": 2,
    "Muon": 1,
    "Shampoo": 1,
    "SOAP": 10,
}  # SOAP: bases are renewed every 10
TITLE = "# Step time of the parallel optimizer step and its peers"


def shapes_of(optimizer: str, *, quick: bool) -> Shapes:
    """What it is measured on."""
    if optimizer in SHAMPOO:
        return square_shapes(*((64, 8) if quick else SQUARE))
    return gpt_shapes(*((128, 2, 1000) if quick else GPT))


def run(optimizer: str, *, rounds: int, quick: bool, methods: Sequence[str]) -> dict[str, Any]:
    """Everything measured with one optimizer."""
    shapes = shapes_of(optimizer, quick=quick)
    steps = 1 if quick else STEPS[optimizer]
    options = {"optimizer": optimizer, "shapes": shapes, "rounds": rounds, "steps": steps}
    options |= {"methods": list(methods), "warmup": SETTLING_STEPS + 1}
    return launch(options, ranks=RANKS, timeout=3600) | {
        "parameters": count(shapes),
        "per_turn": steps,
    }


def ratios(result: dict[str, Any], over: str, under: str) -> list[float]:
    """Of whole steps, round by round."""
    pairs = zip(result["seconds"][over], result["seconds"][under], strict=True)
    return [one[0] / other[0] for one, other in pairs]


def row(result: dict[str, Any], name: str) -> str:
    """A method's line of its table."""
    rounds = result["seconds"][name]
    whole, update = ([1e3 * pair[part] for pair in rounds] for part in (0, 1))
    cells = [name, spread(whole, 0), spread(update, 0)]
    for reference in (PLAIN, ZERO):
        known = reference in result["seconds"] and name != reference
        cells.append(spread(ratios(result, reference, name), 2) if known else "")
    difference = result["difference"].get(name)
    cells += [mib(result["state_bytes"][name]), "" if difference is None else f"{difference:.1e}"]
    return "| " + " | ".join(cells) + " |"


def table(optimizer: str, result: dict[str, Any]) -> list[str]:
    """The section of one optimizer."""
    lines = [
        f"## {optimizer}: {result['parameters'] / 1e6:.1f} M parameters",
        "",
        f"| | step, ms | of it the update, ms | {PLAIN} / it | {ZERO} / it | state MiB per rank | "
        "largest difference |",
        "|---|---|---|---|---|---|---|",
        *(row(result, name) for name in METHODS if name in result["seconds"]),
        "",
        f"{len(result['seconds'][PLAIN])} rounds of {result['per_turn']} steps.",
    ]
    lines += [f"- {name}: {note}" for name, notes in result["notes"].items() for note in notes]
    lines += [f"- {name} cannot: {error[:300]}" for name, error in result["errors"].items()]
    return [*lines, ""]


def report(results: dict[str, dict[str, Any]], where: str) -> str:
    """The page."""
    width, depth, vocabulary = GPT
    lines = [
        TITLE,
        "",
        where,
        "",
        f"`python -m benchmarks.optimizer_step`: {RANKS} ranks on this machine, one thread each, "
        "gloo, float32. Step: backward with the exchange of gradients, and the update, on the "
        "slowest rank; forward and backward compute nothing. Median (range) of interleaved rounds; "
        "ratios are of the same round.",
        "",
        f"Parameters of a language model: {depth} blocks of width {width}, vocabulary "
        f"{vocabulary}. Muon has the blocks' matrices, fused AdamW the rest. "
        f"{' and '.join(SHAMPOO)} (of pytorch-optimizer) have {SQUARE[1]} matrices of {SQUARE[0]} "
        f"x {SQUARE[0]}: the roots for the sides of 2560 would take minutes per step. Shampoo "
        "renews its roots in every step, SOAP its bases in every 10th.",
        "",
        f"{ZERO}: `parameters_as_bucket_view=True` and the same optimizer; its overlap with DDP "
        "does not run on gloo. FSDP2: `fully_shard` of every block and the whole with "
        "`reshard_after_forward=False`, torch's own collectives; its step has the gathering of "
        "parameters before forward in it. The plain step and ours run under "
        "DistributedDataParallel with `gradient_as_bucket_view=True`. The largest difference is of "
        "any parameter from the plain step's after the same steps, relative to that parameter's "
        "largest value.",
        "",
    ]
    for optimizer, result in results.items():
        lines += table(optimizer, result)
    return "\n".join(lines)


def load(file: Path) -> dict[str, Any]:
    """What was measured, by optimizer."""
    known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return known


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=tuple(STEPS), default=tuple(STEPS))
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=METHODS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args(arguments)
    if PLAIN not in options.methods:
        parser.error(f"--methods needs {PLAIN}: the others are compared with it")
    results = {} if options.quick else load(FILE)
    for optimizer in () if options.report else options.only:
        print(optimizer, flush=True)
        rounds = 2 if options.quick else options.rounds
        results[optimizer] = run(
            optimizer, rounds=rounds, quick=options.quick, methods=options.methods
        )
        if not options.quick:
            FILE.write_text(json.dumps(results, indent=1) + "\n")
    text = report(results, machine())
    if not options.quick:
        (RESULTS / "optimizer_step.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
