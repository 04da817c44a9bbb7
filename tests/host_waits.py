"""What makes the host of a CUDA device wait for a value: counted or forbidden, on any tensors."""

from __future__ import annotations

import collections
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_topt

WAITING_CALLS = ("tolist", "item", "__bool__", "__int__", "__float__", "nonzero")
WAITING_OPERATORS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")

Place = Callable[[str], str | None]


class HostWaits(AssertionError):
    """The host would wait."""


class Calls(TorchFunctionMode):
    """Counts calls that read a value; ``tolist`` reaches no operator.

    `place` gives the name under which one is counted; None: it is not.
    """

    def __init__(self, names: Sequence[str] = WAITING_CALLS, place: Place = str) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()
        self._names, self._place = names, place

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        name = "copy" if name == "tensor" and "device" in kwargs else name
        if name in self._names and (place := self._place(name)):
            self.counts[place] += 1
        return func(*args, **kwargs)


class Operators(TorchDispatchMode):
    """Counts operators for which the host of a CUDA device waits, and copies into its memory."""

    def __init__(self, place: Place = str) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()
        self._place = place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        found = func(*args, **kwargs)
        waits = name in WAITING_OPERATORS
        waits = waits or (name in ("_to_copy", "copy_") and _leaves(args, found))
        if waits and (place := self._place(name)):
            self.counts[place] += 1
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
def package_waits(counts: collections.Counter[str]) -> Iterator[None]:
    """Add waits of the package within, and its copies between host and device, by line."""
    with (
        Calls((*WAITING_CALLS, "cpu", "copy"), _package_line) as calls,
        Operators(_package_line) as operators,
    ):
        yield
    counts.update(calls.counts + operators.counts)


def _package_line(name: str) -> str | None:
    """The line that calls what has this name, if it is of the package."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        # what torch reads of objects that came over gloo is on the host
        if "_object" in code.co_name and dist.get_backend(frame.f_locals["group"]) == "gloo":
            return None
        if not code.co_filename.startswith(os.path.dirname(torch.__file__)):
            is_own = code.co_filename.startswith(os.path.dirname(lightning_topt.__file__))
            return f"{name} {code.co_filename}:{frame.f_lineno}" if is_own else None
        frame = frame.f_back
    return None


@contextmanager
def fake_device() -> Iterator[torch.device]:
    """Within, tensors on this device have no memory, as if it was there. Reading a value fails."""
    with FakeTensorMode():
        yield torch.device("cuda", 0)
