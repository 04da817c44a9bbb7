"""Models built without memory: the same graph, or a real model where the constructor needs
values.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_topt.cli.tasks.byte_lm import ByteGPT
from lightning_topt.graph.capture import capture
from lightning_topt.graph.meta_build import build_on_meta, is_on_meta
from tests.graph.test_capture import MODEL_IDS, MODELS
from tests.models import MLP, batch_for


@pytest.mark.parametrize("module", MODELS, ids=MODEL_IDS)
def test_the_graph_is_that_of_a_real_model(module: Any) -> None:
    module = type(module)()
    batch = batch_for(module)
    expected = capture(module, batch, batch_scaling=False)
    meta = build_on_meta(type(module))
    assert is_on_meta(meta) and not is_on_meta(module)
    assert capture(meta, batch, batch_scaling=False) == expected
    with FakeTensorMode():
        fake = type(module)()
    assert capture(fake, batch, batch_scaling=False) == expected


def test_dtypes_are_those_of_a_converted_model() -> None:
    meta, module = build_on_meta(MLP).to(torch.bfloat16), MLP().to(torch.bfloat16)
    batch = batch_for(module).to(torch.bfloat16)
    assert capture(meta, batch) == capture(module, batch)


class ReadsValues(MLP):
    """As vision Transformers do with their rates of stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [float(rate) for rate in torch.linspace(0, 0.1, 3)]


class Fails(MLP):
    def __init__(self) -> None:
        super().__init__()
        raise KeyError("the user's own")


def test_constructors_that_read_values_run_on_real_tensors() -> None:
    torch.manual_seed(3)
    expected = ReadsValues().state_dict()
    torch.manual_seed(3)
    module = build_on_meta(ReadsValues)
    assert not is_on_meta(module) and module.rates == pytest.approx([0, 0.05, 0.1])
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())
    with pytest.raises(KeyError, match="own"):
        build_on_meta(Fails)


def test_a_hundred_billion_bytes_take_none() -> None:
    module = build_on_meta(lambda: ByteGPT(num_layers=8, hidden=16384, num_heads=64))
    assert sum(p.nbytes for p in module.parameters()) > 1e11
    graph = capture(module, torch.zeros(2, 129, dtype=torch.uint8))
    assert sum(p.nbytes for p in graph.parameters) == sum(p.nbytes for p in module.parameters())
    assert nn.Linear(2, 2).weight.device.type == "cpu"  # the device is only of the model
