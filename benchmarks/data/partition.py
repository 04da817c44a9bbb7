"""A cache partitioned over two nodes, each with room for half of the data.

    sudo python -m benchmarks.data.partition --link 1gbit      # about 5 minutes

Who reads what from where, and how fast? Two nodes train (one rank each, DDP); JPEG files lie on a
third one, behind HTTP. The table has, per epoch: requests to the source, samples from the other
node against what owners and sampler say, and seconds. Beside it stands a cache of the same size per
node that is not partitioned. In the last epoch of one more run, the process that serves node 1's
samples is killed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.common import QUIET, RESULTS, machine
from benchmarks.data.shared import HttpFiles, make_files, requests_of
from benchmarks.lab import Lab, LabError, end_on_signals, sent_bytes
from lightning_topt.data.peers.client import owners
from lightning_topt.plugins.cached_data import CachedDataModule, CachePartition

BATCH, EPOCHS, SEED, PORT = 64, 4, 5, 8000
ENTRY_BYTES = 150_528 + 400  # a sample and what is stored with it


class Pictures(pl.LightningDataModule):
    """A user's DataModule."""

    def __init__(self, data: HttpFiles) -> None:
        super().__init__()
        self.data = data

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, BATCH, shuffle=True)


class Small(pl.LightningModule):
    """A little work per batch, so that there is something to fetch behind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Conv2d(3, 8, 7, stride=4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0].float() / 255).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Counts(pl.Callback):
    """Per epoch: seconds, and what all nodes read from where.

    With `kills` a server is killed in the last epoch.
    """

    def __init__(self, data: CachedDataModule, source: tuple[str, int], *, kills: bool) -> None:
        self.data, self.source, self.kills = data, source, kills
        self.epochs: list[dict[str, Any]] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.kills and trainer.current_epoch == EPOCHS - 1 and trainer.node_rank == 1:
            server = self.data._servers[0]
            assert server is not None
            os.kill(server.process.pid, signal.SIGKILL)
        dist.barrier()
        self.started, self.requests, self.sent = (
            time.perf_counter(),
            requests_of(self.source),
            sent_bytes(),
        )

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        dist.barrier()
        seconds = time.perf_counter() - self.started
        [known] = self.data.statistics(reset=True).values()
        counts = torch.tensor(
            [known.memory_hits, known.peer_hits, known.misses, sent_bytes() - self.sent]
        )
        dist.all_reduce(counts)
        memory, others, misses, sent = counts.tolist()
        dist.barrier()
        requests = requests_of(self.source) - self.requests
        self.epochs.append(
            {
                "seconds": seconds,
                "memory": memory,
                "others": others,
                "misses": misses,
                "requests": requests,
                "sent": sent,
            }
        )


def expected_from_others(number: int) -> list[int]:
    """Per epoch, of both nodes together."""
    owner, totals = owners(number, num_nodes=2, seed=SEED), []
    for epoch in range(EPOCHS):
        total = 0
        for node in range(2):
            sampler: DistributedSampler[Any] = DistributedSampler(
                range(number), 2, node, shuffle=True, seed=SEED
            )  # type: ignore[arg-type]
            sampler.set_epoch(epoch)
            total += int((owner[list(sampler)] != node).sum())
        totals.append(total)
    return totals


def rank(options: argparse.Namespace) -> None:
    """One node's part; rank 0 prints the epochs."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = json.loads((options.folder / "names.json").read_text())
    pl.seed_everything(SEED, verbose=False)
    source = (options.host, PORT)
    with tempfile.TemporaryDirectory() as folder:
        data = CachedDataModule(
            Pictures(HttpFiles(source, names)),
            directory=folder,
            memory_bytes=len(names) * ENTRY_BYTES // 2,
            data_version="1",
            partition=CachePartition(seed=SEED) if options.partition else False,
        )
        counts = Counts(data, source, kills=options.kills)
        trainer = pl.Trainer(
            accelerator="cpu",
            strategy="ddp",
            num_nodes=2,
            devices=1,
            max_epochs=EPOCHS,
            callbacks=[counts],
            **QUIET,
        )
        trainer.fit(Small(), datamodule=data)
        dist.barrier()
        data.close()
    if trainer.global_rank == 0:
        print("RESULT" + json.dumps(counts.epochs), flush=True)


def train(
    lab: Lab, options: argparse.Namespace, *, partition: bool, kills: bool = False
) -> list[dict[str, Any]]:
    command = [
        "-m",
        "benchmarks.data.partition",
        "--one",
        "--folder",
        str(options.folder),
        "--host",
        lab.address(2),
    ]
    command += [*(["--partition"] if partition else []), *(["--kills"] if kills else [])]
    output = lab.run(command, nodes=2, timeout=600)
    result: list[dict[str, Any]] = json.loads(output.rpartition("RESULT")[2].splitlines()[0])
    print("partition" if partition else "alone", result, flush=True)
    return result


def report(found: dict[str, list[list[dict[str, Any]]]], number: int, title: str) -> str:
    expected = expected_from_others(number)
    lines = [
        f"## {title}",
        "",
        f"{number} samples of 150,528 bytes, 2 nodes with room for half of them each, batches of "
        f"{BATCH}.",
    ]
    lines += [
        "",
        "| | epoch | source requests | from the other node | expected | sent, MB | samples/s, "
        "median (range) |",
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, runs in found.items():
        for epoch in range(EPOCHS):
            entries = [run[epoch] for run in runs]
            rates = sorted(number / entry["seconds"] for entry in entries)
            cells = [name, str(epoch + 1)]
            cells += [
                "/".join(map(str, sorted({entry[key] for entry in entries})))
                for key in ("requests", "others")
            ]
            cells += [str(expected[epoch]) if name == "partitioned" and epoch else "-"]
            cells += [f"{statistics.median(entry['sent'] for entry in entries) / 1e6:.0f}"]
            cells += [f"{statistics.median(rates):.0f} ({rates[0]:.0f} to {rates[-1]:.0f})"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--link", default="1gbit", help="rate of each node's link, in tc's units")
    parser.add_argument("--number", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "topt-pictures"
    )
    parser.add_argument("--host", default="", help=argparse.SUPPRESS)
    for hidden in ("--one", "--partition", "--kills"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        rank(options)
        return
    end_on_signals()
    options.folder = options.folder / str(options.number)
    names = make_files(options.folder / "files", number=options.number)
    (options.folder / "names.json").write_text(json.dumps(names))
    found: dict[str, list[list[dict[str, Any]]]] = {
        "partitioned": [],
        "each for itself": [],
        "a server is killed": [],
    }
    try:
        with Lab(3, rate=options.link) as lab:
            serve = [
                "-m",
                "benchmarks.data.shared",
                str(options.folder / "files"),
                "--host",
                lab.address(2),
            ]
            into = ["ip", "netns", "exec", lab.nodes[2], sys.executable]
            server = subprocess.Popen([*into, *serve, "--port", str(PORT)])
            try:
                time.sleep(3)
                for _ in range(options.rounds):
                    found["partitioned"].append(train(lab, options, partition=True))
                    found["each for itself"].append(train(lab, options, partition=False))
                found["a server is killed"].append(train(lab, options, partition=True, kills=True))
            finally:
                server.kill()
    except LabError as error:
        sys.exit(f"data_partition: {error}")
    text = report(found, options.number, f"Behind HTTP; links of {options.link}")
    (RESULTS / "data_partition.md").write_text(
        f"# A cache partitioned over nodes\n\n{machine()}\n\n{text}\n"
    )
    print(text)


if __name__ == "__main__":
    main()
