"""Shared by the data benchmarks: real files, a server for them, and timed jobs of loaders.

    python -m benchmarks.data.shared FOLDER --host HOST --port PORT     # serves a folder over HTTP

Pictures are crops of the photographs that scikit-learn and scikit-image ship, as JPEG files of the
size of ImageNet's pictures. Texts are pieces of the source of Python's standard library. A job is
one contender in a process of its own, on this machine or behind a link of `benchmarks.lab`.
"""

from __future__ import annotations

import argparse
import functools
import http.client
import importlib.util
import io
import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.lab import Lab, LabError
from lightning_topt.demo import read_files, split_files

BATCH, PORT = 64, 8000
Loader = Iterable[Any]


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
    """Return the seconds of one pass.

    Every batch is copied once to memory that exists already, as to a device's staging buffer.
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
    """Return ``rounds(folder, options, prefix=..., host=...)``, run here or on a node of a lab.

    In a lab the files are served by another node.
    """
    if not options.link:
        return rounds(folder, options, prefix=[], host="")
    try:
        with Lab(2, rate=options.link) as lab:
            into = ["ip", "netns", "exec"]
            serve = [
                sys.executable,
                "-m",
                "benchmarks.data.shared",
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


# ---- real data sets of many files, on disk or behind an HTTP server ------------------------------

WIDTH, HEIGHT, CROP = 500, 375, 224  # ImageNet's mean size; the usual input of a net
SCIKIT_IMAGE = (
    "astronaut",
    "chelsea",
    "coffee",
    "rocket",
    "hubble_deep_field",
    "ihc",
    "retina",
    "motorcycle_left",
)
SHORTEST, LONGEST = 512, 2048  # bytes of a text; all are filled up to the longest
CLASSES = 10


@dataclass(frozen=True)
class Kind:
    """A kind of files: how bytes are drawn at random, and how samples are made of them.

    `prepare` makes a sample of `shape` and `dtype`.
    """

    suffix: str
    draw: Callable[[np.random.Generator], bytes]
    prepare: Callable[[bytes], Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of a sample."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


@functools.cache
def photographs() -> list[Image.Image]:
    """All pictures that the installed packages ship, RGB, at least 600 x 450."""
    found = [
        (importlib.util.find_spec(package), inside)
        for package, inside in (("sklearn", "datasets/images"), ("skimage", "data"))
    ]
    folders = [Path(spec.origin).parent / inside for spec, inside in found if spec and spec.origin]
    paths = [
        path
        for folder in folders
        for path in sorted(folder.glob("*"))
        if path.stem in (*SCIKIT_IMAGE, "china", "flower")
    ]
    images = [Image.open(path).convert("RGB") for path in paths]
    enlarged = [
        max(1.0, 1.2 * WIDTH / image.width, 1.2 * HEIGHT / image.height) for image in images
    ]
    return [
        image.resize((round(image.width * factor), round(image.height * factor)))
        for image, factor in zip(images, enlarged, strict=True)
    ]


def draw_picture(rng: np.random.Generator) -> bytes:
    """A JPEG file."""
    pictures, encoded = photographs(), io.BytesIO()
    picture = pictures[rng.integers(len(pictures))]
    left, top = (
        int(rng.integers(size + 1)) for size in (picture.width - WIDTH, picture.height - HEIGHT)
    )
    picture.crop((left, top, left + WIDTH, top + HEIGHT)).save(encoded, "JPEG", quality=92)
    return encoded.getvalue()


@functools.cache
def corpus() -> bytes:
    """The source of Python's standard library."""
    train_files, val_files = split_files(Path(sysconfig.get_path("stdlib")))
    return read_files(val_files + train_files, limit=None)  # by the hashes of their paths


def draw_text(rng: np.random.Generator) -> bytes:
    """A piece of the corpus, of `SHORTEST` to `LONGEST` bytes."""
    length = int(rng.integers(SHORTEST, LONGEST + 1))
    start = int(rng.integers(len(corpus()) - length))
    return corpus()[start : start + length]


def prepare_picture(data: bytes) -> Tensor:
    """Decode, shorter side to 256, middle 224 x 224: (3, 224, 224) uint8."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    scale = 256 / min(image.size)
    image = image.resize(
        (round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR
    )
    left, top = (image.width - CROP) // 2, (image.height - CROP) // 2
    image = image.crop((left, top, left + CROP, top + CROP))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def prepare_text(data: bytes) -> Tensor:
    """Tokens, which are the bytes, and zeros behind them: (2048,) int64."""
    tokens = torch.zeros(LONGEST, dtype=torch.int64)
    tokens[: len(data)] = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    return tokens


PICTURES = Kind("jpg", draw_picture, prepare_picture, (3, CROP, CROP), torch.uint8)
TEXTS = Kind("txt", draw_text, prepare_text, (LONGEST,), torch.int64)
KINDS = {"pictures": PICTURES, "texts": TEXTS}


def make_files(folder: Path, *, number: int, seed: int = 0, kind: Kind = PICTURES) -> list[str]:
    """Make `number` files in `folder`, unless they exist, and return their names.

    The label of a file is its number modulo `CLASSES`.
    """
    names = [f"{index:06d}.{kind.suffix}" for index in range(number)]
    folder.mkdir(parents=True, exist_ok=True)
    for index in [index for index, name in enumerate(names) if not (folder / name).exists()]:
        temporary = folder / f"{names[index]}.part"
        temporary.write_bytes(kind.draw(np.random.default_rng([seed, index])))
        temporary.rename(folder / names[index])
    return names


class LocalFiles(Dataset[tuple[Tensor, int]]):
    """(sample, label) of local files."""

    def __init__(self, folder: Path, names: list[str], *, kind: Kind = PICTURES) -> None:
        self.folder, self.names, self.kind = folder, names, kind

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> bytes:
        return (self.folder / self.names[index]).read_bytes()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.kind.prepare(self.read(index)), index % CLASSES


class HttpFiles(LocalFiles):
    """The same from an HTTP server, over one connection per process.

    That is the most that a careful user would do.
    """

    def __init__(
        self, address: tuple[str, int], names: list[str], *, kind: Kind = PICTURES
    ) -> None:
        super().__init__(Path("/"), names, kind=kind)
        self.address = address
        self._connection: http.client.HTTPConnection | None = None

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_connection": None}

    def read(self, index: int) -> bytes:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(*self.address, timeout=30)
        self._connection.request("GET", f"/{self.names[index]}")
        response = self._connection.getresponse()
        data = response.read()
        if response.status != 200:
            raise OSError(f"HTTP {response.status} for {self.names[index]}")
        return data


def serve(folder: Path, host: str, port: int) -> None:
    """Serve files at as little cost as possible.

    The server stands for another machine, but takes this one's cores.
    """
    server, asked = socket.create_server((host, port), backlog=128), list[str]()
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_answer, args=(connection, folder, asked), daemon=True).start()


def _answer(connection: socket.socket, folder: Path, asked: list[str]) -> None:
    # else a small file waits 40 ms for its header
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection, connection.makefile("rb") as lines:
        while request := lines.readline():
            while lines.readline().strip():
                pass
            name = request.split()[1].decode().lstrip("/")
            if name == "requests":
                body = str(len(asked)).encode()
                connection.sendall(
                    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
                )
                continue
            asked.append(name)
            with (folder / name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                connection.sendall(
                    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size, socket.MSG_MORE
                )
                connection.sendfile(file)


def requests_of(address: tuple[str, int]) -> int:
    """How many files the server has been asked for."""
    connection = http.client.HTTPConnection(*address, timeout=30)
    connection.request("GET", "/requests")
    return int(connection.getresponse().read())


def main() -> None:
    """Serve a folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    serve(options.folder, options.host, options.port)


if __name__ == "__main__":
    main()
