"""One real step of a copy, for steps that read values of tensors.

    graph = observe_step(module, batch)

The graph is the one that `capture` makes on fake tensors, for batches of this size. User code runs
on real tensors on the CPU, and may leave behind what it likes: call this in a process that is
thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from lightning_topt.graph.capture import Prepared, StepRun, check_can_run, graph_of_one_size
from lightning_topt.graph.module_copy import filled_copy
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.graph.structures import copied_batch


def observe_step(
    module: nn.Module,
    batch: object,
    *,
    forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> OpGraph:
    """Run a step of a copy of `module` on the CPU, and return its graph.

    The graph holds for batches of the size of `batch`. Raises CaptureError as `capture` does.
    """
    check_can_run(module)
    return graph_of_one_size(RealStep(module, forward_context), batch)


class RealStep(StepRun):
    """Training steps of `module` on copies with memory of their own."""

    @contextmanager
    def prepared(self, batch: object, *, samples: tuple[int, int] = (1, 1)) -> Iterator[Prepared]:
        """Give copies of the module and of `batch`, whose size stays."""
        with torch.enable_grad():
            yield Prepared(filled_copy(self.module), copied_batch(batch))
