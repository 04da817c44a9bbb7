"""Checkpoints as a folder: every rank writes what it keeps, and reads what it is to keep under any
plan and world size.

Tensors are in torch.distributed.checkpoint's files, under ``module.<name>``,
``optimizers.<number>.<index>.<name>`` and ``exchange.<position>.<kind>.<name>``, whatever is no
tensor beside them in `REST`. `read_sharded_checkpoint` gives what the plain file of one process
has.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_topt.execution.stored_states import StoredExchange, StoredModule, StoredOptimizer

State = dict[str, Any]
REST = "trainer_state.pt"
_OTHERS = "sharded_checkpoint"  # key in REST of what is no tensor in the states
# where checkpoints have the state of the gradient exchange
EXCHANGE_AT = ("lightning_topt", "gradient_exchange")
_METADATA = ".metadata"  # torch.distributed.checkpoint's


def holds_shards(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is a folder that `save_sharded` wrote."""
    return (Path(path) / REST).is_file() and (Path(path) / _METADATA).is_file()


def save_sharded(
    path: str | os.PathLike[str],
    *,
    module: Mapping[str, Any],
    optimizers: Sequence[Mapping[str, Any]],
    exchange: Mapping[str, Any] | None = None,
    rest: Mapping[str, Any],
    save_rest: Callable[[Any, Path], None] = torch.save,
) -> None:
    """Write the states that ranks keep (`Engine.state_dict` without `full`), and rank 0's `rest`,
    to the folder `path`.

    A collective call; `path` is on a file system that all ranks see. What was at `path` is replaced
    once all is written.
    """
    rank, target = dist.get_rank(), Path(path)
    unfinished = target.with_name(target.name + ".unfinished")
    if rank == 0:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove(unfinished)
    tensors = {
        f"module.{name}": value for name, value in module.items() if isinstance(value, Tensor)
    }
    others: list[Any] = [
        {name: value for name, value in module.items() if not isinstance(value, Tensor)}
    ]
    for number, optimizer in enumerate(optimizers):
        plain: dict[int, State] = {}
        for index, values in optimizer["state"].items():
            for name, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizers.{number}.{index}.{name}"] = value
                else:
                    plain.setdefault(index, {})[name] = value
        others.append({"values": plain, "param_groups": optimizer["param_groups"]})
    for kind, values in (exchange or {"state": {}})["state"].items():
        assert exchange is not None
        tensors.update(
            {
                f"exchange.{exchange['position']}.{kind}.{name}": value
                for name, value in values.items()
            }
        )
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(others, gathered if rank == 0 else None)
    dist.barrier()  # the folder is empty
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    save(tensors, storage_writer=FileSystemWriter(unfinished), planner=planner)
    if rank == 0:
        joined = _joined(gathered) | ({} if exchange is None else {"exchange": _outline(exchange)})
        save_rest({**rest, _OTHERS: joined}, unfinished / REST)
        _replace(target, unfinished)
    dist.barrier()


def open_sharded(path: str | os.PathLike[str], rest: Mapping[str, Any]) -> State:
    """Return a checkpoint in the plain form, from its folder and what `REST` there has: states are
    read when asked for.

    ``["state_dict"]`` is a `StoredModule`, ``["optimizer_states"]`` a list of `StoredOptimizer`.
    """
    others = rest[_OTHERS]
    checkpoint = {name: value for name, value in rest.items() if name != _OTHERS}
    checkpoint["state_dict"] = StoredModule(Path(path), others["module"])
    if others["optimizers"]:
        checkpoint["optimizer_states"] = [
            StoredOptimizer(Path(path), number, **of_optimizer)
            for number, of_optimizer in enumerate(others["optimizers"])
        ]
    if "exchange" in others:
        section, key = EXCHANGE_AT
        state = {
            **others["exchange"],
            "ranks": StoredExchange(Path(path), others["exchange"]["ranks"]),
        }
        checkpoint[section] = {**checkpoint.get(section, {}), key: state}
    return checkpoint


def read_sharded_checkpoint(path: str | os.PathLike[str], *, weights_only: bool = True) -> State:
    """Return the checkpoint in the folder `path` as the plain file of one process has it, with CPU
    tensors.

    ``torch.save`` of it can be loaded under any strategy. `weights_only` as in ``torch.load``.
    Raises ValueError for a path without such a checkpoint.
    """
    if not holds_shards(path):
        raise ValueError(
            f"{str(path)!r} is not a checkpoint folder: it lacks {REST} or {_METADATA}"
        )
    rest = torch.load(Path(path) / REST, map_location="cpu", weights_only=weights_only)
    checkpoint = open_sharded(path, rest)
    checkpoint["state_dict"] = checkpoint["state_dict"].read()
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [
            stored.whole() for stored in checkpoint["optimizer_states"]
        ]
    if exchange := checkpoint.get(EXCHANGE_AT[0], {}).get(EXCHANGE_AT[1]):
        exchange["ranks"] = list(exchange["ranks"])
    return checkpoint


def _outline(exchange: Mapping[str, Any]) -> State:
    return {"step": exchange["step"], "method": exchange["method"], "ranks": exchange["holders"]}


def _joined(gathered: Sequence[Any]) -> State:
    """Return what is no tensor, of all ranks: some states are with one rank only."""
    modules, *optimizers = zip(*gathered, strict=True)
    return {
        "module": modules[0],
        "optimizers": [
            {
                "values": {
                    index: values
                    for of_rank in reversed(ranks)
                    for index, values in of_rank["values"].items()
                },
                "param_groups": ranks[0]["param_groups"],
            }
            for ranks in optimizers
        ],
    }


def _replace(target: Path, finished: Path) -> None:
    """At every moment there is a whole checkpoint at one of the names."""
    old = target.with_name(target.name + ".old")
    _remove(old)
    if target.exists() or target.is_symlink():
        target.rename(old)
    finished.rename(target)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
