"""Quantities that grow with the batch: numbers and shapes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Amount:
    """A quantity that is linear in the batch size: ``fixed + per_sample * batch_size``."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, batch_size: float) -> float:
        """Return the quantity for `batch_size` samples per rank."""
        return self.fixed + self.per_sample * batch_size

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.fixed + other.fixed, self.per_sample + other.per_sample)

    @classmethod
    def fit(cls, batch_sizes: tuple[int, int], values: tuple[float, float]) -> Amount:
        """Return the line through two measurements; a constant when both batch sizes are equal."""
        (b0, b1), (v0, v1) = batch_sizes, values
        per_sample = 0.0 if b0 == b1 else (v1 - v0) / (b1 - b0)
        return cls(v0 - per_sample * b0, per_sample)


NOTHING = Amount()


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype (``"float32"``) of a tensor at the captured batch size; `batch_dim` scales
    with it.
    """

    shape: tuple[int, ...]
    dtype: str
    batch_dim: int | None = None
