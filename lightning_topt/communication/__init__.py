"""Gradient exchange and collectives, usable without the rest of the package."""

from typing import TYPE_CHECKING

from lightning_topt.basics import lazy_names

if TYPE_CHECKING:  # the same names, for type checkers and editors
    from lightning_topt.communication.bucket import ExchangeSettings
    from lightning_topt.communication.exchange_method import (
        ExchangeMethod,
        GradientMethod,
        LocalMethod,
        read_method,
    )
    from lightning_topt.communication.hook import CompressedExchange, ExchangeStatistics
    from lightning_topt.communication.local_sgd import OuterSteps
    from lightning_topt.communication.methods.bounded_loss import BoundedLoss
    from lightning_topt.communication.methods.dense import BF16, FP16, Dense
    from lightning_topt.communication.methods.local_steps import LocalSteps, SparseLoCo
    from lightning_topt.communication.methods.top_k import TopK
    from lightning_topt.communication.rank_watch import PeerLostError
    from lightning_topt.communication.selection import Selection, feedback_top_k, top_k
    from lightning_topt.communication.topology import Topology

# Each name, and the module that it is imported from at its first use.
_HOMES = {
    "ExchangeSettings": "bucket",
    "ExchangeMethod": "exchange_method",
    "GradientMethod": "exchange_method",
    "CompressedExchange": "hook",
    "ExchangeStatistics": "hook",
    "LocalMethod": "exchange_method",
    "OuterSteps": "local_sgd",
    "read_method": "exchange_method",
    "BoundedLoss": "methods.bounded_loss",
    "Dense": "methods.dense",
    "BF16": "methods.dense",
    "FP16": "methods.dense",
    "LocalSteps": "methods.local_steps",
    "SparseLoCo": "methods.local_steps",
    "TopK": "methods.top_k",
    "PeerLostError": "rank_watch",
    "Selection": "selection",
    "feedback_top_k": "selection",
    "top_k": "selection",
    "Topology": "topology",
}

__all__ = [
    "BF16",
    "FP16",
    "BoundedLoss",
    "CompressedExchange",
    "Dense",
    "ExchangeMethod",
    "ExchangeSettings",
    "ExchangeStatistics",
    "GradientMethod",
    "LocalMethod",
    "LocalSteps",
    "OuterSteps",
    "PeerLostError",
    "Selection",
    "SparseLoCo",
    "TopK",
    "Topology",
    "feedback_top_k",
    "read_method",
    "top_k",
]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
