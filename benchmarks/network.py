"""Step time, bytes and time to a loss of gradient exchanges over slow links: a lab of two nodes on this machine.

    sudo python -m benchmarks.network                  # about 40 minutes on 2 cores
    sudo python -m benchmarks.network --only "1x 1gbit gpt" --rounds 5
    python -m benchmarks.network --report              # the tables from what was measured

Set-ups are measured one after the other and kept in benchmarks/results/network.json; in each, all methods run in one job,
interleaved round by round. A round's figure is the median over its steps of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, machine
from benchmarks.lab import Lab, LabError

FILE = RESULTS / "network.json"
RATES = {"1gbit": 1e9 / 8, "200mbit": 2e8 / 8}  # bytes per second
SETUPS = {
    f"{ranks}x {rate} {model}": (ranks, rate, model) for ranks in (1, 2) for rate in RATES for model in ("gpt", "cnn")
}
DISTURBED = {"10 % of the link taken": {"flow": 0.1}, "rank 1 late by 0.2 s in every step": {"straggler": 1}}
TO_LOSS = [
    "DDP, dense",
    "torch fp16 hook",
    "torch PowerSGD, rank 4",
    "ours, PowerSGD, rank 2",
    "ours, flat top-k, 1 %",
    "ours, flat top-k, 0.1 %",
]
LOSS = 2.9  # nats per byte


def run_job(ranks: int, rate: str, *arguments: str, flow: float = 0.0, timeout: float = 1500) -> dict[str, Any]:
    """One job in a lab of two nodes."""
    with tempfile.TemporaryDirectory() as folder, Lab(2, rate=rate) as lab:
        out = Path(folder) / "result.json"
        if flow:
            lab.add_flow(0, 1, bytes_per_second=flow * RATES[rate])
        command = ["-m", "benchmarks.network_run", "--nodes", "2", "--out", str(out), *arguments]
        lab.run(command, ranks_per_node=ranks, timeout=timeout)
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def measure(options: argparse.Namespace) -> None:
    """Everything that `options.only` names, kept one by one."""
    jobs: dict[str, tuple[int, str, list[str], dict[str, Any]]] = {}
    for name, (ranks, rate, model) in SETUPS.items():
        jobs[name] = ranks, rate, ["--model", model, "--rounds", str(options.rounds)], {}
    for name, disturbance in DISTURBED.items():
        for ranks in (1, 2):
            method = "hierarchical, 1 %" if ranks == 2 else "flat top-k, 1 %"
            arguments = ["--rounds", "2", "--methods", method]
            if "straggler" in disturbance:
                arguments += ["--straggler", "1"]
            jobs[f"{ranks}x 1gbit, {name}"] = ranks, "1gbit", arguments, {"flow": disturbance.get("flow", 0.0)}
        jobs["1x 1gbit, undisturbed"] = 1, "1gbit", ["--rounds", "2", "--methods", "flat top-k, 1 %"], {}
        jobs["2x 1gbit, undisturbed"] = 2, "1gbit", ["--rounds", "2", "--methods", "hierarchical, 1 %"], {}
    for method in TO_LOSS:
        jobs[f"to loss: {method}"] = 1, "1gbit", ["--methods", method, "--loss", str(LOSS)], {}
    for name, (ranks, rate, arguments, more) in jobs.items():
        if options.only and not any(part in name for part in options.only):
            continue
        print(name, flush=True)
        done = load()
        done[name] = run_job(ranks, rate, *arguments, **more)
        FILE.write_text(json.dumps(done, indent=1) + "\n")


def load() -> dict[str, Any]:
    results: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return results


def report() -> str:
    """All tables."""
    done = load()
    lines = ["# Gradient exchange over slow links", "", machine(), ""]
    lines += [
        "Two nodes (network namespaces) whose links pass a token bucket; gloo; one thread per rank; SGD. `k x`: ranks a node;",
        "with 2 x 2 ranks four processes share two cores. GPT: 8 blocks of width 512, 64 bytes per rank; CNN:",
        "convolutions of 512 channels, 4 images per rank. Bytes left node 0 per step, counted at its interface; in",
        "brackets our own count of the payload. Ratios are of medians over the rounds (lowest to highest round in ms).",
    ]
    for name in SETUPS:
        if name in done:
            lines += ["", f"## {name}", "", *_table(done[name])]
    lines += ["", "## Disturbed", "", "| set-up | step ms | parameters |", "|---|---|---|"]
    for ranks in (1, 2):
        calm = done.get(f"{ranks}x 1gbit, undisturbed")
        for name in ("undisturbed", *DISTURBED):
            result = done.get(f"{ranks}x 1gbit, {name}")
            if result and calm:
                lines.append(_disturbed_row(f"{ranks}x 1gbit, {name}", result, calm))
    lines += ["", f"## Time to a training loss of {LOSS} nats per byte (1x 1gbit, GPT, AdamW)", ""]
    lines += ["| method | seconds | steps | loss reached |", "|---|---|---|---|"]
    for method in TO_LOSS:
        if result := done.get(f"to loss: {method}"):
            reached = f"{result['loss']:.3f}" + ("" if result["reached"] else " (not reached)")
            lines.append(f"| {method} | {result['seconds']:.1f} | {result['steps']} | {reached} |")
    return "\n".join(lines) + "\n"


def _table(result: dict[str, Any]) -> list[str]:
    median = {name: statistics.median(values) for name, values in result["seconds"].items()}
    dense = median["DDP, dense"]
    rows = [f"{result['parameters'] / 1e6:.1f} M parameters", ""]
    rows += ["| method | step ms | times dense | MB per step | equal on all ranks |", "|---|---|---|---|---|"]
    for name, values in result["seconds"].items():
        counted = statistics.median(result["node_bytes"][name]) / 1e6
        own = result["formula_bytes"].get(name)
        size = f"{counted:.2f}" + (f" ({own / 1e6:.2f})" if own is not None else "")
        spread = f"{1e3 * median[name]:.0f} ({1e3 * min(values):.0f} to {1e3 * max(values):.0f})"
        rows.append(f"| {name} | {spread} | {dense / median[name]:.2f} | {size} | {_yes(result['equal'][name])} |")
    return rows


def _disturbed_row(name: str, result: dict[str, Any], calm: dict[str, Any]) -> str:
    (method, values), *_ = result["seconds"].items()
    same = result["checksum"][method] == calm["checksum"][method]
    words = "equal on all ranks" if result["equal"][method] else "**differ between ranks**"
    words += ", bit for bit as undisturbed" if same else ", **not as undisturbed**"
    return f"| {name} ({method}) | {1e3 * statistics.median(values):.0f} | {words} |"


def _yes(value: bool) -> str:
    return "yes" if value else "**no**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="parts of the set-ups' names")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    if not options.report:
        try:
            measure(options)
        except LabError as error:
            sys.exit(f"network: {error}")
    text = report()
    (RESULTS / "network.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
