"""Sums of gradients by datagrams that need not all arrive; `exchange` says how it works."""

from typing import TYPE_CHECKING

from lightning_topt.basics.lazy_names import lazy_names

if TYPE_CHECKING:  # the same names, for type checkers and editors
    from lightning_topt.communication.bounded_loss.delivery import Handle, Outcome, PeerSilentError
    from lightning_topt.communication.bounded_loss.endpoint import open_endpoint
    from lightning_topt.communication.bounded_loss.exchange import (
        BoundedLossExchange,
        BoundedLossStatistics,
        WireOptions,
    )

# Each name, and the module that it is imported from at its first use.
_HOMES = {
    "Handle": "delivery",
    "Outcome": "delivery",
    "PeerSilentError": "delivery",
    "open_endpoint": "endpoint",
    "BoundedLossExchange": "exchange",
    "BoundedLossStatistics": "exchange",
    "WireOptions": "exchange",
}

__all__ = [
    "BoundedLossExchange",
    "BoundedLossStatistics",
    "Handle",
    "Outcome",
    "PeerSilentError",
    "WireOptions",
    "open_endpoint",
]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
