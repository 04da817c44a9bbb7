"""Each rank of a group brings a value of any structure, a batch; every rank gets those of all, one
after the other.

Values are pickled but for their tensors, which travel by themselves, straight from where they are.
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


@dataclass(frozen=True)
class _Form:
    """All about a tensor but its elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool


class _Packer(pickle.Pickler):
    """Leaves plain tensors out: `tensors` has them, and `forms` what they are like."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self.forms: list[_Form] = []
        self._places: dict[int, int] = {}

    @override
    def persistent_id(self, value: Any) -> int | None:
        if (
            type(value) is not Tensor
            or value.layout != torch.strided
            or value.is_quantized
            or not value.is_leaf
        ):
            return None
        if id(value) not in self._places:
            self._places[id(value)] = len(self.tensors)
            self.tensors.append(value)
            self.forms.append(
                _Form(tuple(value.shape), value.dtype, value.device.type, value.requires_grad)
            )
        return self._places[id(value)]


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    @override
    def persistent_load(self, place: int) -> Tensor:
        return self._tensors[place]


def check_packs(value: Any) -> None:
    """Raise what pickle raises where `value` cannot be sent."""
    _Packer(io.BytesIO()).dump(value)


def packed(value: Any) -> bytes:
    """Return `value` as bytes, its tensors among them. Raises what pickle raises."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    elements = [
        tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        if tensor.numel()
        else b""
        for tensor in packer.tensors
    ]
    return pickle.dumps((file.getvalue(), packer.forms, elements), protocol=pickle.HIGHEST_PROTOCOL)


def unpacked(data: bytes, *, device: torch.device) -> Any:
    """Return the value that `packed` made `data` of; its tensors are on the same type of device as
    they were.
    """
    file, forms, elements = pickle.loads(data)
    places = [torch.empty(form.shape, dtype=form.dtype) for form in forms]
    for place, of_tensor in zip(places, elements, strict=True):
        if of_tensor:
            place.view(-1).view(torch.uint8).copy_(
                torch.frombuffer(bytearray(of_tensor), dtype=torch.uint8)
            )
    return _unpacked(file, places, forms, device)


def values_of_members(
    value: Any, group: dist.ProcessGroup, *, device: torch.device
) -> Iterator[Any]:
    """Yield the value of every member of `group` in its order, this rank's own as it is; tensors of
    others come when it is their turn, on the same type of device.

    A collective call, and so is every step of the iteration. Raises what pickle raises.
    """
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (file.getvalue(), packer.forms), group=group)
    for member, (packed, forms) in enumerate(everyone):
        if member == dist.get_rank(group):
            _broadcast([tensor.detach() for tensor in packer.tensors], group, member, device)
            yield value
        else:
            yield _received(packed, forms, group, member, device)


def value_of_member(
    value: Any, group: dist.ProcessGroup, *, member: int, device: torch.device
) -> Any:
    """Return the `value` that the rank at place `member` of `group` brings; on that rank, itself.

    A collective call. Raises what pickle raises there.
    """
    is_own = dist.get_rank(group) == member
    box: list[Any] = [None]
    tensors: list[Tensor] = []
    if is_own:
        file = io.BytesIO()
        packer = _Packer(file)
        packer.dump(value)
        box, tensors = (
            [(file.getvalue(), packer.forms)],
            [tensor.detach() for tensor in packer.tensors],
        )
    dist.broadcast_object_list(box, group=group, group_src=member)
    packed, forms = box[0]
    if is_own:
        _broadcast(tensors, group, member, device)
        return value
    return _received(packed, forms, group, member, device)


def value_for_member(
    values: Sequence[Any] | None, group: dist.ProcessGroup, *, source: int, device: torch.device
) -> Any:
    """Return that of `values`, which the rank at place `source` has for every member of `group`,
    that is for this rank.

    A collective call. Raises what pickle raises there.
    """
    place = dist.get_rank(group)
    if place == source:
        assert values is not None
        for member, value in enumerate(values):
            if member != source:
                _send(value, group, member, device)
        return values[source]
    box: list[Any] = [None]
    dist.recv_object_list(box, group=group, group_src=source, device=device)
    packed, forms = box[0]
    places = [torch.empty(form.shape, dtype=form.dtype, device=device) for form in forms]
    for tensor in places:
        if tensor.numel():
            dist.recv(tensor.view(-1).view(torch.uint8), group=group, group_src=source)
    return _unpacked(packed, places, forms, device)


def _send(value: Any, group: dist.ProcessGroup, member: int, device: torch.device) -> None:
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    dist.send_object_list(
        [(file.getvalue(), packer.forms)], group=group, group_dst=member, device=device
    )
    for tensor in packer.tensors:
        if tensor.numel():
            sent = tensor.detach().to(device).contiguous().view(-1).view(torch.uint8)
            dist.send(sent, group=group, group_dst=member)


def _received(
    packed: bytes,
    forms: Sequence[_Form],
    group: dist.ProcessGroup,
    member: int,
    device: torch.device,
) -> Any:
    places = [torch.empty(form.shape, dtype=form.dtype, device=device) for form in forms]
    _broadcast(places, group, member, device)
    return _unpacked(packed, places, forms, device)


def _unpacked(
    packed: bytes, places: Sequence[Tensor], forms: Sequence[_Form], device: torch.device
) -> Any:
    tensors = [
        tensor.to(device if form.device == device.type else form.device).requires_grad_(
            form.requires_grad
        )
        for tensor, form in zip(places, forms, strict=True)
    ]
    return _Unpacker(io.BytesIO(packed), tensors).load()


@torch.no_grad()
def _broadcast(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, member: int, device: torch.device
) -> None:
    """Send the elements as bytes: backends do not know all dtypes."""
    sent = (
        tensor.to(device).contiguous().view(-1).view(torch.uint8)
        for tensor in tensors
        if tensor.numel()
    )
    for work in [dist.broadcast(one, group=group, group_src=member, async_op=True) for one in sent]:
        work.wait()
