"""Part 0: what this machine is, and whether what the other parts need can be imported."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_report.reporting import Report, device_seconds, memory_columns, run_part

PACKAGES = [
    "numpy",
    "numba",
    "triton",
    "lightning",
    "pytorch_lightning",
    "torchmetrics",
    "hydra",
    "omegaconf",
    "transformers",
    "timm",
    "psutil",
    "xxhash",
    "rich",
    "matplotlib",
    "sklearn",
    "pytorch_optimizer",
    "pytest",
    "xdist",
    "pytest_timeout",
]
OURS = [
    "lightning_topt",
    "lightning_topt.costs.calibrate",
    "lightning_topt.plugins.planning",
    "lightning_topt.communication.selection_triton",
    "hydra_plugins",
    "topt_console",
]


def run(report: Report) -> None:
    report.row("python", value=platform.python_version(), more=platform.platform())
    report.row("torch", value=torch.__version__, more=f"CUDA {torch.version.cuda}")
    report.row("cores", value=os.cpu_count(), more=f"usable {len(os.sched_getaffinity(0))}")
    if report.device.type == "cuda":
        _card(report)
    for name in (*PACKAGES, *OURS):
        _import(report, name)
    _attention(report)
    with report.attempt("settings") as row:
        row["value"] = {
            "tf32 matmul": torch.backends.cuda.matmul.allow_tf32,
            "tf32 cudnn": torch.backends.cudnn.allow_tf32,
            "cudnn benchmark": torch.backends.cudnn.benchmark,
            "preferred blas": str(torch.backends.cuda.preferred_blas_library()),
            "variables": {
                key: value
                for key, value in os.environ.items()
                if key.startswith(("CUDA_", "NCCL_", "TORCH_", "PYTORCH_", "OMP_"))
            },
        }


def _import(report: Report, name: str) -> None:
    start = time.perf_counter()
    try:
        module = importlib.import_module(name)
    except BaseException as error:
        report.failure(f"import {name}", error)
        return
    seconds = round(time.perf_counter() - start, 2)
    report.row(f"import {name}", value=getattr(module, "__version__", ""), more=f"{seconds} s")


def _card(report: Report) -> None:
    with report.attempt("card") as row:
        card = torch.cuda.get_device_properties(0)
        row["value"] = card.name
        row["more"] = {
            "count": torch.cuda.device_count(),
            "sm": card.multi_processor_count,
            "capability": torch.cuda.get_device_capability(),
            "total": card.total_memory,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": torch.cuda.nccl.version(),
            "l2": getattr(card, "L2_cache_size", None),
        }
    with report.attempt("memory of the context alone") as row:
        torch.zeros(1, device=report.device)
        torch.cuda.synchronize()
        row["value"] = memory_columns(report.device)
    with report.attempt("memory after one product") as row:
        matrix = torch.zeros(64, 64, device=report.device)
        matrix @ matrix
        torch.cuda.synchronize()
        row["value"] = memory_columns(report.device)
    with report.attempt("nvidia-smi") as row:
        fields = "clocks.sm,clocks.mem,clocks.max.sm,power.limit,memory.used,driver_version"
        if shutil.which("nvidia-smi"):
            job = subprocess.run(
                ["nvidia-smi", f"--query-gpu={fields}", "--format=csv"],
                capture_output=True,
                text=True,
                timeout=8,
                check=False,
            )
            row["value"], row["more"] = job.stdout.strip().split("\n")[-1], fields


def _attention(report: Report) -> None:
    """Say which operator attention becomes, and how long each backend takes."""
    device = report.device
    for dtype in (torch.float32, torch.bfloat16):
        short = str(dtype).removeprefix("torch.")
        with report.attempt(f"attention in {short}") as row:
            query = torch.randn(4, 12, 256, 64, device=device, dtype=dtype, requires_grad=True)
            call = _attend(query)
            row["value"] = type(call().grad_fn).__name__
            row["more"] = f"{device_seconds(call, device, batches=2) * 1e6:.1f} us"
        if device.type != "cuda":
            continue
        for backend in (
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        ):
            try:
                with sdpa_kernel(backend):
                    seconds = device_seconds(call, device, batches=2)
                more = f"{seconds * 1e6:.1f} us"
            except RuntimeError as error:
                more = f"not possible: {str(error).splitlines()[0][:80]}"
            report.row(f"attention in {short} by {backend.name}", more=more)


def _attend(query: torch.Tensor) -> Callable[[], Any]:
    return lambda: scaled_dot_product_attention(query, query, query, is_causal=True)


def main() -> None:
    run_part("probe", run, __doc__)


if __name__ == "__main__":
    main()
