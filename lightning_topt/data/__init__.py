"""Loading data: samples cached in memory and on disk, shared by processes, jobs and nodes.

    cache/            the tiers of a cache, what is in them, and the data set in front of them
    peers/            a cache partitioned over nodes
    coordinated/      batches that several jobs of one machine prepare together
    resumable_loader  a DataLoader that resumes in the middle of an epoch

Names are imported when they are first used: light processes use parts of this package without
torch.
"""

from typing import TYPE_CHECKING

from lightning_topt.basics import lazy_names

if TYPE_CHECKING:
    from lightning_topt.data.cache.cached_dataset import (
        CachedDataset,
        NotDeterministicError,
        deterministic,
    )
    from lightning_topt.data.cache.sample_cache import SampleCache

_HOMES = {
    "CachedDataset": "cache.cached_dataset",
    "NotDeterministicError": "cache.cached_dataset",
    "SampleCache": "cache.sample_cache",
    "deterministic": "cache.cached_dataset",
}
__all__ = ["CachedDataset", "NotDeterministicError", "SampleCache", "deterministic"]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
