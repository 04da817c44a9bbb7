"""The collectives that a step really calls, seen where torch dispatches them: its own, FSDP2's, and
those of DDP's reducer.

On gloo an all-gather and a reduce-scatter, FSDP2's and those along tensor axes, are exchanges of
other kinds (`communication.collectives`): each of them is one call here. Calls from other threads
(a gradient exchange) are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_topt.communication.collectives import AllGather, ReduceScatter
from lightning_topt.costs.communication import Collective, Group
from lightning_topt.graph.structures import tensors_in
from lightning_topt.techniques.tensor_parallel import moves

# By operator: the name, and the argument that has the whole tensor.
_OPERATORS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
}


class CalledCollectives(TorchDispatchMode):
    """Collects `calls` while it is on; `during` is the pass that they are noted under."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Collective] = []
        self.during = "forward"
        # the group whose ranks' gradients DDP averages
        self.of_ddp: dist.ProcessGroup | None = None
        self._inside = False

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d" and name in _OPERATORS and not self._inside:
            op, position = _OPERATORS[name]
            group = next(found for each in args if (found := _process_group(each)) is not None)
            self.note(op, list(tensors_in(args[position])), group)
        return func(*args, **(kwargs or {}))

    def note(self, op: str, whole: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        """Remember a call of `op` on the tensors that have all its bytes."""
        ranks = dist.get_process_group_ranks(group)
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        size = sum(tensor.numel() * tensor.element_size() for tensor in whole)
        self.calls.append(Collective(self.during, op, size, Group(len(ranks), stride)))

    @contextmanager
    def watching(self) -> Generator[None, None, None]:
        """Turn it on, also for what runs as other collectives on gloo."""
        with (
            _counted(AllGather, "all_gather", 0, self),
            _counted(ReduceScatter, "reduce_scatter", 1, self),
            _counted_move("all_gather_into", "all_gather", 0, self),
            _counted_move("reduce_scatter_into", "reduce_scatter", 1, self),
            self,
        ):
            yield

    @contextmanager
    def as_one(
        self, op: str, whole: Tensor, group: dist.ProcessGroup
    ) -> Generator[None, None, None]:
        """Note a call of `op`, and none of those that it is made of."""
        self.note(op, [whole], group)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False


@contextmanager
def _counted(
    cls: type, op: str, position: int, calls: CalledCollectives
) -> Generator[None, None, None]:
    original: Callable[..., Any] = cls.__call__

    def counted(
        self: Any,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with calls.as_one(op, (output_tensor, input_tensor)[position], group):
            return original(self, output_tensor, input_tensor, group, *args, **kwargs)

    cls.__call__ = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        cls.__call__ = original  # type: ignore[method-assign]


@contextmanager
def _counted_move(
    name: str, op: str, position: int, calls: CalledCollectives
) -> Generator[None, None, None]:
    original: Callable[..., Any] = getattr(moves, name)

    def counted(output: Tensor, local: Tensor, *, group: dist.ProcessGroup, **kwargs: Any) -> Any:
        with calls.as_one(op, (output, local)[position], group):
            return original(output, local, group=group, **kwargs)

    setattr(moves, name, counted)
    try:
        yield
    finally:
        setattr(moves, name, original)


def _process_group(argument: Any) -> dist.ProcessGroup | None:
    if isinstance(argument, dist.ProcessGroup):
        return argument
    if isinstance(argument, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(argument)
        except RuntimeError:
            return None
    return None
