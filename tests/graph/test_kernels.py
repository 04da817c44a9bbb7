"""Low-level calls written down and made again."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from lightning_topt.graph.capture import capture
from lightning_topt.graph.kernels import FLOPS, encode_arguments, make_call, measure
from lightning_topt.graph.op_graph import Amount, Kernel
from tests.models import GPT, Branching, ConvNet, DictBatch, batch_for


@pytest.mark.parametrize(
    "module", [GPT(), GPT(dropout=0.1), ConvNet(), Branching(), DictBatch()], ids=lambda m: type(m).__name__
)
def test_every_kernel_of_a_graph_runs_on_real_tensors(module: Any) -> None:
    graph = capture(module, batch_for(module))
    kernels = [kernel for op in graph.ops for kernel in (*op.forward, *op.backward)]
    assert len(kernels) > 8
    for kernel in kernels:
        make_call(kernel, "cpu")()


def kernel(name: str, *args: Any, **kwargs: Any) -> Kernel:
    return Kernel(name, encode_arguments(args, kwargs), Amount(), Amount())


def test_arguments_are_json_and_complete() -> None:
    x = torch.zeros(6, 4).t()
    arguments = encode_arguments(
        (x, 2, 1.5, True, None, "mean", [1, 2], float("-inf")),
        {"dtype": torch.float64, "device": torch.device("cpu"), "memory_format": torch.channels_last},
    )
    assert json.loads(json.dumps(arguments)) == arguments
    assert arguments["args"][0] == {"tensor": [[4, 6], [1, 4], "float32"]}
    assert arguments["args"][1:] == [2, 1.5, True, None, "mean", [1, 2], {"float": "-inf"}]
    assert arguments["kwargs"] == {
        "dtype": {"dtype": "float64"},
        "device": {"device": ""},
        "memory_format": {"memory_format": "channels_last"},
    }


def test_made_again_with_shape_stride_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    x = torch.zeros(6, 4, dtype=torch.bfloat16).t()
    wide = torch.zeros(4, 1).expand(4, 6)
    call = make_call(kernel("aten.add.Tensor", x, wide), "cpu")
    with torch.utils._python_dispatch.TorchDispatchMode() as _:
        pass

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.extend(args)
            return func(*args, **(kwargs or {}))

    with Spy():
        call()
    assert [(t.shape, t.stride(), t.dtype) for t in seen] == [
        ((4, 6), (1, 4), torch.bfloat16),
        ((4, 6), (1, 0), torch.float32),
    ]
    assert seen[0].float().std() > 0


def test_what_cannot_be_made_again() -> None:
    with pytest.raises(ValueError, match="unknown in this process"):
        make_call(kernel("nowhere.nothing.default", torch.zeros(2)), "cpu")
    with pytest.raises(ValueError, match="cannot be made again"):
        make_call(kernel("aten.add.Tensor", object()), "cpu")
    with pytest.raises(ValueError, match="does not run on meta"):
        make_call(kernel("aten._logcumsumexp.default", torch.zeros(2), 0), "meta")()


def test_flops_torch_does_not_know() -> None:
    q = torch.zeros(2, 4, 8, 16)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert measure(attention, (q, q, q), {}, attention(q, q, q)).flops == 2 * 2 * 2 * 4 * 8 * 8 * 16
    mv = torch.ops.aten.mv.default
    a, x = torch.zeros(3, 5), torch.zeros(5)
    assert measure(mv, (a, x), {}, mv(a, x)).flops == 2 * 3 * 5
    assert torch.ops.aten.mm in FLOPS


def test_bytes() -> None:
    add, embedding = torch.ops.aten.add.Tensor, torch.ops.aten.embedding.default
    x, bias = torch.zeros(4, 6), torch.zeros(6)
    assert measure(add, (x, bias), {}, add(x, bias)).bytes == 4 * (24 + 6 + 24)
    wide = bias.expand(4, 6)  # there once
    assert measure(add, (x, wide), {}, add(x, wide)).bytes == 4 * (24 + 6 + 24)
    table, index = torch.zeros(1000, 8), torch.zeros(3, dtype=torch.long)
    assert measure(embedding, (table, index), {}, embedding(table, index)).bytes == 3 * 8 + 2 * 3 * 8 * 4
    zero = torch.ops.aten.zero_.default
    assert measure(zero, (x,), {}, zero(x)).bytes == 4 * 24
