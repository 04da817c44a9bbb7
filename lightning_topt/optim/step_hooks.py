"""Work between the step hooks of the user and the update, for classes that replace the step.

`LocalStep` and `ParallelStep` stand on the instance in place of the optimizer's own step. Hooks see
what they see around a plain step: groups and weights before forward and backward, and after the
update.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer


@contextmanager
def inside_hooks(
    optimizer: Optimizer, *, enter: Callable[[], None], leave: Callable[[], None]
) -> Generator[None, None, None]:
    """In a step: hooks before it, its closure, `enter`, the update, `leave`, hooks after it.

    The update gets a closure that gives the loss, once.

    Raises:
        ValueError: where the update asks its closure again, and where hooks would run within the
            update once more, as a step that calls the step of its base class may make them.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn without it
    name, hooks = type(optimizer).__name__, optimizer._optimizer_step_pre_hooks
    passed: dict[str, Any] = {}  # the keywords of the update, which hooks after it get too
    user_closure: Any = None

    def before_update(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal passed, user_closure
        optimizer._optimizer_step_pre_hooks = hooks  # torch goes through a copy: closures may add
        passed = kwargs  # the same of all that stand on this step, one in another
        user_closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if user_closure is not None:
            with torch.enable_grad():
                passed["closure"] = _closure_for_one_call(user_closure(), name=name)
        enter()
        return args[:1], passed

    def after_update(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs is passed:
            if user_closure is not None:
                passed["closure"] = user_closure
            leave()
        elif hooks or len(optimizer._optimizer_step_post_hooks) > 1:
            raise ValueError(
                f"{name} calls the step of its base class, within which its step hooks would see "
                "pieces of parameters: remove the hooks, or keep the step whole (plan='ddp', no "
                "ParallelOptimizerStep)"
            )

    last = id(before_update), before_update
    optimizer._optimizer_step_pre_hooks = OrderedDict([*hooks.items(), last])
    after = optimizer.register_step_post_hook(after_update)
    post_hooks: Any = optimizer._optimizer_step_post_hooks
    post_hooks.move_to_end(after.id, last=False)
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks = hooks
        after.remove()


def _closure_for_one_call(loss: object, *, name: str) -> Callable[[], Any]:
    # A closure that gives `loss`; it raises ValueError when it is called again
    was_called = False

    def closure() -> Any:
        nonlocal was_called
        if was_called:
            raise ValueError(
                f"{name} asks its closure again in one step, and this step is shared between "
                "ranks: keep it whole (plan='ddp', no ParallelOptimizerStep)"
            )
        was_called = True
        return loss

    return closure
