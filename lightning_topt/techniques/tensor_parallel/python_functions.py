"""Code that torch runs from outside of torch functions, under a `SplitMode`.

A user's `torch.autograd.Function`, and one of torch.distributed, gets whole tensors: what it
computes is not known. Collectives among all ranks are refused: some of these have the same samples.
What `torch.utils.checkpoint` runs again in backward, when the mode is off, runs under the mode
again, on tensors that carry their layouts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint

from lightning_topt.graph.errors import line_of_caller
from lightning_topt.techniques.tensor_parallel.kinds import tensors_in
from lightning_topt.techniques.tensor_parallel.layout import layout_of, with_layout

_OWN = ("torch.", "lightning_topt.")
_COLLECTIVES = "torch.distributed.nn."
_apply: Any = torch.autograd.Function.__dict__["apply"]
_GENERATOR = "_checkpoint_without_reentrant_generator"
_generator: Any = getattr(checkpoint, _GENERATOR)
_make_subclass: Any = torch.Tensor._make_subclass
_NOT_IN_GROUP = "_rank_not_in_group"  # which all functions of torch.distributed ask first
_not_in_group: Any = getattr(distributed_c10d, _NOT_IN_GROUP)
_eager = ExitStack()
_users = 0
_among_all: list[bool] = []


class PythonFunctionMode(TorchFunctionMode):
    """A mode that also sees calls of autograd functions and checkpoints; the former get `whole`
    arguments. Compiled code runs uncompiled.
    """

    def __enter__(self) -> Any:
        """Watch those calls while any such mode is on."""
        global _users
        _users += 1
        if _users == 1:
            _run_eagerly()
            torch.Tensor._make_subclass = staticmethod(_watched_subclass)  # type: ignore[method-assign]
            torch.autograd.Function.apply = classmethod(_watched_apply)  # type: ignore[assignment,method-assign]
            setattr(checkpoint, _GENERATOR, _watched_generator)
            setattr(distributed_c10d, _NOT_IN_GROUP, _watched_group)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """Leave torch as it was."""
        global _users
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _users -= 1
        if _users == 0:
            _eager.close()
            del torch.Tensor._make_subclass  # that of its base class
            torch.autograd.Function.apply = _apply  # type: ignore[method-assign]
            setattr(checkpoint, _GENERATOR, _generator)
            setattr(distributed_c10d, _NOT_IN_GROUP, _not_in_group)

    def whole(self, value: Any) -> Any:
        """Return `value` with whole tensors."""
        raise NotImplementedError

    def as_now(self) -> Callable[[], AbstractContextManager[None]]:
        """Return what makes a context in which calls run as they would now."""
        return nullcontext


def _run_eagerly() -> None:
    """Let compiled code run as it is written: a compiler would trace the mode, which changes while
    it runs.
    """
    if "torch._dynamo.eval_frame" in sys.modules:  # else nothing is compiled
        _eager.enter_context(torch.compiler.set_stance("force_eager"))


def _watched_subclass(cls: Any, data: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A parameter that is made of a split tensor is as that one."""
    made = _make_subclass(cls, data, *args, **kwargs)
    layout = layout_of(data)
    return made if layout is None else with_layout(made, layout)


def _current() -> PythonFunctionMode | None:
    if not torch._C._len_torch_function_stack():
        return None
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    modes = (mode for mode in reversed(stack) if isinstance(mode, PythonFunctionMode))
    return next(modes, None)


def _watched_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    mode = _current()
    if mode is not None and cls is checkpoint.CheckpointFunction:
        args = (_again_under(mode, args[0], args[2:]), *args[1:])
    elif mode is not None and _is_unknown(cls) and any(map(layout_of, tensors_in(args))):
        args = mode.whole(args)
    return _apply.__func__(cls, *args, **kwargs)


def _is_unknown(cls: Any) -> bool:
    return not cls.__module__.startswith(_OWN) or cls.__module__.startswith(_COLLECTIVES)


def _watched_group(group: dist.ProcessGroup | None) -> Any:
    """Refuse what exchanges tensors among all ranks."""
    name = sys._getframe(1).f_code.co_name
    exchanges = not name.startswith("get_") and "barrier" not in name
    if exchanges and (group is None or group is dist.group.WORLD) and not _among_all:
        raise ValueError(
            f"a step calls torch.distributed.{name} among all ranks, and under this plan several "
            "of them have the same "
            "samples, which would count more than once: call self.all_gather or "
            "self.trainer.strategy.reduce, which know the "
            f"ranks of the data, or choose a plan without tensor axes\n{line_of_caller()}"
        )
    return _not_in_group(group)


@contextmanager
def among_all_ranks() -> Generator[None, None, None]:
    """Within it collectives among all ranks are not refused, as where a step is only looked at."""
    _among_all.append(True)
    try:
        yield
    finally:
        _among_all.pop()


def _again_under(
    mode: PythonFunctionMode, function: Callable[..., Any], args: tuple[Any, ...]
) -> Callable[..., Any]:
    layouts, as_now = [layout_of(arg) for arg in args], mode.as_now()

    def run(*given: Any) -> Any:
        if _current() is not None:
            return function(*given)
        for arg, layout in zip(given, layouts, strict=True):
            if isinstance(arg, Tensor) and layout is not None:
                with_layout(arg, layout)
        with mode, as_now():
            return function(*given)

    return run


def _watched_generator(
    function: Any,
    preserve: bool = True,
    context_fn: Any = checkpoint.noop_context_fn,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if (mode := _current()) is None:
        return _generator(function, preserve, context_fn, *args, **kwargs)
    as_now = mode.as_now()

    def contexts() -> tuple[Any, Any]:
        forward, recompute = context_fn()
        return forward, _Under(mode, recompute, as_now)

    return _generator(function, preserve, contexts, *args, **kwargs)


class _Under(AbstractContextManager[None]):
    """A context in the mode; it may be entered again, by a backward pass in two parts."""

    def __init__(
        self,
        mode: PythonFunctionMode,
        context: AbstractContextManager[Any],
        as_now: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._mode, self._context, self._as_now = mode, context, as_now
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._context)
            if _current() is None:
                stack.enter_context(self._mode)
                stack.enter_context(self._as_now())
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)
