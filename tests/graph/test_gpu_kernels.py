"""Kernels that only CUDA has: priced, replayed, and as large as their shapes say; skipped without.

Replays run in a process of their own: one on wrong arguments may end it.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from lightning_topt.graph.kernels import hidden_bytes, measure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROGRAM = """
import sys
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from lightning_topt.graph.capture import capture
from lightning_topt.graph.kernels import is_replayable, make_call

backend, dtype, dropout = getattr(SDPBackend, sys.argv[1]), getattr(torch, sys.argv[2]), 0.1


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(64, 64, device="cuda", dtype=dtype)

    def training_step(self, batch, batch_idx):
        q = self.q(batch).view(-1, 128, 4, 16).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=dropout).mean()


with sdpa_kernel([backend]):
    graph = capture(Attention(), torch.zeros(2, 128, 64, device="cuda", dtype=dtype), device="cuda")
    kernels = [k for op in graph.ops for k in (*op.forward, *op.backward)]
    found = [k for k in kernels if "attention" in k.name]
    assert len(found) >= 2, sorted({k.name for k in kernels})
    for kernel in found:
        assert kernel.flops.at(2) > 0, kernel.name
        call = make_call(kernel, "cuda")
        for _ in range(3):
            call()
        torch.cuda.synchronize()
print("replayed", sorted({k.name for k in found}))
"""


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("EFFICIENT_ATTENTION", "float32"),
        ("FLASH_ATTENTION", "bfloat16"),
        ("CUDNN_ATTENTION", "bfloat16"),
    ],
)
def test_attention_with_dropout_is_priced_and_replayed(backend: str, dtype: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), backend, dtype],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}{done.stderr[-3000:]}"
    assert "replayed" in done.stdout


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("both_ways", [False, True])
def test_what_a_recurrent_layer_keeps_is_about_what_is_expected(kind: str, both_ways: bool) -> None:
    layer = getattr(torch.nn, kind)(128, 256, num_layers=2, bidirectional=both_ways).cuda()
    seen: list[tuple[float, float, float]] = []

    class Look(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._cudnn_rnn.default:
                place, expected = hidden_bytes(func, args)
                flops = measure(func, args, {}, out).flops
                seen.append((expected, float(out[place].nbytes), flops))
            return out

    with Look():
        layer(torch.zeros(50, 32, 128, device="cuda"))
    ((expected, actual, flops),) = seen
    assert flops > 0
    assert expected == pytest.approx(actual, rel=0.5), (kind, both_ways, expected / actual)
