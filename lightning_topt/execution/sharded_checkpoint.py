"""Checkpoints as a folder: every rank writes what it keeps, and reads what it is to keep.

    save_sharded(path, module=..., optimizers=[...], rest=...)     # all ranks
    checkpoint = open_sharded(path)                                 # lazy: read when asked for
    checkpoint = read_sharded_checkpoint(path)                      # as one process has it
    write_module(path, "model.safetensors")                         # tensor by tensor

The files are those of `checkpoint_files`, on a disk or in an object store:

    ``module.<name>``                            tensors, in torch.distributed.checkpoint's
    ``optimizers.<number>.<index>.<name>``       files; a rank writes the chunks of a tensor
    ``exchange.<position>.<kind>.<name>``        that it keeps (`TensorChunks`)
    `REST`                                       whatever is no tensor

World size and plan may change between writing and reading: what is read are the mappings of
`states`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_topt.execution.checkpoint_files import (
    FILES_IN,
    MANIFEST,
    METADATA,
    REST,
    RemotePath,
    ShardFolder,
    begin_folder,
    commit,
    holds_shards,
    place_of,
    sync,
    writer_of,
)
from lightning_topt.execution.states import (
    StoredExchange,
    StoredModule,
    StoredOptimizer,
    stored_tensors,
)
from lightning_topt.techniques.weight_files import FILE, write_weights

State = dict[str, Any]
_OTHERS = "sharded_checkpoint"  # key in REST of what is no tensor in the states
# where checkpoints have the state of the gradient exchange
EXCHANGE_AT = ("lightning_topt", "gradient_exchange")


# ---- saving --------------------------------------------------------------------------------------


def _save_plain(state: Any, path: str) -> None:
    with place_of(path).open("wb") as file:
        torch.save(state, file)


def save_sharded(
    path: str | os.PathLike[str],
    *,
    module: Mapping[str, object],
    optimizers: Sequence[Mapping[str, Any]],
    exchange: Mapping[str, Any] | None = None,
    rest: Mapping[str, object],
    save_rest: Callable[[Any, str], object] = _save_plain,
) -> None:
    """Write the states that ranks keep, and rank 0's `rest`, to a folder. A collective call.

    What was at `path` is replaced once all is written.

    Args:
        path: on a file system that all ranks see, or of an object store (``s3://bucket/a.ckpt``).
        module: of `Engine.state_dict(full=False)`, as are `optimizers` and `exchange`.
        optimizers: a state for each.
        exchange: of a plan that compresses gradients.
        rest: whatever else is to be saved.
        save_rest: writes it to a file.
    """
    target = place_of(path)
    # Tensors by their keys; everything else on rank 0, where some of it is not yet.
    tensors, others = _divided(module, optimizers)
    if exchange is not None:
        for kind, values in exchange["state"].items():
            for name, value in values.items():
                tensors[f"exchange.{exchange['position']}.{kind}.{name}"] = value
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(others, gathered if dist.get_rank() == 0 else None)

    # Rank 0 makes the folder that all write to.
    def begin() -> tuple[str, str]:
        folder = begin_folder(target)
        return folder.parent.name, folder.name

    home, name = _on_first(begin)
    folder = target / name
    if not isinstance(target, RemotePath):
        folder = target.with_name(home) / name
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    save(tensors, storage_writer=writer_of(folder), planner=planner)

    # What is no tensor, and then the manifest, by which the files are the checkpoint.
    def finish() -> None:
        joined = _joined(gathered)
        if exchange is not None:
            names = {"step": "step", "method": "method", "ranks": "holders"}
            joined["exchange"] = {name: exchange[given] for name, given in names.items()}
        save_rest({**rest, _OTHERS: joined}, str(folder / REST))
        if not isinstance(folder, RemotePath):
            sync(folder / REST)
        commit(folder, target)

    _on_first(finish)


# the tensors of states by their keys, and what is no tensor: the module's, then by optimizer
def _divided(
    module: Mapping[str, object], optimizers: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Tensor], list[Any]]:
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
    return tensors, others


# What `action` returns on rank 0, on all ranks; an error of it is raised on all ranks. Collective.
def _on_first(action: Callable[[], Any]) -> Any:
    result, said, error = None, "", None
    if dist.get_rank() == 0:
        try:
            result = action()
        except Exception as raised:
            error, said = raised, f"{type(raised).__name__}: {raised}"
    of_first: list[Any] = [result, said]
    dist.broadcast_object_list(of_first)
    if error is not None:
        raise error
    if of_first[1]:
        raise RuntimeError(f"rank 0 could not save the checkpoint: {of_first[1]}")
    return of_first[0]


def _joined(gathered: Sequence[object]) -> State:
    # What is no tensor, joined over ranks: some states are with one rank only
    modules, *optimizers = zip(*gathered, strict=True)
    return {
        "module": modules[0],
        "optimizers": [
            {
                "values": {
                    index: values
                    # of what several ranks have, the lowest rank's stays
                    for of_rank in reversed(ranks)
                    for index, values in of_rank["values"].items()
                },
                "param_groups": ranks[0]["param_groups"],
            }
            for ranks in optimizers
        ],
    }


# ---- loading -------------------------------------------------------------------------------------


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is a folder that `open_sharded` reads.

    Raises:
        FileNotFoundError: it is what a save left that was cut off.
        ValueError: it is a folder of another strategy.
    """
    place = place_of(path)
    if place.is_file() and not isinstance(place, RemotePath):
        return False
    if holds_shards(place):
        return True
    if any(True for _ in place.glob(f"{FILES_IN}*")):
        raise FileNotFoundError(
            f"{str(path)!r} is what a save left that was cut off: it has no {MANIFEST}, and so is "
            "no checkpoint. Go on from another one"
        )
    if (place / METADATA).is_file() and (place / "meta.pt").is_file():
        raise ValueError(
            f"{str(path)!r} is a folder of Lightning's own strategy: turn it into one file by "
            "python -m lightning.pytorch.utilities.consolidate_checkpoint, or save one file by "
            "FSDPStrategy(state_dict_type='full') or "
            "ModelParallelStrategy(save_distributed_checkpoint=False)"
        )
    if any(True for of in (place, place / "checkpoint") for _ in of.glob("*_model_states.pt")):
        raise ValueError(
            f"{str(path)!r} is a folder of DeepSpeed: turn it into one file, where deepspeed is "
            "installed, by lightning.pytorch.utilities.deepspeed."
            "convert_zero_checkpoint_to_fp32_state_dict(folder, file)"
        )
    return False


def open_sharded(
    path: str | os.PathLike[str], load_rest: Callable[[str], State] | None = None
) -> State:
    """Return a checkpoint in the plain form, whose states are read when they are asked for.

    ``["state_dict"]`` is a `StoredModule`, ``["optimizer_states"]`` a list of `StoredOptimizer`.
    `load_rest` reads the file of what is no tensor. Raises ValueError where a file is missing.
    """
    # What is no tensor is read now; tensors stay in the folder.
    folder = ShardFolder.at(place_of(path))
    file = folder.file(REST)
    try:
        rest = (load_rest or _load_plain)(str(file))
    except (EOFError, RuntimeError) as error:  # of torch's zip files
        raise ValueError(
            f"{REST} of the checkpoint in {str(folder.path)!r} is damaged: {error}"
        ) from error
    others = rest[_OTHERS]
    checkpoint = {name: value for name, value in rest.items() if name != _OTHERS}
    checkpoint["state_dict"] = StoredModule(folder, others["module"])
    if others["optimizers"]:
        checkpoint["optimizer_states"] = [
            StoredOptimizer(folder, _entries(folder, number), **of_optimizer)
            for number, of_optimizer in enumerate(others["optimizers"])
        ]
    if "exchange" in others:
        section, key = EXCHANGE_AT
        state = {**others["exchange"], "ranks": StoredExchange(folder, others["exchange"]["ranks"])}
        checkpoint[section] = {**checkpoint.get(section, {}), key: state}
    return checkpoint


def _load_plain(path: str, weights_only: bool = True) -> State:
    place = place_of(path)
    with place.open("rb") as file:
        plain: State = torch.load(file, map_location="cpu", weights_only=weights_only)
    return plain


def _entries(folder: ShardFolder, number: int) -> dict[str, tuple[int, str]]:
    # The index and the name of each tensor of an optimizer, by its key
    entries, prefix = {}, f"optimizers.{number}."
    for key in stored_tensors(folder, prefix):
        index, name = key.split(".", 1)
        entries[f"{prefix}{key}"] = int(index), name
    return entries


def read_sharded_checkpoint(path: str | os.PathLike[str], *, weights_only: bool = True) -> State:
    """Return the checkpoint in a folder as the plain file of one process, with CPU tensors.

    ``torch.save`` of it can be loaded under any strategy. `weights_only` as in ``torch.load``: by
    default no file of the folder can run code.

    Args:
        path: a folder of ``checkpoint="sharded"``, on a disk or in an object store.
        weights_only: whether nothing but tensors and plain values is made.

    Raises:
        ValueError: there is no such checkpoint at `path`, or a file of it is damaged.
    """
    _check_folder(path)
    checkpoint = open_sharded(path, lambda file: _load_plain(file, weights_only))
    checkpoint["state_dict"] = checkpoint["state_dict"].read()
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [each.read() for each in checkpoint["optimizer_states"]]
    if exchange := checkpoint.get(EXCHANGE_AT[0], {}).get(EXCHANGE_AT[1]):
        exchange["ranks"] = list(exchange["ranks"])
    return checkpoint


def write_module(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    module: str = "",
    most_bytes: float = math.inf,
) -> list[Path]:
    """Write the weights in a checkpoint folder as safetensors, and return the files.

    In memory are one tensor, and the largest piece that a rank has written of it.

    Args:
        path: a folder of ``checkpoint="sharded"``, on a disk or in an object store.
        target: a file on a disk, ``model.safetensors``.
        module: a submodule, whose tensors alone are written, by their names in it; empty: all.
        most_bytes: of the tensors in one file. Where they are more there are several, and an index.

    Raises:
        ValueError: there is no such checkpoint or submodule, or `target` is no name for a file.
    """
    _check_folder(path)
    if not os.fspath(target).endswith(FILE):
        raise ValueError(
            f"{str(target)!r} does not end with {FILE}: give the file a name that does"
        )
    state, prefix = StoredModule(ShardFolder.at(place_of(path)), {}), f"{module}." if module else ""
    tensors = {n.removeprefix(prefix): t for n, t in state.tensors.items() if n.startswith(prefix)}
    if not tensors:
        raise ValueError(
            f"{str(path)!r} has no tensors of {module!r}, but such as "
            f"{next(iter(state.tensors), None)!r}: name the submodule that is before their names"
        )
    return write_weights(
        Path(target), tensors, lambda name: state[prefix + name], most_bytes=most_bytes
    )


def _check_folder(path: str | os.PathLike[str]) -> None:
    if not is_folder(path):
        raise ValueError(
            f"{str(path)!r} is not a checkpoint folder: it lacks {MANIFEST} or {FILES_IN}*"
        )
