"""Work in other processes of this machine, without a Trainer.

    run_on_ranks(measure, accelerator="cpu", devices=4)     # a collective function, rank 0's result
    for index, outcome in outcomes_of(search, items, processes=2): ...     # independent items

`run_on_ranks` starts ranks with a process group, or uses those that torchrun or srun has started.
There `topt calibrate`, `topt plan` and `topt verify` measure and try steps. `outcomes_of` divides
searches that need nothing of one another among helper processes and this one.
"""

from __future__ import annotations

import os
import pickle
import queue
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed

from lightning_topt.basics.argument_checks import check_whole
from lightning_topt.basics.core_wait import usable_cores
from lightning_topt.communication.started_ranks import give_step_port, named_port

Item = TypeVar("Item")
Result = TypeVar("Result")
Collective = Callable[..., Result]  # (device, num_nodes, *arguments), called on every rank

_MOST_PROCESSES = 8  # each has its own captures: 1.3 GB for 70 B parameters
_PATIENCE_SECONDS = 600.0  # for a helper that sends nothing


def start_method(kind: str) -> str:
    """Return ``"fork"`` or ``"spawn"`` for processes that use devices of this `kind`.

    The kind is ``"cpu"`` or ``"cuda"``.
    """
    # CUDA cannot be used in a forked process, nor, in its builds of torch, autograd once this
    # process has used it (for the capture); on the CPU forking saves seconds of imports.
    fork = kind == "cpu" and not torch.backends.cuda.is_built()
    return "fork" if fork else "spawn"


# ---- ranks: one collective function


def run_on_ranks(
    function: Collective[Result],
    *arguments: object,
    accelerator: str,
    devices: int,
    threads: int | None = None,
) -> Result | None:
    """Call `function` on `devices` new ranks, or on those that torchrun or srun has started.

    Args:
        function: called as ``function(device, num_nodes, *arguments)`` in a process group.
        arguments: pickled where ranks are spawned.
        accelerator: ``"cpu"``, ``"cuda"`` or ``"gpu"``.
        devices: the number of new ranks.
        threads: of each new rank; None: as many as a rank of Lightning has. It must be 1 where this
            process has computed with several threads, which a forked rank would wait for.

    Returns:
        The result of rank 0; None on ranks of torchrun and srun other than 0.

    Raises:
        ValueError: the machine lacks the devices.
    """
    # what the machine must have
    if accelerator not in ("cpu", "cuda", "gpu"):
        raise ValueError(f"accelerator must be cpu or cuda, got {accelerator!r}")
    check_whole(devices, name="devices")
    kind = "cpu" if accelerator == "cpu" else "cuda"
    if kind == "cuda" and torch.cuda.device_count() < devices:
        raise ValueError(
            f"devices={devices}, but this machine has {torch.cuda.device_count()} CUDA device(s)"
        )

    # under torchrun this process is one of the ranks
    if dist.is_torchelastic_launched():
        local_rank, local_world_size = (
            int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
        num_nodes = int(os.environ["WORLD_SIZE"]) // local_world_size
        return _call_in_group(
            function, kind, local_rank, num_nodes, arguments, init_method="env://"
        )

    # in a step of several tasks it is one of these
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        give_step_port()
        slurm = SLURMEnvironment(auto_requeue=False)
        num_nodes = int(os.environ["SLURM_STEP_NUM_NODES"])
        _set_num_threads_if_needed(num_processes=slurm.world_size() // num_nodes)
        return _call_in_group(
            function,
            kind,
            slurm.local_rank(),
            num_nodes,
            arguments,
            init_method=f"tcp://{slurm.main_address}:{slurm.main_port}",
            rank=slurm.global_rank(),
            world_size=slurm.world_size(),
        )

    # else ranks are started, which meet in a file; rank 0 leaves its result beside it
    with tempfile.TemporaryDirectory() as folder:
        start: Any = mp.start_processes  # type: ignore[attr-defined]
        start(
            _run_rank,
            args=(function, kind, devices, threads, folder, arguments),
            nprocs=devices,
            start_method=start_method(kind),
        )
        result: Result = pickle.loads((Path(folder) / "result").read_bytes())
        return result


def _run_rank(
    rank: int,
    function: Collective[object],
    kind: str,
    world_size: int,
    threads: int | None,
    folder: str,
    arguments: tuple[object, ...],
) -> None:
    """Be one of the new ranks."""
    # threads as a rank of Lightning has, unless the caller says otherwise
    if threads is None:
        _set_num_threads_if_needed(num_processes=world_size)
    else:
        torch.set_num_threads(threads)
    options = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": world_size}
    result = _call_in_group(function, kind, rank, 1, arguments, **options)
    if rank == 0:
        (Path(folder) / "result").write_bytes(pickle.dumps(result))


def _call_in_group(
    function: Collective[Result],
    kind: str,
    local_rank: int,
    num_nodes: int,
    arguments: tuple[object, ...],
    **options: Any,
) -> Result | None:
    """Call `function` between the start and the end of a process group."""
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    with named_port():
        dist.init_process_group("gloo" if kind == "cpu" else "nccl", **options)
    try:
        result = function(device, num_nodes, *arguments)
        return result if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


# ---- helpers: independent items


def most_processes(searches: int) -> int:
    """Return how many processes are worth having for so many searches here."""
    return max(min(usable_cores(), searches, _MOST_PROCESSES), 1)


def outcomes_of(
    function: Callable[[Item], Result], items: Sequence[Item], *, processes: int
) -> Iterator[tuple[int, Result | ValueError]]:
    """Start helpers now, and return an iterator of the outcomes, in the order in which they come.

    Every process, this one included, takes the next item when it has done one. What a helper took
    and did not finish is done here. Helpers are forked where that is safe. Else they are spawned,
    and `function` and `items` are pickled; results always are.

    Returns:
        Pairs of an item's index, and what `function` returned for it or the ValueError it raised.
    """
    context: Any = get_context(start_method("cpu"))
    taken = context.Value("i", 0)  # items that some process has begun
    received = queue.SimpleQueue[tuple[int, Any] | None]()
    helpers = []
    for _ in range(processes - 1):
        reader, writer = context.Pipe(duplex=False)
        helper = context.Process(target=_help, args=(function, items, taken, writer), daemon=True)
        helper.start()
        writer.close()  # or its end would never be seen
        threading.Thread(target=_receive, args=(reader, received), daemon=True).start()
        helpers.append(helper)
    return _outcomes(function, items, taken, received, helpers)


def _outcomes(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    taken: object,
    received: queue.SimpleQueue[Any],
    helpers: Sequence[Any],
) -> Iterator[tuple[int, Result | ValueError]]:
    """Do items here, and yield these outcomes and those of `helpers`."""
    # items without an outcome, and helpers that may still send one
    left, going = {*range(len(items))}, len(helpers)
    try:
        while True:
            index = _take(taken)
            is_last = index >= len(items)
            if not is_last:
                yield index, _outcome(function, items[index])
                left.discard(index)
            # what has come meanwhile; after the last item, wait for what helpers are at
            while going and left and (is_last or not received.empty()):
                try:
                    found = received.get(timeout=_PATIENCE_SECONDS)
                except queue.Empty:
                    going = 0
                    break
                if found is None:  # one has ended
                    going -= 1
                else:
                    left.discard(found[0])
                    yield found
            if is_last:
                break
        # what a helper took and did not finish
        for index in sorted(left):
            yield index, _outcome(function, items[index])
    finally:
        for helper in helpers:
            helper.terminate()
            helper.join()


def _receive(reader: Connection, received: queue.SimpleQueue[Any]) -> None:
    """Pass on what a helper sends, and None when it has ended.

    A thread does it, since a helper stops when its pipe is full and nobody reads.
    """
    try:
        with suppress(EOFError, OSError):
            while True:
                received.put(reader.recv())
    finally:
        received.put(None)


def _help(function: Any, items: Sequence[object], taken: Any, writer: Connection) -> None:
    """Do items in a helper process, which prints nothing."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (to the end of the process)
    torch.set_num_threads(1)  # a forked process would wait for threads that it does not have
    while (index := _take(taken)) < len(items):
        writer.send((index, _outcome(function, items[index])))


def _take(taken: Any) -> int:
    """Return the index of the next item, which no other process gets."""
    # reading and counting up must be one step among all processes
    with taken.get_lock():
        index: int = taken.value
        taken.value += 1
    return index


def _outcome(function: Callable[[Item], Result], item: Item) -> Result | ValueError:
    try:
        return function(item)
    except ValueError as error:
        return error
