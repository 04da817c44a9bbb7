"""Buckets of gradients without DDP: filled from parameters that have their whole gradients, and
written back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

BUCKET_BYTES = 25 << 20  # as large as DDP's


@dataclass(frozen=True)
class OwnBucket:
    """A bucket as torch's `GradBucket`: gradients are views of its buffer."""

    place: int
    flat: Tensor
    of_parameters: tuple[nn.Parameter, ...]
    views: tuple[Tensor, ...]
    is_last_one: bool

    def index(self) -> int:
        """Return its place among the buckets of a step."""
        return self.place

    def buffer(self) -> Tensor:
        """Return the gradients one after the other, (n,)."""
        return self.flat

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients it holds."""
        return list(self.of_parameters)

    def gradients(self) -> list[Tensor]:
        """Return the gradients, in the parameters' shapes."""
        return list(self.views)

    def is_last(self) -> bool:
        """Return whether it is the last one of a step."""
        return self.is_last_one


class OwnBuckets:
    """The buckets of `parameters`, of equal dtypes each; their memory stays."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        parts: list[list[nn.Parameter]] = []
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            filled = BUCKET_BYTES
            for parameter in (each for each in parameters if each.dtype == dtype):
                if filled + parameter.nbytes > BUCKET_BYTES:
                    parts.append([])
                    filled = 0
                parts[-1].append(parameter)
                filled += parameter.nbytes
        self.buckets = [
            _bucket(place, part, is_last=place + 1 == len(parts))
            for place, part in enumerate(parts)
        ]

    @torch.no_grad()
    def filled(self) -> Iterator[OwnBucket]:
        """Yield each bucket with the gradients that parameters have now; zeros for those
        without.
        """
        for bucket in self.buckets:
            for parameter, view in zip(bucket.of_parameters, bucket.views, strict=True):
                if parameter.grad is None:
                    view.zero_()
                else:
                    view.copy_(
                        parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                    )
            yield bucket

    @torch.no_grad()
    def write_back(self) -> None:
        """Give parameters the gradients that are in the buckets now; none where there was none and
        they are zeros.
        """
        for bucket in self.buckets:
            for parameter, view in zip(bucket.of_parameters, bucket.views, strict=True):
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    parameter.grad.copy_(view)
                elif parameter.grad is not None or bool(view.any()):
                    parameter.grad = view.clone()


def _bucket(place: int, parameters: Sequence[nn.Parameter], *, is_last: bool) -> OwnBucket:
    flat = parameters[0].new_zeros(
        sum(parameter.numel() for parameter in parameters), requires_grad=False
    )
    views = torch.split(flat, [parameter.numel() for parameter in parameters])
    shaped = tuple(
        view.view(parameter.shape) for view, parameter in zip(views, parameters, strict=True)
    )
    return OwnBucket(place, flat, tuple(parameters), shaped, is_last)
