"""The costs of an optimizer's updates, parameter by parameter: measured in the first steps of a
fit, which are plain ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, optim
from torch.optim import Optimizer

from lightning_topt.optim.assignment import Share
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.lamb import LAMB
from lightning_topt.optim.lars import LARS
from lightning_topt.optim.step_costs import (
    Work,
    combine,
    estimate_seconds,
    make_shares,
    measure_step,
    parameter_kinds,
    slowest_of_ranks,
    time_step,
)
from lightning_topt.optim.update_rule import UpdateRule, calls_may_repeat, is_one_of

WARMUP_STEPS = 1
# Of the steps that follow, the time as a whole, or of one kind of parameters after the other.
MEASURED_STEPS = ("whole", "kinds", "whole", "kinds", "whole")
# Whole parameters, but an update costs about the same per element; others are taken for matrix
# functions (Muon, Shampoo).
_EVEN_WORK: tuple[type[Optimizer], ...] = (optim.Adafactor, LARS, LAMB)


class UpdateCosts:
    """`UpdateCosts` are seconds and bytes of state of every parameter of `optimizer`.

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

    def take_step(self, step: Callable[[], Any]) -> bool:
        """Do one plain step, in pieces (several calls of `step`) where it is timed by kind; return
        whether it was the last.
        """
        number, self._steps_done = self._steps_done - WARMUP_STEPS, self._steps_done + 1
        if number < 0:
            step()
        elif MEASURED_STEPS[number] == "kinds" and self._calls_may_repeat():
            self._by_kind.append(
                measure_step(self.optimizer, step, kinds=parameter_kinds(self.optimizer))
            )
        else:
            self._whole_seconds.append(time_step(self.optimizer, step))
        return number + 1 == len(MEASURED_STEPS)

    def _calls_may_repeat(self) -> bool:
        if self._repeats is None:
            hooks = (
                self.optimizer._optimizer_step_pre_hooks
                or self.optimizer._optimizer_step_post_hooks
            )
            self._repeats = not hooks and calls_may_repeat(self.optimizer)
        return self._repeats

    def agree(self, group: dist.ProcessGroup) -> None:
        """Collective call after the last measured step: take the seconds of the slowest rank of
        `group`.
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

        `is_whole`: this rank has the whole state. Where not, bytes of state are those that were
        seen when it had, or as many per byte of the parameter.
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
