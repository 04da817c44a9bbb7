"""Step time, bytes and time to a loss of gradient exchanges over slow links.

    sudo python -m benchmarks.exchange.network          # about an hour on 2 quiet cores
    sudo python -m benchmarks.exchange.network --quick  # main methods, 1 Gb/s, few rounds; not kept
    sudo python -m benchmarks.exchange.network --only "1x 1gbit gpt" --rounds 9
    python -m benchmarks.exchange.network --report      # the tables from what was measured

Two nodes of the lab on this machine. Set-ups are measured one after the other and kept in
benchmarks/results/network.json. In each, all methods run in one job, interleaved round by round. A
round's figure is the median over its steps of the slowest rank. Measure on a machine that does
nothing else: rounds beside other work are repeated, and the report says how much there was.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import RESULTS, machine
from benchmarks.exchange.shared import (
    ALONE,
    DENSE,
    DENSITIES,
    FLAT,
    HIERARCHICAL,
    OTHERS,
    PEERS,
    Method,
    batches,
    make,
    prepare,
    text_batches,
)
from benchmarks.lab import Lab, LabError, end_on_signals, sent_bytes, sent_payload

FILE = RESULTS / "network.json"
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
RATES = {"1gbit": 1e9 / 8, "200mbit": 2e8 / 8}  # bytes per second
BY_METHOD = (
    "seconds",
    "node_bytes",
    "node_payload",
    "formula_bytes",
    "equal",
    "checksum",
)  # what a job gives by method


@dataclass(frozen=True)
class Job:
    """One set-up: name, ranks per node, rate of the links, arguments of its ranks.

    Methods of one of its `groups` run together.
    """

    name: str
    ranks: int
    rate: str
    arguments: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    flow: float = 0.0  # share of the link from node 0 to node 1

    def run(self, timeout: float = 1500) -> dict[str, Any]:
        """Return everything measured, of all groups.

        "reference" has the dense rounds beside which a method ran.
        """
        merged: dict[str, Any] = {"reference": {}}
        for methods in self.groups:
            result = self._run_group(methods, timeout)
            if "reached" in result:
                return result
            for name in methods:
                merged["reference"].setdefault(name, result["seconds"].get(DENSE))
            for kind, values in result.items():
                known = merged.get(kind)
                if kind in BY_METHOD and known:
                    known |= {name: value for name, value in values.items() if name not in known}
                elif kind in ("others", "rounds") and known:
                    merged[kind] = known + values
                else:
                    merged[kind] = values
        return merged

    def _run_group(self, methods: tuple[str, ...], timeout: float) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder, Lab(2, rate=self.rate) as lab:
            out = Path(folder) / "result.json"
            if self.flow:
                lab.add_flow(0, 1, bytes_per_second=self.flow * RATES[self.rate])
            command = [
                "-m",
                "benchmarks.exchange.network",
                "--worker",
                "--out",
                str(out),
                *self.arguments,
                "--methods",
                *methods,
            ]
            lab.run(command, ranks_per_node=self.ranks, timeout=timeout)
            result: dict[str, Any] = json.loads(out.read_text())
            return result


def groups(ranks: int) -> tuple[tuple[str, ...], ...]:
    """Return the methods to compare with so many ranks per node, by group.

    Four processes have no room for all methods at once.
    """
    if ranks == 1:
        return ((ALONE, *PEERS, *FLAT, *OTHERS),)
    return (ALONE, DENSE, *FLAT, *HIERARCHICAL), tuple(PEERS), (DENSE, *OTHERS)


def jobs(rounds: int) -> Iterator[Job]:
    """The whole benchmark."""
    for name, (ranks, rate, model) in SETUPS.items():
        yield Job(name, ranks, rate, ("--model", model, "--rounds", str(rounds)), groups(ranks))
    for ranks, method in UNDISTURBED.items():
        for what, (flow, straggler) in DISTURBANCES.items():
            arguments = ("--steady", "--rounds", "2", "--straggler", str(straggler))
            yield Job(disturbed_name(ranks, what), ranks, "1gbit", arguments, ((method,),), flow)
    for method in TO_LOSS:
        yield Job(f"to loss: {method}", 1, "1gbit", ("--loss", str(LOSS)), ((method,),))


def quick_jobs() -> Iterator[Job]:
    """The main methods, for a quick try."""
    main = (ALONE, DENSE, "torch fp16 hook", "torch PowerSGD, rank 4", "ours, flat top-k, 1 %")
    for ranks in (1, 2):
        methods = main if ranks == 1 else (*main, "ours, hierarchical, 1 %")
        yield Job(
            f"{ranks}x 1gbit gpt", ranks, "1gbit", ("--model", "gpt", "--rounds", "3"), (methods,)
        )


def measure(chosen: Iterator[Job], file: Path, *, only: Sequence[str]) -> None:
    """Every job whose name has a part in `only` (all if empty), kept in `file` one by one."""
    for job in chosen:
        if only and not any(part in job.name for part in only):
            continue
        print(job.name, flush=True)
        result = job.run()
        file.write_text(json.dumps(load(file) | {job.name: result}, indent=1) + "\n")


def load(file: Path) -> dict[str, Any]:
    """What was measured, by name."""
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="parts of the set-ups' names")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args(arguments)
    end_on_signals()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "quick.json" if options.quick else FILE
        if not options.report:
            try:
                measure(
                    quick_jobs() if options.quick else jobs(options.rounds), file, only=options.only
                )
            except LabError as error:
                sys.exit(f"network: {error}")
        text = report(load(file), machine())
    if not options.quick:
        (RESULTS / "network.md").write_text(text)
    print(text)


# ---- one rank of a job, started by `Job` ---------------------------------------------------------

BUSY = 0.1  # share of the CPUs that others may use
WARM_UP_STEPS = 3  # the first is dense, after it DDP lays its buckets anew


def step(method: Method, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    optimizer.zero_grad(set_to_none=False)
    loss: Tensor = method.ddp(batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def step_times(options: argparse.Namespace) -> dict[str, Any]:
    """Return medians of the slowest rank, by method and round, and bytes per step.

    Bytes are those that left node 0, counted and by formula. Rounds in which the machine was busy
    with other things are measured again, three times as many in all; the quietest count.
    """
    rank = dist.get_rank()
    module, data = make(options.model), batches(options.model, rank)
    methods = {name: prepare(name, copy.deepcopy(module)) for name in options.methods}
    optimizers = {name: torch.optim.SGD(m.ddp.parameters(), lr=1e-3) for name, m in methods.items()}
    for name, method in methods.items():
        for i in range(WARM_UP_STEPS):
            step(method, optimizers[name], data[i])
    rounds: list[tuple[float, dict[str, Figures]]] = []
    while len(rounds) < (options.rounds if options.steady else 3 * options.rounds):
        clock = Clock()
        figures = {
            name: _measure(m, optimizers[name], data, options) for name, m in methods.items()
        }
        rounds.append((clock.share_of_others(), figures))
        if sum(others <= BUSY for others, _ in rounds) == options.rounds:
            break
    kept = sorted(rounds, key=lambda round: round[0])[: options.rounds]
    return {
        "parameters": sum(p.numel() for p in module.parameters()),
        "seconds": {name: [figures[name].seconds for _, figures in kept] for name in methods},
        "node_bytes": {name: [figures[name].node_bytes for _, figures in kept] for name in methods},
        "node_payload": {
            name: [figures[name].node_payload for _, figures in kept] for name in methods
        },
        "formula_bytes": {name: kept[0][1][name].formula_bytes for name in methods},
        "others": [others for others, _ in kept],
        "rounds": len(rounds),
        "equal": {
            name: _equal_on_all_ranks(method) for name, method in methods.items() if name != ALONE
        },
        "checksum": {name: _checksum(method) for name, method in methods.items()},
    }


class Figures(NamedTuple):
    """One round of one method, per step: seconds and bytes that left node 0.

    Bytes are with headers, without them, and by formula.
    """

    seconds: float
    node_bytes: float
    node_payload: float
    formula_bytes: float


def _measure(
    method: Method,
    optimizer: torch.optim.Optimizer,
    data: list[Tensor],
    options: argparse.Namespace,
) -> Figures:
    delay = 0.2 if dist.get_rank() == options.straggler else 0.0
    if method.exchange is not None:
        method.exchange.statistics()
    times = []
    dist.barrier()
    before = sent_bytes(), sent_payload()
    for i in range(options.steps):
        start = time.perf_counter()
        time.sleep(delay)
        step(method, optimizer, data[i])
        times.append(time.perf_counter() - start)
    dist.barrier()
    counted = (
        (sent_bytes() - before[0]) / options.steps,
        (sent_payload() - before[1]) / options.steps,
    )
    slowest = torch.tensor(statistics.median(times))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    formula = method.bytes_per_step
    if method.exchange is not None:
        formula = method.exchange.statistics().bytes_sent / options.steps  # of the node
    return Figures(slowest.item(), *counted, formula)


class Clock:
    """How busy the machine is with other things than the ranks.

    All ranks make it and read it together.
    """

    def __init__(self) -> None:
        self.before = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float]:
        user, nice, system, _, _, irq, soft, steal = map(
            int, Path("/proc/stat").read_text().split()[1:9]
        )
        busy = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), busy, time.process_time()

    def share_of_others(self) -> float:
        """Return others' share of all CPUs' time since this was made, the same on all ranks.

        The kernel's work for the ranks' network counts as others'.
        """
        wall, busy, own = (
            after - before for after, before in zip(self._read(), self.before, strict=True)
        )
        ranks = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(ranks)
        share = torch.tensor(max(0.0, busy - ranks.item()) / (wall * (os.cpu_count() or 1)))
        dist.broadcast(share, 0)
        return share.item()


def _checksum(method: Method) -> list[int]:
    return [int(p.detach().view(torch.int32).long().sum()) for p in method.ddp.parameters()]


def _equal_on_all_ranks(method: Method) -> bool:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, _checksum(method))
    return all(other == everyone[0] for other in everyone)


def time_to_loss(options: argparse.Namespace) -> dict[str, Any]:
    """Return seconds and steps until the mean loss of ten steps falls below `options.loss`.

    Only training counts.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = text_batches(rank, world_size, sequences=8, steps=options.max_steps)
    method = prepare(options.methods[0], make("gpt"))
    optimizer = torch.optim.AdamW(method.ddp.parameters(), lr=5e-4, betas=(0.9, 0.95), fused=True)
    losses: list[float] = []
    spent, clock = 0.0, Clock()
    for batch in data:
        start = time.perf_counter()
        loss = step(method, optimizer, batch)
        spent += time.perf_counter() - start
        dist.all_reduce(loss)
        losses.append(loss.item() / world_size)
        if len(losses) >= 10 and statistics.mean(losses[-10:]) < options.loss:
            break
    reached = statistics.mean(losses[-10:])
    return {
        "seconds": spent,
        "steps": len(losses),
        "loss": reached,
        "reached": reached < options.loss,
        "others": [clock.share_of_others()],
    }


def run_worker() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", action="store_true", required=True)
    parser.add_argument("--model", choices=["gpt", "cnn"], default="gpt")
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--steady", action="store_true", help="as many rounds whatever else the machine does"
    )
    parser.add_argument("--straggler", type=int, default=-1)
    parser.add_argument("--loss", type=float)
    parser.add_argument("--max-steps", type=int, default=400)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    result = step_times(options) if options.loss is None else time_to_loss(options)
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


# ---- the page ------------------------------------------------------------------------------------

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
    """Return the median over rounds of `slow` / `fast`.

    Methods of different jobs are compared by way of the dense steps beside them.
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


if __name__ == "__main__":
    run_worker() if "--worker" in sys.argv else main()
