"""What is measured and remembered on CUDA; skipped without CUDA."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from lightning_topt.costs.calibrate import calibrate
from lightning_topt.costs.measurements import describe_setup
from lightning_topt.costs.measuring import time_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)


def test_the_set_up_names_the_libraries_and_the_precision() -> None:
    matmul = torch.backends.cuda.matmul
    before, was = describe_setup(DEVICE, num_nodes=1), matmul.fp32_precision
    driver, cuda, cudnn, nccl = before["machines"][0]["libraries"]
    assert driver and cuda and cudnn and len(nccl) >= 3
    matmul.fp32_precision = "tf32"
    try:
        after = describe_setup(DEVICE, num_nodes=1)
    finally:
        matmul.fp32_precision = was
    assert after["settings"] != before["settings"]
    assert after == json.loads(json.dumps(after))  # as the file gives it back


def graph_seconds(call: Callable[[], object], *, replays: int = 50) -> float:
    """Return the seconds of a call, from a graph of a hundred of them: no host is in it."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            call()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(replays):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3 / (100 * replays)


@pytest.mark.parametrize("size", [512, 2048, 4096])
def test_a_product_takes_what_a_graph_of_it_takes(size: int) -> None:
    left, right = torch.rand(2, size, size, device=DEVICE, dtype=torch.bfloat16)
    out = torch.empty_like(left)

    def call() -> None:
        torch.mm(left, right, out=out)

    found = time_kernel(call, device=DEVICE, budget_seconds=0.0)
    # events and a cold cache cost a few microseconds
    assert found == pytest.approx(graph_seconds(call), rel=0.15, abs=8e-6)


def test_a_tiny_kernel_takes_less_than_its_launch_by_the_host() -> None:
    tiny = torch.zeros(1, device=DEVICE)
    found = time_kernel(lambda: tiny.add_(1), device=DEVICE, budget_seconds=0.0)
    assert 5e-7 < found < 1e-5


def test_the_calibrated_device_is_this_one() -> None:
    before = torch.cuda.memory_reserved(DEVICE)
    device = calibrate(device=DEVICE).device
    assert torch.cuda.memory_reserved(DEVICE) <= before + (256 << 20)  # of cuBLAS
    free, total = torch.cuda.mem_get_info(DEVICE)
    assert device.memory_bytes < total  # the context and the libraries have some of it
    assert device.memory_bytes == pytest.approx(free + torch.cuda.memory_reserved(DEVICE), rel=0.02)
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source)
    start.record()
    for _ in range(5):
        target.copy_(source)
    stop.record()
    torch.cuda.synchronize()
    bandwidth = 5 * 2 * source.nbytes / (start.elapsed_time(stop) / 1e3)
    assert device.memory_bandwidth == pytest.approx(bandwidth, rel=0.1)
    assert 5e-7 < device.op_overhead_seconds < 1e-5
    assert 1e-6 < device.launch_seconds < 1e-4
