"""Time to the dense run's final loss under AdamW, over links of 1 Gb/s, 200 and 50 Mb/s.

    sudo python -m benchmarks.exchange.adam_lab          # 90 minutes; 2 quiet cores to time
    sudo python -m benchmarks.exchange.adam_lab --train  # the first half alone; nothing is timed
    sudo python -m benchmarks.exchange.adam_lab --smoke  # a few steps of all; not kept
    python -m benchmarks.exchange.adam_lab --report      # the table from what was measured

Two nodes of the lab on this machine. How the loss falls with the steps does not depend on the link.
So each method first trains once at each of its learning rates, on a link without a limit. It stops
when its validation loss is that of the dense run's end. Then some of its steps are timed over every
link, all methods in turn; the time is that of as many such steps. Results are kept one by one in
benchmarks/results/adam_lab.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import RESULTS, machine
from benchmarks.exchange.recipes import method_of
from benchmarks.exchange.shared import held_out_batches, make, text_batches
from benchmarks.lab import Lab, LabError, end_on_signals, sent_bytes
from lightning_topt.communication import CompressedExchange
from lightning_topt.communication.exchange_method import GradientMethod, LocalMethod
from lightning_topt.communication.local_sgd import OuterSteps
from lightning_topt.communication.topology import Topology

FILE = RESULTS / "adam_lab.json"
# of timed steps; over 50 Mb/s the link alone decides, within 1 %
ROUNDS = {"1gbit": 5, "200mbit": 5, "50mbit": 2}
STEPS, MOST_STEPS = 200, 400
ADAM = (6.25e-5, 1.25e-4, 2.5e-4)
HIGH = (*ADAM[1:], 5e-4)
RATES = (3.125e-5, *ADAM, 5e-4)


@dataclass(frozen=True)
class Contender:
    """A method as a mapping (None: DDP), how many steps to time, and the learning rates to try.

    The timed steps include outer ones.
    """

    method: dict[str, Any] | None
    timed: int = 12
    rates: tuple[float, ...] = ADAM


METHODS: dict[str, Contender] = {
    "dense": Contender(None, timed=5, rates=RATES[1:]),
    "bf16": Contender({"method": "bf16"}, timed=5),
    "PowerSGD, rank 4": Contender({"method": "powersgd", "rank": 4}),
    "PowerSGD, rank 16": Contender({"method": "powersgd", "rank": 16}),
    "top-k 1 %": Contender({"method": "topk", "density": 0.01}),
    "top-k 8 %, 2 bits": Contender({"method": "topk", "density": None, "bits": 2}, rates=RATES[:4]),
    "sign": Contender({"method": "sign"}),
    "DiLoCo, 50 steps": Contender(
        {"method": "local_steps", "every": 50}, timed=53, rates=RATES[:4]
    ),
    "DeMo 1 %, 2 bits": Contender({"method": "demo"}),
    "SparseLoCo, 15 steps": Contender({"method": "sparse_loco"}, timed=33, rates=HIGH),
    "SparseLoCo, 5 steps, 10 %": Contender(
        {"method": "sparse_loco", "every": 5, "density": 0.1}, timed=18, rates=HIGH
    ),
    "SparseLoCo, 5 steps, 10 %, decay 0.8": Contender(
        {"method": "sparse_loco", "every": 5, "density": 0.1, "residual_decay": 0.8},
        timed=18,
        rates=HIGH,
    ),
}


def run(
    contender: Contender, *, link: str | None, learning_rate: float, **options: Any
) -> dict[str, Any]:
    """One job on two nodes of one rank."""
    with Lab(2, rate=link) as lab:
        return lab.run_module(
            "benchmarks.exchange.adam_lab",
            "--worker",
            ranks_per_node=1,
            timeout=7200,
            method=json.dumps(contender.method),
            rate=learning_rate,
            **options,
        )


def train(names: Sequence[str]) -> None:
    """Every training that is not kept yet."""
    target = min(
        _trained("dense", rate, STEPS, float("-inf"))["losses"][-1][1]
        for rate in METHODS["dense"].rates
    )
    for name in names:
        for rate in METHODS[name].rates:
            _trained(name, rate, MOST_STEPS, target)


def _trained(name: str, rate: float, steps: int, target: float) -> dict[str, Any]:
    key = f"{name}|{rate:g}"
    kept = load()
    if key not in kept["trainings"]:
        result = run(METHODS[name], link=None, learning_rate=rate, steps=steps, loss=target)
        del result["step_seconds"]  # of a link without a limit, perhaps beside other work
        kept["trainings"][key] = result
        keep(kept)
        print(key, f"{result['steps']} steps, {result['losses'][-1:]}", flush=True)
    found: dict[str, Any] = kept["trainings"][key]
    return found


def measure(names: Sequence[str]) -> None:
    """Every round of timed steps that is not kept yet, all methods in turn."""
    for link, rounds in ROUNDS.items():
        for number in range(rounds):
            for name in names:
                kept = load()
                seconds = kept["seconds"].setdefault(link, {}).setdefault(name, [])
                if len(seconds) <= number:
                    contender = METHODS[name]
                    result = run(
                        contender, link=link, learning_rate=ADAM[0], steps=contender.timed, every=0
                    )
                    seconds.append(result["step_seconds"])
                    kept["bytes"][name] = result["node_bytes"]
                    keep(kept)
                    print(link, name, f"{seconds[-1]:.3f} s", flush=True)


def load() -> dict[str, Any]:
    found: dict[str, Any] = {"trainings": {}, "seconds": {}, "bytes": {}}
    return found | (json.loads(FILE.read_text()) if FILE.exists() else {})


def keep(results: dict[str, Any]) -> None:
    FILE.write_text(json.dumps(results) + "\n")


def report(found: dict[str, Any]) -> str:
    """The table."""
    ends = [
        run["losses"][-1][1] for key, run in found["trainings"].items() if key.startswith("dense|")
    ]
    lines = ["# Time to the dense run's loss under AdamW, over slow links", "", machine(), ""]
    if not ends:
        return "\n".join(lines)
    lines += [*_introduction(found, min(ends)), ""]
    links = " | ".join(ROUNDS)
    lines += [
        f"| method | learning rate | steps | MB per step | equal on all ranks | {links} | times "
        "dense |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    dense = _seconds("dense", found, min(ends))
    for name in METHODS:
        best = _best(name, found, min(ends))
        if best is None:
            continue
        key, training, steps = best
        seconds = _seconds(name, found, min(ends))
        times = " / ".join(
            f"{d[0] / s[0]:.1f}" if d and s else "-" for d, s in zip(dense, seconds, strict=True)
        )
        shown = " | ".join(
            f"{s[0]:.0f} s ({s[1]:.0f} to {s[2]:.0f})" if s else "-" for s in seconds
        )
        reached = (
            f"{steps}" if steps else f"not in {training['steps']} ({training['losses'][-1][1]:.3f})"
        )
        equal = {True: "yes", False: "**no**", None: "-"}[training["equal"]]
        size = f"{found['bytes'][name] / 1e6:.3f}" if name in found["bytes"] else "-"
        lines.append(
            f"| {name} | {key.split('|')[1]} | {reached} | {size} | {equal} | {shown} | {times} |"
        )
    return "\n".join([*lines, "", *_all_rates(found, min(ends)), ""])


def _introduction(found: dict[str, Any], target: float) -> list[str]:
    size = next(iter(found["trainings"].values()))["parameters"]
    rounds = ", ".join(f"at least {number} over {link}" for link, number in ROUNDS.items())
    return [
        f"A GPT of {size / 1e6:.1f} M parameters, 4 sequences of 32 bytes per rank, two nodes of "
        f"one rank. The dense run has {STEPS} steps and ends at {target:.3f} nats per byte of "
        "validation text. Seconds: steps to that loss (mean of two validations), times the step's "
        f"time over that link, median (range) of interleaved rounds ({rounds}). A row is the "
        "learning rate with the fewest steps."
    ]


def _all_rates(found: dict[str, Any], target: float) -> list[str]:
    """The steps at each learning rate."""
    lines = [
        "Steps at each learning rate; in brackets the loss at the end where the target was not "
        "reached:",
        "",
        "| method | " + " | ".join(f"{rate:g}" for rate in RATES) + " |",
        "|---|" + "---|" * len(RATES),
    ]
    for name in METHODS:
        trainings = [found["trainings"].get(f"{name}|{rate:g}") for rate in RATES]
        cells = [
            "-"
            if training is None
            else str(training["steps"])
            if name != "dense" and _reaches(training, target)
            else f"{training['steps']} ({training['losses'][-1][1]:.3f})"
            for training in trainings
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _reaches(training: dict[str, Any], target: float) -> bool:
    return bool(statistics.mean(loss for _, loss in training["losses"][-2:]) <= target)


def _best(
    name: str, found: dict[str, Any], target: float
) -> tuple[str, dict[str, Any], int | None] | None:
    """Return key and training of the learning rate that needs the fewest steps, and these steps.

    Steps are None where no rate reaches the target.
    """
    best: tuple[tuple[float, float], str, dict[str, Any], int | None] | None = None
    for rate in METHODS[name].rates:
        key = f"{name}|{rate:g}"
        training = found["trainings"].get(key)
        if training is None:
            continue
        steps = training["steps"] if name == "dense" or _reaches(training, target) else None
        order = (steps or float("inf"), training["losses"][-1][1])
        if best is None or order < best[0]:
            best = (order, key, training, steps)
    return best and best[1:]


def _seconds(
    name: str, found: dict[str, Any], target: float
) -> list[tuple[float, float, float] | None]:
    """Seconds to the target over each link: median, lowest, highest."""
    best = _best(name, found, target)
    steps = best and best[2]
    rounds = [found["seconds"].get(link, {}).get(name) for link in ROUNDS]
    return [
        (statistics.median(taken) * steps, min(taken) * steps, max(taken) * steps)
        if steps and taken
        else None
        for taken in rounds
    ]


def smoke(names: Sequence[str]) -> None:
    """A few steps of every method; raises where one fails or ranks differ."""
    for name in names:
        contender = METHODS[name]
        every = (contender.method or {}).get("every", 15 if "SparseLoCo" in name else 8)
        steps = every + 1 if "steps" in name and every < 50 else 5
        result = run(
            contender, link="1gbit", learning_rate=ADAM[0], steps=steps, every=2, held_out=2
        )
        print(name, result, flush=True)
        if result["equal"] is not True:
            raise LabError(f"{name}: parameters differ between ranks")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--train", action="store_true", help="nothing is timed")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args(arguments)
    end_on_signals()
    try:
        if options.smoke:
            smoke(options.methods)
            return
        if not options.report:
            train(options.methods)
        if not options.report and not options.train:
            measure(options.methods)
    except LabError as error:
        sys.exit(f"adam_lab: {error}")
    text = report(load())
    (RESULTS / "adam_lab.md").write_text(text)
    print(text)


# ---- one rank of a job, started by `run` ---------------------------------------------------------

SEQUENCES = 4
WARM_UP = 20  # steps in which the learning rate rises
TIMEOUT = 1800  # seconds of any wait; trainings may be stopped for a while
NOT_TIMED = 3  # steps: kernels are compiled, buckets laid anew


class Training:
    """A module, its optimizer, and what exchanges; made alike on all ranks."""

    def __init__(self, method: dict[str, Any] | None, rate: float, decay: float = 0.1) -> None:
        self.module: nn.Module = make("gpt")
        self.forward: Callable[[Tensor], Tensor] = self.module
        self.exchange: CompressedExchange | None = None
        self.outer: OuterSteps | None = None
        parameters = list(self.module.parameters())
        self.rate, chosen = rate, method_of(method) if method else None
        topology = Topology.from_environment(rank=dist.get_rank(), world_size=dist.get_world_size())
        if isinstance(chosen, LocalMethod):
            self.outer = OuterSteps(self.module, chosen, topology=topology, timeout_seconds=TIMEOUT)
        else:
            ddp = DistributedDataParallel(
                self.module, gradient_as_bucket_view=True, init_sync=False
            )
            self.forward = ddp
            if chosen is not None:
                assert isinstance(chosen, GradientMethod)
                self.exchange = CompressedExchange(
                    ddp, chosen, topology=topology, timeout_seconds=TIMEOUT
                )
        # of signs: its decay is AdamW's
        if chosen is not None and chosen.name == "demo":
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
                parameters, lr=rate, weight_decay=decay
            )
        else:
            self.optimizer = torch.optim.AdamW(
                parameters, lr=rate, betas=(0.9, 0.95), weight_decay=decay, fused=True
            )

    def step(self, batch: Tensor, number: int) -> None:
        """One step of this rank."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, (number + 1) / WARM_UP)
        self.optimizer.zero_grad(set_to_none=False)
        self.forward(batch).backward()
        if self.outer is not None:
            self.outer.average_gradients()
        self.optimizer.step()
        if self.outer is not None:
            self.outer.after_step()

    @property
    def is_together(self) -> bool:
        """Return whether all ranks have the same parameters now."""
        return self.outer is None or self.outer.pending_steps == 0


@torch.no_grad()
def validation_loss(module: nn.Module, batches: list[Tensor]) -> float:
    """Mean loss, the same on all ranks: each has its part of the batches."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = batches[rank::ranks]
    total = torch.tensor([sum(float(module(batch)) for batch in own), float(len(own))])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def train_here(options: argparse.Namespace) -> dict[str, Any]:
    """Return seconds, steps, bytes of node 0, and the validation losses on the way.

    Evaluation is not timed.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batches = text_batches(rank, ranks, sequences=SEQUENCES, steps=options.steps)
    held_out = held_out_batches(sequences=SEQUENCES, batches=options.held_out)
    training = Training(json.loads(options.method), options.rate)
    seconds: list[float] = []
    losses: list[tuple[int, float]] = []
    before, due = sent_bytes(), options.every
    for number, batch in enumerate(batches):
        dist.barrier()
        start = time.perf_counter()
        training.step(batch, number)
        seconds.append(time.perf_counter() - start)
        if number + 1 == NOT_TIMED:
            before = sent_bytes()
        last = number + 1 == len(batches)
        if last and training.outer is not None and options.every:
            start = time.perf_counter()
            training.outer.synchronize()
            seconds[-1] += time.perf_counter() - start
        if training.is_together and (number + 1 >= due or last) and options.every:
            due = number + 1 + options.every
            losses.append((number + 1, validation_loss(training.module, held_out)))
            if statistics.mean(loss for _, loss in losses[-2:]) <= options.loss:
                break
    steps = len(seconds)
    slowest = torch.tensor(seconds)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    counted = max(1, steps - NOT_TIMED)
    return {
        "steps": steps,
        "step_seconds": float(slowest[NOT_TIMED:].mean())
        if steps > NOT_TIMED
        else float(slowest.mean()),
        "losses": losses,
        "node_bytes": (sent_bytes() - before) / counted,
        "parameters": sum(p.numel() for p in training.module.parameters()),
        "equal": _equal(training.module) if training.is_together else None,
    }


def _equal(module: nn.Module) -> bool:
    sums = [int(p.detach().view(torch.int32).long().sum()) for p in module.parameters()]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sums)
    return all(other == everyone[0] for other in copy.copy(everyone))


def run_worker() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", action="store_true", required=True)
    parser.add_argument("--method", required=True, help="as JSON; null: DDP")
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--loss", type=float, default=float("-inf"), help="where to stop")
    parser.add_argument(
        "--every",
        type=int,
        default=10,
        help="steps between validations; 0: none, steps are timed only",
    )
    parser.add_argument("--held_out", type=int, default=32, help="batches")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    result = train_here(options)
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_worker() if "--worker" in sys.argv else main()
