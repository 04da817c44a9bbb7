"""A small byte-level GPT three times: under `ddp`, under `topt`, and under `topt` with less memory.

    python examples/demo.py

The limit is three quarters of what a rank took under `ddp`. All figures are measured here.
Overrides are those of `topt train`, for all three: `trainer.limit_train_batches=10`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments.lightning import find_free_network_port
from rich.console import Console
from rich.table import Table

import lightning_topt.cli.train  # noqa: F401  (before there are copies)
import topt_console

CONTEXT = multiprocessing.get_context("fork")
SHARE = 0.75  # of the memory under `ddp`, for the limit
MIB = 2**20


def main() -> None:
    """Run the three fits, then print what they measured."""
    rows = {"ddp": train("strategy=ddp"), "topt": train("strategy=topt")}
    limit = f"{SHARE * peak_bytes(rows['ddp']) / MIB:.0f}MiB"
    rows[f"topt, {limit}"] = train("strategy=topt", f"strategy.memory_limit={limit}")

    table = Table("strategy", "step time", "peak memory", "loss", title_justify="left")
    steps = rows["ddp"]["global_step"]
    table.title = f"{rows['ddp']['world_size']} CPU ranks, {steps} steps"
    for name, record in rows.items():
        seconds = record["measured"]["median_step_seconds"]
        table.add_row(
            name,
            "-" if seconds is None else f"{1e3 * seconds:.0f} ms",
            f"{peak_bytes(record) / MIB:.0f} MiB",
            f"{record['metrics']['val_bits_per_byte']:.4f}",
        )
    print()
    Console(width=80).print(table)
    print(
        "step time: the median; memory: of the rank that took most, above an idle one;\n"
        "loss: bits per byte of files that it was not trained on"
    )


def train(*words: str) -> dict[str, Any]:
    """Do as `topt train` with these overrides; print what it says of plans; return `run.json`.

    Ranks are copies of this process, with the environment that torchrun gives them: so Python,
    PyTorch and Lightning start once for all fits.
    """
    words = ("train", "experiment=demo", *words, *sys.argv[1:])
    print(f"\n$ topt {shlex.join(words)}", flush=True)
    devices = [word.partition("=")[2] for word in words if word.startswith("trainer.devices=")]
    size = int(devices[-1]) if devices else 2
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "TORCHELASTIC_RUN_ID": "demo",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(find_free_network_port()),
            "WORLD_SIZE": str(size),
        }
        arguments = ["topt", *words, f"hydra.run.dir={folder}"]
        output, into = os.pipe()
        ranks = [
            CONTEXT.Process(target=as_rank, args=(rank, environment, arguments, into))
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        os.close(into)
        lines, said = [], ""
        with open(output) as stream:
            for line in stream:
                lines.append(line)
                if line.startswith("topt: "):
                    said += line
                    print(line, end="", flush=True)
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit("".join(lines))
        record: dict[str, Any] = json.loads(Path(folder, "run.json").read_text())
    reason = record["plan"] and record["plan"]["reason"]
    if reason and reason.rstrip(".") not in said:
        print(f"topt: {reason}")
    return record


def as_rank(rank: int, environment: dict[str, str], arguments: list[str], output: int) -> None:
    """Run `topt` in this process, which is one rank."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    sys.argv = arguments
    topt_console.main()


def peak_bytes(record: dict[str, Any]) -> int:
    """Return what the rank took that took most."""
    return max(record["measured"]["peak_bytes_per_rank"])


if __name__ == "__main__":
    main()
