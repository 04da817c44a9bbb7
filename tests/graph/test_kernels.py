"""Low-level calls written down and made again."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from lightning_topt.graph.capture import capture
from lightning_topt.graph.flop_formulas import FLOPS
from lightning_topt.graph.kernels import encode_arguments, make_call, measure
from lightning_topt.graph.op_graph import Amount, Kernel
from tests.models import GPT, Branching, ConvNet, DictBatch, batch_for


@pytest.mark.parametrize(
    "module",
    [GPT(), GPT(dropout=0.1), ConvNet(), Branching(), DictBatch()],
    ids=lambda m: type(m).__name__,
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
        {
            "dtype": torch.float64,
            "device": torch.device("cpu"),
            "memory_format": torch.channels_last,
        },
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
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
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
    assert (
        measure(embedding, (table, index), {}, embedding(table, index)).bytes
        == 3 * 8 + 2 * 3 * 8 * 4
    )
    added, rows = torch.ops.aten.scatter_add_.default, torch.zeros(3, 8)
    places = torch.zeros(3, 8, dtype=torch.long)
    assert (
        measure(added, (table, 0, places, rows), {}, added(table, 0, places, rows)).bytes
        == 24 * 8 + 3 * 24 * 4
    )
    zero = torch.ops.aten.zero_.default
    assert measure(zero, (x,), {}, zero(x)).bytes == 4 * 24


def test_allocated_bytes_are_those_of_new_storages() -> None:
    x = torch.zeros(4, 8)
    aten = torch.ops.aten
    assert measure(aten.mul.Tensor, (x, 2.0), {}, x * 2).allocated == x.nbytes
    assert measure(aten.mul_.Tensor, (x, 2.0), {}, x).allocated == 0
    mean, std = torch.zeros(4), torch.zeros(4)
    assert measure(aten.std_mean.correction, (x, [1]), {}, (std, mean)).allocated == 32


def test_convolutions_on_cpu_hold_copies_of_their_arguments() -> None:
    x, w = torch.zeros(2, 32, 8, 8), torch.zeros(64, 32, 3, 3)
    options = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    y = torch.convolution(x, w, None, *options)
    forward = measure(torch.ops.aten.convolution.default, (x, w, None, *options), {}, y)
    assert forward.workspace == x.nbytes + w.nbytes
    assert forward.allocated == 2 * y.nbytes  # and oneDNN's copy of it
    for mask, passes in (((True, True, False), 2), ((False, True, False), 1)):
        arguments = (y, x, w, None, *options, list(mask))
        results = torch.ops.aten.convolution_backward.default(*arguments)
        backward = measure(torch.ops.aten.convolution_backward.default, arguments, {}, results)
        assert backward.workspace == x.nbytes + w.nbytes + y.nbytes
        assert (
            backward.allocated
            == sum(t.nbytes for t in results[:2] if t is not None)
            + (passes - 1) * backward.workspace
        )
    narrow = torch.zeros(2, 3, 8, 8)  # channels padded to 16
    again = measure(torch.ops.aten.convolution.default, (x, w[:3], None, *options), {}, narrow)
    assert again.workspace == x.nbytes + w[:3].nbytes + narrow.nbytes * 16 // 3
    assert measure(torch.ops.aten.mm.default, (x[0, 0], x[0, 0]), {}, x[0, 0]).workspace == 0


def test_the_workspace_of_an_lstm_is_kept_for_backward() -> None:
    class Recurrent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = torch.nn.LSTM(16, 32, batch_first=True)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.lstm(batch)[0].mean()

    graph = capture(Recurrent(), torch.zeros(4, 10, 16))
    assert any("mkldnn_rnn" in kernel.name for op in graph.ops for kernel in op.forward)
    kept = sum(segment.kept_bytes.at(4) for segment in graph.timeline)
    assert kept > 32 * 4 * 10 * 32
