"""Which placements a function of torch admits: one table, read by the search and by the run.

    rules         what a rule is: `Kind`, `OpCall`, `Row`, and the helpers to write one
    elementwise   functions of single elements; dropout and other random numbers
    reductions    sums, softmax, norms, losses
    products      linear layers, matrix products, embeddings, convolutions, attention
    shapes        reshapes, joins, indexing

A function that is not in `KINDS` gets unsharded tensors.
"""

from __future__ import annotations

# each enters its functions
from lightning_topt.techniques.tensor_parallel.op_rules import (  # noqa: F401
    elementwise,
    products,
    reductions,
    shapes,
)
from lightning_topt.techniques.tensor_parallel.op_rules.rules import KINDS

__all__ = ["KINDS"]
