"""Ranks of a tensor group that bring a batch each run a step at the same time: each its own batch,
but for the joint modules of the plan, which run those of all ranks at once
(`techniques.tensor_parallel.joint_run`).

Every rank has the loss, the logged values and the random numbers of its own batch, as under DDP.
That needs batches of one shape on all ranks; where they differ, the ranks take turns in that step
(`turns`), which they find out together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_topt.execution.engine import Engine
from lightning_topt.graph.structures import tensors_in
from lightning_topt.plugins.turns import Step, Turns

_WATCHED = 100  # steps
_MANY = 0.1


class JointBatches(Turns):
    """The steps of the ranks of `group`; arguments as in `Turns`."""

    def __init__(
        self,
        engine: Engine,
        module: pl.LightningModule,
        group: dist.ProcessGroup,
        *,
        device: torch.device,
    ) -> None:
        super().__init__(engine, module, group, device=device)
        self._buffers_differ = False
        self._steps = self._in_turns = 0

    @override
    def training_step(self, step: Step, args: Sequence[Any], *, exchanges: bool) -> Any:
        """Return the output of ``step(*args)``. A collective call."""
        is_joint = are_alike(args, self._group, device=self._device)
        self._engine.take_turns(not is_joint)
        self._count(is_joint)
        if is_joint:
            self._buffers.begin(stay_in_sync=exchanges)
            with self._buffers.turn_of(self._place):
                output = step(*args)
            self._buffers_differ = True
            return output
        if self._buffers_differ:
            self._buffers.exchange(self._group, device=self._device)
            self._buffers_differ = False
        return super().training_step(step, args, exchanges=exchanges)

    def _count(self, is_joint: bool) -> None:
        """Say once where turns are taken so often that the plan was chosen for other batches."""
        self._steps, self._in_turns = self._steps + 1, self._in_turns + (not is_joint)
        if self._steps == _WATCHED and self._in_turns > _MANY * _WATCHED:
            rank_zero_warn(
                f"topt: in {self._in_turns} of the first {_WATCHED} steps ranks of a tensor group "
                "had batches of different "
                "shapes, and ran them one after the other, which the plan did not expect: let "
                "loaders make batches of one "
                'shape on all ranks (drop_last, padding to one length), or compare with plan="ddp"'
            )


def are_alike(batch: Any, group: dist.ProcessGroup | None, *, device: torch.device) -> bool:
    """Return whether the tensors of the batches of all ranks of `group` have the same shapes. A
    collective call.
    """
    forms = [
        (tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in tensors_in(batch)
    ]
    digest = hashlib.blake2b(repr(forms).encode(), digest_size=7).digest()
    own = torch.tensor([int.from_bytes(digest, "big")], device=device)
    several = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(several, own, group=group)
    return len({int(each) for each in torch.cat(several).tolist()}) == 1
