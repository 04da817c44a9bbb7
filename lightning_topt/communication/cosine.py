"""The cosine transform of tiles of a matrix, as two matrix products (DeMo, arXiv 2411.19870,
section 3).

With D (t, t) the orthonormal DCT-II, ``D[f, i] = sqrt((1 + (f > 0)) / t) * cos(pi * (2 i + 1) * f /
(2 t))``, a tile X (h, w) becomes D_h X D_w^T, and is found again as D_h^T (...) D_w. Coefficients
of one tile lie together, row by row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=64)
def tile_length(length: int, limit: int) -> int:
    """Return the largest divisor of `length` that is at most `limit`."""
    return next(size for size in range(min(length, limit), 0, -1) if length % size == 0)


@lru_cache(maxsize=64)
def cosine_matrix(size: int, device: torch.device) -> Tensor:
    """Return the orthonormal DCT-II (size, size); a row per frequency."""
    positions = torch.arange(size, dtype=torch.float64)
    angles = torch.outer(positions, 2 * positions + 1) * (math.pi / (2 * size))
    matrix = torch.cos(angles) * math.sqrt(2 / size)
    matrix[0] *= math.sqrt(0.5)
    return matrix.to(device, torch.float32)


@dataclass(frozen=True)
class Tiles:
    """A matrix (rows, columns) as tiles (height, width) side by side."""

    rows: int
    columns: int
    height: int
    width: int

    @classmethod
    def of_shape(cls, shape: torch.Size, *, limit: int) -> Tiles:
        """Return tiles of at most `limit` in each dim; more than two dims are a matrix (first dim,
        rest), fewer one row.
        """
        columns = shape[1:].numel() if len(shape) > 1 else shape.numel()
        rows = shape[0] if len(shape) > 1 else 1
        return cls(rows, columns, tile_length(rows, limit), tile_length(columns, limit))

    @property
    def numel(self) -> int:
        """Elements of one tile."""
        return self.height * self.width

    def encode(self, flat: Tensor) -> Tensor:
        """Return the coefficients (..., n) of matrices (..., n), float32: tile after tile."""
        lead, down = flat.shape[:-1], self.rows // self.height
        across = flat.reshape(-1, self.width) @ cosine_matrix(self.width, flat.device).t()
        strips = across.view(-1, self.height, self.columns)
        both = (
            torch.matmul(cosine_matrix(self.height, flat.device), strips)
            if self.height > 1
            else strips
        )
        tiles = both.view(-1, down, self.height, self.columns // self.width, self.width)
        return tiles.transpose(2, 3).reshape(*lead, self.rows * self.columns)

    def decode(self, coefficients: Tensor) -> Tensor:
        """Return matrices (..., n) of coefficients (..., n)."""
        lead, down = coefficients.shape[:-1], self.rows // self.height
        tiles = coefficients.view(-1, down, self.columns // self.width, self.height, self.width)
        across = tiles.transpose(2, 3).reshape(-1, self.width) @ cosine_matrix(
            self.width, coefficients.device
        )
        strips = across.view(-1, self.height, self.columns)
        both = (
            torch.matmul(cosine_matrix(self.height, coefficients.device).t(), strips)
            if self.height > 1
            else strips
        )
        return both.reshape(*lead, self.rows * self.columns)
