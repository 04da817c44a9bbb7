"""The costs of an optimizer's updates, by parameter, measured in the first steps of a fit.

A measured step is a full and correct one. It is made of several calls of ``optimizer.step``, each
on the parameters of one kind (equal shape, dtype and group), and what counts calls (numbers in the
groups and on the optimizer) is set back between them. `update_rule.calls_may_repeat` says where
that is right; elsewhere `estimate_seconds` spreads the time of plain steps.

    costs = UpdateCosts(optimizer, rule=rule)
    while not costs.done:
        costs.take_step(step, closure)  # warm-up, then as a whole and by kind in alternation
    costs.agree(group)                  # the slowest rank's seconds, on all ranks
    shares = costs.shares(costs.seconds(), is_whole=True)
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, optim
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_topt.optim.adam_variants import LAMB
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.lars import LARS
from lightning_topt.optim.pieces import Share, num_rows, update_work
from lightning_topt.optim.update_rule import (
    OptimizerCounters,
    UpdateRule,
    calls_may_repeat,
    has_step_hooks,
    is_one_of,
)

WARMUP_STEPS = 1
# Of the steps that follow, the time as a whole, or of one kind of parameters after the other.
MEASURED_STEPS = ("whole", "kinds", "whole", "kinds", "whole")
# Their rule needs whole parameters, but costs about the same per element. Others are taken for
# matrix functions (Muon, Shampoo).
_EVEN_WORK: tuple[type[Optimizer], ...] = (optim.Adafactor, LARS, LAMB)
Closure = Callable[[], Any]
Step = Callable[[Closure | None], Any]
Work = Literal["elements", "matrices"]


class UpdateCosts:
    """Seconds and bytes of state of every parameter of `optimizer`.

    The first `WARMUP_STEPS` and `MEASURED_STEPS` are calls of `take_step`, then `agree` makes the
    seconds equal on all ranks. `rule` is the optimizer's `update_rule`.
    """

    def __init__(self, optimizer: Optimizer, *, rule: UpdateRule) -> None:
        self.optimizer, self.rule = optimizer, rule
        self.work: Work = (
            "elements" if rule == "elements" or is_one_of(optimizer, _EVEN_WORK) else "matrices"
        )
        self._repeats: bool | None = None
        self._seconds: dict[Tensor, float] = {}
        self._bytes: dict[Tensor, int] = {}
        self.restart()

    def restart(self) -> None:
        """Forget the steps so far: the optimizer has other parameters now."""
        self._steps_done, self._whole_seconds = 0, list[float]()
        self._by_kind: list[dict[int, float]] = []

    @property
    def done(self) -> bool:
        """Whether all measured steps have been taken."""
        return self._steps_done == WARMUP_STEPS + len(MEASURED_STEPS)

    def take_step(self, step: Step, closure: Closure | None = None) -> Any:
        """Take one plain step, and return what it returns.

        In pieces (several calls of `step`, after the closure) where it is timed by kind.
        """
        number, self._steps_done = self._steps_done - WARMUP_STEPS, self._steps_done + 1
        if number < 0:
            return step(closure)
        if MEASURED_STEPS[number] == "kinds":
            if self._repeats is None:
                self._repeats = calls_may_repeat(self.optimizer)
            if self._repeats and not has_step_hooks(self.optimizer):
                loss = None
                if closure is not None:
                    with torch.enable_grad():
                        loss = closure()
                again = None if closure is None else lambda: loss
                kinds = parameter_kinds(self.optimizer)
                self._by_kind.append(measure_step(self.optimizer, lambda: step(again), kinds=kinds))
                return loss
        output, seconds = time_step(self.optimizer, step, closure)
        self._whole_seconds.append(seconds)
        return output

    def agree(self, group: dist.ProcessGroup) -> None:
        """Take the seconds of the slowest rank of `group`, after the last measured step.

        Collective call.
        """
        if self._by_kind:
            mine = combine(self._by_kind, whole_seconds=self._whole_seconds)
        else:
            mine = estimate_seconds(
                self.optimizer, work=self.work, whole_seconds=self._whole_seconds
            )
        parameters = parameters_of(self.optimizer)
        slowest = slowest_of_ranks(mine, device=parameters[0].device, group=group)
        self._seconds = dict(zip(parameters, slowest, strict=True))

    def step_seconds(self) -> float:
        """Return the median of the plain steps that were timed as a whole, on this rank."""
        return statistics.median(self._whole_seconds)

    def expected_work(self) -> list[float]:
        """Return by parameter index which share of the work each update is expected to be."""
        return estimate_seconds(self.optimizer, work=self.work, whole_seconds=[1.0])

    def seconds(self) -> list[float]:
        """Return the seconds by parameter index.

        Measured, or for parameters that came later at the measured ones' seconds per unit of
        expected work.
        """
        parameters, expected = parameters_of(self.optimizer), self.expected_work()
        known = [
            (self._seconds[p], work)
            for p, work in zip(parameters, expected, strict=True)
            if p in self._seconds
        ]
        total = sum(work for _, work in known)
        rate = sum(seconds for seconds, _ in known) / total if total else 0.0
        return [
            self._seconds.get(p, rate * work) for p, work in zip(parameters, expected, strict=True)
        ]

    def shares(self, seconds: Sequence[float], *, is_whole: bool) -> list[Share]:
        """Return the shares of all parameters that have elements, of `seconds` by index.

        `is_whole`: this rank has the full state. Where not, bytes of state are those that were seen
        when it had, or as many per byte of the parameter.
        """
        parameters = parameters_of(self.optimizer)
        shares = make_shares(self.optimizer, rule=self.rule, seconds=seconds)
        if is_whole:  # without any state to go by, the parameters' own bytes are as good
            known = any(share.nbytes for share in shares)
            self._bytes = {
                parameters[s.index]: s.nbytes if known else parameters[s.index].nbytes
                for s in shares
            }
        per_byte = sum(self._bytes.values()) / max(
            1, sum(parameter.nbytes for parameter in self._bytes)
        )
        return [
            replace(
                s,
                nbytes=self._bytes.get(
                    parameters[s.index], round(parameters[s.index].nbytes * per_byte)
                ),
            )
            for s in shares
        ]


# ---- Measure one step


def parameter_kinds(optimizer: Optimizer) -> list[list[int]]:
    """Return the indices of all parameters, by kind.

    A kind has one group, shape, dtype and presence of a gradient.
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


def time_step(
    optimizer: Optimizer,
    step: Step,
    closure: Closure | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> tuple[Any, float]:
    """Return what one call of `step` returns, and its seconds without those of `closure`.

    The device is idle before and after. The ranks of `group` begin the update together.
    """
    parameters = parameters_of(optimizer)
    device = parameters[0].device if parameters else torch.device("cpu")
    closure_seconds = 0.0

    def begin_together() -> None:
        synchronize(device)
        if group is not None:
            dist.barrier(group=group)

    def timed_closure() -> Any:
        nonlocal closure_seconds
        assert closure is not None
        start = perf_counter()
        loss = closure()
        begin_together()
        closure_seconds += perf_counter() - start
        return loss

    begin_together()
    start = perf_counter()
    output = step(None if closure is None else timed_closure)
    synchronize(device)
    return output, perf_counter() - start - closure_seconds


def measure_step(
    optimizer: Optimizer, step: Callable[[], Any], *, kinds: Sequence[Sequence[int]]
) -> dict[int, float]:
    """Take one step of `optimizer`, one call of `step` per kind; return seconds by parameter index.

    `step` is the optimizer's own, without closure. `kinds` are sets of parameter indices that cover
    all parameters once; parameters of one kind are taken to cost the same. Only right where
    `update_rule.calls_may_repeat`. Afterwards the optimizer is as after one call for everything.
    """
    assert sorted(index for kind in kinds for index in kind) == list(
        range(len(parameters_of(optimizer)))
    )
    counters = OptimizerCounters(optimizer)
    seconds: dict[int, float] = {}
    for number, kind in enumerate(kinds):
        if number:  # each call begins as the first one did
            counters.restore()
        with _only(optimizer, kind):
            _, elapsed = time_step(optimizer, lambda _: step())
        seconds |= dict.fromkeys(kind, elapsed / len(kind))
    return seconds


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


def combine(
    by_kind: Sequence[Mapping[int, float]], *, whole_seconds: Sequence[float]
) -> list[float]:
    """Return seconds by parameter index from several `measure_step` and several plain steps.

    Medians of `by_kind`, scaled to the median of plain steps, `whole_seconds`. One call for all
    parameters is cheaper than one per kind (foreach, launches); only the proportions are the
    kinds'.
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
    """Return seconds by parameter index where the calls of a step cannot be distinguished.

    The median of plain steps, spread. `work` "elements": in proportion to elements. "matrices": a
    matrix (m, n), from flattening all dims but the first, weighs max(m, n) min(m, n)^2 elements
    more, as an orthogonalisation does (Muon). Parameters without gradient cost nothing; before
    the first backward pass those that are not trained.
    """
    weights, none_yet = [], all(p.grad is None for p in parameters_of(optimizer))
    for parameter in parameters_of(optimizer):
        weight = float(parameter.numel())
        if work == "matrices":
            weight = update_work(parameter.shape)
        counts = parameter.requires_grad if none_yet else parameter.grad is not None
        weights.append(weight if counts else 0.0)
    return _spread(weights, statistics.median(whole_seconds))


def _spread(weights: Sequence[float], total: float) -> list[float]:
    whole = math.fsum(weights)
    return [total * weight / whole if whole else 0.0 for weight in weights]


def slowest_of_ranks(
    values: Sequence[float], *, device: torch.device, group: dist.ProcessGroup | None = None
) -> list[float]:
    """Return, on all ranks, the `values` (seconds) of that rank whose sum is largest.

    Ranks decide alike from them. Not the maximum of each value: the sum of maxima of noisy values
    is more than any rank takes.
    """
    if not values:
        return []
    mine = torch.tensor(list(values), dtype=torch.float64, device=device)
    # by rank: (values,)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    slowest: list[float] = max((row.tolist() for row in rows), key=math.fsum)
    return slowest


# ---- Shares for an assignment


def make_shares(optimizer: Optimizer, *, rule: UpdateRule, seconds: Sequence[float]) -> list[Share]:
    """Return the shares of all parameters that have elements, with bytes of state as they are now.

    `seconds` by index. Not before the first step. A parameter that has no state yet is taken to
    keep as much per byte of its own as the others do.
    """
    parameters = parameters_of(optimizer)
    groups = [
        number for number, group in enumerate(optimizer.param_groups) for _ in group["params"]
    ]
    states = {
        index: sum(
            leaf.nbytes
            for leaf in tree_leaves(dict(optimizer.state[p]))
            if isinstance(leaf, Tensor)
        )
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


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work; nothing to wait for on CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
