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

from lightning_topt import AutoParallelStrategy, LocalSteps, PipelineStrategy, SparseLoCo, TopK
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, PlanError, StagePlan
from lightning_topt.plan.plan_values import PRESETS
from lightning_topt.plugins.plan_options import PipelinePlan
from tests.execution.pipeline.outer_twin import OuterTwin
from tests.plugins.continuous_twin import ChainTwin
from tests.plugins.test_continuous_fits import Net, Points, adamw, factor
from tests.plugins.test_pipeline_fits import cluster
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


# ---- asked for ------------------------------------------------------------------------------


class Plain(Net):
    """Without a metric, which is as large as a block of so small a model."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


def pipelines(rank: int) -> Any:
    found = []
    for options in (
        {"gradient_exchange": {"method": "topk", "density": 0.5}, "schedule": "1f1b"},
        {"local_steps": SparseLoCo(every=2, density=0.5), "schedule": "continuous"},
        {"local_steps": "local_steps", "schedule": "1f1b", "microbatches": 2},
    ):
        module = Plain(adamw)
        strategy = PipelineStrategy(stages=2, cluster=cluster(4), **options)
        trainer = make_trainer(strategy, devices=4, max_steps=6)
        trainer.fit(module, points(96))
        statistics = strategy.exchange_statistics()
        assert strategy.parallel_plan is not None and statistics is not None
        state = {key: value.clone() for key, value in module.state_dict().items()}
        found.append((strategy.parallel_plan, statistics, state))
    return found


def test_a_pipeline_takes_what_rows_exchange() -> None:
    results = on_ranks(pipelines, world_size=4)
    (sent, _, _), (sparse, of_sparse, _), (dense, of_dense, _) = results[0]
    assert isinstance(sent.gradient_exchange, TopK) and sent.local_steps is None
    assert isinstance(sparse.local_steps, SparseLoCo) and sparse.schedule == "continuous"
    assert sparse.local_steps.every == 2 and not sparse.local_steps.hierarchical
    assert dense.local_steps == LocalSteps()
    for plan in (sent, sparse, dense):
        assert (plan.mesh.pipeline_size, plan.mesh.data_parallel_size) == (2, 2)
        assert plan.predicted is not None and plan.predicted.step_seconds > 0
    assert of_sparse.steps == of_dense.steps == 6
    for result in results:
        for (_, _, state), (_, _, first) in zip(result, results[0], strict=True):
            assert all(torch.equal(value, first[key]) for key, value in state.items())


def test_what_rows_cannot_exchange() -> None:
    with pytest.raises(ValueError, match="leave out gradient_exchange or local_steps"):
        PipelineStrategy(stages=2, gradient_exchange="bf16", local_steps="local_steps")
    with pytest.raises(ValueError, match="averages gradients in every step: give it as"):
        PipelineStrategy(stages=2, local_steps="bf16")
    given = PipelinePlan(4, local_steps=DENSE)
    with pytest.raises(
        PlanError, match="one pipeline has all 4 ranks, and 'local_steps' is betwee"
    ):
        given.mesh(4, num_nodes=1)
    asked = {"mesh": {"pipeline": 2, "data": 2}, "local_steps": {"method": "local_steps"}}
    with pytest.raises(PlanError, match=r"say allow_compression=True, or \['local_steps'\]"):
        AutoParallelStrategy(plan=asked)
    strategy = AutoParallelStrategy(plan=asked, allow_compression=True)
    assert isinstance(strategy.request.plan, PipelinePlan)
    assert strategy.request.plan.local_steps == LocalSteps()
