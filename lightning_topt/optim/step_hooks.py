"""What the classes that replace ``optimizer.step`` have in common.

`AdaptiveStep`, `LocalStep` and `ParallelStep` each stand on the instance in place of the
optimizer's own step. They run the closure first, and do their work between the hooks of the user
and the update, so that hooks see the groups as their user made them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer


def begin_step(optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
    """Begin a step as a scheduler's wrapper and torch's optimizers do; return the closure's loss.

    Schedulers read ``_opt_called`` to warn about a step that was never called.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


@contextmanager
def inside_hooks(
    optimizer: Optimizer, *, enter: Callable[[], None], leave: Callable[[], None]
) -> Generator[None, None, None]:
    """Run `enter` after the other hooks before a step, and `leave` before the hooks after it.

    Once each: a step that calls the step of its base class runs the hooks once more inside.
    """
    depth = 0

    def before_update(*_: Any) -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            enter()

    def after_update(*_: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            leave()

    before = optimizer.register_step_pre_hook(before_update)
    after = optimizer.register_step_post_hook(after_update)
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(after.id, last=False)
    try:
        yield
    finally:
        before.remove()
        after.remove()
