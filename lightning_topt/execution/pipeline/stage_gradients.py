"""Gradients of a model with stages: averaged over data ranks, and their norm over all stages.

    GradientExchange    one group's gradients, large ones where they are, small ones together
    StageExchanges      all groups of a rank: each stage's gradients as soon as it has ended, and
                        those of parameters that several ranks of a pipeline keep
    StageNorms          the norm over the ranks of a pipeline, and clipping by it

As under DDP every data rank has the same gradients after an exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lightning_topt.execution.pipeline.stage_layout import PipelineGroups, StageLayout

LARGE_BYTES = 1 << 20  # from here on a copy costs more than a message of its own


class StageExchanges:
    """The gradient exchanges of this rank.

    Parameters that several ranks of a pipeline keep are summed over these ranks as well, once all
    stages have ended. All but the first of the ranks have them in `counted_elsewhere`.

    Args:
        parameters: all of the module, by name.
        layout: says what each stage needs.
        groups: this rank's.
        by_first: each rank has one stage, and the first of those that share a parameter has the
            gradients of all (see `SharedParameters`).

    Making it is a collective call of all ranks.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layout: StageLayout,
        groups: PipelineGroups,
        *,
        by_first: bool = False,
    ) -> None:
        # Parameters that this rank alone holds, by the stages that need them; those that several
        # ranks hold, by these ranks.
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
        # With `by_first` shared gradients come by messages, and no group is needed.
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
        # Summed over ranks of a pipeline, here or on others: by `finish`, as they are.
        self.shared = frozenset(p for named in by_holders.values() for p in named.values())
        # In place of averaging the gradients of this rank's own stages as they are.
        self.instead: Callable[[], None] | None = None
        self._ended: set[int] = set()
        self._started: list[GradientExchange] = []

    def stage_ended(self, stage: int) -> None:
        """Begin to exchange what this stage was the last to add to.

        A collective call of the stage's data ranks.
        """
        self._ended.add(stage)
        if self.instead is not None:
            return  # all together, by `finish`
        for stages, exchange in self._by_stages.items():
            # several stages of this rank may use a parameter: its gradient is whole after the last
            # one
            if stage in stages and self._ended.issuperset(stages):
                exchange.start()
                self._started.append(exchange)

    def average(self, stage: int) -> None:
        """Average the gradients of a rank's one stage, and wait for it.

        A collective call of the stage's data ranks.
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
        if self.instead is not None:
            self.instead()
        # shared ones last: ranks of several stages meet in them, when all have run their passes
        for exchange in self._shared:
            exchange.start()
        for exchange in (*self._started, *self._shared):
            exchange.wait()
        self.forget()

    def forget(self) -> None:
        """Start afresh with the next step."""
        self._ended, self._started = set(), []


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
        # The mean: divide first, dtype by dtype.
        if self._parts > 1:
            by_kind: dict[torch.dtype, list[Tensor]] = {}
            for gradient in gradients:
                values = gradient._values() if gradient.is_sparse else gradient
                by_kind.setdefault(gradient.dtype, []).append(values)
            for alike in by_kind.values():
                torch._foreach_mul_(alike, 1 / self._parts)
        # Large gradients are reduced in place, small ones in one tensor of each dtype.
        small: dict[torch.dtype, list[Tensor]] = {}
        for gradient in gradients:
            if gradient.is_sparse or (gradient.nbytes >= LARGE_BYTES and gradient.is_contiguous()):
                self._works.append(
                    (dist.all_reduce(gradient, group=self._group, async_op=True), [], None)
                )
            else:
                small.setdefault(gradient.dtype, []).append(gradient)
        for alike in small.values():
            # One message of (n,) for all small gradients of a dtype.
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
                # Copy the sums back to where the gradients are.
                parts = torch.split(packed, [gradient.numel() for gradient in gradients])
                torch._foreach_copy_(
                    gradients, [p.view(g.shape) for p, g in zip(parts, gradients, strict=True)]
                )

    def _gradients(self) -> list[Tensor]:
        # The gradients to exchange, the same on all ranks; missing ones become zeros
        # what was agreed on holds as long as the same parameters are trained
        trained = tuple(parameter.requires_grad for parameter in self._parameters.values())
        is_known = trained in self._agreed
        if not is_known:
            named = zip(self._parameters, trained, strict=True)
            self._agreed[trained] = self._having([name for name, is_trained in named if is_trained])
        agreed, found = self._agreed[trained], []
        # A parameter that was without a gradient so far may have one now, on some rank.
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
        # Those that have a gradient on some rank. A collective call of equal `names`.
        if not names:
            return frozenset()
        own = [self._parameters[name] for name in names]
        # (names,), 1 where this rank has a gradient.
        has = torch.tensor([float(p.grad is not None) for p in own], device=own[0].device)
        dist.all_reduce(has, dist.ReduceOp.MAX, group=self._group)
        return frozenset(name for name, one in zip(names, has.tolist(), strict=True) if one)


# ---- norms ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageNorms:
    """Norms of gradients over the ranks of a pipeline, on `device`.

    A parameter that several stages share counts once: `counted_elsewhere` are those that another
    rank counts. `slices_of` says into how many slices a parameter is cut along tensor axes. Methods
    are collective calls of all ranks.
    """

    groups: PipelineGroups
    device: torch.device
    counted_elsewhere: Collection[Tensor]
    slices_of: Callable[[Tensor], int]

    @torch.no_grad()
    def clip(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Scale gradients as torch's ``clip_grad_norm_`` does, and return the norm before, ().

        The norm is that of the full gradients, in another order of summation.
        """
        given = list(parameters)
        square = self._of_rank(given)
        dist.all_reduce(square, group=self.groups.pipeline_group)
        total = square**0.5
        clip_grads_with_norm_([p for p in given if p.grad is not None], max_norm, total)
        return total

    @torch.no_grad()
    def clip_with(
        self, parameters: Iterable[Tensor], max_norm: float, *, others: Tensor, own: int
    ) -> tuple[Tensor, Tensor]:
        """Scale this rank's gradients by the norm over all ranks, those of others being known.

        Args:
            parameters: of this rank.
            max_norm: the most that the norm may be.
            others: squares of the norms of the ranks of the pipeline, (ranks,).
            own: this rank's place in `others`.

        Returns:
            The norm before, and the square of this rank's norm. A collective call of the ranks
            along tensor axes.
        """
        given, squares = list(parameters), others.clone()
        # This rank's norm is new, those of others are as they were sent.
        squares[own] = self._of_rank(given)
        total = (squares.sum() ** 0.5).to(torch.float32)
        clip_grads_with_norm_([p for p in given if p.grad is not None], max_norm, total)
        return total, squares[own]

    # the square of the norm of what this rank counts, in float32
    def _of_rank(self, parameters: Iterable[Tensor]) -> Tensor:
        counted = [p for p in parameters if p.grad is not None and p not in self.counted_elsewhere]
        by_slices: dict[int, list[Tensor]] = {}
        for parameter in counted:
            by_slices.setdefault(self.slices_of(parameter), []).append(parameter)
        uncut = self._square(by_slices.pop(1, []))
        if self.groups.tensor is None:
            return uncut
        # Slices are summed over the ranks of the tensor axes, each slice once: of so many slices
        # several ranks hold the same.
        ranks = dist.get_world_size(self.groups.tensor)
        cut = torch.zeros((), device=self.device)
        for count, alike in sorted(by_slices.items()):
            cut = cut + self._square(alike) * count / ranks
        dist.all_reduce(cut, group=self.groups.tensor)
        return uncut + cut

    def _square(self, parameters: Iterable[Tensor]) -> Tensor:
        gradients = [p.grad for p in parameters if p.grad is not None and p.grad.numel()]
        if not gradients:
            return torch.zeros((), device=self.device)
        return get_total_norm(gradients).to(self.device, torch.float32) ** 2
