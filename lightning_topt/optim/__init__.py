"""The parallel optimizer step: work that is the same on all ranks is split, results are gathered.

    may it be split?     update_rule
    what does it cost?   step_costs
    who updates what?    pieces
    does it pay?         adaptive_step, which drives all of this over a fit
    the step             parallel_step, with gather and full_state (checkpoints as before)
    fused with DDP       reduce_scatter
    sharded parameters   local_step, clipping

`lars` and `adam_variants` have optimizers for large batches, and one for stale gradients.
"""

from typing import TYPE_CHECKING

from lightning_topt.basics.lazy_names import lazy_names

if TYPE_CHECKING:  # the same names, for type checkers and editors
    from lightning_topt.optim.adam_variants import LAMB
    from lightning_topt.optim.lars import LARS, share_trust_ratios, unshare_trust_ratios
    from lightning_topt.optim.parallel_step import ParallelStep, install_parallel_step
    from lightning_topt.optim.pieces import Piece
    from lightning_topt.optim.update_rule import UnsplittableOptimizer

# Each name, and the module that it is imported from at its first use.
_HOMES = {
    "LAMB": "adam_variants",
    "LARS": "lars",
    "share_trust_ratios": "lars",
    "unshare_trust_ratios": "lars",
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
    "share_trust_ratios",
    "unshare_trust_ratios",
]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
