"""Where tensor parallelism is right and where it is not: chosen against best executed plan.

    sudo python -m benchmarks.tensor.choices       # half an hour on 4 cores; --rounds, --only

Three set-ups of each kind, on CPU ranks with one thread each: ranks of one node here, or nodes of
the lab with a link between. Every plan runs once. Those within 15 % of the fastest that keeps the
limit then run `--rounds` times more, alternating with the plan that `topt` chooses. Each run is a
job of its own. Regret: seconds of what was chosen over those of the fastest, round by round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import QUIET, RESULTS, JobFailed, machine, mib, run_module, spread
from benchmarks.lab import Lab, LabError, end_on_signals
from lightning_topt import AutoParallelStrategy
from lightning_topt.demo import ByteGPT
from lightning_topt.plugins.monitors import StepMonitor

MESH = '{"mesh": {"data": 2, "tensor": 2}}'
RUN = "benchmarks.tensor.choices"
PLANS = ("ddp", "zero1", "zero3", "zero3+recompute", "tensor")


@dataclass(frozen=True)
class SetUp:
    """A model, a batch and a cluster.

    `limit` per rank is a share of what `limit_of` takes; None: no limit.
    """

    name: str
    options: dict[str, Any]
    nodes: int = 1
    ranks: int = 2
    rate: str = "1gbit"
    limit_of: str | None = None
    limit: float = 1.0
    plans: Sequence[str] = field(default=PLANS)


SET_UPS = (
    SetUp(
        "right: a layer too large for the limit",
        {"model": "mlp", "layers": 1, "width": 2048, "global-batch": 64},
        ranks=4,
        limit_of="tensor",
        limit=1.4,
        plans=(*PLANS, MESH),
    ),
    SetUp(
        "right: a batch of 1 per rank",
        {"model": "gpt", "layers": 4, "width": 768, "seq-len": 32, "global-batch": 2},
    ),
    SetUp(
        "right: fast links in a node, 1 Gb/s between",
        {"model": "gpt", "layers": 4, "width": 512, "seq-len": 32, "global-batch": 8},
        nodes=2,
        plans=("ddp", "zero1", "hybrid", MESH),
    ),
    SetUp(
        "wrong: a GPT with many tokens",
        {"model": "gpt", "layers": 6, "width": 256, "seq-len": 128, "global-batch": 16},
    ),
    SetUp("wrong: convolutions", {"model": "conv", "layers": 4, "width": 64, "global-batch": 16}),
    SetUp(
        "wrong: a GPT under a limit that sharding keeps",
        {"model": "gpt", "layers": 6, "width": 384, "seq-len": 128, "global-batch": 8},
        limit_of="zero3",
        limit=1.3,
    ),
)


def run_plan(
    set_up: SetUp, lab: Lab | None, *, plan: str | None, limit: int | None
) -> dict[str, Any] | None:
    """Run one job; None where the plan is refused."""
    options = {
        **set_up.options,
        "devices": set_up.ranks,
        "num-nodes": set_up.nodes,
        "plan": plan,
        "memory-limit": limit,
    }
    options = {key: value for key, value in options.items() if value is not None}
    try:
        if lab is None:
            return run_module(RUN, "--worker", **options)
        return lab.run_module(RUN, "--worker", ranks_per_node=set_up.ranks, **options)
    except (JobFailed, LabError) as error:
        print(f"{set_up.name}: {plan}: {getattr(error, 'output', str(error))[-300:]}", flush=True)
        return None


def measure(set_up: SetUp, rounds: int) -> list[str]:
    """Rows of the table."""
    with Lab(set_up.nodes, rate=set_up.rate) if set_up.nodes > 1 else nullcontext() as lab:
        first = {plan: run_plan(set_up, lab, plan=plan, limit=None) for plan in set_up.plans}
        done = {plan: found for plan, found in first.items() if found is not None}
        limit = (
            None
            if set_up.limit_of is None
            else int(set_up.limit * done[set_up.limit_of]["peak_bytes"])
        )
        keeping = {plan: f for plan, f in done.items() if limit is None or f["peak_bytes"] <= limit}
        fastest = min(found["step_seconds"] for found in keeping.values())
        contenders = [
            plan for plan, found in keeping.items() if found["step_seconds"] <= 1.15 * fastest
        ]
        results: dict[str, list[dict[str, Any]]] = {plan: [] for plan in (*contenders, "topt")}
        for _ in range(rounds):
            for plan, found in results.items():
                result = run_plan(
                    set_up,
                    lab,
                    plan=None if plan == "topt" else plan,
                    limit=limit if plan == "topt" else None,
                )
                assert result is not None, f"{plan} ran once, and then no more"
                found.append(result)
    seconds = {
        plan: [result["step_seconds"] for result in found] for plan, found in results.items()
    }
    best = min(contenders, key=lambda plan: statistics.median(seconds[plan]))
    regrets = [
        chosen / other - 1 for chosen, other in zip(seconds["topt"], seconds[best], strict=True)
    ]
    others = ", ".join(
        f"{plan} {f['step_seconds']:.3f} s, {mib(f['peak_bytes'])} MiB" for plan, f in done.items()
    )
    ours = results["topt"]
    cells = (
        set_up.name,
        "-" if limit is None else f"{mib(limit)}",
        f"{ours[-1]['summary']}: {spread(seconds['topt'])} s, "
        f"{mib(max(r['peak_bytes'] for r in ours))} MiB",
        f"{best.replace('|', '')}: {spread(seconds[best])} s",
        f"{100 * statistics.median(regrets):.1f} % ({100 * min(regrets):.1f} to "
        f"{100 * max(regrets):.1f})",
        others,
    )
    print("| " + " | ".join(cells) + " |", flush=True)
    return ["| " + " | ".join(cells) + " |"]


def main() -> None:
    """Measure and write the table."""
    end_on_signals()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only", default="", help="set-ups whose name contains this; nothing is written then"
    )
    options = parser.parse_args()
    chosen = [set_up for set_up in SET_UPS if options.only in set_up.name]
    rows = [row for set_up in chosen for row in measure(set_up, options.rounds)]
    lines = [
        "# What is chosen where tensor parallelism could be",
        "",
        f"`sudo python -m benchmarks.tensor.choices --rounds {options.rounds}`",
        "",
        machine(),
        "",
        "One thread per rank. Regret: chosen plan over fastest executed one that keeps the limit, "
        "median (range) of the",
        "rounds. The global batch is the same for all plans of a set-up. A plan that is given with "
        "its tensor axis gets one",
        "batch for the ranks of a tensor group; what is chosen without one keeps a batch for every "
        "rank, as ddp has it, and so",
        "every logged value and every loss: the ranks of a group then run them one after the "
        "other (microbatches).",
        "",
        "| set-up | limit, MiB | chosen | fastest executed | regret | each plan once |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    if not options.only:
        (RESULTS / "tensor_choices.md").write_text("\n".join(lines) + "\n")


# ---- one measured fit: one of three models, a global batch, a plan or a search -------------------

SAMPLES = 4096


class Perceptron(L.LightningModule):
    """`layers` blocks of two wide linear layers with a residual."""

    def __init__(self, layers: int, width: int, inner: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 10)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Convolutions(L.LightningModule):
    """`layers` residual blocks of two convolutions, `width` channels."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.GroupNorm(8, width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1),
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 10)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        x, y = batch
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def made(options: argparse.Namespace) -> tuple[L.LightningModule, Any]:
    """The model and its data, invented: only times and bytes are read."""
    if options.model == "gpt":
        tokens = torch.randint(0, 256, (SAMPLES, options.seq_len + 1))
        model: L.LightningModule = ByteGPT(
            options.layers, options.width, options.width // 64, options.seq_len
        )
        del model.val_bits_per_byte  # no stages are searched for a module that has metrics
        return model, tokens
    labels = torch.randint(0, 10, (SAMPLES,))
    if options.model == "mlp":
        inputs = torch.randn(SAMPLES, options.width)
        return Perceptron(options.layers, options.width, 4 * options.width), TensorDataset(
            inputs, labels
        )
    return Convolutions(options.layers, options.width), TensorDataset(
        torch.randn(SAMPLES, 3, 32, 32), labels
    )


def read_plan(text: str | None) -> Any:
    """A mesh as JSON, a name, or None for a search."""
    return json.loads(text) if text and text.startswith("{") else text


def data_ranks(plan: Any, world_size: int) -> int:
    """Ranks that get samples of their own: without a given tensor axis all."""
    if isinstance(plan, dict):
        return world_size // int(plan["mesh"].get("tensor", 1))
    return 1 if isinstance(plan, str) and plan.startswith(("tensor", "context")) else world_size


def parse_worker() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", action="store_true", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=["gpt", "mlp", "conv"], default="gpt")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--plan")
    parser.add_argument("--memory-limit")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=2)
    return parser.parse_args()


def run_worker() -> None:
    options = parse_worker()
    torch.set_num_threads(1)
    L.seed_everything(0)
    plan = read_plan(options.plan)
    # without a plan and a limit all plans are searched, as strategy="topt_full" does
    plan = plan or (None if options.memory_limit else "search")
    strategy = AutoParallelStrategy(memory_limit=options.memory_limit, plan=plan)
    monitor = StepMonitor(warmup_steps=options.warmup)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.devices,
        num_nodes=options.num_nodes,
        strategy=strategy,
        max_steps=options.steps,
        **QUIET,
        callbacks=[monitor],
    )
    model, data = made(options)
    batch = options.global_batch // data_ranks(plan, options.devices * options.num_nodes)
    trainer.fit(model, DataLoader(data, batch_size=batch, shuffle=True))
    if not trainer.is_global_zero:
        return
    assert monitor.measurement is not None
    assert strategy.parallel_plan is not None
    result = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "summary": strategy.parallel_plan.summary(),
        "reason": strategy.parallel_plan.reason,
        "predicted_seconds": predicted.step_seconds
        if (predicted := strategy.parallel_plan.predicted)
        else None,
        "planning_seconds": strategy.planning_seconds,
        "step_seconds": monitor.measurement.median_step_seconds,
        "peak_bytes": max(p for p in monitor.measurement.peak_bytes_per_rank if p is not None),
    }
    options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    try:
        run_worker() if "--worker" in sys.argv else main()
    except LabError as error:
        sys.exit(str(error))
