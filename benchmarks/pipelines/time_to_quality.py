"""Seconds of training until a validation loss: pipelines without flush, 1F1B and DDP.

    sudo python -m benchmarks.pipelines.time_to_quality  # --rounds, --rate, --predictions

Four nodes of one rank joined by 1 Gb/s train an LSTM on bytes of source code under AdamW: the same
weights at first, the same samples in the same order, the same learning rate. Each training is a fit
of a Trainer in a job of its own, one of each in turn; validations are not counted. The loss to be
reached is the highest of the lowest losses of all trainings, so that all reach it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from benchmarks.common import QUIET, RESULTS, machine, spread
from benchmarks.lab import Lab, LabError, end_on_signals
from lightning_topt import PipelineStrategy
from lightning_topt.demo import StdlibBytesDataModule
from lightning_topt.plugins.lost_ranks import destroy_process_group

NODES = 4
RUN = "benchmarks.pipelines.time_to_quality"
Points = Sequence[Sequence[float]]  # updates, seconds, loss


def reached(points: Points, loss: float) -> Sequence[float]:
    """The first point that is not above `loss`."""
    return next(point for point in points if point[2] <= loss)


def draw(found: Mapping[str, Sequence[Points]], target: float) -> None:
    """Draw the loss over seconds."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for index, (name, several) in enumerate(found.items()):
        for number, points in enumerate(several):
            _, seconds, losses = zip(*points, strict=True)
            axes.plot(seconds, losses, color=f"C{index}", alpha=0.7, label=None if number else name)
    axes.axhline(target, color="gray", linestyle=":")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("validation loss (nats per byte)")
    axes.set_xscale("log")
    axes.legend()
    figure.savefig(RESULTS / "time_to_quality.png", dpi=120)


def report(
    found: Mapping[str, Sequence[Points]], parameters: int, options: argparse.Namespace
) -> None:
    """Draw and write the table of the rounds so far."""
    target = max(
        min(point[2] for point in points) for several in found.values() for points in several
    )
    rows = []
    for name, several in found.items():
        seconds = [reached(points, target)[1] for points in several]
        gains = [
            reached(other, target)[1] / mine
            for other, mine in zip(found["ddp"], seconds, strict=True)
        ]
        updates = [reached(points, target)[0] for points in several]
        each = [points[-1][1] / points[-1][0] for points in several]
        losses = [min(point[2] for point in points) for points in several]
        cells = (
            spread(each),
            spread(updates, 0),
            spread(seconds, 1),
            spread(gains, 2),
            spread(losses, 3),
        )
        rows.append(f"| {name} | {' | '.join(cells)} |")
    draw(found, target)
    (RESULTS / "time_to_quality.json").write_text(json.dumps(found))
    lines = [
        f"# Seconds until a validation loss on {NODES} nodes of one rank",
        "",
        f"`sudo python -m benchmarks.pipelines.time_to_quality --rounds {len(found['ddp'])} --rate "
        f"{options.rate} --steps {options.steps} --width {options.width} --microbatches "
        f"{options.microbatches} --predictions {' '.join(options.predictions)}`",
        "",
        machine(),
        "",
        f"LSTM of {parameters / 1e6:.1f} M parameters, AdamW (fused), 32 sequences of 16 bytes per "
        f"update, {options.steps}",
        f"updates; validation loss to be reached: {target:.3f}. Median (range) over seeds, one "
        "training of each plan and seed.",
        "",
        "| plan | seconds per update | updates | seconds | ddp's seconds / these | lowest loss |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        "![curves](time_to_quality.png)",
    ]
    (RESULTS / "time_to_quality.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Measure, and report after each round."""
    end_on_signals()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--more", action="store_true", help="go on from the rounds that are in the results"
    )
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--microbatches", type=int, default=8, help="of 1F1B")
    parser.add_argument("--predictions", nargs="+", default=["spectrain", "multistep"])
    options = parser.parse_args()
    plans: dict[str, dict[str, Any]] = {
        "ddp": {"plan": "ddp"},
        "1f1b": {"plan": "1f1b", "microbatches": options.microbatches},
    }
    for rule in options.predictions:
        plans[f"continuous, {rule}"] = {"plan": "continuous", "prediction": rule}
    kept = json.loads((RESULTS / "time_to_quality.json").read_text()) if options.more else {}
    found: dict[str, list[Points]] = {name: kept.get(name, []) for name in plans}
    if any(points[-1][0] != options.steps for several in found.values() for points in several):
        parser.error(
            f"the results are of trainings with another number of steps than {options.steps}"
        )
    parameters, done = 0, min(map(len, found.values()))
    with Lab(NODES, rate=options.rate) as lab:
        for seed in range(done, options.rounds):
            for name, given in plans.items():
                sizes = {"steps": options.steps, "width": options.width, "seed": seed}
                result = lab.run_module(
                    RUN, "--worker", ranks_per_node=1, timeout=1500, **given, **sizes
                )
                found[name].append(result["points"])
                parameters = result["parameters"]
                print(name, seed, result["points"][-1], flush=True)
            report(found, parameters, options)


# ---- one rank of a training: loss over seconds ---------------------------------------------------

# bytes of a sequence, sequences and updates between validations
SEQ_LEN, SAMPLES, EVERY = 16, 32, 25


class Recurrent(nn.Module):
    """A residual LSTM layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.cells = nn.LayerNorm(width), nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, width)."""
        found: Tensor = self.cells(self.norm(x))[0]
        return x + found


class ByteLSTM(L.LightningModule):
    """A language model of bytes."""

    def __init__(self, width: int, layers: int, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Recurrent(width) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, T, 256)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.head(x)
        return found

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of the next byte."""
        tokens = tokens.long()
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Train on (B, T + 1) bytes."""
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the loss of all ranks' samples."""
        self.log("loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, as fast as it is."""
        return torch.optim.AdamW(self.parameters(), lr=self.rate, fused=True)


class Curve(L.Callback):
    """Seconds of training, without those of validation, and the loss at each validation."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float, float]] = []
        self._seconds, self._since = 0.0, 0.0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Start the clock."""
        trainer.strategy.barrier()
        self._since = time.perf_counter()

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Stop it: minibatches in flight are done."""
        trainer.strategy.barrier()
        self._seconds += time.perf_counter() - self._since

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Note the loss."""
        self.points.append(
            (trainer.global_step, self._seconds, float(trainer.callback_metrics["loss"]))
        )
        trainer.strategy.barrier()
        self._since = time.perf_counter()


def loaders(ranks: int) -> tuple[Any, Any]:
    """Return loaders with the same samples in the same order, whatever the ranks.

    Each rank has its part of a batch, or the ranks of a pipeline one together.
    """
    data = StdlibBytesDataModule(SEQ_LEN, SAMPLES, max_bytes=2_000_000)
    data.setup()
    train, held = data.train_data, data.val_data
    assert train is not None and held is not None
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(1)).tolist()
    few = torch.randperm(len(held), generator=torch.Generator().manual_seed(2))[
        : 4 * SAMPLES
    ].tolist()
    size = SAMPLES // ranks
    return DataLoader(Subset(train, order), size), DataLoader(Subset(held, few), size)


def run_worker() -> None:
    """Train once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", action="store_true", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--plan", choices=["ddp", "1f1b", "continuous", "continuous_overlapped"], required=True
    )
    parser.add_argument("--prediction", default="spectrain")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-nodes", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(options.seed)
    strategy: Any = DDPStrategy(gradient_as_bucket_view=True)
    if options.plan == "1f1b":
        strategy = PipelineStrategy(schedule="1f1b", microbatches=options.microbatches)
    elif options.plan != "ddp":
        strategy = PipelineStrategy(schedule=options.plan, prediction=options.prediction)
    curve = Curve()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=options.num_nodes,
        strategy=strategy,
        max_steps=options.steps,
        val_check_interval=EVERY,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        **QUIET,
        callbacks=[curve],
    )
    module = ByteLSTM(options.width, options.layers, options.rate)
    parameters = sum(p.numel() for p in module.parameters())
    train, held = loaders(options.num_nodes if options.plan == "ddp" else 1)
    trainer.fit(module, train, held)
    if trainer.is_global_zero:
        options.out.write_text(json.dumps({"parameters": parameters, "points": curve.points}))


if __name__ == "__main__":
    if "--worker" in sys.argv:
        run_worker()
        destroy_process_group()
    else:
        try:
            main()
        except LabError as error:
            sys.exit(str(error))
