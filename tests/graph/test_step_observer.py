"""A real step gives the graph that a capture gives."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import random
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_topt.graph.capture import call_training_step, capture, loss_of, observe_step
from lightning_topt.graph.op_graph import OpGraph
from tests.foreign import awkward, classics, transformers_models, vision  # noqa: F401  (fill the shelf)
from tests.foreign.shelf import PROGRAMS

# Where capture needs no Trainer and no values, and metrics do as much on fake tensors.
EQUAL = ["image_classifier", "gradient_penalty", "sparse_embeddings", "convnext", "whisper"]
MEMORY = [*EQUAL, "gpt2", "t5"]  # whose first call fills caches


def made(name: str) -> tuple[Any, Any]:
    L.seed_everything(1, verbose=False)
    module, data = PROGRAMS[name].make()
    module.log = module.log_dict = lambda *args, **kwargs: None
    if isinstance(data, L.LightningDataModule):
        data.setup("fit")
        data = data.train_dataloader()
    return module, next(iter(data))


def memory(graph: OpGraph) -> list[float]:
    names = ("kept_bytes", "output_bytes", "forward_peak_bytes", "backward_peak_bytes")
    return [
        getattr(segment, name).at(graph.batch_size) for segment in graph.timeline for name in names
    ]


@pytest.mark.parametrize("name", MEMORY)
def test_a_real_step_has_the_operators_memory_and_blocks_of_a_capture(name: str) -> None:
    module, batch = made(name)
    expected = capture(module, batch, batch_scaling=False)
    if name not in EQUAL:
        loss_of(call_training_step(module, batch)).backward()
        module.zero_grad()
    found = observe_step(module, batch)
    assert found.blocks == expected.blocks  # recomputable or not, too
    assert memory(found) == pytest.approx(memory(expected), rel=0.01)
    if name in EQUAL:
        assert [op.name for op in found.ops] == [op.name for op in expected.ops]
        kernels = [(op.forward, op.backward, op.parameters) for op in expected.ops]
        assert [(op.forward, op.backward, op.parameters) for op in found.ops] == kernels
        assert found.parameters == expected.parameters and found.unused == expected.unused
        assert found.fingerprint == expected.fingerprint


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
    # What happens before the first parameter needs no gradient in the first block: the second one
    # is looked at.
    batch = torch.randn(4, 8)
    for graph in (observe_step(Net(kind), batch), capture(Net(kind), batch, batch_scaling=False)):
        (found,) = [block.recomputable for block in graph.blocks if block.name == "blocks.1"]
        assert found == (kind not in IMPURE)


class Routes(nn.Module):
    """Runs as many operators as its random numbers say."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(torch.randint(0, 20, ()))):
            x = x * 1
        return x


def test_a_second_call_draws_the_same_numbers() -> None:
    blocks = observe_step(Net(Routes), torch.randn(4, 8)).blocks
    assert [block.recomputable for block in blocks if block.name == "blocks.1"] == [True]
