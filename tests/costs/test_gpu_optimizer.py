"""Updates on CUDA are probed where they run; skipped without CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from benchmarks.common import measure_update_seconds
from lightning_topt.costs.optimizer import read_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)


class OnCudaOnly(optim.SGD):
    """Stands for optimizers whose kernels only CUDA has."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            assert all(p.device.type == "cuda" for p in group["params"]), "no kernel for CPUs"
        return super().step(closure)


def test_an_optimizer_for_cuda_only_is_probed_there() -> None:
    module = nn.Linear(64, 32)  # on the CPU still, as when plans are searched
    optimizer = OnCudaOnly(module.parameters(), lr=0.1, momentum=0.9)
    named = [*module.named_parameters()]
    profile = read_optimizer([optimizer], named_parameters=named, device_type="cuda")
    assert profile.updates["weight"].state_bytes == 4 * 64 * 32
    seconds = measure_update_seconds([optimizer], named_parameters=named, device=DEVICE)
    assert all(value > 0 for value in seconds.values())
