"""Weight prediction on simulated stages: how good is the model that training ends with?

    python -m benchmarks.pipelines.weight_prediction --processes 2  # all runs that are not kept yet

Rules are compared with training without a pipeline: the same samples in the same order, the same
learning rate and schedule for all rules of a model. There are 5 seeds on 4 and 8 stages, and 2
seeds on 16 and 32. 2BW has one update of delay on every number of stages (its minibatches become
smaller instead), so it is run once, on two stages. Models are deep and narrow: prediction is about
the delay of each layer, not its size.

In further tables every way of training has a learning rate of its own (`WAYS`).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from benchmarks.common import RESULTS, machine
from benchmarks.pipelines.simulators import ContinuousTraining, Step
from examples.recipes.basis_rotation import BasisRotation
from lightning_topt.demo import ByteGPT, StdlibBytesDataModule, TransformerBlock

FILE = RESULTS / "prediction_accuracy.json"
MODELS = {"transformer": "AdamW", "long transformer": "AdamW", "cnn": "SGD", "lstm": "SGD"}
RULES = ("none", "stash", "nesterov", "two_versions", "spectrain", "multistep")
# rules of the runs that are four times as long, on up to 8 stages
OF_LONG = ("two_versions", "spectrain", "multistep")
SEEDS = {1: 5, 2: 5, 4: 5, 8: 5, 16: 2, 32: 2}
SYNCHRONOUS = "synchronous"


# ---- the first table: one learning rate for each model


class Run(NamedTuple):
    model: str
    rule: str
    stages: int
    seed: int

    @property
    def key(self) -> str:
        return "/".join(map(str, self))


def all_runs() -> Iterator[Run]:
    """Every run, one seed after the other."""
    for seed in range(max(SEEDS.values())):
        for stages in (1, 4, 8, 2, 32, 16):
            rules = {1: (SYNCHRONOUS,), 2: ("two_versions",)}.get(stages, RULES)
            for model in MODELS if seed < SEEDS[stages] else ():
                for rule in rules:
                    if _is_run(model, rule, stages):
                        yield Run(model, rule, stages, seed)


def _is_run(model: str, rule: str, stages: int) -> bool:
    if model == "long transformer" and (stages > 8 or rule not in (SYNCHRONOUS, *OF_LONG)):
        return False
    return (rule != "nesterov" or MODELS[model] == "AdamW") and (
        rule != "two_versions" or stages == 2
    )


def train(run: Run) -> dict[str, Any]:
    """Train from the run's seed; the metric is None where training diverged."""
    optimizer = make_task(run.model).optimizer
    return train_stages(run, lambda parameters: optimizer(parameters, run.rule))


def train_stages(
    run: Run | Tuned, optimizer: Callable[[Sequence[nn.Parameter]], Optimizer]
) -> dict[str, Any]:
    torch.set_num_threads(1)
    started, task = time.process_time(), make_task(run.model)
    torch.manual_seed(run.seed)
    stages, batches = deal(task.pieces(), run.stages), task.batches(run.seed)
    parameters = [list(stage.parameters()) for stage in stages]
    feedback = {"rule": "two_versions", "error_feedback": True}
    rules: dict[str, Any] = {SYNCHRONOUS: "none", **dict.fromkeys((FEEDBACK, *STARTS), feedback)}
    cut = run.cut if isinstance(run, Tuned) else 1
    before = 0  # minibatches of earlier calls of `run`, which counts from 0
    training = ContinuousTraining(
        stages,
        [optimizer(own) if own else None for own in parameters],
        rule=rules.get(run.rule, run.rule),
        loss=task.loss,
        step=Step(lambda minibatch: schedule(before + minibatch, len(batches) * cut)),
        accumulate=cut,
    )
    losses = []
    for batch in batches[: round(STARTS.get(run.rule, 0.0) * len(batches))]:
        losses += training.run([batch])
        before += 1
    pieces = [(x.chunk(cut), y.chunk(cut)) for x, y in batches[before:]]
    losses += training.run([piece for xs, ys in pieces for piece in zip(xs, ys, strict=True)])
    metric, loss = task.judge(nn.Sequential(*stages).eval())
    tail = len(losses) // 10
    found = {"metric": metric, "held_out_loss": loss, "train_loss": sum(losses[-tail:]) / tail}
    found["tuning_loss"] = task.tuning(nn.Sequential(*stages))
    if not all(map(math.isfinite, found.values())):
        found = dict.fromkeys(found)
    return {**found, "cpu_seconds": round(time.process_time() - started, 1)}


def schedule(minibatch: int, count: int) -> float:
    """Warm-up over a twentieth, then a cosine to a twentieth of the learning rate."""
    warmup = count // 20
    if minibatch < warmup:
        return (minibatch + 1) / warmup
    done = (minibatch - warmup) / (count - warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))


def keyed(run: Run) -> tuple[str, dict[str, Any]]:
    return run.key, train(run)


def values(runs: dict[str, Any], run: Run, what: str) -> list[float]:
    """`what` came out for each seed; infinite where training diverged."""
    found = [runs.get(run._replace(seed=seed).key) for seed in range(SEEDS[run.stages])]
    return [
        math.inf if result[what] is None else result[what] for result in found if result is not None
    ]


def cell(found: list[float], reference: list[float]) -> str:
    """Median, range and number of seeds.

    Marked where the median is not above the range of synchronous training.
    """
    if not found:
        return ""
    three = (min(found), statistics.median(found), max(found))
    low, middle, high = ("diverged" if math.isinf(x) else f"{x:.3f}" for x in three)
    mark = " *" if reference and three[1] <= max(reference) else ""
    return (
        f"{middle} ({low} to {high}; {len(found)}){mark}"
        if len(found) > 1
        else f"{middle} (1){mark}"
    )


def tables(runs: dict[str, Any]) -> str:
    lines = []
    for model, optimizer in MODELS.items():
        for what, title in (("metric", METRICS[model]), ("held_out_loss", "loss on held-out data")):
            reference = values(runs, Run(model, SYNCHRONOUS, 1, 0), what)
            lines += [
                f"\n## {model}, {optimizer}: {title}\n\nSynchronous: {cell(reference, [])}\n",
                "| rule | 4 stages | 8 stages | 16 stages | 32 stages |\n|---|---|---|---|---|",
            ]
            for rule in RULES:
                if not _is_run(model, rule, 2 if rule == "two_versions" else 4):
                    continue
                places = (2,) * 4 if rule == "two_versions" else (4, 8, 16, 32)
                cells = [
                    cell(values(runs, Run(model, rule, stages, 0), what), reference)
                    for stages in places
                ]
                lines.append(f"| {rule} | {' | '.join(cells)} |")
    return "\n".join(lines)


# ---- the second table: a learning rate for each way


class Way(NamedTuple):
    """An optimizer under a rule, and the rate in `LADDER` at which the search for its rate begins.

    two_versions is run on two stages, and stands for any number of them. `cut`: minibatches of an
    update, where that is more than one.
    """

    optimizer: str
    rule: str
    stages: int
    begin: float
    seeds: int = 5
    cut: int = 1
    model: str = "transformer"


class Tuned(NamedTuple):
    model: str
    optimizer: str
    rule: str
    stages: int
    rate: float
    seed: int
    cut: int = 1

    @property
    def key(self) -> str:
        return "/".join(map(str, self[: None if self.cut > 1 else -1]))


FEEDBACK = "two_versions, error_feedback"
# the same, and the first tenth of the updates wait, or fifth: the pipeline is drained after each
START = f"{FEEDBACK}, synchronous start"
LONG_START = f"{FEEDBACK}, synchronous fifth"
STARTS = {START: 0.1, LONG_START: 0.2}
LADDER = (1e-4, 3e-4, 5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 1e-2, 2e-2, 3e-2, 5e-2, 0.1, 0.2)
DIGIT_WAYS = (
    (SYNCHRONOUS, 1),
    ("spectrain", 4),
    ("spectrain", 8),
    ("multistep", 8),
    ("stash", 8),
    (FEEDBACK, 2),
    (START, 2),
)
WAYS = (
    Way("AdamW", SYNCHRONOUS, 1, 5e-3),
    Way("AdamW", START, 2, 5e-3),
    Way("AdamW", FEEDBACK, 2, 3e-3),
    Way("BasisRotation", SYNCHRONOUS, 1, 1e-2),
    Way("BasisRotation", FEEDBACK, 2, 1e-2),
    Way("NAdam", "nesterov", 8, 1e-3, 3),
    Way("AdamW", "spectrain", 8, 1e-3, 3),
    Way("AdamW", "stash", 8, 1e-3, 3),
    Way("NAdam as published", "nesterov", 8, 3e-4, 3),
    Way("BasisRotation", START, 2, 1e-2, 3),
    Way("AdamW", "stash", 5, 3e-3, 2, cut=4),
    Way("AdamW", "multistep", 5, 3e-3, 2, cut=4),
    Way("AdamW", "spectrain", 5, 1e-3, 2, cut=4),
    Way("BasisRotation", "stash", 8, 1e-2),
    Way("AdamW", "two_versions", 2, 3e-3),
    Way("BasisRotation", "two_versions", 2, 1e-2),
    Way("NAdam as published", SYNCHRONOUS, 1, 3e-3, 2),
    Way("NAdam", SYNCHRONOUS, 1, 5e-3, 2),
    Way("NAdam", "nesterov", 32, 1e-3, 2),
    Way("AdamW", "spectrain", 32, 3e-4, 2),
    Way("AdamW", "stash", 32, 3e-4, 2),
    Way("BasisRotation", "stash", 32, 3e-3, 2),
    Way("NAdam", "nesterov", 16, 1e-3, 2),
    Way("AdamW", "spectrain", 16, 5e-4, 2),
    Way("AdamW", "stash", 16, 5e-4, 2),
    Way("BasisRotation", "stash", 16, 3e-3, 2),
    Way("AdamW", LONG_START, 2, 5e-3),
    Way("Muon", SYNCHRONOUS, 1, 5e-3),
    Way("Muon", FEEDBACK, 2, 5e-3),
    Way("Muon", LONG_START, 2, 5e-3),
    *(
        Way("SGD", rule, stages, 2e-2, 5, model=model)
        for model in ("cnn", "lstm")
        for rule, stages in DIGIT_WAYS
    ),
)
TUNED_MODELS = ("transformer", "long transformer", "cnn", "lstm")
# ways with long runs, at the rate of the short ones, and how many
OF_LONG_WAYS, LONG_SEEDS = (*WAYS[:5], WAYS[9]), 2


def make_optimizer(name: str, parameters: Sequence[nn.Parameter], rate: float) -> Optimizer:
    if name == "SGD":
        return optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=1e-4)
    groups = _decay_groups(parameters)
    if name == "BasisRotation":
        # the vocabulary's side keeps its coordinates
        return BasisRotation(groups, lr=rate, betas=(0.9, 0.95), max_dimension=128)
    if name == "Muon":
        return MuonBesideAdamW(parameters, rate)
    if "NAdam" in name:
        betas = (0.99, 0.999) if name == "NAdam as published" else (0.9, 0.95)
        return optim.NAdam(groups, lr=rate, betas=betas, decoupled_weight_decay=True)
    return optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))


class MuonBesideAdamW(Optimizer):
    """Muon for the matrices of blocks, AdamW for vectors and what has rows by byte, at one rate."""

    def __init__(self, parameters: Sequence[nn.Parameter], rate: float) -> None:
        blocks = [p for p in parameters if p.dim() == 2 and max(p.shape) < 256]
        rest = [p for p in parameters if all(p is not each for each in blocks)]
        self.parts: list[Optimizer] = []
        if blocks:
            self.parts.append(
                optim.Muon(blocks, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
            )
        if rest:
            self.parts.append(optim.AdamW(_decay_groups(rest), lr=rate, betas=(0.9, 0.95)))
        super().__init__([{"params": list(parameters)}], {"lr": rate})
        # a schedule changes the rates of both
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step both."""
        for part in self.parts:
            part.step()


def train_tuned(run: Tuned) -> tuple[str, dict[str, Any]]:
    found = train_stages(run, lambda own: make_optimizer(run.optimizer, own, run.rate))
    return run.key, found


def tuned_run(way: Way, rung: int, seed: int = 0, model: str = "") -> Tuned:
    model = model or way.model
    return Tuned(model, way.optimizer, way.rule, way.stages, LADDER[rung], seed, way.cut)


def ways_of(model: str) -> list[Way]:
    """The ways of training a model; long runs are of those of the short ones."""
    return [way for way in WAYS if way.model == model.removeprefix("long ")]


def result_of(done: dict[str, Any], run: Tuned) -> float:
    """Bits per byte, of digits the loss; infinite where training diverged or is still to come."""
    found = done.get(run.key, {})
    if found.get("metric") is None:
        return math.inf
    if "transformer" in run.model:
        return found["metric"]
    # of the half of the images on which rates are not compared
    return 2 * found["held_out_loss"] - found["tuning_loss"]


def tuning(done: dict[str, Any], way: Way, rung: int) -> float | None:
    """The loss on the text that rates are chosen by: the median of the seeds that were made.

    None: there is none yet.
    """
    made = (done.get(tuned_run(way, rung, seed).key, {}) for seed in range(way.seeds))
    losses = [run["tuning_loss"] for run in made if "tuning_loss" in run]
    return statistics.median(math.inf if x is None else x for x in losses) if losses else None


def climb(done: dict[str, Any], way: Way) -> tuple[int, list[Tuned]]:
    """The rung with the best rate, and the runs of seed 0 that are left to be sure of it.

    Both neighbours of the best one are tried. A rate that is good for seed 0 alone is left again.
    """
    rungs, begin = range(len(LADDER)), LADDER.index(way.begin)
    losses = {rung: loss for rung in rungs if (loss := tuning(done, way, rung)) is not None}
    best = min(losses, key=losses.__getitem__, default=begin)
    around = [rung for rung in (best, best - 1, best + 1) if rung in rungs]
    return best, [tuned_run(way, rung) for rung in around if rung not in losses]


def left_of(done: dict[str, Any], way: Way) -> list[Tuned]:
    """Runs of a way that are left now: first of seed 0 at other rates, then of the other seeds."""
    best, left = climb(done, way)
    if left:
        return left
    found = [tuned_run(way, best, seed) for seed in range(way.seeds)]
    return [run for run in found if run.key not in done]


def long_left(done: dict[str, Any]) -> list[Tuned]:
    """Long runs that are left, one seed after the other."""
    runs = [
        tuned_run(way, climb(done, way)[0], seed, "long transformer")
        for seed in range(LONG_SEEDS)
        for way in OF_LONG_WAYS
    ]
    return [run for run in runs if run.key not in done]


def tuned_table(done: dict[str, Any]) -> str:
    """Ways whose rate is sure, that is with both neighbours tried."""

    def found(way: Way, model: str) -> list[float]:
        best, left = climb(done, way)
        runs = [tuned_run(way, best, seed, model) for seed in range(way.seeds)]
        return [] if left else [result_of(done, run) for run in runs if run.key in done]

    lines = []
    for model in TUNED_MODELS:
        ways = ways_of(model)
        of_first = found(ways[0], model)
        what = "bits per byte" if "transformer" in model else "loss on held-out images"
        lines += [
            f"\n## {model}, a learning rate for each way: {what}\n",
            f"| optimizer | rule | stages | learning rate | {what} | of the first row's median "
            "| of its optimizer's median, synchronous |\n|---|---|---|---|---|---|---|",
        ]
        for way in ways:
            if not (here := found(way, model)):
                continue
            own = next(each for each in ways if each[:2] == (way.optimizer, SYNCHRONOUS))
            parts = [
                f"{100 * (statistics.median(here) / statistics.median(reference) - 1):+.1f} %"
                if reference
                else ""
                for reference in (of_first, found(own, model))
            ]
            stages = "any" if "two_versions" in way.rule else str(way.stages)
            cut = f", batches cut into {way.cut}" if way.cut > 1 else ""
            lines.append(
                f"| {way.optimizer} | {way.rule} | {stages}{cut} | "
                f"{LADDER[climb(done, way)[0]]:g} | {cell(here, of_first)} | {' | '.join(parts)} |"
            )
    return "\n".join(lines)


COMMAND = "python -m benchmarks.pipelines.weight_prediction --processes 2"
HEAD = """# Prediction rules on simulated stages

After training: median over seeds (range; number of seeds), lower is better. A star: the median is
not above the worst seed of synchronous training. Models, data and learning rates are in
`benchmarks/pipelines/weight_prediction.py`. Models have 8 pieces: on 16 and 32 stages those between
them are empty. two_versions does not depend on the number of stages, since its minibatches become
smaller. Diverged: a loss that is not a number.

Learning rates were lowered and runs made longer after a first try, with 300 updates (transformer,
3e-3) and 210 (digits, 0.03 and 0.05): there every rule lost much more; on 4 stages spectrain ended
at 4.12 bits per byte against 3.72, and at test losses of 0.097 against 0.073 (cnn) and 0.354
against 0.184 (lstm), medians of 5 seeds.

The long transformer is the transformer with 4,000 updates instead of 1,000 and as much more text.

In the last tables each way has the learning rate that was best among
{ladder}:
lower and higher ones were tried with seed 0 until both neighbours were worse; a rate that was worse
with all seeds was left again. They are compared on validation text of other files than the reported
text, and of digits on one half of the held-out images, with the other half reported. Ways without a
whole search are left out. Long runs have the rate of the short ones. Batches are not cut where
nothing is said; two_versions stands for batches cut into as many minibatches as are in flight.
Betas are 0.9 and 0.95; NAdam "as published" has 0.99 and 0.999. With a synchronous start the
pipeline is drained after each update of the first tenth, or fifth.

    {command}

{machine}
- {seconds:.0f} s of CPU time, beside other work, for {count} of {total} runs and {tuned} with
  rates of their own; the command makes those that are left
- the former were made earlier, on 4 x AMD EPYC (commit 7ddf73f) and, long ones, on 2 (476ae4e)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--report", action="store_true", help="only write the page, of the runs that have been made"
    )
    options = parser.parse_args()
    kept: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    runs, tuned = (kept.setdefault(name, {}) for name in ("runs", "tuned"))

    def keep(results: Iterator[tuple[str, dict[str, Any]]], into: dict[str, Any]) -> None:
        for key, result in results:
            into[key] = result
            print(key, result, flush=True)
            content = {"command": COMMAND, "machine": machine(), "runs": runs, "tuned": tuned}
            FILE.write_text(json.dumps(content, indent=1) + "\n")

    if not options.report:
        with mp.get_context("spawn").Pool(options.processes) as pool:
            left = [run for run in all_runs() if run.key not in runs]
            keep(pool.imap_unordered(keyed, left), runs)
            for way in WAYS:
                while left_here := left_of(tuned, way):
                    keep(pool.imap_unordered(train_tuned, left_here), tuned)
            keep(pool.imap_unordered(train_tuned, long_left(tuned)), tuned)
    seconds = sum(result["cpu_seconds"] for made in (runs, tuned) for result in made.values())
    counts = {"count": len(runs), "total": sum(1 for _ in all_runs()), "tuned": len(tuned)}
    ladder = ", ".join(f"{rate:g}" for rate in LADDER)
    head = HEAD.format(command=COMMAND, machine=machine(), seconds=seconds, ladder=ladder, **counts)
    FILE.with_suffix(".md").write_text(head + tables(runs) + "\n" + tuned_table(tuned) + "\n")


# ---- three small models as chains of pieces, and their tasks -------------------------------------

Batch = tuple[Tensor, Tensor]
METRICS = {
    "transformer": "validation bits per byte",
    "long transformer": "validation bits per byte",
    "cnn": "test errors in %",
    "lstm": "test errors in %",
}


class Task(NamedTuple):
    """A model, how it is trained, and how it is judged.

    `judge` returns the metric and the loss on held-out data; lower is better.
    """

    pieces: Callable[[], list[nn.Module]]
    batches: Callable[[int], list[Batch]]  # of a seed
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Sequence[nn.Parameter], str], Optimizer]
    metric: str
    judge: Callable[[nn.Module], tuple[float, float]]
    # the loss by which learning rates are chosen
    tuning: Callable[[nn.Module], float]


class Embedding(nn.Module):
    """The embeddings of a ByteGPT."""

    def __init__(self, gpt: ByteGPT) -> None:
        super().__init__()
        self.embedding, self.positions = gpt.embedding, gpt.positions

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))


class Attention(nn.Module):
    """The first half of a block."""

    def __init__(self, block: TransformerBlock) -> None:
        super().__init__()
        self.norm, self.query_key_value, self.out = (
            block.attention_norm,
            block.query_key_value,
            block.attention_out,
        )
        self.num_heads = block.num_heads

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            self.query_key_value(self.norm(x))
            .unflatten(-1, (3, self.num_heads, -1))
            .permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Perceptron(nn.Module):
    """The second half of a block."""

    def __init__(self, block: TransformerBlock) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = block.mlp_norm, block.mlp_in, block.mlp_out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


class Convolution(nn.Module):
    """A residual convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.convolution(F.relu(self.norm(x)))


class Recurrent(nn.Module):
    """A residual LSTM layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.lstm = nn.LayerNorm(hidden), nn.LSTM(hidden, hidden, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(self.norm(x))[0]


class Last(nn.Module):
    """The last position of a sequence, classified."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x[:, -1]))


def deal(pieces: Sequence[nn.Module], num_stages: int) -> list[nn.Sequential]:
    """Deal the pieces out to stages in order, as evenly as possible.

    With more stages than pieces, some stay empty.
    """
    bounds = [math.ceil(stage * len(pieces) / num_stages) for stage in range(num_stages + 1)]
    return [nn.Sequential(*pieces[low:high]) for low, high in pairwise(bounds)]


# ---- a transformer on bytes of source code
LAYERS, HIDDEN, SEQ_LEN, SEQUENCES = 3, 32, 32, 8
TEXT_STEPS = {"transformer": 1000, "long transformer": 4000}


def gpt_pieces(gpt: ByteGPT) -> list[nn.Module]:
    """The embeddings, two pieces of each block, and the head."""
    halves = [half for block in gpt.blocks for half in (Attention(block), Perceptron(block))]
    return [Embedding(gpt), *halves, nn.Sequential(gpt.norm, gpt.head)]


class _Text:
    def __init__(self, steps: int) -> None:
        data = StdlibBytesDataModule(SEQ_LEN, SEQUENCES, max_bytes=1000 * steps)
        data.setup()
        # Validation files are read in one order: what a module of twice the size has beyond this
        # one's is other text, for the choice of learning rates.
        larger = StdlibBytesDataModule(SEQ_LEN, SEQUENCES, max_bytes=2000 * steps)
        larger.setup()
        others = range(len(data.val_data) + 1, len(larger.val_data), 3)
        self.others = torch.stack([larger.val_data[i] for i in others][:1024]).long()
        self.steps = steps
        self.train = torch.stack([data.train_data[i] for i in range(len(data.train_data))])
        self.held = torch.stack(
            [data.val_data[i] for i in range(0, len(data.val_data), 3)][:1024]
        ).long()

    def batches(self, seed: int) -> list[Batch]:
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(seed))
        chosen = [
            self.train[part].long() for part in order[: self.steps * SEQUENCES].split(SEQUENCES)
        ]
        return [(tokens[:, :-1], tokens[:, 1:]) for tokens in chosen]

    def judge(self, model: nn.Module) -> tuple[float, float]:
        loss = self.loss_on(self.held, model)
        return loss / math.log(2), loss

    def tuning(self, model: nn.Module) -> float:
        return self.loss_on(self.others, model)

    @torch.no_grad()
    def loss_on(self, text: Tensor, model: nn.Module) -> float:
        return float(next_byte(model(text[:, :-1]), text[:, 1:]))


def next_byte(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _decay_groups(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adamw(parameters: Sequence[nn.Parameter], rule: str) -> Optimizer:
    name = "NAdam as published" if rule == "nesterov" else "AdamW"
    return make_optimizer(name, parameters, TEXT_RATE)


# ---- images of digits, and their rows as sequences
CHANNELS, CONVOLUTIONS, WIDTH, RECURRENT, IMAGES = 8, 6, 24, 6, 32
TEXT_RATE, IMAGE_RATE, ROW_RATE, IMAGE_EPOCHS, ROW_EPOCHS = 1e-3, 0.02, 0.03, 12, 20


class _Digits:
    def __init__(self, *, rows: bool) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32) / 8 - 1
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        images = (images if rows else images[:, None])[order]
        self.images, self.labels = images[:1347], labels[order][:1347]
        self.held, self.answers = images[1347:], labels[order][1347:]
        self.epochs = ROW_EPOCHS if rows else IMAGE_EPOCHS

    def batches(self, seed: int) -> list[Batch]:
        generator, found = torch.Generator().manual_seed(seed), []
        for _ in range(self.epochs):
            order = torch.randperm(len(self.images), generator=generator)
            found += [
                (self.images[part], self.labels[part])
                for part in order[: 42 * IMAGES].split(IMAGES)
            ]
        return found

    @torch.no_grad()
    def tuning(self, model: nn.Module) -> float:
        """Return the loss on every second of the images that `judge` sees."""
        return float(F.cross_entropy(model(self.held[::2]), self.answers[::2]))

    def judge(self, model: nn.Module) -> tuple[float, float]:
        with torch.no_grad():
            outputs = model(self.held)
        errors = (outputs.argmax(-1) != self.answers).float().mean()
        return 100 * float(errors), float(F.cross_entropy(outputs, self.answers))


def _convolutional() -> list[nn.Module]:
    head = nn.Sequential(
        nn.GroupNorm(4, CHANNELS), nn.ReLU(), nn.Flatten(), nn.Linear(64 * CHANNELS, 10)
    )
    return [
        nn.Conv2d(1, CHANNELS, 3, padding=1),
        *(Convolution(CHANNELS) for _ in range(CONVOLUTIONS)),
        head,
    ]


def _recurrent() -> list[nn.Module]:
    return [nn.Linear(8, WIDTH), *(Recurrent(WIDTH) for _ in range(RECURRENT)), Last(WIDTH, 10)]


def _sgd(rate: float) -> Callable[[Sequence[nn.Parameter], str], Optimizer]:
    return lambda parameters, rule: make_optimizer("SGD", parameters, rate)


@lru_cache
def make_task(name: str) -> Task:
    """The task of one of `METRICS`; all chains have 8 pieces."""
    if name in TEXT_STEPS:
        text = _Text(TEXT_STEPS[name])
        return Task(
            lambda: gpt_pieces(ByteGPT(LAYERS, HIDDEN, 4, SEQ_LEN)),
            text.batches,
            next_byte,
            _adamw,
            METRICS[name],
            text.judge,
            text.tuning,
        )
    digits = _Digits(rows=name == "lstm")
    pieces, rate = (_recurrent, ROW_RATE) if name == "lstm" else (_convolutional, IMAGE_RATE)
    return Task(
        pieces,
        digits.batches,
        F.cross_entropy,
        _sgd(rate),
        METRICS[name],
        digits.judge,
        digits.tuning,
    )


if __name__ == "__main__":
    main()
