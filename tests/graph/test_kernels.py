"""Low-level calls written down and made again."""

from __future__ import annotations

import subprocess
import textwrap
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from lightning_topt.graph.capture import capture
from lightning_topt.graph.kernels import FLOPS, encode_arguments, hidden_bytes, make_call, measure
from lightning_topt.graph.op_graph import Amount, Kernel
from tests.models import GPT, Branching, ConvNet, DictBatch, batch_for
from tests.preloaded import preloaded_topt


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


def test_flops_torch_does_not_know() -> None:
    q = torch.zeros(2, 4, 8, 16)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert measure(attention, (q, q, q), {}, attention(q, q, q)).flops == 2 * 2 * 2 * 4 * 8 * 8 * 16
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


def test_recurrent_layers_of_cudnn_have_a_price() -> None:
    # a call as torch makes it, on shapes alone: 2 layers both ways, 5 steps, 3 samples
    layer = torch.nn.LSTM(8, 16, num_layers=2, bidirectional=True, device="meta")
    x, hx = torch.zeros(5, 3, 8, device="meta"), torch.zeros(4, 3, 16, device="meta")
    flat = torch.zeros(sum(w.numel() for w in layer.parameters()), device="meta")
    weights = list(layer.parameters())
    args = (x, weights, 4, flat, hx, hx, 2, 16, 0, 2, False, 0.0, True, True, [], None)
    cudnn = torch.ops.aten._cudnn_rnn.default
    found = measure(cudnn, args, {}, cudnn(*args))
    # per direction and step of a sample: 4 gates from the input (8, then both ways 32) and 16 units
    products = 4 * 16 * (8 + 16) + 4 * 16 * (32 + 16)
    assert found.flops == 2 * 2 * 5 * 3 * products
    place, kept = hidden_bytes(cudnn, args)
    assert cudnn(*args)[place].dtype == torch.uint8  # the reserve
    assert kept == 4 * 5 * 3 * 2 * 2 * 16 * 6


@pytest.mark.parametrize("name", ["philox_seed", "philox_offset"])
def test_what_cuda_reads_in_host_memory_is_made_there(name: str) -> None:
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    q, row, seed = torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 32), torch.zeros((), dtype=torch.long)
    args = (q, q, q, q, None, q, row, seed, seed, 0.1, [True, True, True, False])
    seen: list[Any] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func is backward:
                seen.extend(args)
            return func(*args, **(kwargs or {}))

    call = make_call(kernel(str(backward), *args), "meta")
    with Look():
        call()
    index = [argument.name for argument in backward._schema.arguments].index(name)
    assert seen[index].device.type == "cpu" and seen[0].device.type == "meta"


# Kernels are replayed on invented arguments, and none may end the process: everything runs in a
# process of its own.


PROGRAM = """
import warnings
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count
from lightning_topt.costs.calibrate import measure_kernels
from lightning_topt.graph.capture import capture
from lightning_topt.graph.kernels import encode_arguments, make_call
from lightning_topt.graph.op_graph import Kernel
from lightning_topt.graph.op_graph import Amount

warnings.simplefilter("ignore")
torch.set_num_threads(1)
tried = set()

class Replay(TorchDispatchMode):
    # Makes every call that is seen once more on invented arguments, as a measurement does.
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        try:
            encoded = encode_arguments(args, kwargs or {})
            call = make_call(Kernel(str(func), encoded, Amount(), Amount()), "cpu")
            tried.add(str(func))
            call()
        except (ValueError, RuntimeError, IndexError, TypeError):
            pass
        return out

x = torch.rand(6, 5, 8, requires_grad=True)
m = x[0]

def recurrent(cls):
    out = cls(8, 8, num_layers=2, bidirectional=True, dropout=0.1)(x)[0].sum()
    packed = pack_padded_sequence(x, torch.tensor([6, 4, 3, 2, 1]), enforce_sorted=True)
    (out + cls(8, 8)(packed)[0].data.sum() + cls(8, 8, batch_first=True)(x)[0].sum()).backward()

def indexing():
    torch.masked_select(m, m > 0.5).sum().backward()
    y = torch.zeros(5, 8)
    y[torch.tensor([4, 4])] = 1.0
    y.index_put((torch.tensor([1, 3]),), torch.ones(2, 8), accumulate=True)
    y[y > 0] = 2.0
    y.scatter_add(0, torch.full((5, 8), 4), y)
    y.masked_scatter(y > 0, torch.ones(40))
    y.take(torch.tensor([39]))
    y.put_(torch.tensor([39]), torch.ones(1))
    m.take_along_dim(torch.full((5, 1), 7), 1).sum().backward()

def pooling():
    image = torch.rand(2, 3, 8, 8, requires_grad=True)
    pooled, where = F.max_pool2d(image, 2, return_indices=True)
    up = F.max_unpool2d(pooled, where, 2)
    warped = F.grid_sample(
        image, F.affine_grid(torch.eye(2, 3).repeat(2, 1, 1), (2, 3, 8, 8), align_corners=False)
    )
    (
        up + warped + nn.Conv2d(3, 3, 3, padding=1)(image) + nn.BatchNorm2d(3)(image)
        + nn.GroupNorm(3, 3)(image)
    ).sum().backward()
    F.fractional_max_pool2d(image, 2, output_size=4).sum().backward()
    F.adaptive_max_pool2d(image, 3).sum().backward()

def attention():
    nn.TransformerEncoderLayer(8, 2, dim_feedforward=16)(x).sum().backward()
    F.scaled_dot_product_attention(x, x, x, attn_mask=torch.zeros(5, 5)).sum().backward()
    nn.TransformerEncoderLayer(8, 2, dim_feedforward=16).eval()(x.detach())

for case in (lambda: recurrent(nn.LSTM), lambda: recurrent(nn.GRU), indexing, pooling, attention):
    with Replay():
        case()

class Speech(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(8, 8)

    def training_step(self, batch, batch_idx):
        return self.rnn(batch)[0].square().mean()

graph = capture(Speech(), torch.rand(4, 5, 8))
assert any("mkldnn_rnn_layer" in kernel.name for op in graph.ops for kernel in op.forward)
measured = measure_kernels(graph, device=torch.device("cpu"), budget_seconds=0.2)
assert measured and not any("rnn_layer" in name for name, _ in measured)
assert {
    "aten.native_batch_norm.default", "aten.mm.default", "aten.native_layer_norm.default"
} <= tried, tried
assert not any("rnn" in name for name in tried), tried
print("survived", len(tried))
"""


def test_no_operator_ends_the_process() -> None:
    done = subprocess.run(
        [preloaded_topt(), "-c", textwrap.dedent(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}{done.stderr[-3000:]}"
    assert "survived" in done.stdout


def test_unknown_operators_are_refused() -> None:
    for name in ("aten._ctc_loss.default", "aten.linalg_inv_ex.default", "c10d.barrier.default"):
        with pytest.raises(ValueError, match="misread"):
            make_call(kernel(name), "cpu")


# ---- recurrent layers of cuDNN, made again by modules


def recurrent(kind: str, *, backward: bool, dropout: float = 0.0, sizes: tuple[int, ...] = ()):
    """A kernel of two layers, both ways, of 4 units on 7 steps of 3 samples of 5 values."""
    gates = {"lstm": 4, "gru": 3}.get(kind, 1)
    weights = []
    for inputs in (5, 8):
        for _ in range(2):
            weights += [torch.zeros(gates * 4, inputs), torch.zeros(gates * 4, 4)]
            weights += [torch.zeros(gates * 4), torch.zeros(gates * 4)]
    x, state, output = torch.zeros(7, 3, 5), torch.zeros(4, 3, 4), torch.zeros(7, 3, 8)
    mode = ("relu", "tanh", "lstm", "gru").index(kind)
    given = [x, weights, 4, torch.zeros(99), state, state if kind == "lstm" else None]
    given += [output, output, None, None] if backward else []
    given += [mode, 4, 0, 2, False, dropout, True, True, list(sizes), None]
    given += [torch.zeros(0, dtype=torch.uint8), [True] * 4] if backward else []
    return kernel(f"aten._cudnn_rnn{'_backward' if backward else ''}.default", *given)


class Operators(TorchDispatchMode):
    """Shapes of the tensors that calls return."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.shapes.append(tuple(found.shape))
        return found


@pytest.mark.parametrize("kind", ["relu", "tanh", "lstm", "gru"])
def test_recurrent_layers_are_made_again(kind: str) -> None:
    forward, backward = (make_call(recurrent(kind, backward=each), "cpu") for each in (False, True))
    with Operators() as seen:
        forward()
    assert (7, 3, 8) in seen.shapes
    with Operators() as seen:
        backward()
        backward()
    # gradients of the input and of weights, twice
    assert seen.shapes.count((7, 3, 5)) >= 2


def test_recurrent_layers_that_are_not_made_again() -> None:
    for options in ({"dropout": 0.1}, {"sizes": (3, 2)}):
        with pytest.raises(ValueError, match="dropout or of packed"):
            make_call(recurrent("lstm", backward=False, **options), "cpu")


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_attention_whose_heads_share_keys_counts_as_if_they_were_repeated(kind: str) -> None:
    query, shared = torch.empty(2, 8, 16, 32), torch.empty(2, 2, 24, 32)
    repeated = shared.repeat_interleave(4, dim=1).shape
    aten, name = torch.ops.aten, f"_scaled_dot_product_{kind}_attention"
    forward = FLOPS[getattr(aten, name)](query, shared, shared, out_val=None)
    backward = FLOPS[getattr(aten, f"{name}_backward")](query, query, shared, shared, out_val=None)
    assert forward == sdpa_flop_count(query.shape, repeated, repeated)
    assert backward == sdpa_backward_flop_count(query.shape, query.shape, repeated, repeated)
