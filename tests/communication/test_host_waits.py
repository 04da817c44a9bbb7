"""Steady steps in which the host reads nothing from the device, as they run on CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_topt.communication import (
    BF16,
    FP16,
    GradientMethod,
    LocalSteps,
    OuterSteps,
    QuantizedSteps,
    bucket,
)
from lightning_topt.communication.bucket import Bucket, StepChecks, device_finite_flag, is_finite
from lightning_topt.communication.hook import CompressedExchange
from lightning_topt.communication.methods.dense import Dense
from lightning_topt.communication.selection.vector_top_k import first_largest, first_largest_counted
from lightning_topt.communication.topology import Topology
from tests.communication.buckets import SHAPES, gradients_of, make_exchange, make_layout, run_stages
from tests.host_waits import waits_of
from tests.launch import run_on_pool, run_ranks

FREE = [BF16(), FP16(), Dense(hierarchical=False)]


def waits_in_stages(rank: int, method: GradientMethod) -> tuple[dict[str, int], dict[str, int]]:
    """In steady steps of two buckets: waits of their stages, and of the end of a step."""
    bucket.HOST_DEVICES = ()
    exchange = make_exchange(method, rank, 2)
    found = []
    for step in range(4):
        gradients, checks = gradients_of(rank, step), StepChecks()
        buckets = []
        for index, names in enumerate((["first", "bias"], ["second", "embedding"])):
            layout = make_layout({name: SHAPES[name] for name in names}, exempt=["bias"])
            flat = torch.cat([gradients[name].reshape(-1) for name in names])
            buckets.append(Bucket(index, flat, layout, index == 1, step, checks=checks))

        def stages(buckets: list[Bucket] = buckets) -> None:
            for each in buckets:
                exchange.prepare(each)
                run_stages(exchange.stages(each))

        def end(checks: StepChecks = checks) -> None:
            assert not checks.failed()

        found.append((waits_of(stages), waits_of(end)))
    return found[-1]


@pytest.mark.parametrize("method", FREE, ids=lambda method: method.words)
def test_stages_of_a_steady_step_wait_for_nothing(method: GradientMethod) -> None:
    for in_stages, at_end in run_ranks(waits_in_stages, 2, method):
        assert in_stages == {}
        assert at_end == {"tolist": 1}


def waits_in_outer_step(rank: int, method: Any) -> dict[str, int]:
    bucket.HOST_DEVICES = ()
    torch.manual_seed(0)
    parameters = [("a", torch.randn(40, 30)), ("b", torch.randn(30)), ("c", torch.zeros(0))]
    outer = OuterSteps(parameters, method, timeout_seconds=30)
    found = {}
    for _ in range(3):
        for _, tensor in parameters:
            tensor.add_(0.1 * (1 + rank))
        outer.pending_steps = 1
        found = waits_of(outer.synchronize)
    return found


@pytest.mark.parametrize("method", [LocalSteps(every=1), QuantizedSteps(every=1)])
def test_an_outer_step_waits_once(method: Any) -> None:
    assert run_ranks(waits_in_outer_step, 2, method) == [{"tolist": 1}] * 2


# ---- the same results as where everything is checked at once


def module_of_test() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 10), nn.LayerNorm(10), nn.Linear(10, 3))


def averages(
    rank: int, method: GradientMethod, at_end: bool, poison: tuple[int, float] | None, skip: bool
) -> list[dict[str, Tensor]] | str:
    """Gradients of five steps, on rank 1 with `poison` (step, value); or the error's text."""
    module = module_of_test()
    exchange = CompressedExchange(
        method,
        topology=Topology(1, 2, rank),
        timeout_seconds=30,
        nonfinite="skip" if skip else "error",
    )
    exchange.take_over(module)
    exchange._needed().checks_at_end = at_end
    found = []
    try:
        for step in range(5):
            generator = torch.Generator().manual_seed(10 * step + rank)
            for parameter in module.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            if rank == 1 and poison is not None and poison[0] == step:
                module[0].weight.grad[3, 2] = poison[1]
            exchange.average()
            found.append({n: p.grad.clone() for n, p in module.named_parameters()})
    except FloatingPointError as error:
        assert exchange.error is None
        return str(error)
    finally:
        exchange.close()
    return found


def both_ways(rank: int, poison: Any, skip: bool) -> list[tuple[Any, Any]]:
    return [
        (averages(rank, method, False, poison, skip), averages(rank, method, True, poison, skip))
        for method in FREE
    ]


@pytest.mark.parametrize("poison", [None, (0, torch.nan), (2, torch.nan), (3, torch.inf)])
def test_checks_at_the_end_change_no_gradient(poison: Any) -> None:
    for found in run_on_pool(both_ways, 2, poison, True):
        assert len(found) == len(FREE)
        for at_once, at_end in found:
            for step, (expected, actual) in enumerate(zip(at_once, at_end, strict=True)):
                for name, value in expected.items():
                    assert torch.equal(actual[name].nan_to_num(7), value.nan_to_num(7)), name
                is_bad = poison is not None and step == poison[0]
                assert actual["0.weight"].isnan().any().item() == is_bad


def test_checks_at_the_end_raise_the_same_error() -> None:
    for found in run_on_pool(both_ways, 2, (2, torch.nan), False):
        for at_once, at_end in found:
            assert at_once == at_end
            assert at_once.startswith("the gradient on rank 1 has NaN or infinities in a bucket of")


# ---- parts


def test_first_largest_without_waits_takes_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    for k in (1, 7, 100, 250):
        for highest in (3, 50, 10**6):  # many equal ones, few, none
            values = torch.randint(0, highest, (250,), generator=generator).float()
            assert torch.equal(first_largest_counted(values, k), first_largest(values, k))
    values = torch.rand(250)
    assert waits_of(lambda: first_largest_counted(values, 20)) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("values", [[], [1, -2], [1, torch.inf], [-torch.inf, 0], [torch.nan, 1]])
def test_flags_on_the_device_say_the_same(dtype: torch.dtype, values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=dtype)
    assert bool(device_finite_flag(tensor)) == is_finite(tensor)


def test_large_finite_values_are_finite() -> None:
    """Their sum, and the sum of their squares, is not."""
    assert bool(device_finite_flag(torch.full((8,), 3e38)))
