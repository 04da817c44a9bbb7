"""One rank of `optimizer_step.py`: the methods of one optimizer in turn, round by round. Started by
`launch`.
"""

from __future__ import annotations

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

from benchmarks.optimizer_models import Model, Part, Shapes, parts
from benchmarks.optimizer_ours import Adaptive, scatter

PLAIN, ZERO, FSDP = "plain", "ZeroRedundancyOptimizer", "FSDP2"
SPLIT, FUSED, DECIDED = "ours, split", "ours, reduce-scatter", "ours, decides"
METHODS = (PLAIN, ZERO, FSDP, SPLIT, FUSED, DECIDED)
TIMEOUT = timedelta(seconds=600)


class Trainer:
    """A model, its optimizers, and one whole step: backward with the exchange of gradients, and the
    update.
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


def fused(shapes: Shapes, chosen: Sequence[Part]) -> Trainer:
    trainer = plain(shapes, chosen)
    scatter(trainer.net, trainer.optimizers, trainer.step)
    return trainer


MAKERS: dict[str, Callable[[Shapes, Sequence[Part]], Trainer]] = {
    PLAIN: plain,
    ZERO: zero,
    FSDP: fsdp,
    SPLIT: split,
    FUSED: fused,
    DECIDED: lambda shapes, chosen: split(shapes, chosen, always=False),
}


def ready(name: str, shapes: Shapes, chosen: Sequence[Part], warmup: int) -> Trainer | str:
    """The method after its first steps, or why a peer cannot do these optimizers (alike on all
    ranks).
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
    """The largest difference between any of their parameters, relative to the largest value of that
    parameter.
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
            seconds[name].append(turn(trainers[name], options["steps"]))
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


def turn(trainer: Trainer, steps: int) -> list[float]:
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
    """Run `measure` on so many ranks. Raises RuntimeError when one fails or `timeout` seconds are
    over.
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
