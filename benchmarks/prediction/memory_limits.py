"""Lower the memory limit step by step: the chosen plan, its predicted and its real cost.

    python -m benchmarks.prediction.memory_limits       # table; about 10 minutes on 2 cores
    # and the kernel enforces the limits
    sudo python -m benchmarks.prediction.memory_limits --cgroup

A GPT of 50 M parameters on two CPU ranks with one thread each. Memory is resident anonymous bytes
of a rank above those of the idle rank (see `lightning_topt.execution.memory`).
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.common import RESULTS, JobFailed, machine, mib, run_gpt

LIMITS_MIB = (1400, 1150, 950, 850, 650, 600)


def row(limit: int, result: dict[str, Any]) -> str:
    predicted = result["plan"]["predicted"]
    time_error = predicted["step_seconds"] / result["step_seconds"] - 1
    memory_error = predicted["peak_bytes"] / result["peak_bytes"] - 1
    kept = "yes" if result["peak_bytes"] <= limit * 2**20 else "NO"
    return (
        f"| {limit} | {result['summary']} | {predicted['step_seconds']:.2f} | "
        f"{result['step_seconds']:.2f} | {100 * time_error:+.1f} % | "
        f"{mib(predicted['peak_bytes'])} | {mib(result['peak_bytes'])} | {100 * memory_error:+.1f} "
        f"% | {kept} |"
    )


def sweep(steps: int) -> tuple[list[str], list[tuple[int, dict[str, Any]]]]:
    lines = [
        "| limit MiB | plan | predicted s | measured s | error | predicted MiB | measured MiB | "
        "error | limit kept |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    results = []
    for limit in LIMITS_MIB:
        result = run_gpt(memory_limit=f"{limit}MiB", steps=steps)
        results.append((limit, result))
        lines.append(row(limit, result))
        print(lines[-1], flush=True)
    return lines, results


def enforce(results: list[tuple[int, dict[str, Any]]], steps: int) -> list[str]:
    """Each rank in a cgroup of (idle rank + limit): does the chosen plan live, does plain DDP?"""
    lines = [
        "| limit MiB | cgroup per rank MiB | chosen plan | Lightning ddp |",
        "|---|---|---|---|",
    ]
    for limit, result in results[2::2]:
        size = result["base_bytes"] + limit * 2**20
        outcomes = []
        for options in ({"strategy": "topt", "memory_limit": f"{limit}MiB"}, {"strategy": "ddp"}):
            try:
                run_gpt(cgroup=size, steps=steps, **options)
                outcomes.append(f"{steps} steps")
            except JobFailed as error:
                outcomes.append(f"killed after {error.steps} steps ({error})")
        lines.append(f"| {limit} | {mib(size)} | {outcomes[0]} | {outcomes[1]} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--cgroup", action="store_true", help="enforce the limits by cgroups too (needs root)"
    )
    options = parser.parse_args()
    lines, results = sweep(options.steps)
    parameters = results[0][1]["parameters"] / 1e6
    text = ["# Memory limits: chosen plans, predicted and measured", "", machine(), ""]
    text += [
        f"- GPT of {parameters:.1f} M parameters, 2 ranks, 4 sequences of 256 bytes per rank, "
        "AdamW (fused)",
        "",
    ]
    text += lines
    if options.cgroup:
        text += ["", "## Enforced by cgroups", "", *enforce(results, options.steps)]
    (RESULTS / "memory_limits.md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
