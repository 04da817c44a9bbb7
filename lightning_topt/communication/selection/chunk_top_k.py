"""The largest entries of every chunk of a vector, with a residual that decays.

Equal numbers from each chunk of 4096 or so: every layer is sent at every step, however small its
gradient, indices need few bits, and rows are independent. SparseLoCo (arXiv 2508.15706) selects so.
Compiled on a CPU (`kernels.take_chunks`), plain torch elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_topt.communication.selection.kernels import take_chunks
from lightning_topt.communication.selection.vector_top_k import NonFiniteError, Selection


def take_chunk_top_k(
    added: Tensor, residual: Tensor, chunks: Chunks, *, decay: float = 1.0, scale: float = 1.0
) -> Selection:
    """Accumulate into the residual, and take the largest of every chunk out.

    ``residual = decay * residual + scale * added``.

    Args:
        added: (n,) float32, bfloat16 or float16, contiguous; only read.
        residual: (n,) float32, contiguous, on the same device.
        chunks: of n elements.
        decay: factor of the residual.
        scale: factor of `added`.

    Returns:
        values (k,) float32 and indices (k,) int32, ascending; of equal magnitudes the first on a
        CPU.

    Raises:
        NonFiniteError: where `added` has a NaN or an infinity; the residual is then as before.
    """
    assert added.numel() == residual.numel() == chunks.numel
    # The sum is finite almost always; only where it is not, every element is checked.
    sum_is_finite = bool(torch.isfinite(added.sum(dtype=torch.float32)))
    if not sum_is_finite and not bool(torch.isfinite(added).all()):
        raise NonFiniteError("gradient that is not finite")
    if added.device.type != "cpu":
        return _take_on_device(added, residual, chunks, decay=decay, scale=scale)
    indices, values = np.empty(chunks.k, np.int32), np.empty(chunks.k, np.float32)
    kept, given = residual.numpy(), added.detach().float().contiguous().numpy()
    factors, sizes = (np.float32(decay), np.float32(scale)), (chunks.chunk, chunks.per_chunk)
    taken = take_chunks(kept, kept.view(np.int32), given, *factors, *sizes, indices, values)
    if taken < 0:
        raise NonFiniteError("sum of gradients that is not finite")
    assert taken == chunks.k
    return Selection(torch.from_numpy(values), torch.from_numpy(indices))


def _take_on_device(
    added: Tensor, residual: Tensor, chunks: Chunks, *, decay: float, scale: float
) -> Selection:
    # Do what `take_chunks` does, in torch
    residual.mul_(decay).add_(added, alpha=scale)
    whole = chunks.numel - chunks.rest
    # full chunks (chunks, chunk), then the rest
    parts = [_largest(residual[:whole].view(-1, chunks.chunk), chunks.per_chunk)]
    if chunks.rest:
        k = -(-chunks.per_chunk * chunks.rest // chunks.chunk)
        parts.append(_largest(residual[whole:].view(1, -1), k) + whole)
    indices = torch.cat(parts)
    values = residual[indices]
    residual.index_fill_(0, indices, 0)
    return Selection(values, indices.int())


def _largest(rows: Tensor, k: int) -> Tensor:
    # Flat indices (rows * k,), ascending, of the k largest magnitudes of each row
    found = rows.abs().topk(k, dim=1, sorted=False).indices.sort(dim=1).values
    starts = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1) * rows.shape[1]
    return (found + starts).view(-1)


@dataclass(frozen=True)
class Chunks:
    """Consecutive pieces of `chunk` elements of `numel`.

    Of each piece `per_chunk` entries are taken. A last piece that is shorter gives its share of
    them, rounded up.
    """

    numel: int
    chunk: int
    per_chunk: int

    @classmethod
    def of_density(cls, numel: int, *, chunk: int, density: float) -> Chunks:
        """Return chunks of which the share `density` is taken, at least one entry of each."""
        chunk = max(1, min(chunk, numel))
        return cls(numel, chunk, min(chunk, max(1, round(density * chunk))))

    @property
    def rest(self) -> int:
        """Elements of a last, shorter chunk; 0 where there is none."""
        return self.numel % self.chunk

    @property
    def k(self) -> int:
        """Entries taken in all."""
        return self.numel // self.chunk * self.per_chunk + -(
            -self.per_chunk * self.rest // self.chunk
        )


def warm_up_chunks() -> None:
    """Compile the CPU kernel now rather than in the first step."""
    take_chunk_top_k(torch.arange(10.0), torch.zeros(10), Chunks(10, 4, 1))
