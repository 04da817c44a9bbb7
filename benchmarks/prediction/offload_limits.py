"""A GPT under limits that nothing keeps but plans that offload: predicted and measured steps.

    python -m benchmarks.prediction.offload_limits       # about 8 minutes on 2 cores

26 M parameters, AdamW, batches of 4 x 64 tokens per rank, on two CPU ranks with one thread each.
The smallest plan that does not offload (ZeRO-3, all recomputed) needs the first limit. Memory is
that of a rank above the idle rank, without what is in files; no group of processes limits it, so
that files stay in the system's cache. Seconds are the median of steps, of the slower rank.
"""

from __future__ import annotations

from pathlib import Path

import lightning as L
import torch

from benchmarks.common import QUIET
from benchmarks.prediction.manual_limits import STEPS, Seen, main
from lightning_topt import AutoParallelStrategy
from lightning_topt.plugins.monitors import StepMonitor
from tests.models import GPT
from tests.plugins.trainer_ranks import loader

LIMITS_MIB = (210, 195, 180, 165, 150, 135, 120, 110, 100, 92)


def run(limit: int, out: Path) -> None:
    """Fit the GPT under `limit` MiB."""
    torch.manual_seed(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=AutoParallelStrategy(memory_limit=f"{limit}MiB", start_method="fork"),
        max_steps=STEPS,
        callbacks=[StepMonitor(), Seen(out)],
        **QUIET,
    )
    model = GPT(layers=8, width=512, vocab=1024, context=64)
    trainer.fit(model, loader(4, length=8 * STEPS, vocab=1024, context=64))


if __name__ == "__main__":
    title = "A GPT under limits that only offloaded shards keep"
    main(__doc__, title, "offload_limits", LIMITS_MIB, run)
