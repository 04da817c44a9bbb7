"""Part 2: what `calibrate` says of the device against timings that share no code with it.

Independent timings are by CUDA events over several milliseconds, and replayed graphs where the
host may be slower than the device. `predicted` is the library's constant, `measured` the timing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention, softmax

from benchmarks.common import measure_update_seconds
from benchmarks.gpu_report.reporting import (
    MIB,
    Report,
    device_seconds,
    graph_seconds,
    host_seconds,
    memory_columns,
    run_part,
    synchronize,
)
from lightning_topt.costs.calibrate import calibrate
from lightning_topt.costs.cluster import Cluster, Device
from lightning_topt.costs.measuring import time_call
from lightning_topt.costs.optimizer import read_optimizer

_GIB = 1024 * MIB
_BUDGET_SECONDS = 1.5  # as the strategy calibrates
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(report: Report) -> None:
    clusters: list[Cluster] = []
    for number in (1, 2):
        with report.attempt(f"calibrate, {number}") as row:
            start = time.perf_counter()
            cluster = calibrate(device=report.device, budget_seconds=_BUDGET_SECONDS)
            row["took_s"] = round(time.perf_counter() - start, 2)
            clusters.append(cluster)
            report.note(f"cluster {number}", cluster=cluster.to_dict())
    device = clusters[-1].device if clusters else Device("none", 1, {"float32": 1.0}, 1.0)
    if len(clusters) == 2:
        repeated(report, clusters[0].device, clusters[1].device)
    copies(report, device)
    products(report, device)
    small_calls(report, device)
    kernels(report)
    updates(report, device)
    with report.attempt("memory") as row:
        row |= memory_columns(report.device)


def repeated(report: Report, first: Device, second: Device) -> None:
    """Rows of what two calibrations say of the same constant."""
    names = ("memory_bandwidth", "op_overhead_seconds", "launch_seconds", "framework_seconds")
    for name in names:
        one, other = getattr(first, name), getattr(second, name)
        if one:
            report.row(f"again: {name}", predicted_again=one, measured_again=other)
    for dtype, rate in first.flops.items():
        report.row(f"again: {dtype}", predicted_again=rate, measured_again=second.flops[dtype])


def copies(report: Report, device: Device) -> None:
    """The memory bandwidth: copies far larger than the cache, and one that is not."""
    sizes = [16 * MIB] if report.quick else [64 * MIB, 512 * MIB, 2 * _GIB]
    for size in sizes:
        with report.attempt(f"copy of {size // MIB} MiB") as row:
            source = torch.ones(size // 4, device=report.device)
            target = torch.empty_like(source)
            copy = _copying(target, source)
            row["measured_rate"] = 2 * size / device_seconds(copy, report.device)
            row["predicted_rate"] = device.memory_bandwidth
    with report.attempt("addition of two vectors, in place") as row:
        size = sizes[-1] // 2
        one, other = (torch.ones(size // 4, device=report.device) for _ in range(2))
        row["measured_rate"] = 3 * size / device_seconds(_adding(one, other), report.device)
        row["predicted_rate"] = device.memory_bandwidth


def products(report: Report, device: Device) -> None:
    """FLOP/s of square products per dtype and size, also with TF32."""
    sizes = [256, 512] if report.quick else [1024, 2048, 4096, 8192, 16384]
    for dtype in _DTYPES[: 2 if report.device.type == "cpu" else 3]:
        name = str(dtype).removeprefix("torch.")
        for size in sizes:
            if dtype == torch.float32 and size > 8192:
                continue
            with report.attempt(f"product {name} {size}") as row:
                row["measured_rate"] = _product_rate(report, dtype, size)
                row["predicted_rate"] = device.flops.get(name)
    if report.device.type == "cuda":
        with report.attempt("product tf32 8192") as row:
            before = torch.backends.cuda.matmul.allow_tf32
            torch.backends.cuda.matmul.allow_tf32 = True
            try:
                row["measured_rate"] = _product_rate(report, torch.float32, 8192)
            finally:
                torch.backends.cuda.matmul.allow_tf32 = before


def _product_rate(report: Report, dtype: torch.dtype, size: int) -> float:
    left, right = (torch.randn(size, size, device=report.device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    seconds = device_seconds(
        lambda: torch.mm(left, right, out=out), report.device, least_seconds=0.02, batches=3
    )
    return 2.0 * size**3 / seconds


def small_calls(report: Report, device: Device) -> None:
    """What a kernel costs at least on the device, and what the host takes to issue one."""
    tiny = torch.zeros(1, device=report.device)

    def add() -> None:
        tiny.add_(1)

    with report.attempt("small kernel, issued by the host") as row:
        row["measured_call_seconds"] = device_seconds(add, report.device)
        row["predicted_call_seconds"] = device.op_overhead_seconds
    if report.device.type == "cuda":
        with report.attempt("small kernel, in a graph") as row:
            row["measured_call_seconds"] = graph_seconds(add, calls=200)
            row["predicted_call_seconds"] = device.op_overhead_seconds
    with report.attempt("host: small kernel") as row:
        row["measured_launch_seconds"] = host_seconds(add, report.device, calls=1000)
        row["predicted_launch_seconds"] = device.launch_seconds or None
    with report.attempt("host: forward and backward of small layers, per kernel") as row:
        step, kernels_of_step = _small_network(report)
        row["measured_launch_seconds"] = device_seconds(step, report.device) / kernels_of_step
        row["predicted_launch_seconds"] = device.launch_seconds or None
        row["kernels"] = kernels_of_step


def _small_network(report: Report) -> tuple[Callable[[], None], int]:
    """Return a step whose kernels take the device nearly no time, and how many these are."""
    layers = [nn.Linear(32, 32, device=report.device) for _ in range(50)]
    net = nn.Sequential(*(module for layer in layers for module in (layer, nn.ReLU())))
    x = torch.ones(16, 32, device=report.device)

    def step() -> None:
        net(x).sum().backward()
        for parameter in net.parameters():
            parameter.grad = None

    # addmm and relu; threshold, two products and a sum in backward
    return step, 50 * 6


def kernels(report: Report) -> None:
    """Kernels as `measure_kernels` times them, against replayed graphs and long batches."""
    rows = 64 if report.quick else 8192
    width, heads = 768, 12
    for dtype in (torch.bfloat16, torch.float32):
        short = str(dtype).removeprefix("torch.")

        def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape, device=report.device, dtype=dtype)

        x, wide, scale = new(rows, width), new(rows, 4 * width), new(width)
        weight, up = new(width, width), new(width, 4 * width)
        samples = max(rows // 1024, 1)
        query = new(samples, heads, rows // samples, width // heads)
        calls: dict[str, Callable[[], Any]] = {
            "layer norm": lambda x=x, s=scale: layer_norm(x, (width,), s, s),
            "gelu": lambda x=wide: gelu(x),
            "addition": lambda x=x: x + x,
            "softmax": lambda x=wide: softmax(x, -1),
            "product 768": lambda x=x, w=weight: x @ w,
            "product 3072": lambda x=x, w=up: x @ w,
            "attention": lambda q=query: scaled_dot_product_attention(q, q, q, is_causal=True),
            "sum of rows": lambda x=wide: x.sum(0),
        }
        for name, call in calls.items():
            with report.attempt(f"{name} in {short}") as row:
                row["predicted_kernel_seconds"] = time_call(
                    call, device=report.device, budget_seconds=0.0, max_repeats=2
                )
                row["events_kernel_seconds"] = device_seconds(call, report.device)
                row["measured_kernel_seconds"] = row["events_kernel_seconds"]
                if report.device.type == "cuda":
                    row["measured_kernel_seconds"] = graph_seconds(call)


def updates(report: Report, device: Device) -> None:
    """Steps of AdamW and SGD on the parameters of a GPT of 124 M, against their predictions."""
    width, layers = (32, 2) if report.quick else (768, 12)
    shapes = [(50304, width), (1024, width)] if not report.quick else [(512, width)]
    for _ in range(layers):
        shapes += [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
        shapes += [(width,)] * 6
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-4),
        "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=True),
        "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
        "AdamW loop": lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=False),
        "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9),
    }
    for name, make in makers.items():
        with report.attempt(f"update by {name}") as row:
            parameters = [
                nn.Parameter(torch.zeros(shape, device=report.device)) for shape in shapes
            ]
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            named = [(str(index), p) for index, p in enumerate(parameters)]
            optimizer = make(parameters)
            profile = read_optimizer(
                [optimizer], named_parameters=named, device_type=report.device.type
            )
            seconds = measure_update_seconds(
                [optimizer], named_parameters=named, device=report.device
            )
            timed = replace(profile, seconds_per_element=seconds)
            row["predicted_update_seconds"] = sum(
                timed.update_seconds(key, numel=p.numel(), device=device) for key, p in named
            )
            row["formula_update_seconds"] = sum(
                profile.update_seconds(key, numel=p.numel(), device=device) for key, p in named
            )
            predicted_state = sum(profile.state_bytes(key) for key, _ in named)
            optimizer.step()
            synchronize(report.device)
            row["predicted_state_bytes"] = predicted_state
            row["measured_state_bytes"] = sum(
                value.nbytes
                for state in optimizer.state.values()
                for value in state.values()
                if torch.is_tensor(value)
            )
            row["measured_update_seconds"] = device_seconds(
                optimizer.step, report.device, least_seconds=0.03, batches=3
            )
            row["host_update_seconds"] = host_seconds(optimizer.step, report.device, calls=5)


def _copying(target: Tensor, source: Tensor) -> Callable[[], Any]:
    return lambda: target.copy_(source)


def _adding(one: Tensor, other: Tensor) -> Callable[[], Any]:
    return lambda: one.add_(other)


def main() -> None:
    run_part("constants", run, __doc__)


if __name__ == "__main__":
    main()
