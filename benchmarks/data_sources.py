"""Real pictures as a data set of many JPEG files, on disk or behind an HTTP server: what the data benchmarks read.

Crops of the photographs that scikit-learn and scikit-image ship, of the size of ImageNet's pictures.
"""

from __future__ import annotations

import argparse
import functools
import http.client
import http.server
import importlib.util
import io
import socketserver
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

WIDTH, HEIGHT, CROP = 500, 375, 224  # ImageNet's mean size; the usual input of a net
SCIKIT_IMAGE = ("astronaut", "chelsea", "coffee", "rocket", "hubble_deep_field", "ihc", "retina", "motorcycle_left")
CLASSES = 10


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
    enlarged = [max(1.0, 1.2 * WIDTH / image.width, 1.2 * HEIGHT / image.height) for image in images]
    return [
        image.resize((round(image.width * factor), round(image.height * factor)))
        for image, factor in zip(images, enlarged, strict=True)
    ]


def make_files(folder: Path, *, number: int, seed: int = 0) -> list[str]:
    """`number` JPEG files in `folder`, made once; their names. The label of a file is its number modulo `CLASSES`."""
    names = [f"{index:06d}.jpg" for index in range(number)]
    folder.mkdir(parents=True, exist_ok=True)
    missing = [index for index, name in enumerate(names) if not (folder / name).exists()]
    pictures = photographs() if missing else []
    for index in missing:
        rng = np.random.default_rng([seed, index])
        picture = pictures[rng.integers(len(pictures))]
        left, top = (int(rng.integers(size + 1)) for size in (picture.width - WIDTH, picture.height - HEIGHT))
        crop = picture.crop((left, top, left + WIDTH, top + HEIGHT))
        temporary = folder / f"{names[index]}.part"
        crop.save(temporary, "JPEG", quality=92)
        temporary.rename(folder / names[index])
    return names


def prepare(data: bytes) -> Tensor:
    """Decode, shorter side to 256, middle 224 x 224: (3, 224, 224) uint8."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    scale = 256 / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
    left, top = (image.width - CROP) // 2, (image.height - CROP) // 2
    image = image.crop((left, top, left + CROP, top + CROP))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


class JpegFiles(Dataset[tuple[Tensor, int]]):
    """(picture (3, 224, 224) uint8, label) of local files."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder, self.names = folder, names

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> bytes:
        return (self.folder / self.names[index]).read_bytes()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return prepare(self.read(index)), index % CLASSES


class HttpFiles(JpegFiles):
    """The same from an HTTP server; one connection per process, which is the most that a careful user would do."""

    def __init__(self, address: tuple[str, int], names: list[str]) -> None:
        super().__init__(Path("/"), names)
        self.address = address
        self._connection: http.client.HTTPConnection | None = None

    def __getstate__(self) -> dict[str, object]:
        return {"folder": self.folder, "names": self.names, "address": self.address, "_connection": None}

    def read(self, index: int) -> bytes:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(*self.address, timeout=30)
        self._connection.request("GET", f"/{self.names[index]}")
        response = self._connection.getresponse()
        data = response.read()
        if response.status != 200:
            raise OSError(f"HTTP {response.status} for {self.names[index]}")
        return data


class _Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections open
    requests = 0

    def do_GET(self) -> None:
        if self.path == "/requests":
            body = str(type(self).requests).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        type(self).requests += 1
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    request_queue_size = 128


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
    handler = functools.partial(_Handler, directory=str(options.folder))
    _Server((options.host, options.port), handler).serve_forever()


if __name__ == "__main__":
    main()
