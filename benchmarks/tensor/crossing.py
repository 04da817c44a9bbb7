"""One tensor axis against three, on both sides of where their bytes cross.

    # about 20 minutes at each rate; --rounds, --rates 1gbit 250mbit
    sudo python -m benchmarks.tensor.crossing

Eight nodes of one rank are joined by slow links. A Transformer layer of width h moves, for T tokens
and on each of P = q^3 ranks, 8 (P - 1) / P T h elements on one axis. On a cube it moves
2 (q - 1) / q^3 (16 T h + 12 h^2) (arXiv 2105.14450), gathering operands once more in backward. At
P = 8 the cube moves less for h < T. Rounds are interleaved; each is a job of its own. The search
prices both plans, on links and kernels measured in the lab: what it expects to be faster is what it
would choose.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks.common import RESULTS, machine, spread
from benchmarks.lab import Lab, LabError, end_on_signals

NODES = 8
PLANS = ("tensor", "tensor_3d")
# Tokens of a step, width, and the options that make them.
CASES: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (4096, 128, {"width": 128, "seq-len": 64, "global-batch": 64}),
    (2048, 256, {"width": 256, "seq-len": 128, "global-batch": 16}),
    (256, 1024, {"width": 1024, "seq-len": 32, "global-batch": 8}),
)
RUN = "benchmarks.tensor.choices"
COMMON: dict[str, Any] = {
    "model": "gpt",
    "layers": 2,
    "devices": 1,
    "num-nodes": NODES,
    "steps": 8,
    "warmup": 3,
}


def row(lab: Lab, rate: str, case: tuple[int, int, dict[str, Any]], rounds: int) -> str:
    """Run one case by each plan, alternating, and return its line of the table."""
    tokens, width, given = case
    found: dict[str, list[dict[str, Any]]] = {plan: [] for plan in PLANS}
    for _ in range(rounds):
        for plan, results in found.items():
            results.append(
                lab.run_module(RUN, "--worker", ranks_per_node=1, **COMMON, **given, plan=plan)
            )
    seconds = {
        plan: [result["step_seconds"] for result in results] for plan, results in found.items()
    }
    ratios = [
        cube / axis for axis, cube in zip(seconds["tensor"], seconds["tensor_3d"], strict=True)
    ]
    expected = {plan: results[-1]["predicted_seconds"] for plan, results in found.items()}
    by_formula = (16 * tokens * width + 12 * width**2) / 4 / (7 * tokens * width)
    return (
        f"| {rate} | {tokens} | {width} | {by_formula:.2f} | {spread(seconds['tensor'])} | "
        f"{spread(seconds['tensor_3d'])} | {spread(ratios)} | {expected['tensor']:.3f} | "
        f"{expected['tensor_3d']:.3f} | {min(expected, key=lambda plan: expected[plan])} |"
    )


def main() -> None:
    """Measure and write the table."""
    end_on_signals()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "250mbit"])
    options = parser.parse_args()
    rows = []
    for rate in options.rates:
        with Lab(NODES, rate=rate) as lab:
            for case in CASES:
                rows.append(row(lab, rate, case, options.rounds))
                print(rows[-1], flush=True)
    lines = [
        "# One tensor axis and three",
        "",
        f"`sudo python -m benchmarks.tensor.crossing --rounds {options.rounds} --rates "
        f"{' '.join(options.rates)}`",
        "",
        machine(),
        "",
        "GPT of 2 layers on 8 nodes of one rank, one thread each. Seconds per step: median "
        "(range).",
        "",
        "| link | tokens T | width h | bytes by formula, cube / axis | one axis | cube | cube / "
        "axis | one axis, expected | cube, expected | expected to be faster |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *rows,
    ]
    (RESULTS / "tensor_crossing.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        sys.exit(str(error))
