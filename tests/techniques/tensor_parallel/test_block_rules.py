"""Sums and borders in slices: sequence and context parallel, against one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
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
    Callable[[], nn.Module],
    Callable[[nn.Module], Tensor],
    Mapping[str, Placed],
    Mesh,
    Mapping[str, BlockRule],
]
BLOCKS = {
    "gpt": "blocks",
    "gpt, two heads": "blocks",
    "llama": "model.layers",
    "gpt2": "transformer.h",
}
MODELS: dict[
    str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor], Mapping[str, Placed]]
] = {
    "gpt": (partial(gpt, dropout=0.2), loss_of, MEGATRON),
    "gpt, two heads": (partial(gpt, heads=2, context=8), loss_of, {}),
    "llama": (llama, even_loss, LLAMA),
    "gpt2": (gpt2, even_loss, GPT2),
}


def rules(
    model: str, border: Placed, sums: Placed = (), gathers: tuple[bool, ...] = ()
) -> dict[str, BlockRule]:
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
    cases = {f"sequence, {model}": of_sequence(model) for model in MODELS if MODELS[model][2]}
    cases |= {f"context, {model}": of_context(model) for model in MODELS}
    cases |= {
        f"context in two runs, {model}": of_context(model, 2, 2) for model in ("gpt", "llama")
    }
    cases |= {f"both, {model}": of_both(model) for model in ("gpt", "gpt2")}
    results = run_ranks(all_of, 4, cases)
    for name in cases:
        check([found[name] for found in results])


def lowered(loss_of: Callable[[nn.Module], Tensor], module: nn.Module) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(module)


def test_steps_are_split_under_autocast() -> None:
    """What is gathered for products is bfloat16; one process rounds as often."""
    cases = {}
    for model in ("llama", "gpt2"):
        make, loss, *rest = of_sequence(model)
        cases[model] = make, partial(lowered, loss), *rest
    results = run_ranks(all_of, 4, cases)
    for name in cases:
        check([found[name] for found in results], tolerance=0.05)


# ---- two and three axes --------------------------------------------------------------------------

FIRST, SECOND = ("qkv", "up", "head"), ("project", "down")


def of_two(first: str, second: str) -> dict[str, Placed]:
    """Weights by outputs along the first axis and by inputs along the second one, and then the
    other way round.
    """
    return {
        "qkv.weight": (Shard(0, parts=3), Shard(1)),
        "qkv.bias": (Shard(0, parts=3), WHOLE),
        "up.weight": (Shard(0), Shard(1)),
        "up.bias": (Shard(0), WHOLE),
        "project.weight": (Shard(1), Shard(0)),
        "project.bias": (WHOLE, Shard(0)),
        "down.weight": (Shard(1), Shard(0)),
        "down.bias": (WHOLE, Shard(0)),
        "norm1.weight": (WHOLE, Shard(0)),
        "norm1.bias": (WHOLE, Shard(0)),
        "norm2.weight": (WHOLE, Shard(0)),
        "norm2.bias": (WHOLE, Shard(0)),
        "tokens.weight": (Shard(0), Shard(1)),
        "positions.weight": (WHOLE, Shard(1)),
        "head.weight": (Shard(0), Shard(1)),
        ".norm.weight": (WHOLE, Shard(0)),
    }


def on_two_axes(rows: int, columns: int, *, dim: int = 0, data: int = 1) -> Case:
    mesh = Mesh((Axis("data", data), Axis("tensor_rows", rows), Axis("tensor_columns", columns)))
    make, loss, _ = MODELS["gpt"]
    placements = {name: placed for name, placed in of_two("", "").items() if name != ".norm.weight"}
    return (
        make,
        loss,
        placements,
        mesh,
        rules("gpt", (Shard(dim), Shard(2)), (Shard(dim), Shard(dim))),
    )


def on_three_axes(depth: int, rows: int, columns: int) -> Case:
    """Matrices also rest in slices along the first axis, of which each row of a slice along the
    others is cut.
    """
    mesh = Mesh(
        (Axis("tensor_tokens", depth), Axis("tensor_rows", rows), Axis("tensor_columns", columns))
    )
    make, loss, _ = MODELS["gpt"]
    placements: dict[str, Placed] = {}
    for name, (row, column) in of_two("", "").items():
        by_outputs = row if isinstance(row, Shard) and row.dim == 0 else column
        assert isinstance(by_outputs, Shard)
        size = rows if by_outputs is row else columns
        inner = Shard(0, by_outputs.parts * size)
        if name != ".norm.weight":
            placements[name] = (
                inner if "weight" in name and "norm" not in name and "pos" not in name else WHOLE,
                row,
                column,
            )
    border: Placed = (Shard(0), Shard(0), Shard(2))
    by_rows: Placed = (Shard(0), Shard(0), Shard(0))
    return make, loss, placements, mesh, rules("gpt", border, by_rows, (True, False, False))


def test_two_and_three_axes() -> None:
    cases = {
        "2 x 2": on_two_axes(2, 2, data=2),
        "4 x 2": on_two_axes(4, 2),
        "2 x 2, by step": on_two_axes(2, 2, dim=1, data=2),
        "2 x 2 x 2": on_three_axes(2, 2, 2),
        "2 x 4 x 1": on_three_axes(2, 4, 1),
    }
    results = run_ranks(all_of, 8, cases)
    for name in cases:
        check([found[name] for found in results])
