"""One bit per element."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_topt.communication import Sign
from lightning_topt.communication.methods import sign
from lightning_topt.communication.methods.sign import (
    add_signs,
    add_signs_torch,
    mean_abs,
    packed_bytes,
    take_signs,
    take_signs_torch,
)
from tests.communication.buckets import (
    SHAPES,
    TWO_BUCKETS,
    exchange_step,
    gradients_of,
    make_exchange,
)
from tests.launch import run_on_pool

WORLD_SIZE, STEPS = 3, 4


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 4096, 10_001])
@pytest.mark.parametrize("take", [take_signs, take_signs_torch])
@pytest.mark.parametrize("add", [add_signs, add_signs_torch])
def test_bits_are_those_of_numpy(count, take, add, monkeypatch):
    monkeypatch.setattr(sign, "_SIGNS_AT_ONCE", 1 << 11)  # so that there are several parts
    values = torch.randn(count)
    values[::5] = 0
    values[1::5] = -0.0
    packed, rest = torch.full((packed_bytes(count),), 255, dtype=torch.uint8), values.clone()
    take(rest, step=torch.tensor(0.7), packed=packed)
    negative = values.numpy() < 0
    assert np.array_equal(packed.numpy(), np.packbits(negative, bitorder="little"))
    signs = torch.from_numpy(np.where(negative, np.float32(-0.7), np.float32(0.7)))
    assert torch.equal(rest, values - signs)
    decoded, others = torch.zeros(count), torch.randint(256, (2, len(packed)), dtype=torch.uint8)
    rows = torch.cat([packed.unsqueeze(0), others])
    add(rows[:1], steps=torch.tensor([0.7]), values=decoded)
    assert torch.equal(decoded, signs)
    add(rows[1:], steps=torch.tensor([0.5, 2.0]), values=decoded)
    for row, step in zip(others, (0.5, 2.0), strict=True):
        bits = np.unpackbits(row.numpy(), bitorder="little")[:count]
        signs = signs + torch.from_numpy(np.where(bits, np.float32(-step), np.float32(step)))
    torch.testing.assert_close(decoded, signs)


class NoReading(TorchDispatchMode):
    """Fails where the host would wait for values of a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits"
        return func(*args, **(kwargs or {}))


def test_a_device_keeps_its_scales():
    values, packed = torch.randn(100), torch.zeros(packed_bytes(100), dtype=torch.uint8)
    with NoReading():
        take_signs_torch(values, step=torch.tensor(0.5), packed=packed)
        add_signs_torch(packed.unsqueeze(0), steps=torch.tensor([0.5]), values=values)


def test_mean_abs():
    parts = [torch.randn(10_000) * 100, torch.zeros(3), torch.empty(0), torch.tensor([-2.0, 1.0])]
    expected = [np.abs(parts[0].double().numpy()).mean(), 0, 0, 1.5]
    assert mean_abs(parts).tolist() == pytest.approx(expected, rel=1e-5)
    assert not torch.isfinite(mean_abs([torch.tensor([1.0, torch.nan])])).all()
    assert not torch.isfinite(mean_abs([torch.tensor([1.0, -torch.inf])])).all()


def _run(rank, error_feedback):
    exchange = make_exchange(Sign(error_feedback=error_feedback), rank, WORLD_SIZE)
    means = [
        exchange_step(
            exchange,
            gradients_of(rank, step),
            step=step,
            buckets=TWO_BUCKETS,
            exempt=("bias", "embedding"),
        )
        for step in range(1, STEPS)
    ]
    return means, exchange.bytes_sent, exchange.state_dict()["residual"], exchange.residual_norm()


def _twin(error_feedback):
    """Algorithm 2 of EF-signSGD, all workers in one process, one numpy line per formula."""
    residuals = [
        {name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(WORLD_SIZE)
    ]
    for step in range(1, STEPS):
        sent = []
        for rank in range(WORLD_SIZE):
            gradients = {
                name: value.double().numpy() for name, value in gradients_of(rank, step).items()
            }
            pending = {name: gradients[name] + residuals[rank][name] for name in SHAPES}
            sent.append(
                {name: np.abs(p).mean() * np.where(p < 0, -1, 1) for name, p in pending.items()}
            )
            for name in ("bias", "embedding"):
                sent[rank][name] = pending[name]
            if error_feedback:
                residuals[rank] = {name: pending[name] - sent[rank][name] for name in SHAPES}
        yield (
            {name: np.mean([message[name] for message in sent], axis=0) for name in SHAPES},
            residuals,
        )


@pytest.mark.parametrize("error_feedback", [True, False])
def test_several_steps_equal_the_slow_twin(error_feedback):
    results = run_on_pool(_run, WORLD_SIZE, error_feedback)
    twin = list(_twin(error_feedback))
    for step, (expected, _) in enumerate(twin):
        for means, *_ in results:
            for name in SHAPES:
                assert torch.equal(means[step][name], results[0][0][step][name])
                np.testing.assert_allclose(means[step][name], expected[name], atol=2e-6)
    residuals = twin[-1][1]
    for rank, (_, _, residual, norm) in enumerate(results):
        flat = {name: value.reshape(-1) for name, value in residuals[rank].items()}
        for name, value in residual.items():
            np.testing.assert_allclose(value, flat[name], atol=5e-6)
        assert norm == pytest.approx(np.linalg.norm(np.concatenate(list(flat.values()))), rel=1e-5)
        assert bool(residual) == error_feedback
