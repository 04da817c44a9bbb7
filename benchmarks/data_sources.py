"""Real data sets of many files, on disk or behind an HTTP server: what the data benchmarks read.

Pictures: crops of the photographs that scikit-learn and scikit-image ship, of the size of
ImageNet's pictures, as JPEG files. Texts: pieces of the source of Python's standard library.
"""

from __future__ import annotations

import argparse
import functools
import http.client
import importlib.util
import io
import os
import socket
import sysconfig
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from lightning_topt.cli.tasks.byte_lm import read_files, split_files

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
    """Files of one kind: their bytes, drawn at random, and what a sample of `shape` and `dtype` is
    made of them by.
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
    files, _ = split_files(Path(sysconfig.get_path("stdlib")), val_fraction=0)
    return read_files(files, limit=None)


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


def make_files(folder: Path, *, number: int, seed: int = 0, kind: Kind = PICTURES) -> list[str]:
    """`number` files in `folder`, made once; their names. The label of a file is its number modulo
    `CLASSES`.
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
    """The same from an HTTP server; one connection per process, which is the most that a careful
    user would do.
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
    """Files at as little cost as can be: the server stands for another machine, but takes this
    one's cores.
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
