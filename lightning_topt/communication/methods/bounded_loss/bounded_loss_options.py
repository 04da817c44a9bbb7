"""The options of bounded loss, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from lightning_topt.basics.argument_checks import check_flag, check_real
from lightning_topt.communication.exchange_method import ByNodes, FeedbackMethod

MOST_LOSS = 0.5


@dataclass(frozen=True, kw_only=True)
class BoundedLossOptions(ByNodes, FeedbackMethod):
    """Options of `BoundedLoss`, beside those of all methods with error feedback and by nodes.

    - ``tolerance``: the share of each parameter's gradient that may be lost, at least 0 and at most
      0.5;
    - ``error_feedback``: what was lost is added to the next gradient; without, it counts as 0;
    - ``rescale``: the sum of each element is multiplied by (ranks / ranks whose contribution
      arrived), instead of error feedback;
    - ``exempt``: parameters of which nothing may be lost;
    - ``protected``: the share of entries, the largest, that travel by an all-gather beside the
      datagrams: only packets of small entries can then be lost;
    - ``bits`` of a value on its way: 32, or 16 (bfloat16). Sums are made in float32 and rounded
      again; what rounding takes away is not held back.
    """

    tolerance: float = 0.01
    rescale: bool = False
    protected: float = 0.0
    bits: int = 32

    @override
    def check(self) -> None:
        super().check()
        check_real(self.tolerance, name="tolerance")
        if not 0 <= self.tolerance <= MOST_LOSS:
            raise ValueError(
                f"tolerance is the share that may be lost, at least 0 and at most {MOST_LOSS}; got "
                f"{self.tolerance}"
            )
        check_flag(self.rescale, name="rescale")
        if not 0 <= check_real(self.protected, name="protected") < 1:
            raise ValueError(
                "protected is the share of entries that cannot be lost, below 1; got "
                f"{self.protected}"
            )
        if self.bits not in (16, 32):
            raise ValueError(f"bits of a value on its way are 16 or 32; got {self.bits}")
        if self.rescale and self.error_feedback:
            raise ValueError(
                "rescale makes up for lost gradients at once and error_feedback later: choose one "
                "of them (rescale=True, "
                "error_feedback=False)"
            )
