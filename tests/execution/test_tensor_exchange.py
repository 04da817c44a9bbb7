"""Gradients of slices travel compressed along data axes: what is equal, held back, and saved."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication import FP16, GradientMethod, TopK
from lightning_topt.communication.topology import Topology
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.sharded_checkpoint import EXCHANGE_AT, open_sharded, save_sharded
from lightning_topt.plan.parallel_plan import uniform_plan
from lightning_topt.techniques.technique import RunOptions
from tests.execution.test_tensor_plans import (
    CPU,
    Net,
    data,
    loss_of,
    one_process,
    optimizer_of,
    plan_of,
    shares,
)
from tests.launch import run_on_pool

TOP_K = TopK(density=0.05, hierarchical=False, exempt=())
NODES = {"one node": (1, 4), "two nodes": (2, 2)}


def engine_of(
    exchange: GradientMethod, layout: str = "beside DDP", nodes: str = "one node"
) -> Engine:
    plan = replace(plan_of(layout), gradient_exchange=exchange)
    options = RunOptions(topology=Topology(*NODES[nodes], dist.get_rank()))
    engine = Engine(plan, Net(), device=CPU, options=options)
    engine.apply()
    engine.attach_optimizers([optimizer_of(engine.module)])
    return engine


def step(engine: Engine, batch: Tensor, rank: int) -> float:
    losses = engine.run_step(shares(batch, engine.plan.mesh, rank), loss_of)
    dist.all_reduce(mean := losses.mean())
    engine.clip_norm(list(engine.module.parameters()), 0.5)
    for optimizer in engine._optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return mean.item() / dist.get_world_size()


EQUAL = {
    "all entries": TopK(density=1.0, hierarchical=False),
    "all entries, from nodes": TopK(density=1.0, hierarchical=True),
    "16 bits": FP16(),
}
CASES = [
    ("all entries, from nodes", "beside ZeRO-1", "two nodes"),
    *((name, "all of them", "one node") for name in ("all entries", "16 bits")),
]


def train(rank: int) -> Any:
    found = {}
    for name, layout, nodes in CASES:
        torch.manual_seed(rank)
        engine = engine_of(EQUAL[name], layout, nodes)
        losses = [step(engine, batch, rank) for batch in data()]
        found[name, layout] = losses, engine.module_state()
        engine.release()
        engine.close()
    return found


def test_an_exchange_of_slices_trains_as_one_process() -> None:
    record, state, _ = one_process()
    for (name, _), (losses, found) in run_on_pool(train, 4)[0].items():
        rough = name == "16 bits"
        assert losses == pytest.approx([loss for loss, _ in record], rel=1e-3 if rough else 1e-5)
        for each, value in state.items():
            torch.testing.assert_close(found[each], value, rtol=1e-4, atol=2e-3 if rough else 1e-6)


def interrupted(rank: int, folder: Path) -> Any:
    """Steps of a lossy exchange, saved after the second in both forms, and what becomes of both."""
    torch.manual_seed(rank)
    engine = engine_of(TOP_K)
    losses = [step(engine, batch, rank) for batch in data()[:2]]
    saved = [copy.deepcopy(engine.state_dict())]
    own, exchange = engine.state_dict(full=False), engine.exchange
    assert exchange is not None
    save_sharded(
        folder,
        module=own["module"],
        optimizers=own["optimizers"],
        exchange=exchange.own_state_dict(),
        rest={},
    )
    losses.append(step(engine, data()[-1], rank))
    whole = {n: p for n, p in engine.module.named_parameters() if engine.slices_of(p) == 1}
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(
        everyone, {name: parameter.tolist() for name, parameter in whole.items()}
    )
    assert all(each == everyone[0] for each in everyone), (
        "parameters that are not split differ between tensor ranks"
    )
    engine.release()
    engine.close()
    dist.broadcast_object_list(saved)
    section, key = EXCHANGE_AT
    stored = open_sharded(folder)
    from_folder = {
        "module": stored["state_dict"],
        "optimizers": stored["optimizer_states"],
        "exchange": stored[section][key],
    }
    again = []
    for state in (saved[0], from_folder, {**saved[0], "exchange": None}):
        engine = engine_of(TOP_K)
        engine.load(state)
        again.append(step(engine, data()[-1], rank))
        last = engine.module_state()
        again.append(float(sum(value.double().abs().sum() for value in last.values())))
        engine.release()
        engine.close()
    return losses, again, saved[0]


def under_ddp(rank: int, state: Any) -> Any:
    plan = replace(uniform_plan(0, data_parallel_size=2), gradient_exchange=TOP_K)
    engine = Engine(plan, Net(), device=CPU)
    engine.apply()
    engine.attach_optimizers([optimizer_of(engine.module)])
    engine.load(state)
    return engine.exchange.state_dict()


def test_what_is_held_back_is_saved_of_whole_parameters(tmp_path: Path) -> None:
    losses, again, saved = run_on_pool(interrupted, 4, tmp_path)[0]
    assert again[0] == losses[2] and again[:2] == again[2:4]
    assert again[5] != again[1], "what was held back changes the step"
    ranks = saved["exchange"]["ranks"]
    assert len(ranks) == 2  # one for each rank along the data axis
    sizes = {name: value.numel() for name, value in saved["module"].items()}
    split = {name for name, value in ranks[0]["residual"].items() if value.any()}
    assert {"blocks.0.up.weight", "blocks.0.qkv.weight", "head.weight"} <= split
    assert all(
        value.numel() == sizes[name] for one in ranks for name, value in one["residual"].items()
    )
    elsewhere = run_on_pool(under_ddp, 2, saved)[0]
    for own, other in zip(ranks, elsewhere["ranks"], strict=True):
        assert all(torch.equal(own["residual"][name], other["residual"][name]) for name in split)
