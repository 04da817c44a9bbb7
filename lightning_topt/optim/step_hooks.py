"""Work done between an optimizer's hooks and its update, so that hooks see the groups as their user
made them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer


@contextmanager
def inside_hooks(
    optimizer: Optimizer, *, enter: Callable[[], None], leave: Callable[[], None]
) -> Generator[None, None, None]:
    """Within it, `enter` runs after the optimizer's other hooks before a step, and `leave` before
    its hooks after it.

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


def asked_once(loss: Any, *, name: str) -> Callable[[], Any]:
    """Return the closure of a step whose forward and backward pass are over. It raises ValueError
    when it is asked again.
    """
    asked = False

    def closure() -> Any:
        nonlocal asked
        if asked:
            raise ValueError(
                f"{name} asks its closure again in one step, and this step is shared between "
                "ranks: keep it whole "
                "(plan='ddp', no ParallelOptimizerStep)"
            )
        asked = True
        return loss

    return closure
