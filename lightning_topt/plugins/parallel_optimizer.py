"""The callback that shares the optimizer step between the ranks of ``ddp``.

It does so where that saves time (`optim.adaptive_step`). Ranks can share a step of equal gradients,
equal optimizers and full parameters, which is checked at the start of the fit: `check_strategy` and
what follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, get_args

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_flag, check_real
from lightning_topt.communication.node.rows import NodeRows, node_rows
from lightning_topt.communication.rank_watch import RankWatch, watch_ranks, within_limit
from lightning_topt.optim.adaptive_step import AdaptiveStep, Decision, Sharing
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.update_rule import UpdateRule, update_rule
from lightning_topt.plugins.auto_parallel import AutoParallelStrategy
from lightning_topt.plugins.local_steps_strategy import LocalStepsStrategy
from lightning_topt.plugins.lost_ranks import name_lost
from lightning_topt.plugins.shared_updates import difference_of_optimizers, reduced_parameters


class ParallelOptimizerStep(pl.Callback):
    """Every rank updates its share of the parameters and receives the others.

    ``Trainer(callbacks=[ParallelOptimizerStep()])``

    For strategies ``ddp`` (also by fork, by spawn, with unused parameters) and ``topt_compressed``,
    and for any optimizer whose parameters can be updated by different ranks: those of torch,
    packages' and your own. Losses, parameters and checkpoints are those of the plain step.

    The first four steps are plain: one warms up, three are measured. Then an optimizer's update is
    shared where it takes longer than what sharing costs, and stays so if the next steps are faster
    indeed; why is logged and is in `decisions` (for each optimizer). CPU ranks of one node gather
    parameters through its memory. Shared state is kept by its owner alone, 1/ranks of the whole.
    Checkpoints have all of it, under the keys of the plain optimizer, and load on any number of
    ranks, with this callback or without. At the end of the fit every rank has the whole state
    again.

    Parameters that DDP does not average, such as those that were frozen when the fit began, are
    updated on every rank, as under ``ddp``. Parameter groups that are added later are shared as
    well, or measured again.

    Args:
        always: share every update, from the first step on, without measuring: for the memory.
        rule: what one update reads: "elements" (of an element: only that element's parameter,
            gradient and state, so rows of a parameter may go to different ranks) or "parameters"
            (whole parameters only). None: known for torch's optimizers; of others a small copy is
            tried, for "parameters".
        timeout_seconds: of every wait on another rank; none is longer than the time limit of the
            process group (`timeout` of the strategy).

    With one rank there is nothing to share and nothing happens. Raises ValueError, at the start of
    the fit, under strategies whose ranks have other gradients or parts of parameters, for ranks
    whose optimizers differ, and for optimizers that cannot be split (`UnsplittableOptimizer`):
    LBFGS, sparse updates, rules that couple parameters.
    """

    def __init__(
        self,
        *,
        always: bool = False,
        rule: UpdateRule | None = None,
        timeout_seconds: float = 300.0,
    ) -> None:
        # Options are checked here, the fit in `on_fit_start`.
        check_flag(always, name="always")
        check_real(timeout_seconds, name="timeout_seconds", positive=True)
        if rule is not None and rule not in get_args(UpdateRule):
            raise ValueError(
                f"rule is one of {get_args(UpdateRule)}, or None to find out; got {rule!r}"
            )
        self.always, self.rule, self.timeout_seconds = always, rule, timeout_seconds
        self._rules: list[UpdateRule] = []
        self._reduced: frozenset[Tensor] = frozenset()
        self._steps: list[AdaptiveStep] = []
        self._group: dist.ProcessGroup | None = None
        self._node: NodeRows | None = None
        self._watch: RankWatch | None = None

    @property
    def decisions(self) -> list[Decision | None]:
        """The decision of each optimizer; None as long as nothing is decided."""
        return [step.decision for step in self._steps]

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Our own strategies watch ranks already.
        if not hasattr(trainer.strategy, "rank_watch"):
            self._end_watch()
            self._watch = watch_ranks()
            if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
                trainer._run_stage = _named(  # type: ignore[method-assign]
                    trainer._run_stage, self._watch
                )

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._end_watch()
        vars(trainer).pop("_run_stage", None)

    def _end_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._steps, self._rules = [], []
        if trainer.world_size == 1:
            rank_zero_info("ParallelOptimizerStep: there is one rank, which does the whole step")
            return
        check_strategy(trainer.strategy)
        self._reduced = reduced_parameters(trainer.strategy)
        # Rules that are not known are tried out on small copies.
        self._rules = [
            update_rule(optimizer, declared=self.rule)
            for optimizer in unwrapped_optimizers(trainer)
        ]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # State is loaded by now, whole, and other callbacks have changed the groups as they wanted
        # at the start.
        if trainer.world_size == 1:
            return
        optimizers = unwrapped_optimizers(trainer)
        # A group of its own: its waits have another time limit.
        timeout_seconds = within_limit(self.timeout_seconds)
        self._group = dist.new_group(timeout=timedelta(seconds=timeout_seconds))
        names: dict[Tensor, str] = {
            parameter: name for name, parameter in pl_module.named_parameters()
        }
        if difference := difference_of_optimizers(optimizers, names=names, group=self._group):
            raise ValueError(difference)
        # Ranks of one node share parameters through its memory.
        self._node = node_rows(
            self._group,
            device=trainer.strategy.root_device,
            num_nodes=trainer.num_nodes,
            timeout_seconds=timeout_seconds,
        )
        sharing = Sharing(self._group, self._reduced, always=self.always, node=lambda: self._node)
        # Each step measures first, and decides by itself.
        for number, (optimizer, rule) in enumerate(zip(optimizers, self._rules, strict=True)):
            say = partial(_say, number if len(optimizers) > 1 else None)
            self._steps.append(AdaptiveStep(optimizer, rule=rule, sharing=sharing, say=say))
            self._steps[-1].start()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Every rank gets the whole state again.
        for step in self._steps:
            step.finish()
        self._leave_node()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
        self._reduced = frozenset()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._leave_node()  # the other ranks need not wait for this one
        name_lost(exception, self._watch)

    def _leave_node(self) -> None:
        if self._node is not None:
            self._node.close()
            self._node = None


def _named(run_stage: Callable[[], Any], watch: RankWatch | None) -> Callable[[], Any]:
    # Return `run_stage` of ranks that Lightning forked or spawned.
    # There, it asks no callback what to do with an error.

    def run() -> Any:
        try:
            return run_stage()
        except Exception as error:
            name_lost(error, watch)
            raise

    return run


def _say(number: int | None, reason: str) -> None:
    rank_zero_info(f"optimizer step, {'' if number is None else f'optimizer {number}, '}{reason}")


# ---- what a shared step needs --------------------------------------------------------------------


def check_strategy(strategy: Strategy) -> None:
    """Raise ValueError unless ranks have full parameters and equal gradients."""
    name, where = type(strategy).__name__, 'it runs under strategy="ddp" and "topt_compressed"'
    if isinstance(strategy, AutoParallelStrategy):
        raise ValueError(
            f'{name} shares the optimizer step itself where its plan says so (plan="zero1" always '
            "does): leave "
            f"ParallelOptimizerStep out; {where}"
        )
    if isinstance(strategy, LocalStepsStrategy):
        raise ValueError(
            f"under {name} ranks train alone, each with its own gradients, so there is no common "
            f"step to share: leave ParallelOptimizerStep out; {where}"
        )
    if not isinstance(strategy, DDPStrategy):
        raise ValueError(
            "ParallelOptimizerStep shares the step of whole parameters that have the same gradient "
            f"on all ranks, which {name} does not keep: leave it out (a strategy that shards "
            f"parameters shards their step too); {where}"
        )
    if getattr(strategy, "_model_averager", None) is not None:
        raise ValueError(
            "under post-local SGD (ddp_comm_state=PostLocalSGDState) gradients differ between "
            "ranks, so there is no common step to share: leave ParallelOptimizerStep or that "
            "communication hook out"
        )


def unwrapped_optimizers(trainer: pl.Trainer) -> list[Optimizer]:
    """Return the user's optimizers, without Lightning's wrapper.

    Raises ValueError for one that shards its state itself, and for sharded parameters.
    """
    found: list[Optimizer] = [
        getattr(optimizer, "_optimizer", optimizer) for optimizer in trainer.strategy.optimizers
    ]
    for optimizer in found:
        name = type(optimizer).__name__
        if isinstance(optimizer.__dict__.get("step"), AdaptiveStep):
            raise ValueError(
                f"the state of {name} is spread over the ranks since a fit that ended with an "
                "exception: build a new one in configure_optimizers, and go on from a checkpoint"
            )
        if hasattr(optimizer, "consolidate_state_dict"):
            raise ValueError(
                f"{name} shards its state over the ranks by itself: leave ParallelOptimizerStep "
                "out, or give it the optimizer that is inside"
            )
        if any(isinstance(parameter, DTensor) for parameter in parameters_of(optimizer)):
            raise ValueError(
                f"{name} has sharded parameters (DTensor), whose step is shared already: leave "
                "ParallelOptimizerStep out"
            )
    return found
