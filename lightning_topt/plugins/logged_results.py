"""What Lightning has logged in an epoch, on ranks that had no batch in it.

Lightning reduces what was logged rank by rank, key by key. A rank that has logged nothing would not
take part: it learns the keys from another rank, and counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lightning_topt.plugins.lent_methods import LentMethods


def share_results(
    results: _ResultCollection, module: nn.Module, *, without: Collection[int]
) -> None:
    """Give the ranks `without` a batch the keys of what others have logged.

    A collective call. What ranks reduce together counts nothing there. Of what each rank has for
    itself they get the value of one that had a batch.
    """
    ranks = [rank for rank in range(dist.get_world_size()) if rank not in without]
    forms = _forms_of_lists(module)
    found, forms = _from_first((_described(results), forms), ranks)
    _raise_of(found)
    if dist.get_rank() in without:
        for key, described in found.items():
            results[key] = _adopted(results.pop(key, None), described, module)
        _fill_lists(module, forms)


def share_step(results: _ResultCollection, module: nn.Module, *, ranks: Sequence[int]) -> None:
    """Give others the values of a step that only `ranks` have a batch for. A collective call.

    What follows a value, to save, to stop or to learn slower, then does so on all ranks alike.
    """
    found = _from_first(_described(results, of_steps=True), ranks)
    _raise_of(found)
    if dist.get_rank() in ranks:
        return
    for key, described in found.items():
        if key not in results or results[key].has_reset:
            results[key] = _adopted(results.pop(key, None), described, module)
        value, device = described["of_step"], next(iter(module.parameters())).device
        results[key]._forward_cache = None if value is None else value.to(device)


def _from_first(own: Any, ranks: Sequence[int]) -> Any:
    """Return what the first of `ranks` has."""
    shared = [own if dist.get_rank() == ranks[0] else None]
    dist.broadcast_object_list(shared, ranks[0])
    return shared[0]


def _raise_of(found: Any) -> None:
    """Raise what the rank that described its results could not tell."""
    if isinstance(found, str):
        raise ValueError(found)


def lend_syncs(module: nn.Module, lent: LentMethods) -> None:
    """Let metrics of `module` with lists that ranks do not concatenate have unequal ones.

    torchmetrics gathers such lists entry by entry, and waits for those that a rank has not.
    """
    for metric in module.modules():
        is_lent = isinstance(vars(metric).get("_sync_dist"), partial)
        if isinstance(metric, Metric) and not is_lent and _unequal_lists_of(metric):
            lent.lend(metric, "_sync_dist", _sync_lists)


def _unequal_lists_of(metric: Metric) -> list[str]:
    """Return the names of states that are lists, and are gathered entry by entry."""
    reductions = metric._reductions.items()
    return [
        name for name, how in reductions if how is None and isinstance(getattr(metric, name), list)
    ]


def _sync_lists(own: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Gather the states of a metric: entries are added where ranks have fewer, then left out."""
    metric: Any = own.__self__  # type: ignore[attr-defined]
    given = kwargs.get("process_group", args[1] if len(args) > 1 else None)
    group = given or metric.process_group
    names = _unequal_lists_of(metric)
    described = {}
    for name in names:
        entries = getattr(metric, name)
        described[name] = len(entries), _form(entries[0]) if entries else None
    rows: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, described, group=group)
    kept: dict[str, list[bool]] = {}
    for name in names:
        counts, most = [row[name][0] for row in rows], max(row[name][0] for row in rows)
        if min(counts) == most:
            continue
        form = next(row[name][1] for row in rows if row[name][0])
        missing = [_nothing_of(form, metric.device)] * (most - len(getattr(metric, name)))
        setattr(metric, name, [*getattr(metric, name), *missing])
        # torchmetrics' order: the first entries of all ranks, the second ones, ...
        kept[name] = [index < count for index in range(most) for count in counts]
    own(*args, **kwargs)
    for name, keeps in kept.items():
        entries = zip(getattr(metric, name), keeps, strict=True)
        setattr(metric, name, [entry for entry, is_kept in entries if is_kept])


def _form(entry: Any) -> tuple[torch.dtype, int] | None:
    return (entry.dtype, entry.dim()) if isinstance(entry, Tensor) else None


def _nothing_of(form: tuple[torch.dtype, int] | None, device: torch.device) -> Any:
    """Return an entry that is left out: a tensor, or a tuple as of masks."""
    return () if form is None else torch.zeros([0] * form[1], dtype=form[0], device=device)


def _forms_of_lists(module: nn.Module) -> dict[tuple[str, str], tuple[torch.dtype, torch.Size]]:
    """Return the dtype, and the shape but for its length, of lists that ranks concatenate."""
    found = {}
    for name, metric in module.named_modules():
        for state in _lists_of(metric):
            tensors = getattr(metric, state)
            if not tensors:
                continue
            if any(tensor.dim() == 0 for tensor in tensors):
                tensors = [dim_zero_cat(tensors)]
                setattr(metric, state, tensors)
            found[name, state] = (tensors[0].dtype, tensors[0].shape[1:])
    return found


def _fill_lists(
    module: nn.Module, forms: dict[tuple[str, str], tuple[torch.dtype, torch.Size]]
) -> None:
    """Give lists that are empty a tensor of no samples: torchmetrics would guess its form."""
    for name, metric in module.named_modules():
        for state in _lists_of(metric):
            if not getattr(metric, state) and (name, state) in forms:
                dtype, shape = forms[name, state]
                nothing = torch.empty((0, *shape), dtype=dtype, device=metric.device)
                setattr(metric, state, [nothing])


def _lists_of(module: nn.Module) -> list[str]:
    """Return the names of a metric's states that are lists, and tensors between ranks."""
    if not isinstance(module, Metric):
        return []
    return [
        name
        for name, reduction in module._reductions.items()
        if reduction is dim_zero_cat and isinstance(getattr(module, name), list)
    ]


def _described(
    results: _ResultCollection, *, of_steps: bool = False
) -> dict[str, dict[str, Any]] | str:
    """Return what is logged, of steps or in all; words where that cannot be."""
    found: dict[str, dict[str, Any]] = {}
    for key, metric in results.valid_items():
        meta, sync = metric.meta, metric.meta.sync
        if of_steps and not meta.on_step:
            continue
        if sync.group is not None:
            return (
                f"self.log({meta.name!r}, sync_dist_group=...) was called where some ranks had no "
                "batch, which cannot tell whether they are of that group: leave it out"
            )
        of_step = metric._forward_cache if of_steps else None
        states = {name: getattr(metric, name).cpu() for name in metric._defaults}
        found[key] = {
            "meta": {
                each.name: getattr(meta, each.name)
                for each in fields(meta)
                if each.name not in ("_sync", "sync")
            },
            "sync": {"_should": sync.should, "rank_zero_only": sync.rank_zero_only},
            "states": states if metric.is_tensor else None,
            "of_step": of_step.detach().cpu() if isinstance(of_step, Tensor) else None,
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
