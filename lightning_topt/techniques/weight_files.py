"""Weights in safetensors files: rows of a tensor are read, and files written tensor by tensor.

    8 bytes       the length of the header, little-endian
    the header    JSON: dtype, shape and place of each tensor, by name
    the rest      the tensors

Where a model has several files, an index beside them (``*.safetensors.index.json``) names them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_topt.graph.errors import PlanError

FILE, INDEX = ".safetensors", ".safetensors.index.json"
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64},
    **{"BOOL": torch.bool, "C64": torch.complex64},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}


# ---- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, where its bytes begin at `start`."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def read(self, rows: range | None = None) -> Tensor:
        """Return it on the host, or these rows of its first dim: (len(rows), ...)."""
        shape = self.shape if rows is None else (len(rows), *self.shape[1:])
        value, skipped = torch.empty(shape, dtype=self.dtype), 0
        if value.numel():
            if rows is not None:
                skipped = rows.start * (value.nbytes // len(rows))
            with self.file.open("rb") as file:
                file.seek(self.start + skipped)
                file.readinto(_bytes_of(value))
        return value


def stored_weights(path: str | Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, or of those in a folder, by name.

    In a folder those count that its index names; without one all. Raises PlanError where there are
    none, or one cannot be read.
    """
    place, found = Path(path), dict[str, StoredTensor]()
    indices = [place] if place.name.endswith(INDEX) else sorted(place.glob(f"*{INDEX}"))
    files = sorted(place.glob(f"*{FILE}")) if place.is_dir() else [place]
    if len(indices) > 1:
        raise PlanError(f"{str(place)!r} has several indices ({indices[0].name}, ...): give one")
    try:
        if indices:
            named = json.loads(indices[0].read_bytes())["weight_map"].values()
            files = [indices[0].with_name(name) for name in sorted({*named})]
        for place in files:
            for name, tensor in _header(place).items():
                if name in found:
                    raise ValueError(f"{found[name].file.name} has {name!r}, too: give one of both")
                found[name] = tensor
    # the bytes decide what is raised
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise PlanError(
            f"weights cannot be read from {str(place)!r} ({type(error).__name__}: {error}): give a "
            "whole safetensors file, or a folder of such files"
        ) from error
    if not found:
        raise PlanError(f"{str(path)!r} has no weights: give a folder with *{FILE}, or a file")
    return found


def _header(file: Path) -> dict[str, StoredTensor]:
    # The tensors of a file. Raises whatever its bytes bring about
    size, found = file.stat().st_size, {}
    with file.open("rb") as opened:
        first = 8 + int.from_bytes(opened.read(8), "little")
        if not 8 < first <= size:
            raise ValueError("it has no such header, or is cut off")
        header = json.loads(opened.read(first - 8))
    for name, entry in header.items():
        if name != "__metadata__":
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            start, end = entry["data_offsets"]
            is_whole = end - start == math.prod(shape) * dtype.itemsize
            if not (is_whole and 0 <= start <= end <= size - first):
                raise ValueError(f"{name!r} is not whole")
            found[name] = StoredTensor(file, dtype, shape, first + start)
    return found


# ---- writing -------------------------------------------------------------------------------------


def write_weights(
    path: Path,
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    read: Callable[[str], Tensor],
    *,
    most_bytes: float = math.inf,
) -> list[Path]:
    """Write tensors to a safetensors file, one after the other, and return the files.

    Args:
        path: ends with ``.safetensors``.
        tensors: their dtypes and shapes, by name.
        read: returns a tensor by its name, on the host.
        most_bytes: of the tensors in one file. Where they are more, files are numbered, and an
            index is beside them, as transformers has it.

    Raises ValueError for a dtype that the format lacks.
    """
    # Which tensors go into which file.
    codes, sizes = {dtype: code for code, dtype in DTYPES.items()}, {}
    parts, room = [list[str]()], most_bytes
    for name, (dtype, shape) in tensors.items():
        if dtype not in codes:
            raise ValueError(f"{name!r} is {dtype}, which safetensors files do not have")
        sizes[name] = math.prod(shape) * dtype.itemsize
        if parts[-1] and sizes[name] > room:
            parts.append([])
            room = most_bytes
        parts[-1].append(name)
        room -= sizes[name]
    stem, count = path.name.removesuffix(FILE), len(parts)
    index, files = path.with_name(stem + INDEX), [path]
    if count > 1:
        numbers = range(1, count + 1)
        files = [path.with_name(f"{stem}-{n:05}-of-{count:05}{FILE}") for n in numbers]
    weight_map = dict[str, str]()
    for file, names in zip(files, parts, strict=True):
        # The largest elements first: so all are aligned.
        names.sort(key=lambda name: -tensors[name][0].itemsize)
        header, end = dict[str, Any](__metadata__={"format": "pt"}), 0
        for name in names:
            dtype, shape = tensors[name]
            place, end = [end, end + sizes[name]], end + sizes[name]
            header[name] = {"dtype": codes[dtype], "shape": [*shape], "data_offsets": place}
            weight_map[name] = file.name
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        # A file has its name once it is whole.
        unfinished = file.with_name(f"{file.name}.unfinished")
        with unfinished.open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                opened.write(_bytes_of(read(name).contiguous()))
        unfinished.replace(file)
    # What would be read in their place, of a write before.
    (path if count > 1 else index).unlink(missing_ok=True)
    if count > 1:
        total = {"total_size": sum(sizes.values())}
        index.write_text(json.dumps({"metadata": total, "weight_map": weight_map}, indent=1))
    return files


def _bytes_of(tensor: Tensor) -> memoryview:
    # The memory of a contiguous tensor
    memory: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(memory)
