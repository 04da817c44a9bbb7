"""A fit under a schedule that never flushes, in one process: what a Trainer on ranks equals."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_topt.plan.parallel_plan import ParallelPlan
from tests.continuous_segments import Named, SegmentTwin


class ChainTwin(SegmentTwin):
    """`module` is a chain of the blocks of `plan`, trained on `batches` (inputs, targets), one
    update per `accumulate` of them and at the ends of epochs; drained before the batches in `ends`,
    and at the end. ``factor(n)`` is that of update n's rate.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: ParallelPlan,
        batches: Sequence[tuple[Tensor, Tensor]],
        *,
        optimizer: Callable[[Named], Optimizer],
        ends: Sequence[int] = (),
        epoch: int | None = None,
        accumulate: int = 1,
        clip: float | None = None,
        clip_value: float | None = None,
        factor: Callable[[int], float] = lambda update: 1.0,
    ) -> None:
        stages = [[f"{block.block}." for block in s.blocks if block.block] for s in plan.stages]
        parameters = [
            [(n, p) for n, p in module.named_parameters() if n.startswith(tuple(names))]
            for names in stages
        ]
        super().__init__(
            plan, parameters, optimizer, accumulate=accumulate, clip=clip, clip_value=clip_value
        )
        self.module, self.batches, self.ends, self.factor = module, batches, ends, factor
        self.epoch = len(batches) if epoch is None else epoch
        self.updates = [0, *itertools.accumulate(map(self.completes, range(len(batches))))]

    @property
    def state(self) -> dict[str, Tensor]:
        """The module's."""
        return self.module.state_dict()

    def train(self) -> ChainTwin:
        """Train from one drained state to the next."""
        for start, stop in itertools.pairwise(sorted({0, *self.ends, len(self.batches)})):
            self.segment(start, stop)
        return self

    def completes(self, index: int) -> bool:
        place = index % self.epoch + 1
        return place % self.accumulate == 0 or place == self.epoch or index + 1 == len(self.batches)

    def scale_of(self, index: int) -> float:
        return self.factor(self.updates[index])

    def block_of(self, stage: int, name: str) -> nn.Module:
        return self.module.get_submodule(name)

    def inputs_of(self, index: int) -> Tensor:
        return self.batches[index][0]

    def loss_of(self, made: Tensor, index: int) -> Tensor:
        return nn.functional.cross_entropy(made, self.batches[index][1])
