"""Gradient exchange and collectives, usable without the rest of the package."""

from lightning_topt.communication.hook import CompressedExchange, ExchangeStatistics
from lightning_topt.communication.local_steps import LocalSteps
from lightning_topt.communication.options import ExchangeOptions, LinkCosts
from lightning_topt.communication.peers import PeerLostError
from lightning_topt.communication.selection import Selection, feedback_top_k, top_k
from lightning_topt.communication.topology import Topology

__all__ = [
    "CompressedExchange",
    "ExchangeOptions",
    "ExchangeStatistics",
    "LinkCosts",
    "LocalSteps",
    "PeerLostError",
    "Selection",
    "Topology",
    "feedback_top_k",
    "top_k",
]
