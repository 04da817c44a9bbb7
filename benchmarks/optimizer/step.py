"""Step time of the parallel optimizer step against plain, ZeroRedundancyOptimizer and FSDP2.

    python -m benchmarks.optimizer.step            # all optimizers, 100 M parameters, 2 ranks
    python -m benchmarks.optimizer.step --only Muon --rounds 9
    python -m benchmarks.optimizer.step --quick    # small sizes, two rounds; printed, not kept
    python -m benchmarks.optimizer.step --report   # the tables from what was measured

Forward and backward of the model cost next to nothing, so that a step is the exchange of gradients
and the update. All methods of one optimizer run in one job and alternate, round by round, in an
order that is reversed every second round.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from benchmarks.common import RESULTS, machine, mib, spread
from benchmarks.optimizer.shared import (
    SETTLING_STEPS,
    Adaptive,
    Model,
    Part,
    Shapes,
    count,
    gpt_shapes,
    parts,
    square_shapes,
)

FILE = RESULTS / "optimizer_step.json"
RANKS = 2
GPT = (640, 16, 32_000)  # width, depth, vocabulary
# width, number: singular values of the perceptrons' sides would take minutes per step
SQUARE = (512, 64)
SHAMPOO = ("Shampoo", "SOAP")
STEPS = {
    "AdamW, fused": 3,
    "AdamW": 2,
    "Muon": 1,
    "Shampoo": 1,
    "SOAP": 10,
}  # SOAP: bases are renewed every 10
TITLE = "# Step time of the parallel optimizer step and its peers"


def shapes_of(optimizer: str, *, quick: bool) -> Shapes:
    """What it is measured on."""
    if optimizer in SHAMPOO:
        return square_shapes(*((64, 8) if quick else SQUARE))
    return gpt_shapes(*((128, 2, 1000) if quick else GPT))


def run(optimizer: str, *, rounds: int, quick: bool, methods: Sequence[str]) -> dict[str, Any]:
    """Everything measured with one optimizer."""
    shapes = shapes_of(optimizer, quick=quick)
    steps = 1 if quick else STEPS[optimizer]
    options = {"optimizer": optimizer, "shapes": shapes, "rounds": rounds, "steps": steps}
    options |= {"methods": list(methods), "warmup": SETTLING_STEPS + 1}
    return launch(options, ranks=RANKS, timeout=3600) | {
        "parameters": count(shapes),
        "per_turn": steps,
    }


def ratios(result: dict[str, Any], over: str, under: str) -> list[float]:
    """Of whole steps, round by round."""
    pairs = zip(result["seconds"][over], result["seconds"][under], strict=True)
    return [one[0] / other[0] for one, other in pairs]


def row(result: dict[str, Any], name: str) -> str:
    """A method's line of its table."""
    rounds = result["seconds"][name]
    whole, update = ([1e3 * pair[part] for pair in rounds] for part in (0, 1))
    cells = [name, spread(whole, 0), spread(update, 0)]
    for reference in (PLAIN, ZERO):
        known = reference in result["seconds"] and name != reference
        cells.append(spread(ratios(result, reference, name), 2) if known else "")
    difference = result["difference"].get(name)
    cells += [mib(result["state_bytes"][name]), "" if difference is None else f"{difference:.1e}"]
    return "| " + " | ".join(cells) + " |"


def table(optimizer: str, result: dict[str, Any]) -> list[str]:
    """The section of one optimizer."""
    lines = [
        f"## {optimizer}: {result['parameters'] / 1e6:.1f} M parameters",
        "",
        f"| | step, ms | of it the update, ms | {PLAIN} / it | {ZERO} / it | state MiB per rank | "
        "largest difference |",
        "|---|---|---|---|---|---|---|",
        *(row(result, name) for name in METHODS if name in result["seconds"]),
        "",
        f"{len(result['seconds'][PLAIN])} rounds of {result['per_turn']} steps.",
    ]
    lines += [f"- {name}: {note}" for name, notes in result["notes"].items() for note in notes]
    lines += [f"- {name} cannot: {error[:300]}" for name, error in result["errors"].items()]
    return [*lines, ""]


def report(results: dict[str, dict[str, Any]], where: str) -> str:
    """The page."""
    width, depth, vocabulary = GPT
    lines = [
        TITLE,
        "",
        where,
        "",
        f"`python -m benchmarks.optimizer.step`: {RANKS} ranks on this machine, one thread each, "
        "gloo, float32. Step: backward with the exchange of gradients, and the update, on the "
        "slowest rank; forward and backward compute nothing. Median (range) of interleaved rounds; "
        "ratios are of the same round.",
        "",
        f"Parameters of a language model: {depth} blocks of width {width}, vocabulary "
        f"{vocabulary}. Muon has the blocks' matrices, fused AdamW the rest. "
        f"{' and '.join(SHAMPOO)} (of pytorch-optimizer) have {SQUARE[1]} matrices of {SQUARE[0]} "
        f"x {SQUARE[0]}: the roots for the sides of 2560 would take minutes per step. Shampoo "
        "renews its roots in every step, SOAP its bases in every 10th.",
        "",
        f"{ZERO}: `parameters_as_bucket_view=True` and the same optimizer; its overlap with DDP "
        "does not run on gloo. FSDP2: `fully_shard` of every block and the whole with "
        "`reshard_after_forward=False`, torch's own collectives; its step has the gathering of "
        "parameters before forward in it. The plain step and ours run under "
        "DistributedDataParallel with `gradient_as_bucket_view=True`. The largest difference is of "
        "any parameter from the plain step's after the same steps, relative to that parameter's "
        "largest value.",
        "",
    ]
    for optimizer, result in results.items():
        lines += table(optimizer, result)
    return "\n".join(lines)


def load(file: Path) -> dict[str, Any]:
    """What was measured, by optimizer."""
    known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return known


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=tuple(STEPS), default=tuple(STEPS))
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=METHODS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args(arguments)
    if PLAIN not in options.methods:
        parser.error(f"--methods needs {PLAIN}: the others are compared with it")
    results = {} if options.quick else load(FILE)
    for optimizer in () if options.report else options.only:
        print(optimizer, flush=True)
        rounds = 2 if options.quick else options.rounds
        results[optimizer] = run(
            optimizer, rounds=rounds, quick=options.quick, methods=options.methods
        )
        if not options.quick:
            FILE.write_text(json.dumps(results, indent=1) + "\n")
    text = report(results, machine())
    if not options.quick:
        (RESULTS / "optimizer_step.md").write_text(text)
    print(text)


# ---- one rank of a job: the methods of one optimizer in turn, round by round ---------------------

PLAIN, ZERO, FSDP = "plain", "ZeroRedundancyOptimizer", "FSDP2"
SPLIT, DECIDED = "ours, split", "ours, decides"
METHODS = (PLAIN, ZERO, FSDP, SPLIT, DECIDED)
TIMEOUT = timedelta(seconds=600)


class Trainer:
    """A model, its optimizers, and one whole step.

    A step is backward with the exchange of gradients, and the update.
    """

    def __init__(self, net: nn.Module, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.net, self.model, self.optimizers = net, model, optimizers
        self.adaptive: list[Adaptive] = []
        self.input, self.done = torch.zeros(1), 0

    def backward(self) -> None:
        """New gradients, exchanged."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.net(self.input).backward()

    def step(self) -> tuple[float, float]:
        """Seconds of the whole step and of the update in it."""
        start = time.perf_counter()
        self.backward()
        middle = time.perf_counter()
        for optimizer in self.optimizers:
            optimizer.step()
        end = time.perf_counter()
        self.done += 1
        return end - start, end - middle

    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank."""
        inner = [
            getattr(optimizer, "optim", optimizer) for optimizer in self.optimizers
        ]  # of a ZeroRedundancyOptimizer
        return sum(nbytes(value) for optimizer in inner for value in optimizer.state.values())

    def parameters(self) -> Iterator[Tensor]:
        """Whole parameters, one by one; collective under FSDP2."""
        for parameter in self.model.parameters():
            yield (
                parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()
            )


def nbytes(value: Any) -> int:
    """Bytes of the tensors in `value`, this rank's part of sharded ones."""
    if isinstance(value, Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        return local.nbytes
    if isinstance(value, dict):
        return sum(map(nbytes, value.values()))
    return sum(map(nbytes, value)) if isinstance(value, list | tuple) else 0


def plain(shapes: Shapes, chosen: Sequence[Part]) -> Trainer:
    model = Model(shapes, rank=dist.get_rank())
    net = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Trainer(net, model, [part.make(model) for part in chosen])


def zero(shapes: Shapes, chosen: Sequence[Part]) -> Trainer:
    model = Model(shapes, rank=dist.get_rank())
    net = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizers = [
        ZeroRedundancyOptimizer(
            part.parameters(model),
            part.optimizer_class,
            parameters_as_bucket_view=True,
            **part.options,
        )
        for part in chosen
    ]
    return Trainer(net, model, optimizers)


def fsdp(shapes: Shapes, chosen: Sequence[Part]) -> Trainer:
    """Parameters stay whole from forward to backward, so that they are gathered once a step."""
    model = Model(shapes, rank=dist.get_rank())
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    return Trainer(model, model, [part.make(model) for part in chosen])


def split(shapes: Shapes, chosen: Sequence[Part], *, always: bool = True) -> Trainer:
    trainer = plain(shapes, chosen)
    trainer.adaptive = [Adaptive(optimizer, always=always) for optimizer in trainer.optimizers]
    return trainer


MAKERS: dict[str, Callable[[Shapes, Sequence[Part]], Trainer]] = {
    PLAIN: plain,
    ZERO: zero,
    FSDP: fsdp,
    SPLIT: split,
    DECIDED: lambda shapes, chosen: split(shapes, chosen, always=False),
}


def ready(name: str, shapes: Shapes, chosen: Sequence[Part], warmup: int) -> Trainer | str:
    """Return the method after its first steps, or why a peer cannot do these optimizers.

    The answer is the same on all ranks.
    """
    try:
        trainer = MAKERS[name](shapes, chosen)
        while trainer.done < warmup:
            trainer.step()
    except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
        if name not in (ZERO, FSDP):
            raise
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return trainer


def slowest(values: Sequence[float]) -> list[float]:
    """The maximum over ranks of each value."""
    taken = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return [float(value) for value in taken]


def difference(one: Trainer, other: Trainer) -> float:
    """Return the largest difference between any of their parameters.

    It is relative to the largest value of that parameter.
    """
    worst = 0.0
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        worst = max(worst, ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item())
    return slowest([worst])[0]


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Seconds by method and round, state bytes, and errors of methods that cannot do it."""
    chosen = parts(options["optimizer"])
    trainers: dict[str, Trainer] = {}
    errors: dict[str, str] = {}
    for name in options["methods"]:
        result = ready(name, options["shapes"], chosen, options["warmup"])
        if isinstance(result, str):
            errors[name] = result
        else:
            trainers[name] = result
        dist.barrier()
    seconds: dict[str, list[list[float]]] = {name: [] for name in trainers}
    for number in range(options["rounds"]):
        names = list(trainers) if number % 2 == 0 else list(reversed(trainers))
        for name in names:
            seconds[name].append(step_seconds(trainers[name], options["steps"]))
    assert len({trainer.done for trainer in trainers.values()}) == 1
    others = {name: trainer for name, trainer in trainers.items() if name != PLAIN}
    return {
        "seconds": seconds,
        "errors": errors,
        "state_bytes": {
            name: slowest([trainer.state_bytes()])[0] for name, trainer in trainers.items()
        },
        "notes": {
            name: [text for one in trainer.adaptive for text in one.said]
            for name, trainer in trainers.items()
        },
        "difference": {
            name: difference(trainer, trainers[PLAIN]) for name, trainer in others.items()
        },
        "steps": trainers[PLAIN].done,
    }


def step_seconds(trainer: Trainer, steps: int) -> list[float]:
    """Seconds per step and per update of `steps` steps, on the slowest rank."""
    whole = update = 0.0
    for _ in range(steps):
        dist.barrier()
        taken = slowest(trainer.step())
        whole, update = whole + taken[0], update + taken[1]
    return [whole / steps, update / steps]


def _rank(rank: int, ranks: int, store: str, options: dict[str, Any], out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=TIMEOUT
    )
    try:
        result = measure(options)
        if rank == 0:
            Path(out).write_text(json.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def launch(options: dict[str, Any], *, ranks: int, timeout: float) -> dict[str, Any]:
    """Run `measure` on so many ranks.

    Raises RuntimeError when one fails or `timeout` seconds are over.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store, out = str(Path(folder) / "store"), str(Path(folder) / "result.json")
        processes = [
            context.Process(target=_rank, args=(rank, ranks, store, options, out), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + timeout
        try:
            while any(process.is_alive() for process in processes):
                if any(process.exitcode for process in processes) or time.monotonic() > end:
                    raise RuntimeError(
                        f"a rank failed or took too long: {[p.exitcode for p in processes]}"
                    )
                time.sleep(0.1)
        finally:
            for process in processes:
                process.kill()
                process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"a rank failed: {[process.exitcode for process in processes]}")
        result: dict[str, Any] = json.loads(Path(out).read_text())
        assert all(
            math.isfinite(value)
            for rounds in result["seconds"].values()
            for pair in rounds
            for value in pair
        )
        return result


if __name__ == "__main__":
    main()
