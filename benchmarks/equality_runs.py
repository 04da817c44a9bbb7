"""What comparisons of plans with one process share: the state after a step, its differences, and ranks for many cases."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.equality_tables import Refusal

Cases = Callable[[int, Collection[tuple[str, str]]], Iterator[tuple[str, str, Any]]]


@dataclass(frozen=True)
class Outcome:
    """The state of one step: by name of the parameter."""

    loss: float
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """AdamW in two groups. A large eps: a gradient that is zero but for rounding is not to become a step."""
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-2)


def differences(found: Outcome, expected: Outcome) -> dict[str, float]:
    """Return the largest differences: of the loss relative to it, else relative to the largest element of the tensor.

    Gradients that are zero but for rounding (of a key's bias) are compared with a thousandth of the largest one.
    """
    sides = set(found.gradients) ^ set(expected.gradients)
    assert not sides, f"gradients on one side only: {', '.join(sorted(sides))}"
    floor = 1e-3 * max(float(value.abs().max()) for value in expected.gradients.values())
    return {
        "loss": abs(found.loss - expected.loss) / abs(expected.loss),
        "gradients": largest(found.gradients, expected.gradients, floor),
        "parameters": largest(found.parameters, expected.parameters, 1e-3),
    }


def largest(found: dict[str, Tensor], expected: dict[str, Tensor], floor: float) -> float:
    """Return the largest difference relative to the largest element of its tensor, or to `floor` where that is larger."""
    return max(
        float((found[name] - value).abs().max() / value.abs().max().clamp(min=floor))
        for name, value in expected.items()
    )


def run_group(world: int, cases: Cases) -> dict[tuple[str, str], Any]:
    """Run ``cases(rank, done)`` on so many forked ranks; what rank 0 yields, and errors of any rank, by plan and model.

    After an error ranks start anew; `done` has the plans and models before it, and that with the error.
    """
    found: dict[tuple[str, str], Any] = {}
    while _run_ranks(world, cases, found):
        pass
    return found


def _run_ranks(world: int, cases: Cases, found: dict[tuple[str, str], Any]) -> bool:
    """Add to `found`; whether there was an error, after which cases may be left."""
    context = multiprocessing.get_context("fork")
    results: Any = context.SimpleQueue()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        given = world, f"{folder}/store", cases, frozenset(found), results
        ranks = [context.Process(target=_rank, args=(rank, *given), daemon=True) for rank in range(world)]
        for process in ranks:
            process.start()
        left = world
        while left and not failed:
            if (item := results.get()) is None:
                left -= 1
                continue
            plan, model, value = item
            found[plan, model] = value
            failed = isinstance(value, str) and not isinstance(value, Refusal)
            print(f"{world} ranks, {plan}, {model}: {value}", flush=True)
        for process in ranks:
            if failed:
                process.kill()
            process.join()
    return failed


def _rank(rank: int, world: int, store: str, cases: Cases, done: Collection[tuple[str, str]], results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    for plan, model, found in cases(rank, done):
        if rank == 0 or (isinstance(found, str) and not isinstance(found, Refusal)):
            results.put((plan, model, found))
    results.put(None)
    dist.destroy_process_group()
