"""`StepFlow`: a training step as a chain of calls of modules, and which tensors each of them needs
of the calls before it.

A *unit* is a module whose calls are run whole; between calls of units there are functional
operators only. A call *needs* a tensor that an earlier call returned where that tensor, or what
functional operators make of it, is among its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec


class TensorRef(NamedTuple):
    """A tensor that a call of a unit returns: `call` is its index among the flow's calls, `leaf`
    the tensor's place among the leaves of what it returned.
    """

    call: int
    leaf: int


@dataclass(frozen=True)
class LeafSpec:
    """All about a tensor that a stand-in returns but its elements. It is dense: no two elements
    share memory.

    `same_as` is an earlier leaf of the same call that is this very tensor. `is_rewritten`: its
    memory is written to after the call has returned it, so that what is sent must be a copy.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    same_as: int | None = None
    is_rewritten: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Draw:
    """Random numbers that an operator draws: `op` is called again with `arguments`, in which
    `LeafSpec` stand for tensors.

    `problem` says why they cannot be drawn again without the tensors themselves; empty where they
    can.
    """

    op: Any
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    problem: str = ""


@dataclass(frozen=True)
class Bond:
    """A reason why calls `first` and `second` must run on one stage; `second` may be the number of
    calls, the end.
    """

    first: int
    second: int
    reason: str


@dataclass(frozen=True)
class UnitCall:
    """The `index`-th call of the module at path `module` in a step.

    `structure` and `leaves` are what it returned: leaves that are tensors as `LeafSpec`, all others
    as they are. `needs` are tensors of earlier calls. `reads` are the parameters that functional
    operators on the way to its arguments read. `draws` are the random numbers drawn inside of it,
    and `draws_before` those of functional operators between the last call and it. `writes` are the
    buffers that it changes.
    """

    module: str
    index: int
    structure: TreeSpec
    leaves: tuple[Any, ...]
    needs: frozenset[TensorRef]
    reads: frozenset[str] = frozenset()
    draws: tuple[Draw, ...] = ()
    draws_before: tuple[Draw, ...] = ()
    writes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StepFlow:
    """The calls of a step in order, and what its end needs: the loss, what the step returns and
    what it logs.

    `end_reads` and `end_draws` are parameters read and random numbers drawn by functional operators
    after the last call, `end_writes` buffers that functional operators change: the last stage has
    them right. `carried` are the buffers that the step changes and computes with, so that it
    depends on steps before. `bonds` say which calls cannot be on two stages. `metrics` are modules
    of torchmetrics, which the last stage alone runs. `reads_values`: Python code reads values of
    the batch, so that the flow holds for this batch alone. `draws_on_host`: so does it draw from
    Python's or NumPy's generators.
    """

    calls: tuple[UnitCall, ...]
    end_needs: frozenset[TensorRef]
    end_reads: frozenset[str] = frozenset()
    end_draws: tuple[Draw, ...] = ()
    end_writes: frozenset[str] = frozenset()
    bonds: tuple[Bond, ...] = ()
    carried: frozenset[str] = frozenset()
    metrics: tuple[str, ...] = ()
    reads_values: bool = False
    draws_on_host: bool = False

    def spec(self, ref: TensorRef) -> LeafSpec:
        """Return all about the tensor `ref` but its elements."""
        leaf = self.calls[ref.call].leaves[ref.leaf]
        assert isinstance(leaf, LeafSpec), ref
        return leaf

    def draws_from(self, call: int) -> tuple[Draw, ...]:
        """Return the random numbers drawn from inside of call number `call` to the end; none where
        there is no such call.
        """
        if call >= len(self.calls):
            return ()
        found = list(self.calls[call].draws)
        for later in self.calls[call + 1 :]:
            found += [*later.draws_before, *later.draws]
        return (*found, *self.end_draws)

    def crossings(self, stage_of_call: Sequence[int]) -> dict[TensorRef, tuple[int, ...]]:
        """Return the tensors that one stage makes and later ones need, with these stages in order.

        `stage_of_call` has the stage of each call, not decreasing; the end belongs to the last
        stage.
        """
        last = max(stage_of_call, default=0)
        readers: dict[TensorRef, set[int]] = {}
        for stage, needs in [
            *zip(stage_of_call, (call.needs for call in self.calls), strict=True),
            (last, self.end_needs),
        ]:
            for ref in needs:
                if stage_of_call[ref.call] < stage:
                    readers.setdefault(ref, set()).add(stage)
        return {ref: tuple(sorted(stages)) for ref, stages in sorted(readers.items())}
