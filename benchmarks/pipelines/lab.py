"""Pipelines against DDP on nodes joined by 1 Gb/s, for models with large weights.

    sudo python -m benchmarks.pipelines.lab   # 4 nodes of one rank; --rounds, --rate, --models

Compares DDP, a schedule with a flush at every step, and one without flush that predicts weights.
Activations of the models are small. All take the same samples between updates: forward, backward
and fused AdamW. Rounds are interleaved; each is a job of its own. Memory is that of one more job of
each, in which the C library gives freed memory back, as it does under a limit; that costs time.
Stages are cut by measured seconds of blocks. With the flush none has more than 30 % of the weights,
to show what memory it takes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import RESULTS, machine, mib, spread
from benchmarks.lab import Lab, LabError, end_on_signals, sent_bytes
from benchmarks.pipelines.shared import (
    Iteration,
    block_seconds,
    check_blocks,
    cut,
    iterations,
    plan_of,
    weights_of,
)
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.memory import (
    MemoryMeter,
    release_free_memory,
    return_freed_memory,
    warm_up,
)
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.schedules.staleness import Staleness
from lightning_topt.weight_prediction import make_prediction

NODES = 4
RUN = "benchmarks.pipelines.lab"
WARM_UP = 2 * NODES + 2  # a pipeline without flush is full then
PIPELINES = ("pipeline", "continuous")
Found = Mapping[str, Sequence[Mapping[str, Any]]]


def table_row(cells: Sequence[object]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def seconds_row(model: str, found: Found) -> str:
    """Return seconds per update under each plan, and how many times as long the others take.

    The others are DDP and the schedule with flushes.
    """
    seconds = {
        plan: [result["step_seconds"] for result in results] for plan, results in found.items()
    }

    def times(other: str, ours: str) -> str:
        return spread([a / b for a, b in zip(seconds[other], seconds[ours], strict=True)], 2)

    parameters = f"{found['ddp'][0]['parameters'] / 1e6:.1f} M"
    gains = times("ddp", "pipeline"), times("ddp", "continuous"), times("pipeline", "continuous")
    return table_row(
        [model, parameters, MODELS[model].samples, *map(spread, seconds.values()), *gains]
    )


def claim_row(model: str, found: Found) -> str:
    """Return the medians beside those of a paper."""

    def median(other: str) -> str:
        pairs = zip(found[other], found["continuous"], strict=True)
        return f"{statistics.median(a['step_seconds'] / b['step_seconds'] for a, b in pairs):.2f}"

    set_up = f"{NODES} nodes of one rank, {MODELS[model].samples} samples per update"
    return table_row([f"{model}, here", set_up, median("ddp"), f"{median('pipeline')} (1F1B)"])


def bytes_row(model: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return MiB sent per update and peak MiB, of the rank with the most.

    Then come peaks as shares of DDP's.
    """
    sent = [max(result["sent_bytes"]) for result in found.values()]
    peaks = {plan: max(result["peak_bytes"]) for plan, result in found.items()}
    shares = (f"{peaks[plan] / peaks['ddp']:.2f}" for plan in PIPELINES)
    return table_row([model, *map(mib, sent), *map(mib, peaks.values()), *shares])


def main() -> None:
    """Measure and write the tables."""
    end_on_signals()
    options = parse_options()
    flushing = {"steps": 6, "schedule": options.schedule, "microbatches": options.microbatches}
    continuous = {
        "steps": 16,
        "schedule": options.continuous,
        "prediction": options.prediction,
        "warmup": WARM_UP,
        "microbatches": 1,
        "share": 1,
    }
    plans: dict[str, dict[str, Any]] = {
        "ddp": {"steps": 6},
        "pipeline": flushing,
        "continuous": continuous,
    }
    rows: dict[str, list[str]] = {"seconds": [], "claims": [], "sizes": [], "cuts": []}
    with Lab(NODES, rate=options.rate) as lab:
        for model in options.models:

            def measured(plan: str, what: str, model: str = model) -> dict[str, Any]:
                given = {"model": model, "plan": plan, "measure": what, **plans[plan]}
                return lab.run_module(RUN, "--worker", ranks_per_node=1, **given)

            found: dict[str, list[dict[str, Any]]] = {plan: [] for plan in plans}
            for _ in range(options.rounds):
                for plan in plans:
                    found[plan].append(measured(plan, "seconds"))
            rows["seconds"].append(seconds_row(model, found))
            rows["claims"].append(claim_row(model, found))
            rows["sizes"].append(
                bytes_row(model, {plan: measured(plan, "memory") for plan in plans})
            )
            for plan in PIPELINES:
                stages = "; ".join(", ".join(stage) for stage in found[plan][-1]["stages"])
                rows["cuts"].append(f"- {model}, {plan}: {stages}")
            print(rows["seconds"][-1], rows["sizes"][-1], sep="\n", flush=True)
    write_page(rows, options)


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--schedule", default="1f1b", help="that flushes")
    parser.add_argument("--microbatches", type=int, default=8, help="of the schedule that flushes")
    parser.add_argument(
        "--continuous", default="continuous_overlapped", help="schedule without flush"
    )
    parser.add_argument("--prediction", default="spectrain")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    return parser.parse_args()


def write_page(rows: dict[str, list[str]], options: argparse.Namespace) -> None:
    """Write the tables of `rows`."""
    names = f"ddp | {options.schedule} | continuous"
    lines = [
        f"# Pipelines against DDP on {NODES} nodes of one rank",
        "",
        f"`sudo python -m benchmarks.pipelines.lab --rounds {options.rounds} --rate {options.rate} "
        f"--microbatches {options.microbatches} --continuous {options.continuous} --models "
        f"{' '.join(options.models)}`",
        "",
        machine(),
        "",
        f"One thread per rank. With a flush: {options.schedule} of {options.microbatches} "
        "microbatches. Without:",
        f"{options.continuous} with {options.prediction}, minibatches undivided. Seconds per "
        "update, and how many times as",
        "long the others take: median (range) over jobs.",
        "",
        f"| model | parameters | samples | {names} | ddp / {options.schedule} | ddp / continuous | "
        f"{options.schedule} / continuous |",
        "|---" * 9 + "|",
        *rows["seconds"],
        "",
        "MiB sent per update and peak MiB, of the rank with the most:",
        "",
        f"| model | sent: {names} | peak: {names} | {options.schedule} / ddp | continuous / ddp |",
        "|---" * 9 + "|",
        *rows["sizes"],
        "",
        "Stages:",
        "",
        *rows["cuts"],
        "",
        "Beside what Chen et al. (SpecTrain, arXiv 1809.02839) report, at most of their models:",
        "",
        "| | set-up | times data parallelism | times the fastest synchronous way to cut the model "
        "|",
        "|---" * 4 + "|",
        table_row(
            ["SpecTrain", "4 GPUs of one machine", "15.77 (8.91 in a later version)", "2.18"]
        ),
        *rows["claims"],
    ]
    (RESULTS / "pipeline_lab.md").write_text("\n".join(lines) + "\n")


# ---- one rank of a job ---------------------------------------------------------------------------

CPU = torch.device("cpu")


def loss_of(model: nn.Module, part: Any) -> Tensor:
    """Return the loss of a part of the batch."""
    loss: Tensor = model(part)
    return loss


class Training(NamedTuple):
    """`step` runs one step with its update; `end` comes after the last step.

    `plan` is that of a pipeline.
    """

    step: Iteration
    plan: ParallelPlan | None = None
    end: Iteration = lambda: None


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of what this rank holds."""
    return torch.optim.AdamW(
        [p for p in module.parameters() if p.requires_grad], lr=1e-4, fused=True
    )


def ddp(model: LabModel, module: nn.Module) -> Training:
    """Return the training with data parallelism; each rank has its part of the samples."""
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer, batch = adamw(module), model.batch(model.samples // dist.get_world_size())

    def step() -> None:
        loss_of(wrapped, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(step)


def weight_seconds(rule: str | None, count: int = 1 << 22) -> float:
    """Return the seconds of an update of one parameter, and of its prediction in both passes.

    Measured on `count` parameters.
    """
    module = nn.Linear(count, 1, bias=False)
    module.weight.grad = torch.zeros_like(module.weight)
    optimizer = adamw(module)
    optimizer.step()
    stage = make_prediction(rule or "none").on(optimizer, stage=1, num_stages=4)
    staleness, rates = Staleness(version=0, missing=1, round_trip=1), [optimizer.param_groups]

    def update() -> None:
        with stage.forward(0, staleness, rates):
            pass
        with stage.backward(0, staleness, rates):
            pass
        optimizer.step()

    update()
    start = time.perf_counter()
    for _ in range(3):
        update()
    return (time.perf_counter() - start) / (3 * count)


def cut_plan(
    model: LabModel, module: nn.Module, options: argparse.Namespace, *, rule: str | None = None
) -> ParallelPlan:
    """Return the plan of a pipeline, cut by seconds of passes and updates that rank 0 measured.

    `rule` predicts weights.
    """
    check_blocks(module, model.blocks)
    starts: list[Any] = [None]
    if dist.get_rank() == 0:
        part = model.batch(model.samples // options.microbatches)
        of_passes = block_seconds(module, lambda each: loss_of(each, part), model.blocks)
        weights, of_weight = weights_of(module, model.blocks), weight_seconds(rule)
        seconds = [
            options.microbatches * own + of_weight * count
            for own, count in zip(of_passes, weights, strict=True)
        ]
        starts = [cut(seconds, weights, dist.get_world_size(), share=options.share)]
    dist.broadcast_object_list(starts)
    mesh = Mesh((Axis("pipeline", dist.get_world_size(), "inter"),))
    return plan_of(
        model.blocks, starts[0], mesh=mesh, schedule="1f1b", microbatches=options.microbatches
    )


def pipeline(model: LabModel, module: nn.Module, options: argparse.Namespace) -> Training:
    """Return the training in a pipeline that flushes in each step."""
    plan = replace(cut_plan(model, module, options), schedule=options.schedule)
    engine, count = Engine(plan, module, device=CPU), options.microbatches
    microbatches = list(
        zip(*(tensor.chunk(count) for tensor in model.batch(model.samples)), strict=True)
    )
    engine.apply(example=Example(loss_of, microbatches[0]))
    optimizer = adamw(module)

    def step() -> None:
        engine.run_step(microbatches, loss_of)
        optimizer.step()
        optimizer.zero_grad()

    return Training(step, plan)


def continuous(model: LabModel, module: nn.Module, options: argparse.Namespace) -> Training:
    """Return the training in a pipeline without flush.

    A step takes in all samples as one minibatch.
    """
    plan = replace(
        cut_plan(model, module, options, rule=options.prediction),
        **{"schedule": options.schedule, "prediction": options.prediction, "num_microbatches": 1},
    )
    engine, batch = Engine(plan, module, device=CPU), model.batch(model.samples)
    engine.apply(example=Example(loss_of, batch))
    step, end = iterations(engine, adamw(module), batch, loss_of)
    return Training(step, plan, end)


def run_worker() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", action="store_true", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=list(MODELS), required=True)
    parser.add_argument("--plan", choices=["ddp", "pipeline", "continuous"], required=True)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--prediction", default="spectrain")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument(
        "--share", type=float, default=0.3, help="of all weights that a stage may have"
    )
    parser.add_argument(
        "--measure",
        choices=["seconds", "memory"],
        default="seconds",
        help="memory: as under a limit, which takes time",
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, meter = MODELS[options.model], MemoryMeter(CPU)
    if options.measure == "memory":  # what a rank holds is what it uses
        return_freed_memory(CPU)
    warm_up(CPU)
    dist.barrier()
    meter.mark_base()
    module = model.make()
    parameters = sum(p.numel() for p in module.parameters())
    make = {"ddp": lambda: ddp(model, module)}
    make["pipeline"] = lambda: pipeline(model, module, options)
    make["continuous"] = lambda: continuous(model, module, options)
    training = make[options.plan]()
    for _ in range(options.warmup):
        training.step()
    dist.barrier()
    release_free_memory()
    meter.reset_peak()
    sent, start = sent_bytes(), time.perf_counter()
    for _ in range(options.steps):
        training.step()
    dist.barrier()
    seconds = (time.perf_counter() - start) / options.steps
    mine = meter.peak_bytes(), (sent_bytes() - sent) / options.steps
    training.end()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    if dist.get_rank() == 0:
        peaks, sents = zip(*found, strict=True)
        plan = training.plan
        stages = (
            None
            if plan is None
            else [[b.block for b in stage.blocks if b.block] for stage in plan.stages]
        )
        result = {
            "parameters": parameters,
            "step_seconds": seconds,
            "peak_bytes": list(peaks),
            "sent_bytes": list(sents),
            "stages": stages,
        }
        options.out.write_text(json.dumps(result, indent=1))
    dist.destroy_process_group()


# ---- models with large weights and small activations (BaPipe, arXiv 2012.12544, section 5) -------
# A model returns its mean loss of a part of a batch.

Part = tuple[Tensor, Tensor]
VOCABULARY, WORDS = 2048, 8  # of a sentence


class Convolution(nn.Sequential):
    """A convolution; `halves` the image after it."""

    def __init__(self, inputs: int, outputs: int, halves: bool) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2) if halves else nn.Identity(),
        )


class VGG(nn.Module):
    """Convolutions on images of 32 x 32, then wide linear layers with most of the weights."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 32, 64, 64, 128)
        self.features = nn.ModuleList(
            Convolution(a, b, halves=i in (1, 3, 4))
            for i, (a, b) in enumerate(itertools.pairwise(widths))
        )
        self.classifier = nn.ModuleList(
            nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(8)
        )
        self.head = nn.Linear(2048, 100)

    def forward(self, part: Part) -> Tensor:
        """Return the loss."""
        x = part[0]
        for layer in self.features:
            x = layer(x)
        x = x.flatten(1)
        for layer in self.classifier:
            x = layer(x)
        return F.cross_entropy(self.head(x), part[1])


class Recurrent(nn.Module):
    """One LSTM layer, added to what it read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cells = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, width)."""
        found: Tensor = self.cells(x)[0]
        return x + found


class LSTM(nn.Module):
    """A language model of stacked LSTM layers."""

    def __init__(self, width: int = 768, layers: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Recurrent(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, part: Part) -> Tensor:
        """Return the loss."""
        x = self.embedding(part[0])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), part[1].flatten())


class Reader(nn.Module):
    """One layer of a decoder: an LSTM, and attention over the encoder's output.

    Source: Wu et al., arXiv 1609.08144.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cells, self.mix = nn.LSTM(width, width, batch_first=True), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        """Return (B, T, width)."""
        found = self.cells(x)[0]
        context = F.scaled_dot_product_attention(found, source, source)
        return x + torch.tanh(self.mix(torch.cat([found, context], -1)))


class GNMT(nn.Module):
    """Translation with an encoder and a decoder of LSTM layers.

    Every layer of the decoder reads the encoder's output.
    """

    def __init__(self, width: int = 640, layers: int = 4) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        self.encoder = nn.ModuleList(Recurrent(width) for _ in range(layers))
        self.decoder = nn.ModuleList(Reader(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, part: Part) -> Tensor:
        """Return the loss."""
        x = self.source(part[0])
        for layer in self.encoder:
            x = layer(x)
        y = self.target(part[1][:, :-1])
        for layer in self.decoder:
            y = layer(y, x)
        return F.cross_entropy(self.head(y).flatten(0, 1), part[1][:, 1:].flatten())


def images(count: int) -> Part:
    """Images and their classes."""
    return torch.randn(count, 3, 32, 32), torch.randint(100, (count,))


def words(count: int) -> Part:
    """Sentences, and the words to be predicted."""
    return torch.randint(VOCABULARY, (count, WORDS)), torch.randint(VOCABULARY, (count, WORDS))


@dataclass(frozen=True)
class LabModel:
    """A model, its `blocks` in order, and how many `samples` a step has on all ranks.

    `batch` makes so many samples.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Part]
    blocks: Sequence[str]
    samples: int


MODELS: dict[str, LabModel] = {
    "VGG": LabModel(
        VGG,
        images,
        [*(f"features.{i}" for i in range(5)), *(f"classifier.{i}" for i in range(8)), "head"],
        64,
    ),
    "LSTM": LabModel(LSTM, words, ["embedding", *(f"layers.{i}" for i in range(8)), "head"], 32),
    "GNMT": LabModel(
        GNMT,
        words,
        [
            "source",
            *(f"encoder.{i}" for i in range(4)),
            "target",
            *(f"decoder.{i}" for i in range(4)),
            "head",
        ],
        32,
    ),
}


if __name__ == "__main__":
    try:
        run_worker() if "--worker" in sys.argv else main()
    except LabError as error:
        sys.exit(str(error))
