"""Sums and borders in slices: sequence and context parallel, against one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import Placement, Replicate, Shard
from lightning_topt.techniques.tensor_parallel.block_rules import BlockRule
from tests.launch import run_ranks
from tests.techniques.tensor_parallel.on_ranks import check, compare
from tests.techniques.tensor_parallel.test_split_gpt import MEGATRON, gpt, loss_of
from tests.techniques.tensor_parallel.test_split_models import GPT2, LLAMA, even_loss, gpt2, llama

WHOLE = Replicate()
Placed = tuple[Placement, ...]
Case = tuple[
    Callable[[], nn.Module], Callable[[nn.Module], Tensor], Mapping[str, Placed], Mesh, Mapping[str, BlockRule]
]
BLOCKS = {"gpt": "blocks", "llama": "model.layers", "gpt2": "transformer.h"}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor], Mapping[str, Placed]]] = {
    "gpt": (partial(gpt, dropout=0.2), loss_of, MEGATRON),
    "llama": (llama, even_loss, LLAMA),
    "gpt2": (gpt2, even_loss, GPT2),
}


def rules(model: str, border: Placed, sums: Placed = (), gathers: tuple[bool, ...] = ()) -> dict[str, BlockRule]:
    """The same for all blocks; the rest has their sums."""
    names = [f"{BLOCKS[model]}.{index}" for index in range(2)]
    by_block = {name: BlockRule(name, (border,), (border,), sums, gathers) for name in names}
    return {**by_block, "": BlockRule("", (), (), sums, gathers)}


def of_sequence(model: str) -> Case:
    make, loss, placements = MODELS[model]
    mesh = Mesh((Axis("data", 2), Axis("tensor", 2)))
    return make, loss, placements, mesh, rules(model, (Shard(1),), (Shard(1),))


def of_context(model: str, parts: int = 1, size: int = 4) -> Case:
    make, loss, _ = MODELS[model]
    mesh = Mesh((Axis("data", 4 // size), Axis("tensor_tokens", size)))
    return make, loss, {}, mesh, rules(model, (Shard(1, parts),), (Shard(1, parts),))


def of_both(model: str) -> Case:
    """Heads along one axis, steps along the other, in both ways."""
    make, loss, placements = MODELS[model]
    mesh = Mesh((Axis("tensor", 2), Axis("tensor_tokens", 2)))
    split = {name: (*along, WHOLE) for name, along in placements.items()}
    return make, loss, split, mesh, rules(model, (Shard(1), Shard(1)), (Shard(1), Shard(1)))


def all_of(rank: int, cases: Mapping[str, Case]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (make, loss, placements, mesh, by_block) in cases.items():
        try:
            found[name] = compare(rank, make, loss, placements, mesh, by_block)
        except Exception as error:
            raise RuntimeError(name) from error
    return found


def test_steps_are_split() -> None:
    cases = {f"sequence, {model}": of_sequence(model) for model in MODELS}
    cases |= {f"context, {model}": of_context(model) for model in MODELS}
    cases |= {f"context in two runs, {model}": of_context(model, 2, 2) for model in MODELS}
    cases |= {f"both, {model}": of_both(model) for model in MODELS}
    results = run_ranks(all_of, 4, cases)
    for name in cases:
        check([found[name] for found in results])
