"""Loss curves of ZeRO-3 with gathers in float32 and in bfloat16, under autocast on two ranks.

    python -m benchmarks.bf16_gathers            # two minutes on two cores

The text is the source of Python's standard library. A second model adds its positions as a plain
parameter, which no autocast rounds and such a plan does.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import RESULTS, machine
from lightning_topt.communication.collectives import AllGather
from lightning_topt.demo import ByteGPT, StdlibBytesDataModule
from lightning_topt.execution.engine import Engine
from lightning_topt.plan.parallel_plan import uniform_plan
from tests.launch import run_ranks

SIZES = (2, 64, 4, 64)  # layers, hidden, heads, sequence
RANKS, SAMPLES, EVERY = 2, 8, 50
CPU = torch.device("cpu")


class LossGPT(ByteGPT):
    """Its forward takes a batch and returns the loss."""

    def forward(self, batch: Tensor) -> Tensor:
        tokens = batch.long()
        logits = self.logits(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = super().forward(tokens)
        return logits


class AddedPositions(LossGPT):
    """Positions are a parameter that is added, not a table that is looked up."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.added = nn.Parameter(self.positions.weight.detach().clone())
        del self.positions

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.added
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass(frozen=True)
class Run:
    """A line of the table."""

    name: str
    model: type[LossGPT]
    precision: str
    gather_dtype: str | None = None


RUNS = (
    Run("float32, all of it", LossGPT, "32-true"),
    Run("gathers in float32", LossGPT, "bf16-mixed"),
    Run("gathers in bfloat16", LossGPT, "bf16-mixed", "bfloat16"),
    Run("added positions, gathers in float32", AddedPositions, "bf16-mixed"),
    Run("added positions, gathers in bfloat16", AddedPositions, "bf16-mixed", "bfloat16"),
)


@dataclass
class Curve:
    """What a run gave: losses, means over ranks, and gathered bytes per step."""

    losses: list[float]
    gathered: float


def train(rank: int, batches: Tensor) -> list[Curve]:
    """Do all runs as one rank. `batches` (step, sample, token) are those of all ranks."""
    own, plain = [batch.chunk(RANKS)[rank] for batch in batches], AllGather.__call__
    gathered: list[int] = []

    def counted(self: AllGather, output_tensor: Tensor, *args: Any, **more: Any) -> Any:
        gathered.append(output_tensor.nbytes)
        return plain(self, output_tensor, *args, **more)

    with patch.object(AllGather, "__call__", counted):
        return [train_once(run, own, gathered) for run in RUNS]


def train_once(run: Run, batches: list[Tensor], gathered: list[int]) -> Curve:
    """Train one model under ZeRO-3; `gathered` gets the bytes of each gather."""
    torch.manual_seed(0)
    module = run.model(*SIZES)
    blocks = [f"blocks.{n}" for n in range(SIZES[0])]
    plan = uniform_plan(3, data_parallel_size=RANKS, blocks=blocks)
    engine = Engine(replace(plan, gather_dtype=run.gather_dtype), module, device=CPU)
    model = engine.apply()
    made: Any = module.configure_optimizers()
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    engine.attach_optimizers([optimizer])
    losses = []
    gathered.clear()
    for batch in batches:
        with context_of(run):
            loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    engine.release()
    nbytes = sum(gathered) / len(batches)
    return Curve((mean / RANKS).tolist(), nbytes)


def context_of(run: Run) -> AbstractContextManager[Any]:
    """Return the context of forward."""
    return nullcontext() if run.precision == "32-true" else torch.autocast("cpu", torch.bfloat16)


def page(curves: list[Curve]) -> str:
    """Return the page of results."""
    steps = len(curves[0].losses)
    shown = [*range(EVERY - 1, steps, EVERY)]
    lines = [
        "# Gathers in bfloat16",
        "",
        f"A byte GPT of {SIZES[0]} layers and width {SIZES[1]} under ZeRO-3 on {RANKS} ranks over "
        f"gloo, {SAMPLES} sequences of {SIZES[3]} bytes per rank, AdamW. Losses (nats per byte, "
        f"means of {EVERY} steps) by the last of these steps. *Off* is the largest difference of "
        "a single step's loss from the line above it; *MiB* what the gathers of a rank give in "
        "a step. Autocast rounds matrices before it uses them, so that the third line should have "
        "no difference; positions that are added it leaves alone, and the last line rounds them. "
        "`python -m benchmarks.bf16_gathers` makes this page.",
        "",
        machine(),
        "",
        "| under ZeRO-3 | " + " | ".join(str(step + 1) for step in shown) + " | off | MiB |",
        "|---|" + "---|" * (len(shown) + 2),
    ]
    above = curves[0]
    for run, curve in zip(RUNS, curves, strict=True):
        off = max(abs(a - b) for a, b in zip(curve.losses, above.losses, strict=True))
        above = curve
        means = [statistics.fmean(curve.losses[s + 1 - EVERY : s + 1]) for s in shown]
        cells = [f"{mean:.4f}" for mean in means]
        differs = "" if run is RUNS[0] or run.name == RUNS[3].name else f"{off:.1e}" if off else "0"
        gathered = f"{curve.gathered / 2**20:.3f}"
        lines.append(f"| {run.name} | {' | '.join(cells)} | {differs} | {gathered} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=RESULTS / "bf16_gathers.md")
    options = parser.parse_args()
    data = StdlibBytesDataModule(SIZES[3], RANKS * SAMPLES, max_bytes=4_000_000)
    data.setup("fit")
    torch.manual_seed(1)
    loader = iter(data.train_dataloader())
    batches = torch.stack([next(loader) for _ in range(options.steps)])
    curves = run_ranks(train, RANKS, batches, timeout_seconds=560)[0]
    options.out.write_text(page(curves))
    print(options.out.read_text())


if __name__ == "__main__":
    main()
