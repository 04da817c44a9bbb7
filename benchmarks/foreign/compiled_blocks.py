"""Compiled blocks: ``ddp``, ``ddp`` with each layer compiled by hand, and ``allow="compile"``.

    python -m benchmarks.foreign.compiled_blocks                 # an hour on 2 cores
    python -m benchmarks.foreign.compiled_blocks --only llama --only convnext

Two gloo ranks with one thread each. A fit with ``allow="compile"`` decides which blocks are
compiled. From then on its steps run by turns as under ``ddp``, with layers compiled by hand, and
as was decided: five rounds of four steps each, of which the first is left out. "By hand" is what
users write: `layer.compile()` for each layer of the model. Rows of models that are not run stay.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common import QUIET, RESULTS, machine, run_module, spread
from benchmarks.foreign.family_models import FAMILIES, Family, adamw
from lightning_topt import AutoParallelStrategy
from lightning_topt.plugins import compiled_steps
from lightning_topt.techniques.compilation import CompiledForward, candidates
from tests.models import GPT

ROUNDS, STEPS, COMPILES = 5, 4, 2  # steps of a way in a round; those in which layers are compiled
WAYS = ("ddp", "by hand", "allow")
STORE = RESULTS / "compiled_blocks.json"


class Language(GPT):
    """A GPT that returns its loss."""

    def forward(self, batch: Any) -> Any:
        return F.cross_entropy(super().forward(batch[0]).flatten(0, 1), batch[1].flatten())


def gpt(layers: int, width: int) -> Family:
    """A GPT of bytes."""

    def batch(samples: int) -> list[Tensor]:
        text = torch.randint(256, (samples, 129))
        return [text[:, :-1], text[:, 1:]]

    made = {"layers": layers, "width": width, "heads": 8, "vocab": 256, "context": 128}
    return Family(lambda: Language(**made), batch, 4, adamw)


class Isomorphism(nn.Module):
    """A layer of a GIN: a perceptron of a node and the sum of its neighbours (arXiv 1810.00826)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(width, 2 * width),
            nn.LayerNorm(2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:  # (N, width), (2, E)
        total = torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]])
        return F.relu(self.down(F.relu(self.norm(self.up(x + total)))))


class Graphs(nn.Module):
    """Five such layers over a batch of graphs of 30 nodes."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, width), nn.Linear(width, 8)
        self.layers = nn.ModuleList([Isomorphism(width) for _ in range(5)])

    def forward(self, batch: Any) -> Tensor:
        nodes, edges, labels = batch
        x = self.first(nodes)
        for layer in self.layers:
            x = layer(x, edges)
        return F.cross_entropy(self.head(x.unflatten(0, (-1, 30)).mean(1)), labels)


def graphs(samples: int) -> list[Tensor]:
    """`samples` graphs of 30 nodes and 120 edges, joined."""
    edges = torch.randint(30, (samples, 2, 120)) + 30 * torch.arange(samples)[:, None, None]
    labels = torch.randint(8, (samples,))
    return [torch.randn(30 * samples, 16), edges.transpose(0, 1).flatten(1), labels]


MODELS = {
    "gpt 3 M": gpt(4, 256),
    "gpt 26 M": gpt(8, 512),
    "gpt 50 M": gpt(16, 512),
    **{name: FAMILIES[name] for name in ("vit", "convnext", "llama", "recognizer", "translator")},
    "gin": Family(Graphs, graphs, 64, adamw),
}


class Turns(L.Callback):
    """Once a fit has decided, runs the ways by turns and times their steps."""

    def __init__(self, decided: int) -> None:
        self.decided, self.seconds = decided, {way: list[float]() for way in WAYS}
        self.ours: dict[nn.Module, CompiledForward] = {}
        self.hand: dict[nn.Module, Any] = {}
        self.turns = iter(())
        self.way, self.step, self.batches = "", 0, 0
        self.began, self.compiled_seconds = 0.0, 0.0

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        self.batches += 1
        if self.batches == self.decided:
            self.ours = {
                part: part.__dict__.pop("forward")
                for part in module.modules()
                if isinstance(vars(part).get("forward"), CompiledForward)
            }
            for name in itertools.chain(*candidates(module).values()):
                layer = module.get_submodule(name)
                layer.compile(dynamic=False)
                self.hand[layer] = layer._compiled_call_impl
            rounds = [WAYS[turn % 3 :] + WAYS[: turn % 3] for turn in range(ROUNDS)]
            steps = [(way, step) for ways in rounds for way in ways for step in range(STEPS)]
            self.turns = iter([("by hand", -1)] * COMPILES + steps)
        if self.batches >= self.decided:
            self.way, self.step = next(self.turns, ("", 0))
            trainer.should_stop = not self.way
            for part, own in self.ours.items():
                part.__dict__.pop("forward", None)
                if self.way == "allow":
                    part.forward = own
            for layer, own in self.hand.items():
                layer._compiled_call_impl = own if self.way == "by hand" else None
            self.began = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        seconds = time.perf_counter() - self.began
        if self.step < 0:
            self.compiled_seconds += seconds
        elif self.step > 0:  # of a way
            self.seconds[self.way].append(seconds)


def run(options: argparse.Namespace) -> None:
    """One fit; rank 0 writes the seconds of its steps."""
    torch.set_num_threads(1)
    compiled_steps.USUAL_SECONDS = 0.0  # as in a long fit, whose end is not known
    compiled_steps._WARM, compiled_steps._TIMED, compiled_steps._COMPILES = 2, 5, 2
    family = MODELS[options.model]
    batches: Any = [family.example(seed) for seed in range(8)]
    turns = Turns(decided=18)
    quiet: dict[str, Any] = {**QUIET}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=AutoParallelStrategy(allow="compile"),
        max_epochs=-1,
        callbacks=[turns],
        use_distributed_sampler=False,
        **quiet,
    )
    trainer.fit(family.module(), torch.utils.data.DataLoader(batches, batch_size=None))
    if trainer.is_global_zero:
        found = {
            "seconds": turns.seconds,
            "compiled": len(turns.ours),
            "layers": len(turns.hand),
            "compilation": turns.compiled_seconds,
        }
        options.out.write_text(json.dumps(found))


def ratios(row: dict[str, Any], way: str) -> list[float]:
    """Of the medians of each round: those of `way` over those of ``ddp``."""
    one, other = (
        [statistics.median(times[k : k + STEPS - 1]) for k in range(0, len(times), STEPS - 1)]
        for times in (row["seconds"][way], row["seconds"]["ddp"])
    )
    return [ours / theirs for ours, theirs in zip(one, other, strict=True)]


def write(rows: dict[str, Any]) -> None:
    """The page."""
    lines = ["# Compiled blocks", "", machine(), "", f"- {ROUNDS} interleaved rounds", ""]
    lines += [
        "| model | ddp, ms | by hand / ddp | allow / ddp | better of the two / allow "
        "| compiled by allow |",
        "|---" * 6 + "|",
    ]
    for model, row in rows.items():
        hand, ours = ratios(row, "by hand"), ratios(row, "allow")
        best = min(1.0, statistics.median(hand)) / statistics.median(ours)
        lines.append(
            f"| {model} | {1000 * statistics.median(row['seconds']['ddp']):.0f} | {spread(hand)} | "
            f"{spread(ours)} | {best:.3f} | {row['compiled']} of {row['layers']} |"
        )
    print("\n".join(lines), flush=True)
    (RESULTS / "compiled_blocks.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=list(MODELS))
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.out is not None:
        run(options)
        return
    rows: dict[str, Any] = json.loads(STORE.read_text()) if STORE.exists() else {}
    for model in options.only or MODELS:
        rows[model] = run_module("benchmarks.foreign.compiled_blocks", model=model, timeout=1500)
        STORE.write_text(json.dumps(rows))
        write(rows)


if __name__ == "__main__":
    main()
