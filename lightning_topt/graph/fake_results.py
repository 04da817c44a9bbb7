"""Results of calls on fake tensors that were made before: new tensors like those of the first call.

    call = FrozenCall.of(func, args, kwargs)
    out = RESULTS.of(call, func, args, kwargs)      # as ``func(*args, **kwargs)``, in a fifth of it

Layers of a model make the same calls, and so do the steps of ranks that hold slices. What a call
returns on fake tensors follows from the operator, its plain arguments, and the shapes, strides,
dtypes and devices of its tensors. Left to torch is what may do more: operators that write or return
views, tensors with values (`FakeTensor.constant`), complex ones, and results that are not dense.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from lightning_topt.graph.kernels import Frozen, freeze, is_strided, is_view
from lightning_topt.graph.module_copy import Like, empty_fake

_MOST = 8192  # calls that are known


class FrozenCall(NamedTuple):
    """A call to be compared with others: equal keys for equal calls; and its tensors."""

    key: Frozen
    tensors: list[Tensor]

    @classmethod
    def of(cls, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FrozenCall:
        """Return the call ``func(*args, **kwargs)``."""
        tensors: list[Tensor] = []
        key = func, freeze(args, tensors), freeze(tuple(kwargs.items()), tensors)
        return cls(key, tensors)


@functools.cache
def makes_new_tensors(func: OpOverload) -> bool:
    """Return whether `func` writes to nothing, and all that it returns is new."""
    schema = func._schema
    values = (*schema.arguments, *schema.returns)
    unknown = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return (
        func.namespace == "aten"
        and not is_view(func)
        and not any(value.alias_info is not None for value in values)
        and all(str(value.type) == "Tensor" for value in schema.returns)
        and unknown.isdisjoint(func.tags)
    )


@dataclass(eq=False)
class FakeResults:
    """What calls returned, by their keys: tensors to be made, or None where torch is asked."""

    _known: dict[Any, tuple[Like, ...] | None] = field(default_factory=dict)

    def of(
        self, call: FrozenCall, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what ``func(*args, **kwargs)`` returns."""
        device = _device_of(call.tensors)
        if device is None:
            return func(*args, **kwargs)
        key = call.key, device, kwargs.get("device"), torch.get_default_dtype()
        if key in self._known:
            likes = self._known[key]
            if likes is None:
                return func(*args, **kwargs)
            mode = call.tensors[0].fake_mode  # type: ignore[attr-defined]
            made = tuple(empty_fake(mode, like=like) for like in likes)
            return made if len(func._schema.returns) > 1 else made[0]
        out = func(*args, **kwargs)
        if len(self._known) < _MOST:
            self._known[key] = _likes(out, call)
        return out


RESULTS = FakeResults()


def _device_of(tensors: list[Tensor]) -> torch.device | None:
    """Return the device of all `tensors`; None where there is none, or some are not plain."""
    found: torch.device | None = None
    for tensor in tensors:
        if type(tensor) is not FakeTensor or tensor.constant is not None:
            return None
        found = found or tensor.fake_device
        if tensor.fake_device != found or tensor.dtype.is_complex:
            return None
    return found


def _likes(out: object, call: FrozenCall) -> tuple[Like, ...] | None:
    """Return how to make `out` again.

    None where it is not plain, or the call cannot be compared.
    """
    made = out if isinstance(out, tuple) else (out,)
    if not made or _is_opaque(call.key[1:]):
        return None
    memory = {tensor.untyped_storage()._cdata for tensor in call.tensors}
    likes: list[Like] = []
    for tensor in made:
        if type(tensor) is not FakeTensor or tensor.constant is not None or not is_strided(tensor):
            return None
        storage, address = tensor.untyped_storage(), tensor.untyped_storage()._cdata
        # memory of its own, and no more of it than its elements take
        if address in memory or tensor._is_view() or storage.nbytes() != tensor.nbytes:
            return None
        memory.add(address)
        likes.append((tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.fake_device))
    return tuple(likes)


def _is_opaque(value: Frozen) -> bool:
    """Return whether a part of frozen arguments stands for something that it does not tell."""
    return isinstance(value, tuple) and (
        value[:1] == ("opaque",) or any(_is_opaque(part) for part in value)
    )
