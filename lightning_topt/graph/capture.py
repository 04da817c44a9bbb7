"""LightningModule + example batch -> OpGraph: `training_step`, forward and backward, on tensors without memory."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_topt.graph.assemble import assemble
from lightning_topt.graph.batches import batch_sizes, fake_batch
from lightning_topt.graph.errors import WAY_OUT, CaptureError, annotate, explain
from lightning_topt.graph.fake import fake_copy, tensors_in
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.graph.record import Recorder
from lightning_topt.graph.recording import Recording

__all__ = ["CaptureError", "capture"]


def capture(
    module: nn.Module,
    batch: Any,
    *,
    second_batch: Any | None = None,
    batch_scaling: bool = True,
    real: bool = False,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    device: torch.device | str = "cpu",
) -> OpGraph:
    """The operator graph of one training step of `module`, a LightningModule with automatic optimization.

    ``module.training_step(batch, 0)`` and the backward pass of its loss run on fake tensors (shapes without memory) at
    two batch sizes; what differs between the two runs scales with the batch. `module`, its trainer and the random
    number generators are left as they were; `batch` is only looked at. Any Python control flow is followed as this one
    step takes it.

    Args:
        batch: what `training_step` takes; tensors anywhere inside. One sample is captured as two.
        second_batch: a batch of another size; None doubles dimension 0 of every tensor of `batch`.
        forward_context: makes a context around `training_step`, such as autocast.
        device: the type of device that will train. It decides which kernels run and what autocast casts; a type other
            than ``"cpu"`` needs such a device in this machine, but none of its memory.

    Raises:
        CaptureError: the step depends on values of tensors, uses an operator without a shape-only implementation, runs
            other operators on a larger batch, returns no loss, has no trainable parameter, or the module optimizes
            manually. The message names the operator, the line and a way out.
        ValueError: this machine has no such `device`, or the module has lazy parameters.
        Exception: whatever `training_step` itself raises.
    """
    _check(module)
    _check_device(torch.device(device))
    if real:
        raise CaptureError("no real capture")
    if not batch_scaling:
        with _unchanged_random_state(), torch.compiler.set_stance("force_eager"):
            copied, first, size = _run(
                module, batch, samples=(1, 1), forward_context=forward_context, device=torch.device(device)
            )
            return assemble(
                copied,
                (first, first),
                name=type(module).__name__,
                sizes=(next(t for t in tensors_in(batch)).shape[0],) * 2,
                input_bytes=(size, size),
            )
    sizes = batch_sizes(batch, second_batch)
    with _unchanged_random_state(), torch.compiler.set_stance("force_eager"):
        run = partial(_run, module, forward_context=forward_context, device=torch.device(device))
        # Each run: a batch, its samples, and how many to make of them.
        small, large = (batch, sizes[0]), (batch, sizes[0]) if second_batch is None else (second_batch, sizes[1])
        if sizes[0] == 1:
            # A dimension of size one is special to operators (views instead of copies): capture larger batches.
            small, sizes = large, (2, 4)
        copied, first, first_bytes = run(small[0], samples=(small[1], sizes[0]))
        _, second, second_bytes = run(large[0], samples=(large[1], sizes[1]))
    return assemble(
        copied,
        (first, second),
        name=type(module).__name__,
        sizes=sizes,
        input_bytes=(first_bytes, second_bytes),
    )


def _check(module: nn.Module) -> None:
    if not getattr(module, "automatic_optimization", True):
        raise CaptureError(
            f"{type(module).__name__} optimizes manually (automatic_optimization=False): its training_step decides "
            f"when backward passes and optimizer steps run, and a plan cannot. {WAY_OUT}"
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise CaptureError(f"{type(module).__name__} has no trainable parameters, so there is nothing to plan")


def _check_device(device: torch.device) -> None:
    # Without the device autograd does not raise, it ends the process.
    if device.type != "cpu" and not torch.get_device_module(device).is_available():
        raise ValueError(f"a capture for {device.type!r} needs such a device in this machine; capture for 'cpu' here")


def _run(
    module: nn.Module,
    batch: Any,
    *,
    samples: tuple[int, int],
    forward_context: Callable[[], AbstractContextManager[Any]],
    device: torch.device,
) -> tuple[nn.Module, Recording, int]:
    """The fake copy, what it did with `batch` resized (see `fake_batch`), and the bytes of this batch."""
    copied, mode = fake_copy(module, device=device)
    with mode, torch.enable_grad():
        inputs = fake_batch(batch, samples=samples, device=device)
        leaves = list(tensors_in(inputs))
        recorder = Recorder(copied, leaves)
        try:
            with recorder.forward(), forward_context():
                output = _training_step(copied, inputs)
            loss = _loss(output)
            with recorder.backward(loss):
                loss.backward()  # type: ignore[no-untyped-call]
        except CaptureError:
            raise
        except Exception as error:
            explained = explain(error, recorder.failed)
            if explained is not None:
                raise explained from error
            annotate(error)
            raise
    return copied, recorder.recording, sum(tensor.nbytes for tensor in leaves)


def _training_step(module: Any, batch: Any) -> Any:
    parameters = inspect.signature(module.training_step).parameters
    if "dataloader_iter" in parameters:
        raise CaptureError(f"training_step(dataloader_iter) fetches its own batches, unknown before it runs. {WAY_OUT}")
    takes_index = "batch_idx" in parameters or len(parameters) > 1
    if not takes_index:
        return module.training_step(batch)
    return module.training_step(batch, batch_idx=0) if "batch_idx" in parameters else module.training_step(batch, 0)


def _loss(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise CaptureError(
            f"training_step returned {type(output).__name__} without a loss; for a capture it has to return the loss "
            f"tensor, or a dict with it under 'loss'. {WAY_OUT}"
        )
    if not loss.requires_grad or loss.numel() != 1:
        raise CaptureError(
            "the loss that training_step returned must be one number that depends on trainable parameters; it has "
            f"shape {tuple(loss.shape)} and requires_grad={loss.requires_grad}"
        )
    return loss


@contextmanager
def _unchanged_random_state() -> Iterator[None]:
    """Give the generators of torch, numpy and Python their state back."""
    uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if uses_cuda else []
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
