"""Foreign parameters: those that no stage of this rank needs. They stay the same objects and give
their memory back.

Their elements are one NaN, so that a wrong use shows; they have no gradients, and optimizers pass
over them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_topt.execution.pipeline.pipeline_groups import PipelineGroups
from lightning_topt.execution.pipeline.stage_layout import StageLayout

AT_ONCE = 8  # parameters that travel at the same time


class ForeignParameters:
    """The parameters of `module` of which the ranks ``holders[name]`` of `group` keep one each, its
    owner first; all keep those without an entry.

    `names` are those that this rank does not keep. Methods are collective calls of `group`, the
    ranks of this pipeline, but for `free` and `skipped_by_loading`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        holders: Mapping[str, tuple[int, ...]],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._module, self.group, self.device = module, group, device
        self.holders, self._rank = dict(holders), dist.get_rank(group)
        self.owners = {name: ranks[0] for name, ranks in holders.items()}
        self.names = frozenset(name for name, ranks in holders.items() if self._rank not in ranks)
        self._is_joined = False

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the module has now, by their first names."""
        return dict(self._module.named_parameters())

    def free(self) -> None:
        """Give their memory back."""
        parameters = self.parameters
        for name in self.names:
            parameter = parameters[name]
            numeric = parameter.is_floating_point() or parameter.is_complex()
            value = torch.full(
                (), float("nan") if numeric else 0, dtype=parameter.dtype, device=self.device
            )
            parameter.data = value.expand(parameter.shape)
            parameter.grad = None

    @torch.no_grad()
    def restore(self) -> None:
        """Let every rank have all of them again, as their owners do."""
        parameters = self.parameters
        for names in _batches(list(self.owners)):
            for name in names:
                if name in self.names:
                    parameter = parameters[name]
                    parameter.data = torch.empty(
                        parameter.shape, dtype=parameter.dtype, device=self.device
                    )
            works = [
                dist.broadcast(
                    self.parameters[name].data,
                    group=self.group,
                    group_src=self.owners[name],
                    async_op=True,
                )
                for name in names
            ]
            for work in works:
                work.wait()
        self.names = frozenset()

    @contextmanager
    def joined(self) -> Generator[None, None, None]:
        """Within it every rank has all of them, and gives those that it does not keep back at the
        end.
        """
        foreign = self.names
        self.restore()
        self._is_joined = True
        try:
            yield
        finally:
            self._is_joined, self.names = False, foreign
            self.free()

    @contextmanager
    def whole_on_first(self) -> Generator[None, None, None]:
        """Within it the first rank of the pipeline has all parameters, those of other ranks in host
        memory.
        """
        before, parameters = {}, self.parameters
        missing = (
            ()
            if self._is_joined
            else (name for name, ranks in self.holders.items() if 0 not in ranks)
        )
        for name in sorted(missing):
            if self._rank == 0 and name in self.names:
                parameter = parameters[name]
                value = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device)
                dist.recv(value, group=self.group, group_src=self.owners[name])
                before[name], parameter.data = parameter.data, value.cpu()
            elif self._rank == self.owners[name]:
                dist.send(parameters[name].data.contiguous(), group=self.group, group_dst=0)
        try:
            yield
        finally:
            for name, value in before.items():
                parameters[name].data = value

    def skipped_by_loading(self) -> TorchFunctionMode:
        """Return a mode within which ``load_state_dict`` leaves them alone."""
        parameters = self.parameters
        return _Skipping({id(parameters[name]) for name in self.names})


class _Skipping(TorchFunctionMode):
    def __init__(self, parameters: set[int]) -> None:
        super().__init__()
        self._parameters = parameters

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and id(args[0]) in self._parameters:
            return args[0]
        return func(*args, **(kwargs or {}))


def place_parameters(
    module: nn.Module, layout: StageLayout, groups: PipelineGroups, *, device: torch.device
) -> ForeignParameters:
    """Give all ranks the parameters and buffers of rank 0; each keeps the parameters that its
    stages need.

    A collective call of all ranks.
    """
    parameters = dict(module.named_parameters())
    holders = {name: ranks for name in parameters if (ranks := layout.holders(name))}
    placed = ForeignParameters(module, holders=holders, group=groups.row, device=device)
    for name, parameter in parameters.items():
        of_first = _from_rank_0(parameter.data.to(device))
        parameter.data = parameter.data if name in placed.names else of_first
    for buffer in module.buffers():
        buffer.data = _from_rank_0(buffer.data.to(device))
    placed.free()
    return placed


def _from_rank_0(tensor: Tensor) -> Tensor:
    sent = tensor.contiguous()
    dist.broadcast(sent, 0)
    return tensor if sent is tensor else tensor.copy_(sent)


def _batches(names: Sequence[str]) -> list[Sequence[str]]:
    return [names[start : start + AT_ONCE] for start in range(0, len(names), AT_ONCE)]
