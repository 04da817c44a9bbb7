"""`topt calibrate`: measure this machine anew, and keep it for later runs.

It writes a cluster file (``output``), which is used elsewhere with ``strategy.cluster=FILE``.
`run_on_ranks` is for other commands too: work in several processes of this machine, without a
Trainer.

    run_on_ranks(measure, accelerator="cpu", devices=4)     # a collective function, rank 0's result
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from omegaconf import DictConfig

from lightning_topt.basics.argument_checks import check_choice, check_whole
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.measurements import Measurements

Result = TypeVar("Result")
Collective = Callable[..., Result]  # (device, num_nodes, *arguments), called on every rank


class Calibration(NamedTuple):
    """What the ranks have measured, in `seconds`.

    `file` is what later runs read; None: it could not be written.
    """

    cluster: Cluster
    file: Path | None
    seconds: float


def run(config: DictConfig) -> None:
    """Measure, write ``config.output``, and say where it is used.

    Raises:
        ValueError: the machine lacks what `config` asks for.
    """
    measured = run_on_ranks(_measure, accelerator=config.accelerator, devices=config.devices)
    if measured is None:  # another rank of torchrun or srun writes it
        return
    cluster, output = measured.cluster, Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    cluster.save(output)

    nodes = f"{cluster.num_nodes} node(s) x {cluster.devices_per_node} device(s)"
    print(f"measured {cluster.name}: {nodes}, in {measured.seconds:.1f} s")
    if cluster.busy_share:
        print(
            f"the machine was busy: in {100 * cluster.busy_share:.0f} % of the time a rank waited "
            "while other programs had its core. Measure again when it is quiet"
        )
    if measured.file is not None:
        print(
            f"runs of {cluster.num_devices} rank(s) with equal settings on this machine use "
            f"{measured.file}"
        )
    print(f"written to {output}; use it elsewhere with strategy.cluster={output}")


# called on every rank
def _measure(device: torch.device, num_nodes: int) -> Calibration:
    start = time.perf_counter()
    # refresh: constants of earlier runs are measured anew
    measurements = Measurements.open(
        device=device, num_nodes=num_nodes, refresh=True, progress=print
    )
    cluster = measurements.cluster()
    # the file is there only where the folder of measurements can be written
    path = measurements.path
    file = path if path is not None and path.is_file() else None
    return Calibration(cluster, file, time.perf_counter() - start)


# ---- ranks without a Trainer ---------------------------------------------------------------------


def start_method(kind: str) -> str:
    """Return ``"fork"`` or ``"spawn"`` for processes that use ``"cpu"`` or ``"cuda"`` devices."""
    # CUDA cannot be used in a forked process, nor, in its builds of torch, autograd once this
    # process has used it (for the capture); on the CPU forking saves seconds of imports.
    fork = kind == "cpu" and not torch.backends.cuda.is_built()
    return "fork" if fork else "spawn"


def run_on_ranks(
    function: Collective[Result], *arguments: object, accelerator: str, devices: int
) -> Result | None:
    """Call `function` on `devices` new ranks, or on those that torchrun or srun has started.

    Args:
        function: called as ``function(device, num_nodes, *arguments)`` in a process group.
        arguments: pickled where ranks are spawned.
        accelerator: ``"cpu"``, ``"cuda"`` or ``"gpu"``.
        devices: the number of new ranks.

    Returns:
        The result of rank 0; None on ranks of torchrun and srun other than 0.

    Raises:
        ValueError: the machine lacks the devices.
    """
    # what the machine must have
    check_choice(accelerator, name="accelerator", allowed=("cpu", "cuda", "gpu"))
    check_whole(devices, name="devices")
    kind = "cpu" if accelerator == "cpu" else "cuda"
    if kind == "cuda" and torch.cuda.device_count() < devices:
        raise ValueError(
            f"devices={devices}, but this machine has {torch.cuda.device_count()} CUDA device(s)"
        )

    # under torchrun this process is one of the ranks
    if dist.is_torchelastic_launched():
        names = "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"
        local_rank, local_size, size = (int(os.environ[name]) for name in names)
        return _call_in_group(
            function, kind, local_rank, size // local_size, arguments, init_method="env://"
        )

    # in a step of several tasks it is one of these
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
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
            args=(function, kind, devices, folder, arguments),
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
    folder: str,
    arguments: tuple[object, ...],
) -> None:
    _set_num_threads_if_needed(num_processes=world_size)  # as a rank of Lightning has
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
    # Call `function` between the start and the end of a process group
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if kind == "cpu" else "nccl", **options)
    try:
        result = function(device, num_nodes, *arguments)
        return result if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()
