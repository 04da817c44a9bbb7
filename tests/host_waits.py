"""What makes the host of a CUDA device wait for a value: counted or forbidden, on any tensors."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

WAITING_CALLS = ("tolist", "item", "__bool__", "__int__", "__float__", "nonzero")
WAITING_OPERATORS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")


class HostWaits(AssertionError):
    """The host would wait."""


class Calls(TorchFunctionMode):
    """Counts calls that read a value; ``tolist`` reaches no operator."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in WAITING_CALLS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Counts operators for which the host of a CUDA device waits, and copies into its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        found = func(*args, **kwargs)
        if name in WAITING_OPERATORS or (name in ("_to_copy", "copy_") and _leaves(args, found)):
            self.counts[name] += 1
        return found


def _leaves(args: tuple[Any, ...], found: Any) -> bool:
    """Whether a copy goes from a device to the host."""
    source = args[-1] if isinstance(args[-1], torch.Tensor) else args[0]
    if len(args) > 1 and isinstance(args[1], torch.Tensor):
        source = args[1]  # of `copy_`
    return isinstance(found, torch.Tensor) and source.device.type != found.device.type == "cpu"


def waits_of(call: Callable[[], Any]) -> dict[str, int]:
    """Return how often `call` would wait, by what it calls."""
    with Calls() as calls, Operators() as operators:
        call()
    return dict(calls.counts | operators.counts)


@contextmanager
def no_host_waits() -> Iterator[None]:
    """Fail where the host would wait within."""
    with Calls() as calls, Operators() as operators:
        yield
    if found := dict(calls.counts | operators.counts):
        raise HostWaits(str(found))


@contextmanager
def fake_device() -> Iterator[torch.device]:
    """Within, tensors on this device have no memory, as if it was there. Reading a value fails."""
    with FakeTensorMode():
        yield torch.device("cuda", 0)
