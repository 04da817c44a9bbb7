"""A watched step gives the graph that a capture gives, runs no code twice, and leaves nothing
behind.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gc
import json
import random
import weakref
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_topt.graph import recorder
from lightning_topt.graph.capture import call_training_step, capture, loss_of
from lightning_topt.graph.errors import CaptureError
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.graph.python_state import ModuleState
from lightning_topt.graph.step_observer import StepObserver, StepTimer
from tests.foreign import awkward, classics, transformers_models, vision  # noqa: F401  (fill the shelf)
from tests.foreign.shelf import PROGRAMS
from tests.launch import run_ranks

# Where capture needs a Trainer, or real tensors, or a metric does less on fake ones.
EQUAL = [
    *(
        "stored_list_for_l2",
        "average_by_hand",
        "nested_dictionaries",
        "scalar_parameter",
        "sparse_embeddings",
    ),
    *(
        "image_classifier",
        "transformer_language_model",
        "byol_with_momentum_encoder",
        "unused_parameters",
    ),
    *("gradient_penalty", "vit", "convnext", "whisper", "clip"),
]
MEMORY = [*EQUAL, "gpt2", "llama", "bert", "t5", "segformer"]  # whose first call fills caches


def made(name: str) -> tuple[Any, Any]:
    L.seed_everything(1, verbose=False)
    module, data = PROGRAMS[name].make()
    module.log = module.log_dict = lambda *args, **kwargs: None
    if isinstance(data, L.LightningDataModule):
        data.setup("fit")
        data = data.train_dataloader()
    return module, next(iter(data))


def watch(module: Any, batch: Any) -> OpGraph:
    observer = StepObserver(module, batch)
    with observer.forward():
        loss = loss_of(call_training_step(module, batch))
    with observer.backward(loss):
        loss.backward()
    del loss
    return observer.graph()


def memory(graph: OpGraph) -> list[float]:
    names = ("kept_bytes", "output_bytes", "forward_peak_bytes", "backward_peak_bytes")
    return [
        getattr(segment, name).at(graph.batch_size) for segment in graph.timeline for name in names
    ]


@pytest.mark.parametrize("name", EQUAL)
def test_a_watched_step_has_the_operators_of_a_capture(name: str) -> None:
    module, batch = made(name)
    expected = capture(module, batch, batch_scaling=False)
    found = watch(module, batch)
    assert [op.name for op in found.ops] == [op.name for op in expected.ops]
    kernels = [(op.forward, op.backward, op.parameters) for op in expected.ops]
    assert [(op.forward, op.backward, op.parameters) for op in found.ops] == kernels
    assert found.parameters == expected.parameters and found.unused == expected.unused
    assert found.fingerprint == expected.fingerprint


@pytest.mark.parametrize("name", MEMORY)
def test_a_watched_step_has_the_memory_and_the_blocks_of_a_capture(name: str) -> None:
    module, batch = made(name)
    expected = capture(module, batch, batch_scaling=False)
    loss_of(call_training_step(module, batch)).backward()
    module.zero_grad()
    found = watch(module, batch)
    assert found.blocks == expected.blocks  # recomputable or not, too
    assert memory(found) == pytest.approx(memory(expected), rel=0.01)


class Net(nn.Module):
    """Two blocks with what `inside` does in each."""

    def __init__(self, block: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), block(), nn.ReLU()) for _ in range(2)
        )
        self.calls = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


class Appends(Counts):
    seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(self.seen))
        return x * 1


class DrawsPython(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + random.random())


class DrawsNumpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(np.random.rand())


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=self.generator)


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


class ReadsWhatIsWritten(nn.Module):
    """Reads a tensor that is no buffer, and that the step writes to later."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        out = x + self.memory
        with torch.no_grad():
            self.memory.add_(1)
        return out


class Drops(nn.Module):
    """Draws from torch's default generator, which a recomputation sets back."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)


class Stores(nn.Module):
    """Keeps its last loss, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.loss = x.mean()
        return x * 1


class Constant(nn.Module):
    """Reads a tensor that is no buffer and that nobody writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.full((8,), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


IMPURE = [Counts, Appends, DrawsPython, DrawsNumpy, OwnGenerator, Statistics, ReadsWhatIsWritten]


@pytest.mark.parametrize("kind", [*IMPURE, Drops, Stores, Constant])
def test_blocks_that_may_run_again_are_those_whose_call_left_nothing_behind(
    kind: type[nn.Module],
) -> None:
    net = Net(kind)
    net.training_step(torch.randn(4, 8), 0)  # what the first step alone sets up
    graph = watch(net, torch.randn(4, 8))
    # What happens before the first parameter needs no gradient in the first block: the second one
    # is looked at.
    (found,) = [block.recomputable for block in graph.blocks if block.name == "blocks.1"]
    assert found == (kind not in IMPURE)


def test_arguments_that_a_call_changes_make_it_impure() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, cache: list[Any]) -> Tensor:
            cache.append(1)
            return self.linear(x)

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Cached() for _ in range(2))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            cache: list[Any] = []
            for block in self.blocks:
                batch = block(batch, cache)
            return batch.square().mean()

    assert not any(block.recomputable for block in watch(Model(), torch.randn(4, 8)).blocks)


def test_a_counter_that_only_the_first_step_sets_up_is_no_change() -> None:
    class Lazily(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.ones(8)
            return x * self.table

    net, batch = Net(Lazily), torch.randn(4, 8)
    observer = StepObserver(net, batch)
    with observer.forward():
        loss = net.training_step(batch, 0)
    with observer.backward(loss):
        loss.backward()
    state = ModuleState(net)
    net.training_step(batch, 1)
    assert state.changed() == set()
    assert [
        b.recomputable
        for b in observer.graph(changed=state.changed()).blocks
        if b.name == "blocks.1"
    ] == [True]


def test_nothing_runs_twice_and_nothing_is_left() -> None:
    net, batch = Net(), torch.randn(4, 8)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()]
    kept = weakref.ref(batch)
    expected = Net()
    expected.load_state_dict(net.state_dict())
    expected.training_step(batch, 0).backward()
    graph = watch(net, batch)
    assert net.calls == 1 and graph.ops
    for one, two in zip(net.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)
        assert not (getattr(one, "_post_accumulate_grad_hooks", None) or {})
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()] == hooks
    del batch
    gc.collect()
    assert kept() is None, "somebody still holds the batch"


def test_what_goes_wrong_in_watching_does_not_reach_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(recorder, "measure", fails)
    net, batch = Net(), torch.randn(4, 8)
    observer = StepObserver(net, batch)
    with observer.forward():
        loss = net.training_step(batch, 0)
    with observer.backward(loss):
        loss.backward()
    assert all(parameter.grad is not None for parameter in net.parameters())
    with pytest.raises(CaptureError, match="a mistake of ours"):
        observer.graph()


def test_a_step_that_raises_takes_all_hooks_off_when_it_is_closed() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("the user's")

    net, batch = Net(Raises), torch.randn(4, 8)
    observer = StepObserver(net, batch)
    with pytest.raises(ValueError, match="the user's"), observer.forward():
        net.training_step(batch, 0)
    observer.close()
    assert not any(module._forward_hooks for module in net.modules())
    with pytest.raises(CaptureError, match="no backward pass"):
        observer.graph()


def test_kernels_are_timed_under_the_names_that_the_graph_has() -> None:
    module, batch = made("transformer_language_model")
    graph, timer = watch(module, batch), StepTimer(torch.device("cpu"))
    module.zero_grad()
    with timer:
        loss = loss_of(call_training_step(module, batch))
    with timer:
        loss.backward()
    kernels = {
        (k.name, json.dumps(k.arguments, sort_keys=True))
        for op in graph.ops
        for k in (*op.forward, *op.backward)
    }
    seconds = timer.seconds()
    assert kernels <= seconds.keys()
    assert all(value > 0 for value in seconds.values())


# ---- beside DDP ----------------------------------------------------------------------------------


def beside_ddp(rank: int, find_unused: bool, views: bool) -> tuple[OpGraph, OpGraph, int]:
    torch.manual_seed(0)
    net, batch = Net(), torch.randn(4, 8)
    alone = watch(net, batch)
    net.zero_grad()
    wrapped = DistributedDataParallel(
        net, find_unused_parameters=find_unused, gradient_as_bucket_view=views
    )
    observer = StepObserver(net, batch)

    def forward(batch: Tensor) -> Tensor:
        del net.forward
        with observer.forward():
            return net.training_step(batch, 0)

    net.forward = forward  # type: ignore[method-assign]
    loss = wrapped(batch) / 2  # as Lightning does for an accumulation
    with observer.backward(loss):
        loss.backward()
    graph = observer.graph()
    dist.barrier()
    return alone, graph, net.calls


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("views", [False, True])
def test_what_ddp_does_beside_the_step_is_left_out(find_unused: bool, views: bool) -> None:
    for alone, beside, calls in run_ranks(beside_ddp, 2, find_unused, views):
        for one, two in zip(beside.ops, alone.ops, strict=True):
            assert (one.forward, one.backward) == (two.forward, two.backward), one.name
        # One number, the gradient of the undivided loss, dies elsewhere.
        assert memory(beside) == pytest.approx(memory(alone), abs=4)
        assert calls == 2
