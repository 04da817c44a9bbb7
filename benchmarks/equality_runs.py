"""What comparisons of plans with one process share: the state after a step, its differences, ranks
for many cases, rows.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.equality_tables import Refusal, read_rows
from benchmarks.tensor_equality_models import Model
from lightning_topt.graph.mesh_axes import Mesh

Differences = dict[str, tuple[float, float]]  # by quantity: the difference, and what it may be
Cases = Callable[[int, Collection[tuple[str, str]]], Iterator[tuple[str, str, Any]]]


@dataclass(frozen=True)
class Outcome:
    """The state of one step: by name of the parameter."""

    loss: float
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


class _Plan(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def mesh(self) -> Mesh: ...
    def refusal(self, model: Model) -> Refusal | None: ...


P = TypeVar("P", bound=_Plan)
R = TypeVar("R", bound=Outcome)


@dataclass(frozen=True)
class Comparison(Generic[P, R]):
    """Plans and models to be compared, how a plan runs (a collective call; whole on rank 0), and
    how that is compared there.
    """

    plans: Sequence[P]
    models: Mapping[str, Model]
    run_plan: Callable[[int, Model, P], R]
    against_one_process: Callable[[R, Model, P], Differences]
    row: Callable[[P, Sequence[str], Mapping[tuple[str, str], Any]], str]


@dataclass(frozen=True)
class Compared:
    """The rows of a table, why models were refused (by plan and model), and in words how long it
    took, for what.
    """

    rows: list[str]
    refusals: dict[tuple[str, str], Refusal]
    took: str


def read_options(
    description: str | None, *, models: Collection[str], out: Path
) -> argparse.Namespace:
    """Return the options of the command line: `models`, `only`, `out`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=list(models))
    parser.add_argument(
        "--only", nargs="*", help="plans, by what their names contain; other rows of the table stay"
    )
    parser.add_argument("--out", type=Path, default=out)
    return parser.parse_args()


def compare_all(comparison: Comparison[P, R], options: argparse.Namespace) -> Compared:
    """Run all plans, or those of `options`, on groups of their numbers of ranks; other rows are
    those of the table there is.
    """
    torch.set_num_threads(1)
    only, models = options.only, {name: comparison.models[name] for name in options.models}
    plans = [
        plan for plan in comparison.plans if only is None or any(text in plan.name for text in only)
    ]
    start = time.perf_counter()
    found: dict[tuple[str, str], Any] = {}
    for world in sorted({plan.mesh.size for plan in plans}):
        cases = [(plan, name) for name in models for plan in plans if plan.mesh.size == world]
        for plan, name in cases:
            plan.refusal(models[name])  # layouts are found once for all ranks
        found |= run_group(world, partial(compare, comparison=comparison, cases=cases))
    rows = {plan.name: comparison.row(plan, list(models), found) for plan in plans}
    if only is not None and options.out.exists():
        rows = {**read_rows(options.out.read_text(), list(models)), **rows}
    refusals = {
        (plan.name, name): why
        for name, plan in itertools.product(models, comparison.plans)
        if plan.name in rows and (why := plan.refusal(models[name])) is not None
    }
    lines = [rows[plan.name] for plan in comparison.plans if plan.name in rows]
    part = "" if only is None else " for some of the rows"
    return Compared(lines, refusals, f"{(time.perf_counter() - start) / 60:.0f} minutes{part}")


def compare(
    rank: int,
    done: Collection[tuple[str, str]] = (),
    *,
    comparison: Comparison[P, R],
    cases: Sequence[tuple[P, str]],
) -> Iterator[tuple[str, str, Any]]:
    """Yield plan, model and their differences (on rank 0; a text where the plan does not run) of
    `cases`, plans with names of models, but for those that are `done`. A collective call.
    """
    for plan, name in [(plan, name) for plan, name in cases if (plan.name, name) not in done]:
        model = comparison.models[name]
        if (why := plan.refusal(model)) is not None:
            yield plan.name, name, why
            continue
        try:
            found = comparison.run_plan(rank, model, plan)
            compared = comparison.against_one_process(found, model, plan) if rank == 0 else None
        except Exception:
            yield plan.name, name, traceback.format_exc()
            return  # the other ranks may be anywhere
        yield plan.name, name, compared


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """AdamW in two groups. A large eps: a gradient that is zero but for rounding is not to become a
    step.
    """
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-2)


def differences(found: Outcome, expected: Outcome) -> dict[str, float]:
    """Return the largest differences: of the loss relative to it, else relative to the largest
    element of the tensor.

    Gradients that are zero but for rounding (of a key's bias) are compared with a thousandth of the
    largest one.
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
    """Return the largest difference relative to the largest element of its tensor, or to `floor`
    where that is larger.
    """
    return max(
        float((found[name] - value).abs().max() / value.abs().max().clamp(min=floor))
        for name, value in expected.items()
    )


def run_group(world: int, cases: Cases) -> dict[tuple[str, str], Any]:
    """Run ``cases(rank, done)`` on so many forked ranks; what rank 0 yields, and errors of any
    rank, by plan and model.

    After an error ranks start anew; `done` has the plans and models before it, and that with the
    error.
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
        ranks = [
            context.Process(target=_rank, args=(rank, *given), daemon=True) for rank in range(world)
        ]
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


def _rank(
    rank: int, world: int, store: str, cases: Cases, done: Collection[tuple[str, str]], results: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    for plan, model, found in cases(rank, done):
        if rank == 0 or (isinstance(found, str) and not isinstance(found, Refusal)):
            results.put((plan, model, found))
    results.put(None)
    dist.destroy_process_group()
