"""What Lightning has logged in an epoch, on ranks that had no batch in it.

Lightning reduces what was logged rank by rank, key by key. A rank that has logged nothing would not
take part: it learns the keys from another rank, and counts nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torch import nn
from torchmetrics import Metric

_ALLOWS = "allow_zero_length_dataloader_with_multiple_devices"


@contextmanager
def zero_length_allowed(module: pl.LightningModule) -> Generator[None, None, None]:
    """Let Lightning take loaders without a batch on some ranks."""
    before = getattr(module, _ALLOWS)
    setattr(module, _ALLOWS, True)
    try:
        yield
    finally:
        setattr(module, _ALLOWS, before)


def share_results(
    results: _ResultCollection, module: nn.Module, *, without: Collection[int]
) -> None:
    """Give the ranks `without` a batch the keys of what others have logged.

    A collective call. What ranks reduce together counts nothing there. Of what each rank has for
    itself they get the value of one that had a batch.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    source = min(each for each in range(size) if each not in without)
    shared = [_described(results) if rank == source else None]
    dist.broadcast_object_list(shared, source)
    if rank in without:
        assert shared[0] is not None
        for key, described in shared[0].items():
            results[key] = _adopted(results.pop(key, None), described, module)


def _described(results: _ResultCollection) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for key, metric in results.valid_items():
        meta, sync = metric.meta, metric.meta.sync
        if sync.group is not None:
            raise ValueError(
                f"self.log({meta.name!r}, sync_dist_group=...) was called where some ranks had no "
                "batch, which cannot tell whether they are of that group: leave it out"
            )
        states = {name: getattr(metric, name).cpu() for name in metric._defaults}
        found[key] = {
            "meta": {
                each.name: getattr(meta, each.name)
                for each in fields(meta)
                if each.name not in ("_sync", "sync")
            },
            "sync": {"_should": sync.should, "rank_zero_only": sync.rank_zero_only},
            "states": states if metric.is_tensor else None,
        }
    return found


def _adopted(
    metric: _ResultMetric | None, described: dict[str, Any], module: nn.Module
) -> _ResultMetric:
    states, device = described["states"], next(iter(module.parameters())).device
    if metric is None:
        meta: Any = _Metadata(**described["meta"])
        reduce: Any = module.trainer.strategy.reduce  # type: ignore[union-attr]
        meta.sync = _Sync(fn=reduce, **described["sync"])
        metric = _ResultMetric(meta, states is not None)
    metric.has_reset, metric._computed = False, None
    if states is None:
        own: Any = module.get_submodule(described["meta"]["metric_attribute"])
        # A value that is kept from before would be returned without the other ranks.
        for part in own.modules():
            if isinstance(part, Metric):
                part._computed = None
        metric.value = own
        return metric
    metric.to(device)
    for name, value in states.items():
        # Counts nothing, or is as on the other rank.
        alone = not described["sync"]["_should"]
        default: Any = metric._defaults[name]
        kept = value if alone else default.to(value.dtype, copy=True)
        setattr(metric, name, kept.to(device))
    return metric
