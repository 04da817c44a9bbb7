"""Compiled blocks: ``ddp``, ``ddp`` with each layer compiled by hand, and ``allow="compile"``.

    python -m benchmarks.foreign.compiled_blocks                 # hours on 2 cores
    python -m benchmarks.foreign.compiled_blocks --only llama --only convnext --rounds 3

Two gloo ranks with one thread each, interleaved rounds, each fit in processes of its own. The
median of the last steps counts, after trial and compilation; the seconds of these are beside it.
"By hand" is what users write: `layer.compile()` for each layer of the model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.nn import functional as F

from benchmarks.common import QUIET, RESULTS, machine, run_module, spread
from benchmarks.foreign.family_models import FAMILIES, Family, adamw
from lightning_topt import AutoParallelStrategy
from lightning_topt.plugins import compiled_steps
from lightning_topt.techniques.compilation import candidates
from tests.models import GPT

BATCHES, LAST = 60, 20
WAYS = ("ddp", "by hand", "allow")


class Language(GPT):
    """A GPT that returns its loss."""

    def forward(self, batch: Any) -> Any:
        return F.cross_entropy(super().forward(batch[0]).flatten(0, 1), batch[1].flatten())


def gpt(layers: int, width: int) -> Family:
    """A GPT of bytes."""

    def batch(samples: int) -> list[torch.Tensor]:
        text = torch.randint(256, (samples, 129))
        return [text[:, :-1], text[:, 1:]]

    made = {"layers": layers, "width": width, "heads": 8, "vocab": 256, "context": 128}
    return Family(lambda: Language(**made), batch, 4, adamw)


MODELS = {
    "gpt 3 M": gpt(4, 256),
    "gpt 26 M": gpt(8, 512),
    "gpt 50 M": gpt(16, 512),
    **{name: FAMILIES[name] for name in ("vit", "convnext", "llama", "recognizer", "translator")},
}


class Clock(L.Callback):
    """Ends the fit after `BATCHES`, and keeps when each began."""

    def __init__(self) -> None:
        self.begun: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.begun.append(time.perf_counter())

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        trainer.should_stop = len(self.begun) >= BATCHES


def run(options: argparse.Namespace) -> None:
    """One fit; rank 0 writes the seconds of its steps."""
    torch.set_num_threads(1)
    compiled_steps.USUAL_SECONDS = 0.0  # as in a long fit, whose end is not known
    family = MODELS[options.model]
    module = family.module()
    if options.way == "by hand":
        for names in candidates(module).values():
            for name in names:
                module.get_submodule(name).compile(dynamic=False)
    batches: Any = [family.example(seed) for seed in range(8)]
    clock = Clock()
    allow = "compile" if options.way == "allow" else None
    quiet: dict[str, Any] = {**QUIET}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=AutoParallelStrategy(allow=allow) if allow else "ddp",
        max_epochs=-1,
        callbacks=[clock],
        use_distributed_sampler=False,
        **quiet,
    )
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    if trainer.is_global_zero:
        steps = [b - a for a, b in zip(clock.begun, clock.begun[1:], strict=False)]
        step = statistics.median(steps[-LAST:])
        extra = sum(each - step for each in steps if each > 5 * step)
        found = {"step": step, "extra": extra, "loss": clock.losses[-1]}
        options.out.write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model")
    parser.add_argument("--way")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.out is not None:
        run(options)
        return
    lines = ["# Compiled blocks", "", machine(), "", f"- {options.rounds} interleaved rounds", ""]
    lines += [
        "| model | ddp, ms | by hand / ddp | allow / ddp | better of the two / allow "
        "| seconds to compile: by hand, allow | difference of losses |",
        "|---" * 7 + "|",
    ]
    for model in options.only or MODELS:
        rounds = [
            {
                way: run_module("benchmarks.foreign.compiled_blocks", model=model, way=way)
                for way in WAYS
            }
            for _ in range(options.rounds)
        ]
        steps = {way: [each[way]["step"] for each in rounds] for way in WAYS}
        hand, ours = (
            [one / other for one, other in zip(steps[way], steps["ddp"], strict=True)]
            for way in WAYS[1:]
        )
        best = [min(1.0, a) / b for a, b in zip(hand, ours, strict=True)]
        extra = [statistics.median(each[way]["extra"] for each in rounds) for way in WAYS[1:]]
        loss = max(abs(r["allow"]["loss"] / r["ddp"]["loss"] - 1) for r in rounds)
        lines.append(
            f"| {model} | {1000 * statistics.median(steps['ddp']):.0f} | {spread(hand)} | "
            f"{spread(ours)} | {spread(best)} | {extra[0]:.0f}, {extra[1]:.0f} | {loss:.0e} |"
        )
        print(lines[-1], flush=True)
    (RESULTS / "compiled_blocks.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
