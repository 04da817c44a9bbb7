"""The parallel optimizer step: work that is the same on all ranks is split, and its results are
gathered.

optimizer -> update_rule, make_shares -> choose_pieces (does it pay?) -> install_parallel_step ->
checkpoints as before
"""

from lightning_topt.optim.lamb import LAMB
from lightning_topt.optim.lars import LARS
from lightning_topt.optim.parallel_step import ParallelStep, install_parallel_step
from lightning_topt.optim.pieces import Piece
from lightning_topt.optim.trust_ratios import share_trust_ratios, unshare_trust_ratios
from lightning_topt.optim.update_rule import UnsplittableOptimizer

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
