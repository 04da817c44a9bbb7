"""Errors say what cannot be captured, so that the user finds the line and a way out."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch._subclasses import fake_tensor
from torch.utils import checkpoint

from lightning_topt.graph.containers import PACKAGE, is_installed

WAY_OUT = 'Give an explicit plan, which needs no capture: AutoParallelStrategy(plan="ddp").'

TASKS = os.path.join(PACKAGE, "cli", "")  # modules to train
OWN = tuple(os.path.join(folder, "") for folder in (PACKAGE, os.path.dirname(torch.__file__)))
FAKE_ERRORS = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
    fake_tensor.UnsupportedFakeTensorException,
)
# What torch says where a recording looks at a tensor inside of a transform, or keeps what autograd
# saves there.
TRANSFORM_MESSAGES = ("BatchedTensorImpl", "TensorWrapper", "support saved tensor hooks")
# Conversions that never reach an operator; torch raises plain RuntimeError or TypeError for them.
FAKE_MESSAGES = ("FakeTensor", "not supported for tensor subclasses")


class CaptureError(ValueError):
    """The module's training step cannot be captured; the message says why, where, and what to do
    instead.

    `needs_values`: a real step, which is watched (`observe_step`), may succeed.
    """

    def __init__(self, message: str, *, needs_values: bool = False) -> None:
        super().__init__(message)
        self.needs_values = needs_values


def may_need_values(error: BaseException) -> bool:
    """Return whether a capture on fake tensors that raised `error` may succeed on real ones.

    True also for exceptions of the user's own that the step raised under fake tensors: they may be
    a consequence.
    """
    return bool(getattr(error, "needs_values", False))


def one_line(error: BaseException) -> str:
    """Return the message of `error` as a clause in one line; without a message, its class."""
    return " ".join(str(error).split()) or type(error).__name__


def explain(error: Exception, failed: object) -> CaptureError | None:
    """Return the CaptureError for an exception raised under fake tensors, None when it is the
    user's own.

    Args:
        error: what `training_step` or the backward pass raised.
        failed: the operator that was running, or None.
    """
    for cause in _chain(error):
        if isinstance(cause, FAKE_ERRORS) or (
            isinstance(cause, NotImplementedError) and failed is not None
        ):
            operator = getattr(cause, "func", failed)
            if isinstance(cause, fake_tensor.DataDependentOutputException):
                reason = "its result is a Python value, and the capture knows shapes only"
            elif isinstance(cause, fake_tensor.DynamicOutputShapeException):
                reason = (
                    "the shape of its result depends on values, and the capture knows shapes only"
                )
            else:
                reason = "it has no shape-only (fake tensor) implementation"
            return CaptureError(
                f"operator {operator} cannot be captured: {reason}.\n{user_line(cause)}{WAY_OUT}",
                needs_values=True,
            )
        if isinstance(cause, (RuntimeError, TypeError)) and any(
            text in str(cause) for text in FAKE_MESSAGES
        ):
            return CaptureError(
                f"the training step reads the values of a tensor ({str(cause).splitlines()[0]}), "
                "and the capture knows "
                f"shapes only.\n{user_line(cause)}{WAY_OUT}",
                needs_values=True,
            )
    return None


def explain_transform(error: Exception) -> CaptureError | None:
    """Return the CaptureError for a transform of ``torch.func`` that cannot be recorded, None for
    any other exception.
    """
    for cause in _chain(error):
        if isinstance(cause, RuntimeError) and any(
            text in str(cause) for text in TRANSFORM_MESSAGES
        ):
            return CaptureError(
                "the training step uses a transform of torch.func (vmap, grad, ...), inside of "
                "which nothing is recorded "
                f"({str(cause).splitlines()[0]}).\n{user_line(cause)}{WAY_OUT}"
            )
    return None


def annotate(error: Exception) -> None:
    """Say on the user's own exception that the capture was running (Python 3.11 has the means)."""
    with suppress(AttributeError):  # an exception with slots
        error.needs_values = True  # type: ignore[attr-defined]
    if hasattr(error, "add_note"):
        error.add_note(
            "raised while lightning_topt ran training_step on fake tensors to capture it. "
            f"{WAY_OUT}"
        )


def user_line(error: BaseException) -> str:
    """Return ``" file:line, in function: source"`` of the innermost frame outside libraries, with a
    line end; or ``""``.
    """
    return _innermost(traceback.extract_tb(error.__traceback__))


def line_of_caller() -> str:
    """Return the innermost line outside libraries that is running, as `user_line` does."""
    return _innermost(traceback.extract_stack())


def check_no_reentrant_checkpoint(unit: str) -> None:
    """Raise CaptureError where the caller runs inside of a reentrant ``torch.utils.checkpoint``,
    which hides the graph.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is checkpoint.CheckpointFunction.forward.__code__:
            raise CaptureError(
                f"torch.utils.checkpoint(use_reentrant=True) holds block {unit!r}, and hides from "
                "a pipeline which gradients it needs; pass use_reentrant=False, or let the plan "
                "recompute"
            )


def _innermost(found: traceback.StackSummary) -> str:
    frames = [
        (frame, file)
        for frame in found
        if (file := os.path.abspath(frame.filename)).startswith(TASKS) or not file.startswith(OWN)
    ]
    own = [frame for frame, file in frames if file.startswith(TASKS) or not is_installed(file)]
    own = own or [frame for frame, _ in frames]
    if not own:
        return ""
    frame = own[-1]
    source = frame.line or linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"  {frame.filename}:{frame.lineno}, in {frame.name}: {source}\n"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
