"""One training step on a copy of the module: how it is called, what it must return, how it is
recorded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_topt.graph.equal_modules import find_equal
from lightning_topt.graph.errors import WAY_OUT, CaptureError, annotate, explain, explain_transform
from lightning_topt.graph.expand import expand
from lightning_topt.graph.fake import fake_copy
from lightning_topt.graph.observed_calls import Surprise
from lightning_topt.graph.record import Recorder
from lightning_topt.graph.recording import Recording
from lightning_topt.graph.repeated_calls import RepeatedCalls
from lightning_topt.graph.sample_counts import fake_batch
from lightning_topt.graph.structures import tensors_in

CPU = torch.device("cpu")
MAX_SURPRISES = 2
Adapt = Callable[[nn.Module], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Prepared:
    """Fake copies of a module and of a batch, and the mode under which a step of them runs."""

    module: nn.Module
    batch: Any
    mode: FakeTensorMode


@dataclass(frozen=True)
class StepRun:
    """A training step of `module`: `forward_context` makes a context around it, `device` is the
    type that trains.

    `adapt` may change the copy that is recorded before anything looks at it, and returns a context
    around its forward, inside of the other.
    """

    module: nn.Module
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    device: torch.device = CPU
    adapt: Adapt | None = None

    @cached_property
    def _equal_modules(self) -> dict[str, int]:
        return find_equal(self.module)

    @contextmanager
    def prepared(self, batch: Any, *, samples: tuple[int, int] = (1, 1)) -> Iterator[Prepared]:
        """Give a copy of the module and of `batch` resized (see `fake_batch`), under whose modes a
        step can run.
        """
        with torch.enable_grad():
            copied, mode = fake_copy(self.module, device=self.device)
            with mode:
                yield Prepared(copied, fake_batch(batch, samples=samples, device=self.device), mode)

    def record(
        self,
        batch: Any,
        *,
        samples: tuple[int, int] = (1, 1),
        unlike: set[Hashable] | None = None,
        resizes: bool = False,
    ) -> tuple[nn.Module, Recording, int]:
        """Return the copy that ran, what it did with `batch`, and the bytes of this batch.

        With `unlike` calls of equal modules are left out and copied afterwards, but for those whose
        keys it holds; keys of modules that turn out to differ are added. One that `resizes` is of
        `PRIME` batches (see `one_recording`).

        Raises CaptureError, with `needs_values` where real tensors would help, or whatever the step
        itself raises.
        """
        while unlike is not None and len(unlike) <= MAX_SURPRISES:
            recorder: list[Recorder] = []
            try:
                copied, recording, size = self._record_once(
                    batch, samples, unlike, recorder, resizes
                )
                return copied, expand(recording), size  # when all tensors of the step are gone
            except Surprise as surprise:
                unlike.add(surprise.key)
            except Exception:
                if not recorder or not recorder[0].recording.copies:
                    raise
                break  # perhaps a consequence
        return self._record_once(batch, samples, None, [], resizes)

    def _record_once(
        self,
        batch: Any,
        samples: tuple[int, int],
        unlike: set[Hashable] | None,
        recorders: list[Recorder],
        resizes: bool,
    ) -> tuple[nn.Module, Recording, int]:
        try:
            with self.prepared(batch, samples=samples) as prepared:
                copied, leaves = prepared.module, list(tensors_in(prepared.batch))
                inner = nullcontext() if self.adapt is None else self.adapt(copied)
                calls = None
                if unlike is not None:
                    alike = {
                        path: key for path, key in self._equal_modules.items() if key not in unlike
                    }
                    calls = RepeatedCalls(copied, prepared.mode, modules=alike)
                mode = prepared.mode if resizes else None
                recorders.append(recorder := Recorder(copied, leaves, resizes=mode))
                if calls is not None:
                    calls.install(recorder)
                with recorder.forward(), self.forward_context(), inner:
                    output = call_training_step(copied, prepared.batch)
                loss = loss_of(output)
                with recorder.backward(loss):
                    loss.backward()  # type: ignore[no-untyped-call]
            return copied, recorder.recording, sum(_nbytes(tensor) for tensor in leaves)
        except (CaptureError, Surprise):
            raise
        except Exception as error:
            explained = explain_transform(error)
            if explained is None:
                explained = explain(error, recorders[0].failed if recorders else None)
            if explained is not None:
                raise explained from error
            annotate(error)
            raise


def _nbytes(tensor: Tensor) -> int:
    return (
        tensor.nbytes if tensor.layout is torch.strided else tensor.numel() * tensor.element_size()
    )


def call_training_step(module: Any, batch: Any) -> Any:
    """Return what ``module.training_step`` makes of `batch`, called with the arguments that
    Lightning gives it.
    """
    parameters = inspect.signature(module.training_step).parameters
    if "dataloader_iter" in parameters:
        raise CaptureError(
            "training_step(dataloader_iter) fetches its own batches, unknown before it runs. "
            f"{WAY_OUT}"
        )
    positional = [
        name
        for name, p in parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    rest = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    takes_index = rest or len(positional) > 1 or "batch_idx" in positional
    return module.training_step(batch, 0) if takes_index else module.training_step(batch)


def loss_of(output: Any) -> Tensor:
    """Return the loss in what `training_step` returned. Raises CaptureError where there is none to
    differentiate.
    """
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise CaptureError(
            f"training_step returned {type(output).__name__} without a loss; for a capture it has "
            f"to return the loss tensor, or a dict with it under 'loss'. {WAY_OUT}"
        )
    if not loss.requires_grad or loss.numel() != 1:
        raise CaptureError(
            "the loss that training_step returned must be one number that depends on trainable "
            f"parameters; it has shape {tuple(loss.shape)} and requires_grad={loss.requires_grad}"
        )
    return loss
