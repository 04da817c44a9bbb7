"""A model that no rank can hold: four ranks of 2 GiB train 2.3 GB of weights (needs root).

    sudo python -m benchmarks.robustness.larger_than_memory        # about 40 minutes on 2 cores

Each rank is in a memory cgroup of its own, so that the kernel kills what exceeds it. The model is
made on the meta device and trained by SGD under ``zero3``. `topt checkpoint` makes a safetensors
file of that, from which AdamW goes on under ``zero3+offload``: weights, gradients and moments of
9.2 GB, in files. Each run takes steps, evaluates, and saves a sharded checkpoint. A second run in
new processes goes on from there. A small twin of the model, made whole, shows that the losses of
both ways are those of ``ddp``.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import QUIET, RESULTS, machine, run_module
from benchmarks.gpt_run import enter_cgroup
from lightning_topt import AutoParallelStrategy
from tests.models import GPT
from tests.plugins.trainer_ranks import loader, mean_over_ranks

LIMIT, RANKS, STEPS = 2 << 30, 4, 2
SIZES = {
    "large": {"layers": 45, "width": 1024, "heads": 16, "vocab": 4096, "context": 16},
    "small": {"layers": 3, "width": 64, "heads": 4, "vocab": 256, "context": 16},
}
CASES = (("SGD", "zero3"), ("AdamW", "zero3+offload"))
WEIGHTS = "model.safetensors"


class Late(L.LightningModule):
    """A GPT that is made when the fit begins, and notes losses and seconds."""

    def __init__(self, size: str, optimizer: str, on_meta: bool) -> None:
        super().__init__()
        self.made, self.optimizer, self.on_meta = SIZES[size], optimizer, on_meta
        self.net: GPT | None = None
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.begun = 0.0

    def setup(self, stage: str) -> None:
        if self.on_meta and SIZES["large"] is self.made:
            # What is taken by now is in another group, that of the process that started this one.
            enter_cgroup(LIMIT - memory_of("RssAnon"))

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta" if self.on_meta else "cpu"):
                self.net = GPT(**self.made)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.net is not None
        return F.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def on_train_batch_start(self, *_: Any) -> None:
        self.begun = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.begun)
        self.losses.append(mean_over_ranks(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        if self.optimizer == "SGD":
            return torch.optim.SGD(self.parameters(), lr=0.05)
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def memory_of(name: str) -> int:
    """Return the bytes of an entry of this process's status."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(rf"^{name}:\s+(\d+) kB$", status, re.M)[0])


def run(options: argparse.Namespace) -> None:
    """Train in this process, one rank, within its limit; rank 0 writes what it saw."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = SIZES[options.size]
    data = {"vocab": made["vocab"], "context": made["context"]}
    module = Late(options.size, options.optimizer, options.plan != "ddp")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=AutoParallelStrategy(
            plan=options.plan,
            checkpoint="sharded",
            first_values=None if options.values is None else {"net": options.values},
        ),
        max_steps=options.steps,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        **QUIET,
    )
    steps = loader(1, length=RANKS * STEPS, **data)
    trainer.fit(module, steps, loader(1, length=RANKS, **data), ckpt_path=options.resume)
    if options.resume is None:
        trainer.save_checkpoint(options.folder / f"{options.steps}.ckpt")
    anonymous: list[Any] = [None] * RANKS
    torch.distributed.all_gather_object(anonymous, memory_of("RssAnon"))
    if trainer.is_global_zero:
        found = {
            "losses": module.losses,
            "seconds": module.seconds,
            "val_loss": float(trainer.callback_metrics.get("val_loss", "nan")),
            "anonymous": max(anonymous),
        }
        options.out.write_text(json.dumps(found))


def launch(folder: Path, **options: Any) -> dict[str, Any]:
    """Run in new processes; return what rank 0 wrote."""
    return run_module(
        "benchmarks.robustness.larger_than_memory", timeout=3000, folder=folder, **options
    )


def one_file(checkpoint: Path, file: Path) -> str:
    """Write the weights of `checkpoint` to one file, within a rank's limit; return a row."""
    start = time.perf_counter()
    command = [sys.executable, "-c", _ONE_FILE, str(LIMIT), str(checkpoint), str(file)]
    subprocess.run(command, check=True, timeout=3000)
    seconds = time.perf_counter() - start
    return f"| | `topt checkpoint` | {file.stat().st_size / 1e9:.2f} GB | | {seconds:.0f} | | yes |"


_ONE_FILE = """
import sys
from benchmarks.gpt_run import enter_cgroup
from lightning_topt.cli.checkpoint import run
enter_cgroup(int(sys.argv[1]))
run([sys.argv[2], sys.argv[3], "--module", "net"])
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=[*SIZES])
    parser.add_argument("--optimizer")
    parser.add_argument("--plan")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--resume")
    parser.add_argument("--values", help="a safetensors file")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.out is not None:
        run(options)
        return
    lines = ["# A model that no rank can hold", "", machine(), ""]
    lines += [
        f"- {RANKS} ranks, each in a memory cgroup of {LIMIT / 2**30:.0f} GiB",
        "",
        "| optimizer | plan | losses | validation | seconds of a step | anonymous memory "
        "| goes on |",
        "|---" * 7 + "|",
    ]
    results = Path(tempfile.mkdtemp(prefix="topt-large-"))
    values: dict[str, Path] = {}  # of the second case, from the first
    for optimizer, plan in CASES:
        folder = results / optimizer
        folder.mkdir()
        known = {"size": "large", "optimizer": optimizer, "plan": plan, **values}
        first = launch(folder, steps=STEPS, **known)
        path = folder / f"{STEPS}.ckpt"
        # weights of a checkpoint are those of the whole model, whatever it began with
        known.pop("values", None)
        again = launch(folder, steps=STEPS + 1, resume=path, **known)
        losses, seconds = (
            ", ".join(f"{value:.4g}" for value in [*first[name], *again[name]])
            for name in ("losses", "seconds")
        )
        anonymous = max(first["anonymous"], again["anonymous"])
        lines.append(
            f"| {optimizer} | `{plan}` | {losses} | {first['val_loss']:.4f} | {seconds} | "
            f"{anonymous / 2**30:.2f} GiB | yes |"
        )
        print(lines[-1], flush=True)
        if not values:
            values = {"values": results / WEIGHTS}
            lines.append(one_file(path, values["values"]))
            print(lines[-1], flush=True)
        shutil.rmtree(folder)
    shutil.rmtree(results)
    lines += ["", "A small twin, losses:", ""]
    for optimizer, plan in CASES:
        folder = Path(tempfile.mkdtemp(prefix="topt-small-"))
        found = [
            launch(folder, size="small", optimizer=optimizer, plan=name, steps=STEPS)["losses"]
            for name in (plan, "ddp")
        ]
        shutil.rmtree(folder)
        lines.append(f"- {optimizer}: on the meta device {found[0]}, whole {found[1]}")
        print(lines[-1], flush=True)
    (RESULTS / "larger_than_memory.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
