"""Capturing one batch as it is, of any structure: ``batch_scaling=False``."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_topt.costs.optimizer import read_optimizer
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.capture import capture
from lightning_topt.graph.mesh_axes import data_mesh
from tests.costs.graphs import cluster_of
from tests.graph.measure import flops_of
from tests.models import GPT, Branching, ConvNet, batch_for


class Detector(L.LightningModule):
    """Takes a list of samples of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 4)

    def training_step(self, batch: list[dict[str, Tensor]], batch_idx: int) -> Tensor:
        return sum((self.net(sample["x"]) * sample["weight"]).mean() for sample in batch)


LIST = [
    {"x": torch.zeros(3, 8), "weight": torch.zeros(())},
    {"x": torch.zeros(5, 8), "weight": torch.zeros(())},
]


def test_list_of_samples_of_different_sizes() -> None:
    graph = capture(Detector(), LIST, batch_scaling=False)
    assert graph.batch_size == 1 and not graph.batch_scaling
    assert sum(flops_of(op, "forward", 1) for op in graph.ops) == 2 * 8 * 8 * 4
    assert graph.input_bytes.at(1) == 8 * 8 * 4 + 2 * 4


def test_batch_without_a_tensor_and_of_one_sample() -> None:
    class Own(Detector):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(torch.zeros(batch["samples"], 8)).mean()

    graph = capture(Own(), {"samples": 7}, batch_scaling=False)
    assert graph.batch_size == 1 and graph.ops[-2].outputs[0].shape == (7, 4)
    # One sample stays one, where a capture that scales takes two.
    one = capture(GPT(), batch_for(GPT(), 1), batch_scaling=False)
    assert (
        one.batch_size == 1
        and next(op for op in one.ops if op.name == "head").outputs[0].shape[0] == 1
    )


class Anything(Detector):
    def training_step(self, *args: Any) -> Tensor:
        return super().training_step(*args)


class OtherNames(Detector):
    def training_step(self, samples: Any, number: int, /, scale: float = 1.0) -> Tensor:
        return super().training_step(samples, number) * scale


class BatchAlone(Detector):
    def training_step(self, batch: Any, *, batch_idx: int = 5) -> Tensor:
        assert batch_idx == 5
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [Anything, OtherNames, BatchAlone])
def test_the_step_is_called_as_lightning_calls_it(kind: type[Detector]) -> None:
    assert len(capture(kind(), LIST, batch_scaling=False).ops) >= len(
        capture(Detector(), LIST, batch_scaling=False).ops
    )


@pytest.mark.parametrize("module", [GPT(), ConvNet()], ids=["gpt", "cnn"])
def test_amounts_are_those_of_a_capture_that_scales(module: Any) -> None:
    one, scaled = (
        capture(module, batch_for(module), batch_scaling=False),
        capture(module, batch_for(module)),
    )
    assert one.batch_size == 4 and [op.name for op in one.ops] == [op.name for op in scaled.ops]
    assert [flops_of(op, "forward", 4) for op in one.ops] == [
        flops_of(op, "forward", 4) for op in scaled.ops
    ]
    for a, b in zip(one.timeline, scaled.timeline, strict=True):
        assert a.kept_bytes.at(4) == b.kept_bytes.at(4) and a.backward_peak_bytes.at(
            4
        ) == b.backward_peak_bytes.at(4)


def test_costs_refuse_other_batch_sizes() -> None:
    module = GPT()
    graph = capture(module, batch_for(module), batch_scaling=False)
    profile = read_optimizer(
        [torch.optim.SGD(module.parameters(), lr=0.1)],
        named_parameters=[*module.named_parameters()],
        device_type="cpu",
    )
    cluster = cluster_of()
    assert TrainingStep(graph, cluster, profile, data_mesh(2), 4)
    with pytest.raises(ValueError, match=r"captured for batches of 4 sample.*batch_scaling=True"):
        TrainingStep(graph, cluster, profile, data_mesh(2), 8)


def test_unused_parameters_are_named() -> None:
    graph = capture(Branching(), batch_for(Branching()))
    assert graph.unused == ("unused.weight", "unused.bias")
    frozen = Branching()
    frozen.unused.requires_grad_(False)
    assert capture(frozen, batch_for(frozen)).unused == ()
