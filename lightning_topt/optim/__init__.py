"""The parallel optimizer step: work that is the same on all ranks is split, results are gathered.

    may it be split?     update_rule
    who updates what?    pieces
    does it pay?         adaptive_step, which drives all of this over a fit
    the step             parallel_step, with gather and full_state (checkpoints as before)
    sharded parameters   local_step, clipping

`large_batch` has LARS and LAMB.
"""

from typing import TYPE_CHECKING

from lightning_topt.basics.lazy_names import lazy_names

if TYPE_CHECKING:  # the same names, for type checkers and editors
    from lightning_topt.optim.large_batch import LAMB, LARS
    from lightning_topt.optim.parallel_step import ParallelStep, install_parallel_step
    from lightning_topt.optim.pieces import Piece
    from lightning_topt.optim.update_rule import UnsplittableOptimizer

# Each name, and the module that it is imported from at its first use.
_HOMES = {
    "LAMB": "large_batch",
    "LARS": "large_batch",
    "ParallelStep": "parallel_step",
    "install_parallel_step": "parallel_step",
    "Piece": "pieces",
    "UnsplittableOptimizer": "update_rule",
}

__all__ = [
    "LAMB",
    "LARS",
    "ParallelStep",
    "Piece",
    "UnsplittableOptimizer",
    "install_parallel_step",
]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
