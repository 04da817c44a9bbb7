"""A GPT whose user wrote nothing for it runs split, and trains as on one process."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import Shard
from tests.launch import run_on_pool
from tests.models import GPT
from tests.techniques.tensor_parallel.on_ranks import check, compare

COLUMN, ROW = Shard(0), Shard(1)
MEGATRON = {
    "tokens.weight": (Shard(0),),
    "qkv.weight": (Shard(0, parts=3),),
    "qkv.bias": (Shard(0, parts=3),),
    "project.weight": (ROW,),
    "up.weight": (COLUMN,),
    "up.bias": (COLUMN,),
    "down.weight": (ROW,),
    "head.weight": (COLUMN,),
}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 32, (4, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(module: nn.Module) -> Tensor:
    loss: Tensor = module.training_step(batch(), 0)  # type: ignore[operator]
    return loss


def gpt(**options: object) -> GPT:
    module = GPT(**{"width": 32, "heads": 4, **options})  # type: ignore[arg-type]
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign,assignment]
    return module


def test_dropout_is_that_of_one_process() -> None:
    mesh = Mesh((Axis("tensor", 2),))
    check(run_on_pool(compare, 2, partial(gpt, dropout=0.2), loss_of, MEGATRON, mesh))


def test_tied_weights_stay_tied() -> None:
    splits = {name: placements for name, placements in MEGATRON.items() if name != "head.weight"}
    mesh = Mesh((Axis("tensor", 2),))
    check(run_on_pool(compare, 2, partial(gpt, tied=True), loss_of, splits, mesh))
