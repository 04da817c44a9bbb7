"""Step time, bytes and time to a loss of gradient exchanges over slow links: a lab of two nodes on
this machine.

    sudo python -m benchmarks.network             # about an hour on 2 quiet cores
    sudo python -m benchmarks.network --quick     # main methods, 1 Gb/s, few rounds; not kept
    sudo python -m benchmarks.network --only "1x 1gbit gpt" --rounds 9
    python -m benchmarks.network --report         # the tables from what was measured

Set-ups are measured one after the other and kept in benchmarks/results/network.json; in each, the
methods run in one job, interleaved round by round. A round's figure is the median over its steps of
the slowest rank. Measure on a machine that does nothing else: rounds beside other work are
repeated, and the report says how much there was.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import network_report
from benchmarks.common import RESULTS, machine
from benchmarks.exchange_methods import ALONE, DENSE, FLAT, HIERARCHICAL, OTHERS, PEERS
from benchmarks.lab import Lab, end_on_signals
from benchmarks.lab_nodes import LabError
from benchmarks.network_report import DISTURBANCES, SETUPS, TO_LOSS, UNDISTURBED, disturbed_name

FILE = RESULTS / "network.json"
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
    """One set-up: its name, ranks per node, rate of the links, arguments of `network_run`, methods
    that run together.
    """

    name: str
    ranks: int
    rate: str
    arguments: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    flow: float = 0.0  # share of the link from node 0 to node 1

    def run(self, timeout: float = 1500) -> dict[str, Any]:
        """Everything measured, of all groups; "reference" has the dense rounds beside which a
        method ran.
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
                "benchmarks.network_run",
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
    """What is compared with so many ranks per node; four processes have no room for all methods at
    once.
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
        yield Job(
            f"to loss: {method}", 1, "1gbit", ("--loss", str(network_report.LOSS)), ((method,),)
        )


def quick_jobs() -> Iterator[Job]:
    """A look at the main methods, for one who changes them."""
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
        text = network_report.report(load(file), machine())
    if not options.quick:
        (RESULTS / "network.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
