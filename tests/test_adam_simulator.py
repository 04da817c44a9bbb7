"""The simulator of many replicas: its batched model, optimizer and methods against the plain
ones.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.exchange import adam_simulator
from benchmarks.exchange.adam_simulator import Model, Text, batched_losses, gradients

MODEL = Model(layers=1, hidden=16, heads=2, seq_len=8)


@pytest.fixture(scope="module")
def text():
    return Text.read(MODEL, validation=16)


def _method(make, ranks, steps=8, runs=1, **options):
    setting = adam_simulator.Setting(MODEL, ranks, (4e-3,) * runs, steps)
    return make(setting, torch.stack([MODEL.initial(seed) for seed in range(runs)]), **options)


def _train(method, text, ranks, steps=8, runs=1):
    generators = [np.random.default_rng(seed) for seed in range(runs)]
    for step in range(steps):
        tokens = text.batch(generators, ranks=ranks, size=8 // ranks)
        gradient = gradients(MODEL, method.replicas(), tokens).view(runs, ranks, -1)
        method.step(gradient, step, share=1.0)
    return method.consensus()


def test_every_replica_has_the_loss_and_gradient_of_its_module(text):
    flat = torch.stack([MODEL.initial(seed) for seed in (0, 1)])
    tokens = text.train[:6].view(2, 3, -1)
    losses, found = batched_losses(MODEL, flat, tokens), gradients(MODEL, flat, tokens)
    for replica, seed in enumerate((0, 1)):
        module = MODEL.module(seed)
        loss = module._loss(tokens[replica])
        loss.backward()
        torch.testing.assert_close(losses[replica], loss.detach())
        named = MODEL.named(found[replica : replica + 1])
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(named[name][0], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (adam_simulator.TopK, {"density": 1.0}),
        (adam_simulator.LocalSteps, {"every": 1}),
        (adam_simulator.SparseLoCo, {"every": 1, "density": 1.0, "bits": 8}),
        (adam_simulator.FewBits, {"every": 1, "bits": 8}),
        (adam_simulator.RotatingMean, {"parts": 1, "value_bytes": 4}),
    ],
)
def test_with_one_rank_and_all_entries_it_is_the_dense_run(text, make, options):
    dense = _train(_method(adam_simulator.Mean, 1), text, 1)
    found = _train(_method(make, 1, **options), text, 1)
    if "bits" not in options:
        torch.testing.assert_close(found, dense, rtol=1e-3, atol=1e-4)
        return
    # Where gradients are nearly nothing, eight bits may lose them, and Adam divides by their size.
    off = (found - dense).abs()
    assert (off > 1e-3 + 0.1 * dense.abs()).double().mean() < 1e-3 and off.max() < 1e-2
