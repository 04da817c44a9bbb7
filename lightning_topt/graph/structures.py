"""The tensors of a batch, nested in any way, and how many samples they hold.

A batch is a tensor, a mapping, sequence, dataclass, packed sequence or another object that holds
tensors. `tensors_in` yields them, `map_tensors` copies the structure around them. `batch_size`
says how many samples it has, `fake_batch` makes one of another size without memory.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_topt.graph.errors import WAY_OUT, CaptureError

PLAIN = (str, bytes, int, float, complex, type(None))
CONTAINERS = (Tensor, Mapping, list, tuple, collections.deque)


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors of a batch in the order of `map_tensors`."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, PLAIN):
        return
    # values only: keys are no part of a batch
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, collections.deque)):
        for item in value:
            yield from tensors_in(item)
    else:
        yield from tensors_in(_fields(value))


def _nothing(_: object) -> bool:
    return False


def map_tensors(
    value: object, function: Callable[[Any], Any], *, also: Callable[[Any], bool] = _nothing
) -> Any:
    """Return a copy of a batch with `function` applied to its tensors.

    Mappings, sequences, dataclasses and objects are copied. `function` is applied as well to values
    for which `also` holds.
    """
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor) or also(value):
        return function(value)
    if isinstance(value, PackedSequence):
        # Its constructor would permute again what is sorted already.
        return tuple.__new__(
            type(value), [map_tensors(item, function, also=also) for item in value]
        )
    # a named tuple takes its items one by one, other tuples as one iterable
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, function, also=also) for item in value))
    if isinstance(value, collections.deque):
        return type(value)((map_tensors(item, function, also=also) for item in value), value.maxlen)
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, function, also=also) for item in value)
    if isinstance(value, Mapping):
        # a copy keeps the class and what else it holds; a read-only mapping becomes a dict
        copied: Any = copy.copy(value) if isinstance(value, MutableMapping) else dict(value)
        for key, item in value.items():
            copied[key] = map_tensors(item, function, also=also)
        return copied
    # another object: copied only where it holds tensors, without its constructor
    fields = _fields(value)
    if not any(True for _ in tensors_in(fields)):
        return value
    copied = copy.copy(value)
    for key, item in fields.items():
        # also where the class is frozen
        object.__setattr__(copied, key, map_tensors(item, function, also=also))
    return copied


def copied_batch(batch: object) -> object:
    """Return `batch` with copies of its tensors."""
    return map_tensors(
        batch, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad)
    )


def _fields(value: object) -> dict[str, object]:
    # The attributes of `value` that are part of a batch. Of a dataclass these are all fields; of
    # another object those that hold tensors or move to devices as it does. An object may refer to
    # all of the program: what else it holds is not part of the batch.
    if isinstance(value, (type, nn.Module)):
        return {}
    if dataclasses.is_dataclass(value):
        return {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if hasattr(value, field.name)
        }
    # attributes and slots
    attributes = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        # one slot may be given as a text
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                attributes[name] = getattr(value, name)
    # of other objects: containers, dataclasses, and what moves to devices
    return {
        key: item
        for key, item in attributes.items()
        if isinstance(item, CONTAINERS) or _is_part(item)
    }


def _is_part(value: object) -> bool:
    if isinstance(value, (*PLAIN, type, nn.Module)):
        return False
    # of the class, so that no attribute of a user's object is computed
    return dataclasses.is_dataclass(value) or callable(getattr(type(value), "to", None))


# ---- sizes ---------------------------------------------------------------------------------------


def batch_size(batch: object) -> int:
    """Return the samples of a batch: the size of dim 0, which all tensors that have one share.

    Raises CaptureError with advice otherwise.
    """
    leaves = list(tensors_in(batch))
    if not leaves:
        raise CaptureError(f"the batch holds no tensor, so its size is unknown. {WAY_OUT}")
    sizes = {tensor.shape[0] for tensor in leaves if tensor.dim()}
    if len(sizes) != 1 or 0 in sizes:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in leaves)
        raise CaptureError(
            "the tensors of the batch have no common size in dimension 0 (they are "
            f"{shapes}), so the batch size is unknown. {WAY_OUT}"
        )
    return int(sizes.pop())


def common_size(batch: object) -> int:
    """Return the size of dim 0 that all tensors of `batch` share, 1 where there is none."""
    # tensors without dims, such as a count, have no say
    sizes = {tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()}
    return max(sizes.pop(), 1) if len(sizes) == 1 else 1


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of `tensors`; of sparse ones those of as many dense elements."""
    return sum(
        t.nbytes if t.layout is torch.strided else t.numel() * t.element_size() for t in tensors
    )


def fake_batch(batch: object, *, samples: tuple[int, int], device: torch.device) -> object:
    """Return `batch` with empty tensors on `device`; call it under a fake mode.

    Args:
        batch: tensors anywhere inside.
        samples: (m, n) makes n samples of m along dim 0; nothing changes when they are equal.
        device: where the tensors seem to be.
    """
    have, want = samples

    def resize(tensor: Tensor) -> Tensor:
        shape, stride = list(tensor.shape), list(tensor.stride())
        if have != want and shape:
            shape[0] = want
            # dims outside of the batch dim in memory move apart
            stride = [step * want // have if step > stride[0] else step for step in stride]
        # with the strides of the tensor: kernels depend on its layout
        fake = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=device)
        return fake.requires_grad_(tensor.requires_grad)

    return map_tensors(batch, resize)
