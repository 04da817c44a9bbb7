"""Recipes: single files that users copy.

Exchanges also keep the contract of tests/communication/test_methods.py.
"""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from examples.recipes.basis_rotation import BasisRotation
from examples.recipes.demo import DeMo, Tiles, cosines
from examples.recipes.loader_workers import best_num_workers
from tests.communication.exchange_ranks import (
    assert_equal_on_all_ranks,
    loss_of,
    make_model,
    train,
    wrap,
)
from tests.launch import run_ranks

FOLDER = Path(__file__).parent.parent / "examples" / "recipes"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_a_recipe_is_one_file_that_says_how_it_is_used(path):
    tree = ast.parse(path.read_text())
    assert path.read_text().count("\n") <= 250
    text = ast.get_docstring(tree)
    assert "Copy this file" in text and f"from {path.stem} import" in text
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in imported if name.startswith("examples")]


def learns(rank):
    ddp, exchange = wrap(DeMo(density=0.1, chunk=16))
    first = float(loss_of(ddp.module, rank, 0))
    list(train(ddp, rank=rank, steps=range(20), lr=0.01))
    assert_equal_on_all_ranks(ddp)
    statistics = exchange.statistics()
    exchange.close()
    return float(loss_of(ddp.module, rank, 0)) < first, statistics.bytes_sent


def test_demo_sends_less_and_learns():
    """The other exchanges do in tests/communication/test_methods.py."""
    dense = sum(p.numel() for p in make_model().parameters()) * 4 * 20
    for is_less, sent in run_ranks(learns, 2):
        assert is_less and 0 < sent < 0.6 * dense


def test_the_cosine_transform_is_its_definition_and_orthonormal():
    matrix = torch.randn(12, 20, dtype=torch.float32)
    tiles = Tiles.of_shape(matrix.shape, limit=8)
    assert (tiles.height, tiles.width) == (6, 5)
    coefficients = tiles.encode(matrix.view(-1))
    first = cosines(6, matrix.device) @ matrix[:6, :5] @ cosines(5, matrix.device).T
    torch.testing.assert_close(coefficients[:30].view(6, 5), first)
    torch.testing.assert_close(tiles.decode(coefficients).view(12, 20), matrix)


@pytest.mark.parametrize("rotate", [True, False])
def test_basis_rotation(rotate):
    """Without rotation it is AdamW; with it, turned coordinates turn the update."""
    torch.manual_seed(0)
    numbers = torch.randn(10, 4, 4, dtype=torch.float64)
    start, gradients, nothing = numbers[0], numbers[1:9], torch.eye(4).double()
    turn = torch.linalg.qr(numbers[9]).Q if rotate else nothing

    def trained(make, turn):
        parameter = nn.Parameter(turn @ start)
        optimizer = make([parameter])
        for gradient in gradients:
            parameter.grad = turn @ gradient
            optimizer.step()
        return parameter.detach()

    def rotation(parameters):
        return BasisRotation(parameters, lr=0.01, betas=(0.9, 0.99), rotate=rotate)

    if rotate:
        expected = turn @ trained(rotation, nothing)
    else:
        expected = trained(lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.9, 0.99)), turn)
    torch.testing.assert_close(trained(rotation, turn), expected, rtol=1e-6, atol=1e-6)


class Slow(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.02)
        return index


def test_workers_where_samples_are_slow_and_none_where_they_are_there():
    assert best_num_workers(Slow(), most=2, seconds=0.3, batch_size=4) == 2
    quick = TensorDataset(torch.ones(64, 1))
    assert best_num_workers(quick, most=2, seconds=0.1, batch_size=4) == 0
