"""A measurement depends on machines, their ranks, versions and settings. Equal set-ups may share
measurements.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from lightning_topt.costs.ranks import from_rank_0, gather, world_size

# Of the environment, what libraries read that compute, allocate or communicate. The number of
# threads is known as such.
_PREFIXES = (
    "MKL_",
    "KMP_",
    "GOMP_",
    "ONEDNN_",
    "DNNL_",
    "MALLOC_",
    "NCCL_",
    "GLOO_",
    "UCX_",
    "CUDA_",
    "PYTORCH_",
)
_NAMES = ("GLIBC_TUNABLES", "LD_PRELOAD", "ATEN_CPU_CAPABILITY", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
_NETNS_COOKIE = 71  # SO_NETNS_COOKIE, which Python has no name for
_NO_MATTER = ("CUDA_VISIBLE_DEVICES", "MKL_NUM_THREADS")


def describe_setup(device: torch.device, *, num_nodes: int) -> dict[str, Any]:
    """Return the set-up as JSON values, the same on all ranks. Collective.

    Machines with their processors, devices and threads per rank; ranks and nodes; backend; versions
    of torch and of this package; a hash of the environment variables that matter; settings of
    torch.
    """
    machines: list[Any] = []
    for machine in gather(_machine(device)):
        if machine not in machines:
            machines.append(machine)
    setup = {
        "machines": machines,
        "world_size": world_size(),
        "num_nodes": num_nodes,
        "backend": dist.get_backend() if world_size() > 1 else "",
        "torch": torch.__version__,
        # complete by now, not when this file is imported
        "package": sys.modules["lightning_topt"].__version__,
        "environment": _environment(),
        "settings": {
            "matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "cudnn": [torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic],
        },
    }
    found: dict[str, Any] = from_rank_0(setup)
    return found


def _machine(device: torch.device) -> dict[str, Any]:
    return {
        "host": platform.node(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "network": _network(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _network() -> str:
    """The network namespace: containers and labs on one machine have links of their own.

    Its number is given to another one when it ends, its cookie (Linux 5.14) never before the next
    boot.
    """
    try:
        number = os.readlink("/proc/self/ns/net")
    except OSError:  # no Linux
        return ""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as any_socket:
            cookie = any_socket.getsockopt(socket.SOL_SOCKET, _NETNS_COOKIE, 8)
    except OSError:
        return number
    return f"{number} {int.from_bytes(cookie, sys.byteorder)}"


def _environment() -> str:
    chosen = {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(_PREFIXES) or name in _NAMES) and name not in _NO_MATTER
    }
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:16]
