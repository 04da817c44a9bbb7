"""Ranks that bring a batch each, and run them at once in modules that are split between them, train
as under ddp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from tests.plugins import test_turns as turns
from tests.plugins.split_plans import split_plan
from tests.plugins.test_turns import (
    CLIPPED,
    FAST,
    Case,
    OwnBatches,
    Rich,
    assert_equal,
    cluster,
    results_of,
)
from tests.plugins.trainer_ranks import DDPWithExactMeans, make_trainer, on_ranks, topt_trainer

ROWS = {"inputs": [0], "outputs": [0]}


class OftenAlike(OwnBatches):
    """Batches of the same shapes on all ranks, but for every third one."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for step, batch in enumerate(super().__iter__()):
            if step % 3 != 1:
                generator = torch.Generator().manual_seed(
                    7000 * self.seed + 10 * step + dist.get_rank()
                )
                shape = (2 + step, 6)
                batch["tokens"] = torch.randint(0, 32, shape, generator=generator)
                batch["nested"][0] = torch.randint(0, 32, shape, generator=generator)
            yield batch


def joint_plan(
    data: int, storage: str = "ddp", *, recomputed: tuple[int, ...] = ()
) -> dict[str, Any]:
    """The plan of `split_plan` with its blocks and its embedding as joint modules."""
    modules = [{"module": name, **ROWS} for name in ("tokens", "blocks.0", "blocks.1")]
    return {**split_plan(data, storage, recomputed=recomputed), "joint": modules}


def both(rank: int, case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    found = []
    for topt in (False, True):
        torch.manual_seed(rank)
        module = Rich(case.width, collects=case.given is not None)
        rest = {"max_epochs": 2, "num_sanity_val_steps": 0, **case.trainer}
        make = topt_trainer(case.given, options=case.options, **rest) if topt else None
        trainer = make or make_trainer(DDPWithExactMeans(), devices=case.ranks, **rest)
        found.append(results_of(trainer, module, 10 + rank, OftenAlike))
    return found[0], found[1]


@pytest.mark.parametrize(
    "case",
    [
        Case(2, joint_plan(1, recomputed=(0,)), CLIPPED),
        Case(4, joint_plan(2, "zero1", recomputed=(1,)), {**CLIPPED, "accumulate_grad_batches": 2}),
    ],
)
def test_a_fit_with_joint_modules_is_that_of_ddp(case: Case) -> None:
    for rank, (expected, found) in enumerate(on_ranks(both, case, world_size=case.ranks)):
        assert_equal(expected, found, rank=rank)
        assert case.given is not None and found["plan"]["joint"] == case.given["joint"]


def test_joint_modules_are_found_where_they_are_best() -> None:
    """Without a plan, beside a data axis between nodes."""
    options = {"cluster": cluster(2, 2, FAST), "memory_limit": "345KiB"}
    for rank, (expected, found) in enumerate(
        on_ranks(both, Case(4, None, CLIPPED, options, width=32), world_size=4)
    ):
        assert_equal(expected, found, rank=rank)
        assert found["planned"][1] == "search"
        assert "split on data 2 x tensor 2, 2 joint modules" in found["planned"][0]
        assert [each["module"] for each in found["plan"]["joint"]] == ["blocks.0", "blocks.1"]


def groups_after(rank: int) -> dict[str, list[int]]:
    """Process groups after a fit, evaluations and another fit, beside those before the first."""
    found = {}
    for name, given in (("in turns", turns.plan(1)), ("joint", joint_plan(1))):
        trainer, module, before = topt_trainer(given), Rich(), len(_world.pg_map)
        counts = []
        for run in (trainer.fit, trainer.test, trainer.test, trainer.fit):
            assert trainer.fit_loop.max_epochs is not None
            trainer.fit_loop.max_epochs += run == trainer.fit
            run(module, OftenAlike(2))
            counts.append(len(_world.pg_map) - before)
        found[name] = counts
    return found


def test_the_groups_of_a_plan_end_with_it() -> None:
    for found in on_ranks(groups_after):
        for name, (fit, test, second, last) in found.items():
            assert fit == last > 0 and test == second, (name, found[name])
