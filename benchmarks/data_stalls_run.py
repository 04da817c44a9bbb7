"""One job of `benchmarks.data_stalls`, under `benchmarks.lab`: rank 1 serves files over HTTP, rank
0 trains on them.

Rank 0 measures as `topt stalls` does, or trains in the set-ups that it is given, and writes what it
found as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.data_sources import CLASSES, HttpFiles
from lightning_topt.cli.stalls import QUIET, measure, serving
from lightning_topt.data.stalls.loop import Watched, loader_over
from lightning_topt.data.stalls.measurement import MeasurementOptions
from lightning_topt.plugins.cached_data import MeasuredCache

BATCH, PORT, CONNECTIONS = 32, 8000, 32
EPOCHS = 12  # of items, more than a run takes


class Pictures(pl.LightningDataModule):
    """A user's DataModule on files behind HTTP."""

    def __init__(
        self, address: tuple[str, int], *, number: int, workers: int, delay_seconds: float
    ) -> None:
        super().__init__()
        names = [f"{round(1e6 * delay_seconds)}/{index:06d}.jpg" for index in range(number)]
        self.data, self.workers = HttpFiles(address, names), workers

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, BATCH, shuffle=True, num_workers=self.workers)


class Net(pl.LightningModule):
    """A small net, some 70 ms per batch on one core."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 7, stride=4),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.classifier = nn.Linear(32, CLASSES)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        pictures, labels = batch  # (B, 3, 224, 224) uint8, (B,)
        return F.cross_entropy(
            self.classifier(self.layers(pictures.float() / 255).flatten(1)), labels
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer() -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", devices=1, **QUIET)


def train(options: argparse.Namespace, setup: dict[str, Any], entry_bytes: int) -> dict[str, float]:
    """Samples per second of training in one set-up, its cache full."""
    pl.seed_everything(0)
    module = Pictures(
        options.address,
        number=options.number,
        workers=setup["workers"],
        delay_seconds=setup["delay_seconds"],
    )
    loader = module.train_dataloader()
    rng = np.random.default_rng(0)
    order = np.concatenate([rng.permutation(options.number) for _ in range(EPOCHS)]).tolist()
    workers, capacity = setup["workers"], round(setup["share"] * options.number) * entry_bytes
    with MeasuredCache(max(1, capacity)) as cache:
        make = cache.loader_over if capacity else loader_over
        if capacity:
            # In an order of its own: what the cache has room for would be the first items of the
            # first epoch, and not any.
            for _ in make(
                loader, np.random.default_rng(1).permutation(options.number).tolist(), num_workers=2
            ):
                pass
        batches = make(loader, order, num_workers=workers)
        watched = Watched(
            batches, options.seconds, skip=4 + 3 * workers, most=len(batches) - 6 * workers - 4
        )
        start, before = time.perf_counter(), other_core_seconds()
        with serving(module, watched):
            trainer().fit(Net(), datamodule=module)
        others = (
            (other_core_seconds() - before) / (time.perf_counter() - start) / (os.cpu_count() or 1)
        )
    times = watched.times()
    return {"samples_per_second": BATCH / times.batch_seconds, "others": others, **times._asdict()}


def other_core_seconds() -> float:
    """Seconds that all cores spent on anything but this process and its children."""
    total, own = psutil.cpu_times(), psutil.Process()
    mine = [own, *own.children(recursive=True)]
    known = sum(times.user + times.system for times in (process.cpu_times() for process in mine))
    ended = own.cpu_times()
    used = total.user + total.system + total.nice + total.irq + total.softirq + total.steal
    return used - known - ended.children_user - ended.children_system


def lead(options: argparse.Namespace) -> None:
    """What rank 0 does."""
    torch.set_num_threads(1)
    options.address = (options.server, PORT)
    _await(options.address)
    jobs, results = json.loads(options.jobs.read_text()), []
    for job in jobs["setups"]:
        assert len(os.sched_getaffinity(0)) == job["cores"]
        results.append(train(options, job, jobs["entry_bytes"]))
    measured = None
    if jobs["measure"]:
        module = Pictures(
            options.address,
            number=options.number,
            workers=jobs["measure"]["workers"],
            delay_seconds=0.0,
        )
        measured = measure(
            Net(),
            module,
            trainer=trainer,
            directory=str(options.jobs.parent),
            options=MeasurementOptions(),
        ).to_dict()
    options.out.write_text(json.dumps({"setups": results, "measured": measured}))
    with socket.create_connection(options.address, timeout=10) as connection:
        connection.sendall(b"GET /quit HTTP/1.1\r\n\r\n")


def _await(address: tuple[str, int], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(address, timeout=5).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def serve(folder: Path) -> None:
    """What rank 1 does: files as fast as a server can be, for the cores are shared. A path is
    /MICROSECONDS OF DELAY/NAME.
    """
    server = socket.create_server(("0.0.0.0", PORT), backlog=CONNECTIONS)
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_answer, args=(connection, folder), daemon=True).start()


def _answer(connection: socket.socket, folder: Path) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with closing(connection), connection.makefile("rb") as lines:
        while request := lines.readline():
            while lines.readline().strip():
                pass
            path = request.split()[1].decode()
            if path == "/quit":
                os._exit(0)
            _, delay, name = path.split("/")
            with (folder / name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if float(delay):
                    time.sleep(float(delay) / 1e6)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
                connection.sendfile(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of the files")
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--server", required=True, help="address of rank 1")
    parser.add_argument("--jobs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=8)
    options = parser.parse_args()
    if os.environ["RANK"] == "1":
        serve(options.folder)
    lead(options)
    sys.exit(0)


if __name__ == "__main__":
    main()
