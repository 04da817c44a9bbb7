"""How the user's steps run under a plan: the base of four runners, and the plain one.

A strategy has a `StepRunner`, to which its hooks delegate. It is chosen once, when the plan is
applied (`plan_run.choose_runner`):

    PlainRunner       a step is the module's own, around which the engine works (data axes)
    GroupRunner       ranks of a tensor group or a pipeline bring a batch each, and run all of them
    PipelineRunner    the ranks of a pipeline run one batch in microbatches
    ContinuousRunner  a pipeline without flush
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt.plugins.clipping import Clips
from lightning_topt.plugins.step_without_batch import BlockCall, BlockOrder, zero_loss

if TYPE_CHECKING:
    from lightning_topt.execution.engine import Engine
    from lightning_topt.execution.pipeline.pipeline_run import Example

Step = Callable[..., Any]
Output = TypeVar("Output")


class StepRunner(ABC):
    """Runs the steps of a module under one plan, which `engine` has applied.

    Most methods are collective calls. Before a plan, and after it, there is no engine. Most
    runners have no need of what is empty here.
    """

    engine: Engine | None

    # ---- the plan begins and ends ----------------------------------------------------------------

    def example(self, batch: Any) -> Example | None:
        """Return a step on `batch` for an engine that is to run stages, before it is applied.

        None for other plans.
        """
        return None

    def begin(self, trainer: pl.Trainer) -> None:  # noqa: B027
        """Begin to run steps, once the engine has applied the plan. Raises PlanError."""

    def begin_training(self, trainer: pl.Trainer) -> None:  # noqa: B027
        """Begin to train, with signals and loaders of the fit in hand."""

    def close(self, *, failed: bool) -> None:  # noqa: B027
        """End to run steps. Where the run has `failed`, other ranks may be anywhere."""

    @property
    def clips(self) -> Clips:
        """What clips the gradients of this plan."""
        assert self.engine is not None
        return self.engine

    # ---- training --------------------------------------------------------------------------------

    @abstractmethod
    def training_step(
        self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], *, exchanges: bool
    ) -> Any:
        """Return the output of ``training_step``, with a loss for Lightning's backward.

        Args:
            step: runs the module's own one, as Lightning does.
            args: of `step`.
            kwargs: of `step`.
            exchanges: whether the optimizer steps after this batch, so that gradients are
                exchanged.
        """

    def block_backward_sync(
        self, of_ddp: AbstractContextManager[None]
    ) -> AbstractContextManager[None]:
        """Return the context of a batch after which the optimizer does not step.

        Args:
            of_ddp: the context that Lightning's strategy takes.
        """
        assert self.engine is not None
        return self.engine.no_sync()

    def update(
        self, step: Callable[[], Any], optimizer: Optimizer, closure: Callable[[], Any]
    ) -> Any:
        """Run an optimizer step; return what the closure returned.

        Args:
            step: Lightning's own way, which calls `closure`.
            optimizer: that steps.
            closure: forward and backward.
        """
        return step()

    def drain(self) -> None:  # noqa: B027
        """Wait for all that is in flight, before anybody looks at parameters."""

    def why_no_step_without_batch(self, *, is_now: bool) -> str | None:
        """Return why a rank without a batch cannot take part in a step, as a clause.

        Alike on all ranks. The step comes later in the epoch, or `is_now`.
        """
        return "under this plan ranks run the batches of one another"

    def step_without_batch(
        self, model: nn.Module, module: nn.Module, zero_gradients: Callable[[], None]
    ) -> None:
        """Take part in forward and backward of a step of others, with gradients of zero.

        Args:
            model: what forward is called through.
            module: in it.
            zero_gradients: is called between forward and backward.
        """
        raise NotImplementedError(self.why_no_step_without_batch(is_now=True))

    # ---- evaluation ------------------------------------------------------------------------------

    @property
    def gathers_in_evaluation(self) -> bool:
        """Whether an evaluation step is a collective call of all ranks."""
        return False

    def evaluate_without_batch(  # noqa: B027
        self, name: str, model: nn.Module, module: nn.Module
    ) -> None:
        """Take part in the evaluation step `name` of others, where that is a collective call."""

    @abstractmethod
    def evaluate(self, name: str, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of an evaluation step: ``step(*args, **kwargs)``, named `name`."""

    def begin_evaluation(self) -> None:  # noqa: B027
        """Get ready for validation within a fit."""

    def end_evaluation(self) -> None:  # noqa: B027
        """Go back to training."""

    # ---- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what checkpoints have of this runner, beside the plan."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Load what a runner of any plan has saved, beside that plan, as far as it is usable."""

    def unsharded(self, output: Output) -> Output:
        """Return what a step returned, with full tensors, which hooks and predictions get."""
        if self.engine is None:
            return output
        full: Output = self.engine.whole(output)
        return full


class PlainRunner(StepRunner):
    """Steps are the module's own; `engine` works around them, where there is one."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine
        self._order: BlockOrder | None = None  # where FSDP2 gathers parameters

    @override
    def begin(self, trainer: pl.Trainer) -> None:
        engine = self.engine
        if engine is not None and engine.has_shards:
            names = [block.block for block in engine.plan.blocks if block.block]
            self._order = BlockOrder([engine.module.get_submodule(name) for name in names])

    @override
    def close(self, *, failed: bool) -> None:
        if self._order is not None:
            self._order.close()
            self._order = None

    @override
    def training_step(
        self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], *, exchanges: bool
    ) -> Any:
        if self.engine is None:
            return step(*args, **kwargs)
        with self._recorded("training_step"):
            return run_own_step(self.engine, step, args, kwargs)

    @override
    def block_backward_sync(
        self, of_ddp: AbstractContextManager[None]
    ) -> AbstractContextManager[None]:
        return of_ddp if self.engine is None else self.engine.no_sync()

    @override
    def drain(self) -> None:
        if self.engine is not None:
            self.engine.synchronize()

    @override
    def begin_evaluation(self) -> None:
        self.drain()

    @override
    def evaluate(self, name: str, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.engine is None:
            return step(*args, **kwargs)
        with evaluating(self.engine), self._recorded(name):
            return self.unsharded(step(*args, **kwargs))

    @override
    def end_evaluation(self) -> None:
        # Level 2 keeps what evaluation has gathered; hooks may have changed the shards since, as
        # schedule-free optimizers do.
        if self.engine is not None:
            self.engine.reshard()

    # ---- without a batch -------------------------------------------------------------------------

    @override
    def why_no_step_without_batch(self, *, is_now: bool) -> str | None:
        if self.engine is not None and self.engine.plan.mesh.tensor_axes:
            return "under this plan ranks compute each batch together"
        if self.engine is not None and self.engine.plan.local_steps is not None:
            return "under this plan ranks train alone, so that each needs a batch in every step"
        if is_now and self._order is not None and not self._order.has_seen_training:
            return (
                "the first step of a plan that gathers parameters shows in which order, so that "
                "every rank needs a batch in it"
            )
        return None

    @override
    def step_without_batch(
        self, model: nn.Module, module: nn.Module, zero_gradients: Callable[[], None]
    ) -> None:
        with nullcontext() if self.engine is None else self.engine.around_step():
            loss = zero_loss(model, module, self._calls("training_step"))
        zero_gradients()
        loss.backward()

    @property
    @override
    def gathers_in_evaluation(self) -> bool:
        return self.engine is not None and self.engine.has_shards

    @override
    def evaluate_without_batch(self, name: str, model: nn.Module, module: nn.Module) -> None:
        assert self.engine is not None
        with evaluating(self.engine):
            zero_loss(model, module, self._calls(name))

    def _recorded(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self._order is None else self._order.recorded(name)

    def _calls(self, name: str) -> Sequence[BlockCall]:
        return () if self._order is None else self._order.calls(name)


def run_own_step(engine: Engine, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what the module's own step returns, with full tensors."""
    with engine.around_step():
        return engine.whole(step(*args, **kwargs))


@contextmanager
def evaluating(engine: Engine) -> Generator[None, None, None]:
    """Return the context of an evaluation step of a module that `engine` runs."""
    if not engine.has_shards:
        with engine.around_step():
            yield
        return
    # Parameters gathered in inference mode would be inference tensors, which the next training
    # step cannot update.
    with torch.inference_mode(False), torch.no_grad(), engine.around_step():
        yield
