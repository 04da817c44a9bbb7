"""`topt predict runs=FILE.csv`: predict the runs of a CSV file under Megatron-LM, a row each.

    file = read_rows(path)                        # checked
    fitted = fit_rows(cluster, file.rows)         # constants, from rows with measured times
    MegatronCosts(cluster).price(row)             # seconds of an iteration, bytes at its peak

The columns are those of github VIA-Research/vTrain (`data/ground_truth_single.csv`), in any order;
others are kept, not read.

A row is priced by the model that the search prices pipelines with (`plan.stage_simulation`). It is
a chain of equal layers under 1F1B, on a mesh pipeline x data x tensor. Stages have equally many
layers; the first have one more where that is not possible. Tensor groups are neighbours. Every
shape of layer is captured once (`megatron_gpt`), with three layers that are repeated, whatever the
depth and the batch. Layers recompute their activations only where a rank's memory is too small to
keep them, and large enough then.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from lightning_topt.cli.megatron_gpt import GPTSizes, MegatronGPT, takes_fused_softmax
from lightning_topt.costs.cluster import (
    Accuracy,
    Cluster,
    Device,
    ErrorFigure,
    Link,
    sentence_of,
)
from lightning_topt.costs.fitted_constants import CONSTANTS, FittedConstants, fit_constants
from lightning_topt.costs.optimizer import OptimizerProfile, ParameterUpdate
from lightning_topt.costs.plain_values import names, shown
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.frontier.stage_search import StagePoint
from lightning_topt.graph.capture import capture
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.module_copy import build_on_meta
from lightning_topt.graph.op_graph import Block, OpGraph
from lightning_topt.plan.stage_blocks import RepeatedBlocks, StageBlocks, repeat_blocks
from lightning_topt.plan.stage_simulation import (
    StageSeconds,
    formula_step_seconds,
    peak_bytes_of,
    stage_bytes,
    stage_seconds,
    step_seconds_of,
)
from lightning_topt.plan.stage_tables import PASS_SECONDS, PipelineShape

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

# Adam in mixed precision (Micikevicius et al., arXiv 1710.03740; Rajbhandari et al., arXiv
# 1910.02054, section 3.1): a float32 copy, momentum and variance; read and written with the
# gradient, which is copied to float32 and whose norm is taken.
STATE_BYTES, MOVED_BYTES = 12, 2 + 4 + 4 + 4 + 2 * 12 + 2

# parts of an iteration, and how they are printed
_PARTS = {
    "forward": "forward",
    "backward": "backward",
    "once": "exchange of gradients and update",
    "pipeline": "waiting in the pipeline",
}


def predict_rows(
    runs: Path,
    cluster: Cluster,
    *,
    calibrate_on: Path | None = None,
    out: Path | None = None,
    save_cluster: Path | None = None,
    console: Console,
) -> None:
    """Predict the rows of a file, and print a summary.

    Args:
        runs: the file.
        cluster: where they run; it gets as many more nodes as the rows need.
        calibrate_on: a file of measured rows, to which the constants of the cluster are fitted.
        out: gets the rows with what is predicted.
        save_cluster: gets the cluster.
        console: where to print.

    Raises:
        ValueError: files that cannot be read, and rows that no run can have.
    """
    # a cluster for the rows that are predicted, and for those it is fitted to
    file = read_rows(runs)
    known = None if calibrate_on is None else measured_rows(calibrate_on)
    used = [*file.rows, *(known or ())]
    larger = cluster_for(used, cluster)
    if larger is not cluster:
        console.print(
            f"{cluster.name} has {cluster.num_devices} devices: predicted for {larger.num_nodes} "
            "such nodes, as the rows need.",
            highlight=False,
        )

    # its constants
    if known is not None and calibrate_on is not None:
        fitted = fit_rows(larger, known)
        _print_constants(larger, fitted, console)
        accuracy = Accuracy(
            fitted.error, source=f"the {len(known)} rows of {calibrate_on.name} it was fitted to"
        )
        larger = replace(fitted.cluster, accuracy=accuracy)

    # the rows
    costs = MegatronCosts(larger)
    priced = [costs.price(row) for row in file.rows]
    _print_summary(file.rows, priced, console)
    console.print(sentence_of(larger.accuracy), highlight=False)
    if out is not None:
        # predicted_error: nine of ten predictions are wrong by at most this share
        added = {
            "predicted_seconds": [each.step_seconds for each in priced],
            "predicted_peak_bytes": [each.peak_bytes for each in priced],
        }
        if larger.accuracy is not None:
            added["predicted_error"] = [larger.accuracy.seconds.p90] * len(priced)
        file.save(out, added)
        console.print(f"predictions: {out}", highlight=False, soft_wrap=True)
    if save_cluster is not None:
        save_cluster.parent.mkdir(parents=True, exist_ok=True)
        larger.save(save_cluster)
        console.print(f"cluster: {save_cluster}", highlight=False, soft_wrap=True)


def measured_rows(path: Path) -> list[MegatronRow]:
    """Return the rows of a file that have measured times.

    Raises:
        ValueError: there are fewer than two of them.
    """
    rows = [row for row in read_rows(path, need_times=True).rows if row.seconds is not None]
    if len(rows) < 2:
        raise ValueError(
            f"{path} has {len(rows)} rows with a measured time: constants are fitted to at least "
            "two"
        )
    return rows


def fit_rows(cluster: Cluster, rows: Sequence[MegatronRow]) -> FittedConstants:
    """Return the cluster with its constants fitted to measured rows."""

    def predict(changed: Cluster) -> list[float]:
        # once per change of the constants, of which there are hundreds
        costs = MegatronCosts(changed)
        return [costs.step_seconds(row) for row in rows]

    return fit_constants(cluster, predict, [row.seconds for row in rows if row.seconds is not None])


def cluster_for(rows: Sequence[MegatronRow], cluster: Cluster) -> Cluster:
    """Return the cluster, with as many more of its nodes as the largest of `rows` needs.

    Raises:
        ValueError: it has several kinds of nodes, or one node and no network.
    """
    # the largest row decides for all
    most = max(row.gpus for row in rows)
    if most <= cluster.num_devices:
        return cluster
    if cluster.nodes or cluster.inter is None:
        why = (
            "has several kinds of nodes"
            if cluster.nodes
            else "says nothing of a network between nodes (inter)"
        )
        raise ValueError(
            f"{most} GPUs are more than the {cluster.num_devices} of the cluster {cluster.name!r}, "
            f"which {why}: describe a larger one"
        )
    return replace(cluster, num_nodes=math.ceil(most / cluster.devices_per_node))


def _print_constants(before: Cluster, fitted: FittedConstants, console: Console) -> None:
    table = Table(
        "constant", "in the file", "fitted", "factor", title=f"Constants of {before.name}"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for constant in CONSTANTS:
        name = f"{constant.part}.{constant.entry}"
        if name in fitted.factors:
            values = constant.of(before), constant.of(fitted.cluster), fitted.factors[name]
            table.add_row(name, *(f"{value:.3g}" for value in values))
    console.print(table)


def _print_summary(
    rows: Sequence[MegatronRow], priced: Sequence[RowCosts], console: Console
) -> None:
    """Print what the predicted time is made of, and its error where times were measured."""
    # all rows together
    seconds = {part: sum(each.seconds[part] for each in priced) for part in _PARTS}
    total = sum(seconds.values()) or 1.0
    made = ", ".join(f"{name} {100 * seconds[part] / total:.0f} %" for part, name in _PARTS.items())
    console.print(f"{len(rows)} rows; of their predicted time: {made}.", highlight=False)
    pairs = [
        (cost.step_seconds, row.seconds)
        for cost, row in zip(priced, rows, strict=True)
        if row.seconds is not None
    ]
    if pairs:
        # two figures: the mean error, and how far most of them are off
        figure = ErrorFigure.of(*zip(*pairs, strict=True))
        mean = sum(abs(a / b - 1) for a, b in pairs) / len(pairs)
        console.print(
            f"Against the times in the file: mean error {100 * mean:.1f} %; {figure}.",
            highlight=False,
        )


# ---- the costs of a row


@dataclass(frozen=True)
class RowCosts:
    """The costs of a row.

    Args:
        step_seconds: of an iteration.
        peak_bytes: of the fullest rank.
        seconds: parts of an iteration on the slowest rank: "forward", "backward", "pipeline" (what
            it waits for others), "once" (exchange of gradients and update).
    """

    step_seconds: float
    peak_bytes: float
    seconds: Mapping[str, float]


class MegatronCosts:
    """The costs of rows on one cluster; what is known of a shape of layer is kept."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._chains: dict[GPTSizes, StageBlocks] = {}
        self._repeated: dict[tuple[GPTSizes, int], RepeatedBlocks] = {}

    def price(self, row: MegatronRow) -> RowCosts:
        """Return the costs of a row.

        Raises:
            ValueError: it has more ranks than the cluster has devices.
        """
        blocks, shape, point, peak = self._placed(row)
        seconds = stage_seconds(blocks, shape, [point])  # (stage, point), here one point
        step = _step_seconds(seconds, shape)
        count = shape.num_microbatches
        # the rank that works longest; what is left of the step it waits
        slowest = int((count * (seconds.forward + seconds.backward) + seconds.once)[:, 0].argmax())
        parts = {
            "forward": count * (float(seconds.forward[slowest, 0]) + PASS_SECONDS),
            "backward": count * (float(seconds.backward[slowest, 0]) + PASS_SECONDS),
            "once": float(seconds.once[slowest, 0]),
        }
        return RowCosts(step, peak, {**parts, "pipeline": max(step - sum(parts.values()), 0.0)})

    def step_seconds(self, row: MegatronRow) -> float:
        """Return the seconds of an iteration of a row; raises what `price` raises."""
        blocks, shape, point, _ = self._placed(row)
        return _step_seconds(stage_seconds(blocks, shape, [point]), shape)

    def _placed(self, row: MegatronRow) -> tuple[StageBlocks, PipelineShape, StagePoint, float]:
        """Return the chain, the pipeline, its cut into stages, and the bytes at its peak."""
        if row.gpus > self.cluster.num_devices:
            raise ValueError(
                f"{row.gpus} GPUs are more than the {self.cluster.num_devices} of the cluster "
                f"{self.cluster.name!r}: say "
                f"cluster.num_nodes={math.ceil(row.gpus / self.cluster.devices_per_node)}"
            )
        chain = self._chain_of(row)
        shape = PipelineShape(
            row.pipeline,
            row.data,
            "1f1b",
            1,
            row.num_microbatches,
            float(row.samples),
            tensor=row.tensor,
        )
        # stages of equally many layers; `ends` has the layer after each stage
        each, more = divmod(row.layers, row.pipeline)
        ends = tuple(each * stage + min(stage, more) for stage in range(1, row.pipeline + 1))
        # all layers keep their activations, or all recompute them
        points = [
            StagePoint(0.0, 0.0, ends, (0,) * row.pipeline, (again,) * row.layers)
            for again in (0, 1)
        ]
        # a run that was measured did fit; where neither does, nothing follows
        peaks = peak_bytes_of(chain, shape, stage_bytes(chain, shape, points)).tolist()
        again = peaks[0] > self.cluster.device.memory_bytes >= peaks[1]
        return chain, shape, points[again], peaks[again]

    def _chain_of(self, row: MegatronRow) -> RepeatedBlocks:
        """Return the chain of all layers of a row, from that of the first, a middle and the last.

        Layers 0 1 2 of the captured chain become 0 1 1 ... 1 2.
        """
        sizes = sizes_of(row)
        key = sizes, row.layers
        if key not in self._repeated:
            count = row.layers
            places = tuple(range(count)) if count <= 3 else (0, *[1] * (count - 2), 2)
            self._repeated[key] = repeat_blocks(self._captured_chain(sizes), places)
        return self._repeated[key]

    def _captured_chain(self, sizes: GPTSizes) -> StageBlocks:
        """Return the captured chain on this cluster."""
        if sizes not in self._chains:
            known = captured_step(sizes)
            step = replace(known.base, cluster=self.cluster)
            # What follows from the graph alone is not worked out again: a fit asks for the costs
            # of the same rows on hundreds of clusters.
            for name in ("segments", "reduced_last", "tied", "phases", "_parameters"):
                step.__dict__[name] = getattr(known.base, name)
            self._chains[sizes] = known.blocks.of_same_graph(step)
        return self._chains[sizes]


def _step_seconds(seconds: StageSeconds, shape: PipelineShape) -> float:
    """Return the simulated seconds of a step; those of a formula where it has too many passes."""
    simulated = step_seconds_of(seconds, shape)
    return float((formula_step_seconds(seconds, shape) if simulated is None else simulated)[0])


# ---- the captured step


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """The step of one rank on a microbatch, on a cluster that stands for any.

    Args:
        graph: the step, captured.
        base: the step with its optimizer and mesh.
        blocks: its chain of blocks.
    """

    graph: OpGraph
    base: TrainingStep
    blocks: StageBlocks


@lru_cache(maxsize=256)
def captured_step(sizes: GPTSizes) -> CapturedStep:
    """Return the step of one rank of a GPT of these sizes."""
    # two samples of S+1 tokens; each layer is a block of its own
    module = build_on_meta(lambda: MegatronGPT(sizes))
    graph = capture(module, torch.zeros(2, sizes.sequence + 1, dtype=torch.int64))
    layers = [Block(f"layers.{index}", 1, recomputable=False) for index in range(sizes.layers)]
    graph = graph.with_blocks([Block("", 0, recomputable=False), *layers])

    # mixed-precision Adam, on a cluster of one node with as many ranks as the tensor group
    updates = {
        p.name: ParameterUpdate(
            STATE_BYTES * p.numel, float(MOVED_BYTES * p.numel), 1.0, 0.0, False
        )
        for p in graph.parameters
    }
    optimizer = OptimizerProfile("Adam", elementwise=True, by_parameter=True, updates=updates)
    tensor = (Axis("tensor", sizes.tensor),) if sizes.tensor > 1 else ()
    machines = Cluster(
        "any", Device("any", 1, {"float32": 1.0}, 1.0), sizes.tensor, 1, Link(0.0, 1.0)
    )
    mesh = Mesh((Axis("data", 1), *tensor))
    base = TrainingStep(graph, machines, optimizer, mesh, graph.batch_size)
    return CapturedStep(graph, base, StageBlocks(base))


def sizes_of(row: MegatronRow) -> GPTSizes:
    """Return what is captured for a row."""
    fused = takes_fused_softmax(
        samples=row.samples, heads=row.heads // row.tensor, sequence=row.sequence
    )
    return GPTSizes(row.hidden, row.heads, row.sequence, min(row.layers, 3), row.tensor, fused)


# ---- the file


@dataclass(frozen=True)
class MegatronRow:
    """One run: a GPT, its batch and its parallel sizes.

    `samples` are those of a microbatch; `seconds` those of an iteration, where they were measured.

    Raises:
        ValueError: for sizes that no run can have.
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
        # each size alone, then what they say of one another
        for name, column in COLUMNS.items():
            if not 1 <= getattr(self, name) <= MOST:
                raise ValueError(
                    f"{column} is a whole number from 1 to {MOST:,}, not {getattr(self, name)}"
                )
        # the ranks, then what has to divide evenly
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
    """A file: its header and lines as text, and the rows that the lines are."""

    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    rows: Sequence[MegatronRow]

    def save(self, path: Path, added: Mapping[str, Sequence[float]]) -> None:
        """Write all columns, and the `added` ones, which have one value for each row.

        They replace columns of their names.
        """
        # columns of the same names, such as an earlier prediction's, are left out
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
    """Read a file; with `need_times` it must have measured times.

    Raises:
        ValueError: it names the file, the line, and what is wrong with it.
    """
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
    # empty lines are no rows; numbers of lines count from 1, which is the header
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
    """Return the index of each column that is read, by the row's field."""
    # of two columns with one name, the first
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
    """Return the name of a column, whatever its case, blanks and "#"."""
    return " ".join(name.replace("#", " ").lower().split())


def _row(line: Sequence[str], places: Mapping[str, int], where: str, columns: int) -> MegatronRow:
    # a line that is cut off would shift its values
    if len(line) != columns:
        raise ValueError(f"{where}: {len(line)} values, but {columns} columns")
    sizes = {name: _whole(line[places[name]], COLUMNS[name], where) for name in COLUMNS}
    try:
        return MegatronRow(**sizes, seconds=_seconds(line, places))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _whole(text: str, column: str, where: str) -> int:
    try:
        # 24.0 is whole, as spreadsheets write numbers
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
    return milliseconds / 1e3  # milliseconds in the file
