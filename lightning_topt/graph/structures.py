"""The tensors of a batch: in mappings, sequences, dataclasses, packed sequences and objects, nested
in any way.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

PLAIN = (str, bytes, int, float, complex, type(None))
CONTAINERS = (Tensor, Mapping, list, tuple, collections.deque)


def _nothing(_: Any) -> bool:
    return False


def map_tensors(
    value: Any, function: Callable[[Any], Any], *, also: Callable[[Any], bool] = _nothing
) -> Any:
    """Return a copy of a batch with `function` applied to the tensors in mappings, sequences,
    dataclasses and objects.

    It is applied as well to values for which `also` holds.
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
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, function, also=also) for item in value))
    if isinstance(value, collections.deque):
        return type(value)((map_tensors(item, function, also=also) for item in value), value.maxlen)
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, function, also=also) for item in value)
    if isinstance(value, Mapping):
        copied: Any = copy.copy(value) if isinstance(value, MutableMapping) else dict(value)
        for key, item in value.items():
            copied[key] = map_tensors(item, function, also=also)
        return copied
    fields = _fields(value)
    if not any(True for _ in tensors_in(fields)):
        return value
    copied = copy.copy(value)
    for key, item in fields.items():
        object.__setattr__(copied, key, map_tensors(item, function, also=also))
    return copied


def copied_batch(batch: Any) -> Any:
    """Return `batch` with copies of its tensors."""
    return map_tensors(
        batch, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad)
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch in the order of `map_tensors`."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, PLAIN):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, collections.deque)):
        for item in value:
            yield from tensors_in(item)
    else:
        yield from tensors_in(_fields(value))


def _fields(value: Any) -> dict[str, Any]:
    """Attributes of a dataclass; of another object those that hold tensors or move to devices as it
    does.

    An object may know the whole program: what it refers to otherwise is not a part of the batch.
    """
    if isinstance(value, (type, nn.Module)):
        return {}
    if dataclasses.is_dataclass(value):
        return {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if hasattr(value, field.name)
        }
    attributes = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                attributes[name] = getattr(value, name)
    return {
        key: item
        for key, item in attributes.items()
        if isinstance(item, CONTAINERS) or _is_part(item)
    }


def _is_part(value: Any) -> bool:
    if isinstance(value, (*PLAIN, type, nn.Module)):
        return False
    return dataclasses.is_dataclass(value) or callable(getattr(type(value), "to", None))
