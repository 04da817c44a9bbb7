"""What benchmarks of loaders share: one contender per process, on this machine or behind a link; an epoch's time."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.data_sources import CROP, HttpFiles, JpegFiles, make_files
from benchmarks.lab import Lab, LabError

BATCH, PORT = 64, 8000
ENTRY_BYTES = 160_000  # more than an entry of a cache takes
Loader = Iterable[Any]


def add_common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--link", help="rate of the link to the files, in tc's units; none: local files")
    parser.add_argument("--number", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker-counts", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "topt-pictures")
    for hidden in ("--one", "--host"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    for hidden in ("--workers", "--epochs"):
        parser.add_argument(hidden, type=int, default=1, help=argparse.SUPPRESS)


def prepared(options: argparse.Namespace) -> Path:
    """The folder of so many pictures, made where they are not there yet."""
    folder: Path = options.folder / str(options.number)
    (folder / "names.json").write_text(json.dumps(make_files(folder / "files", number=options.number)))
    return folder


def source(options: argparse.Namespace) -> Dataset[Any]:
    """The pictures: behind HTTP where the job was given a host."""
    names = json.loads((options.folder / "names.json").read_text())
    return HttpFiles((options.host, PORT), names) if options.host else JpegFiles(options.folder / "files", names)


def epoch(loader: Loader) -> float:
    """Seconds of one pass; every batch is copied once to memory that is there, as to a device's staging buffer."""
    device = torch.empty(BATCH, 3, CROP, CROP, dtype=torch.uint8).fill_(0)
    start, number = time.perf_counter(), 0
    for batch in loader:
        images = torch.as_tensor(batch["x"] if isinstance(batch, dict) else batch[0])
        device[: len(images)].copy_(images)
        number += len(images)
    assert number and device.any()
    return time.perf_counter() - start


def touch_memory(nbytes: int) -> None:
    """Use so much memory and give it back."""
    descriptor = os.memfd_create("touched")
    for _ in range(nbytes >> 20):
        os.write(descriptor, bytes(1 << 20))
    os.close(descriptor)


def job(
    module: str, contender: str, workers: int, folder: Path, *, epochs: int = 1, prefix: list[str], host: str
) -> Any:
    """What one contender's process prints as JSON."""
    command = [*prefix, sys.executable, "-m", f"benchmarks.{module}", "--one", contender, "--workers", str(workers)]
    command += ["--folder", str(folder), "--epochs", str(epochs), *(["--host", host] if host else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{contender}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def on_link_or_here(rounds: Callable[..., Any], folder: Path, options: argparse.Namespace) -> Any:
    """``rounds(folder, options, prefix=..., host=...)`` on this machine, or on a lab's node, the files on another."""
    if not options.link:
        return rounds(folder, options, prefix=[], host="")
    try:
        with Lab(2, rate=options.link) as lab:
            into = ["ip", "netns", "exec"]
            serve = [sys.executable, "-m", "benchmarks.data_sources", str(folder / "files"), "--host", lab.address(0)]
            server = subprocess.Popen([*into, lab.nodes[0], *serve, "--port", str(PORT)])
            try:
                time.sleep(3)
                return rounds(folder, options, prefix=[*into, lab.nodes[1]], host=lab.address(0))
            finally:
                server.kill()
    except LabError as error:
        sys.exit(f"a link of {options.link}: {error}")
