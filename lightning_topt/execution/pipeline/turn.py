"""`Turn`: what an iteration of a continuous run has brought back to a stage."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_topt.execution.pipeline.side_values import SideValues


@dataclass(eq=False)
class Turn:
    """A turn, in which gradients of `minibatch` have been added to ``.grad``; None while none has
    come back (warm-up).

    `completes`: the optimizer is to step now. `losses` are those that this rank knows since this
    turn, by minibatch, and `payload` is what the last stage sent with the minibatch.
    """

    minibatch: int | None
    completes: bool
    values: SideValues | None
    is_open: bool = True  # its values have not gone on to the stage before
    is_updated: bool = False

    @property
    def losses(self) -> dict[int, Tensor]:
        """The losses by minibatch, without weights."""
        return (
            {}
            if self.minibatch is None or self.values is None
            else {self.minibatch: self.values.loss}
        )

    @property
    def payload(self) -> bytes | None:
        """The bytes that travelled back with the minibatch."""
        return None if self.values is None else self.values.payload
