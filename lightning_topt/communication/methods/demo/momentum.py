"""The momentum of one rank (or node) in the cosine basis, and its largest coefficients.

The transform is orthonormal, so momentum that is kept as coefficients is the same momentum: a
gradient is transformed once, what is sent is simply taken out, and only the sum of all ranks is
transformed back.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from lightning_topt.communication.bucket import Bucket, BucketLayout
from lightning_topt.communication.cosine import Tiles
from lightning_topt.communication.local_residual import LocalResidual
from lightning_topt.communication.selection.chunk_top_k import Chunks, take_chunk_top_k
from lightning_topt.communication.selection.outcome import Selection

# a parameter: where it is in the buffer, its tiles, and what is taken of them
Piece = tuple[slice, Tiles, Chunks]


@lru_cache(maxsize=1024)
def pieces(layout: BucketLayout, *, chunk: int, density: float) -> tuple[Piece, ...]:
    """Return every parameter of a bucket, in tiles of at most (chunk, chunk), of each of which the
    share `density` is sent.
    """
    found = []
    for part, shape in zip(layout.slices, layout.shapes, strict=True):
        if part.stop > part.start:
            tiles = Tiles.of_shape(shape, limit=chunk)
            found.append(
                (part, tiles, Chunks.of_density(shape.numel(), chunk=tiles.numel, density=density))
            )
    return tuple(found)


class CosineMomentum:
    """Coefficients of momentum, float32, in the layout of the buckets; found again by parameter
    name.
    """

    def __init__(self, *, decay: float, chunk: int, density: float, device: torch.device) -> None:
        self.decay, self.chunk, self.density = decay, chunk, density
        self.coefficients = LocalResidual(device)

    def pieces(self, bucket: Bucket) -> tuple[Piece, ...]:
        """Return the parameters of `bucket`."""
        return pieces(bucket.layout, chunk=self.chunk, density=self.density)

    def take(self, bucket: Bucket, *, scale: float) -> Selection:
        """Add ``scale`` * the bucket's gradient, which is finite, to the decayed momentum, and take
        the largest out of it.
        """
        momentum = self.coefficients.flat(bucket)
        values, indices = [], []
        for part, tiles, chunks in self.pieces(bucket):
            added = tiles.encode(bucket.buffer[part].float())
            chosen = take_chunk_top_k(added, momentum[part], chunks, decay=self.decay, scale=scale)
            values.append(chosen.values)
            indices.append(chosen.indices + part.start)
        return Selection(torch.cat(values), torch.cat(indices))

    def take_all(self, bucket: Bucket, *, scale: float) -> Tensor:
        """Return the decayed momentum with ``scale`` * the bucket's gradient, (n,), back in the
        basis of the parameters.
        """
        momentum = self.coefficients.flat(bucket)
        total = bucket.buffer.float() * scale
        if bool(momentum.any()):
            for part, tiles, _ in self.pieces(bucket):
                total[part].add_(tiles.decode(momentum[part]), alpha=self.decay)
        return total

    def write_sign(self, bucket: Bucket, total: Tensor, *, decode: bool) -> None:
        """Write the sign of `total` (n,), coefficients where `decode`, times the loss scale into
        the bucket.
        """
        for part, tiles, _ in self.pieces(bucket):
            sums = tiles.decode(total[part]) if decode else total[part]
            bucket.buffer[part].copy_(sums.sign_().mul_(bucket.loss_scale))
