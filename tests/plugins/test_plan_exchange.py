"""Plans with a gradient exchange on gloo ranks: against ``ddp``, chosen, resumed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist

from lightning_topt import AutoParallelStrategy
from lightning_topt.communication import Dense, GradientMethod, TopK
from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan
from tests.plugins.trainer_ranks import RecordingGPT, loader, make_trainer, on_ranks, state_of

DEVICE = Device("one core", 2**33, {"float32": 5e10}, 1e10, 2e-6)
SLOW = Cluster("0.1 Gb/s", DEVICE, 1, 2, Link(1e-4, 12.5e6), Link(1e-4, 12.5e6), backend="gloo")
SLOWEST = replace(SLOW, name="8 Mb/s", intra=Link(1e-4, 1e6), inter=Link(1e-4, 1e6))
FAST = replace(SLOW, name="fast", intra=Link(1e-9, 1e12), inter=Link(1e-9, 1e12))
BLOCKS = (("blocks.0", 1), ("blocks.1", 0), ("", 1))


def plan_with(exchange: GradientMethod | None, *, ranks: int = 2) -> ParallelPlan:
    """ZeRO 0 and 1, one block recomputed."""
    blocks = (
        BlockPlan(name, OpConfig.zero(stage, recompute=name == "blocks.1"))
        for name, stage in BLOCKS
    )
    return ParallelPlan.of_blocks(blocks, mesh=ranks, gradient_exchange=exchange)


def fit(
    plan: ParallelPlan | str | None,
    *,
    allow: Any = "compression",
    module: L.LightningModule | None = None,
    **kwargs: Any,
) -> tuple[L.Trainer, L.LightningModule]:
    torch.manual_seed(0)
    module = module or RecordingGPT()
    options = {"allow": allow, "cluster": kwargs.pop("cluster", SLOW)}
    options |= {"objective": kwargs.pop("objective")} if "objective" in kwargs else {}
    strategy = AutoParallelStrategy(plan=plan, **options)
    nodes, checkpoint = kwargs.get("num_nodes", 1), kwargs.pop("ckpt_path", None)
    local, rank = dist.get_world_size() // nodes, dist.get_rank()
    os.environ.update(
        LOCAL_RANK=str(rank % local), LOCAL_WORLD_SIZE=str(local), GROUP_RANK=str(rank // local)
    )
    trainer = make_trainer(strategy, devices=local, **{"max_steps": 6, **kwargs})
    trainer.fit(
        module, loader(4, length=32 if "max_epochs" in kwargs else 64), ckpt_path=checkpoint
    )
    return trainer, module


def losses(rank: int, plan: ParallelPlan, kwargs: dict[str, Any]) -> Any:
    _, dense = fit("ddp")
    trainer, module = fit(plan, **kwargs)
    statistics = trainer.strategy.exchange_statistics()
    return dense.losses, module.losses, state_of(dense), state_of(module), statistics


@pytest.mark.parametrize(
    ("exchange", "ranks", "nodes"),
    [
        (TopK(density=1.0, hierarchical=False), 2, 1),
        (TopK(density=1.0, hierarchical=True), 4, 2),
        (Dense(hierarchical=True), 4, 2),
    ],
)
def test_a_plan_that_sends_everything_equals_ddp(
    exchange: GradientMethod, ranks: int, nodes: int
) -> None:
    plan = plan_with(exchange, ranks=ranks)
    results = on_ranks(
        losses, plan, {"num_nodes": nodes, "allow": {"compression": "topk"}}, world_size=ranks
    )
    for dense, ours, expected, actual, statistics in results:
        assert len(ours) >= 4 and ours == pytest.approx(dense, rel=1e-5)
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=2e-5)
            assert torch.equal(actual[name], results[0][3][name])
        # the monitor has reported two
        assert statistics.steps == len(ours) - 2 and statistics.bytes_sent > 0


# ---- planning ------------------------------------------------------------------------------------


def planned(rank: int, allow: Any, cluster: Cluster) -> Any:
    trainer, module = fit(
        None, allow=allow, cluster=cluster, max_steps=3, module=RecordingGPT(width=64)
    )
    plan, planning = trainer.strategy.parallel_plan, trainer.strategy.planning
    searched = {p.plan.gradient_exchange for p in planning.frontier.points} if planning else None
    monitored = {
        name: float(value)
        for name, value in trainer.logged_metrics.items()
        if name.startswith("topt/exchange_")
    }
    return plan, plan.reason, searched, module.losses, monitored


def planned_otherwise(rank: int) -> list[Any]:
    return [planned(rank, allow, cluster) for allow, cluster in (([], SLOW), ("compression", FAST))]


def test_a_slow_network_is_answered_by_compression_where_allowed() -> None:
    (plan, reason, searched, losses, metrics), (other, *_) = on_ranks(
        planned, {"compression": "topk"}, SLOW
    )
    assert plan.gradient_exchange == TopK(hierarchical=False) and other == plan, reason
    assert "gradients are sent compressed (top-k 1 %), which was allowed" in reason
    assert None in searched  # exact plans stay: they need less memory
    assert (
        len(losses) == 3
        and metrics["topt/exchange_bytes_per_step"] < metrics["topt/exchange_dense_bytes_per_step"]
    )


def test_never_unasked_and_never_where_it_does_not_pay() -> None:
    for plan, reason, searched, _, metrics in on_ranks(planned_otherwise)[0]:
        assert (
            plan.gradient_exchange is None
            and "compressed" not in reason
            and searched == {None}
            and not metrics
        )


# ---- checkpoints ---------------------------------------------------------------------------------

TOPK = plan_with(TopK(density=0.1, hierarchical=False))


def save(rank: int, path: str) -> Any:
    """Two epochs of four steps, and one."""
    _, whole = fit(TOPK, max_steps=-1, max_epochs=2)
    trainer, half = fit(TOPK, max_steps=-1, max_epochs=1)
    trainer.save_checkpoint(path)  # after the fit
    return whole.losses, state_of(whole), half.losses


def resume(rank: int, path: str, plan: ParallelPlan | str) -> Any:
    trainer, module = fit(plan, max_steps=-1, max_epochs=2, ckpt_path=path)
    statistics = trainer.strategy.exchange_statistics()
    return module.losses, state_of(module), statistics


def save_and_resume(rank: int, path: str) -> Any:
    return save(rank, path), [resume(rank, path, plan) for plan in (TOPK, "ddp")]


def test_what_is_held_back_is_saved_and_resumed_also_whole_and_on_more_ranks(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "half.ckpt")
    results = on_ranks(save_and_resume, path)
    whole, final, half = results[0][0]
    held = torch.load(path, weights_only=True)["lightning_topt"]
    assert ParallelPlan.from_dict(held["plan"]) == TOPK
    assert held["gradient_exchange"]["step"] == 4 and len(held["gradient_exchange"]["ranks"]) == 2
    for _, ((losses, parameters, _), (losses_of_ddp, _, no_statistics)) in results:
        assert half + losses == pytest.approx(whole, rel=1e-4)
        for name, value in final.items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-3, atol=1e-4)
        assert len(losses_of_ddp) == 4 and no_statistics is None
    for losses, _, statistics in on_ranks(
        resume, path, replace(TOPK, mesh=data_mesh(4)), world_size=4
    ):
        assert len(losses) == 2 and statistics.residual_norm > 0


# ---- the time to a loss --------------------------------------------------------------------------


class StopEarly(L.Callback):
    """Ends a fit that was planned for more steps."""

    def __init__(self, steps: int = 3) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.steps


def by_loss(rank: int, steps: int) -> Any:
    trainer, _ = fit(
        None,
        allow={"compression": ["bf16"]},
        objective="time_to_loss",
        cluster=SLOWEST,
        max_steps=steps,
        min_steps=3,
        max_epochs=-1,
        callbacks=[StopEarly()],
    )
    plan = trainer.strategy.parallel_plan
    exchange = plan.gradient_exchange
    return exchange and exchange.name, plan.reason


@pytest.mark.parametrize(("steps", "name"), [(1000, "bf16"), (20, None)])
def test_time_to_a_loss_takes_compression_only_where_its_steps_were_measured(
    steps: int, name: str | None
) -> None:
    # a step with 16 bits is far faster here, and the shortest row of the table is of 250 steps
    for chosen, reason in on_ranks(by_loss, steps):
        assert chosen == name, reason
        assert "to the loss" in reason
        assert ("was measured in 250 steps, and this training has 20" in reason) == (name is None)
