"""Values of any structure, such as batches, exchanged between the ranks of a group.

    value_of_rank    one rank's value, on all ranks
    values_of_ranks  every rank's value, on all ranks, one after the other
    value_for_rank   one rank has a value for each rank
    pack_value       a value for a channel of one's own; `unpack_value`

Values are pickled but for their plain tensors, which travel by themselves as bytes (backends do not
know all dtypes), straight from where they are. A rank's own value is never copied. Where pickles
travel over gloo, and tensors on the device, no host waits for its device.
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


def value_of_rank(
    value: Any,
    group: dist.ProcessGroup,
    *,
    place: int,
    device: torch.device,
    host_group: dist.ProcessGroup | None = None,
) -> Any:
    """Return the `value` of the rank at this `place` of `group`; there, the value itself.

    What is in host memory goes by `host_group`, the same ranks on gloo, where there is one. A
    collective call. Raises what pickle raises there.
    """
    is_own = dist.get_rank(group) == place
    # First the structure, with what is on the host, then the tensors.
    packed: list[Any] = [None]
    tensors: list[Tensor] = []
    if is_own:
        packer = _Packer(value, keeps_host=host_group is not None and device.type != "cpu")
        packed, tensors = [(packer.pickled, packer.forms)], packer.tensors
    dist.broadcast_object_list(packed, group=host_group or group, group_src=place)
    data, forms = packed[0]
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
    host = torch.device("cpu")
    packed = None
    if values is not None:  # arrays are pickled faster than tensors
        pairs = [pack_value(value, device=host) for value in values]
        packed = [(data, elements.numpy()) for data, elements in pairs]
    own: list[Any] = [None]
    dist.scatter_object_list(own, packed, group=group, group_src=source)
    if values is not None:
        return values[source]
    data, elements = own[0]
    return unpack_value(data, torch.from_numpy(elements), device=device)


def check_packs(value: Any) -> None:
    """Raise what pickle raises where `value` cannot be sent."""
    _Packer(value)


def pack_value(value: Any, *, device: torch.device) -> tuple[bytes, Tensor]:
    """Return `value` as bytes, and the elements of its tensors on `device`, (n,) bytes.

    Raises what pickle raises.
    """
    packer = _Packer(value, keeps_host=device.type != "cpu")
    pieces = [_elements(tensor.to(device)) for tensor in packer.tensors if tensor.numel()]
    elements = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=device)
    return pickle.dumps((packer.pickled, packer.forms), pickle.HIGHEST_PROTOCOL), elements


def unpack_value(data: bytes, elements: Tensor, *, device: torch.device) -> Any:
    """Return the value of `pack_value`; its tensors are on the same type of device as they were."""
    pickled, forms = pickle.loads(data)
    tensors = [torch.empty(form.shape, dtype=form.dtype, device=elements.device) for form in forms]
    pieces = elements.split([tensor.nbytes for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        if tensor.numel():
            _elements(tensor).copy_(piece)
    placed = [_placed(tensor, form, device) for tensor, form in zip(tensors, forms, strict=True)]
    return _Unpacker(io.BytesIO(pickled), placed).load()


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
    of a graph, a subclass) is pickled with the rest, and with `keeps_host` what is on the host.
    """

    def __init__(self, value: Any, *, keeps_host: bool = False) -> None:
        file = io.BytesIO()
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._keeps_host = keeps_host
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
            or (self._keeps_host and value.device.type == "cpu")
        ):
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._found)
            self._found.append(value)
            self.forms.append(
                _Form(tuple(value.shape), value.dtype, value.device.type, value.requires_grad)
            )
        return self._numbers[id(value)]

    @override
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or not value.is_leaf:
            return NotImplemented
        # Of a view its own elements alone, not all memory that it is a view of.
        own = value.detach().clone().requires_grad_(value.requires_grad)
        return own.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    @override
    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


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
            dist.broadcast(_elements(tensor.to(device)), group=group, group_src=place)


def _elements(tensor: Tensor) -> Tensor:
    # The memory of `tensor`, or of a copy, as (n,) bytes
    return tensor.contiguous().view(-1).view(torch.uint8)
