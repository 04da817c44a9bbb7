"""States of a run with stages go on, whole or in a folder, under any plan and in one process."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _world

from lightning_topt.execution.engine import Engine
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.execution.pipeline.stage_layout import PipelineGroups
from lightning_topt.execution.sharded_checkpoint import (
    open_sharded,
    read_sharded_checkpoint,
    save_sharded,
)
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError, uniform_plan
from tests.execution.pipeline.stage_models import logits_of, loss_of, make, plan_of, tokens
from tests.launch import run_on_pool

CPU = torch.device("cpu")
PLANS: dict[str, ParallelPlan] = {
    "1f1b, data 2, zero1": plan_of(2, "1f1b", data=2, storage="zero1"),
    "zbv, data 2": plan_of(2, "zbv", stages=4, data=2, data_first=True),
    "1f1b, tensor 2": plan_of(2, "1f1b", tensor=2),
    "zero3": uniform_plan(3, data_parallel_size=4, blocks=["blocks.0", "blocks.1"]),
}

FROM_FOLDER = ("zbv, data 2", "1f1b, tensor 2", "zero3")


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """The first has parameters of the first stage alone: other ranks step it without any."""
    first = [parameter for name, parameter in model.named_parameters() if name == "positions"]
    rest = [parameter for name, parameter in model.named_parameters() if name != "positions"]
    return [
        torch.optim.SGD(first, lr=0.1, momentum=0.9),
        torch.optim.AdamW(rest, lr=1e-2, fused=True),
    ]


def started(plan: ParallelPlan) -> tuple[Engine, nn.Module, list[torch.optim.Optimizer]]:
    model = make("tied")
    engine = Engine(plan, model, device=CPU)
    example = Example(loss_of, tokens(1)[0][:2]) if plan.schedule else None
    engine.apply(example=example)
    optimizers = optimizers_of(model)
    engine.attach_optimizers(optimizers)
    return engine, model, optimizers


def step(engine: Engine, optimizers: list[torch.optim.Optimizer], batch: Tensor, rank: int) -> None:
    part = batch.chunk(engine.plan.data_parallel_size)[engine.plan.mesh.data_rank(rank)]
    engine.run_step(part.split(2), loss_of)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def save_each(rank: int, folder: Path) -> Any:
    """The whole state after a step; after a second one, under each plan, saved in folders too;
    after a third one from the first of these.
    """
    batches = tokens(3)
    engine, _, optimizers = started(PLANS["zbv, data 2"])
    step(engine, optimizers, batches[0], rank)
    whole = copy.deepcopy(engine.state_dict())
    engine.release()
    everywhere, resumed, from_folder = shared(whole if rank == 0 else None), {}, {}
    for name, plan in PLANS.items():
        engine, _, optimizers = started(plan)
        engine.load(copy.deepcopy(everywhere))
        step(engine, optimizers, batches[1], rank)
        own = engine.state_dict(full=False)
        save_sharded(folder / name, module=own["module"], optimizers=own["optimizers"], rest={})
        last = resumed[name] = copy.deepcopy(engine.state_dict())
        if name in FROM_FOLDER:
            engine.load(stored(folder / "1f1b, data 2, zero1"))
            step(engine, optimizers, batches[2], rank)
            last = from_folder[name] = copy.deepcopy(engine.state_dict())
        engine.release()
        if plan.schedule:
            again = engine.state_dict()
            assert rank or str(again["optimizers"]) == str(last["optimizers"])
    return whole, resumed, from_folder


def shared(value: Any) -> Any:
    values = [value]
    torch.distributed.broadcast_object_list(values, 0)
    return values[0]


def stored(path: Path) -> Any:
    read = open_sharded(path)
    return {"module": read["state_dict"], "optimizers": read["optimizer_states"]}


def alone() -> list[Any]:
    """States after each of three steps."""
    model = make("tied")
    optimizers, found = optimizers_of(model), []
    for batch in tokens(3):
        loss_of(model, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state = {"module": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
        found.append(copy.deepcopy(state))
    return found


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(
        dict(actual["module"]), dict(expected["module"]), rtol=1e-4, atol=1e-5
    )
    for one, other in zip(actual["optimizers"], expected["optimizers"], strict=True):
        assert one["param_groups"] == other["param_groups"]
        torch.testing.assert_close(one["state"], other["state"], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(scope="module")
def states(folder: Path) -> Any:
    return run_on_pool(save_each, 4, folder)[0]


@pytest.mark.parametrize("name", PLANS)
def test_states_go_on_under_any_plan(name: str, states: Any) -> None:
    first, second, third = alone()
    saved, resumed, from_folder = states
    close(saved, first)
    close(resumed[name], second)
    if name in FROM_FOLDER:
        close(from_folder[name], third)
    model = make("tied", seed=1)
    model.load_state_dict(resumed[name]["module"])
    for optimizer, state in zip(optimizers_of(model), resumed[name]["optimizers"], strict=True):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("name", [name for name, plan in PLANS.items() if plan.schedule])
def test_folders_are_plain_files_in_parts(name: str, states: Any, folder: Path) -> None:
    read = read_sharded_checkpoint(folder / name)
    close({"module": read["state_dict"], "optimizers": read["optimizer_states"]}, alone()[1])


def mistakes(rank: int) -> list[str]:
    said = []
    engine, _, _ = started(plan_of(2, "1f1b"))
    state = make("tied").state_dict()
    for wrong in (
        {**state, "more": torch.ones(1)},
        {k: v for k, v in state.items() if k != "head.weight"},
    ):
        with pytest.raises(RuntimeError) as error:
            engine.load_module_state(wrong)
        said.append(str(error.value))
        engine.load_module_state(wrong, strict=False)
    with pytest.raises(ValueError, match="weights are one for each") as wrong_weights:
        engine.run_step(tokens(1)[0].split(2), loss_of, weights=[1.0])
    said.append(str(wrong_weights.value))
    results = engine.evaluate(
        tokens(1)[0], lambda model, batch: {"logits": logits_of(model, batch), "name": ["x", 3]}
    )
    assert results["logits"].shape == (8, 5, 11) and results["name"] == ["x", 3]
    assert not results["logits"].requires_grad
    groups = len(_world.pg_map)
    for bad in (plan_of(2, "2f2b"), plan_of(2, "1f1b", stages=4), renamed(plan_of(2, "1f1b"))):
        with ExitStack() as stack, pytest.raises(PlanError) as refused:
            engine = Engine(bad, make("tied"), device=CPU)
            stack.callback(engine.close)
            engine.apply(example=Example(loss_of, tokens(1)[0][:2]))
        said.append(str(refused.value))
    check_groups(rank)
    assert len(_world.pg_map) == groups, "groups that are left"
    check_statistics()
    with pytest.raises(PlanError, match="needs an example"):
        Engine(plan_of(2, "1f1b"), make("tied"), device=CPU).apply()
    return said


def check_groups(rank: int) -> None:
    """Groups end where one rank has failed."""
    groups = PipelineGroups(plan_of(2, "1f1b").mesh)
    if rank == 0:
        groups.abort()
    groups.destroy()
    groups.close()


def check_statistics() -> None:
    """Ranks of other stages do not run a module whose statistics are those of all ranks."""
    model = make("tied")
    model.blocks[1].append(nn.SyncBatchNorm(5).eval())  # on a CPU it does not train
    model.eval()
    engine = Engine(plan_of(2, "1f1b"), model, device=CPU)
    engine.apply(example=Example(logits_of, tokens(1)[0][:2]))
    (synchronized,) = (module for module in model.modules() if isinstance(module, nn.SyncBatchNorm))
    assert torch.distributed.get_world_size(synchronized.process_group) == 1
    engine.release()
    engine.close()
    assert synchronized.process_group is None


def renamed(plan: ParallelPlan) -> ParallelPlan:
    return ParallelPlan.from_yaml(plan.to_yaml().replace("blocks.3", "blocks"))


def test_what_is_wrong_is_said() -> None:
    ranks = run_on_pool(mistakes, 2)
    assert ranks[0] == ranks[1]
    unexpected, missing, weights, unknown, sizes, never_called = ranks[0]
    assert "Unexpected key" in unexpected and "Missing key" in missing and "head.weight" in missing
    assert weights == "weights are one for each of the 4 microbatches, got 1"
    assert "2f2b" in unknown and "runs 1 stage on each rank, got 2" in sizes
    assert "blocks" in never_called
