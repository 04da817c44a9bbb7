"""A training step on fake tensors -> `StepFlow`: which calls of units it makes, and what each of
them needs of earlier ones.

[Note: values] Parameters, buffers and the batch are fake at first. Where this fails the batch is
real: what is computed of the batch alone then has values, so that Python code may read them, as it
does on every rank, and the flow holds for this batch alone. Values that come from units cannot be
read before the last call, since stages without them could not follow; after it they read as zero
here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_topt.graph.errors import CaptureError, explain
from lightning_topt.graph.fake import fake_copy
from lightning_topt.graph.flow_recorder import FlowRecorder
from lightning_topt.graph.flow_units import check_units
from lightning_topt.graph.no_trace import no_trace
from lightning_topt.graph.sample_counts import fake_batch
from lightning_topt.graph.silence import runs_metrics
from lightning_topt.graph.step_flow import StepFlow
from lightning_topt.graph.structures import copied_batch, tensors_in

ADVICE = "Give a plan without a pipeline, or named blocks that contain this code."
READS_VALUES = {Tensor.__format__, Tensor.numpy, Tensor.tolist, Tensor.__array__}
LIGHTNING_LOGS = ("log", "log_dict")
METRIC_METHODS = ("update", "forward", "compute")


def trace_flow(
    module: nn.Module,
    run: Callable[[nn.Module, Any], Any],
    batch: Any,
    *,
    units: Collection[str],
    device: torch.device | str = "cpu",
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> StepFlow:
    """Return the flow of ``run(module, batch)``, which runs on a copy of `module` without memory;
    nothing is left behind.

    Args:
        run: the step: calls a method of the module that it is given, not of `module`, and returns
            what that returns.
        batch: one microbatch, on `device`; it is copied.
        units: paths of the named blocks, none of them inside of another.
        device: where the step will run.
        forward_context: makes a context around `run`, such as autocast. Whether gradients are
            computed is as at the call.

    Raises CaptureError where the step cannot be run by stages or on fake tensors, naming the line
    or the unit, and whatever the step itself raises; ValueError for units that are not there or
    inside of one another.
    """
    check_units(module, units)
    attempt = partial(
        _attempt,
        module,
        run,
        batch,
        units=units,
        device=torch.device(device),
        context=forward_context,
    )
    try:
        return attempt(has_values=False)
    except Exception:
        return attempt(has_values=True)


def _attempt(
    module: nn.Module,
    run: Callable[[nn.Module, Any], Any],
    batch: Any,
    *,
    units: Collection[str],
    device: torch.device,
    context: Callable[[], AbstractContextManager[Any]],
    has_values: bool,
) -> StepFlow:
    with no_trace(module), torch.compiler.set_stance("force_eager"):
        copied, mode = fake_copy(module, device=device)
        own_batch = copied_batch(batch)
        if not has_values:
            with mode:
                own_batch = fake_batch(batch, samples=(1, 1), device=device)
        recorder = FlowRecorder(copied, list(tensors_in(own_batch)), units=units)
        _record_logs(copied, recorder)
        # a cast kept from one unit to the next would be a tensor that it hides
        torch.set_autocast_cache_enabled(False)
        try:
            with recorder, _Readable(recorder), context():
                result = run(copied, own_batch)
            recorder.finish(result, copied)
        except CaptureError:
            raise
        except Exception as error:
            if (explained := _explained(error, recorder)) is not None:
                raise explained from error
            raise
    return recorder.flow()


class _Readable(TorchFunctionMode):
    """Lets fake tensors be printed and become lists and arrays, as which they hold zeros."""

    def __init__(self, recorder: FlowRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS_VALUES and (values := self._recorder.values(args[0])) is not None:
            args = (values, *args[1:])
        return func(*args, **(kwargs or {}))


def _explained(error: Exception, recorder: FlowRecorder) -> CaptureError | None:
    explained = explain(error, recorder.running)
    if explained is None:
        return None
    unit = recorder.unit_name
    place = f"inside of block {unit!r}" if unit else "between blocks"
    text = str(explained).rsplit("\n", 1)[0]
    return CaptureError(
        f"{text}\nThis is {place}, and stages of a pipeline know the shapes of each other's "
        f"tensors only. {ADVICE}"
    )


def _record_logs(module: nn.Module, recorder: FlowRecorder) -> None:
    """Let values that are logged, and what metrics are given, be needed at the end."""

    def log(*args: Any, **kwargs: Any) -> None:
        recorder.need_at_end((args, kwargs))

    for name in LIGHTNING_LOGS:
        if hasattr(module, name):
            vars(module)[name] = log
    for path, submodule in module.named_modules():
        if runs_metrics(submodule):
            recorder.metrics.append(path)
            for name in METRIC_METHODS:
                vars(submodule)[name] = _needing(getattr(submodule, name), recorder)


def _needing(method: Callable[..., Any], recorder: FlowRecorder) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        recorder.need_at_end((args, kwargs))
        was_inside, recorder.in_metric = recorder.in_metric, True
        try:
            return method(*args, **kwargs)
        finally:
            recorder.in_metric = was_inside

    return run
