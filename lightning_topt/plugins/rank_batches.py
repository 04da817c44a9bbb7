"""Ranks with different numbers of batches, in training and evaluation: what a strategy has of it.

A strategy has a `RankBatches`, to which its hooks delegate:

    setup, teardown      `begin`, `end`: the Trainer's loops are taken in hand, and given back
    backward             `weighted`: gradients are the mean over the ranks that have a batch
    reduce, all_gather   `replaces`: among these ranks alone
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_topt import plugins
from lightning_topt.basics.argument_checks import check_choice, check_flag
from lightning_topt.plugins.presence import Presence, gather_rows

if TYPE_CHECKING:
    from lightning_topt.plugins.exact_evaluation import ExactEvaluation
    from lightning_topt.plugins.uneven_ranks import UnevenRanks

UNEVEN = ("join", "stop", "error")


def _never() -> bool:
    return False


def _nothing(_: Any = None) -> None:
    """Return nothing: no group, no reason; take part in nothing."""


class RankBatches:
    """What ranks do where they have different numbers of batches.

    Args:
        uneven: ``"join"``, ``"stop"`` or ``"error"``, for training; None: training is Lightning's.
        pad_evaluation: whether samplers of evaluation are Lightning's, which repeat samples until
            all ranks have equally many.
        join: takes part in a training step of others, see `UnevenRanks`.
        why_not: why that cannot be, see there.
        sharing: the ranks among which this one's samples are split; None: all.
        gathers: whether an evaluation step is a collective call of all ranks.
        may_gather: whether it may become one in this run.
        evaluate: takes part in such a step of others.
        known: what `uneven` may be.

    Raises ValueError for wrong options.
    """

    def __init__(
        self,
        uneven: str | None,
        pad_evaluation: bool,
        *,
        join: Callable[[Callable[[], None]], None],
        why_not: Callable[[bool], str | None] = _nothing,
        sharing: Callable[[], dist.ProcessGroup | None] = _nothing,
        gathers: Callable[[], bool] = _never,
        may_gather: Callable[[], bool] = _never,
        evaluate: Callable[[str], None] = _nothing,
        known: Sequence[str] = UNEVEN,
    ) -> None:
        if uneven is not None:
            check_choice(uneven, name="uneven", allowed=known)
        check_flag(pad_evaluation, name="pad_evaluation")
        self.presence = Presence(sharing)
        # For parts that are made where there are several ranks; spawned ranks get a copy of this.
        of_training: dict[str, Any] = {"uneven": uneven, "join": join, "why_not": why_not}
        of_evaluation: dict[str, Any] = {
            "gathers": gathers,
            "join": evaluate,
            "pads": pad_evaluation,
        }
        self._for_training = None if uneven is None else of_training
        self._for_evaluation, self._may_gather = of_evaluation, may_gather
        self._has_warned = False
        self._training: UnevenRanks | None = None
        self._evaluation: ExactEvaluation | None = None

    @property
    def may_end_apart(self) -> bool:
        """Whether training data may end on one rank before others, as all ranks know."""
        return self._training is not None and self._training.may_end_apart

    def begin(self, trainer: pl.Trainer) -> None:
        """Take the loops of `trainer` in hand, before data are set up."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        if self._evaluation is None and (not self._for_evaluation["pads"] or self._may_gather()):
            self._evaluation = plugins.ExactEvaluation(self.presence, **self._for_evaluation)
        if self._training is None and self._for_training is not None:
            self._training = plugins.UnevenRanks(self.presence, **self._for_training)
        if self._evaluation is not None:
            self._evaluation.begin(trainer)
        if self._training is not None and trainer.state.fn == TrainerFn.FITTING:
            self._training.begin_fit(trainer)

    def end(self, *, failed: bool) -> None:
        """Give the loops back. A collective call, unless the run has `failed`."""
        if self._evaluation is not None:
            self._evaluation.end()
        if self._training is not None:
            self._training.end_fit()
        if not failed and dist.is_initialized():
            self.presence.close()

    def weighted(self, loss: Tensor) -> None:
        """Let the gradients of `loss` count among those of the ranks that have a batch."""
        weight = self.presence.weight
        # DDP and FSDP2 divide by the number of all ranks.
        if weight != 1.0 and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * weight)

    def averaged(self, tensor: Tensor, reduce_op: Any) -> Tensor:
        """Return `tensor` in a form whose mean over ranks is one.

        Lightning cuts means of whole numbers off: of batch sizes, where ranks differ in them.
        """
        is_cut = not (tensor.is_floating_point() or tensor.is_complex())
        takes_part = self._training is not None or self._evaluation is not None
        if not takes_part or not is_cut or reduce_op not in ("mean", "avg"):
            return tensor
        return tensor.to(torch.get_default_dtype())

    def replaces(self, group: Any) -> bool:
        """Return whether `group` means all ranks, and only some of them take part now."""
        return self.presence.replaces(group)

    def reduce(
        self, tensor: Tensor, reduce_op: Any, among: Callable[[Tensor, Any, Any], Tensor]
    ) -> Tensor:
        """Return `tensor` reduced ``among(tensor, group, reduce_op)`` the ranks with a batch."""
        group = self.presence.group
        return tensor if group is None else among(tensor, group, reduce_op)

    def all_gather(
        self, tensor: Tensor, sync_grads: bool, among: Callable[[Tensor, Any, bool], Tensor]
    ) -> Tensor:
        """Return the tensors of the ranks with a batch, stacked: (ranks, *shape)."""
        group = self.presence.group
        if group is None:
            return tensor.unsqueeze(0)
        return self.gathered(tensor, group, lambda each: among(each, group, sync_grads))

    def gathered(
        self,
        tensor: Tensor,
        group: dist.ProcessGroup | None,
        gather: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return the tensors of the ranks of `group`, which ``gather(tensor)`` stacks.

        Where ranks may have different numbers of samples, see `gather_rows`.
        """
        # A step that is traced sends nothing.
        is_traced = isinstance(tensor, FakeTensor)
        if not self.presence.may_differ or is_traced or not dist.is_initialized():
            return gather(tensor)
        stacked, repeats = gather_rows(tensor, group, gather)
        if repeats and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                "self.all_gather was given a row less by some ranks, whose part of the samples is "
                "smaller. As with ddp's sampler, these ranks' rows end with repeated ones. What is "
                "computed of all of them counts some samples twice: use self.log(..., "
                "sync_dist=True) or torchmetrics, or gather the numbers of rows too, and cut"
            )
        return stacked

    def decide(self, decision: bool, *, unanimous: bool, device: torch.device) -> bool:
        """Return what the ranks of the run decide; within a step, those that have a batch."""
        votes, group = torch.tensor(int(decision), device=device), self.presence.group
        dist.all_reduce(votes, group=group)
        return int(votes) == dist.get_world_size(group) if unanimous else bool(votes)
