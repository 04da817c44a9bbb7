"""The largest entries of each chunk, with a decaying residual, against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_topt.communication.selection import NonFiniteError
from lightning_topt.communication.selection.chunk_top_k import (
    Chunks,
    _take_on_device,
    take_chunk_top_k,
)


def _twin(added, residual, chunks, decay, scale):
    """Sorting every chunk; new residual, values, indices."""
    total = (np.float32(decay) * residual + np.float32(scale) * added).astype(np.float32)
    indices = []
    for start in range(0, chunks.numel, chunks.chunk):
        part = np.abs(total[start : start + chunks.chunk])
        k = -(-chunks.per_chunk * len(part) // chunks.chunk)
        indices.extend(start + np.sort(np.argsort(-part, kind="stable")[:k]))
    values = total[indices]
    total[indices] = 0
    return total, values, indices


def _numbers(numel, kind, seed):
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(numel)
    if kind == "ties":
        values = values.round()  # many equal ones and zeros
    elif kind == "heavy":
        values = values**7 * 10.0 ** generator.integers(-20, 10, numel)
    return values.astype(np.float32)


@pytest.mark.parametrize("kind", ["normal", "ties", "heavy"])
@pytest.mark.parametrize(
    ("numel", "chunk", "density"),
    [
        (1000, 64, 0.05),
        (4096, 1024, 0.01),
        (10, 64, 0.5),
        (300, 7, 1.0),
        (257, 256, 0.1),
        (9000, 4096, 0.03),
    ],
)
def test_takes_what_sorting_takes(kind, numel, chunk, density):
    added, residual = _numbers(numel, kind, 1), _numbers(numel, kind, 2)
    chunks = Chunks.of_density(numel, chunk=chunk, density=density)
    expected = _twin(added, residual, chunks, 0.9, 0.5)
    kept = torch.from_numpy(residual.copy())
    chosen = take_chunk_top_k(torch.from_numpy(added), kept, chunks, decay=0.9, scale=0.5)
    np.testing.assert_array_equal(chosen.indices.numpy(), expected[2])
    np.testing.assert_array_equal(chosen.values.numpy(), expected[1])
    np.testing.assert_array_equal(kept.numpy(), expected[0])
    assert chosen.values.numel() == chunks.k


def test_other_devices_take_the_same():
    chunks = Chunks.of_density(1000, chunk=64, density=0.05)
    added, residual = (
        torch.from_numpy(_numbers(1000, "normal", 1)),
        torch.from_numpy(_numbers(1000, "normal", 2)),
    )
    other = residual.clone()
    chosen = take_chunk_top_k(added, residual, chunks, decay=0.5)
    again = _take_on_device(added, other, chunks, decay=0.5, scale=1.0)
    assert torch.equal(chosen.indices, again.indices) and torch.equal(chosen.values, again.values)
    assert torch.equal(residual, other)


def test_takes_half_precision():
    chunks = Chunks.of_density(256, chunk=64, density=0.1)
    added = torch.from_numpy(_numbers(256, "normal", 3)).bfloat16()
    residual = torch.zeros(256)
    chosen = take_chunk_top_k(added, residual, chunks)
    assert torch.equal(chosen.values, added.float()[chosen.indices.long()])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_leaves_the_residual(bad):
    chunks = Chunks.of_density(256, chunk=64, density=0.1)
    added, residual = torch.randn(256), torch.randn(256)
    added[77] = bad
    before = residual.clone()
    with pytest.raises(NonFiniteError):
        take_chunk_top_k(added, residual, chunks)
    assert torch.equal(residual, before)


def test_a_sum_that_overflows_is_an_error():
    chunks = Chunks.of_density(64, chunk=64, density=0.1)
    with pytest.raises(NonFiniteError):
        take_chunk_top_k(torch.full((64,), 3e38), torch.full((64,), 3e38), chunks)
