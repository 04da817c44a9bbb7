"""A method's exchange of one bucket takes passes over memory, collectives, and bytes held: its
`Work`, seconds left out.

Formulas are in the `work` of each method. Their letters: n gradient elements, s bytes of one; W
ranks = m nodes x l; b bytes of a message. The bytes are those that the exchange itself moves.
Collectives run "world" (among all ranks), "node" (inside each node) or "across" (among the ranks
with equal position in their nodes, all l groups at once).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_topt.communication.bucket import BucketLayout

# In bytes of a copy that takes as long, measured on one core at densities of 0.1 to 5 %: passes
# over the entries (values, and indices to bits and back), and the cache lines that scattered
# additions touch.
PACK_BYTES_PER_ENTRY, DECODE_BYTES_PER_ENTRY = 50, 100
EXEMPT_PASSES = 10  # packed, looked through, divided, written back
# kernels for one message, one received message, one matrix
ENCODE_CALLS, DECODE_CALLS, MATRIX_CALLS = 16, 10, 8


@dataclass(frozen=True)
class Work:
    """`Work` is what exchanging the gradients of one bucket takes on each rank.

    `moved` bytes are read and written by `calls` kernels that do `flops`. `collectives` run one
    after another: (where, op, bytes of the whole tensor), where is "world", "node" or "across"; the
    all-reduce of `exempt_bytes` over all ranks runs beside the first. `kept_bytes` stay between
    steps, `buffer_bytes` while the exchange is in flight. Of what goes by datagrams (the op
    "bounded_loss") the share `tolerance` may be lost.
    """

    moved: float
    calls: int
    collectives: tuple[tuple[str, str, float], ...]
    kept_bytes: float = 0.0
    buffer_bytes: float = 0.0
    flops: float = 0.0
    exempt_bytes: float = 0.0
    tolerance: float = 0.0


NO_WORK = Work(0.0, 0, ())


@dataclass(frozen=True)
class BucketGradients:
    """The gradients of one bucket, and the bytes of each parameter's."""

    layout: BucketLayout
    sizes: tuple[int, ...]

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return sum(self.layout.numels)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(self.sizes)

    @cached_property
    def compressible(self) -> int:
        """Number of parameters that are not exempt."""
        return sum(not exempt for exempt in self.layout.exempt)

    @cached_property
    def compressible_numel(self) -> int:
        """Elements of those."""
        return self._sum(self.layout.numels, exempt=False)

    @cached_property
    def exempt_bytes(self) -> int:
        """Bytes of the exempt gradients."""
        return self._sum(self.sizes, exempt=True)

    def _sum(self, values: Sequence[int], *, exempt: bool) -> int:
        return sum(
            value
            for value, is_exempt in zip(values, self.layout.exempt, strict=True)
            if is_exempt == exempt
        )
