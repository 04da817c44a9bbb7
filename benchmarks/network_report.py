"""The tables of `benchmarks.network`, from what it measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.exchange_methods import ALONE, DENSE, DENSITIES, PEERS

SETUPS = {
    f"{ranks}x {rate} {model}": (ranks, rate, model)
    for ranks in (1, 2)
    for rate in ("1gbit", "200mbit")
    for model in ("gpt", "cnn")
}
CALM = "undisturbed"
# Share of the link that another flow takes; the rank that sleeps 0.2 s in every step.
DISTURBANCES = {
    CALM: (0.0, -1),
    "10 % of the link taken": (0.1, -1),
    "rank 1 late by 0.2 s in every step": (0.0, 1),
}
OWN_LOW_RANK = "ours, PowerSGD, rank 2"
UNDISTURBED = {1: "ours, flat top-k, 1 %", 2: "ours, hierarchical, 1 %"}  # by ranks per node
TO_LOSS = [
    DENSE,
    "torch fp16 hook",
    "torch PowerSGD, rank 4",
    OWN_LOW_RANK,
    "ours, flat top-k, 1 %",
    "ours, flat top-k, 0.1 %",
]
LOSS = 2.9  # nats per byte
INTRODUCTION = """
Two nodes (network namespaces) whose links pass a token bucket; gloo; one thread per rank; SGD.
`k x`: ranks a node; with 2 x 2 ranks four processes share two cores. GPT: 8 blocks of width 512,
one sequence of 32 bytes per rank; CNN: convolutions of 512 channels, one image per rank: the least
to compute, so that the exchange decides. Step: median over rounds (lowest to highest round) of the
slowest rank's median step. Times dense: median over rounds of the ratio to the dense steps of the
same round. MB: what left node 0 per step, counted at its interface with all headers; in brackets
the payload by formula (torch's methods) or as the exchange counts it; off: what was counted, less
the headers of the counted packets, against that. Others: the share of the cores' time that went to
other processes or to the kernel outside of ranks.
"""
Results = dict[str, Any]


def report(done: dict[str, Results], machine: str) -> str:
    """All tables."""
    lines = ["# Gradient exchange over slow links", "", machine, INTRODUCTION, *_aims(done)]
    for name in SETUPS:
        if name in done:
            lines += ["", f"## {name}", "", *_table(done[name])]
    lines += _disturbed(done)
    lines += _to_loss(done)
    return "\n".join(lines) + "\n"


def ratio(result: Results, slow: str, fast: str) -> float:
    """Median over rounds of `slow` / `fast`; methods of different jobs by way of the dense steps
    beside them.
    """
    if result["reference"][slow] == result["reference"][fast]:
        pairs = zip(result["seconds"][slow], result["seconds"][fast], strict=True)
        return statistics.median(a / b for a, b in pairs)
    return speed_up(result, fast) / speed_up(result, slow)


def speed_up(result: Results, name: str) -> float:
    """Median over rounds of dense / this method."""
    return statistics.median(
        dense / own
        for dense, own in zip(result["reference"][name], result["seconds"][name], strict=True)
    )


def byte_errors(result: Results) -> dict[str, float]:
    """How far the counted payload is above what was computed, as a share, by method."""
    return {
        name: statistics.median(counted) / result["formula_bytes"][name] - 1
        for name, counted in result["node_payload"].items()
        if result["formula_bytes"][name]
    }


def _aims(done: dict[str, Results]) -> list[str]:
    lines = ["| aim | set-up | measured |", "|---|---|---|"]
    for name in SETUPS:
        if name not in done:
            continue
        result, ours = done[name], UNDISTURBED[SETUPS[name][0]]
        if ours not in result["seconds"]:
            continue
        lines.append(f"| {ours}: 5 times dense | {name} | {speed_up(result, ours):.2f} |")
        peers = [peer for peer in PEERS if peer in result["seconds"]]
        best = max(peers, key=lambda peer: speed_up(result, peer))
        lines.append(
            f"| {ours}: 1.25 times the best of torch's | {name} | {ratio(result, best, ours):.2f} "
            f"({best}) |"
        )
        if OWN_LOW_RANK in result["seconds"]:
            lines.append(
                f"| the same against {OWN_LOW_RANK} | {name} | "
                f"{ratio(result, OWN_LOW_RANK, ours):.2f} |"
            )
        for density in DENSITIES:
            flat, apart = f"ours, flat top-k, {density}", f"ours, hierarchical, {density}"
            if apart in result["seconds"] and flat in result["seconds"]:
                lines.append(
                    f"| hierarchical 1.4 times flat, {density} | {name} | "
                    f"{ratio(result, flat, apart):.2f} |"
                )
    errors = [
        error for name in SETUPS if name in done for error in byte_errors(done[name]).values()
    ]
    if errors:
        worst = max(errors, key=abs)
        lines.append(
            f"| bytes as computed, to 5 % | all methods and set-ups | at most {100 * worst:+.1f} % "
            "|"
        )
    return lines


def _table(result: Results) -> list[str]:
    kept = f"the quietest {len(result['others'])} of {result['rounds']} rounds"
    rows = [
        f"{result['parameters'] / 1e6:.1f} M parameters; {kept}; others "
        f"{_percent(result['others'])}",
        "",
    ]
    rows += [
        "| method | step ms | times dense | MB per step | off | equal on all ranks |",
        "|---|---|---|---|---|---|",
    ]
    errors = byte_errors(result)
    for name, values in result["seconds"].items():
        if name == ALONE:
            rows.append(
                f"| {name} | {_milliseconds(values)} | {speed_up(result, name):.2f} | | | |"
            )
            continue
        counted, formula = (
            statistics.median(result["node_bytes"][name]),
            result["formula_bytes"][name],
        )
        cells = [name, _milliseconds(values), f"{speed_up(result, name):.2f}"]
        cells += [f"{counted / 1e6:.2f} ({formula / 1e6:.2f})", f"{100 * errors[name]:+.1f} %"]
        rows.append(f"| {' | '.join(cells)} | {'yes' if result['equal'][name] else '**no**'} |")
    return rows


def _disturbed(done: dict[str, Results]) -> list[str]:
    rows = []
    for ranks, method in UNDISTURBED.items():
        calm = done.get(disturbed_name(ranks, CALM))
        for what in DISTURBANCES:
            name = disturbed_name(ranks, what)
            if calm is None or name not in done:
                continue
            result = done[name]
            words = "equal on all ranks" if result["equal"][method] else "**differ between ranks**"
            if what != CALM:
                same = result["checksum"][method] == calm["checksum"][method]
                words += ", bit for bit as undisturbed" if same else ", **not as undisturbed**"
            rows.append(
                f"| {name} ({method}) | {_milliseconds(result['seconds'][method])} | {words} |"
            )
    return (
        ["", "## Disturbed", "", "| set-up | step ms | parameters |", "|---|---|---|", *rows]
        if rows
        else []
    )


def disturbed_name(ranks: int, what: str) -> str:
    """Name of a disturbed set-up."""
    return f"{ranks}x 1gbit, {what}"


def _to_loss(done: dict[str, Results]) -> list[str]:
    rows = []
    for method in TO_LOSS:
        if result := done.get(f"to loss: {method}"):
            reached = f"{result['loss']:.3f}" + ("" if result["reached"] else " (not reached)")
            others = f"{100 * result['others'][0]:.0f} %"
            rows.append(
                f"| {method} | {result['seconds']:.1f} | {result['steps']} | {reached} | {others} |"
            )
    if not rows:
        return []
    title = (
        f"## Time to a training loss of {LOSS} nats per byte (1x 1gbit, GPT, 8 sequences per rank, "
        "AdamW)"
    )
    return [
        "",
        title,
        "",
        "| method | seconds | steps | loss reached | others |",
        "|---|---|---|---|---|",
        *rows,
    ]


def _milliseconds(values: Iterable[float]) -> str:
    values = sorted(1e3 * value for value in values)
    return f"{statistics.median(values):.0f} ({values[0]:.0f} to {values[-1]:.0f})"


def _percent(shares: Iterable[float]) -> str:
    shares = sorted(100 * share for share in shares)
    return (
        f"{statistics.median(shares):.0f} % of the cores' time (by round {shares[0]:.0f} to "
        f"{shares[-1]:.0f})"
    )
