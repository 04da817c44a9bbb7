"""Steps captured on fake CUDA tensors against real ones: the same operators, and what they cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_topt.costs.calibrate import measure_kernels
from lightning_topt.costs.compute import kernel_key
from lightning_topt.graph.capture import capture
from lightning_topt.graph.module_copy import fake_copy
from lightning_topt.graph.op_graph import OpGraph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


# Priced by formulas: what cuDNN keeps for its backward has no size on fake tensors.
_BY_FORMULA = {"cudnn_batch_norm_backward"}
_COPIES = {"aten::detach", "aten::copy_", "aten::new_empty_strided"}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(128, 384), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (2, 64)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(128, 64, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(64, 64, 3, padding=1)
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.convolution(x))


class Step(L.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).float().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Calls(TorchDispatchMode):
    """Counts calls of operators with the shapes that they return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple | list) and out else out
        # A gradient that autograd may not keep is copied; which those are is not the step's.
        own = not func.is_view and func._schema.name not in _COPIES
        if isinstance(first, Tensor) and own:
            self.seen[f"{func} {tuple(first.shape)} {first.dtype}"] += 1
        return out


NETS: list[tuple[type[nn.Module], dict[str, str]]] = [
    (Attention, {"forward": "scaled_dot_product", "backward": "scaled_dot_product"}),
    (Recurrent, {"forward": "rnn", "backward": "rnn"}),
    (Normed, {"forward": "batch_norm", "backward": "batch_norm"}),
]
both = pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
each = pytest.mark.parametrize("net, names", NETS, ids=[net.__name__ for net, _ in NETS])


def context(device: torch.device, dtype: torch.dtype | None) -> Any:
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)


def calls_of(run: Callable[[], Tensor]) -> Counter[str]:
    with Calls() as calls:
        run().backward()
    return calls.seen


def captured(net: type[nn.Module], device: torch.device, dtype: Any) -> OpGraph:
    module = Step(net()).to(device)
    batch = torch.randn(4, 64, 128, device=device)
    return capture(
        module, batch, device=device.type, forward_context=lambda: context(device, dtype)
    )


@both
@each
def test_fake_tensors_take_the_operators_of_real_ones(
    net: type[nn.Module], names: dict[str, str], dtype: Any, device: torch.device
) -> None:
    module = Step(net()).to(device)
    batch = torch.randn(4, 64, 128, device=device)
    copied, mode = fake_copy(module, device=device.type)

    def step(of: Step, x: Tensor) -> Tensor:
        with context(device, dtype):
            return of.training_step(x, 0)

    real = calls_of(lambda: step(module, batch))
    with mode:
        fake_batch = torch.empty(4, 64, 128, device=device)
        fake = calls_of(lambda: step(copied, fake_batch))
    assert fake == real


@both
@each
def test_heavy_kernels_have_costs_and_all_but_a_few_are_replayed(
    net: type[nn.Module], names: dict[str, str], dtype: Any, device: torch.device
) -> None:
    graph = captured(net, device, dtype)
    seconds = measure_kernels(graph, device=device, budget_seconds=2.0)
    for direction, name in names.items():
        found = [
            kernel
            for op in graph.ops
            for kernel in getattr(op, direction)
            if name in kernel.name or "mkldnn" in kernel.name
        ]
        assert found, (direction, [k.name for op in graph.ops for k in getattr(op, direction)])
        for kernel in found:
            assert kernel.bytes.at(4) > 0
            assert "batch_norm" in name or kernel.flops.at(4) > 0, kernel.name
            replayed = kernel.name.split(".")[1] not in _BY_FORMULA
            assert (kernel_key(kernel) in seconds) == replayed, kernel.name
