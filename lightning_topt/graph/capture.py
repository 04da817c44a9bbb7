"""LightningModule + example batch -> `OpGraph`: one training step on tensors without memory.

    graph = capture(module, batch)

How it goes:
1. `StepRun.record` runs ``training_step`` and its backward pass on a fake copy, under a `Recorder`,
   at two batch sizes. Of equal layers five are run, and the others written (`repetition`).
2. `assemble` makes one graph of both recordings: what differs scales with the batch.
3. `find_repeatable` calls modules a second time, to learn which may be recomputed.
4. `choose_blocks` cuts the graph into the modules that a plan decides about.

`topt plan` calls it in `cli.example_step`, a fit in `plugins.planning`: in a process that is
thrown away, since nothing that user code leaves behind is put back.
`techniques.tensor_parallel.split_model` captures the step on slices. The graph goes to
`costs.training_step`, which prices it, in a `SearchRequest`.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_topt.graph.blocks import choose_blocks, mark_repeatable, repeat_candidates
from lightning_topt.graph.errors import (
    WAY_OUT,
    CaptureError,
    PlanError,
    explain,
    explain_transform,
    raised_by_user,
)
from lightning_topt.graph.manual_steps import ManualSteps, optimizes_manually
from lightning_topt.graph.module_copy import filled_copy
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.graph.recorder import Recorder
from lightning_topt.graph.recording import Recording, assemble, changed
from lightning_topt.graph.repetition import Stack, find_stacks, outline, short_copy, with_all_layers
from lightning_topt.graph.second_calls import find_repeatable
from lightning_topt.graph.structures import (
    batch_size,
    common_size,
    copied_batch,
    fake_batch,
    nbytes_of,
    tensors_in,
)

CPU = torch.device("cpu")
Adapt = Callable[[nn.Module], AbstractContextManager[object]]


def capture(
    module: nn.Module,
    batch: object,
    *,
    forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
    device: torch.device | str = "cpu",
    batch_scaling: bool = True,
    adapt: Adapt | None = None,
    like: OpGraph | None = None,
    stacks: Sequence[Stack] | None = None,
    repeats: bool = True,
) -> OpGraph:
    """Return the operator graph of one training step of `module`.

    ``module.training_step(batch, 0)`` and the backward pass of its loss run on fake tensors (shapes
    without memory) at two batch sizes, that of `batch` and twice as much; what differs between the
    two runs scales with the batch.
    Any Python control flow is followed as this one step takes it. It runs on a copy of `module`;
    what it does elsewhere stays, so call this in a process that is thrown away.

    Args:
        module: a LightningModule. Several backward passes of one with manual optimization are
            traced as one (`manual_steps`).
        batch: what `training_step` takes; tensors anywhere inside. One sample is captured as two.
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
        stacks: what `repeated_layers` says of the step; None: it is asked.
        repeats: whether modules are called twice. False: no block is said to be recomputable.

    Raises:
        CaptureError: the step raises an error, depends on values of tensors or uses an operator
            without a shape-only implementation (`needs_values` is then true, and `observe_step` may
            help); it runs other operators on a larger batch, returns no loss, or has no trainable
            parameter or lazy ones. The message names the operator, the line and a way out.
        ValueError: this machine has no such `device`, or the options contradict one another.
    """
    check_can_run(module)
    # Without the device autograd does not raise, it ends the process.
    kind = torch.device(device).type
    if kind != "cpu" and not torch.get_device_module(kind).is_available():
        raise ValueError(
            f"a capture for {kind!r} needs such a device in this machine; capture for 'cpu' here"
        )
    step = StepRun(module, forward_context, torch.device(device), adapt, repeats=repeats)
    if stacks is None:
        stacks = repeated_layers(module, batch, forward_context=forward_context, device=device)
    made = partial(_graph, batch=batch, batch_scaling=batch_scaling, like=like)
    with no_collection():
        if stacks:
            try:
                return made(replace(step, stacks=tuple(stacks)))
            except Exception:
                pass  # perhaps for want of its layers
        return made(step)


def _graph(
    step: StepRun, *, batch: object, batch_scaling: bool, like: OpGraph | None = None
) -> OpGraph:
    # Record the step; the arguments are those of `capture`
    samples = 1, 1
    if not batch_scaling:  # one recording, taken for two
        sizes = common_size(batch), common_size(batch)
        copied, first, first_bytes = step.record(batch)
        second, second_bytes = first, first_bytes
    else:
        # a dim of size one is special to operators (views instead of copies)
        have = batch_size(batch)
        sizes = max(have, 2), 2 * max(have, 2)
        samples = have, sizes[0]
        copied, first, first_bytes = step.record(batch, samples=samples)
        _, second, second_bytes = step.record(batch, samples=(have, sizes[1]))
    graph = assemble(
        copied,
        (first, second),
        name=type(step.module).__name__,
        sizes=sizes,
        input_bytes=(first_bytes, second_bytes),
    )
    graph = changed(graph, manual_passes=first.manual_passes)
    # its default blocks, with what second calls of its modules did; or those of `like`
    if like is not None:
        graph = step.with_all_layers(graph)
        repeatable = {m.path for m in like.step.modules if m.repeatable}
        return mark_repeatable(graph, repeatable).with_blocks(like.blocks)
    repeatable = _repeatable(step, batch, candidates=repeat_candidates(graph), samples=samples)
    graph = step.with_all_layers(mark_repeatable(graph, repeatable))
    return graph.with_blocks(choose_blocks(graph))


def repeated_layers(
    module: nn.Module,
    batch: object,
    *,
    forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
    device: torch.device | str = "cpu",
) -> tuple[Stack, ...]:
    """Return the stacks of layers of which a step on `batch` does the same with five as with all.

    See [Note: repetition] in `repetition`. There is none where the step does not run on fake
    tensors, which `capture` explains.
    """
    if not (stacks := find_stacks(module)):
        return ()
    step = StepRun(module, forward_context, torch.device(device))

    def outlined(left_out: tuple[Stack, ...]) -> list[object]:
        eager = torch.compiler.set_stance("force_eager")
        with replace(step, stacks=left_out).prepared(batch) as prepared, eager, forward_context():
            run = partial(call_training_step, prepared.module, prepared.batch)
            return outline(prepared.module, stacks, run)

    try:
        return stacks if outlined(()) == outlined(stacks) else ()
    except Exception:
        return ()


def observe_step(
    module: nn.Module,
    batch: object,
    *,
    forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> OpGraph:
    """Run a step of a copy of `module` on the CPU, and return its graph.

    The graph holds for batches of the size of `batch`. Raises CaptureError as `capture` does.
    """
    check_can_run(module)
    step = StepRun(module, forward_context, is_real=True)
    return _graph(step, batch=batch, batch_scaling=False)


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage meanwhile.

    A collection takes long, and would end the life of tensors in cycles at no moment of the step.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _repeatable(
    step: StepRun, batch: object, *, candidates: Sequence[str], samples: tuple[int, int]
) -> set[str]:
    if not step.repeats:
        return set()
    # A step that runs only once has none. Which kernels run holds for second calls too, unlike the
    # rest of the context (`OnAccelerator`).
    kernels, eager = getattr(step.forward_context, "kernels", nullcontext), "force_eager"
    try:
        with step.prepared(batch, samples=samples) as made, torch.compiler.set_stance(eager):
            run = partial(call_training_step, made.module, made.batch)
            return find_repeatable(
                *(made.module, made.batch, run),
                candidates=candidates,
                first=step.forward_context,
                second=kernels,
            )
    except Exception:
        return set()


def check_can_run(module: nn.Module) -> None:
    """Raise CaptureError for a module that has nothing to train."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise CaptureError(
            f"{type(module).__name__} has no trainable parameters, so there is nothing to plan"
        )


# ---- one step on fake copies ---------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """Copies of a module and of a batch; `manual` has the losses of manual optimization."""

    module: nn.Module
    batch: object
    manual: ManualSteps | None = None

    @classmethod
    def of(cls, module: nn.Module, batch: object) -> Prepared:
        """Prepare a copy to optimize manually, if it does."""
        return cls(module, batch, ManualSteps(module) if optimizes_manually(module) else None)


@dataclass(eq=False)
class StepRun:
    """Training steps of `module` on copies.

    Args:
        module: whose step runs.
        forward_context: makes a context around the step.
        device: the type of device that trains.
        adapt: may change the copy that is recorded before anything reads it, and returns a context
            around its forward, inside of the other.
        stacks: layers of which five are recorded.
        is_real: on copies with memory of their own, on the CPU; the size of a batch stays.
        repeats: see `capture`.
    """

    module: nn.Module
    forward_context: Callable[[], AbstractContextManager[object]] = nullcontext
    device: torch.device = CPU
    adapt: Adapt | None = None
    stacks: tuple[Stack, ...] = ()
    is_real: bool = False
    repeats: bool = True

    @contextmanager
    def prepared(self, batch: object, *, samples: tuple[int, int] = (1, 1)) -> Iterator[Prepared]:
        """Give copies of the module and of `batch`, and enter the modes under which a step can run.

        `samples` resizes the batch, see `fake_batch`.
        """
        with torch.enable_grad():
            if self.is_real:
                yield Prepared.of(filled_copy(self.module), copied_batch(batch))
                return
            copied, mode = short_copy(self.module, self.stacks, device=self.device)
            with mode:
                yield Prepared.of(copied, fake_batch(batch, samples=samples, device=self.device))

    def with_all_layers(self, graph: OpGraph) -> OpGraph:
        """Return `graph` with the layers that were not recorded."""
        if not self.stacks:
            return graph
        size = sum(buffer.nbytes for buffer in self.module.buffers())
        return changed(with_all_layers(graph, self.stacks), buffer_bytes=size)

    def record(
        self, batch: object, *, samples: tuple[int, int] = (1, 1)
    ) -> tuple[nn.Module, Recording, int]:
        """Return the copy that ran, what it did with `batch`, and the bytes of this batch.

        Raises CaptureError, with `needs_values` where real tensors would help.

        Args:
            batch: what `training_step` takes.
            samples: resizes it, see `fake_batch`.
        """
        recorder: Recorder | None = None
        try:
            with self.prepared(batch, samples=samples) as prepared:
                copied, leaves = prepared.module, list(tensors_in(prepared.batch))
                inner = nullcontext() if self.adapt is None else self.adapt(copied)
                recorder = Recorder(copied, leaves)
                # the step itself; compiled modules run eagerly
                with torch.compiler.set_stance("force_eager"):
                    with recorder.forward(), self.forward_context(), inner:
                        if torch.is_autocast_enabled(kind := self.device.type):
                            recorder.autocast = torch.get_autocast_dtype(kind)
                        output = call_training_step(copied, prepared.batch)
                    manual = prepared.manual
                    loss = loss_of(output) if manual is None else manual.loss()
                    recorder.recording.manual_passes = 0 if manual is None else len(manual.losses)
                    with recorder.backward(loss):
                        loss.backward()
            return copied, recorder.recording, nbytes_of(leaves)
        except (CaptureError, PlanError):
            raise
        except Exception as error:
            explained = explain_transform(error)
            if explained is None:
                explained = explain(error, recorder.failed if recorder else None)
            raise explained or raised_by_user(error) from error


def call_training_step(module: Any, batch: object) -> Any:
    """Call ``module.training_step`` with `batch` and the arguments that Lightning gives it.

    Returns what it returns.
    """
    parameters = inspect.signature(module.training_step).parameters
    if "dataloader_iter" in parameters:
        raise CaptureError(
            "training_step(dataloader_iter) fetches its own batches, unknown before it runs. "
            f"{WAY_OUT}"
        )
    # Lightning gives `batch_idx` where there is a second positional argument, or one of this name
    positional = [
        name
        for name, p in parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    rest = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    takes_index = rest or len(positional) > 1 or "batch_idx" in positional
    return module.training_step(batch, 0) if takes_index else module.training_step(batch)


def loss_of(output: object) -> Tensor:
    """Return the loss in what `training_step` returned.

    Raises CaptureError where there is none to differentiate.
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
            f"parameters; it has shape {tuple(loss.shape)} and requires_grad={loss.requires_grad}. "
            f"{WAY_OUT}"
        )
    return loss
