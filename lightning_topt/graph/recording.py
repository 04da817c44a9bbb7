"""A recording is what one run of a training step left behind: operators, calls of modules,
lifetimes of memory. Plain values.

Time is counted in kernels: tick t is the moment after the t-th low-level call that computes
something.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lightning_topt.graph.kernels import Measured

T = TypeVar("T")
Shape = tuple[tuple[int, ...], str]  # sizes, dtype
OUTSIDE = -1  # older than the recording: parameters, buffers, the batch
COPIED = -2  # source of an edge that stands for those of a call left out


def changed(value: T, **changes: Any) -> T:
    """Return what `dataclasses.replace` does, in a fifth of its time: nothing is checked or made
    anew.
    """
    made = object.__new__(type(value))
    made.__dict__ = value.__dict__ | changes
    return made


@dataclass(eq=False)
class Storage:
    """Memory of one tensor and its views: live at ticks ``born <= t < died``, made or last written
    by operator `op`.
    """

    bytes: int
    born: int
    op: int
    shape: Shape
    made: int = 0  # the tick at which it came; `born` may be later
    died: float = math.inf
    saved: bool = False  # for backward, by an operator that may still be to come
    saved_by: int | None = None
    gradient_of: str | None = None  # parameter whose gradient it is, or is added to
    is_left: bool = False  # as a parameter's gradient when the step is over
    parts: tuple[Storage, ...] = ()  # the gradients that autograd added to get this one


@dataclass(eq=False)
class OpRecord:
    """An operator as it ran; `stack` are the modules around it, outermost first."""

    name: str
    kind: str
    stack: tuple[str, ...]
    parameters: dict[str, None] = field(default_factory=dict)
    outputs: list[Shape] = field(default_factory=list)
    forward: list[Measured] = field(default_factory=list)
    backward: list[Measured] = field(default_factory=list)
    saved_bytes: int = 0


@dataclass(eq=False)
class Call:
    """One forward call of the module at `path`, ticks ``enter <= t < exit``."""

    path: str
    enter: int
    exit: int
    inputs: list[Storage]
    outputs: list[Storage] = field(default_factory=list)
    needs_grad: bool = False


@dataclass(eq=False)
class Recording:
    """A whole step.

    By tick: `kernel_ops` the operator, `kernels` its kernel, None for a call left out. `writes`:
    (tick, birth) of every tensor changed in place. `with_gradient`: names of the parameters that
    the backward pass gave a gradient. `copies` are calls left out and `models` what was run instead
    (see `observed_calls`); `repetitions` are the models by the paths of the modules whose calls
    were left out. `measured_at`: kernels at other sizes, by identity (see `one_recording`).
    """

    ops: list[OpRecord] = field(default_factory=list)
    edges: dict[tuple[int, int], Shape] = field(default_factory=dict)
    storages: list[Storage] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    kernel_ops: list[int] = field(default_factory=list)
    kernels: list[Measured | None] = field(default_factory=list)
    writes: list[tuple[int, int]] = field(default_factory=list)
    backward_start: int = 0
    with_gradient: set[str] = field(default_factory=set)
    has_collectives: bool = False
    models: list[tuple[Any, Any]] = field(default_factory=list)
    copies: list[Any] = field(default_factory=list)
    repetitions: dict[str, Any] = field(default_factory=dict)
    measured_at: dict[int, tuple[Measured, ...]] = field(default_factory=dict)

    def sequence(self) -> Sequence[tuple[object, ...]]:
        """Return what two runs must have in common to be compared: every operator and the names of
        its kernels.
        """
        return [
            (
                op.name,
                tuple(kernel.name for kernel in op.forward),
                tuple(kernel.name for kernel in op.backward),
            )
            for op in self.ops
        ]
