"""Gradient exchange and collectives, usable without the rest of the package."""

from lightning_topt.communication.bucket import ExchangeSettings
from lightning_topt.communication.exchange_method import ExchangeMethod, GradientMethod
from lightning_topt.communication.hook import CompressedExchange, ExchangeStatistics
from lightning_topt.communication.local_sgd import LocalMethod, OuterSteps
from lightning_topt.communication.method_registry import read_method
from lightning_topt.communication.methods.bounded_loss import BoundedLoss
from lightning_topt.communication.methods.demo import DeMo
from lightning_topt.communication.methods.dense import Dense
from lightning_topt.communication.methods.half import BF16, FP16
from lightning_topt.communication.methods.local_steps import LocalSteps
from lightning_topt.communication.methods.power_sgd import PowerSGD
from lightning_topt.communication.methods.quantized_steps import QuantizedSteps
from lightning_topt.communication.methods.sign import Sign
from lightning_topt.communication.methods.sparse_loco import SparseLoCo
from lightning_topt.communication.methods.top_k import LinkCosts, TopK
from lightning_topt.communication.rank_watch import PeerLostError
from lightning_topt.communication.selection import Selection, feedback_top_k, top_k
from lightning_topt.communication.topology import Topology

__all__ = [
    "BF16",
    "FP16",
    "BoundedLoss",
    "CompressedExchange",
    "DeMo",
    "Dense",
    "ExchangeMethod",
    "ExchangeSettings",
    "ExchangeStatistics",
    "GradientMethod",
    "LinkCosts",
    "LocalMethod",
    "LocalSteps",
    "OuterSteps",
    "PeerLostError",
    "PowerSGD",
    "QuantizedSteps",
    "Selection",
    "Sign",
    "SparseLoCo",
    "TopK",
    "Topology",
    "feedback_top_k",
    "read_method",
    "top_k",
]
