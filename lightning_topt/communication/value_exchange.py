"""Values of any structure, such as batches, exchanged between the ranks of a group.

    value_of_rank    one rank's value, on all ranks
    values_of_ranks  every rank's value, on all ranks, one after the other
    value_for_rank   one rank has a value for each rank
    pack_value       a value as bytes, for a channel of one's own; `unpack_value`

Values are pickled but for their plain tensors, which travel by themselves as bytes (backends do not
know all dtypes), straight from where they are. A rank's own value is never copied.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override


def value_of_rank(value: Any, group: dist.ProcessGroup, *, place: int, device: torch.device) -> Any:
    """Return the `value` of the rank at this `place` of `group`; there, the value itself.

    A collective call. Raises what pickle raises there.
    """
    is_own = dist.get_rank(group) == place
    # First the structure, then the tensors.
    pickled: list[Any] = [None]
    tensors: list[Tensor] = []
    if is_own:
        packer = _Packer(value)
        pickled, tensors = [(packer.pickled, packer.forms)], packer.tensors
    dist.broadcast_object_list(pickled, group=group, group_src=place)
    data, forms = pickled[0]
    if is_own:
        _broadcast(tensors, group, place, device)
        return value
    return _received(data, forms, group, place, device)


def values_of_ranks(value: Any, group: dist.ProcessGroup, *, device: torch.device) -> Iterator[Any]:
    """Yield the value of every rank of `group` in its order, this rank's own as it is.

    Tensors of other ranks come when it is their turn, so that one value is in memory at a time;
    they are on the same type of device as there. A collective call, and so is every step of the
    iteration. Raises what pickle raises.
    """
    packer = _Packer(value)
    # Structures of all ranks at once; tensors one rank at a time.
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (packer.pickled, packer.forms), group=group)
    for place, (data, forms) in enumerate(everyone):
        if place == dist.get_rank(group):
            _broadcast(packer.tensors, group, place, device)
            yield value
        else:
            yield _received(data, forms, group, place, device)


def value_for_rank(
    values: Sequence[Any] | None, group: dist.ProcessGroup, *, source: int, device: torch.device
) -> Any:
    """Return the one of `values` that is for this rank.

    The rank at place `source` of `group` has all of them, in the order of the group; on the other
    ranks `values` is None. A collective call. Raises what pickle raises there.
    """
    packed = None if values is None else [pack_value(value) for value in values]
    own: list[Any] = [None]
    dist.scatter_object_list(own, packed, group=group, group_src=source)
    return unpack_value(own[0], device=device) if values is None else values[source]


def check_packs(value: Any) -> None:
    """Raise what pickle raises where `value` cannot be sent."""
    _Packer(value)


def pack_value(value: Any) -> bytes:
    """Return `value` as bytes, its tensors among them. Raises what pickle raises."""
    packer = _Packer(value)
    elements = [
        tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        if tensor.numel()
        else b""
        for tensor in packer.tensors
    ]
    return pickle.dumps((packer.pickled, packer.forms, elements), protocol=pickle.HIGHEST_PROTOCOL)


def unpack_value(data: bytes, *, device: torch.device) -> Any:
    """Return the value of `pack_value`; its tensors are on the same type of device as they were."""
    pickled, forms, elements = pickle.loads(data)
    tensors = [torch.empty(form.shape, dtype=form.dtype) for form in forms]
    for tensor, of_tensor in zip(tensors, elements, strict=True):
        if of_tensor:
            tensor.view(-1).view(torch.uint8).copy_(
                torch.frombuffer(bytearray(of_tensor), dtype=torch.uint8)
            )
    return _unpickled(pickled, tensors, forms, device)


# ---- pickling ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Form:
    """All about a tensor but its elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool


class _Packer(pickle.Pickler):
    """Pickles a value without its plain tensors.

    `pickled` has the number of a tensor in its place; `tensors` (detached) and `forms` have these
    in order. A tensor that is there twice is sent once. What is not plain (sparse, quantized, part
    of a graph, a subclass) is pickled with the rest.
    """

    def __init__(self, value: Any) -> None:
        file = io.BytesIO()
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.forms: list[_Form] = []
        self._numbers: dict[int, int] = {}
        self._found: list[Tensor] = []  # kept: the id of a temporary one could come again
        self.dump(value)
        self.pickled, self.tensors = file.getvalue(), [tensor.detach() for tensor in self._found]

    @override
    def persistent_id(self, value: Any) -> int | None:
        if (
            type(value) is not Tensor
            or value.layout != torch.strided
            or value.is_quantized
            or not value.is_leaf
        ):
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._found)
            self._found.append(value)
            self.forms.append(
                _Form(tuple(value.shape), value.dtype, value.device.type, value.requires_grad)
            )
        return self._numbers[id(value)]


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    @override
    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


def _unpickled(
    pickled: bytes, tensors: Sequence[Tensor], forms: Sequence[_Form], device: torch.device
) -> Any:
    placed = [_placed(tensor, form, device) for tensor, form in zip(tensors, forms, strict=True)]
    return _Unpacker(io.BytesIO(pickled), placed).load()


def _placed(tensor: Tensor, form: _Form, device: torch.device) -> Tensor:
    # What was on an accelerator comes to this rank's; all else stays on the host.
    where = device if form.device == device.type else form.device
    return tensor.to(where).requires_grad_(form.requires_grad)


# ---- sending -------------------------------------------------------------------------------------


def _received(
    pickled: bytes,
    forms: Sequence[_Form],
    group: dist.ProcessGroup,
    place: int,
    device: torch.device,
) -> Any:
    placed = []
    for form in forms:  # one at a time: a device may have no room for all
        tensor = torch.empty(form.shape, dtype=form.dtype, device=device)
        _broadcast([tensor], group, place, device)
        placed.append(_placed(tensor, form, device))
    return _Unpacker(io.BytesIO(pickled), placed).load()


@torch.no_grad()
def _broadcast(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, place: int, device: torch.device
) -> None:
    # Send the elements as bytes: backends do not know all dtypes
    for tensor in tensors:
        if tensor.numel():
            sent = tensor.to(device).contiguous().view(-1).view(torch.uint8)
            dist.broadcast(sent, group=group, group_src=place)
