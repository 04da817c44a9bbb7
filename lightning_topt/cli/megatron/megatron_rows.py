"""A CSV file of runs under Megatron-LM, a row each, is read, checked, and written with predictions.

The columns are those of github VIA-Research/vTrain (`data/ground_truth_single.csv`), in any order;
others are kept, not read.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_topt.costs.plain_values import names, shown

# so that no file takes hours, and no size is more than a number of bytes can be
MOST_ROWS, MOST = 100_000, 10**9
COLUMNS = {
    "gpus": "# GPUs",
    "batch": "global batch",
    "samples": "micro batch",
    "hidden": "hidden size",
    "heads": "attention heads",
    "layers": "# layers",
    "sequence": "sequence length",
    "tensor": "tensor parallelism",
    "data": "data parallelism",
    "pipeline": "pipeline parallelism",
}
TIME = "iteration time (ms)"


@dataclass(frozen=True)
class MegatronRow:
    """One run: a GPT, its batch and its parallel sizes; `seconds` of an iteration where they were
    measured.

    `samples` are those of a microbatch. Raises ValueError for sizes that no run can have.
    """

    gpus: int
    batch: int
    samples: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    tensor: int
    data: int
    pipeline: int
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name, column in COLUMNS.items():
            if not 1 <= getattr(self, name) <= MOST:
                raise ValueError(
                    f"{column} is a whole number from 1 to {MOST:,}, not {getattr(self, name)}"
                )
        product = self.tensor * self.data * self.pipeline
        if product != self.gpus:
            raise ValueError(
                f"tensor {self.tensor} x data {self.data} x pipeline {self.pipeline} are {product} "
                f"ranks, not the {self.gpus} of {COLUMNS['gpus']!r}"
            )
        for name, parts, over in (
            ("hidden", self.heads, "attention heads"),
            ("heads", self.tensor, "ranks of tensor parallelism"),
            (
                "batch",
                self.data * self.samples,
                f"data ranks ({self.data}) x micro batch ({self.samples})",
            ),
        ):
            if getattr(self, name) % parts:
                raise ValueError(
                    f"{COLUMNS[name]} {getattr(self, name)} cannot be divided evenly over {parts} "
                    f"{over}"
                )
        if self.layers < self.pipeline:
            raise ValueError(
                f"{self.pipeline} stages of pipeline parallelism need as many layers, not "
                f"{self.layers}"
            )

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a data rank in an iteration."""
        return self.batch // (self.data * self.samples)

    @property
    def job(self) -> tuple[int, ...]:
        """The sizes that stay when the plan changes: devices, batch and model."""
        return self.gpus, self.batch, self.hidden, self.heads, self.layers, self.sequence


@dataclass(frozen=True)
class RowFile:
    """The lines of a file with their header, as text, and the rows that they are."""

    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    rows: Sequence[MegatronRow]

    def save(self, path: Path, added: Mapping[str, Sequence[float]]) -> None:
        """Write all columns, and those that are `added`, one value for each row; they replace
        columns of their names.
        """
        kept = [index for index, name in enumerate(self.header) if name.strip() not in added]
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*(self.header[index] for index in kept), *added])
            for line, values in zip(self.lines, zip(*added.values(), strict=True), strict=True):
                writer.writerow(
                    [*(line[index] for index in kept), *(f"{value:.9g}" for value in values)]
                )


def read_rows(path: Path, *, need_times: bool = False) -> RowFile:
    """Read a file. Raises ValueError that names the file, the line and what is wrong with it."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [line for _, line in zip(range(MOST_ROWS + 2), csv.reader(file), strict=False)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"cannot read {shown(str(path))} as a CSV file: {error}") from error
    if not lines:
        raise ValueError(
            f"{path} is empty: its first line names the columns {', '.join(COLUMNS.values())}"
        )
    if len(lines) > MOST_ROWS + 1:
        raise ValueError(f"{path} has more than {MOST_ROWS:,} rows; give it in parts")
    header, *rest = lines
    places = _places(path, header, need_times=need_times)
    numbered = [
        (number, line)
        for number, line in enumerate(rest, start=2)
        if any(cell.strip() for cell in line)
    ]
    if not numbered:
        raise ValueError(f"{path} has no rows below its header")
    rows = [_row(line, places, f"{path}, line {number}", len(header)) for number, line in numbered]
    return RowFile(header, [line for _, line in numbered], rows)


def _places(path: Path, header: Sequence[str], *, need_times: bool) -> dict[str, int]:
    """The index of each column that is read."""
    known = {_plain(name): index for index, name in reversed([*enumerate(header)])}
    wanted = {**COLUMNS, "seconds": TIME}
    missing = [column for column in COLUMNS.values() if _plain(column) not in known]
    if need_times and _plain(TIME) not in known:
        missing.append(TIME)
    if missing:
        raise ValueError(
            f"{path} lacks the column{'s' * (len(missing) > 1)} {names(missing)}; it has "
            f"{names(header)}, and needs those of vTrain's ground_truth_single.csv"
        )
    return {
        name: known[_plain(column)] for name, column in wanted.items() if _plain(column) in known
    }


def _plain(name: str) -> str:
    return " ".join(name.replace("#", " ").lower().split())


def _row(line: Sequence[str], places: Mapping[str, int], where: str, columns: int) -> MegatronRow:
    if len(line) != columns:
        raise ValueError(f"{where}: {len(line)} values, but {columns} columns")
    sizes = {name: _whole(line[places[name]], COLUMNS[name], where) for name in COLUMNS}
    try:
        return MegatronRow(**sizes, seconds=_seconds(line, places))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _whole(text: str, column: str, where: str) -> int:
    try:
        value = float(text) if len(text) < 40 else float("nan")
        if value == int(value):
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"{where}: {column} is a whole number, not {shown(text)}")


def _seconds(line: Sequence[str], places: Mapping[str, int]) -> float | None:
    text = line[places["seconds"]].strip() if "seconds" in places else ""
    if not text:
        return None
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = -1.0
    if not 0 < milliseconds < 1e12:
        raise ValueError(f"{TIME} is a number above 0, not {shown(text)}")
    return milliseconds / 1e3
