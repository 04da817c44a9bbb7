"""Steady steps in which the host reads nothing from the device, as they run on CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_topt.communication import (
    BF16,
    FP16,
    GradientMethod,
    LocalSteps,
    OuterSteps,
    TopK,
    bucket,
    selection,
)
from lightning_topt.communication.bucket import Bucket, StepChecks, finite_flag, is_finite
from lightning_topt.communication.methods.dense import Dense
from lightning_topt.communication.selection import first_largest, start_feedback
from tests.communication.buckets import SHAPES, gradients_of, make_exchange, make_layout, run_stages
from tests.communication.test_selection import fake_collect
from tests.host_waits import waits_of
from tests.launch import run_ranks

FREE = [BF16(), FP16(), Dense(hierarchical=False), TopK(density=0.1, bits=2)]


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


def waits_in_outer_step(rank: int) -> dict[str, int]:
    bucket.HOST_DEVICES = ()
    module = nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30))
    outer = OuterSteps(module, LocalSteps(every=1), timeout_seconds=30)
    found = {}
    for _ in range(3):
        for parameter in module.parameters():
            parameter.data.add_(0.1 * (1 + rank))
        outer.pending_steps = 1
        found = waits_of(outer.synchronize)
    return found


def test_an_outer_step_waits_once() -> None:
    assert run_ranks(waits_in_outer_step, 2) == [{"tolist": 1}] * 2


def test_a_selection_waits_for_its_counts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waits_of(lambda: first_largest(torch.rand(250), 20)) == {}
    monkeypatch.setattr(selection, "_has_triton", lambda x: True)
    monkeypatch.setattr(selection.selection_triton, "collect", fake_collect)
    found: list[selection.Started] = []
    gradient, residual = torch.randn(200_000), torch.zeros(200_000)
    waits = waits_of(lambda: found.append(start_feedback(gradient, residual, 500)))
    assert found[0].counts is not None and waits == {"nonzero": 1}  # of the fake
    assert waits_of(found[0].result) == {"tolist": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("values", [[], [1, -2], [1, torch.inf], [-torch.inf, 0], [torch.nan, 1]])
def test_flags_on_the_device_say_the_same(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, values: list[float]
) -> None:
    monkeypatch.setattr(bucket, "HOST_DEVICES", ())
    tensor = torch.tensor(values, dtype=dtype)
    assert bool(finite_flag(tensor)) == is_finite(tensor)
    # the sum of these, and the sum of their squares, is not finite
    assert bool(finite_flag(torch.full((8,), 3e38)))
