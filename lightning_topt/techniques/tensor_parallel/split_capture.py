"""`capture_split` captures the step of one rank of tensor axes; collectives are kernels too.

Kernels and tensors are local. A subject of its own, beside the run of the same code:

    trace = FunctionTrace()
    graph = capture(module, batch, adapt=trace.of)
    axes = TensorAxes.of_mesh(mesh, rank=0)
    local = capture_split(module, batch, like=graph, trace=trace, placements=..., axes=axes)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from lightning_topt.graph.capture import capture
from lightning_topt.graph.errors import StepError
from lightning_topt.graph.module_copy import contiguous_stride, empty_fake
from lightning_topt.graph.op_config import Placements, Shard
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.graph.recording import TIMES, changed, number_at
from lightning_topt.graph.repetition import Stack
from lightning_topt.graph.structures import tensors_in
from lightning_topt.techniques.tensor_parallel.block_rules import BlockRule, rules_by_block
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.layout import (
    Layout,
    TensorAxes,
    with_layout,
)
from lightning_topt.techniques.tensor_parallel.split_mode import PLAIN, SplitMode
from lightning_topt.techniques.tensor_parallel.split_parameters import check_split

_ADVICE = (
    "some code works on tensors beside torch's functions; keep the parameters of this module and "
    "of those around it whole"
)
Results = list[tuple[str, tuple[tuple[int, ...], ...]]]


def capture_split(
    module: nn.Module,
    batch: object,
    *,
    like: OpGraph,
    trace: FunctionTrace,
    placements: Mapping[str, Placements],
    axes: TensorAxes,
    rules: Mapping[str, BlockRule] = MappingProxyType({}),
    second_batch: Any | None = None,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    device: torch.device | str = "cpu",
    one_recording: bool = False,
    stacks: Sequence[Stack] = (),
) -> OpGraph:
    """Return the graph of the step that one rank of `axes` (without groups) runs.

    Blocks, names and the fingerprint are as in `like`; parameters have local shapes. Collectives
    along the axes are kernels where they run, which `TrainingStep` prices (`shown_collective`).

    Args:
        module: the model
        batch: of the step
        like: the graph of the unsharded step, captured from the same arguments under `trace`
        trace: its calls
        placements: of parameters by name
        axes: the tensor axes
        rules: of blocks
        second_batch: as in `capture`
        forward_context: as in `capture`
        device: as in `capture`
        one_recording: `like` is one that `one_is_enough`
        stacks: as in `capture`; those whose layers are split differently are captured in full

    Raises:
        ValueError: a parameter cannot be cut so; the split step makes something else than the
            unsharded one, since user code lost sight of a tensor (the message names the module);
            or as in `capture`
    """
    # rules of the blocks, as in the run
    groups = Counter(block.group for block in like.blocks)
    repeated = {block.name for block in like.blocks if groups[block.group] > 1}
    by_block = rules_by_block(rules, [block.name for block in like.blocks], repeated)
    run = _SplitRun(placements, axes, rules.get("", PLAIN), by_block)
    options = {
        "second_batch": second_batch,
        "batch_scaling": like.batch_scaling,
        "forward_context": forward_context,
    }
    alike = [
        stack
        for stack in stacks
        if stack.is_alike(placements.items())
        and stack.is_alike((path, repr(replace(rule, block=""))) for path, rule in by_block.items())
    ]
    options |= {"one_recording": one_recording, "stacks": alike}
    try:
        graph = capture(
            module,
            batch,
            **options,  # type: ignore[arg-type]
            device=device,
            adapt=run.of,
            like=like,
        )
    except StepError as error:  # of user code, which ran unsharded, or of a rule for splits
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from None
        raise ValueError(
            f"module {run.under_way[-1] if run.under_way else ''!r} does not run with its "
            f"parameters split: {error.__cause__}; {_ADVICE}"
        ) from error.__cause__
    # The user must see the same shapes as without a split; where one recording stands for two,
    # those of the second one's samples.
    _check_results(
        [
            (path, tuple(tuple(number_at(TIMES[1], size) for size in shape) for shape in shapes))
            for path, shapes in run.results
        ],
        trace.results(),
    )
    return changed(graph, whole_model=like.fingerprint)


class _SplitRun:
    """Splits copies of a module.

    `results` has the calls of its modules in the last one, with the shapes seen by the user,
    `under_way` those that have not ended.
    """

    def __init__(
        self,
        placements: Mapping[str, Placements],
        axes: TensorAxes,
        rule: BlockRule,
        by_block: Mapping[str, BlockRule],
    ) -> None:
        self.placements, self.axes, self.rule, self.by_block = placements, axes, rule, by_block
        self.results: Results = []
        self.under_way: list[str] = []

    def of(self, module: nn.Module) -> SplitMode:
        """Split `module` and return the context around its forward."""
        self.results, self.under_way, mode = [], [], SplitMode(self.axes, rule=self.rule)
        for name, parameter in module.named_parameters():
            _split(name, parameter, self.placements.get(name, ()), self.axes)
        for path, submodule in module.named_modules():
            if path:
                submodule.register_forward_pre_hook(partial(self._begin, path))
                submodule.register_forward_hook(partial(self._end, path))
            if path in self.by_block:  # as in the run
                rule = self.by_block[path]
                submodule.forward = partial(_run_block, mode, rule, submodule.forward)
        return mode

    def _begin(self, path: str, module: nn.Module, args: Any) -> None:
        self.under_way.append(path)

    def _end(self, path: str, module: nn.Module, args: Any, output: object) -> None:
        while self.under_way and self.under_way.pop() != path:
            pass
        self.results.append((path, tuple(tuple(tensor.shape) for tensor in tensors_in(output))))


def _run_block(
    mode: SplitMode, rule: BlockRule, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return mode.run_block(rule, forward, args, kwargs)


def _split(name: str, parameter: nn.Parameter, placements: Placements, axes: TensorAxes) -> None:
    # Give a fake parameter the shape of a slice, in a tenth of `split_parameters`' time
    if not any(isinstance(placement, Shard) for placement in placements):
        return
    check_split(name, tuple(parameter.shape), placements, axes)
    layout = Layout(tuple(parameter.shape), placements)
    # the memory is fake: a new tensor of the local shape is enough
    shape, mode = layout.local_shape(axes.sizes), getattr(parameter, "fake_mode")  # noqa: B009
    stride = contiguous_stride(shape)
    with torch.no_grad():
        parameter.data = empty_fake(mode, like=(shape, stride, parameter.dtype, parameter.device))
    with_layout(parameter, layout)


def _check_results(split: Results, whole: Results) -> None:
    """Raise ValueError for the first call of a module whose results differ in shape.

    Calls count that both runs made.
    """
    expected: dict[str, list[Any]] = {}
    for path, shapes in whole:
        expected.setdefault(path, []).append(shapes)
    for path, shapes in split:
        if expected.get(path) and shapes != (known := expected[path].pop(0)):
            raise ValueError(
                f"module {path!r} returns tensors of the shapes {list(shapes)} where its "
                f"parameters are split, and {list(known)} where they are whole; {_ADVICE}"
            )
