"""The memory that is alive while a step is recorded, by address; its end is noted when the last
tensor lets go of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lightning_topt.graph.recording import Recording, Shape, Storage
from lightning_topt.graph.structures import tensors_in
from lightning_topt.graph.writes import is_strided


class LiveStorages:
    """Storages of `recording`, made after the tensors `outside`, which are held so that no address
    of theirs is used again.
    """

    def __init__(self, recording: Recording, outside: Iterable[Tensor]) -> None:
        self._recording = recording
        self._live: dict[int, Storage] = {}
        self._references: dict[int, Any] = {}
        self._outside = list(outside)
        self._outside_ids = {
            tensor.untyped_storage()._cdata for tensor in self._outside if is_strided(tensor)
        }

    def forget(self) -> None:
        """Let go of the tensors that were there before, and of all that is noted of live ones."""
        self._outside, self._live, self._references = [], {}, {}

    def of(self, tensor: Tensor) -> Storage | None:
        """Return the storage of `tensor`; None for what is older than the recording or not
        strided.
        """
        return self._live.get(tensor.untyped_storage()._cdata) if is_strided(tensor) else None

    def within(self, value: Any) -> list[Storage]:
        """Return the storages of the tensors in a structure, each once."""
        found = {t.untyped_storage()._cdata: None for t in tensors_in(value) if is_strided(t)}
        return [self._live[address] for address in found if address in self._live]

    def track(self, tensor: Tensor, *, born: int, op: int, parts: tuple[Storage, ...] = ()) -> None:
        """Note the memory of `tensor`, made by operator `op`, unless it is known."""
        if not is_strided(tensor):
            return
        memory = tensor.untyped_storage()
        address = memory._cdata
        if address in self._live or address in self._outside_ids:
            return
        made = len(self._recording.kernel_ops)
        storage = Storage(memory.nbytes(), born, op, shape_of(tensor), made=made, parts=parts)
        self._live[address] = storage
        self._recording.storages.append(storage)

        def freed(_: object) -> None:
            storage.died = len(self._recording.kernel_ops)
            self._live.pop(address, None)
            self._references.pop(address, None)

        self._references[address] = weakref.ref(memory, freed)


def shape_of(tensor: Tensor) -> Shape:
    """Return the sizes and dtype of a tensor."""
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
