"""The largest entries of a tensor, and the step of error feedback that selects them."""

from lightning_topt.communication.selection.vector_top_k import (
    METHODS,
    NonFiniteError,
    Selection,
    feedback_top_k,
    top_k,
    warm_up,
)

__all__ = ["METHODS", "NonFiniteError", "Selection", "feedback_top_k", "top_k", "warm_up"]
