"""Local steps with an outer optimizer."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from lightning_topt.communication import LocalSteps, OuterSteps
from lightning_topt.communication.rank_watch import PeerLostError
from tests.launch import run_on_pool, run_ranks

WORLD_SIZE, STEPS, EVERY = 3, 7, 3  # two outer steps and a rest
SHAPES = {"weight": (6, 5), "bias": (11,)}


def _initial(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _target(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _local_step(parameters, rank, step):
    """One step towards a random point: what a rank's own optimizer does."""
    for name, target in _target(rank, step).items():
        parameters[name] -= 0.3 * (parameters[name] - target.to(parameters[name].dtype))


def _train(rank, options, steps=STEPS, dtype=torch.float32):
    # only those of rank 0 count
    parameters = {name: value.to(dtype) for name, value in _initial(seed=rank).items()}
    local = OuterSteps(parameters.items(), LocalSteps(**options))
    for step in range(steps):
        _local_step(parameters, rank, step)
        due = local.after_step()
        assert due == ((step + 1) % options["every"] == 0)
    local.synchronize()
    local.synchronize()  # nothing left to do
    return parameters, local.statistics, local.state_dict()


def _twin(*, every, outer_learning_rate=0.7, outer_momentum=0.9):
    """All ranks in one process, float64: torch's SGD as outer optimizer, argsort as selection."""
    theta = {name: nn.Parameter(value.double()) for name, value in _initial(seed=0).items()}
    outer = torch.optim.SGD(
        theta.values(), lr=outer_learning_rate, momentum=outer_momentum, nesterov=outer_momentum > 0
    )
    replicas = [
        {name: value.detach().clone() for name, value in theta.items()} for _ in range(WORLD_SIZE)
    ]
    for step in range(STEPS):
        for rank, replica in enumerate(replicas):
            _local_step(replica, rank, step)
        if (step + 1) % every and step + 1 < STEPS:
            continue
        deltas = [
            torch.cat([(theta[name] - replica[name]).detach().view(-1) for name in SHAPES])
            for replica in replicas
        ]
        mean = torch.stack(deltas).mean(0)
        for parameter, part in zip(
            theta.values(), mean.split([p.numel() for p in theta.values()]), strict=True
        ):
            parameter.grad = part.view(parameter.shape)
        outer.step()
        replicas = [
            {name: value.detach().clone() for name, value in theta.items()}
            for _ in range(WORLD_SIZE)
        ]
    return theta


@pytest.mark.parametrize(
    "options",
    [
        {"every": EVERY},
        {"every": EVERY, "outer_learning_rate": 0.5, "outer_momentum": 0.0},
        {"every": 1},
        {"every": 100},
    ],
)
def test_equals_the_slow_twin(options):
    results = run_on_pool(_train, WORLD_SIZE, options)
    theta = _twin(**options)
    for parameters, *_ in results:
        for name in SHAPES:
            assert torch.equal(parameters[name], results[0][0][name])
            np.testing.assert_allclose(parameters[name], theta[name].detach(), atol=2e-6)


@pytest.mark.parametrize("value_dtype", ["bfloat16", "float16"])
def test_values_of_16_bits(value_dtype):
    whole = run_on_pool(_train, WORLD_SIZE, {"every": EVERY})
    half = run_on_pool(_train, WORLD_SIZE, {"every": EVERY, "value_dtype": value_dtype})
    for name in SHAPES:
        assert all(torch.equal(parameters[name], half[0][0][name]) for parameters, *_ in half)
        torch.testing.assert_close(half[0][0][name], whole[0][0][name], rtol=0, atol=0.1)
    assert half[0][1].bytes_sent < whole[0][1].bytes_sent


def test_statistics():
    numel, ring = (
        sum(torch.Size(shape).numel() for shape in SHAPES.values()),
        2 * (WORLD_SIZE - 1) / WORLD_SIZE,
    )
    _, statistics, _ = run_on_pool(_train, WORLD_SIZE, {"every": EVERY})[0]
    assert (statistics.local_steps, statistics.outer_steps) == (STEPS, 3)
    flags = 4 * WORLD_SIZE
    assert statistics.bytes_sent == pytest.approx(3 * ring * (4 * numel + flags), abs=6)
    assert statistics.dense_bytes == pytest.approx(STEPS * ring * 4 * numel, abs=1)
    assert statistics.exchange_seconds > 0 and statistics.residual_norm == 0


def test_parameters_of_16_bits_keep_a_float32_anchor():
    results = run_on_pool(_train, WORLD_SIZE, {"every": EVERY}, STEPS, torch.bfloat16)
    exact = run_on_pool(_train, WORLD_SIZE, {"every": EVERY})
    for parameters, _, state in results:
        for name in SHAPES:
            assert parameters[name].dtype == torch.bfloat16
            assert torch.equal(parameters[name], results[0][0][name])
            assert torch.equal(parameters[name], state["anchor"][name].bfloat16())
            torch.testing.assert_close(
                parameters[name].float(), exact[0][0][name], rtol=0, atol=0.1
            )


def _standing_still(rank):
    parameter = torch.randn(50).bfloat16()
    local = OuterSteps([parameter], LocalSteps(every=1))
    local.anchor.add_(local.anchor, alpha=1e-4)  # what bfloat16 cannot hold
    local.parameters.write(local.anchor)
    before = local.anchor.clone()
    local.after_step()
    return torch.equal(before, local.anchor)


def test_rounding_of_parameters_is_no_step():
    assert run_on_pool(_standing_still, 2) == [True, True]


def _wrong_state(rank):
    local = OuterSteps([("a", torch.zeros(3)), ("b", torch.zeros(2))], LocalSteps(every=2))
    state = local.state_dict()
    for wrong in ({"a": torch.zeros(3)}, {"a": torch.zeros(3), "b": torch.zeros(4)}):
        with pytest.raises(ValueError, match=r"anchor is of another model: b differ"):
            local.load_state_dict(state | {"anchor": wrong})


def test_state_of_another_model():
    run_on_pool(_wrong_state, 1)


def _buffers(rank):
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    net.register_buffer("rank", torch.tensor(rank))
    local = OuterSteps(net.named_parameters(), LocalSteps(every=2), buffers=net.named_buffers())
    start = net[0].weight.detach().clone()
    for _ in range(2):
        net(torch.randn(2, 3, 6, 6) + rank)
        mean_before = net[1].running_mean.clone()
        local.after_step()
    return start, mean_before, {name: value.clone() for name, value in net.named_buffers()}


def test_running_statistics_become_their_mean():
    results = run_on_pool(_buffers, WORLD_SIZE)
    for start, _, buffers in results:
        assert torch.equal(start, results[0][0])
        mean = torch.stack([before for _, before, _ in results]).mean(0)
        torch.testing.assert_close(buffers["1.running_mean"], mean)
        assert buffers["1.num_batches_tracked"] == 2 and buffers["rank"] == 0
        assert all(torch.equal(value, results[0][2][name]) for name, value in buffers.items())


def _not_finite(rank):
    parameters = _initial(seed=0)
    local = OuterSteps(parameters.items(), LocalSteps(every=2))
    _local_step(parameters, rank, 0)
    local.after_step()
    if rank == 1:
        parameters["bias"][3] = torch.nan
    before = {name: value.clone() for name, value in parameters.items()}
    with pytest.raises(
        FloatingPointError, match=r"rank 1 have NaN or infinities after 2 local steps"
    ):
        local.after_step()
    return all(torch.equal(before[n].nan_to_num(), parameters[n].nan_to_num()) for n in SHAPES)


def test_nan_is_named_on_all_ranks_and_nothing_changes():
    assert run_on_pool(_not_finite, 3) == [True] * 3


def _alone(rank):
    parameter = torch.zeros(3)
    local = OuterSteps(
        [parameter], LocalSteps(every=1, outer_momentum=0.0, outer_learning_rate=1.0)
    )
    parameter += 1
    watching = [thread for thread in threading.enumerate() if thread.name == "rank-watch"]
    return local.watch, watching, local.after_step(), parameter.tolist()


def test_one_rank_has_no_watch():
    assert run_on_pool(_alone, 1) == [(None, [], True, [1.0, 1.0, 1.0])]


def _waits_too_long(rank):
    local = OuterSteps([torch.zeros(3)], LocalSteps(every=1), timeout_seconds=0.3)
    if rank == 0:
        says = r"all ranks are alive.*\(rank 1 is at .* in _waits_too_long\).* longer than 0.3 s"
        with pytest.raises(PeerLostError, match=says):
            local.after_step()
    else:
        time.sleep(2)


def test_timeout():
    run_ranks(_waits_too_long, 2)


def test_parameters_that_cannot_be():
    with pytest.raises(ValueError, match="was given no parameters"):
        OuterSteps([], LocalSteps())
    with pytest.raises(ValueError, match="same name"):
        OuterSteps([("a", torch.zeros(1)), ("a", torch.zeros(1))], LocalSteps())
    with pytest.raises(ValueError, match="one device; got cpu, meta"):
        OuterSteps([torch.zeros(1), torch.zeros(1, device="meta")], LocalSteps())


def _different(rank):
    with pytest.raises(ValueError, match="every is 3 on rank 1 and 2 on rank 0"):
        OuterSteps([torch.zeros(3)], LocalSteps(every=2 + rank))


def test_options_that_differ_between_ranks():
    run_on_pool(_different, 2)
