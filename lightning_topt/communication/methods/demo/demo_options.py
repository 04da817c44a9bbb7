"""The options of DeMo, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from lightning_topt.basics.argument_checks import check_real, check_whole
from lightning_topt.communication.exchange_method import ByNodes, CompressedMethod
from lightning_topt.communication.level_message import HALF_BITS
from lightning_topt.communication.levels import check_bits


@dataclass(frozen=True, kw_only=True)
class DeMoOptions(ByNodes, CompressedMethod):
    """Options of `DeMo`, beside those of all methods by nodes.

    - ``density``: the share of the coefficients of each tile that is sent, at least one;
    - ``decay``: of the momentum, per step;
    - ``chunk``: tiles of a matrix are at most (chunk, chunk): the largest divisors of its dims;
    - ``bits``: of each coefficient sent: 1, 2, 4 or 8 (`levels`), or 16 (bfloat16); the rest stays
      in the momentum.
    """

    density: float = 0.01
    decay: float = 0.999
    chunk: int = 64
    bits: int = 2

    @override
    def check(self) -> None:
        super().check()
        for name in ("density", "decay"):
            check_real(getattr(self, name), name=name)
        if not 0 < self.density <= 1:
            raise ValueError(
                f"density is the fraction sent, above 0 and at most 1; got {self.density}"
            )
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay is at least 0 and below 1; got {self.decay}")
        check_whole(self.chunk, name="chunk (the longest side of a tile)")
        check_bits(self.bits, others=(HALF_BITS,))

    @override
    def density_at(self, step: int) -> float:
        return 1.0 if self.is_dense_step(step) else self.density
