"""The operators that one call of a module runs, and the memory that each of them reads, in a form
that can be compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_topt.graph.collective_ops import is_collective, skip_collective
from lightning_topt.graph.kernels import QUERIES, Frozen, freeze
from lightning_topt.graph.structures import tensors_in
from lightning_topt.graph.writes import is_strided, written_tensors


class Source(NamedTuple):
    """Memory that an operator reads: `kind` is ``"made"`` by this call, ``"met"`` in it first, or
    ``"known"`` before.

    `place` counts what a call makes or meets, `serial` all memory, `version` the writes to it.
    """

    kind: str
    place: int
    serial: int
    version: int
    offset: int

    def equals(self, other: Source) -> bool:
        """Return whether two calls read the same: memory of their own at the same place, or the
        very same memory.
        """
        if self.offset != other.offset:
            return False
        if "made" in (self.kind, other.kind):
            return (self.kind, self.place) == (other.kind, other.place)
        if (self.serial, self.version) == (other.serial, other.version):
            return True
        # constants that every call writes anew
        return self.kind == other.kind == "met" and self.place == other.place


@dataclass
class CallTrace:
    """One call. `has_effects`: it drew from a generator of its own or talked to other ranks."""

    operators: list[tuple[OpOverload, Frozen]] = field(default_factory=list)
    sources: list[list[Source]] = field(default_factory=list)
    own: dict[int, tuple[str, int]] = field(default_factory=dict)  # (kind, place) by serial
    has_effects: bool = False

    def equals(self, other: CallTrace) -> bool:
        """Return whether both calls ran the same operators on the same memory."""
        return self.operators == other.operators and all(
            len(mine) == len(others) and all(a.equals(b) for a, b in zip(mine, others, strict=True))
            for mine, others in zip(self.sources, other.sources, strict=True)
        )


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that traces the calls within `call`. `outside`: tensors that exist before."""

    def __init__(self, outside: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._open: list[CallTrace] = []
        self._serials: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._versions: dict[int, int] = {}
        self._count = 0
        self._outside = [tensor for tensor in outside if is_strided(tensor)]
        for tensor in self._outside:
            self._serial(tensor, "met")

    @contextmanager
    def call(self) -> Iterator[CallTrace]:
        """Trace what runs inside, also what runs in calls inside of it."""
        self._open.append(CallTrace())
        try:
            yield self._open[-1]
        finally:
            self._open.pop()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run `func` and note what it reads and writes."""
        kwargs = kwargs or {}
        if func._schema.name in QUERIES:  # made by some calls of a module and not by others
            return func(*args, **kwargs)
        written = written_tensors(func, args, kwargs)
        if self._open:
            self._note(func, args, kwargs)
        out = skip_collective(func, args, kwargs) if is_collective(func) else func(*args, **kwargs)
        for tensor in written:
            serial = self._serial(tensor, "made")
            self._versions[serial] = self._versions.get(serial, 0) + 1
        self.note_made(tensors_in(out))
        return out

    def note_made(self, tensors: Iterable[Tensor]) -> None:
        """Note that the calls under way have made `tensors`, unless their memory is known."""
        for tensor in tensors:
            if is_strided(tensor):
                self._serial(tensor, "made")

    def _note(self, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> None:
        tensors: list[Tensor] = []
        operator = func, freeze((args, tuple(kwargs.items())), tensors)
        has_effects = is_collective(func) or any(
            isinstance(v, torch.Generator) for v in (*args, *kwargs.values())
        )
        for call in self._open:
            call.operators.append(operator)
            call.sources.append([self._source(call, tensor) for tensor in tensors])
            call.has_effects |= has_effects

    def _source(self, call: CallTrace, tensor: Tensor) -> Source:
        serial = self._serial(tensor, "met")
        kind, place = call.own.get(serial, ("known", 0))
        return Source(
            kind, place, serial, self._versions.get(serial, 0), int(tensor.storage_offset())
        )

    def _serial(self, tensor: Tensor, kind: str) -> int:
        """The number of the memory of `tensor`; `kind` is noted for memory that is new."""
        memory = tensor.untyped_storage()
        address = memory._cdata
        if address in self._serials:
            return self._serials[address]
        self._count += 1
        self._serials[address] = self._count
        for call in self._open:
            call.own[self._count] = kind, len(call.own)

        def freed(_: object) -> None:
            del self._serials[address], self._references[address]

        self._references[address] = weakref.ref(memory, freed)
        return self._count
