"""Norms, clipping and overflow, which read whole gradients elsewhere, work on gradients of which
every rank has its own rows only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_topt.optim.pieces import rows_of
from lightning_topt.optim.reduce_scatter import ReduceScatterExchange


class ScatteredGradients:
    """The gradients of `optimizers` after a backward pass with `exchange`, also while that still
    all-reduces.

    All methods are called on all ranks, on the gradients as the last backward pass left them.
    """

    def __init__(self, exchange: ReduceScatterExchange, *, optimizers: Sequence[Optimizer]) -> None:
        self.exchange, self.optimizers = exchange, optimizers

    def own(self) -> list[Tensor]:
        """Return the parameters that alias this rank's rows, each with its gradient; whole
        parameters where the gradient is whole.
        """
        return [*self._split(), *self._whole()]

    def norm(self, *, norm_type: float = 2.0) -> Tensor:
        """Return the norm of all gradients together, equal on all ranks, without dims; 0 where
        there are none.

        A collective call. As ``torch.nn.utils.get_total_norm`` of the whole gradients, in another
        order of summation.
        """
        power = float(norm_type)
        split = self._partial(self._split(), power)
        if self.exchange.scattered:
            dist.all_reduce(
                split,
                dist.ReduceOp.MAX if power == inf else dist.ReduceOp.SUM,
                group=self.exchange.group,
            )
        whole = self._partial(self._whole(), power)
        return torch.maximum(split, whole) if power == inf else (split + whole) ** (1 / power)

    def clip_norm_(
        self, max_norm: float, *, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the gradients to a norm of at most `max_norm`, as
        ``torch.nn.utils.clip_grad_norm_``; the norm before.

        A collective call. Raises RuntimeError for a norm that is not finite with
        `error_if_nonfinite`, on all ranks.
        """
        total = self.norm(norm_type=norm_type)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is {float(total)}, so they cannot "
                "be clipped; "
                "to scale them all the same, set error_if_nonfinite=False"
            )
        clip_grads_with_norm_(self.own(), max_norm, total)
        return total

    def clip_value_(self, clip_value: float) -> None:
        """Clamp every gradient to [-`clip_value`, `clip_value`], as
        ``torch.nn.utils.clip_grad_value_``.
        """
        torch.nn.utils.clip_grad_value_(self.own(), clip_value)

    def _parameters(self) -> Iterator[Tensor]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from (
                    parameter for parameter in group["params"] if parameter.grad is not None
                )

    def _split(self) -> list[Tensor]:
        views = []
        for parameter in self._parameters():
            for piece in self.exchange.own_pieces(parameter) or ():
                view = rows_of(parameter, piece)
                assert parameter.grad is not None
                view.grad = rows_of(parameter.grad, piece)
                views.append(view)
        return views

    def _whole(self) -> list[Tensor]:
        return [
            parameter
            for parameter in self._parameters()
            if self.exchange.own_pieces(parameter) is None
        ]

    def _partial(self, parameters: Sequence[Tensor], power: float) -> Tensor:
        """The norm of their gradients, to that power unless it is infinite: what sums (or maxima)
        over ranks are made of.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not gradients:
            return torch.zeros((), device=self.exchange.device)
        norm = get_total_norm(gradients, power).to(self.exchange.device, torch.float32)
        return norm if power == inf else norm**power


def install_overflow_agreement(scaler: GradScaler, exchange: ReduceScatterExchange) -> None:
    """Make `scaler` unscale and look at this rank's rows only, and skip a step where any rank found
    an overflow.

    It then works as with whole gradients, for every optimizer; as torch's own ``ShardedGradScaler``
    does it, on the instance.
    """
    unscale = scaler._unscale_grads_

    def unscale_own(optimizer: Optimizer, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        if not exchange.scattered:
            return unscale(optimizer, *args, **kwargs)
        own = ScatteredGradients(exchange, optimizers=[optimizer]).own()
        found = unscale(SimpleNamespace(param_groups=[{"params": own}]), *args, **kwargs)  # type: ignore[arg-type]
        flag = found.setdefault(exchange.device, torch.zeros((), device=exchange.device))
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=exchange.group)
        return found

    scaler._unscale_grads_ = unscale_own  # type: ignore[method-assign]
