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
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt.optim.clipping import agree_on_overflow
from lightning_topt.optim.full_state import parameters_of

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

    # ---- evaluation ------------------------------------------------------------------------------

    @property
    def gathers_in_evaluation(self) -> bool:
        """Whether an evaluation step is a collective call of all ranks."""
        return False

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

    @override
    def training_step(
        self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], *, exchanges: bool
    ) -> Any:
        if self.engine is None:
            return step(*args, **kwargs)
        with self.engine.around_step():
            return self.engine.whole(step(*args, **kwargs))

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
        with evaluating(self.engine):
            return self.unsharded(step(*args, **kwargs))

    @override
    def end_evaluation(self) -> None:
        # Level 2 keeps what evaluation has gathered; hooks may have changed the shards since, as
        # schedule-free optimizers do.
        if self.engine is not None:
            self.engine.reshard()

    @property
    @override
    def gathers_in_evaluation(self) -> bool:
        return self.engine is not None and self.engine.has_shards


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


# ---- clipping over all ranks ---------------------------------------------------------------------


class Clips(Protocol):
    """What clips gradients over all ranks: an engine, or the steps of a continuous pipeline."""

    @property
    def device(self) -> torch.device:
        """The device of the gradients."""

    def clip_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Any:
        """Scale the gradients to a common norm of at most `max_norm`."""

    def clip_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        """Clamp every gradient."""


def clip_sharded(precision: Precision, engine: Clips) -> Callable[[], None]:
    """Let `precision` clip, and look for overflows, over all ranks; return what undoes that.

    Lightning clips what the rank holds, in ``clip_grad_by_norm`` and ``clip_grad_by_value``.
    These are replaced, so that norms of DTensors, and of a pipeline's stages, are those of all
    ranks together. A plugin of the user's with clipping of its own keeps it.
    """

    def by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
        engine.clip_norm(parameters_of(optimizer), clip_val)

    def by_value(optimizer: Optimizer, clip_val: int | float) -> None:
        engine.clip_value(parameters_of(optimizer), clip_val)

    replaced = {
        name: own
        for name, own in (("clip_grad_by_norm", by_norm), ("clip_grad_by_value", by_value))
        if getattr(type(precision), name) is getattr(Precision, name)  # not the user's own
    }
    vars(precision).update(replaced)
    scaler = getattr(precision, "scaler", None)
    restore_scaler = agree_on_overflow(scaler, engine.device) if scaler is not None else None

    def restore() -> None:
        for name, own in replaced.items():
            if vars(precision).get(name) is own:  # nobody has replaced it since
                del vars(precision)[name]
        if restore_scaler is not None:
            restore_scaler()

    return restore
