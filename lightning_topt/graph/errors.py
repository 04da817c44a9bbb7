"""Why a step cannot be captured, with the user's line and a way out; and which code is the user's.

`explain` turns what torch raises under fake tensors into a `CaptureError`. The line it names is
the innermost one outside of libraries (`user_line`). `is_users` and `is_installed` tell user code
from what Python, this package or pip has put on the path.
"""

from __future__ import annotations

import functools
import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._subclasses import fake_tensor
from torch.utils import checkpoint

WAY_OUT = 'Choose plan="ddp" or plan="zero1", which need no look at the step.'
WHOLE = (  # of plans that shard parameters
    "choose plan='zero1' or 'ddp', which keep parameters whole "
    "(docs/concepts/sharding_and_your_code.md)"
)
SHARD_MESSAGES = (
    *("Sharding propagation failed", "sharding strategy", "got DTensor"),
    *("its data is not allocated yet", ".numpy() is not supported for tensor subclasses"),
    "FSDP does not support deepcopy",
)
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PATHS = ("purelib", "platlib", "stdlib")
FOLDERS = {
    *(sysconfig.get_path(name) for name in PATHS),
    PACKAGE,
    os.path.dirname(os.path.dirname(torch.__file__)),
}
LIBRARIES = tuple(os.path.join(folder, "") for folder in FOLDERS if folder)
TASKS = os.path.join(PACKAGE, "cli", "")  # has modules to train, as users write them
OWN = tuple(os.path.join(folder, "") for folder in (PACKAGE, os.path.dirname(torch.__file__)))
FAKE_ERRORS = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
    fake_tensor.UnsupportedFakeTensorException,
)
# What torch says where a recorder meets a tensor, or what autograd saves, inside of a transform.
TRANSFORM_MESSAGES = ("BatchedTensorImpl", "TensorWrapper", "support saved tensor hooks")
# Conversions that never reach an operator; torch raises plain RuntimeError or TypeError for them.
FAKE_MESSAGES = ("FakeTensor", "not supported for tensor subclasses")


class PlanError(ValueError):
    """Report an unreadable plan, one of another model or other ranks, or what a plan forbids."""


class CaptureError(ValueError):
    """The training step cannot be captured; the message says why, where, and what to do instead.

    `needs_values`: a step on real tensors (`observe_step`) may succeed.
    """

    def __init__(self, message: str, *, needs_values: bool = False) -> None:
        super().__init__(message)
        self.needs_values = needs_values


class StepError(CaptureError):
    """Code of the user raised an error, the cause, while it ran to plan a fit."""


def may_need_values(error: BaseException) -> bool:
    """Return whether a capture on fake tensors that raised `error` may succeed on real ones."""
    return bool(getattr(error, "needs_values", False))


def one_line(error: BaseException) -> str:
    """Return the message of `error` as a clause in one line; without a message, its class."""
    return " ".join(str(error).split()) or type(error).__name__


def explain(error: Exception, failed: object) -> CaptureError | None:
    """Return the CaptureError for what a step raised under fake tensors, None for the user's own.

    Args:
        error: what `training_step` or the backward pass raised.
        failed: the operator that was running, or None.
    """
    # the error or one of its causes: torch wraps some of them
    for cause in _chain(error):
        if isinstance(cause, FAKE_ERRORS) or (
            isinstance(cause, NotImplementedError) and failed is not None
        ):
            # which operator, and what it needs that a fake tensor has not
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
        # a conversion to a Python or NumPy value
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
    """Return the CaptureError for a transform of ``torch.func``, None for all other errors."""
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


def explain_shards(error: BaseException) -> None:
    """Let `error` say in one sentence what torch says of parameters in shards, if it is that."""
    if not isinstance(error, RuntimeError | AssertionError):
        return
    if mixed := re.search(r"(\S+?):? got mixed torch.Tensor and DTensor", str(error)):
        operator = mixed.group(1).strip("('\"")
        error.args = (
            f"{operator} meets a parameter in shards (DTensor) and a plain tensor: give it either "
            f"kind alone, or {WHOLE}\n{user_line(error)}",
        )
    elif "appears to not have been used in the graph" in str(error):
        error.args = (
            f"{error} Where it is a parameter in shards, the graph has the gathered one in its "
            f"place: {WHOLE}\n{user_line(error)}",
        )
    elif re.search(r"(?s)(same dtype|scalar type|be the same).*(BFloat16|Half)", str(error)):
        error.args = (
            f"{error} Where it is a parameter in shards, its matrix has 16 bits: leave autocast "
            f"on, or choose plan='zero3+float32_gathers'\n{user_line(error)}",
        )
    elif any(text in str(error) for text in SHARD_MESSAGES) or _is_assertion_of_shards(error):
        why = (str(error) or "mixed kinds of tensors").splitlines()[0]
        error.args = (
            f"parameters in shards (DTensor) cannot do this ({why}): {WHOLE}\n{user_line(error)}",
        )


def explain_compiled(error: BaseException) -> None:
    """Let `error` say in one sentence why a compiled block has no second derivative, if it is that.

    Blocks are compiled where a step that was watched asks for none; a later one may.
    """
    if isinstance(error, RuntimeError) and "not currently support double backward" in str(error):
        error.args = (
            "the gradients of a compiled block cannot be differentiated again (create_graph=True): "
            f"leave 'compile' out of `allow` and of the plan\n{user_line(error)}",
        )


def _is_assertion_of_shards(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return (
        isinstance(error, AssertionError)
        and bool(frames)
        and f"{os.sep}distributed{os.sep}tensor{os.sep}" in frames[-1].filename
    )


def raised_by_user(error: Exception) -> StepError:
    """Return the StepError for what code of the user raised that ran to plan a fit.

    Real tensors may help: under fake ones the error may be a consequence.
    """
    way_out = WAY_OUT
    if "more than 1 value per channel" in str(error):
        way_out = "Batch norm needs two samples in each microbatch: choose fewer microbatches."
    return StepError(
        "what the module does in a step was tried before the fit, to plan it, and raised "
        f"{type(error).__name__}: {one_line(error)}\n{user_line(error)}{way_out}",
        needs_values=True,
    )


@contextmanager
def with_user_lines() -> Iterator[None]:
    """Let errors that come out of code of the user name its line: copies send no tracebacks."""
    try:
        yield
    except (CaptureError, PlanError):
        raise
    except Exception as error:
        if not user_line(error):
            raise
        raise raised_by_user(error) from error


def check_no_reentrant_checkpoint(unit: str) -> None:
    """Raise CaptureError inside of a reentrant ``torch.utils.checkpoint``, which hides the graph.

    Args:
        unit: path of the block whose call was reached, for the message.
    """
    frame = sys._getframe()
    # outwards, from this frame
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is checkpoint.CheckpointFunction.forward.__code__:
            raise CaptureError(
                f"torch.utils.checkpoint(use_reentrant=True) holds block {unit!r}, and hides from "
                "a pipeline which gradients it needs; pass use_reentrant=False, or let the plan "
                "recompute"
            )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


# ---- the line that raised ------------------------------------------------------------------------


def user_line(error: BaseException) -> str:
    """Return ``" file:line, in function: source"`` of the innermost frame outside libraries.

    It ends with a newline; empty where all frames are of libraries.
    """
    return _innermost(traceback.extract_tb(error.__traceback__))


def line_of_caller() -> str:
    """Return the innermost line outside libraries that is running, as `user_line` does."""
    return _innermost(traceback.extract_stack())


def _innermost(found: traceback.StackSummary) -> str:
    # outside of torch and this package; of these rather not in other installed packages
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


# ---- whose code it is ----------------------------------------------------------------------------


def is_users(name: object) -> bool:
    """Return whether the Python module `name` is of the user, not installed.

    `name` is what ``__module__`` has; of classes in C that may be a descriptor.
    """
    return isinstance(name, str) and _is_users(name)


@functools.cache
def _is_users(name: str) -> bool:
    module = sys.modules.get(name)
    top, _, rest = name.partition(".")
    # what is inside of a package is as the package
    if module is None or top in sys.builtin_module_names or (rest and not _is_users(top)):
        return False
    if name == "__main__":
        return True
    file = getattr(module, "__file__", None)
    # without a file: the user's, unless its loader says where it is from
    if file is None:
        specification = getattr(module, "__spec__", None)
        return specification is None or not isinstance(specification.origin, str)
    return not is_installed(file)


def is_installed(file: str) -> bool:
    """Return whether `file` is of Python, of this package, or of one that was installed."""
    file = os.path.abspath(file)
    is_in_site = not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
    return is_in_site or file.startswith(LIBRARIES)
