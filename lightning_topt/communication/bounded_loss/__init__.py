"""Sums of gradients by datagrams that need not all arrive; `exchange` says how it works."""

from lightning_topt.communication.bounded_loss.delivery import Handle, Outcome, PeerSilentError
from lightning_topt.communication.bounded_loss.endpoint import ConnectionFailedError, open_endpoint
from lightning_topt.communication.bounded_loss.exchange import (
    BoundedLossExchange,
    BoundedLossStatistics,
    WireOptions,
)

__all__ = [
    "BoundedLossExchange",
    "BoundedLossStatistics",
    "ConnectionFailedError",
    "Handle",
    "Outcome",
    "PeerSilentError",
    "WireOptions",
    "open_endpoint",
]
