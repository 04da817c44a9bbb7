"""The Lightning callback that shares the optimizer step between the ranks of ``ddp`` where that saves time."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import get_args

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_topt.optim.decision import Decision
from lightning_topt.optim.update_rule import UpdateRule, update_rule
from lightning_topt.plugins.optimizer_checks import (
    check_equal_optimizers,
    check_strategy,
    optimizers_of,
    reduced_parameters,
)
from lightning_topt.plugins.optimizer_decision import AdaptiveStep, Sharing

GATHER_DTYPES = {"bfloat16": torch.bfloat16}


class ParallelOptimizerStep(pl.Callback):
    """Every rank updates its share of the parameters and receives the others: ``Trainer(callbacks=[ParallelOptimizerStep()])``.

    For strategies ``ddp`` (also by fork, by spawn, with unused parameters) and ``topt_compressed``, and for any optimizer whose
    parameters can be updated by different ranks: those of torch, packages' and your own. Losses, parameters and checkpoints
    are those of the plain step.

    The first six steps are plain: one warms up, five are measured. Then each parameter group is shared where its update takes
    longer than what sharing costs; why is logged and is in `decisions` (for each optimizer, for each group). Shared state is
    kept by its owner alone, 1/ranks of the whole. Checkpoints have all of it, under the keys of the plain optimizer, and load
    on any number of ranks, with this callback or without. At the end of the fit every rank has the whole state again.

    Parameters that DDP does not average, such as those that were frozen when the fit began, are updated on every rank, as
    under ``ddp``. Parameter groups that are added later are shared from the next batch on.

    Args:
        always: share every group, from the first step on, without measuring: for the memory.
        rule: what one update reads: "elements" (of an element: only that element's parameter, gradient and state, so rows of a
            parameter may go to different ranks) or "parameters" (whole parameters only). None: known for torch's optimizers,
            tried out on small copies for others.
        gather_dtype: ``torch.bfloat16`` or ``"bfloat16"``: updated parameters travel in 16 bits and are rounded to them on all
            ranks; the owner updates float32 copies that it keeps. None: as they are, without loss.
        timeout_seconds: of every wait on another rank.

    With one rank there is nothing to share and nothing happens. Raises ValueError, at the start of the fit, under strategies
    whose ranks have other gradients or parts of parameters, for ranks whose optimizers differ, and for optimizers that cannot
    be split (`UnsplittableOptimizer`): LBFGS, sparse updates, rules that couple parameters.
    """

    def __init__(
        self,
        *,
        always: bool = False,
        rule: UpdateRule | None = None,
        gather_dtype: torch.dtype | str | None = None,
        timeout_seconds: float = 300.0,
    ) -> None:
        if rule is not None and rule not in get_args(UpdateRule):
            raise ValueError(f"rule is one of {get_args(UpdateRule)}, or None to find out; got {rule!r}")
        if gather_dtype not in (None, *GATHER_DTYPES, *GATHER_DTYPES.values()):
            raise ValueError(
                f"gather_dtype is torch.bfloat16, or None for that of the parameters; got {gather_dtype!r}"
            )
        if timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds is positive, got {timeout_seconds}")
        self.always, self.rule, self.timeout_seconds = always, rule, timeout_seconds
        self.gather_dtype = GATHER_DTYPES[gather_dtype] if isinstance(gather_dtype, str) else gather_dtype
        self._rules: list[UpdateRule] = []
        self._reduced: frozenset[Tensor] = frozenset()
        self._steps: list[AdaptiveStep] = []
        self._group: dist.ProcessGroup | None = None

    @property
    def decisions(self) -> list[list[Decision]]:
        """Of each optimizer with parameters, for each of its groups; empty lists as long as nothing is decided."""
        return [step.decisions for step in self._steps]

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._steps, self._rules = [], []
        if trainer.world_size == 1:
            rank_zero_info("ParallelOptimizerStep: there is one rank, which does the whole step")
            return
        check_strategy(trainer.strategy)
        self._reduced = reduced_parameters(trainer.strategy)
        self._rules = [update_rule(optimizer, declared=self.rule) for optimizer in optimizers_of(trainer)]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # State is loaded by now, whole, and other callbacks have changed the groups as they wanted at the start.
        if trainer.world_size == 1:
            return
        optimizers = optimizers_of(trainer)
        self._group = dist.new_group(timeout=timedelta(seconds=self.timeout_seconds))
        names: dict[Tensor, str] = {parameter: name for name, parameter in pl_module.named_parameters()}
        check_equal_optimizers(optimizers, names=names, group=self._group)
        sharing = Sharing(self._group, self._reduced, always=self.always, gather_dtype=self.gather_dtype)
        for number, (optimizer, rule) in enumerate(zip(optimizers, self._rules, strict=True)):
            say = partial(_say, number if len(optimizers) > 1 else None)
            self._steps.append(AdaptiveStep(optimizer, rule=rule, sharing=sharing, say=say))
            self._steps[-1].start()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for step in self._steps:
            step.finish()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
        self._reduced = frozenset()


def _say(number: int | None, reason: str) -> None:
    rank_zero_info(f"optimizer step, {'' if number is None else f'optimizer {number}, '}{reason}")
