"""Updates on CUDA: probed and timed where they run; skipped without CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from lightning_topt.costs.optimizer import measure_update_seconds, read_optimizer

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


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"fused": True}, {"capturable": True}], ids=str
)
def test_the_seconds_of_an_update_are_those_of_the_device(options: dict[str, bool]) -> None:
    module = nn.Sequential(*(nn.Linear(4096, 4096, device=DEVICE) for _ in range(8)))
    optimizer = optim.AdamW(module.parameters(), **options)
    named = [*module.named_parameters()]
    found = measure_update_seconds([optimizer], named_parameters=named, device=DEVICE)
    expected = sum(found[name] * parameter.numel() for name, parameter in named)
    for parameter in module.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        optimizer.step()
    stop.record()
    torch.cuda.synchronize()
    assert expected == pytest.approx(start.elapsed_time(stop) / 1e4, rel=0.2)
