"""Which modules may run the batches of several ranks at once, and what a step with them
exchanges.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_topt.graph.capture import capture
from lightning_topt.graph.kernels import shown_collective
from lightning_topt.graph.mesh_axes import Axis
from lightning_topt.graph.op_config import JointModule
from lightning_topt.graph.op_graph import Op, OpGraph
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.split_model import SplitModel
from tests.models import GPT
from tests.techniques.tensor_parallel.traced import LlamaBlock, Step, prices

Forward = Callable[[Any, Tensor], Tensor]


class Layer(nn.Module):
    """Two matrices, with what a test does between them."""

    def __init__(self, between: Forward, width: int = 64) -> None:
        super().__init__()
        self.up, self.down, self.norm = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            nn.BatchNorm1d(width),
        )
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.between(self, x))))


class Net(nn.Module):
    """Two of them, one after the other."""

    def __init__(self, between: Forward) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(between) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def split_model(module: nn.Module, batch: Any) -> SplitModel:
    trace = FunctionTrace()
    graph = capture(module, batch, adapt=trace.of)
    return SplitModel(module, batch, graph, trace)


def joint_graph(split: SplitModel) -> tuple[tuple[JointModule, ...], OpGraph | None]:
    """The joint modules of the split with the least state that has some, and the step with them."""
    along = prices(split.module, 2)
    layouts = (
        split.joint_layout(candidate, along) for candidate in reversed(split.candidates(along))
    )
    layout = next((each for each in layouts if each is not None), None)
    return (
        ((), None)
        if layout is None
        else (layout.joint, split.local_graph_of(layout, (Axis("tensor", 2),)))
    )


def refusal(between: Forward) -> str:
    split = split_model(Step(Net(between)), torch.zeros(4, 64))
    joint, graph = joint_graph(split)
    assert joint and graph is None
    return "; ".join(split.refusals(2))


@pytest.mark.parametrize(
    ("between", "named"),
    [
        (lambda layer, x: layer.norm(x), "batch_norm"),
        (lambda layer, x: x - x.mean(0), "mean"),
        (lambda layer, x: x / x.sum(), "sum"),
        (lambda layer, x: x.cumsum(0), "cumsum"),
        (lambda layer, x: x.flip(0), "flip"),
        (lambda layer, x: (x @ x.T).softmax(-1) @ x, "matmul"),
        (lambda layer, x: x[0] + x, "getitem"),
        (lambda layer, x: x[torch.argsort(x[:, 0])], "sort"),
        (lambda layer, x: x + torch.arange(x.shape[0])[:, None], "add"),
        (lambda layer, x: x * torch.rand(()), "rand draws"),
        (lambda layer, x: x * F.dropout(torch.ones(64), 0.5), "dropout draws"),
        (lambda layer, x: x * torch.empty(64).bernoulli_(0.5), "bernoulli_ draws"),
        (lambda layer, x: x * random.random(), "Python or NumPy"),
        (lambda layer, x: x / x.shape[0], "number of samples"),
    ],
)
def test_samples_that_may_meet_are_refused(between: Forward, named: str) -> None:
    assert named in refusal(between)


def test_modules_with_hooks_inside_are_refused() -> None:
    net = Net(lambda layer, x: x)
    net.layers[0].register_forward_hook(lambda *_: None)  # sees the samples of a rank
    net.layers[1].up.register_forward_hook(lambda *_: None)
    split = split_model(Step(net), torch.zeros(4, 64))
    joint, graph = joint_graph(split)
    assert joint and graph is None and "'up' in it has hooks" in "; ".join(split.refusals(2))


class Penalty(Step):
    """The square of the gradient of what it makes, too."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch.detach().requires_grad_()
        loss = super().training_step(x, batch_idx)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()


def test_gradients_of_gradients_do_not_pass_joint_modules() -> None:
    """They would have other weights; turns have them right."""
    split = split_model(Penalty(Net(lambda layer, x: x.sin())), torch.zeros(4, 64))
    joint, graph = joint_graph(split)
    assert joint and graph is None and "gradients of gradients" in "; ".join(split.refusals(2))


@pytest.mark.parametrize(
    "between",
    [
        lambda layer, x: F.dropout(F.layer_norm(x, (64,)), 0.1),
        lambda layer, x: x - x.mean(-1, keepdim=True),
        lambda layer, x: x + torch.arange(64) / 64,
        lambda layer, x: x.view(-1, 8, 8).transpose(1, 2).reshape(x.shape) * torch.rand_like(x),
        lambda layer, x: torch.cat([x[:, :32], x[:, 32:].flip(1)], 1).masked_fill(
            torch.zeros_like(x).bool(), 0.0
        ),
    ],
)
def test_samples_that_stay_by_themselves_run_together(between: Forward) -> None:
    joint, graph = joint_graph(split_model(Step(Net(between)), torch.zeros(4, 64)))
    assert [each.module for each in joint] == [
        "inner.layers.0",
        "inner.layers.1",
    ] and graph is not None


def calls_of(ops: Iterable[Op]) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for op in ops:
        for during, kernels in (("forward", op.forward), ("backward", op.backward)):
            for kernel in kernels:
                if (shown := shown_collective(kernel)) is not None:
                    found[during, shown[0]] += kernel.count
    return found


def test_a_layer_gathers_its_samples_and_scatters_its_sums() -> None:
    """As many bytes as all-reduces of a joint batch, and none for parameters that are whole."""
    split = split_model(
        GPT(3, 256, 8, vocab=512, context=32), (torch.zeros(4, 32, dtype=torch.long),) * 2
    )
    joint, graph = joint_graph(split)
    assert {each.module for each in joint} >= {
        "blocks.0",
        "blocks.1",
        "blocks.2",
    } and graph is not None
    only = calls_of(op for op in graph.ops if op.block.startswith("blocks."))
    each_way = {"all_gather": 6, "reduce_scatter": 6}
    assert only == {
        (d, op): count for d in ("forward", "backward") for op, count in each_way.items()
    }


class Shared(nn.Module):
    """Layers that get, beside the samples, tensors that all of them share."""

    def __init__(self, shared: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Llama() for _ in range(2))
        self.shared = shared
        self.register_buffer("table", torch.linspace(0, 1, 64))

    def forward(self, x: Tensor) -> Tensor:
        table = self.shared(x) + self.table
        for layer in self.layers:
            x = layer(x, scale=table)
        return x


class Llama(LlamaBlock):
    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * scale)


def test_what_has_no_samples_must_not_depend_on_them() -> None:
    made: dict[str, Callable[[Tensor], Tensor]] = {
        "of the shape": lambda x: torch.arange(64) / x.shape[-1],
        "of the values": lambda x: x.mean((0, 1)),
        "random": lambda x: torch.rand(64),
    }
    found = {
        what: joint_graph(split_model(Step(Shared(of)), torch.zeros(4, 8, 64)))[0]
        for what, of in made.items()
    }
    layers = tuple(JointModule(f"inner.layers.{index}", (0, None), (0,)) for index in range(2))
    assert found == {"of the shape": layers, "of the values": (), "random": ()}


def test_the_smallest_module_around_a_pair_of_matrices_is_joint() -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = nn.Sequential(
                nn.LayerNorm(64), nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)
            )
            self.head = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(x + self.pair(x))
            return y

    joint, graph = joint_graph(split_model(Step(Once()), torch.zeros(4, 64)))
    assert JointModule("inner.pair", (0,), (0,)) in joint and graph is not None
