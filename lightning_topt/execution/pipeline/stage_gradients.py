"""Gradients of stages: averaged over data ranks as soon as a stage has ended, summed over the
stages that share a parameter.

Large gradients are reduced where they are, small ones together. As under DDP every data rank has
the same gradients afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_topt.execution.pipeline.pipeline_groups import PipelineGroups
from lightning_topt.execution.pipeline.stage_layout import StageLayout

LARGE_BYTES = 1 << 20  # from here on a copy costs more than a message of its own


class GradientExchange:
    """Sums the gradients of `parameters` (by name) over `group` and divides by `parts`.

    A parameter without a gradient on some ranks counts as zeros; one without any on all of them
    stays without. In the first step, and when other parameters are trained, all are asked for; from
    then on those in each step that had none.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], *, group: dist.ProcessGroup, parts: int
    ) -> None:
        self._parameters, self._group, self._parts = dict(parameters), group, parts
        self._agreed: dict[tuple[bool, ...], frozenset[str]] = {}
        self._works: list[tuple[Any, list[Tensor], Tensor | None]] = []

    @torch.no_grad()
    def start(self) -> None:
        """Begin. A collective call of the group, as all methods are."""
        gradients = self._gradients()
        if self._parts > 1:
            by_kind: dict[torch.dtype, list[Tensor]] = {}
            for gradient in gradients:
                by_kind.setdefault(gradient.dtype, []).append(gradient)
            for alike in by_kind.values():
                torch._foreach_mul_([_values(gradient) for gradient in alike], 1 / self._parts)
        small: dict[torch.dtype, list[Tensor]] = {}
        for gradient in gradients:
            if gradient.is_sparse or (gradient.nbytes >= LARGE_BYTES and gradient.is_contiguous()):
                self._works.append(
                    (dist.all_reduce(gradient, group=self._group, async_op=True), [], None)
                )
            else:
                small.setdefault(gradient.dtype, []).append(gradient)
        for alike in small.values():
            packed = torch.cat([gradient.reshape(-1) for gradient in alike])
            self._works.append(
                (dist.all_reduce(packed, group=self._group, async_op=True), alike, packed)
            )

    @torch.no_grad()
    def wait(self) -> None:
        """Block until the gradients are there."""
        works, self._works = self._works, []
        for work, gradients, packed in works:
            work.wait()
            if packed is not None:
                parts = torch.split(packed, [gradient.numel() for gradient in gradients])
                torch._foreach_copy_(
                    gradients, [p.view(g.shape) for p, g in zip(parts, gradients, strict=True)]
                )

    def _gradients(self) -> list[Tensor]:
        trained = tuple(parameter.requires_grad for parameter in self._parameters.values())
        is_known = trained in self._agreed
        if not is_known:
            named = zip(self._parameters, trained, strict=True)
            self._agreed[trained] = self._having([name for name, is_trained in named if is_trained])
        agreed, found = self._agreed[trained], []
        asked = [
            name
            for name, parameter in self._parameters.items()
            if parameter.requires_grad and name not in agreed
        ]
        late = self._having(asked) if is_known else frozenset()
        for name, parameter in self._parameters.items():
            if name in agreed or name in late:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                found.append(parameter.grad)
        return found

    def _having(self, names: Sequence[str]) -> frozenset[str]:
        """Those that have a gradient on some rank. A collective call with equal `names`."""
        if not names:
            return frozenset()
        own = [self._parameters[name] for name in names]
        has = torch.tensor([float(p.grad is not None) for p in own], device=own[0].device)
        dist.all_reduce(has, dist.ReduceOp.MAX, group=self._group)
        return frozenset(name for name, one in zip(names, has.tolist(), strict=True) if one)


class StageExchanges:
    """The exchanges of this rank's `parameters` (all of the module, by name), of which each stage
    needs what `layout` says.

    Parameters that several ranks of a pipeline keep are summed over them as well, once all stages
    have ended; all but the first of these ranks have them in `counted_elsewhere`. `by_first`: each
    rank has one stage, and the first of those that share a parameter has the gradients of all (see
    `shared_parameters`). Making it is a collective call of all ranks.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layout: StageLayout,
        groups: PipelineGroups,
        *,
        by_first: bool = False,
    ) -> None:
        by_stages: dict[tuple[int, ...], dict[str, nn.Parameter]] = {}
        by_holders: dict[tuple[int, ...], dict[str, nn.Parameter]] = {}
        for name, parameter in parameters.items():
            holders = tuple(sorted(layout.holders(name)))
            if by_first and holders and holders[0] == groups.rank:
                by_stages.setdefault((groups.rank,), {})[name] = parameter
            elif len(holders) > 1:
                by_holders.setdefault(holders, {})[name] = parameter
            elif holders == (groups.rank,):
                by_stages.setdefault(layout.stages_of(name), {})[name] = parameter
        sharing = {} if by_first else groups.sharing(by_holders)
        parts, data = groups.mesh.data_parallel_size, groups.data
        self._by_stages = {
            stages: GradientExchange(named, group=data, parts=parts)
            for stages, named in by_stages.items()
            if data is not None
        }
        self._shared = [
            GradientExchange(by_holders[holders], group=group, parts=parts)
            for holders, group in sharing.items()
        ]
        others = (named for holders, named in by_holders.items() if holders[0] != groups.rank)
        self.counted_elsewhere = frozenset(
            parameter for named in others for parameter in named.values()
        )
        self.instead: Callable[[], None] | None = None  # of averaging gradients as they are
        self._ended: set[int] = set()
        self._started: list[GradientExchange] = []

    def stage_ended(self, stage: int) -> None:
        """Begin to exchange what this stage was the last to add to. A collective call of the
        stage's data ranks.
        """
        self._ended.add(stage)
        for stages, exchange in self._by_stages.items():
            if stage in stages and self._ended.issuperset(stages):
                exchange.start()
                self._started.append(exchange)

    def average(self, stage: int) -> None:
        """Average the gradients of a rank's one stage, and wait for it. A collective call of the
        stage's data ranks.
        """
        if self.instead is not None:
            self.instead()
            return
        self.stage_ended(stage)
        for exchange in self._started:
            exchange.wait()
        self.forget()

    def finish(self) -> None:
        """Exchange what is shared, and wait for all. A collective call of all ranks."""
        for exchange in self._shared:
            exchange.start()
        for exchange in (*self._started, *self._shared):
            exchange.wait()
        self.forget()

    def forget(self) -> None:
        """Begin anew with the next step."""
        self._ended, self._started = set(), []


def _values(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient
