"""What benchmarks of loaders share: one contender per process, on this machine or behind a link; an
epoch's time.
"""

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

from benchmarks.data_sources import PICTURES, TEXTS, HttpFiles, Kind, LocalFiles, make_files
from benchmarks.lab import Lab
from benchmarks.lab_nodes import LabError

BATCH, PORT = 64, 8000
Loader = Iterable[Any]
KINDS = {"pictures": PICTURES, "texts": TEXTS}


def entry_bytes(kind: Kind) -> int:
    """More than an entry of a cache takes."""
    return kind.nbytes + 9_472


def add_common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--link", help="rate of the link to the files, in tc's units; none: local files"
    )
    parser.add_argument("--kind", choices=tuple(KINDS), default="pictures")
    parser.add_argument("--number", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker-counts", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "topt-samples")
    for hidden in ("--one", "--host"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    for hidden in ("--workers", "--epochs"):
        parser.add_argument(hidden, type=int, default=1, help=argparse.SUPPRESS)


def prepared(options: argparse.Namespace) -> Path:
    """The folder of so many samples, made where they are not there yet."""
    folder: Path = options.folder / options.kind / str(options.number)
    names = make_files(folder / "files", number=options.number, kind=KINDS[options.kind])
    (folder / "names.json").write_text(json.dumps(names))
    return folder


def source(options: argparse.Namespace) -> LocalFiles:
    """The samples: behind HTTP where the job was given a host."""
    names, kind = json.loads((options.folder / "names.json").read_text()), KINDS[options.kind]
    if options.host:
        return HttpFiles((options.host, PORT), names, kind=kind)
    return LocalFiles(options.folder / "files", names, kind=kind)


def epoch(loader: Loader, kind: Kind) -> float:
    """Seconds of one pass; every batch is copied once to memory that is there, as to a device's
    staging buffer.
    """
    device = torch.empty(BATCH, *kind.shape, dtype=kind.dtype).fill_(0)
    start, number = time.perf_counter(), 0
    for batch in loader:
        samples = torch.as_tensor(batch["x"] if isinstance(batch, dict) else batch[0])
        device[: len(samples)].copy_(samples)
        number += len(samples)
    assert number and device.any()
    return time.perf_counter() - start


def touch_memory(nbytes: int) -> None:
    """Use so much memory and give it back."""
    descriptor = os.memfd_create("touched")
    for _ in range(nbytes >> 20):
        os.write(descriptor, bytes(1 << 20))
    os.close(descriptor)


def job(
    module: str,
    contender: str,
    workers: int,
    folder: Path,
    options: argparse.Namespace,
    *,
    epochs: int = 1,
    prefix: list[str],
    host: str,
) -> Any:
    """What one contender's process prints as JSON."""
    command = [
        *prefix,
        sys.executable,
        "-m",
        f"benchmarks.{module}",
        "--one",
        contender,
        "--workers",
        str(workers),
    ]
    command += ["--kind", options.kind, "--folder", str(folder), "--epochs", str(epochs)]
    command += ["--host", host] if host else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{contender}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def title(options: argparse.Namespace) -> str:
    """Of a report."""
    what = {"pictures": "JPEG files", "texts": "texts"}[options.kind]
    return f"{what} " + (
        f"behind HTTP and a link of {options.link}" if options.link else "on the local disk"
    )


def result_name(options: argparse.Namespace) -> str:
    """Its file's, without the ending."""
    return f"{options.link or 'local'}" + ("" if options.kind == "pictures" else f"_{options.kind}")


def on_link_or_here(rounds: Callable[..., Any], folder: Path, options: argparse.Namespace) -> Any:
    """``rounds(folder, options, prefix=..., host=...)`` on this machine, or on a lab's node, the
    files on another.
    """
    if not options.link:
        return rounds(folder, options, prefix=[], host="")
    try:
        with Lab(2, rate=options.link) as lab:
            into = ["ip", "netns", "exec"]
            serve = [
                sys.executable,
                "-m",
                "benchmarks.data_sources",
                str(folder / "files"),
                "--host",
                lab.address(0),
            ]
            server = subprocess.Popen([*into, lab.nodes[0], *serve, "--port", str(PORT)])
            try:
                time.sleep(3)
                return rounds(folder, options, prefix=[*into, lab.nodes[1]], host=lab.address(0))
            finally:
                server.kill()
    except LabError as error:
        sys.exit(f"a link of {options.link}: {error}")
