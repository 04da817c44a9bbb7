"""Norms of gradients that are spread over the ranks of a pipeline: a parameter that several stages
share counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lightning_topt.execution.pipeline.pipeline_groups import PipelineGroups


@dataclass(frozen=True)
class StageNorms:
    """Norms over the ranks of a pipeline, on `device`; `counted_elsewhere` are parameters that
    another rank counts.

    `slices_of` says into how many slices a parameter is cut along tensor axes. Methods are
    collective calls of all ranks.
    """

    groups: PipelineGroups
    device: torch.device
    counted_elsewhere: Collection[Tensor]
    slices_of: Callable[[Tensor], int]

    @torch.no_grad()
    def total(self, parameters: Iterable[Tensor], *, norm_type: float = 2.0) -> Tensor:
        """Return the norm of all gradients together, without dims.

        As ``torch.nn.utils.get_total_norm`` of the whole gradients, in another order of summation.
        """
        power = float(norm_type)
        is_largest = power == inf
        whole = self._of_rank(parameters, power)
        dist.all_reduce(
            whole, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, group=self.groups.row
        )
        return whole if is_largest else whole ** (1 / power)

    def _of_rank(self, parameters: Iterable[Tensor], power: float) -> Tensor:
        """Return the norm of what this rank counts, to the `power` unless that is infinite."""
        counted = [p for p in parameters if p.grad is not None and p not in self.counted_elsewhere]
        is_largest = power == inf
        operation = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
        whole = self._partial([p for p in counted if self.slices_of(p) == 1], power)
        if self.groups.tensor is not None:
            cut = self._of_slices(counted, power, ranks=dist.get_world_size(self.groups.tensor))
            dist.all_reduce(cut, operation, group=self.groups.tensor)
            whole = torch.maximum(whole, cut) if is_largest else whole + cut
        return whole

    @torch.no_grad()
    def clip_with(
        self,
        parameters: Iterable[Tensor],
        max_norm: float,
        *,
        others: Tensor,
        own: int,
        norm_type: float = 2.0,
    ) -> tuple[Tensor, Tensor]:
        """Scale the gradients of this rank, place `own`, by the norm of all ranks, of which
        `others` are known, (ranks,).

        Each is a norm to the power `norm_type`, unless that is infinite. Returns the norm before,
        and this rank's such power. A collective call of the ranks along tensor axes.
        """
        given, power = list(parameters), float(norm_type)
        powers = others.clone()
        powers[own] = self._of_rank(given, power)
        total = powers.amax() if power == inf else powers.sum() ** (1 / power)
        total = total.to(torch.float32)
        clip_grads_with_norm_(
            [parameter for parameter in given if parameter.grad is not None], max_norm, total
        )
        return total, powers[own]

    def clip(
        self, parameters: Iterable[Tensor], max_norm: float, *, norm_type: float = 2.0
    ) -> Tensor:
        """Scale the gradients to a norm of at most `max_norm`, as torch's ``clip_grad_norm_``;
        return the norm before.
        """
        given = list(parameters)
        total = self.total(given, norm_type=norm_type)
        clip_grads_with_norm_(
            [parameter for parameter in given if parameter.grad is not None], max_norm, total
        )
        return total

    def _of_slices(self, parameters: Sequence[Tensor], power: float, *, ranks: int) -> Tensor:
        found = [torch.zeros((), device=self.device)]
        for count in sorted({count for p in parameters if (count := self.slices_of(p)) > 1}):
            part = self._partial([p for p in parameters if self.slices_of(p) == count], power)
            # so many ranks hold the same slice
            found.append(part if power == inf else part * count / ranks)
        stacked = torch.stack(found)
        return stacked.amax() if power == inf else stacked.sum()

    def _partial(self, parameters: Iterable[Tensor], power: float) -> Tensor:
        gradients = [p.grad for p in parameters if p.grad is not None and p.grad.numel()]
        if not gradients:
            return torch.zeros((), device=self.device)
        part = get_total_norm(gradients, power).to(self.device, torch.float32)
        return part if power == inf else part**power
