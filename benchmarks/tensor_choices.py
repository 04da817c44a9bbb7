"""Where tensor parallelism is the right answer and where it is not: what `topt` chooses, and the
best executed plan.

    sudo python -m benchmarks.tensor_choices       # about half an hour on 4 cores; --rounds, --only

Three set-ups of each kind, on CPU ranks with one thread each: ranks of one node here, nodes of the
lab with a link between. Every plan runs once; those within 15 % of the fastest that keeps the limit
then run `--rounds` times more, in turns with the chosen plan, each time as a job of its own.
Regret: seconds of what was chosen over those of the fastest, round by round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common import RESULTS, JobFailed, machine, mib, run_script, spread
from benchmarks.lab import Lab, end_on_signals
from benchmarks.lab_nodes import LabError

MESH = '{"mesh": {"data": 2, "tensor": 2}}'
PLANS = ("ddp", "zero1", "zero3", "zero3+recompute", "tensor")


@dataclass(frozen=True)
class SetUp:
    """A `SetUp` is a model, a batch and a cluster; `limit` per rank as a share of what `limit_of`
    takes, None: no limit.
    """

    name: str
    options: dict[str, Any]
    nodes: int = 1
    ranks: int = 2
    rate: str = "1gbit"
    limit_of: str | None = None
    limit: float = 1.0
    plans: Sequence[str] = field(default=PLANS)


SET_UPS = (
    SetUp(
        "right: a layer too large for the limit",
        {"model": "mlp", "layers": 1, "width": 2048, "global-batch": 64},
        ranks=4,
        limit_of="tensor",
        limit=1.4,
        plans=(*PLANS, MESH),
    ),
    SetUp(
        "right: a batch of 1 per rank",
        {"model": "gpt", "layers": 4, "width": 768, "seq-len": 32, "global-batch": 2},
    ),
    SetUp(
        "right: fast links in a node, 1 Gb/s between",
        {"model": "gpt", "layers": 4, "width": 512, "seq-len": 32, "global-batch": 8},
        nodes=2,
        plans=("ddp", "zero1", "hybrid", MESH),
    ),
    SetUp(
        "wrong: a GPT with many tokens",
        {"model": "gpt", "layers": 6, "width": 256, "seq-len": 128, "global-batch": 16},
    ),
    SetUp("wrong: convolutions", {"model": "conv", "layers": 4, "width": 64, "global-batch": 16}),
    SetUp(
        "wrong: a GPT under a limit that sharding keeps",
        {"model": "gpt", "layers": 6, "width": 384, "seq-len": 128, "global-batch": 8},
        limit_of="zero3",
        limit=1.3,
    ),
)


def run_plan(
    set_up: SetUp, lab: Lab | None, *, plan: str | None, limit: int | None
) -> dict[str, Any] | None:
    """Run one job; None where the plan is refused."""
    options = {
        **set_up.options,
        "devices": set_up.ranks,
        "num-nodes": set_up.nodes,
        "plan": plan,
        "memory-limit": limit,
    }
    options = {key: value for key, value in options.items() if value is not None}
    try:
        if lab is None:
            return run_script("tensor_choices_run.py", **options)
        return lab.run_module(
            "benchmarks.tensor_choices_run", ranks_per_node=set_up.ranks, **options
        )
    except (JobFailed, LabError) as error:
        print(f"{set_up.name}: {plan}: {getattr(error, 'output', str(error))[-300:]}", flush=True)
        return None


def measure(set_up: SetUp, rounds: int) -> list[str]:
    """Rows of the table."""
    with Lab(set_up.nodes, rate=set_up.rate) if set_up.nodes > 1 else nullcontext() as lab:
        first = {plan: run_plan(set_up, lab, plan=plan, limit=None) for plan in set_up.plans}
        done = {plan: found for plan, found in first.items() if found is not None}
        limit = (
            None
            if set_up.limit_of is None
            else int(set_up.limit * done[set_up.limit_of]["peak_bytes"])
        )
        keeping = {plan: f for plan, f in done.items() if limit is None or f["peak_bytes"] <= limit}
        fastest = min(found["step_seconds"] for found in keeping.values())
        contenders = [
            plan for plan, found in keeping.items() if found["step_seconds"] <= 1.15 * fastest
        ]
        results: dict[str, list[dict[str, Any]]] = {plan: [] for plan in (*contenders, "topt")}
        for _ in range(rounds):
            for plan, found in results.items():
                result = run_plan(
                    set_up,
                    lab,
                    plan=None if plan == "topt" else plan,
                    limit=limit if plan == "topt" else None,
                )
                assert result is not None, f"{plan} ran once, and then no more"
                found.append(result)
    seconds = {
        plan: [result["step_seconds"] for result in found] for plan, found in results.items()
    }
    best = min(contenders, key=lambda plan: statistics.median(seconds[plan]))
    regrets = [
        chosen / other - 1 for chosen, other in zip(seconds["topt"], seconds[best], strict=True)
    ]
    others = ", ".join(
        f"{plan} {f['step_seconds']:.3f} s, {mib(f['peak_bytes'])} MiB" for plan, f in done.items()
    )
    ours = results["topt"]
    cells = (
        set_up.name,
        "-" if limit is None else f"{mib(limit)}",
        f"{ours[-1]['summary']}: {spread(seconds['topt'])} s, "
        f"{mib(max(r['peak_bytes'] for r in ours))} MiB",
        f"{best.replace('|', '')}: {spread(seconds[best])} s",
        f"{100 * statistics.median(regrets):.1f} % ({100 * min(regrets):.1f} to "
        f"{100 * max(regrets):.1f})",
        others,
    )
    print("| " + " | ".join(cells) + " |", flush=True)
    return ["| " + " | ".join(cells) + " |"]


def main() -> None:
    """Measure and write the table."""
    end_on_signals()
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only", default="", help="set-ups whose name contains this; nothing is written then"
    )
    options = parser.parse_args()
    chosen = [set_up for set_up in SET_UPS if options.only in set_up.name]
    rows = [row for set_up in chosen for row in measure(set_up, options.rounds)]
    lines = [
        "# What is chosen where tensor parallelism could be",
        "",
        f"`sudo python -m benchmarks.tensor_choices --rounds {options.rounds}`",
        "",
        machine(),
        "",
        "One thread per rank. Regret: chosen plan over fastest executed one that keeps the limit, "
        "median (range) of the",
        "rounds. The global batch is the same for all plans of a set-up. A plan that is given with "
        "its tensor axis gets one",
        "batch for the ranks of a tensor group; what is chosen without one keeps a batch for every "
        "rank, as ddp has it, and so",
        "every logged value and every loss: the ranks of a group then run them in joint modules, "
        "or in turns (microbatches).",
        "",
        "| set-up | limit, MiB | chosen | fastest executed | regret | each plan once |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    if not options.only:
        (RESULTS / "tensor_choices.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        sys.exit(str(error))
