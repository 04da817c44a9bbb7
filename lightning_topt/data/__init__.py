"""Samples cached in memory and on disk, shared by processes, jobs and nodes; and what waiting for
data is made of.

Names are imported when they are first used: helper processes use parts of this package and do
without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_topt.data.cache.cache_counters import CacheStatistics
    from lightning_topt.data.cache.cached_dataset import CachedDataset
    from lightning_topt.data.cache.determinism import NotDeterministicError, deterministic
    from lightning_topt.data.cache.sample_cache import RefusedCacheError, SampleCache
    from lightning_topt.data.cache.sample_codec import UnsupportedSample, register_sample_type

__all__ = [
    "CacheStatistics",
    "CachedDataset",
    "NotDeterministicError",
    "RefusedCacheError",
    "SampleCache",
    "UnsupportedSample",
    "deterministic",
    "register_sample_type",
]
_HOMES = {
    "CachedDataset": "cache.cached_dataset",
    "NotDeterministicError": "cache.determinism",
    "deterministic": "cache.determinism",
    "CacheStatistics": "cache.cache_counters",
    "RefusedCacheError": "cache.sample_cache",
    "SampleCache": "cache.sample_cache",
    "UnsupportedSample": "cache.sample_codec",
    "register_sample_type": "cache.sample_codec",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
