"""PowerSGD."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd
from torch.nn.parallel import DistributedDataParallel

from lightning_topt.communication import PowerSGD
from lightning_topt.communication.methods.power_sgd import (
    first_factor,
    matrix_shape,
    orthonormal,
    saves_enough,
)
from tests.communication.buckets import (
    SHAPES,
    TWO_BUCKETS,
    exchange_step,
    gradients_of,
    make_exchange,
)
from tests.launch import run_on_pool

WORLD_SIZE, STEPS = 3, 5
FACTORED = ("first", "second", "conv")


def test_matrix_shapes_and_savings():
    assert matrix_shape(torch.Size((5, 2, 3))) == (5, 6)
    assert matrix_shape(torch.Size((5,))) == (5, 1)
    assert matrix_shape(torch.Size(())) == (1, 1)
    assert matrix_shape(torch.Size((0, 4))) == (0, 0)
    assert saves_enough(torch.Size((100, 100)), rank=24) and not saves_enough(
        torch.Size((100, 100)), rank=25
    )
    assert not saves_enough(torch.Size((1000,)), rank=1)


def test_orthonormal_of_matrices_that_lack_rank():
    random = torch.randn(4, 30, 3)
    random[1] = 0
    random[2, :, 1] = random[2, :, 0]
    basis = orthonormal(random)
    assert torch.allclose(basis.mT @ basis, torch.eye(3).expand(4, 3, 3), atol=1e-5)
    assert torch.allclose(basis @ (basis.mT @ random), random, atol=1e-5)


def _run(rank, error_feedback, low_rank):
    exchange = make_exchange(
        PowerSGD(rank=low_rank, error_feedback=error_feedback), rank, WORLD_SIZE
    )
    means = [
        exchange_step(
            exchange,
            gradients_of(rank, step),
            step=step,
            buckets=TWO_BUCKETS,
            exempt=("embedding",),
        )
        for step in range(1, STEPS)
    ]
    return means, exchange.bytes_sent, exchange.state_dict(), exchange.residual_norm()


def _twin(error_feedback, low_rank):
    """Algorithms 1 and 2 of PowerSGD, all workers in one process, float64."""
    shapes = {name: matrix_shape(torch.Size(SHAPES[name])) for name in SHAPES}
    q = {
        name: first_factor(name, columns=shapes[name][1], rank=low_rank).T.double().numpy()
        for name in FACTORED
    }
    residuals = [
        {name: np.zeros(shape) for name, shape in shapes.items()} for _ in range(WORLD_SIZE)
    ]
    for step in range(1, STEPS):
        pending = [
            {
                n: g.double().numpy().reshape(shapes[n]) + residuals[r][n]
                for n, g in gradients_of(r, step).items()
            }
            for r in range(WORLD_SIZE)
        ]
        means = {name: np.mean([p[name] for p in pending], axis=0) for name in SHAPES}
        for name in FACTORED:
            p_hat = np.linalg.qr(np.mean([p[name] @ q[name] for p in pending], axis=0))[0]
            q[name] = np.mean([p[name].T @ p_hat for p in pending], axis=0)
            means[name] = p_hat @ q[name].T
            if error_feedback:
                for rank in range(WORLD_SIZE):
                    residuals[rank][name] = pending[rank][name] - means[name]
        yield means, residuals


@pytest.mark.parametrize("error_feedback", [True, False])
@pytest.mark.parametrize("low_rank", [1, 3])
def test_several_steps_equal_the_slow_twin(error_feedback, low_rank):
    results = run_on_pool(_run, WORLD_SIZE, error_feedback, low_rank)
    twin = list(_twin(error_feedback, low_rank))
    for step, (expected, _) in enumerate(twin):
        for means, *_ in results:
            for name in SHAPES:
                assert torch.equal(means[step][name], results[0][0][step][name])
                np.testing.assert_allclose(
                    means[step][name].reshape(expected[name].shape), expected[name], atol=1e-4
                )
    sent_per_step = 4 * (low_rank * (24 + 20) * 2 + low_rank * (12 + 27) + 13 + 6 + 80)
    residuals = twin[-1][1]
    for rank, (_, bytes_sent, state, norm) in enumerate(results):
        for name, value in state["residual"].items():
            np.testing.assert_allclose(value, residuals[rank][name].reshape(-1), atol=1e-4)
        assert norm == pytest.approx(
            np.sqrt(sum((r**2).sum() for r in residuals[rank].values())), rel=1e-4
        )
        ring = 2 * (WORLD_SIZE - 1) / WORLD_SIZE
        assert bytes_sent == pytest.approx((STEPS - 1) * ring * sent_per_step, abs=4 * STEPS)


def _net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 4)
    )


def _gradients_by_torch(rank, low_rank, steps):
    """The gradients that torch's own hook makes (in one bucket), the local ones, and the Q that it
    starts from.
    """
    net = DistributedDataParallel(_net())
    state = torch_power_sgd.PowerSGDState(
        process_group=None, matrix_approximation_rank=low_rank, start_powerSGD_iter=2, random_seed=3
    )
    net.register_comm_hook(state, torch_power_sgd.powerSGD_hook)
    averaged, local = [], []
    for step in range(steps):
        inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(10 * step + rank))
        alone = _net()
        alone(inputs).square().mean().backward()
        local.append({name: parameter.grad for name, parameter in alone.named_parameters()})
        net.zero_grad()
        net(inputs).square().mean().backward()
        averaged.append(
            {name: parameter.grad.clone() for name, parameter in net.module.named_parameters()}
        )
    # The hook draws one seed and then, shape by shape in bucket order, the random factors.
    generator = torch.Generator().manual_seed(int(np.random.RandomState(3).randint(1_000_000_000)))
    parameters = dict(net.module.named_parameters())
    order = [
        name
        for name, p in reversed(parameters.items())
        if p.dim() > 1 and saves_enough(p.shape, rank=low_rank)
    ]
    first = {
        name: torch.randn(1, parameters[name].shape[1], low_rank, generator=generator)[0].mT
        for name in order
    }
    assert len({parameters[name].shape for name in order}) == len(order)
    return averaged, local, first


def _against_torch(rank, low_rank):
    steps = 6
    averaged, local, first = _gradients_by_torch(rank, low_rank, steps)
    exchange = make_exchange(PowerSGD(rank=low_rank, dense_steps=2), rank, 2)
    exchange.load_state_dict({"factor": first})
    worst = 0.0
    for step in range(steps):
        means = exchange_step(exchange, local[step], step=step, buckets=[list(reversed(local[0]))])
        for name, mean in means.items():
            worst = max(
                worst,
                float((mean - averaged[step][name]).abs().max() / averaged[step][name].abs().max()),
            )
    return worst


@pytest.mark.parametrize("low_rank", [1, 2, 4])
def test_equals_torchs_own_hook(low_rank):
    assert max(run_on_pool(_against_torch, 2, low_rank)) < 1e-4
