"""What is measured and remembered on CUDA; skipped without CUDA."""

from __future__ import annotations

import json

import pytest
import torch

from lightning_topt.costs.calibrate import calibrate
from lightning_topt.costs.measurements import describe_setup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)


def test_the_set_up_names_the_driver_and_the_precision() -> None:
    matmul = torch.backends.cuda.matmul
    before, was = describe_setup(DEVICE, num_nodes=1), matmul.fp32_precision
    assert before["machines"][0]["driver"]
    matmul.fp32_precision = "tf32"
    try:
        after = describe_setup(DEVICE, num_nodes=1)
    finally:
        matmul.fp32_precision = was
    assert after["settings"] != before["settings"]
    assert after == json.loads(json.dumps(after))  # as the file gives it back


def test_calibration_gives_its_memory_back_and_measures_all() -> None:
    before = torch.cuda.memory_reserved(DEVICE)
    device = calibrate(device=DEVICE).device
    assert torch.cuda.memory_reserved(DEVICE) <= before + (256 << 20)  # of cuBLAS
    total = torch.cuda.mem_get_info(DEVICE)[1]
    assert device.memory_bytes < total  # the context and the libraries have some of it
    rates = [device.memory_bandwidth, *device.flops.values(), device.launch_seconds]
    assert all(rate > 0 for rate in rates)  # how large: python -m benchmarks.gpu_report --only 2
