"""Plans with tensor axes, alone and beside all data parallelism, against one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _world
from torch.distributed.tensor import DTensor

from lightning_topt.execution.engine import Engine
from lightning_topt.execution.sharded_checkpoint import (
    open_sharded,
    read_sharded_checkpoint,
    save_sharded,
)
from lightning_topt.execution.states import TensorChunks
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import OpConfig, Placement, Replicate, Shard
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, uniform_plan
from lightning_topt.plan.plan_values import PRESETS
from lightning_topt.techniques.tensor_parallel.layout import layout_of
from tests.launch import run_on_pool
from tests.models import GPT, MEGATRON_BLOCK

STEPS, BATCH, MICROBATCHES = 2, 8, 2
CPU = torch.device("cpu")
TENSOR = Mesh((Axis("tensor", 4),))
BESIDE_DATA = Mesh((Axis("data", 2), Axis("tensor", 2)))
OF_REST = {"tokens.weight": Shard(0), "positions.weight": Shard(1), "head.weight": Shard(0)}
CUBE = Mesh(
    (Axis("data", 1), Axis("tensor_tokens", 2), Axis("tensor_rows", 2), Axis("tensor_columns", 1))
)
GATHERED = Mesh(
    (Axis("data", 2), Axis("tensor_tokens", 2), Axis("tensor_rows", 1), Axis("tensor_columns", 1))
)
# What runs the blocks 0, 1 and the rest; "+" recomputes.
LAYOUTS: dict[str, tuple[Mesh, str, str, str]] = {
    "tensor axis alone": (TENSOR, "ddp", "ddp+", "ddp"),
    "beside DDP": (BESIDE_DATA, "ddp+", "ddp", "ddp"),
    "beside ZeRO-1": (BESIDE_DATA, "zero1", "ddp", "zero1"),
    "all of them": (BESIDE_DATA, "zero1+", "zero3", "ddp"),
    "cube": (CUBE, "ddp", "ddp+", "ddp"),
    "cube beside all of them": (GATHERED, "zero1+", "zero3+", "zero3"),
}
MIXED = "all of them"
# every placement of parameters and owner of states; the other layouts keep them as these do
IN_FOLDERS = (MIXED, "cube beside all of them")
# tests/execution/test_tensor_exchange.py runs what is beside DDP and ZeRO-1
TRAINED = ("tensor axis alone", MIXED, "cube", "cube beside all of them")


class Net(GPT):
    def __init__(self) -> None:
        super().__init__(layers=2, width=16, heads=4)

    def forward(self, batch: Tensor) -> Tensor:
        logits = super().forward(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def placed(names: dict[str, Shard], mesh: Mesh) -> tuple[tuple[str, tuple[Placement, ...]], ...]:
    data = (Replicate(),) * len(mesh.data_axes)
    return tuple((name, (*data, shard)) for name, shard in names.items())


def in_cube(names: dict[str, Shard], mesh: Mesh) -> tuple[tuple[str, tuple[Placement, ...]], ...]:
    """Slices of matrices along the first tensor axis, of what the other two leave of them."""
    found = []
    for name, shard in names.items():
        other = Replicate() if "bias" in name or "positions" in name else Shard(1 - shard.dim)
        parts = shard.parts * mesh.shape[2] if shard.dim == 0 else mesh.shape[3]
        slices = Replicate() if isinstance(other, Replicate) else Shard(0, parts)
        found.append((name, (Replicate(), slices, shard, other)))
    return tuple(found)


def plan_of(layout: str) -> ParallelPlan:
    mesh, *presets = LAYOUTS[layout]
    if layout.startswith("cube"):
        border = (Replicate(), Shard(0), Shard(0), Shard(2))
        common = {
            "sums": (Replicate(), Shard(0), Shard(0), Shard(0)),
            "gathers": ("tensor_tokens",),
        }
        blocks = [
            BlockPlan(
                name,
                OpConfig(
                    PRESETS[preset.rstrip("+")].storage(mesh),
                    recompute=preset.endswith("+"),
                    inputs=(border,) if name else (),
                    outputs=(border,) if name else (),
                    parameters=in_cube(MEGATRON_BLOCK if name else OF_REST, mesh),
                    **common,
                ),
            )
            for name, preset in zip(("blocks.0", "blocks.1", ""), presets, strict=True)
        ]
        return ParallelPlan.of_blocks(blocks, mesh=mesh)
    blocks = [
        BlockPlan(
            name,
            OpConfig(
                PRESETS[preset.rstrip("+")].storage(mesh),
                recompute=preset.endswith("+"),
                parameters=placed(MEGATRON_BLOCK if name else OF_REST, mesh),
            ),
        )
        for name, preset in zip(("blocks.0", "blocks.1", ""), presets, strict=True)
    ]
    return ParallelPlan.of_blocks(blocks, mesh=mesh)


def data() -> Tensor:
    return torch.randint(0, 32, (STEPS, BATCH, 9), generator=torch.Generator().manual_seed(3))


def shares(batch: Tensor, mesh: Mesh, rank: int) -> list[Tensor]:
    """The microbatches of a rank: equal along tensor axes."""
    return list(
        batch.chunk(mesh.data_parallel_size)[rank // mesh.ranks_along(mesh.tensor_axes)].chunk(
            MICROBATCHES
        )
    )


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens)
    return loss


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    # The gradient of a key's bias is zero but for rounding: a large eps keeps Adam from making
    # steps of it.
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3, fused=True)


@cache
def one_process() -> Any:
    torch.manual_seed(0)
    module = Net()
    optimizer = optimizer_of(module)
    record = []
    for batch in data():
        loss = module(batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        record.append((loss.item(), float(norm)))
        optimizer.step()
        optimizer.zero_grad()
    return record, module.state_dict(), optimizer.state_dict()


def train(rank: int, layout: str) -> Any:
    torch.manual_seed(rank)  # rank 0's weights must win, as under DDP
    module = Net()
    originals, groups = dict(module.named_parameters()), len(_world.pg_map)
    plan = ParallelPlan.from_yaml(plan_of(layout).to_yaml())
    engine = Engine(plan, module, device=CPU)
    engine.apply()
    optimizer = optimizer_of(module)
    engine.attach_optimizers([optimizer])
    elements = sum(
        (p.to_local() if isinstance(p, DTensor) else p).numel() for p in module.parameters()
    )
    record = []
    for batch in data():
        losses = engine.run_step(shares(batch, plan.mesh, rank), loss_of)
        dist.all_reduce(mean := losses.mean())
        norm = engine.clip_norm(list(module.parameters()), 0.5)
        record.append((mean.item() / dist.get_world_size(), float(norm)))
        optimizer.step()
        optimizer.zero_grad()
    state = engine.state_dict()
    again = resumed(plan, state) if layout == MIXED else state
    outside = None
    # FSDP2's modules are called by their root
    if not any(isinstance(p, DTensor) for p in module.parameters()):
        with torch.no_grad():
            outside = module(data()[0]).item()
    engine.release()
    assert all(p is originals[n] and layout_of(p) is None for n, p in module.named_parameters())
    assert not any(m._forward_pre_hooks or "forward" in vars(m) for m in module.modules())
    loss = module(data()[0])  # a plain module again: runs without any peer
    loss.backward()
    assert outside is None or outside == pytest.approx(loss.item(), rel=1e-5)
    after = engine.optimizer_state(optimizer)
    engine.close()
    assert len(_world.pg_map) == groups, "groups that are left"
    return (
        record,
        state,
        {name: value.clone() for name, value in module.state_dict().items()},
        after,
        elements,
        again,
    )


def resumed(plan: ParallelPlan, state: Any) -> Any:
    """The whole states of an engine that loaded `state`."""
    states = [state]
    dist.broadcast_object_list(states)
    module = Net()
    engine = Engine(plan, module, device=CPU)
    engine.apply()
    optimizer = optimizer_of(module)
    engine.attach_optimizers([optimizer])
    engine.load(states[0])
    found = engine.state_dict()
    engine.release()
    engine.close()
    return found


def same_states(found: Any, expected: Any, *, exactly: bool = False) -> None:
    assert found["param_groups"][0]["params"] == expected["param_groups"][0]["params"]
    assert set(found["state"]) == set(expected["state"])
    for index, values in expected["state"].items():
        for key, value in values.items():
            other = found["state"][index][key]
            if exactly:
                assert torch.equal(other, value)
            else:
                torch.testing.assert_close(other, value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layout", TRAINED)
def test_a_plan_trains_as_one_process(layout: str) -> None:
    expected, module_state, optimizer_state = one_process()
    results = run_on_pool(train, 4, layout)
    for record, _, module, _, _, _ in results:
        torch.testing.assert_close(
            torch.tensor(record), torch.tensor(expected), rtol=1e-5, atol=1e-6
        )
        for name, value in module_state.items():
            torch.testing.assert_close(module[name], value, rtol=1e-4, atol=1e-6)
    if layout == "tensor axis alone":  # ranks hold their slices only
        whole = {name: p.numel() for name, p in Net().named_parameters()}
        split = sum(
            count for name, count in whole.items() if name.endswith((*MEGATRON_BLOCK, *OF_REST))
        )
        assert {elements for *_, elements, _ in results} == {
            sum(whole.values()) - split + split // 4
        }
    _, state, module, after, _, again = results[0]
    assert all(torch.equal(state["module"][name], value) for name, value in module.items())
    same_states(state["optimizers"][0], optimizer_state)
    same_states(after, state["optimizers"][0], exactly=True)
    same_states(again["optimizers"][0], state["optimizers"][0], exactly=True)
    assert all(torch.equal(again["module"][name], value) for name, value in module.items())


# ---- folders of shards ---------------------------------------------------------------------------


RELEASED = (MIXED,)  # saved again once the plan is taken back


def attached(plan: ParallelPlan) -> tuple[Engine, torch.optim.Optimizer]:
    engine = Engine(plan, module := Net(), device=CPU)
    engine.apply()
    optimizer = optimizer_of(module)
    engine.attach_optimizers([optimizer])
    return engine, optimizer


def write(engine: Engine, path: Path) -> None:
    own = engine.state_dict(full=False)
    save_sharded(path, module=own["module"], optimizers=own["optimizers"], rest={})


def read(engine: Engine, path: Path) -> None:
    stored = open_sharded(path)
    engine.load({"module": stored["state_dict"], "optimizers": stored["optimizer_states"]})


def kept_elements(engine: Engine) -> int:
    """Elements of optimizer state on this rank."""
    own = [engine.optimizer_state(each, full=False)["state"] for each in engine._optimizers]
    held = (value for state in own for values in state.values() for value in values.values())
    return sum(
        (
            v.local
            if isinstance(v, TensorChunks)
            else v.to_local()
            if isinstance(v, DTensor)
            else v
        ).numel()
        for v in held
    )


def folders(rank: int, folder: Path) -> Any:
    """A step under each plan, saved; each read again under the next one."""
    plans = {layout: plan_of(layout) for layout in IN_FOLDERS} | {
        "zero3": uniform_plan(3, data_parallel_size=4)
    }
    saved, kept = {}, {}
    loaded: dict[str, list[Any]] = {name: [] for name in plans}
    for name, plan in plans.items():
        torch.manual_seed(rank)
        engine, optimizer = attached(plan)
        engine.run_step(shares(data()[0], plan.mesh, rank), loss_of)
        optimizer.step()
        write(engine, folder / name)
        saved[name], kept[name] = engine.state_dict(), kept_elements(engine)
        engine.release()
        if name in RELEASED:
            write(engine, folder / f"{name}, released")
    for (name, plan), before in zip(plans.items(), [*plans][1:] + [*plans][:1], strict=True):
        for suffix in ("", ", released") if before in RELEASED else ("",):
            engine, _ = attached(plan)
            read(engine, folder / f"{before}{suffix}")
            loaded[before].append(engine.state_dict())
        assert kept_elements(engine) == kept[name]
        engine.release()
    return saved, loaded


def on_two_ranks(rank: int, folder: Path) -> Any:
    mesh = Mesh((Axis("tensor", 2),))
    config = OpConfig(PRESETS["ddp"].storage(mesh), parameters=placed(OF_REST, mesh))
    engine, _ = attached(ParallelPlan.of_blocks([BlockPlan("", config)], mesh=mesh))
    read(engine, folder / MIXED)
    return engine.state_dict()


def test_folders_of_shards_go_from_plan_to_plan(tmp_path: Path) -> None:
    saved, loaded = run_on_pool(folders, 4, tmp_path)[0]
    for name, state in saved.items():
        found = loaded[name]
        for suffix in ("", ", released") if name in RELEASED else ("",):
            plain = read_sharded_checkpoint(tmp_path / f"{name}{suffix}")
            found.append({"module": plain["state_dict"], "optimizers": plain["optimizer_states"]})
        assert len(found) == 2 + 2 * (name in RELEASED)
        for each in found:
            same_states(each["optimizers"][0], state["optimizers"][0], exactly=True)
            assert all(
                torch.equal(each["module"][n], value) for n, value in state["module"].items()
            )
    there = run_on_pool(on_two_ranks, 2, tmp_path)[0]
    same_states(there["optimizers"][0], saved[MIXED]["optimizers"][0], exactly=True)
    sizes = [path.stat().st_size for path in (tmp_path / MIXED).rglob("*.distcp")]
    assert len(sizes) == 4 and max(sizes) < 0.5 * sum(sizes)
