"""Steps of manual optimization on copies: several backward passes, traced as one.

    by_hand = ManualSteps(copied)
    copied.training_step(batch, 0)
    by_hand.loss().backward()

The step runs with all its forward passes. What it gives to `manual_backward` is kept, and
differentiated at the end, as one sum. Until then gradients are zero. Updates do nothing. So the
graph has all kernels of the step, and more memory than the step takes: activations of all passes
are there at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from lightning_topt.graph.errors import WAY_OUT, CaptureError


def optimizes_manually(module: nn.Module) -> bool:
    """Return whether the steps of a LightningModule run backward passes and updates themselves."""
    return not getattr(module, "automatic_optimization", True)


class ManualSteps:
    """Replaces what manual optimization calls on a copy of a module, which is thrown away.

    Attributes:
        losses: what `manual_backward` got.
    """

    def __init__(self, copied: Any) -> None:
        self.losses: list[Tensor] = []
        self._copied = copied
        self._made: list[ManualOptimizer] | None = None
        self._trained: dict[Tensor, bool] = {}  # of toggled optimizers: `requires_grad` before
        # what a step reads of gradients; made before it is recorded
        self._zeros = [(p, torch.zeros_like(p)) for p in copied.parameters() if p.requires_grad]
        # on this object: its class is that of the original too
        vars(copied).update(
            optimizers=self._optimizers,
            lr_schedulers=self._schedulers,
            manual_backward=self._backward,
            clip_gradients=lambda *_, **__: None,
            toggle_optimizer=self.toggle,
            untoggle_optimizer=self.untoggle,
            toggled_optimizer=self.toggled,
        )

    def loss(self) -> Tensor:
        """Return the sum of all losses. Raises CaptureError where there is none."""
        for parameter, _ in self._zeros:
            parameter.grad = None
        losses = [loss for loss in self.losses if loss.requires_grad]
        if not losses:
            raise CaptureError(
                "the first training_step gave manual_backward no loss that depends on trainable "
                f"parameters, so no backward pass was seen (loss.backward() is not). {WAY_OUT}"
            )
        return torch.stack([loss.float().sum() for loss in losses]).sum()

    def toggle(self, optimizer: ManualOptimizer) -> None:
        """Let parameters of other optimizers need no gradient."""
        self.untoggle()
        for other in self._all():
            for parameter in other.parameters():
                self._trained.setdefault(parameter, parameter.requires_grad)
                parameter.requires_grad_(False)
        for parameter in optimizer.parameters():
            parameter.requires_grad_(self._trained[parameter])

    def untoggle(self, *_: Any) -> None:
        """Undo `toggle`."""
        for parameter, is_trained in self._trained.items():
            parameter.requires_grad_(is_trained)
        self._trained.clear()

    @contextmanager
    def toggled(self, optimizer: ManualOptimizer) -> Iterator[None]:
        """Do both, around the body."""
        self.toggle(optimizer)
        yield
        self.untoggle()

    def _backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
        self.losses.append(loss)
        for parameter, zero in self._zeros:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = zero

    def _all(self) -> list[ManualOptimizer]:
        if self._made is None:
            made = tree_leaves(self._copied.configure_optimizers())
            optimizers = (each for each in made if isinstance(each, Optimizer))
            self._made = [ManualOptimizer(each, self) for each in optimizers]
            self._rates = [each for each in made if isinstance(each, LRScheduler)]
            for scheduler in self._rates:
                vars(scheduler)["step"] = lambda *_, **__: None
        return self._made

    def _optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return _one_or_all(self._all())

    def _schedulers(self) -> Any:
        self._all()
        return _one_or_all(self._rates) or None


def _one_or_all(found: list[Any]) -> Any:
    return found[0] if len(found) == 1 else found


class ManualOptimizer:
    """Stands for an optimizer of a copy: it runs closures, and updates nothing."""

    def __init__(self, optimizer: Any, steps: ManualSteps) -> None:
        self.optimizer, self._steps = optimizer, steps

    def parameters(self) -> Iterator[Tensor]:
        """Yield its parameters."""
        return (p for group in self.optimizer.param_groups for p in group["params"])

    def step(self, closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        """Run the closure alone."""
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that were read."""
        for parameter in self.parameters():
            parameter.grad = None

    def toggle_model(self, sync_grad: bool = True) -> AbstractContextManager[None]:
        """Toggle it around the body."""
        return self._steps.toggled(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)
