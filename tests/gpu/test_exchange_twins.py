"""Every exchange on CUDA tensors against the same on CPU tensors: gradients, outer steps, states.

Two ranks share the device, so the group is gloo's, which takes tensors of a device in collectives.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_topt.communication import GradientMethod, LocalMethod, OuterSteps, read_method
from lightning_topt.communication.hook import CompressedExchange
from lightning_topt.communication.method_registry import method_classes
from lightning_topt.communication.topology import Topology
from tests.communication.buckets import SHAPES, gradients_of
from tests.launch import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS, LATER = 4, 3
# "bounded_loss" loses what it may lose, so two of its runs need not agree.
GRADIENT_METHODS = [
    name
    for name, kind in method_classes().items()
    if issubclass(kind, GradientMethod) and name not in ("bounded_loss", "dense")
]
LOCAL_METHODS = [name for name, kind in method_classes().items() if issubclass(kind, LocalMethod)]
Gradients = list[dict[str, Tensor]]


@pytest.mark.parametrize("name", GRADIENT_METHODS)
def test_means_are_those_of_the_cpu(name: str) -> None:
    on_cpu, on_device, _, _ = exchanged()[name]
    for expected, actual in zip(on_cpu, on_device, strict=True):
        assert_alike(actual, expected)


@pytest.mark.parametrize("name", GRADIENT_METHODS)
def test_a_loaded_state_goes_on(name: str) -> None:
    _, _, went_on, loaded = exchanged()[name]
    for expected, actual in zip(went_on, loaded, strict=True):
        for key, value in expected.items():
            torch.testing.assert_close(actual[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOCAL_METHODS)
def test_outer_steps_are_those_of_the_cpu(name: str) -> None:
    on_cpu, on_device = stepped()[name]
    assert_alike(on_device, on_cpu)


def assert_alike(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Sums in another order may choose other entries, or round the other way: few, if any."""
    a, b = (torch.cat([each[name].flatten() for name in SHAPES]) for each in (actual, expected))
    different = ~torch.isclose(a, b, rtol=1e-3, atol=1e-4)
    assert a.isfinite().all()
    assert different.float().mean() < 0.01


# ---- on the ranks --------------------------------------------------------------------------------


@functools.cache
def exchanged(device: str = "cuda") -> dict[str, Any]:
    """Results of rank 0, where every method has exchanged on both devices."""
    results: dict[str, Any] = run_ranks(exchange_on_both, 2, device, fresh=True)[0]
    return results


@functools.cache
def stepped(device: str = "cuda") -> dict[str, Any]:
    """Parameters of rank 0 after outer steps on both devices."""
    results: dict[str, Any] = run_ranks(step_on_both, 2, device, fresh=True)[0]
    return results


def exchange_on_both(rank: int, device: str) -> dict[str, Any]:
    found = {}
    for name in GRADIENT_METHODS:
        on_cpu, *_ = exchange_on(rank, name, torch.device("cpu"))
        found[name] = (on_cpu, *exchange_on(rank, name, in_full(device)))
    return found


def exchange_on(
    rank: int, name: str, device: torch.device
) -> tuple[Gradients, Gradients, Gradients]:
    """Gradients of the first steps, of those after, and of those after in a loaded exchange."""
    first = start(rank, name, device)
    begun = [average(*first, rank=rank, step=step) for step in range(STEPS)]
    state = [first[1].state_dict()]
    dist.broadcast_object_list(state, src=0)
    second = start(rank, name, device)
    second[1].load_state_dict(state[0])
    later = range(STEPS, STEPS + LATER)
    went_on, loaded = (
        [average(*each, rank=rank, step=s) for s in later] for each in (first, second)
    )
    for _, exchange in (first, second):
        exchange.close()
    return begun, went_on, loaded


def start(rank: int, name: str, device: torch.device) -> tuple[nn.Module, CompressedExchange]:
    module = nn.Module()
    for key, shape in SHAPES.items():
        module.register_parameter(key, nn.Parameter(torch.zeros(shape, device=device)))
    method = read_method(name)
    assert isinstance(method, GradientMethod)
    exchange = CompressedExchange(
        method, topology=Topology(2, 1, rank), device=device, timeout_seconds=30
    )
    exchange.take_over(module)
    return module, exchange


def average(
    module: nn.Module, exchange: CompressedExchange, *, rank: int, step: int
) -> dict[str, Tensor]:
    for key, gradient in gradients_of(rank, step).items():
        parameter = module.get_parameter(key)
        parameter.grad = gradient.to(parameter.device)
    exchange.average()
    return {key: p.grad.cpu() for key, p in module.named_parameters() if p.grad is not None}


def step_on_both(rank: int, device: str) -> dict[str, Any]:
    return {
        name: [step_on(rank, name, each) for each in (torch.device("cpu"), in_full(device))]
        for name in LOCAL_METHODS
    }


def step_on(rank: int, name: str, device: torch.device) -> dict[str, Tensor]:
    """Parameters after three outer steps, between which ranks go where their gradients say."""
    method = read_method({"method": name, "every": 2})
    assert isinstance(method, LocalMethod)
    parameters = {key: torch.zeros(shape, device=device) for key, shape in SHAPES.items()}
    outer = OuterSteps(parameters.items(), method, timeout_seconds=30)
    for step in range(3 * method.every):
        for key, gradient in gradients_of(rank, step).items():
            parameters[key] -= 0.1 * gradient.to(device)
        outer.after_step()
    outer.synchronize()
    return {key: parameter.cpu() for key, parameter in parameters.items()}


def in_full(device: str) -> torch.device:
    return torch.device(device, 0) if device == "cuda" else torch.device(device)
