"""Predictions of `topt stalls` against real runs.

    sudo python -m benchmarks.data.stalls              # 5 rounds, half an hour on 2 quiet cores
    sudo python -m benchmarks.data.stalls --rounds 1   # a quick try; printed, not kept
    python -m benchmarks.data.stalls --report          # the table from what was measured

Each round measures once, at 1 Gb/s with one worker and no cache. The other set-ups are predicted
from that, and then run on the Trainer with the cache full. Crops of photographs lie as JPEG behind
an HTTP server in another network namespace, whose link has the rate (`benchmarks.lab`). Latency is
a server that waits before it answers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import psutil
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.common import RESULTS, machine
from benchmarks.data.shared import CLASSES, HttpFiles
from benchmarks.lab import Lab, LabError, end_on_signals
from lightning_topt.cli.stalls import QUIET, measure, serving
from lightning_topt.data.stalls.loop import Watched, loader_over
from lightning_topt.data.stalls.measurement import MeasurementOptions
from lightning_topt.data.stalls.model import SetUp, StallCosts, least_cache, samples_per_second
from lightning_topt.plugins.cached_data import MeasuredCache

NUMBER = 2000  # files
BURSTS = {
    "1gbit": "16kb",
    "200mbit": "4kb",
}  # of links: little, so that they are slow for one picture too, as a cable is
RATES = {"1gbit": 1e9 / 8, "200mbit": 2e8 / 8}
FILE = RESULTS / "data_stalls.json"
RUN = "benchmarks.data.stalls"


class Case(NamedTuple):
    """A set-up to predict and to run."""

    workers: int = 1
    share: float = 0.0
    cores: int = 2
    rate: str = "1gbit"
    delay_seconds: float = 0.0

    def words(self) -> str:
        changed = []
        if self == Case():
            return "as measured: 1 Gb/s, 1 worker, 2 cores, no cache"
        if self.share:
            changed.append(f"cache {100 * self.share:.0f} %")
        if self.workers != 1:
            changed.append(f"{self.workers} workers")
        if self.cores != 2:
            changed.append(f"{self.cores} core")
        if self.rate != "1gbit":
            changed.append("200 Mb/s")
        if self.delay_seconds:
            changed.append(f"{1e3 * self.delay_seconds:g} ms more latency")
        return ", ".join(changed)

    def setup(self, costs: StallCosts) -> SetUp:
        """What `topt stalls` is asked."""
        return SetUp(
            self.workers,
            self.cores,
            memory_share=self.share,
            link_bytes_per_second=None if self.rate == "1gbit" else RATES[self.rate],
            latency_seconds=costs.latency_seconds + self.delay_seconds,
        )


CASES = [
    Case(),
    *(Case(share=share) for share in (0.25, 0.5, 0.75, 1.0)),
    Case(workers=0),
    Case(workers=2),
    Case(cores=1),
    Case(delay_seconds=0.01),
    Case(workers=2, delay_seconds=0.01),
    Case(workers=2, share=0.5),
    Case(rate="200mbit"),
    Case(rate="200mbit", workers=0),
    Case(rate="200mbit", workers=2),
    Case(rate="200mbit", share=0.5),
]


def make_crops(folder: Path, number: int) -> None:
    """Make crops of scikit-learn's photographs (640 x 427) as JPEG, unless they exist.

    Their sizes vary as those of users' pictures do.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [Image.fromarray(picture) for picture in load_sample_images().images]
    for index in range(number):
        path = folder / f"{index:06d}.jpg"
        if path.exists():
            continue
        rng = np.random.default_rng(index)
        picture = pictures[index % len(pictures)]
        height = int(rng.integers(240, 420))
        width = height * 4 // 3
        left, top = int(rng.integers(640 - width + 1)), int(rng.integers(427 - height + 1))
        temporary = path.with_suffix(".part")
        picture.crop((left, top, left + width, top + height)).save(temporary, "JPEG", quality=92)
        temporary.rename(path)


def run_round(folder: Path) -> dict[str, Any]:
    """Everything once: the measurement, and samples/s of every case."""
    measured: dict[str, Any] = {}
    runs: dict[str, Any] = {}
    entry_bytes = 0
    for rate in RATES:
        cases = [case for case in CASES if case.rate == rate]
        with Lab(2, rate=rate, burst=BURSTS[rate]) as lab:
            if rate == "1gbit":
                measured = run_jobs(lab, folder, [], measure={"workers": 1})["measured"]
                entry_bytes = round(measured["costs"]["entry_bytes"])
            for cores in sorted({case.cores for case in cases}):
                some = [case for case in cases if case.cores == cores]
                with on_cores(cores):
                    done = run_jobs(lab, folder, some, entry_bytes=entry_bytes)["setups"]
                runs |= {case.words(): result for case, result in zip(some, done, strict=True)}
    return {"measured": measured, "runs": runs}


@contextlib.contextmanager
def on_cores(number: int) -> Iterator[None]:
    """Let what is started use so many cores, the server too: they stand for a machine's."""
    every = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(every)[:number])
    try:
        yield
    finally:
        os.sched_setaffinity(0, every)


def run_jobs(
    lab: Lab, folder: Path, cases: list[Case], *, entry_bytes: int = 0, measure: Any = None
) -> Any:
    with tempfile.TemporaryDirectory() as temporary:
        jobs, out = Path(temporary) / "jobs.json", Path(temporary) / "out.json"
        setups = [case._asdict() for case in cases]
        jobs.write_text(
            json.dumps({"setups": setups, "measure": measure, "entry_bytes": entry_bytes})
        )
        arguments = [f"--folder={folder}", f"--number={NUMBER}", f"--server={lab.address(1)}"]
        lab.run(
            ["-m", RUN, "--worker", *arguments, f"--jobs={jobs}", f"--out={out}"],
            timeout=1500,
        )
        return json.loads(out.read_text())


def costs_of(measured: dict[str, Any]) -> StallCosts:
    return StallCosts(
        **{name: inf if value is None else value for name, value in measured["costs"].items()}
    )


def report(rounds: list[dict[str, Any]], *, where: str) -> str:
    """Return the table: medians over rounds.

    The error of a round is that of its own measurement against its own run.
    """
    lines = [
        "# Predictions of `topt stalls`", "", where, "",
        f"{NUMBER} JPEG pictures of 320 x 240 to 560 x 420 over HTTP, 224 x 224 when prepared, "
        "batches of 32; measured at",
        f"1 Gb/s with one worker and no cache, all else predicted from that; {len(rounds)} rounds, "
        "medians (lowest to",
        "highest). Others: share of the cores' time taken by anything but the training process and "
        "its workers (the server,",
        "the kernel, other users).",
        "",
        "| set-up | predicted samples/s | run samples/s | error | others |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for case in CASES:
        predicted, runs, errors, others = [], [], [], []
        for measured in rounds:
            costs, run = costs_of(measured["measured"]), measured["runs"][case.words()]
            predicted.append(samples_per_second(costs, case.setup(costs)))
            runs.append(run["samples_per_second"])
            errors.append(100 * (predicted[-1] / runs[-1] - 1))
            others.append(100 * run["others"])
        cells = [
            _median(predicted),
            _median(runs),
            f"{_median(errors, sign=True)} %",
            f"{statistics.median(others):.0f} %",
        ]
        lines.append(f"| {case.words()} | {' | '.join(cells)} |")
    return "\n".join([*lines, *_measured(rounds)]) + "\n"


def _measured(rounds: list[dict[str, Any]]) -> list[str]:
    lines = [
        "",
        "Measured, per sample unless said:",
        "",
        "| cost | median (lowest to highest) |",
        "|---|---|",
    ]
    all_costs = [costs_of(measured["measured"]) for measured in rounds]
    for name, words, factor in (
        ("latency_seconds", "latency, ms", 1e3),
        ("link_bytes_per_second", "rate of the link, Mb/s", 8e-6),
        ("source_bytes", "bytes from the source, kB", 1e-3),
        ("prepare_seconds", "core to fetch and prepare, ms", 1e3),
        ("hit_seconds", "core of a cache hit, ms", 1e3),
        ("collate_seconds", "collating in the training process, ms per batch", 1e3),
        ("worker_seconds", "core of a worker besides samples, ms per batch", 1e3),
        ("receive_seconds", "receiving from a worker, ms per batch", 1e3),
        ("step_seconds", "step, ms per batch", 1e3),
        ("contention", "contention (all cores busy against one)", 1.0),
    ):
        lines.append(
            f"| {words} | "
            f"{_median([factor * getattr(costs, name) for costs in all_costs], digits=2)} |"
        )
    shares = [100 * least_cache(costs, Case().setup(costs)) for costs in all_costs]
    lines.append(f"| least cache worth having, % of the items | {_median(shares)} |")
    return lines


def _median(values: list[float], *, sign: bool = False, digits: int = 0) -> str:
    spec = f"{'+' if sign else ''}.{1 if sign else digits}f"
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:{spec}}" + (f" ({low:{spec}} to {high:{spec}})" if len(values) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "topt-pictures"
    )
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    end_on_signals()
    known = json.loads(FILE.read_text()) if FILE.exists() else {"machine": machine(), "rounds": []}
    if not options.report:
        known = {"machine": machine(), "rounds": []}
        make_crops(options.folder, NUMBER)
        for number in range(options.rounds):
            try:
                known["rounds"].append(run_round(options.folder))
            except LabError as error:
                sys.exit(f"lab: {error}")
            print(f"round {number + 1} of {options.rounds} done", flush=True)
            if options.rounds > 1:
                FILE.write_text(json.dumps(known, indent=1) + "\n")
    text = report(known["rounds"], where=known["machine"])
    print(text)
    if options.rounds > 1 or options.report:
        FILE.with_suffix(".md").write_text(text)


# ---- one rank of a job: rank 1 serves files over HTTP, rank 0 trains on them ---------------------
# Rank 0 measures as `topt stalls` does, or trains in the set-ups that it is given. What it found is
# written as JSON.

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
    """Serve files on rank 1, as fast as a server can be, because the cores are shared.

    A path is /MICROSECONDS OF DELAY/NAME.
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


def run_worker() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", action="store_true", required=True)
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
    run_worker() if "--worker" in sys.argv else main()
