"""Loading data: samples cached in memory and on disk, shared by processes, jobs and nodes.

    cache/            the tiers of a cache, what is in them, and the data set in front of them
    peers/            a cache partitioned over nodes
    coordinated/      batches that several jobs of one machine prepare together
    stalls            measures what a loop waits for
    resumable_loader  a DataLoader that resumes in the middle of an epoch

Names are imported when they are first used: light processes use parts of this package without
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_topt.data.cache.cached_dataset import CachedDataset
    from lightning_topt.data.cache.determinism import NotDeterministicError, deterministic
    from lightning_topt.data.cache.sample_cache import (
        CacheStatistics,
        RefusedCacheError,
        SampleCache,
    )
    from lightning_topt.data.cache.sample_codec import UnsupportedSample

__all__ = [
    "CacheStatistics",
    "CachedDataset",
    "NotDeterministicError",
    "RefusedCacheError",
    "SampleCache",
    "UnsupportedSample",
    "deterministic",
]
_HOMES = {
    "CachedDataset": "cache.cached_dataset",
    "NotDeterministicError": "cache.determinism",
    "deterministic": "cache.determinism",
    "CacheStatistics": "cache.sample_cache",
    "RefusedCacheError": "cache.sample_cache",
    "SampleCache": "cache.sample_cache",
    "UnsupportedSample": "cache.sample_codec",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
