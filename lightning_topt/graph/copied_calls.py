"""This is what a recorder notes for a call that is left out: see [Note: calls left out] in
`observed_calls`.
"""

from __future__ import annotations

from torch import Tensor

from lightning_topt.graph.observed_calls import CopiedCall, Surprise
from lightning_topt.graph.record import Recorder
from lightning_topt.graph.recording import COPIED, OpRecord


def begin_copy(recorder: Recorder, copied: CopiedCall) -> None:
    """Note that a call begins which is left out: one operator for each of its results stands for
    it.
    """
    recorder.nodes.claim(recorder.current)
    record, stack = recorder.recording, recorder.stack()
    record.edges[COPIED, len(record.copies)] = (), ""
    record.copies.append(copied)
    record.ops += [
        OpRecord(f"{copied.path}:copied_{k}", "copied", stack)
        for k in range(len(copied.model.results))
    ]
    for number in copied.claims:
        if (given := copied.inputs[number]) is not None:
            given.saved = True


def end_copy(recorder: Recorder, copied: CopiedCall, results: list[Tensor]) -> None:
    """Note what the call would have returned."""
    record = recorder.recording
    for k, (tensor, result) in enumerate(zip(results, copied.model.results, strict=True)):
        recorder.memory.track(tensor, born=copied.tick, op=copied.first_op + k)
        copied.results += recorder.memory.within(tensor)
        copied.results[k].saved = result.saved_by is not None
    recorder.current = copied.first_op + len(results) - 1
    record.kernel_ops.append(recorder.current)
    record.kernels.append(None)
    recorder.nodes.claim(recorder.current)


def backward_of_copy(
    recorder: Recorder, copied: CopiedCall, gradient: Tensor, made: Tensor | None
) -> None:
    """Note the backward pass of such a call, which was given `gradient` and `made` that of its
    input.
    """
    if not recorder.is_backward or copied.backward_tick is not None:
        raise Surprise(copied.model.key)
    record = recorder.recording
    copied.backward_tick, copied.backward_storage = len(record.kernel_ops), len(record.storages)
    copied.gradient = recorder.memory.of(gradient)
    recorder.current = copied.first_op + len(copied.results) - 1
    if made is not None:
        recorder.memory.track(made, born=copied.backward_tick, op=recorder.current)
        copied.input_gradient = recorder.memory.of(made)
    record.kernel_ops.append(recorder.current)
    record.kernels.append(None)
