"""An optimizer under a plan with stages: each rank steps the parameters that it keeps, and has
state for these alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_topt.execution.attached_optimizer import (
    AttachedOptimizer,
    lift_refusal,
    refuse_state_dict,
)
from lightning_topt.execution.pipeline.pipeline_run import PipelineRun
from lightning_topt.execution.pipeline.shared_values import share_value
from lightning_topt.execution.stored_states import StoredOptimizer
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.parallel_step import ParallelStep
from lightning_topt.optim.update_rule import UnsplittableOptimizer, check_by_parameter
from lightning_topt.techniques.tensor_parallel.split_parameters import SplitTensor

State = dict[str, Any]


@final
class StageOptimizer:
    """The `AttachedOptimizer` of a plan with stages; parameters are counted as
    ``Optimizer.state_dict`` does.

    Methods are collective calls, but for `load`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        run: PipelineRun,
        *,
        replaced: Mapping[Tensor, Tensor],
        split: Mapping[Tensor, SplitTensor],
        attach: Sequence[Callable[[Optimizer], ParallelStep | None]],
    ) -> None:
        try:
            check_by_parameter(optimizer)
        except UnsplittableOptimizer as error:
            raise UnsplittableOptimizer(
                f"ranks of a pipeline update the parameters of their stages, but {error.reason}",
                "Choose a plan without stages, such as 'ddp'",
            ) from error
        owners, kept = run.owners(), set[Tensor](run.updated_parameters())
        owners |= {
            replaced[original]: owner for original, owner in owners.items() if original in replaced
        }
        kept |= {replaced[original] for original in kept if original in replaced}
        parameters = parameters_of(optimizer)
        self._owners = {
            index: owners.get(parameter, 0) for index, parameter in enumerate(parameters)
        }
        self._foreign = {
            index for index, p in enumerate(parameters) if p in owners and p not in kept
        }
        self._groups, self._device = run.groups, run.device
        for index in self._foreign:
            optimizer.state.pop(parameters[index], None)
        self._attached = AttachedOptimizer(
            optimizer,
            replaced=replaced,
            split=split,
            attach=attach,
            keeps_whole=run.groups.data_rank == 0,
        )
        self.optimizer = optimizer

    def full_state(self) -> State:
        """Return the ``state_dict`` of one process on rank 0, an empty one elsewhere."""
        own = self._attached.full_state()
        if not self._groups.saves:
            return {}
        states: dict[int, State] = {}
        for place in range(len(self._groups.pipeline)):
            mine = place == self._groups.rank
            sent = (
                {i: values for i, values in own["state"].items() if self._owners[i] == place}
                if mine
                else None
            )
            if place == 0:
                states |= sent or {}
            elif self._groups.rank in (0, place):
                states |= _from(place, sent, self._groups.row, self._groups.rank, self._device)
        return (
            {"state": dict(sorted(states.items())), "param_groups": own["param_groups"]}
            if self._groups.rank == 0
            else {}
        )

    def own_state(self) -> State:
        """Return the ``state_dict`` of what this rank keeps."""
        return self._attached.own_state()

    def load(self, state: Mapping[str, Any] | StoredOptimizer) -> None:
        """Take over a whole state, each rank its part."""
        if isinstance(state, StoredOptimizer):
            state = self._attached.read(state, rows=self._rows_to_read)
        own = {
            index: values for index, values in state["state"].items() if index not in self._foreign
        }
        self._attached.load({**state, "state": own})

    def to_host(self) -> None:
        """Take the state off the device for good, each rank its own."""
        self._attached.to_host()

    def release(self) -> None:
        """Give the optimizer its own step back; its state stays where it is."""
        self._attached.release()
        if len(self._groups.pipeline) > 1:
            refuse_state_dict(self.optimizer)

    def give_back(self) -> None:
        """Give an optimizer that is used again after `release` its whole state, on every rank."""
        everyone = dist.group.WORLD
        assert everyone is not None
        lift_refusal(self.optimizer)
        whole = share_value(self.full_state(), group=everyone, source=0, device=self._device)
        self.optimizer.load_state_dict(whole)
        self._foreign = set()

    def _rows_to_read(self, index: int) -> range:
        return range(0) if index in self._foreign else self._attached.rows_to_read(index)


def _from(
    place: int,
    states: Mapping[int, State] | None,
    row: dist.ProcessGroup,
    rank: int,
    device: torch.device,
) -> dict[int, State]:
    """Return, on the first rank of `row`, the states that the rank `place` gives, in host memory;
    nothing there.
    """
    tensors = (
        []
        if states is None
        else [v for values in states.values() for v in values.values() if isinstance(v, Tensor)]
    )
    if rank == place:
        assert states is not None
        head = [{i: {k: _outline(v) for k, v in values.items()} for i, values in states.items()}]
        dist.send_object_list(head, group=row, group_dst=0, device=device)
        for tensor in tensors:
            dist.send(tensor.to(device).contiguous(), group=row, group_dst=0)
        return {}
    received: list[Any] = [None]
    dist.recv_object_list(received, group=row, group_src=place, device=device)
    return {
        i: {k: _received(v, place, row, device) for k, v in values.items()}
        for i, values in received[0].items()
    }


class _Outline(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype


def _outline(value: Any) -> Any:
    return _Outline(value.shape, value.dtype) if isinstance(value, Tensor) else value


def _received(value: Any, place: int, row: dist.ProcessGroup, device: torch.device) -> Any:
    if not isinstance(value, _Outline):
        return value
    tensor = torch.empty(value.shape, dtype=value.dtype, device=device)
    dist.recv(tensor, group=row, group_src=place)
    return tensor.cpu()
