"""The tensors of a training step, when each is alive, and the calls of modules they pass through:
frozen values.

A *position* counts the kernels of the step, forward and then backward: position p is the moment at
which the p-th of them runs. An interval ``first <= p < end`` includes its first position and not
its end.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from lightning_topt.graph.quantities import Amount, TensorSpec


@dataclass(frozen=True)
class StepTensor:
    """A tensor and its views, alive at the positions ``first <= p < end``.

    producer      operator that made it, or wrote to it last
    spec          shape and dtype as it was made; the dimension that follows the batch
    bytes         of its memory, which may be more than its elements take
    end           one more than the number of positions where the step leaves it behind
    saved_by      operator whose backward asked for it first; None where backward does not need it
    gradient_of   parameter whose gradient it is or was added to; None for all else
    """

    producer: str
    spec: TensorSpec
    bytes: Amount
    first: int
    end: int
    saved_by: str | None = None
    gradient_of: str | None = None


@dataclass(frozen=True)
class ModuleCall:
    """One forward call of `module` at the positions ``first <= p < end``.

    `inputs` and `outputs` index the step's tensors; parameters, buffers and the batch are not among
    them. `writes_outside`: it changed a tensor that is older than the call.
    """

    module: str
    first: int
    end: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    needs_grad: bool
    writes_outside: bool = False


@dataclass(frozen=True)
class Module:
    """A submodule by its path; a parent comes before its children.

    Modules of equal `structure` have the same tree of classes, parameter shapes and dtypes.
    `repeatable`: a second call with the arguments of the first did the same and left nothing
    behind; False where this was not tried.
    """

    path: str
    structure: int
    repeatable: bool = False


@dataclass(frozen=True)
class Step:
    """A `Step` says what happened when: `order` is the index of the operator (in ``graph.ops``)
    whose kernel runs at each position.

    The backward pass starts at position `backward_start`. `workspaces` are bytes that kernels take
    inside, at their positions. `batch_sizes` are the two at which the step ran, equal where it ran
    at one only: amounts are exact there.
    """

    batch_sizes: tuple[int, int]
    order: tuple[int, ...] = ()
    backward_start: int = 0
    tensors: tuple[StepTensor, ...] = ()
    calls: tuple[ModuleCall, ...] = ()
    modules: tuple[Module, ...] = ()
    workspaces: tuple[tuple[int, Amount], ...] = ()

    def is_kept(self, tensor: StepTensor) -> bool:
        """Return whether `tensor` was made in the forward pass and is alive when the backward pass
        starts.
        """
        return tensor.first < self.backward_start < tensor.end and tensor.gradient_of is None

    def check(self, operators: Container[str], *, count: int) -> None:
        """Raise ValueError where positions or names contradict; `operators` are the names of the
        graph's `count` ones.
        """
        end = len(self.order) + 1
        if any(not 0 <= index < count for index in self.order):
            raise ValueError("the step runs a kernel of an operator that does not exist")
        for tensor in self.tensors:
            if (
                tensor.producer not in operators
                or (tensor.saved_by or tensor.producer) not in operators
            ):
                raise ValueError(f"{tensor} names an operator that does not exist")
            if not 0 <= tensor.first <= tensor.end <= end:
                raise ValueError(f"{tensor} is alive outside of the step's {end - 1} positions")
        for call in self.calls:
            if not 0 <= call.first <= call.end <= self.backward_start:
                raise ValueError(f"{call} is outside of the forward pass")
            if any(not 0 <= index < len(self.tensors) for index in (*call.inputs, *call.outputs)):
                raise ValueError(f"{call} names a tensor that does not exist")
