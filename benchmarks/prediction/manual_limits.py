"""A GAN that optimizes manually under falling memory limits: predicted and measured steps.

    python -m benchmarks.prediction.manual_limits       # about 5 minutes on 2 cores

Two networks of 6.6 M parameters, two Adams, batches of 64, on two CPU ranks with one thread each.
Memory is that of a rank above the idle rank, seconds are the median of steps, of the slower rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import softplus
from torch.utils.data import DataLoader

from benchmarks.common import QUIET, RESULTS, JobFailed, machine, mib, run_module
from lightning_topt import AutoParallelStrategy
from lightning_topt.plugins.monitors import StepMonitor

LIMITS_MIB = (300, 230, 200, 185, 175, 165, 162)
STEPS = 24


def network(inputs: int, outputs: int, width: int = 1024) -> nn.Sequential:
    hidden = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(6))
    return nn.Sequential(nn.Linear(inputs, width), *hidden, nn.Linear(width, outputs))


class GAN(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = network(64, 256), network(256, 1)

    def training_step(self, real: Tensor, batch_idx: int) -> None:
        of_generator, of_critic = self.optimizers()
        made = self.generator(torch.randn(len(real), 64))
        with of_generator.toggle_model():
            of_generator.zero_grad()
            self.manual_backward(softplus(-self.critic(made)).mean())
            of_generator.step()
        with of_critic.toggle_model():
            of_critic.zero_grad()
            loss = softplus(-self.critic(real)) + softplus(self.critic(made.detach()))
            self.manual_backward(loss.mean())
            of_critic.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters()) for part in (self.generator, self.critic)]


class Seen(L.Callback):
    """Write what ranks have measured: seconds of steps, and memory by the strategy's meter."""

    def __init__(self, out: Path) -> None:
        self.out, self.begun, self.seconds = out, 0.0, list[float]()

    def on_train_batch_start(self, *_: Any) -> None:
        self.begun = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.begun)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        plan = trainer.strategy.parallel_plan
        kept = [p.to_local() if isinstance(p, DTensor) else p for p in pl_module.parameters()]
        ours = [
            statistics.median(self.seconds[STEPS // 3 :]),
            trainer.strategy.memory_meter.peak_bytes(),
            sum(p.numel() for p in kept) / sum(p.numel() for p in pl_module.parameters()),
        ]
        ranks: list[Any] = [None] * trainer.world_size
        torch.distributed.all_gather_object(ranks, ours)
        seconds, peak, share = map(max, zip(*ranks, strict=True))
        predicted = plan.predicted
        found = {
            "plan": plan.summary(),
            "predicted": [predicted.step_seconds, predicted.peak_bytes],
            "measured": [seconds, peak],
            "share": share,
        }
        if trainer.is_global_zero:
            self.out.write_text(json.dumps(found))


def run(limit: int, out: Path) -> None:
    """Fit the GAN under `limit` MiB."""
    torch.manual_seed(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=AutoParallelStrategy(
            memory_limit=f"{limit}MiB", start_method="fork", find_unused_parameters=True
        ),
        max_steps=2 * STEPS,
        callbacks=[StepMonitor(), Seen(out)],
        **QUIET,
    )
    trainer.fit(GAN(), DataLoader(torch.randn(64 * 2 * STEPS, 256), batch_size=64))


def main(
    doc: str | None = __doc__,
    title: str = "A GAN with manual optimization under memory limits",
    name: str = "manual_limits",
    limits: Sequence[int] = LIMITS_MIB,
    run: Callable[[int, Path], None] = run,
) -> None:
    """Measure under each of `limits`, in new processes, and write the table."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.out is not None:
        run(options.limit, options.out)
        return
    lines = [f"# {title}", "", machine(), ""]
    lines += [
        "| limit MiB | plan | predicted s | measured s | error | predicted MiB | measured MiB | "
        "error | parameters on a rank | limit kept |",
        "|---" * 10 + "|",
    ]
    for limit in limits:
        try:
            found = run_module(f"benchmarks.prediction.{name}", limit=limit)
        except JobFailed:
            lines.append(f"| {limit} | did not run |" + " |" * 8)
            continue
        (seconds, peak), (real_seconds, real_peak) = found["predicted"], found["measured"]
        lines.append(
            f"| {limit} | {found['plan']} | {seconds:.3f} | {real_seconds:.3f} | "
            f"{seconds / real_seconds - 1:+.1%} | {mib(peak)} | {mib(real_peak)} | "
            f"{peak / real_peak - 1:+.1%} | {found['share']:.2f} | "
            f"{'yes' if real_peak <= limit * 2**20 else 'NO'} |"
        )
        print(lines[-1], flush=True)
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
