"""Rows of pipelines that train alone under a Trainer: against one process for each, and files."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_topt import AutoParallelStrategy, LocalSteps
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, StagePlan
from lightning_topt.plan.plan_values import PRESETS
from tests.execution.pipeline.outer_twin import OuterTwin
from tests.plugins.continuous_twin import ChainTwin
from tests.plugins.test_continuous_fits import Net, Points, adamw, factor
from tests.plugins.trainer_ranks import make_trainer, on_ranks

FEEDBACK = {"rule": "two_versions", "error_feedback": True}
SPARSE = LocalSteps(
    every=3, density=0.3, residual_decay=0.9, outer_momentum=0.0, outer_learning_rate=1.0
)
DENSE = LocalSteps(every=4)


def plain_sgd(named: Any) -> torch.optim.Optimizer:
    """Has no state, which would be each row's own."""
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def plan_of(method: LocalSteps, *, schedule: str = "continuous", **more: Any) -> ParallelPlan:
    mesh = Mesh((Axis("pipeline", 2), Axis("data", 2)))
    config = OpConfig(PRESETS["ddp"].storage(mesh))
    names = [["", *(f"layers.{n}" for n in range(3))], ["layers.3", "layers.4", "head"]]
    stages = [StagePlan(tuple(BlockPlan(name, config) for name in each)) for each in names]
    plan = ParallelPlan(mesh, tuple(stages), schedule=schedule, **more)
    return replace(plan, local_steps=method)


# each with the batches before which the pipeline is drained, and those before which rows meet
FITS: dict[str, tuple[Any, dict[str, Any], Callable[..., Any], list[int], list[int]]] = {
    "validated": (
        plan_of(SPARSE, prediction=FEEDBACK),
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3},
        adamw,
        [6, 10, 16],
        [6, 10, 16],
    ),
    "not validated": (
        plan_of(DENSE, prediction="spectrain"),
        {"limit_val_batches": 0},
        adamw,
        [4, 8, 10, 12, 16],
        [4, 8, 12, 16],
    ),
}


def points(length: int) -> DataLoader[Any]:
    return DataLoader(Points(length), batch_size=4, shuffle=False)


def fit(
    plan: ParallelPlan, trainer: dict[str, Any], make: Any, *, form: str = "full", **kwargs: Any
) -> tuple[Any, Net]:
    module = Net(make)
    changes: dict[str, Any] = {"allow_compression": True}
    changes |= {"allow_staleness": True} if plan.in_flight else {}
    strategy = AutoParallelStrategy(plan=plan, checkpoint=form, **changes)
    options = {"devices": 4, "max_epochs": 2, **trainer}
    made = make_trainer(strategy, **options)
    made.fit(module, points(80), points(16), **kwargs)
    return made, module


def run(rank: int, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        plan, trainer, make, _, _ = FITS[name]
        trainer, module = fit(plan, trainer, make)
        found[name] = {
            "state": {key: value.clone() for key, value in module.state_dict().items()},
            "batches": module.batches,
            "outputs": [(loss, index) for loss, index in module.outputs if index >= 0],
            "statistics": trainer.strategy.exchange_statistics(),
        }
    return found


def test_rows_train_alone_and_meet_where_the_loop_drains_them() -> None:
    results = on_ranks(run, [*FITS], world_size=4)
    for name, (plan, trainer, make, ends, meetings) in FITS.items():
        of_ranks = [result[name] for result in results]
        firsts = [plan.mesh.data_rank(rank) for rank in range(4)]
        accumulate = trainer.get("accumulate_grad_batches", 1)
        rows = [
            ChainTwin(
                Net(make),
                plan,
                of_ranks[firsts.index(row)]["batches"],
                optimizer=make,
                ends=ends,
                epoch=10,
                accumulate=accumulate,
                clip=trainer.get("gradient_clip_val"),
                factor=factor,
            )
            for row in range(2)
        ]
        assert not torch.equal(rows[0].batches[0][0], rows[1].batches[0][0])
        method = plan.local_steps
        assert isinstance(method, LocalSteps)
        outer = [
            OuterTwin(method, [[p for _, p in row.parameters[stage]] for row in rows])
            for stage in range(2)
        ]
        for start, stop in itertools.pairwise([0, *ends, 20]):
            for row in rows:
                row.segment(start, stop, row.completes)
            if stop in (*meetings, 20):
                for each in outer:
                    each.meet()
        for rank, found in enumerate(of_ranks):
            row = rows[firsts[rank]]
            for key, value in row.state.items():
                torch.testing.assert_close(
                    found["state"][key], value, rtol=1e-4, atol=1e-5, msg=f"{name} {key}"
                )
                assert torch.equal(found["state"][key], of_ranks[0]["state"][key])
            assert found["statistics"].steps == 20 // accumulate
            assert 0 < found["statistics"].bytes_sent < found["statistics"].dense_bytes


# ---- files -----------------------------------------------------------------------------------


def resume(rank: int, plan: ParallelPlan, form: str, path: str) -> Any:
    """Two epochs; one that is saved, and one that goes on from there."""
    _, whole = fit(plan, {}, plain_sgd, form=form)
    trainer, _ = fit(plan, {"max_epochs": 1}, plain_sgd, form=form)
    trainer.save_checkpoint(path)
    _, resumed = fit(plan, {}, plain_sgd, form=form, ckpt_path=path)
    return [
        {key: value.clone() for key, value in module.state_dict().items()}
        for module in (whole, resumed)
    ]


@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("schedule", ["continuous", "1f1b"])
def test_files_have_what_rows_keep(schedule: str, form: str, tmp_path: Path) -> None:
    more = {"prediction": "stash"} if schedule == "continuous" else {"num_microbatches": 2}
    plan = plan_of(SPARSE, schedule=schedule, **more)
    results = on_ranks(resume, plan, form, str(tmp_path / "half.ckpt"), world_size=4)
    for whole, resumed in results:
        for key, value in results[0][0].items():
            torch.testing.assert_close(whole[key], value, rtol=0, atol=0)
            torch.testing.assert_close(resumed[key], value, rtol=0, atol=0)
