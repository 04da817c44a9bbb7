"""The costs of one parameter's update are measured in the first real steps of the run.

A measured step is a full and correct one: it is made of several calls of ``optimizer.step``, each
on the parameters of one kind (equal shape, dtype and group), and what counts calls (numbers in the
groups and on the optimizer) is set back between them. `update_rule.calls_may_repeat` says where
that is right; elsewhere `estimate_seconds` spreads the time of plain steps.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_topt.optim.assignment import Share
from lightning_topt.optim.counters import Counters
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.pieces import num_rows
from lightning_topt.optim.update_rule import UpdateRule

Step = Callable[[], Any]
Work = Literal["elements", "matrices"]


def parameter_kinds(optimizer: Optimizer) -> list[list[int]]:
    """Return the indices of all parameters, those of one group, shape, dtype and presence of a
    gradient together.
    """
    kinds: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    index = 0
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            kinds[number, tuple(parameter.shape), parameter.dtype, parameter.grad is None].append(
                index
            )
            index += 1
    return list(kinds.values())


def time_step(optimizer: Optimizer, step: Step) -> float:
    """Return the seconds of one plain call of `step`, with the device idle before and after."""
    device = _device(optimizer)
    _synchronize(device)
    start = perf_counter()
    step()
    _synchronize(device)
    return perf_counter() - start


def measure_step(
    optimizer: Optimizer, step: Step, *, kinds: Sequence[Sequence[int]]
) -> dict[int, float]:
    """Do one step of `optimizer`, one call of `step` (its own, without closure) per kind; seconds
    by parameter index.

    `kinds` are sets of parameter indices that cover all parameters once; members of one kind are
    taken to cost the same. Only right where `update_rule.calls_may_repeat`. Afterwards the
    optimizer is as after one call for everything.
    """
    assert sorted(index for kind in kinds for index in kind) == list(
        range(len(parameters_of(optimizer)))
    )
    counters = Counters(optimizer)
    seconds: dict[int, float] = {}
    for number, kind in enumerate(kinds):
        if number:
            counters.restore()
        with _only(optimizer, kind):
            elapsed = time_step(optimizer, step)
        seconds |= dict.fromkeys(kind, elapsed / len(kind))
    return seconds


def combine(
    by_kind: Sequence[Mapping[int, float]], *, whole_seconds: Sequence[float]
) -> list[float]:
    """Return the seconds by parameter index: medians of several `measure_step`, scaled to the
    median of plain steps, `whole_seconds`.

    One call for all parameters is cheaper than one per kind (foreach, launches); only the
    proportions are the kinds'.
    """
    assert by_kind and whole_seconds
    medians = [
        statistics.median(measured[index] for measured in by_kind)
        for index in range(len(by_kind[0]))
    ]
    return _spread(medians, statistics.median(whole_seconds))


def estimate_seconds(
    optimizer: Optimizer, *, work: Work, whole_seconds: Sequence[float]
) -> list[float]:
    """Return the seconds by parameter index where the calls of a step cannot be told apart: the
    median of plain steps, spread.

    `work` "elements": in proportion to elements. "matrices": a matrix (m, n), from flattening all
    dims but the first, weighs max(m, n) min(m, n)^2 elements more, as an orthogonalisation does
    (Muon). Parameters without gradient cost nothing.
    """
    weights = []
    for parameter in parameters_of(optimizer):
        weight = float(parameter.numel())
        if work == "matrices" and parameter.dim() >= 2 and parameter.numel():
            sides = sorted((parameter.shape[0], parameter.numel() // parameter.shape[0]))
            weight += float(sides[1]) * sides[0] ** 2
        weights.append(0.0 if parameter.grad is None else weight)
    return _spread(weights, statistics.median(whole_seconds))


def _spread(weights: Sequence[float], total: float) -> list[float]:
    whole = math.fsum(weights)
    return [total * weight / whole if whole else 0.0 for weight in weights]


def slowest_of_ranks(
    values: Sequence[float], *, device: torch.device, group: dist.ProcessGroup | None = None
) -> list[float]:
    """Return the `values` (seconds) of that rank of `group` whose sum is largest, on all ranks:
    they decide alike from them.

    Not the maximum of each value: the sum of maxima of noisy values is more than any rank takes.
    """
    if not values:
        return []
    mine = torch.tensor(list(values), dtype=torch.float64, device=device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    slowest: list[float] = max((row.tolist() for row in rows), key=math.fsum)
    return slowest


def make_shares(optimizer: Optimizer, *, rule: UpdateRule, seconds: Sequence[float]) -> list[Share]:
    """Return the shares of all parameters that have elements: `seconds` by index, bytes of state as
    they are now.

    So not before the first step. A parameter that has no state yet is taken to keep as much per
    byte of its own as the others do.
    """
    parameters = parameters_of(optimizer)
    groups = [
        number for number, group in enumerate(optimizer.param_groups) for _ in group["params"]
    ]
    states = {
        index: _state_bytes(optimizer, p)
        for index, p in enumerate(parameters)
        if p in optimizer.state
    }
    known = sum(parameters[index].nbytes for index in states)
    per_byte = sum(states.values()) / known if known else 0.0
    return [
        Share(
            index=index,
            rows=num_rows(parameter),
            nbytes=states.get(index, round(parameter.nbytes * per_byte)),
            cost_seconds=seconds[index],
            splittable=rule == "elements",
            group=groups[index],
        )
        for index, parameter in enumerate(parameters)
        if parameter.numel()
    ]


def _state_bytes(optimizer: Optimizer, parameter: Tensor) -> int:
    return sum(
        leaf.nbytes
        for leaf in tree_leaves(dict(optimizer.state[parameter]))
        if isinstance(leaf, Tensor)
    )


@contextmanager
def _only(optimizer: Optimizer, kept: Sequence[int]) -> Iterator[None]:
    """Leave all parameters but those with indices `kept` out of the groups."""
    wanted, index, saved = set(kept), 0, []
    for group in optimizer.param_groups:
        keep = [index + i in wanted for i in range(len(group["params"]))]
        index += len(keep)
        lists: dict[str, list[Any]] = {
            key: group[key] for key in ("params", "param_names") if key in group
        }
        saved.append((group, lists))
        group |= {
            key: [v for v, k in zip(values, keep, strict=True) if k]
            for key, values in lists.items()
        }
    try:
        yield
    finally:
        for group, lists in saved:
            group |= lists


def _device(optimizer: Optimizer) -> torch.device:
    parameters = parameters_of(optimizer)
    return parameters[0].device if parameters else torch.device("cpu")


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
