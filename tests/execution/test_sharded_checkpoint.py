"""Checkpoint folders: written in parts by ranks, read under other plans and numbers of ranks."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_topt.execution.attached_optimizer import AttachedOptimizer
from lightning_topt.execution.checkpoint_files import holds_shards
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.sharded_checkpoint import (
    open_sharded,
    read_sharded_checkpoint,
    save_sharded,
)
from lightning_topt.execution.states import TensorChunks
from lightning_topt.optim.parallel_step import install_parallel_step
from lightning_topt.optim.pieces import Share, assign_pieces
from lightning_topt.plan.parallel_plan import ParallelPlan, uniform_plan
from tests.execution.test_mixed_plans import CPU, OPTIMIZERS, Net, data, loss_of, plan_of
from tests.launch import run_on_pool

OPTIMIZER = "foreach SGD and RMSprop"
# every level on both meshes, and every level of loose parameters
LAYOUTS = ("all of them", "one axis", "loose parameters sharded")


def make(plan: ParallelPlan, optimizer: str = OPTIMIZER) -> tuple[Engine, Net, list[Any]]:
    module = Net()
    engine = Engine(plan, module, device=CPU)
    engine.apply()
    optimizers = OPTIMIZERS[optimizer](list(module.parameters()))
    engine.attach_optimizers(optimizers)
    return engine, module, optimizers


def run(engine: Engine, optimizers: list[Any], batch: Tensor, rank: int, world_size: int) -> None:
    engine.run_step([batch.chunk(world_size)[rank]], loss_of)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def write(engine: Engine, path: Path) -> None:
    own = engine.state_dict(full=False)
    save_sharded(path, module=own["module"], optimizers=own["optimizers"], rest={"step": 1})


def read(engine: Engine, path: Path) -> None:
    stored = open_sharded(path)
    engine.load({"module": stored["state_dict"], "optimizers": stored["optimizer_states"]})


def save_each(rank: int, folder: Path) -> Any:
    """One step under every layout, saved; each again under the next layout, and one more step."""
    saved, resumed = {}, {}
    for layout in LAYOUTS:
        torch.manual_seed(rank)
        engine, _, optimizers = make(plan_of(layout))
        run(engine, optimizers, data()[0], rank, 4)
        write(engine, folder / layout)
        if layout == LAYOUTS[0]:  # the second replaces the first
            write(engine, folder / layout)
        saved[layout] = engine.state_dict()
    for layout, before in zip(LAYOUTS, LAYOUTS[1:] + LAYOUTS[:1], strict=True):
        engine, _, optimizers = make(plan_of(layout))
        read(engine, folder / before)
        loaded = copy.deepcopy(engine.state_dict())
        run(engine, optimizers, data()[1], rank, 4)
        resumed[before] = loaded, engine.state_dict()
    return saved, resumed


def on_two_ranks(
    rank: int,
    folder: Path,
    before: str = "all of them",
    levels: tuple[int, ...] = (0, 1, 3),
    optimizer: str = OPTIMIZER,
) -> Any:
    """Read a folder under each level, make one step, and save, also once released."""
    results = {}
    for level in levels:
        plan = uniform_plan(level, data_parallel_size=2, blocks=[*"abc"])
        engine, _, optimizers = make(plan, optimizer)
        read(engine, folder / before)
        loaded = copy.deepcopy(engine.state_dict())
        run(engine, optimizers, data()[1], rank, 2)
        write(engine, folder / f"level {level} after {before}")
        engine.release()
        write(engine, folder / f"level {level} after {before}, released")
        results[level] = loaded, engine.state_dict()
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def saved_and_resumed(folder: Path) -> Any:
    return run_on_pool(save_each, 4, folder)[0]


def assert_equal(actual: Any, expected: Any, **tolerance: float) -> None:
    torch.testing.assert_close(actual["module"], dict(expected["module"]), **tolerance)
    for one, other in zip(actual["optimizers"], expected["optimizers"], strict=True):
        assert one["param_groups"] == other["param_groups"]
        torch.testing.assert_close(one["state"], other["state"], **tolerance)


def continued(before: Any, ranks: int = 4, optimizer: str = OPTIMIZER) -> Any:
    """One process goes on from a whole state."""
    module = Net()
    module.load_state_dict(before["module"])
    optimizers = OPTIMIZERS[optimizer](list(module.parameters()))
    for one, state in zip(optimizers, before["optimizers"], strict=True):
        one.load_state_dict(copy.deepcopy(state))
    torch.stack([module(part) for part in data()[1].chunk(ranks)]).mean().backward()
    for one in optimizers:
        one.step()
    return {"module": module.state_dict(), "optimizers": [one.state_dict() for one in optimizers]}


EXACTLY, CLOSELY = {"rtol": 0.0, "atol": 0.0}, {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_plan_writes_what_the_next_one_reads(
    saved_and_resumed: Any, folder: Path, layout: str
) -> None:
    saved, resumed = saved_and_resumed
    whole = read_sharded_checkpoint(folder / layout)
    assert whole["step"] == 1
    assert_equal(
        {"module": whole["state_dict"], "optimizers": whole["optimizer_states"]},
        saved[layout],
        **EXACTLY,
    )
    loaded, after = resumed[layout]
    assert_equal(loaded, saved[layout], **EXACTLY)
    assert_equal(after, continued(saved[layout]), **CLOSELY)
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith(layout)) == [
        layout
    ]


def test_on_another_number_of_ranks(saved_and_resumed: Any, folder: Path) -> None:
    saved = saved_and_resumed[0]["all of them"]
    for level, (loaded, after) in run_on_pool(on_two_ranks, 2, folder)[0].items():
        assert_equal(loaded, saved, **EXACTLY)
        expected = continued(saved, ranks=2)
        assert_equal(after, expected, **CLOSELY)
        for name in (
            f"level {level} after all of them",
            f"level {level} after all of them, released",
        ):
            whole = read_sharded_checkpoint(folder / name)
            assert_equal(
                {"module": whole["state_dict"], "optimizers": whole["optimizer_states"]},
                expected,
                **CLOSELY,
            )


WHOLE = "Adafactor"


def save_owned(rank: int, folder: Path) -> Any:
    engine, _, optimizers = make(plan_of("all of them"), WHOLE)
    run(engine, optimizers, data()[0], rank, 4)
    write(engine, folder / "owned")
    return engine.state_dict()


def test_states_at_owners_of_parameters(folder: Path) -> None:
    """Saved by four ranks, read by two, full and in shards."""
    saved = run_on_pool(save_owned, 4, folder)[0]
    sizes = [path.stat().st_size for path in (folder / "owned").rglob("*.distcp")]
    assert len(sizes) == 4 and max(sizes) < 0.5 * sum(sizes)
    two = run_on_pool(on_two_ranks, 2, folder, "owned", (1, 3), WHOLE)[0]
    for level, (loaded, after) in two.items():
        assert_equal(loaded, saved, **EXACTLY)
        assert_equal(after, continued(saved, ranks=2, optimizer=WHOLE), **CLOSELY)
        for name in (f"level {level} after owned", f"level {level} after owned, released"):
            whole = read_sharded_checkpoint(folder / name)
            assert_equal(
                {"module": whole["state_dict"], "optimizers": whole["optimizer_states"]},
                after,
                **EXACTLY,
            )


def step_on_rows(rank: int, folder: Path) -> Any:
    """An optimizer whose step is cut into rows, saved by one division and read by another."""
    torch.manual_seed(0)
    module, attached = Net(), []
    for owners in ([0, 1, 2, 3], [2, 0, 3, 1]):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        parameters = [*enumerate(module.parameters())]
        shares = [Share(i, len(p), float(p.numel()), splittable=True) for i, p in parameters]
        pieces = [
            replace(piece, owner=owners[piece.owner])
            for piece in assign_pieces(shares, world_size=4)
        ]
        install = functools.partial(install_parallel_step, pieces=pieces)
        attached.append(AttachedOptimizer(optimizer, replaced={}, split={}, attach=[install]))
    module(data()[0]).backward()
    attached[0].optimizer.step()
    own = attached[0].own_state()
    save_sharded(folder / "rows", module={}, optimizers=[own], rest={})
    stored = open_sharded(folder / "rows")
    attached[1].load(stored["optimizer_states"][0])
    kept = attached[1].own_state()["state"].values()
    held = sum(
        v.local.numel() if isinstance(v, TensorChunks) else v.numel()
        for s in kept
        for v in s.values()
    )
    return [one.full_state() for one in attached], held


def test_rows_of_a_shared_step(folder: Path) -> None:
    results = run_on_pool(step_on_rows, 4, folder)
    saved, loaded = results[0][0]
    torch.testing.assert_close(loaded["state"], saved["state"], rtol=0, atol=0)
    whole = read_sharded_checkpoint(folder / "rows")["optimizer_states"][0]
    torch.testing.assert_close(whole["state"], saved["state"], rtol=0, atol=0)
    assert len(saved["state"]) == len([p for p in Net().parameters() if p.requires_grad])
    total = sum(value.numel() for values in saved["state"].values() for value in values.values())
    assert max(held for _, held in results) < 0.4 * total


def test_other_paths_are_told_apart(folder: Path) -> None:
    torch.save({}, folder / "file.ckpt")
    assert not holds_shards(folder / "file.ckpt") and not holds_shards(folder)
    with pytest.raises(ValueError, match="is not a checkpoint folder"):
        read_sharded_checkpoint(folder)
