"""Time every operator of a real training step in place, with its own arguments and the caches as
the step leaves them.

    timer = StepTimer(device)
    with timer:
        loss = module.training_step(batch, 0)
    with timer:
        loss.backward()
    timer.seconds()

Kernels are named as in an `OpGraph`, so that a search looks them up (`costs.compute.kernel_key`).
On CPUs a call takes from its beginning to its end; on CUDA the device's time between two events
counts.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_topt.graph.collective_ops import is_collective
from lightning_topt.graph.kernels import ALLOCATIONS, QUERIES, encode_arguments, freeze, is_view


class StepTimer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that times operators on `device`; enter it around the forward and the backward pass of
    one or more steps.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Say that compiled functions stay compiled under this mode; else they would be skipped for
        good.
        """
        return True

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_host = device.type == "cpu"
        self._times: dict[Any, list[Any]] = {}
        self._names: dict[Any, tuple[str, str]] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run `func` between two looks at the clock."""
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        name = func._schema.name
        if name in QUERIES or name in ALLOCATIONS or is_view(func) or is_collective(func):
            return func(*args, **kwargs)
        try:
            key = self._key(func, args, kwargs)
        except Exception:  # tensors of which not even the shape can be asked
            return func(*args, **kwargs)
        if self._on_host:
            start = perf_counter()
            out = func(*args, **kwargs)
            self._times[key].append(perf_counter() - start)
            return out
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        out = func(*args, **kwargs)
        last.record()
        self._times[key].append((first, last))
        return out

    def _key(self, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        """What tells calls of one kernel from others; its name is made once, before it may change
        its arguments.
        """
        tensors: list[Tensor] = []
        key = func, freeze(args, tensors), freeze(tuple(kwargs.items()), tensors)
        if key not in self._times:
            self._times[key] = []
            self._names[key] = str(func), json.dumps(encode_arguments(args, kwargs), sort_keys=True)
        return key

    def seconds(self) -> Mapping[tuple[str, str], float]:
        """Return the median seconds of each kernel's calls, by its name and the JSON text of its
        arguments.
        """
        if not self._on_host and self._times:
            torch.cuda.synchronize()
        found: dict[tuple[str, str], float] = {}
        for key, times in self._times.items():
            if times:
                calls = (
                    times
                    if self._on_host
                    else [first.elapsed_time(last) / 1e3 for first, last in times]
                )
                found[self._names[key]] = statistics.median(calls)
        return found
