"""A plan that splits the layers of `tests.models.GPT` over two ranks of a tensor axis."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def split_plan(data: int, storage: str, *, recomputed: Collection[int] = ()) -> dict[str, Any]:
    """Return the plan of two blocks on `data` x 2 ranks; the blocks `recomputed` run again."""
    placed = {
        name: {"data": "replicate", "tensor": shard}
        for name, shard in {
            "qkv.weight": "shard(0, parts=3)",
            "qkv.bias": "shard(0, parts=3)",
            "project.weight": "shard(1)",
            "up.weight": "shard(0)",
            "up.bias": "shard(0)",
            "down.weight": "shard(1)",
        }.items()
    }
    blocks: list[dict[str, Any]] = [
        {
            "block": f"blocks.{index}",
            "storage": storage,
            "recompute": index in recomputed,
            "computes": {"parameters": placed},
        }
        for index in range(2)
    ]
    rest = {"tokens.weight": {"data": "replicate", "tensor": "shard(0)"}}
    blocks.append({"block": "", "storage": storage, "computes": {"parameters": rest}})
    mesh = [{"name": "data", "size": data}, {"name": "tensor", "size": 2}]
    return {"version": 2, "mesh": mesh, "stages": [{"blocks": blocks}]}
