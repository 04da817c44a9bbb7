"""The cosine transform of tiles, against its definition as a sum."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_topt.communication.cosine import Tiles, cosine_matrix, tile_length


def _twin(tile):
    """Coefficients of one tile by the double sum, float64."""
    height, width = tile.shape
    result = torch.zeros(height, width, dtype=torch.float64)
    for f in range(height):
        for g in range(width):
            total = 0.0
            for i in range(height):
                for j in range(width):
                    total += (
                        float(tile[i, j])
                        * math.cos(math.pi * (2 * i + 1) * f / (2 * height))
                        * math.cos(math.pi * (2 * j + 1) * g / (2 * width))
                    )
            result[f, g] = (
                total * math.sqrt((1 + (f > 0)) / height) * math.sqrt((1 + (g > 0)) / width)
            )
    return result


@pytest.mark.parametrize("shape", [(6, 8), (4, 3, 5), (10,), (1, 7)])
def test_coefficients_are_the_sums(shape):
    torch.manual_seed(0)
    tensor = torch.randn(shape)
    tiles = Tiles.of_shape(tensor.shape, limit=4)
    found = tiles.encode(tensor.view(-1)).view(-1, tiles.height, tiles.width)
    matrix = tensor.view(tiles.rows, tiles.columns)
    place = 0
    for top in range(0, tiles.rows, tiles.height):
        for left in range(0, tiles.columns, tiles.width):
            expected = _twin(matrix[top : top + tiles.height, left : left + tiles.width])
            torch.testing.assert_close(found[place].double(), expected, rtol=1e-5, atol=1e-5)
            place += 1
    assert place == len(found)


@pytest.mark.parametrize("shape", [(96, 64), (50, 7), (33,), (128, 3, 3, 3)])
def test_comes_back(shape):
    tensor = torch.randn(2, math.prod(shape))
    tiles = Tiles.of_shape(torch.Size(shape), limit=32)
    coefficients = tiles.encode(tensor)
    torch.testing.assert_close(tiles.decode(coefficients), tensor, rtol=1e-5, atol=1e-5)
    # orthonormal
    torch.testing.assert_close(coefficients.norm(), tensor.norm(), rtol=1e-5, atol=1e-5)


def test_a_smooth_matrix_needs_few_coefficients():
    x = torch.linspace(0, 1, 64)
    smooth = torch.outer(x, x**2)
    coefficients = (
        Tiles.of_shape(smooth.shape, limit=64)
        .encode(smooth.view(-1))
        .abs()
        .sort(descending=True)
        .values
    )
    assert coefficients[:32].square().sum() > 0.99 * coefficients.square().sum()


@pytest.mark.parametrize(
    ("length", "limit", "expected"),
    [(96, 64, 48), (50257, 64, 29), (7, 64, 7), (128, 64, 64), (13, 4, 1)],
)
def test_tiles_divide(length, limit, expected):
    assert tile_length(length, limit) == expected


def test_rows_are_orthonormal():
    matrix = cosine_matrix(48, torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(48), rtol=0, atol=1e-5)
