"""Run a collective function on ranks of this machine without a Trainer; `topt calibrate` and `topt
plan` do.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed

T = TypeVar("T")
Measured = Callable[..., T]  # (device, num_nodes, *arguments), called on every rank


def run_on_ranks(
    function: Measured[T],
    *arguments: Any,
    accelerator: str,
    devices: int,
    threads: int | None = None,
) -> T | None:
    """Return rank 0's result of `function`, called on `devices` new ranks, or on those that
    torchrun has started.

    A new rank gets as many threads as a rank of Lightning, or `threads`: 1 where this process has
    computed with several, which a forked rank would wait for. Returns None on ranks of torchrun
    other than 0. Raises ValueError when the machine lacks the devices.
    """
    kind = _device_kind(accelerator, devices)
    if dist.is_torchelastic_launched():
        local_rank, local_world_size = (
            int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
        num_nodes = int(os.environ["WORLD_SIZE"]) // local_world_size
        return _call(function, kind, local_rank, num_nodes, arguments, init_method="env://")
    with tempfile.TemporaryDirectory() as folder:
        start: Any = mp.start_processes  # type: ignore[attr-defined]
        start(
            _rank,
            args=(function, kind, devices, threads, folder, arguments),
            nprocs=devices,
            start_method=start_method(kind),
        )
        result: T = pickle.loads((Path(folder) / "result").read_bytes())
        return result


def start_method(kind: str) -> str:
    """Return how processes are started that use devices of this `kind` (``"cpu"`` or ``"cuda"``):
    ``"fork"`` or ``"spawn"``.
    """
    # CUDA cannot be used in a forked process, nor, in its builds of torch, autograd once this
    # process has used it (for the capture); on the CPU forking saves seconds of imports.
    fork = kind == "cpu" and not torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    return "fork" if fork else "spawn"


def _device_kind(accelerator: str, devices: int) -> str:
    if accelerator not in ("cpu", "cuda", "gpu"):
        raise ValueError(f"accelerator must be cpu or cuda, got {accelerator!r}")
    kind = "cpu" if accelerator == "cpu" else "cuda"
    if kind == "cuda" and torch.cuda.device_count() < devices:
        raise ValueError(
            f"devices={devices}, but this machine has {torch.cuda.device_count()} CUDA device(s)"
        )
    return kind


def _rank(
    rank: int,
    function: Measured[Any],
    kind: str,
    world_size: int,
    threads: int | None,
    folder: str,
    arguments: tuple[Any, ...],
) -> None:
    if threads is None:
        _set_num_threads_if_needed(num_processes=world_size)
    else:
        torch.set_num_threads(threads)
    options = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": world_size}
    result = _call(function, kind, rank, 1, arguments, **options)
    if rank == 0:
        (Path(folder) / "result").write_bytes(pickle.dumps(result))


def _call(
    function: Measured[T],
    kind: str,
    local_rank: int,
    num_nodes: int,
    arguments: tuple[Any, ...],
    **options: Any,
) -> T | None:
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if kind == "cpu" else "nccl", **options)
    try:
        result = function(device, num_nodes, *arguments)
        return result if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()
