"""A training step as a chain of calls of modules, and which tensors each needs of earlier ones.

A *unit* is a module whose calls run on one pipeline stage; between calls of units there are
functional operators only. A call *needs* a tensor that an earlier call returned where that tensor,
or what functional operators make of it, is among its arguments. `flow_trace` finds the flow of a
step:

    flow.calls[0]   embed      -> leaf 0
    flow.calls[1]   blocks.0   needs (0, 0) -> leaf 0
    flow.calls[2]   blocks.1   needs (1, 0) -> leaf 0
    end                        needs (2, 0): the loss, what is returned and logged

`assign_calls` cuts it into stages. A stage that does not run a call draws its random numbers all
the same (`draw_again`), so that generators agree.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import TreeSpec

from lightning_topt.graph.errors import CaptureError

# 16-bit casts of a block's parameters that microbatches in flight share (`StagePass`). It takes
# about 0.2 ms of Python per block and microbatch (AMD EPYC), which is little beside kernels of
# blocks with 8 M parameters.
LEAST_SHARED_BYTES = 16 << 20


@dataclass(frozen=True)
class StepFlow:
    """The calls of a step in order, and what its end needs.

    Args:
        calls: of units.
        end_needs: tensors for the loss, what the step returns and what it logs.
        end_reads: parameters that functional operators read after the last call.
        end_draws: random numbers that they draw.
        end_writes: buffers that they change; the last stage has them right.
        same_stage: pairs of calls that cannot be on two stages.
        carried: buffers that the step changes and computes with; it depends on earlier steps.
        metrics: modules of torchmetrics, which the last stage alone runs.
        reads_values: Python code reads values of the batch, so the flow holds for this batch alone.
        draws_on_host: the step draws from Python's or NumPy's generators.
    """

    calls: tuple[UnitCall, ...]
    end_needs: frozenset[TensorRef]
    end_reads: frozenset[str] = frozenset()
    end_draws: tuple[Draw, ...] = ()
    end_writes: frozenset[str] = frozenset()
    same_stage: tuple[SameStageConstraint, ...] = ()
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
        """Return the random numbers drawn from inside of call number `call` to the end.

        There are none where there is no such call.
        """
        if call >= len(self.calls):
            return ()
        # inside of it, then between and inside of all later ones
        found = list(self.calls[call].draws)
        for later in self.calls[call + 1 :]:
            found += [*later.draws_before, *later.draws]
        return (*found, *self.end_draws)

    def crossings(self, stage_of_call: Sequence[int]) -> dict[TensorRef, tuple[int, ...]]:
        """Return the tensors that one stage makes and later ones need, with these stages in order.

        Args:
            stage_of_call: the stage of each call, not decreasing; the last one has the end.
        """
        last = max(stage_of_call, default=0)
        # stages that need a tensor and come after the one that makes it
        readers: dict[TensorRef, set[int]] = {}
        for stage, needs in [
            *zip(stage_of_call, (call.needs for call in self.calls), strict=True),
            (last, self.end_needs),
        ]:
            for ref in needs:
                if stage_of_call[ref.call] < stage:
                    readers.setdefault(ref, set()).add(stage)
        return {ref: tuple(sorted(stages)) for ref, stages in sorted(readers.items())}


@dataclass(frozen=True)
class UnitCall:
    """The `index`-th call of the module at path `module` in a step.

    Args:
        module: path of the unit.
        index: among the calls of the flow.
        structure: of what it returned.
        leaves: of what it returned; tensors as `LeafSpec`, all others as they are.
        needs: tensors of earlier calls.
        reads: parameters that functional operators on the way to its arguments read.
        draws: random numbers drawn inside of it.
        draws_before: those of functional operators between the last call and it.
        writes: buffers that it changes.
    """

    module: str
    index: int
    structure: TreeSpec
    leaves: tuple[object, ...]
    needs: frozenset[TensorRef]
    reads: frozenset[str] = frozenset()
    draws: tuple[Draw, ...] = ()
    draws_before: tuple[Draw, ...] = ()
    writes: frozenset[str] = frozenset()


class TensorRef(NamedTuple):
    """A tensor that a call of a unit returns.

    `call` is its index among the flow's calls, `leaf` the tensor's place among the leaves of what
    it returned.
    """

    call: int
    leaf: int


@dataclass(frozen=True)
class LeafSpec:
    """All about a tensor but its elements. It is dense: no two elements share memory.

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
    """Random numbers that an operator draws.

    `op` is called again with `arguments`, in which `LeafSpec` stand for tensors. `problem` says why
    they cannot be drawn again without the tensors themselves; empty where they can.
    """

    op: Any
    arguments: tuple[object, ...]
    keywords: tuple[tuple[str, object], ...]
    problem: str = ""


@dataclass(frozen=True)
class SameStageConstraint:
    """A reason why calls `first` and `second` must run on one stage.

    `second` may be the number of calls, which is the end of the step.
    """

    first: int
    second: int
    reason: str


# ---- stages --------------------------------------------------------------------------------------


def assign_calls(flow: StepFlow, stages: Sequence[Collection[str]]) -> tuple[int, ...]:
    """Return the stage of each call.

    It is that of its block in `stages`, else that of the call before it, and 0 at the start.

    Raises:
        ValueError: a stage has no blocks, or a block is in two stages.
        CaptureError: a ValueError too; the step does not call a block, calls would go back to an
            earlier stage, or calls on two stages must be on one.
    """
    # each block in one stage, no stage without
    stage_of_block: dict[str, int] = {}
    for stage, blocks in enumerate(stages):
        if not blocks:
            raise ValueError(
                f"stage {stage} of {len(stages)} has no blocks; take fewer stages, or move the cuts"
            )
        for block in blocks:
            if block in stage_of_block:
                raise ValueError(
                    f"block {block!r} is in stages {stage_of_block[block]} and {stage}; it belongs "
                    "to one of them"
                )
            stage_of_block[block] = stage
    if missing := stage_of_block.keys() - {call.module for call in flow.calls}:
        raise CaptureError(
            f"the step does not call {', '.join(map(repr, sorted(missing)))} as modules, so no "
            "stage can begin there; name blocks that the step calls, or give a plan without a "
            "pipeline"
        )
    # stages do not decrease: what no stage names runs where the call before it ran
    assigned: list[int] = []
    for call in flow.calls:
        # a call of no named block runs where the one before it ran
        before = assigned[-1] if assigned else 0
        stage = stage_of_block.get(call.module, before)
        if stage < before:
            raise CaptureError(
                f"call {call.index} of the step, block {call.module!r} of stage {stage}, comes "
                f"after a call of stage {before} ({flow.calls[call.index - 1].module!r}); blocks "
                "have to be in stages in the order of their calls"
            )
        assigned.append(stage)
    # what one stage alone may do, two may not
    if len(stages) > 1:
        _check_same_stage(flow, assigned)
        _check_draws(flow)
    return tuple(assigned)


def _check_same_stage(flow: StepFlow, stage_of_call: Sequence[int]) -> None:
    # the end of the step is on the last stage
    last = max(stage_of_call, default=0)
    for constraint in flow.same_stage:
        is_end = constraint.second == len(flow.calls)
        second = last if is_end else stage_of_call[constraint.second]
        if stage_of_call[constraint.first] != second:
            reader = (
                "after the last block"
                if is_end
                else f"by block {flow.calls[constraint.second].module!r}"
            )
            raise CaptureError(
                f"no cut may lie between block {flow.calls[constraint.first].module!r} (stage "
                f"{stage_of_call[constraint.first]}) and what follows it up to stage {second}: it "
                f"{constraint.reason} {reader}. Put both in one stage, or give a plan without a "
                "pipeline"
            )


def _check_draws(flow: StepFlow) -> None:
    def check(draws: Sequence[Draw], place: str) -> None:
        for draw in draws:
            if draw.problem:
                raise CaptureError(
                    f"{place} draws {draw.problem}, and stages that do not run it could not draw "
                    "the same; give a plan without a pipeline"
                )

    for call in flow.calls:
        check(call.draws_before, f"the step, before block {call.module!r},")
        check(call.draws, f"block {call.module!r}")
    check(flow.end_draws, "the step, after its last block,")


SEEDED = torch.Tag.nondeterministic_seeded
# How many numbers these draw depends on values of their tensors.
BY_VALUE = {
    *("rrelu_with_noise", "poisson", "binomial", "multinomial"),
    *("_standard_gamma", "_sample_dirichlet"),
}
# values of arguments that draw the same numbers again
PLAIN = (
    *(bool, int, float, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


# ---- random numbers ------------------------------------------------------------------------------


def draw_again(draws: Sequence[Draw], device: torch.device) -> None:
    """Draw the same numbers on `device` and throw them away.

    The generator is then as after the operators themselves.
    """
    if not draws:
        return
    with torch.no_grad():
        for draw in draws:
            assert not draw.problem, draw.problem
            # shapes decide how many numbers are drawn, values do not
            keywords = {key: _tensor(value, device) for key, value in draw.keywords}
            draw.op(*(_tensor(value, device) for value in draw.arguments), **keywords)


def draw_of(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> Draw | None:
    """Return the random numbers that ``func(*args, **kwargs)`` draws; None for none."""
    if not _draws(func) or _is_off(func, args, kwargs):
        return None
    name = func._schema.name.partition("::")[2].rstrip("_")
    # what cannot be drawn again without the tensors themselves has a problem
    values = [*args, *kwargs.values()]
    if any(isinstance(value, torch.Generator) for value in values):
        return Draw(func, (), (), problem="numbers from a generator of its own")
    if name in BY_VALUE or any(
        not isinstance(value, (*PLAIN, Tensor, list, tuple)) for value in values
    ):
        return Draw(
            func,
            (),
            (),
            problem=f"numbers whose count depends on the values of its tensors ({func})",
        )
    return Draw(
        func, tuple(map(_spec, args)), tuple((key, _spec(value)) for key, value in kwargs.items())
    )


@functools.cache
def _draws(func: OpOverload) -> bool:
    return SEEDED in func.tags


@functools.cache
def _positions(func: OpOverload) -> dict[str, int]:
    return {argument.name: number for number, argument in enumerate(func._schema.arguments)}


def _is_off(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    # Whether the operator is dropout that does nothing
    # by the names in its schema: "dropout_p" of attention, "dropout" of RNNs, "train(ing)"
    where = _positions(func)

    def given(name: str, default: object) -> object:
        # by keyword, by position, or as the schema has it
        if name in kwargs or name not in where:
            return kwargs.get(name, default)
        return args[where[name]] if where[name] < len(args) else default

    # dropout that drops nothing, or outside of training
    if given("dropout_p", 1.0) == 0.0 or (
        func._schema.name.endswith("_rnn") and given("dropout", 0.0) == 0.0
    ):
        return True
    return given("training", True) is False or given("train", True) is False


def _spec(value: object) -> object:
    if isinstance(value, Tensor):
        return LeafSpec(tuple(value.shape), tuple(value.stride()), value.dtype, requires_grad=False)
    return value


def _tensor(value: object, device: torch.device) -> Any:
    if not isinstance(value, LeafSpec):
        return device if isinstance(value, torch.device) and value.type == device.type else value
    # 0.5 is a probability too
    made = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)
    return made.fill_(0.5) if value.dtype.is_floating_point else made.zero_()
