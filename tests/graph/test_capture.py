"""The captured graph against hand formulas and against real steps on real tensors."""

from __future__ import annotations

import random
import resource
from dataclasses import replace
from itertools import pairwise
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn

from lightning_topt.graph.capture import capture
from lightning_topt.graph.op_graph import OpGraph, StepMemory
from tests.graph.measure import BlockMemory, allocator_peaks, flops_of, run_step, saved_bytes
from tests.models import GPT, MLP, Branching, CalledTwice, ConvNet, DictBatch, batch_for

MODELS = [
    GPT(tied=True),
    GPT(dropout=0.1),
    ConvNet(),
    MLP(),
    Branching(),
    CalledTwice(),
    DictBatch(),
]
MODEL_IDS = ["gpt-tied", "gpt-dropout", "cnn", "mlp", "branching", "called-twice", "dict"]
every_model = pytest.mark.parametrize("module", MODELS, ids=MODEL_IDS)


def flops(graph: OpGraph, direction: str, batch_size: int) -> float:
    return sum(flops_of(op, direction, batch_size) for op in graph.ops)


# ---- compute -------------------------------------------------------------------------------------


def test_flops_of_linear_layers() -> None:
    graph = capture(MLP((16, 64, 32, 8)), torch.zeros(4, 16))
    weights = 16 * 64 + 64 * 32 + 32 * 8
    for batch_size in (4, 7):
        assert flops(graph, "forward", batch_size) == 2 * batch_size * weights
        # The first layer needs no gradient of its input.
        assert flops(graph, "backward", batch_size) == 2 * batch_size * (2 * weights - 16 * 64)


def test_flops_of_a_gpt() -> None:
    layers, width, heads, vocab, time, batch_size = 3, 16, 2, 32, 8, 4
    module = GPT(layers, width, heads, vocab, time)
    graph = capture(module, batch_for(module, batch_size))
    matmuls = 2 * batch_size * time * (layers * 12 * width**2 + width * vocab)
    # of the causal half of the scores; torch counts the masked half too
    attention = layers * 2 * batch_size * time * time * width
    assert flops(graph, "forward", batch_size) == matmuls + attention
    # Flash attention computes its scores again: five products instead of two.
    assert flops(graph, "backward", batch_size) == 2 * matmuls + attention * 5 / 2


# ---- parameters, operators, edges ----------------------------------------------------------------


def test_parameters_and_tying() -> None:
    module = GPT(tied=True)
    module.norm.requires_grad_(False)
    graph = capture(module, batch_for(module))
    by_name = {parameter.name: parameter for parameter in graph.parameters}
    assert {name: (p.shape, p.trainable) for name, p in by_name.items()} == {
        name: (tuple(p.shape), p.requires_grad) for name, p in module.named_parameters()
    }
    assert by_name["tokens.weight"].aliases == ("head.weight",)
    assert [p.name for p in graph.parameters if p.aliases] == ["tokens.weight"]
    readers = [op.name for op in graph.ops if "tokens.weight" in op.parameters]
    assert readers == ["tokens", "head"]
    assert (
        by_name["tokens.weight"].block == "" and by_name["blocks.1.up.weight"].block == "blocks.1"
    )


def test_operators_and_edges_of_a_chain() -> None:
    graph = capture(MLP(), batch_for(MLP()))
    names = ["net.0", "net.1", "net.2", "net.3", "net.4", ":pow_1", ":mean_1"]
    assert [op.name for op in graph.ops] == names
    assert [(edge.source, edge.target) for edge in graph.edges] == list(pairwise(names))
    assert graph.edges[0].tensor.shape == (4, 64) and graph.edges[0].tensor.batch_dim == 0
    assert [op.kind for op in graph.ops] == ["Linear", "ReLU"] * 2 + [
        "Linear",
        "aten.pow",
        "aten.mean",
    ]


# ---- memory --------------------------------------------------------------------------------------


@every_model
def test_saved_bytes_are_those_of_a_real_step(module: Any) -> None:
    graph = capture(module, batch_for(module, 4))
    assert sum(op.saved_bytes.at(4) for op in graph.ops) == saved_bytes(
        fresh(module), batch_for(module, 4)
    )


def fresh(module: Any) -> Any:
    """An equal module of its own, which a test may run."""
    copied = type(module)()
    if isinstance(module, GPT):
        copied = GPT(
            tied=module.head.weight is module.tokens.weight, dropout=module.blocks[0].dropout
        )
    return copied


class Sums(Branching):
    """The gradients of three branches are added: in place, but not to a view."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        x = self.first(batch) * 2
        if self.deep:
            return (x * 2 + x * 3 + x * 4).mean()
        return (x.t() * 2 + x.t() * 3 + x.t() * 4).mean()


WIDE = [
    Sums(8),
    Sums(8, deep=False),
    GPT(4, 64, 4, 256, 64, tied=True),
    GPT(2, 64, 4, 256, 64, dropout=0.1),
]
WIDE += [ConvNet(8), MLP((512, 512, 512, 512)), Branching(256), CalledTwice(256), DictBatch(256)]


@pytest.mark.parametrize(
    "module",
    WIDE,
    ids=[
        "sums",
        "sums-of-views",
        "gpt-tied",
        "gpt-dropout",
        "cnn",
        "mlp",
        "branching",
        "twice",
        "dict",
    ],
)
def test_peaks_are_those_of_the_real_allocator(module: Any) -> None:
    batch = batch_for(module, 16)
    step = capture(module, batch).step
    # The allocator counts parameter gradients, and does not see oneDNN's own memory.
    tensors = tuple(replace(tensor, gradient_of=None) for tensor in step.tensors)
    live = StepMemory(replace(step, tensors=tensors, workspaces=()), 16).live
    predicted = live[: step.backward_start].max(), live[step.backward_start :].max()
    # Kernels put a few scalars of their own beside the tensors.
    assert predicted == pytest.approx(allocator_peaks(module, batch), rel=1e-3, abs=64)


def test_forward_segments_are_those_of_a_real_step() -> None:
    module = GPT(3)
    batch = batch_for(module)
    graph = capture(module, batch)
    blocks = [block.name for block in graph.blocks if block.name]
    memory = BlockMemory(module, list(batch), blocks)
    with memory:
        loss = run_step(module, batch)
    kept, peaks = 0.0, {}
    for segment in graph.timeline:
        peaks[segment.block] = max(
            peaks.get(segment.block, 0), kept + segment.forward_peak_bytes.at(4)
        )
        kept += segment.kept_bytes.at(4)
    assert peaks == memory.forward_peaks
    assert kept == sum(memory.live.values()) and loss.numel() == 1


def test_recomputing_keeps_an_input_that_nothing_else_keeps() -> None:
    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.second = nn.Sequential(nn.ReLU(), nn.Linear(8, 8))
            self.third = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.third(self.second(self.first(batch))).square().mean()

    graph = capture(Net(), torch.zeros(4, 8))
    sizes = {s.block: (s.kept_bytes.per_sample, s.output_bytes.per_sample) for s in graph.timeline}
    # ReLU saves its output, not its input, which plain training frees.
    assert sizes["first"] == (0, 0)
    # The outputs of ReLU and Linear are kept; recomputing keeps Linear's output and the input of
    # ReLU.
    assert sizes["second"] == (32 + 32, 32 + 32)


@every_model
def test_amounts_are_linear_in_the_batch(module: Any) -> None:
    small, large = (capture(module, batch_for(module, size)) for size in (4, 12))
    for a, b in zip(small.ops, large.ops, strict=True):
        assert flops_of(a, "forward", 12) == flops_of(b, "forward", 12) and flops_of(
            a, "backward", 12
        ) == flops_of(b, "backward", 12)
        assert a.saved_bytes.at(12) == b.saved_bytes.at(12)
        assert [k.bytes.at(12) for k in a.forward] == [k.bytes.at(12) for k in b.forward]
        for spec, other in zip(a.outputs, b.outputs, strict=True):
            scaled = [3 * n if dim == spec.batch_dim else n for dim, n in enumerate(spec.shape)]
            assert tuple(scaled) == other.shape
    for s, t in zip(small.timeline, large.timeline, strict=True):
        assert s.kept_bytes.at(12) == pytest.approx(t.kept_bytes.at(12))
        assert s.output_bytes.at(12) == pytest.approx(t.output_bytes.at(12))
        # The moment of a peak may move with the batch size, where fixed bytes weigh.
        assert s.forward_peak_bytes.at(12) == pytest.approx(t.forward_peak_bytes.at(12), rel=0.02)
        assert s.backward_peak_bytes.at(12) == pytest.approx(
            t.backward_peak_bytes.at(12), rel=0.02, abs=64
        )
    assert small.input_bytes.at(12) == large.input_bytes.at(12)


def test_memory_of_seven_billion_parameters_is_not_allocated() -> None:
    with torch.device("meta"):
        module = GPT(layers=32, width=4096, heads=32, vocab=50000, context=2048)
    assert sum(p.numel() for p in module.parameters()) > 6.5e9
    tokens = torch.zeros(2, 2048, dtype=torch.long)
    capture(GPT(), batch_for(GPT()))  # what imports and caches need
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = capture(module, (tokens, tokens))
    # KiB; parameters are 26 GiB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
    assert sum(p.numel for p in graph.parameters) == sum(p.numel() for p in module.parameters())
    assert len([block for block in graph.blocks if block.name.startswith("blocks.")]) == 32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_capture_for_cuda_runs_its_kernels_and_allocates_nothing() -> None:
    module = GPT(2, 64, 4, 256, 64)
    batch = batch_for(module)
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    autocast = torch.autocast("cuda", dtype=torch.bfloat16)
    graph = capture(module, batch, device="cuda", forward_context=lambda: autocast)
    # what torch takes to begin with the device, in its first fake tensor there
    assert torch.cuda.max_memory_allocated() - before <= 512
    assert next(op for op in graph.ops if op.name == "head").outputs[0].dtype == "bfloat16"
    assert not any("for_cpu" in op.kind for op in graph.ops)
    assert flops(graph, "forward", 4) == flops(capture(module, batch), "forward", 4)


# ---- the user's objects --------------------------------------------------------------------------


@every_model
def test_nothing_of_the_user_changes(module: Any) -> None:
    run_step(module, batch_for(module)).backward()
    del module.log, module.log_dict
    logged: list[Any] = []
    batch = batch_for(module)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    gradients = {
        name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None
    }
    attributes = {name: sorted(vars(m)) for name, m in module.named_modules()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()]
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    module.log = lambda *args, **kwargs: logged.append(args)
    capture(module, batch)
    del module.log
    assert logged == []
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert {name for name, p in module.named_parameters() if p.grad is not None} == set(gradients)
    assert all(
        torch.equal(module.get_parameter(name).grad, value) for name, value in gradients.items()
    )
    assert attributes == {name: sorted(vars(m)) for name, m in module.named_modules()}
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()]
    assert torch.equal(generators[0], torch.get_rng_state()) and generators[1] == random.getstate()
    assert (generators[2] == np.random.get_state()[1]).all()
    if isinstance(module, ConvNet):
        assert int(module.norm1.num_batches_tracked) == int(state["norm1.num_batches_tracked"])
    module.zero_grad(set_to_none=True)


def test_precision_context_is_applied() -> None:
    graph = capture(
        MLP(), batch_for(MLP()), forward_context=lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    )
    linear = next(op for op in graph.ops if op.name == "net.2")
    assert linear.outputs[0].dtype == "bfloat16"
    assert {p.dtype for p in graph.parameters} == {"float32"}
    assert "net.2.weight" in linear.parameters


def test_one_sample_is_captured_as_two():
    # With one sample, `flatten` is a view where a larger batch needs a copy.
    module = GPT(tied=True)
    one, two = capture(module, batch_for(module, 1)), capture(module, batch_for(module, 2))
    assert one.batch_size == 2
    assert one.blocks == two.blocks and one.parameters == two.parameters
    flops = [
        sum(flops_of(op, "forward", 3) + flops_of(op, "backward", 3) for op in graph.ops)
        for graph in (one, two)
    ]
    assert flops[0] == pytest.approx(flops[1])


class _SavesForAView(torch.autograd.Function):
    """Saves its input, and returns a view of what it makes."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x * 2).view(-1, 4)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient.reshape(x.shape) * 2


def test_functions_that_return_a_view_may_save() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return _SavesForAView.apply(self.first(batch)).sum()

    graph = capture(Net(), torch.zeros(4, 8))
    # what it saved is kept until backward: its input, 8 floats of a sample
    assert sum(op.saved_bytes.at(4) for op in graph.ops if "view" in op.name) == 4 * 4 * 8
