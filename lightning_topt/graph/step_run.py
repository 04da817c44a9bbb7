"""One training step on a copy of the module: how it is called, what it must return, how it is recorded."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_topt.graph.batches import fake_batch
from lightning_topt.graph.errors import WAY_OUT, CaptureError, annotate, explain
from lightning_topt.graph.fake import fake_copy
from lightning_topt.graph.record import Recorder
from lightning_topt.graph.recording import Recording
from lightning_topt.graph.structures import tensors_in

CPU = torch.device("cpu")


@dataclass(frozen=True)
class StepRun:
    """A training step of `module`: `forward_context` makes a context around it, `device` is the type that trains."""

    module: nn.Module
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    device: torch.device = CPU

    def record(self, batch: Any, *, samples: tuple[int, int] = (1, 1)) -> tuple[nn.Module, Recording, int]:
        """Return the copy that ran, what it did with `batch` resized (see `fake_batch`), and the bytes of this batch."""
        copied, mode = fake_copy(self.module, device=self.device)
        with mode, torch.enable_grad():
            inputs = fake_batch(batch, samples=samples, device=self.device)
            leaves = list(tensors_in(inputs))
            recorder = Recorder(copied, leaves)
            try:
                with recorder.forward(), self.forward_context():
                    output = call_training_step(copied, inputs)
                loss = loss_of(output)
                with recorder.backward(loss):
                    loss.backward()  # type: ignore[no-untyped-call]
            except CaptureError:
                raise
            except Exception as error:
                explained = explain(error, recorder.failed)
                if explained is not None:
                    raise explained from error
                annotate(error, real=False)
                raise
        return copied, recorder.recording, sum(tensor.nbytes for tensor in leaves)


def call_training_step(module: Any, batch: Any) -> Any:
    """Return what ``module.training_step`` makes of `batch`, called with the arguments that it takes."""
    parameters = inspect.signature(module.training_step).parameters
    if "dataloader_iter" in parameters:
        raise CaptureError(f"training_step(dataloader_iter) fetches its own batches, unknown before it runs. {WAY_OUT}")
    takes_index = "batch_idx" in parameters or len(parameters) > 1
    if not takes_index:
        return module.training_step(batch)
    return module.training_step(batch, batch_idx=0) if "batch_idx" in parameters else module.training_step(batch, 0)


def loss_of(output: Any) -> Tensor:
    """Return the loss in what `training_step` returned. Raises CaptureError where there is none to differentiate."""
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
