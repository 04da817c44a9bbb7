"""The largest entries of a tensor, and the step of error feedback that selects them."""

from lightning_topt.communication.selection.outcome import NonFiniteError, Selection
from lightning_topt.communication.selection.top_k import METHODS, feedback_top_k, top_k, warm_up

__all__ = ["METHODS", "NonFiniteError", "Selection", "feedback_top_k", "top_k", "warm_up"]
