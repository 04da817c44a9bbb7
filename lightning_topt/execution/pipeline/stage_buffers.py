"""Buffers of stages: all ranks keep them, the stage that changes one has it right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_topt.communication.topology import own_group
from lightning_topt.execution.pipeline.pipeline_groups import PipelineGroups
from lightning_topt.execution.pipeline.stage_layout import StageLayout, written_buffers
from lightning_topt.execution.pipeline.step_flows import StageFlow

_AT_ONCE_BYTES = 250 << 20  # DDP's size of one broadcast of buffers


class StageBuffers:
    """The buffers of `module` that stages change. Methods are collective calls of all ranks."""

    def __init__(self, module: nn.Module, layout: StageLayout, groups: PipelineGroups) -> None:
        self._module, self._layout, self._groups = module, layout, groups
        self._written = dict(layout.buffers)
        self._changed = False

    def begin_step(self, flows: Sequence[StageFlow]) -> None:
        """Begin a step of training with the buffers of the first data rank, as DDP does."""
        was_changed = self._changed
        self.changed_by(flows)
        if self._groups.data is not None and was_changed:
            own = [
                name
                for name, stage in sorted(self._written.items())
                if self._place(stage) == self._groups.rank
            ]
            named = dict(self._module.named_buffers())
            if own:
                buffers = [named[name] for name in own]
                dist._broadcast_coalesced(self._groups.data, buffers, _AT_ONCE_BYTES, 0)  # type: ignore[attr-defined]

    def changed_by(self, flows: Sequence[StageFlow]) -> None:
        """Remember which buffers steps with these flows change. No collective call."""
        for flow in {id(flow): flow for flow in flows}.values():
            self._written |= written_buffers(flow.flow, flow.stage_of_call)
        self._changed = bool(self._written)

    def sync(self) -> None:
        """Give all ranks the buffers that stages have changed, as they are on the first data
        rank.
        """
        if not self._changed:
            return
        named, first = dict(self._module.named_buffers()), self._groups.mesh.pipeline_of(0)
        for name, stage in sorted(self._written.items()):
            dist.broadcast(named[name].data, first[self._place(stage)])
        self._changed = False

    def _place(self, stage: int) -> int:
        return self._layout.rank_of_stage[stage]


def average_over_data_ranks(
    module: nn.Module, groups: PipelineGroups
) -> list[tuple[nn.SyncBatchNorm, Any]]:
    """Let statistics over all ranks be those of the ranks that run the same stages.

    Other ranks do not run these modules, and would be waited for. Returns the modules that this
    changes, each with its `process_group` before. A collective call of all ranks.
    """
    everyone = dist.group.WORLD
    of_batches = (each for each in module.modules() if isinstance(each, nn.SyncBatchNorm))
    found = [
        (each, each.process_group) for each in of_batches if each.process_group in (None, everyone)
    ]
    if found:
        group = groups.data or own_group([[rank] for rank in range(dist.get_world_size())])
        for each, _ in found:
            each.process_group = group
    return found
