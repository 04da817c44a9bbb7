"""All kinds of functions that run on split tensors; what is not among them gets whole tensors."""

from __future__ import annotations

from lightning_topt.techniques.tensor_parallel import (  # noqa: F401  # they enter their functions
    kinds_attention,
    kinds_convolution,
    kinds_elementwise,
    kinds_index,
    kinds_joins,
    kinds_losses,
    kinds_norms,
    kinds_products,
    kinds_random,
    kinds_recurrent,
    kinds_reductions,
    kinds_shape,
)
from lightning_topt.techniques.tensor_parallel.kinds import KINDS

__all__ = ["KINDS"]
