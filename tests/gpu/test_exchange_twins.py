"""Every exchange on CUDA tensors against the same on CPU tensors: gradients, outer steps, states.

Two ranks share the device, so the group is gloo's, which takes tensors of a device in collectives.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_topt.communication import GradientMethod, LocalMethod, OuterSteps, read_method
from lightning_topt.communication.exchange_method import method_classes
from lightning_topt.communication.hook import CompressedExchange
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


def test_exchanges_are_those_of_the_cpu(on: str = "cuda") -> None:
    found = run_ranks(exchange_on_both, 2, on, timeout_seconds=45, fresh=True)[0]
    assert set(found) == set(GRADIENT_METHODS)
    problems = {name: result for name, result in found.items() if isinstance(result, str)}
    assert not problems, "\n".join(problems.values())
    for name, (on_cpu, on_device, went_on, loaded) in found.items():
        for expected, actual in zip(on_cpu, on_device, strict=True):
            assert_alike(actual, expected, name)
        # An exchange that has loaded the state goes on as the one that it was saved of.
        for expected, actual in zip(went_on, loaded, strict=True):
            for key, value in expected.items():
                torch.testing.assert_close(
                    actual[key], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
                )


def test_outer_steps_are_those_of_the_cpu(on: str = "cuda") -> None:
    found = run_ranks(step_on_both, 2, on, timeout_seconds=45, fresh=True)[0]
    assert set(found) == set(LOCAL_METHODS)
    problems = {name: result for name, result in found.items() if isinstance(result, str)}
    assert not problems, "\n".join(problems.values())
    for name, (on_cpu, on_device) in found.items():
        assert_alike(on_device, on_cpu, name)


def assert_alike(actual: dict[str, Tensor], expected: dict[str, Tensor], name: str) -> None:
    """Sums in another order may choose other entries, or round the other way: few, if any."""
    a, b = (torch.cat([each[key].flatten() for key in SHAPES]) for each in (actual, expected))
    share = (~torch.isclose(a, b, rtol=1e-3, atol=1e-4)).float().mean().item()
    assert b.abs().sum() > 0
    assert share < 0.01, f"{name}: {100 * share:.1f} % of the entries differ"


# ---- on the ranks --------------------------------------------------------------------------------


def exchange_on_both(rank: int, device: str) -> dict[str, Any]:
    """By method: four lists of gradients, or the traceback of what failed."""
    return {name: tried(exchanged, rank, name, in_full(device)) for name in GRADIENT_METHODS}


def step_on_both(rank: int, device: str) -> dict[str, Any]:
    """By method: parameters on CPU and device, or the traceback of what failed."""
    return {name: tried(stepped, rank, name, in_full(device)) for name in LOCAL_METHODS}


def tried(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except Exception:
        return traceback.format_exc()


def exchanged(rank: int, name: str, device: torch.device) -> tuple[Gradients, ...]:
    on_cpu, *_ = exchange_on(rank, name, torch.device("cpu"))
    return (on_cpu, *exchange_on(rank, name, device))


def stepped(rank: int, name: str, device: torch.device) -> list[dict[str, Tensor]]:
    return [step_on(rank, name, each) for each in (torch.device("cpu"), device)]


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
        module, method, topology=Topology(2, 1, rank), device=device, timeout_seconds=30
    )
    return module, exchange


def average(
    module: nn.Module, exchange: CompressedExchange, *, rank: int, step: int
) -> dict[str, Tensor]:
    for key, gradient in gradients_of(rank, step).items():
        parameter = module.get_parameter(key)
        parameter.grad = gradient.to(parameter.device)
    exchange.average()
    return {key: p.grad.cpu() for key, p in module.named_parameters() if p.grad is not None}


def step_on(rank: int, name: str, device: torch.device) -> dict[str, Tensor]:
    """Parameters after three outer steps, between which ranks go where their gradients say."""
    method = read_method({"method": name, "every": 2})
    assert isinstance(method, LocalMethod)
    parameters = nn.ParameterDict(
        {key: torch.zeros(shape, device=device) for key, shape in SHAPES.items()}
    )
    outer = OuterSteps(parameters, method, timeout_seconds=30)
    for step in range(3 * method.every):
        for key, gradient in gradients_of(rank, step).items():
            parameters[key].data -= 0.1 * gradient.to(device)
        outer.after_step()
    outer.synchronize()
    return {key: parameter.detach().cpu() for key, parameter in parameters.items()}


def in_full(device: str) -> torch.device:
    return torch.device(device, 0) if device == "cuda" else torch.device(device)
