"""Training runs of Transformers that somebody made, a row of a CSV file each: read and checked.

    file = read_run_file(path)                     # two kinds of headers, columns in any order
    file.runs[0].model.hidden, file.runs[0].tensor, file.runs[0].seconds
    file.save(path, {"predicted_seconds": [...]})

    what is said         columns                                     without the column
    model                `model` (a name, see `model_named`), or     -
                         `hidden size`, `attention heads`,
                         `# layers`; `arch`, `vocabulary`,
                         `key heads`, `mlp size`
    ranks                `gpus`, `tp`, `pp`, `dp`, `cp`              cp 1
    batch                `seq`, `mbs`, `gbs`, or `ga` microbatches   -
    device               `gpu`: a cluster of the configurations,     the cluster that is given
                         or one of `run_prices.GPUS`
    recomputation        `recompute`: none, full, selective          see
                         (attention), selective(op) (every second    `run_prices.completed`
                         product), selective(2) (every second layer)
    sharding             `sharding`: none, DDP, ZeRO-1 to 3,         none
                         FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD
    interleaving         `stages per rank`                           1
    sequence parallel    `sequence parallel`: yes or no              yes of llama
    attention            `attention`: flash, softmax                 flash; softmax of Megatron's
    elementwise chains   `compiled`: yes (fused) or no               by the architecture
    predicted only       `tensor overlap`, `offload`: yes or no      no
    numbers              `dtype`: bfloat16, float16, float8          bfloat16
    measured             `step_seconds` or `iteration time (ms)`,    -
                         `memory_gib`

The long names of github VIA-Research/vTrain (`data/ground_truth_single.csv`) stand for the short
ones. What published tables note in a column `extras` is read by its words (`_extras`). Other
columns are kept, not read.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_topt.costs.plain_values import names, shown

# so that no file takes hours, and no size is more than a number of bytes can be
MOST_ROWS, MOST = 100_000, 10**9
WORDS = {"gpt": 50_257, "mpt": 50_368, "llama": 128_256}
# by their letters and digits
SHARDING = {"none": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3, "fsdp2": 3}
SHARDING |= {"fullshard": 3, "shardgradop": 2, "hybridshard": 3, "hsdp": 3}
MOST_STAGES = 8  # of a rank
DTYPES = ("bfloat16", "float16", "float8")

# fields of a run by their columns, the short name first
COLUMNS: dict[str, tuple[str, ...]] = {
    "gpus": ("gpus",),
    "batch": ("gbs", "global batch"),
    "samples": ("mbs", "micro batch"),
    "sequence": ("seq", "sequence length"),
    "tensor": ("tp", "tensor parallelism"),
    "data": ("dp", "data parallelism"),
    "pipeline": ("pp", "pipeline parallelism"),
}
_BATCH_PARTS = ("samples", "accumulated", "data")
SIZES: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden size",),
    "heads": ("attention heads",),
    "layers": ("layers",),
}
OPTIONAL: dict[str, tuple[str, ...]] = {
    "model": ("model",),
    "kind": ("arch",),
    "words": ("vocabulary",),
    "key_heads": ("key heads",),
    "inner": ("mlp size",),
    "context": ("cp", "context parallelism"),
    "accumulated": ("ga", "accumulation"),
    "recompute": ("recompute",),
    "sharding": ("sharding",),
    "stages_per_rank": ("stages per rank",),
    "sequence_parallel": ("sequence parallel",),
    "attention": ("attention",),
    "compiled": ("compiled",),
    "tensor_overlap": ("tensor overlap",),
    "offload": ("offload",),
    "dtype": ("dtype",),
    "gpu": ("gpu",),
    "source": ("source",),
    "extras": ("extras",),
    "milliseconds": ("iteration time (ms)",),
    "seconds": ("step_seconds",),
    "gibibytes": ("memory_gib",),
}
TIME = "iteration time (ms)"


@dataclass(frozen=True)
class ModelSizes:
    """A Transformer: `kind` as in `transformer.KINDS`, heads of queries and of keys, MLP width."""

    kind: str
    hidden: int
    layers: int
    heads: int
    key_heads: int
    inner: int
    words: int

    @property
    def parameters(self) -> float:
        """Parameters, without biases, norms and learned positions."""
        width = self.hidden // self.heads
        attention = self.hidden * width * (2 * self.heads + 2 * self.key_heads)
        llama = self.kind == "llama"
        mlp = (3 if llama else 2) * self.hidden * self.inner
        return self.layers * (attention + mlp) + (1 + llama) * self.words * self.hidden


# hidden, layers, heads, heads of keys, MLP, vocabulary
_LLAMAS = {
    "llama2_7b": (4096, 32, 32, 32, 11_008, 32_000),
    "llama2_13b": (5120, 40, 40, 40, 13_824, 32_000),
    "llama2_70b": (8192, 80, 64, 8, 28_672, 32_000),
    "llama3_8b": (4096, 32, 32, 8, 14_336, 128_256),
    "llama3_70b": (8192, 80, 64, 8, 28_672, 128_256),
    "llama3_405b": (16_384, 126, 128, 8, 53_248, 128_256),
    "nanotron_llama_1b": (2048, 24, 32, 32, 4096, 50_257),
}
# hidden, layers, heads
_MPTS = {
    "mpt_125m": (768, 12, 12),
    "mpt_350m": (1024, 24, 16),
    "mpt_760m": (1536, 24, 12),
    "mpt_1b": (2048, 24, 16),
    "mpt_3b": (2560, 32, 20),
    "mpt_7b": (4096, 32, 32),
    "mpt_13b": (5120, 40, 40),
    "mpt_30b": (7168, 48, 56),
    "mpt_70b": (8192, 80, 64),
}
_GPT = re.compile(r"gpt_(\d{1,6})_(\d{1,4})_(\d{1,4})")


def model_named(name: str) -> ModelSizes:
    """Return the sizes of a model that is known by name.

    "gpt-8192-48-64" is Megatron's GPT of hidden size 8192, 48 layers and 64 heads.

    Raises:
        ValueError: it is not known.
    """
    plain = re.sub(r"[-_ .]+", "_", name.strip().lower()).replace("llama_", "llama", 1)
    plain = plain.replace("nanotron_llama", "nanotron_llama_", 1).replace("__", "_")
    plain = re.sub(r"^llama3_1_", "llama3_", plain)
    if plain in _LLAMAS:
        hidden, layers, heads, key_heads, inner, words = _LLAMAS[plain]
        return ModelSizes("llama", hidden, layers, heads, key_heads, inner, words)
    if plain in _MPTS:
        hidden, layers, heads = _MPTS[plain]
        return ModelSizes("mpt", hidden, layers, heads, heads, 4 * hidden, WORDS["mpt"])
    if found := _GPT.fullmatch(plain):
        hidden, layers, heads = map(int, found.groups())
        return ModelSizes("gpt", hidden, layers, heads, heads, 4 * hidden, WORDS["gpt"])
    known = ", ".join([*_LLAMAS, *_MPTS, "gpt-HIDDEN-LAYERS-HEADS"])
    raise ValueError(
        f"the model {shown(name)} is not known: give its sizes in the columns "
        f"{names([each[0] for each in SIZES.values()])}, or one of {known}"
    )


@dataclass(frozen=True)
class RunsAgain:
    """What runs again in backward.

    Args:
        layers: the share of layers that run again whole.
        attention: scores and weights of attention run again, as in Megatron's selective
            recomputation.
        operators: every second matrix product and all that is cheap, as in torchtitan's selective
            checkpoints.
    """

    layers: float = 0.0
    attention: bool = False
    operators: bool = False

    @classmethod
    def named(cls, text: str) -> RunsAgain:
        """Read "none", "full", "selective", "selective(op)" or "selective(n)": each n-th layer.

        Raises:
            ValueError: it is none of these.
        """
        plain = text.strip().lower().replace(" ", "")
        known = {
            **dict.fromkeys(("none", "no", "0"), cls()),
            **dict.fromkeys(("full", "yes", "1"), cls(1.0)),
            **dict.fromkeys(("selective", "attention"), cls(attention=True)),
            **dict.fromkeys(("selective(op)", "operators"), cls(operators=True)),
        }
        if plain in known:
            return known[plain]
        each = re.fullmatch(r"selective\(([1-9]\d{0,2})\)", plain)
        if each is None:
            raise ValueError(
                "recompute is none, full, selective, selective(op), or selective(2) for every "
                f"second layer; not {shown(text)}"
            )
        return cls(1 / int(each[1]))


@dataclass(frozen=True)
class TrainingRun:
    """One run: a model, its batch and its parallel sizes.

    Args:
        gpus: ranks.
        batch: samples of an iteration, all ranks together.
        samples: of a microbatch.
        sequence: tokens of a sample.
        model: sizes.
        tensor, data, pipeline, context: ranks along these axes.
        stages_per_rank: above 1 the schedule is interleaved.
        recompute: what runs again; None where nobody says it.
        level: ZeRO level along the data axis.
        hybrid: shards inside nodes, copies between them.
        sequence_parallel: between split products a rank has a part of the positions.
        attention: "flash" or "softmax".
        fused: elementwise chains are one kernel.
        tensor_overlap: gathers and scatters of tensor parallelism run beside products, in parts.
        offload: activations wait for backward in the memory of the host.
        dtype: of matrix products.
        gpu: what the `gpu` column says.
        source: where the row is from.
        seconds: of an iteration, where it was measured.
        bytes: peak of a rank, where it was measured.

    Raises:
        ValueError: for sizes that no run can have.
    """

    gpus: int
    batch: int
    samples: int
    sequence: int
    model: ModelSizes
    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    context: int = 1
    stages_per_rank: int = 1
    recompute: RunsAgain | None = None
    level: int = 0
    hybrid: bool = False
    sequence_parallel: bool = False
    attention: str = "flash"
    fused: bool = True
    tensor_overlap: bool = False
    offload: bool = False
    dtype: str = "bfloat16"
    gpu: str = ""
    source: str = ""
    seconds: float | None = None
    bytes: float | None = None

    def __post_init__(self) -> None:
        # each size alone, then what they say of one another
        model, short = self.model, {name: known[-1] for name, known in COLUMNS.items()}
        short |= {name: known[0] for name, known in SIZES.items()}
        short |= {"context": "cp", "stages_per_rank": "stages per rank"}
        sizes = {name: getattr(model if name in SIZES else self, name) for name in short}
        for name, value in sizes.items():
            if not 1 <= value <= MOST:
                raise ValueError(f"{short[name]} is a whole number from 1 to {MOST:,}, not {value}")
        product = self.tensor * self.data * self.pipeline * self.context
        if product != self.gpus:
            context = f" x context {self.context}" if self.context > 1 else ""
            raise ValueError(
                f"tensor {self.tensor} x data {self.data} x pipeline {self.pipeline}{context} are "
                f"{product} ranks, not the {self.gpus} of {short['gpus']!r}"
            )
        groups = f"data ranks ({self.data}) x micro batch ({self.samples})"
        for what, whole, parts, over in (
            ("hidden size", model.hidden, model.heads, "attention heads"),
            ("attention heads", model.heads, self.tensor, "ranks of tensor parallelism"),
            ("attention heads", model.heads, model.key_heads, "heads of keys"),
            ("mlp size", model.inner, self.tensor, "ranks of tensor parallelism"),
            ("global batch", self.batch, self.data * self.samples, groups),
            ("sequence length", self.sequence, self.context, "ranks of context parallelism"),
        ):
            if whole % parts:
                raise ValueError(f"{what} {whole} cannot be divided evenly over {parts} {over}")
        if (
            self.sequence_parallel
            and self.tensor > 1
            and self.sequence // self.context % self.tensor
        ):
            raise ValueError(
                f"{self.sequence // self.context} positions cannot be divided evenly over "
                f"{self.tensor} ranks, as sequence parallelism does"
            )
        if self.tensor_overlap and not (self.sequence_parallel and self.tensor > 1):
            raise ValueError(
                "tensor overlap is of gathers and scatters, which sequence parallelism has: give "
                "tp above 1 and sequence parallel yes"
            )
        if self.offload and self.recompute not in (None, RunsAgain()):
            raise ValueError(
                "offload keeps activations in the host's memory, and recompute makes them again: "
                "give recompute none"
            )
        stages = self.pipeline * self.stages_per_rank
        if model.layers < stages:
            raise ValueError(
                f"{stages} stages of pipeline parallelism need as many layers, not {model.layers}"
            )

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a data rank in an iteration."""
        return self.batch // (self.data * self.samples)

    @property
    def job(self) -> tuple[object, ...]:
        """What stays when the plan changes: devices, batch and model."""
        return self.gpus, self.batch, self.sequence, self.model

    @property
    def sizes(self) -> dict[str, float]:
        """Sizes by which a run is like others or not (`costs.intervals`)."""
        tokens = self.samples * self.sequence / self.context
        return {
            "devices": self.gpus,
            "parameters": self.model.parameters,
            "hidden": self.model.hidden,
            "positions": self.sequence,
            "tokens of a microbatch": tokens,
        }

    @property
    def techniques(self) -> tuple[str, ...]:
        """Techniques by which a run is like others or not."""
        recompute = self.recompute or RunsAgain()
        used = {
            "tensor": self.tensor > 1,
            "pipeline": self.pipeline > 1,
            "interleaved": self.stages_per_rank > 1,
            "context": self.context > 1,
            "sharded": self.level > 1,
            "recomputation": recompute != RunsAgain(),
            "float8": self.dtype == "float8",
            "tensor overlap": self.tensor_overlap,
            "offloading": self.offload,
            f"{self.attention} attention": True,
            f"model {self.model.kind}": True,
        }
        return tuple(name for name, is_used in used.items() if is_used)


# ---- the file


@dataclass(frozen=True)
class RunFile:
    """A file: its header and lines as text, and the runs that the lines are."""

    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    runs: Sequence[TrainingRun]

    def save(self, path: Path, added: Mapping[str, Sequence[float | str]]) -> None:
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
                writer.writerow([*(line[index] for index in kept), *map(_written, values)])


def _written(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.9g}"


def read_run_file(path: Path, *, need_times: bool = False) -> RunFile:
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
        columns = ", ".join(known[0] for known in (COLUMNS | SIZES).values())
        raise ValueError(f"{path} is empty: its first line names the columns {columns}")
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
    runs = [_run(line, places, f"{path}, line {number}", len(header)) for number, line in numbered]
    return RunFile(header, [line for _, line in numbered], runs)


def _places(path: Path, header: Sequence[str], *, need_times: bool) -> dict[str, int]:
    """Return the index of each column that is read, by the run's field."""
    # of two columns with one name, the first
    known = {_plain(name): index for index, name in reversed([*enumerate(header)])}
    places = {
        field: known[name]
        for field, several in (COLUMNS | SIZES | OPTIONAL).items()
        for name in reversed(several)
        if name in known
    }
    needed = [*COLUMNS, *(() if "model" in places else SIZES)]
    if "accumulated" in places:
        needed.remove("batch")
    missing = [(COLUMNS | SIZES)[field][-1] for field in needed if field not in places]
    if need_times and not {"seconds", "milliseconds"} & {*places}:
        missing.append(TIME)
    if missing:
        raise ValueError(
            f"{path} lacks the column{'s' * (len(missing) > 1)} {names(missing)}; it has "
            f"{names(header)}, and needs those that benchmarks/prediction/training_runs.py lists"
        )
    return places


def _plain(name: str) -> str:
    """Return the name of a column, whatever its case, blanks and "#"."""
    return " ".join(name.replace("#", " ").lower().split())


def _run(line: Sequence[str], places: Mapping[str, int], where: str, columns: int) -> TrainingRun:
    # a line that is cut off would shift its values
    if len(line) != columns:
        raise ValueError(f"{where}: {len(line)} values, but {columns} columns")
    cells = {name: line[index].strip() for name, index in places.items()}
    try:
        return _run_of(cells)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _run_of(cells: Mapping[str, str]) -> TrainingRun:
    """Return the run that the cells of a line say, by field."""
    said = _extras(cells.get("extras", ""))
    model = _model(cells)
    megatron = model.kind == "gpt"
    # what stands in brackets is a remark
    sharding = re.sub(r"\(.*|[^a-z0-9]", "", cells.get("sharding", "").lower()) or "none"
    if sharding not in SHARDING:
        raise ValueError(f"sharding is one of {names(SHARDING)}, not {shown(cells['sharding'])}")
    attention = cells.get("attention") or ("softmax" if megatron else "flash")
    if attention not in ("flash", "softmax"):
        raise ValueError(f"attention is flash or softmax, not {shown(attention)}")
    dtype = cells.get("dtype") or ("float8" if said["float8"] else "bfloat16")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is one of {names(DTYPES)}, not {shown(dtype)}")
    recompute = RunsAgain.named(cells["recompute"]) if cells.get("recompute") else None
    if (offload := _truth(cells, "offload", False)) and recompute is None:
        recompute = RunsAgain()
    # recomputing attention's scores is nothing where they are never written
    if recompute is not None and recompute.attention and attention == "flash":
        recompute = RunsAgain(operators=True)
    # torchtitan, nanotron and Llama 3 split positions wherever they split products
    split = said["sequence parallel"] > 0 or model.kind == "llama"
    pipeline = _whole(cells, "pipeline")
    per_rank = _whole(cells, "stages_per_rank", 0) or (said["chunks"] if pipeline > 1 else 1)
    per_rank = per_rank or most_stages(model.layers, pipeline)
    seconds = _measured(cells, "seconds", "step_seconds")
    if seconds is None and (found := _measured(cells, "milliseconds", TIME)) is not None:
        seconds = found / 1e3
    gibibytes = _measured(cells, "gibibytes", "memory_gib")
    # a batch is also so many microbatches of each data rank
    given = {name: _whole(cells, name) for name in COLUMNS if name != "batch"}
    batch = _whole(cells, "batch", 0)
    if not batch:
        batch = math.prod(_whole(cells, name) for name in _BATCH_PARTS)
    return TrainingRun(
        **given,
        batch=batch,
        model=model,
        context=_whole(cells, "context", 1),
        stages_per_rank=per_rank,
        recompute=recompute,
        level=SHARDING[sharding],
        hybrid=sharding in ("hybridshard", "hsdp"),
        sequence_parallel=_truth(cells, "sequence_parallel", split),
        attention=attention,
        fused=_truth(cells, "compiled", megatron or said["compiled"] > 0),
        tensor_overlap=_truth(cells, "tensor_overlap", False),
        offload=offload,
        dtype=dtype,
        gpu=cells.get("gpu", ""),
        source=cells.get("source", ""),
        seconds=seconds,
        bytes=None if gibibytes is None else gibibytes * 2**30,
    )


def _model(cells: Mapping[str, str]) -> ModelSizes:
    """Return the model by its sizes, else by its name."""
    if not all(cells.get(name) for name in SIZES):
        return model_named(cells.get("model", ""))
    hidden, heads, layers = (_whole(cells, name) for name in ("hidden", "heads", "layers"))
    kind = {"": "gpt", "megatron": "gpt"}.get(cells.get("kind", ""), cells.get("kind", ""))
    if kind not in WORDS:
        raise ValueError(f"arch is one of {names(WORDS)}, not {shown(kind)}")
    inner = _whole(cells, "inner", 4 * hidden)
    key_heads, words = _whole(cells, "key_heads", heads), _whole(cells, "words", WORDS[kind])
    return ModelSizes(kind, hidden, layers, heads, key_heads, inner, words)


def _extras(text: str) -> dict[str, int]:
    """Return what the words of a published table say, beside what has columns.

    "interleaved m=3" has three stages per rank; 0 stands for a number that is not said.
    """
    plain = text.lower()
    chunks = re.search(r"\b[mv]\s*=\s*([1-9]\d?)\b", plain)
    interleaved = "interleaved" in plain
    return {
        "chunks": int(chunks[1]) if chunks else 0 if interleaved else 1,
        "sequence parallel": "sequence parallel" in plain or "tp+sp" in plain,
        "compiled": "compile" in plain,
        "float8": "float8" in plain or "fp8" in plain,
    }


def most_stages(layers: int, pipeline: int) -> int:
    """Return how many stages a rank of an interleaved schedule has where nobody says it.

    The most, up to `MOST_STAGES`, with which the longest stages have next to no more layers than
    the mean.
    """
    fitting = [
        count
        for count in range(1, MOST_STAGES + 1)
        if pipeline * count <= layers
        and math.ceil(layers / (pipeline * count)) * pipeline * count <= 1.05 * layers
    ]
    return max(fitting, default=1)


def _whole(cells: Mapping[str, str], name: str, default: int | None = None) -> int:
    column = (COLUMNS | SIZES | OPTIONAL)[name][-1]
    text = cells.get(name, "").rstrip("?")  # "1?" is a guess of who wrote the table
    if not text and default is not None:
        return default
    try:
        # 24.0 is whole, as spreadsheets write numbers
        value = float(text) if len(text) < 40 else float("nan")
        if value == int(value):
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"{column} is a whole number, not {shown(text)}")


def _truth(cells: Mapping[str, str], name: str, default: bool) -> bool:
    text = cells.get(name, "").lower()
    known = {"": default, "yes": True, "true": True, "1": True}
    known |= {"no": False, "false": False, "0": False}
    if text not in known:
        raise ValueError(f"{OPTIONAL[name][0]} is yes or no, not {shown(text)}")
    return known[text]


def _measured(cells: Mapping[str, str], name: str, column: str) -> float | None:
    text = cells.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e12:
        raise ValueError(f"{column} is a number above 0, not {shown(text)}")
    return value
