"""One recording of a step on fake tensors stands for two of other batch sizes.

[Note: one recording] Its batch is `PRIME` times as large as the first. A size that is a multiple of
`PRIME` follows the batch then, one of its square twice, and all others do not; strides, counts and
bytes likewise. What this cannot tell (a part of a batch, a batch and one more) is `Unclear`. That
other operators run on a batch as large is not found here: it is asked of the step without changes
(`capture.is_told_by_one`), for which two recordings are there.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from lightning_topt.graph.kernels import Measured, measure
from lightning_topt.graph.recording import Recording, Shape, Storage, changed

PRIME = 1_048_583
TIMES = 1, 2  # the two sizes, in batches
_LARGEST = PRIME // 4  # a larger size that is no multiple may be a part of the batch


class Unclear(Exception):
    """It is not clear whether a size follows the batch."""


def size_at(times: int, size: int) -> int:
    """Return a size with `times` batches instead of `PRIME`. Raises Unclear."""
    if size % PRIME and size > _LARGEST:
        raise Unclear(f"{size} may be a part of {PRIME} batches")
    found: int = number_at(times, size)
    return found


def number_at(times: int, number: Any) -> Any:
    """Return an argument of a call likewise, whatever is no number and no multiple as it is."""
    if type(number) is not int and not (type(number) is float and number.is_integer()):
        return number
    while number and not number % PRIME:
        number = number // PRIME * times
    return number


@functools.lru_cache(maxsize=2**14)
def shape_at(times: int, shape: Shape) -> Shape:
    """Return a shape likewise. Raises Unclear."""
    return tuple(size_at(times, size) for size in shape[0]), shape[1]


def measure_at_sizes(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, mode: FakeTensorMode
) -> tuple[Measured, ...]:
    """Return what `measure` does, of the call with each of `TIMES` batches. Raises Unclear."""
    return tuple(
        measure(func, resized.of(args), resized.of(kwargs), resized.of(out))
        for resized in (_Resized(times, mode) for times in TIMES)
    )


class _Resized:
    """Fake tensors of other sizes; those that share memory do so again."""

    def __init__(self, times: int, mode: FakeTensorMode) -> None:
        self._times, self._mode = times, mode
        self._memory: dict[int, Tensor] = {}

    def of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value) if value.layout is torch.strided else value
        if isinstance(value, dict):
            return {key: self.of(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            items = [self.of(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
        return number_at(self._times, value)

    def _tensor(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        shape, _ = shape_at(self._times, (tuple(tensor.shape), ""))
        stride = [number_at(self._times, step) for step in tensor.stride()]
        offset = number_at(self._times, tensor.storage_offset())
        with _disable_current_modes():
            if storage._cdata not in self._memory:
                size = number_at(self._times, storage.nbytes())
                self._memory[storage._cdata] = torch.empty(size, dtype=torch.uint8, device="meta")
            view = torch.empty(0, dtype=tensor.dtype, device="meta")
            view.set_(self._memory[storage._cdata].untyped_storage(), offset, shape, stride)
            return FakeTensor(self._mode, view, tensor.device)


def recording_at(recording: Recording, place: int) -> Recording:
    """Return the whole `recording` as if it had been made with ``TIMES[place]`` batches. Raises
    Unclear.
    """
    times, measured = TIMES[place], recording.measured_at
    saved: Counter[int] = Counter()
    saved_now: Counter[int] = Counter()
    new: dict[int, Storage] = {}
    for storage in recording.storages:
        resized = changed(
            storage, bytes=number_at(times, storage.bytes), shape=shape_at(times, storage.shape)
        )
        new[id(storage)] = resized
        if storage.saved_by is not None:
            saved[storage.saved_by] += storage.bytes
            saved_now[storage.saved_by] += resized.bytes
    if any(saved[index] != op.saved_bytes for index, op in enumerate(recording.ops)):
        raise Unclear("bytes were saved that are in no tensor")
    ops = [
        changed(
            op,
            outputs=[shape_at(times, shape) for shape in op.outputs],
            forward=[measured[id(kernel)][place] for kernel in op.forward],
            backward=[measured[id(kernel)][place] for kernel in op.backward],
            saved_bytes=saved_now[index],
        )
        for index, op in enumerate(recording.ops)
    ]
    calls = [
        changed(
            call,
            inputs=[new[id(storage)] for storage in call.inputs],
            outputs=[new[id(s)] for s in call.outputs],
        )
        for call in recording.calls
    ]
    return changed(
        recording,
        ops=ops,
        edges={pair: shape_at(times, shape) for pair, shape in recording.edges.items()},
        storages=[*new.values()],
        calls=calls,
        kernels=[
            None if kernel is None else measured[id(kernel)][place] for kernel in recording.kernels
        ],
    )
