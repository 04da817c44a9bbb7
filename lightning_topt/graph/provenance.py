"""`Provenance`: from which calls of units the tensors of a step come, through functional operators
only.

[Note: origins] Every tensor object has an `Origin`; views share that of their base. All tensors on
one memory belong to one `Memory`. A call that returns a tensor which is older than itself (its
argument, or a view of it) begins another origin on the same memory: on a stage that does not run
the call the two are different tensors. Where one of them is then written to, the others are out of
date there, so what reads them is bound to the stage of that call. The same holds for memory that is
made inside a call and read outside without being returned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_topt.graph.step_flow import TensorRef


@dataclass(eq=False)
class Origin:
    """An `Origin` says of what a tensor is made.

    `refs` are outputs of calls and `reads` parameters that functional operators made it of;
    `parameter` is its name if it is one. `bonds` are calls on whose stage its readers must be, with
    the reason. `varies`: it depends on more than constants.
    """

    refs: set[TensorRef] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)
    parameter: str | None = None
    made_in: int = -1  # the call inside of which it was made, -1 for none
    alias_call: int = -1  # the call that began it, -1 for none
    leaf: TensorRef | None = None
    bonds: dict[int, str] = field(default_factory=dict)
    varies: bool = False
    is_batch: bool = False  # of nothing else


@dataclass(eq=False)
class Memory:
    """The storage of tensors: inside which call it was made (-1 outside of all), its origins."""

    made_in: int = -1
    buffer: str | None = None
    origins: list[Origin] = field(default_factory=list)


class Provenance:
    """Knows the origin of every tensor that it was shown; it keeps them alive, so that none is
    mistaken for another.
    """

    def __init__(self) -> None:
        self._origins: dict[int, Origin] = {}
        self._memories: dict[int, Memory] = {}
        self._held: list[Any] = []

    def memory(self, tensor: Tensor) -> Memory:
        """Return the memory of `tensor`."""
        storage = tensor.untyped_storage()
        if (found := self._memories.get(storage._cdata)) is None:
            found = self._memories[storage._cdata] = Memory()
            self._held.append(storage)
        return found

    def knows(self, tensor: Tensor) -> bool:
        """Return whether the memory of `tensor` has been seen."""
        return tensor.untyped_storage()._cdata in self._memories

    def origin(self, tensor: Tensor) -> Origin:
        """Return the origin of `tensor`; that of the last tensor on its memory for one that came
        without an operator.
        """
        if (found := self._origins.get(id(tensor))) is None:
            origins = self.memory(tensor).origins
            found = self.begin(tensor, origins[-1] if origins else Origin())
        return found

    def begin(self, tensor: Tensor, origin: Origin) -> Origin:
        """Let `tensor` have `origin` from now on."""
        self._origins[id(tensor)] = origin
        self._held.append(tensor)
        memory = self.memory(tensor)
        if all(origin is not other for other in memory.origins):
            memory.origins.append(origin)
        return origin

    def made(
        self, outputs: Iterable[Tensor], inputs: list[Tensor], *, inside: int, varies: bool
    ) -> None:
        """Note that an operator inside call `inside` (-1: a functional one) made `outputs` of
        `inputs`.
        """
        joined: Origin | None = None
        by_storage = {tensor.untyped_storage()._cdata: tensor for tensor in reversed(inputs)}
        for tensor in outputs:
            if id(tensor) in self._origins:
                continue
            base = by_storage.get(tensor.untyped_storage()._cdata)
            if base is not None:
                self.begin(tensor, self.origin(base))
                continue
            if joined is None:
                joined = Origin(made_in=inside, varies=varies)
                self.join(joined, inputs, inside=inside)
            self.memory(tensor).made_in = inside
            self.begin(tensor, joined)

    def join(self, origin: Origin, inputs: Iterable[Tensor], *, inside: int) -> None:
        """Add what `inputs` are made of to `origin`."""
        only_batch = origin.is_batch or not origin.varies
        for tensor in inputs:
            other = self.origin(tensor)
            memory = self.memory(tensor)
            origin.varies |= other.varies or other.parameter is not None
            only_batch &= other.is_batch or not other.varies
            if inside >= 0 and memory.made_in == inside:
                continue
            origin.refs |= other.refs
            origin.reads |= other.reads
            if other.parameter is not None:
                origin.reads.add(other.parameter)
            origin.bonds.update(other.bonds)
            if hidden := self.hidden_in(tensor):
                origin.bonds.setdefault(*hidden)
        origin.is_batch = only_batch and origin.varies

    def hidden_in(self, tensor: Tensor) -> tuple[int, str] | None:
        """Return the call that made `tensor` and did not return it, with the reason for a bond;
        None for other tensors.
        """
        origin = self.origin(tensor)
        if origin.made_in < 0 or not origin.varies:
            return None
        return (
            origin.made_in,
            "hands on a tensor without returning it (by attribute, hook or torch.autograd.grad), "
            "which is read",
        )

    def written(self, tensor: Tensor, sources: list[Tensor], *, inside: int) -> list[TensorRef]:
        """Note a write to `tensor`; return the outputs of calls that have its memory.

        Inside of a call all that is older becomes out of date, the call's own results begin anew
        (see `begin`).
        """
        memory, origin = self.memory(tensor), self.origin(tensor)
        if inside >= 0 and memory.made_in == inside:
            self.join(origin, sources, inside=inside)
            return []
        if inside < 0:
            self.join(origin, sources, inside=inside)
        for other in memory.origins:
            if inside >= 0:
                other.bonds.setdefault(
                    inside, "writes in place to a tensor that it was given, and the old one is read"
                )
            elif other is not origin and (call := max(origin.alias_call, other.alias_call)) >= 0:
                other.bonds.setdefault(
                    call, "returns its own argument, which is then written to and read"
                )
        return [other.leaf for other in memory.origins if other.leaf is not None]
