"""LightningModule + example batch -> OpGraph: `training_step`, forward and backward, on tensors
without memory.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_topt.graph.assemble import assemble
from lightning_topt.graph.blocks import choose_blocks, may_repeat
from lightning_topt.graph.errors import WAY_OUT, CaptureError, may_need_values
from lightning_topt.graph.no_trace import no_collection, no_trace
from lightning_topt.graph.one_recording import PRIME, recording_at
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.graph.recording import Recording
from lightning_topt.graph.sample_counts import batch_sizes, common_size
from lightning_topt.graph.second_calls import find_repeatable
from lightning_topt.graph.step_run import Adapt, StepRun

__all__ = ["CaptureError", "capture", "may_need_values"]


def capture(
    module: nn.Module,
    batch: Any,
    *,
    second_batch: Any | None = None,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    device: torch.device | str = "cpu",
    batch_scaling: bool = True,
    adapt: Adapt | None = None,
    like: OpGraph | None = None,
    one_recording: bool = False,
) -> OpGraph:
    """Return the operator graph of one training step of `module`, a LightningModule with automatic
    optimization.

    ``module.training_step(batch, 0)`` and the backward pass of its loss run on fake tensors (shapes
    without memory) at two batch sizes; what differs between the two runs scales with the batch.
    `module`, its trainer and the random number generators are left as they were; `batch` is only
    looked at. Any Python control flow is followed as this one step takes it.

    Args:
        batch: what `training_step` takes; tensors anywhere inside. One sample is captured as two.
        second_batch: a batch of another size; None doubles dimension 0 of every tensor of `batch`.
        forward_context: makes a context around `training_step`, such as autocast.
        device: the type of device that will train. It decides which kernels run and what autocast
            casts; a type other than ``"cpu"`` needs such a device in this machine, but none of its
            memory.
        batch_scaling: whether to learn how amounts grow with the batch. False captures one step of
            `batch` as it is, of any structure, and the graph holds for batches of its size only.
        adapt: is called with every copy of `module` that runs, on fake tensors, may change it, and
            returns a context around its forward, inside of `forward_context`.
        like: the graph of the same module without `adapt`: its blocks are taken, and what it says
            of second calls.
        one_recording: of fake tensors, at a large batch size, instead of two where that tells as
            much; for `like` that `is_told_by_one`.

    Raises:
        CaptureError: the step depends on values of tensors or uses an operator without a shape-only
            implementation (`needs_values` is then true, and `observe_step` may help); it runs other
            operators on a larger batch, returns no loss, has no trainable parameter or lazy ones,
            or the module optimizes manually. The message names the operator, the line and a way
            out.
        ValueError: this machine has no such `device`, or the options contradict one another.
        Exception: whatever `training_step` itself raises; see `may_need_values`.
    """
    _check(module)
    _check_device(torch.device(device))
    if second_batch is not None and not batch_scaling:
        raise ValueError("batch_scaling=False captures one batch; leave out second_batch")
    step = StepRun(module, forward_context, torch.device(device), adapt)
    with no_trace(module), torch.compiler.set_stance("force_eager"), no_collection():
        if not batch_scaling:
            copied, recording, input_bytes = step.record(batch, unlike=set())
            size = common_size(batch)
            graph = assemble(
                copied,
                (recording, recording),
                name=type(module).__name__,
                sizes=(size, size),
                input_bytes=(input_bytes, input_bytes),
            )
            return _finish(graph, step, batch, recording=recording, like=like)
        if like is not None and one_recording:
            found = _from_one_recording(step, batch, like)
            if found is not None:
                return found
        return _capture_two_sizes(step, batch, second_batch, like)


def is_told_by_one(
    module: nn.Module,
    batch: Any,
    like: OpGraph,
    *,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    device: torch.device | str = "cpu",
) -> bool:
    """Return whether one recording of a step tells all that `like` says, which `capture` made of
    two, given the same.
    """
    if not like.batch_scaling:
        return False
    with no_trace(module), torch.compiler.set_stance("force_eager"), no_collection():
        return (
            _from_one_recording(StepRun(module, forward_context, torch.device(device)), batch, like)
            == like
        )


def _capture_two_sizes(
    step: StepRun, batch: Any, second_batch: Any | None, like: OpGraph | None
) -> OpGraph:
    sizes = batch_sizes(batch, second_batch)
    # Each run: a batch, its samples, and how many to make of them.
    small, large = (
        (batch, sizes[0]),
        (batch, sizes[0]) if second_batch is None else (second_batch, sizes[1]),
    )
    if sizes[0] == 1:
        # A dimension of size one is special to operators (views instead of copies): capture larger
        # batches.
        small, sizes = large, (2, 4)
    unlike: set[Hashable] = set()
    copied, first, first_bytes = step.record(small[0], samples=(small[1], sizes[0]), unlike=unlike)
    _, second, second_bytes = step.record(large[0], samples=(large[1], sizes[1]), unlike=unlike)
    graph = assemble(
        copied,
        (first, second),
        name=type(step.module).__name__,
        sizes=sizes,
        input_bytes=(first_bytes, second_bytes),
    )
    return _finish(graph, step, small[0], recording=first, samples=(small[1], sizes[0]), like=like)


def _from_one_recording(step: StepRun, batch: Any, like: OpGraph) -> OpGraph | None:
    """The graph at the sizes of `like`; None where one recording does not tell."""
    sizes = like.step.batch_sizes
    try:
        many = batch_sizes(batch, None)[0], PRIME * sizes[0]
        copied, recording, _ = step.record(batch, samples=many, unlike=set(), resizes=True)
        recordings = recording_at(recording, 0), recording_at(recording, 1)
    except Exception:
        # torch refuses some large sizes, and errors of the step itself are told of a batch that
        # users know
        return None
    small, large = (int(like.input_bytes.at(size)) for size in sizes)
    graph = assemble(
        copied, recordings, name=type(step.module).__name__, sizes=sizes, input_bytes=(small, large)
    )
    return _as_in(like, graph)


def _finish(
    graph: OpGraph,
    step: StepRun,
    batch: Any,
    *,
    recording: Recording,
    samples: tuple[int, int] = (1, 1),
    like: OpGraph | None = None,
) -> OpGraph:
    """The graph with what second calls of its modules did, cut into the blocks that are chosen
    where nobody says otherwise.
    """
    if like is not None:
        return _as_in(like, graph)
    calls = Counter(call.module for call in graph.step.calls)
    candidates = [
        call.module for call in graph.step.calls if calls[call.module] == 1 and may_repeat(call)
    ]
    repetitions = recording.repetitions
    found = find_repeatable(
        step, batch, candidates=candidates, samples=samples, repetitions=repetitions
    )
    graph = _marked(graph, found)
    return graph.with_blocks(choose_blocks(graph))


def _as_in(like: OpGraph, graph: OpGraph) -> OpGraph:
    return _marked(graph, {m.path for m in like.step.modules if m.repeatable}).with_blocks(
        like.blocks
    )


def _marked(graph: OpGraph, repeatable: Collection[str]) -> OpGraph:
    modules = tuple(
        dataclasses.replace(m, repeatable=m.path in repeatable) for m in graph.step.modules
    )
    return dataclasses.replace(graph, step=dataclasses.replace(graph.step, modules=modules))


def _check(module: nn.Module) -> None:
    if not getattr(module, "automatic_optimization", True):
        raise CaptureError(
            f"{type(module).__name__} optimizes manually (automatic_optimization=False): its "
            "training_step decides when backward passes and optimizer steps run, and a plan "
            f"cannot. {WAY_OUT}"
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise CaptureError(
            f"{type(module).__name__} has no trainable parameters, so there is nothing to plan"
        )


def _check_device(device: torch.device) -> None:
    # Without the device autograd does not raise, it ends the process.
    if device.type != "cpu" and not torch.get_device_module(device).is_available():
        raise ValueError(
            f"a capture for {device.type!r} needs such a device in this machine; capture for 'cpu' "
            "here"
        )
