"""Watch a copy of the user's optimizer step on small real tensors: its state, traffic, operator calls, temporaries."""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Distinct, so that a dim of a state tensor tells which dim of the parameter it follows (torch's limit is 64 dims).
_PRIMES = tuple(n for n in range(5, 320) if all(n % d for d in range(2, math.isqrt(n) + 1)))
_PROBE_NUMEL, _PROBE_COUNT = 4096, 4


class OptimizerError(ValueError):
    """An optimizer that cannot be profiled, with the reason."""


@dataclass(frozen=True)
class ParameterUpdate:
    """The optimizer's share of one parameter: bytes of its state and, per step, bytes read and written, operator calls
    and temporaries. `temporaries_add` says whether temporaries of different parameters are alive together (foreach).
    """

    state_bytes: int
    moved_bytes: float
    calls: float
    temporary_bytes: float
    temporaries_add: bool


@dataclass(frozen=True)
class Probe:
    """What one group's step does to a parameter of one number of dims and dtype."""

    dims: tuple[int, ...]
    states: tuple[tuple[tuple[int, ...], int], ...]  # (shape, bytes per element) of each state tensor
    moved_bytes: float  # per element of the parameter
    calls: float
    temporaries: float  # in bytes per element
    temporaries_add: bool

    def update(self, parameter: Tensor) -> ParameterUpdate:
        """What the step does to `parameter`, which has the probe's number of dims and dtype."""
        real = dict(zip(self.dims, parameter.shape, strict=True))
        state = sum(math.prod(real.get(dim, dim) for dim in dims) * itemsize for dims, itemsize in self.states)
        numel = parameter.numel()
        moved, temporaries = self.moved_bytes * numel, self.temporaries * numel
        return ParameterUpdate(state, moved, self.calls, temporaries, self.temporaries_add)


def probe_group(
    optimizer: Optimizer, group: Mapping[str, Any], *, ndim: int, dtype: torch.dtype, device_type: str
) -> Probe:
    """Step copies of `optimizer` with the options of `group` and watch. Raises OptimizerError when the step fails."""
    if isinstance(optimizer, optim.LBFGS):
        return _lbfgs_probe(group, ndim, dtype)
    dims = _PRIMES[:ndim]
    clone = _clone(optimizer, group, shapes=[dims], dtype=dtype, device_type=device_type)
    clone.step()
    states = tuple(
        (tuple(value.shape), value.element_size())
        for value in tree_leaves(dict(clone.state))
        if isinstance(value, Tensor)
    )
    shape = (64, _PROBE_NUMEL // 64) if ndim >= 2 else (_PROBE_NUMEL,)
    watched = []
    for count in (1, _PROBE_COUNT):
        clone = _clone(optimizer, group, shapes=[shape] * count, dtype=dtype, device_type=device_type)
        clone.step()
        with _Watch() as watch:
            clone.step()
        watched.append(watch)
    one, many = watched
    adds = many.peak_bytes >= _PROBE_COUNT * one.peak_bytes
    return Probe(
        dims,
        states,
        moved_bytes=many.moved_bytes / (_PROBE_COUNT * _PROBE_NUMEL),
        calls=max(many.calls - one.calls, 0) / (_PROBE_COUNT - 1),
        temporaries=many.peak_bytes / (_PROBE_NUMEL * (_PROBE_COUNT if adds else 1)),
        temporaries_add=adds,
    )


def _lbfgs_probe(group: Mapping[str, Any], ndim: int, dtype: torch.dtype) -> Probe:
    # torch.optim.LBFGS, once its history is full: `old_dirs` and `old_stps` of history_size vectors each, `d`,
    # `prev_flat_grad`; an inner iteration reads the history twice; flat copies of gradients and direction come and go.
    vectors, itemsize = 2 * group["history_size"] + 2, torch.empty(0, dtype=dtype).element_size()
    dims = _PRIMES[:ndim]
    moved = 2 * vectors * itemsize * group["max_iter"]
    return Probe(dims, ((dims, itemsize),) * vectors, moved, 4.0 * group["max_iter"], 3.0 * itemsize, True)


def _clone(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    *,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device_type: str,
    device: torch.device | None = None,
) -> _Steps:
    """`optimizer` over fresh parameters of `shapes` with the options of `group`, not yet stepped."""
    options = {key: 0.5 if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
    if options.get("capturable"):
        options["capturable"] = False  # needs an accelerator; changes where `step` lives, not what is kept
    if device_type != "cpu" and "foreach" in options and options["foreach"] is None and not options.get("fused"):
        options["foreach"] = True  # torch's default there
    parameters = [nn.Parameter(torch.rand(shape, dtype=dtype, device=device)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.rand_like(parameter)
    clone = type(optimizer).__new__(type(optimizer))
    clone.__dict__.update(optimizer.__dict__)
    # A scheduler or a wrapper may have put its own `step` on the instance; hooks belong to the real run.
    clone.__dict__.pop("step", None)
    clone._optimizer_step_pre_hooks = OrderedDict()
    clone._optimizer_step_post_hooks = OrderedDict()
    clone.state = defaultdict(dict)
    clone.param_groups = [{**options, "params": parameters}]
    return _Steps(clone)


class _Steps:
    """A cloned optimizer whose failures name it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Mapping[Any, Any]:
        return self.optimizer.state

    def step(self) -> None:
        try:
            self.optimizer.step()
        except Exception as error:
            raise OptimizerError(
                f"a trial step of {type(self.optimizer).__name__} failed, so its memory is not known: {error}. Give "
                "the plan explicitly, for instance plan='ddp'"
            ) from error


def make_step(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    *,
    ndim: int,
    dtype: torch.dtype,
    device: torch.device,
    numel: int,
) -> Callable[[], None]:
    """A call that steps a copy of `optimizer`, its state made, on a tensor of about `numel` elements in 1 or 2 dims.

    Raises OptimizerError when the step fails.
    """
    shape = (math.isqrt(numel), numel // math.isqrt(numel)) if ndim == 2 else (numel,)
    clone = _clone(optimizer, group, shapes=[shape], dtype=dtype, device_type=device.type, device=device)
    clone.step()
    return clone.step


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operator calls, the bytes they read and write, and the peak of what they allocate."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls, self.moved_bytes, self.peak_bytes = 0, 0, 0
        self._live: dict[int, int] = {}  # storages allocated here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        inputs = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        written = [
            t
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for t in tree_leaves(value)
        ]
        new = [t for t in outputs if id(t) not in inputs]
        if inputs or new:
            self.calls += 1
            self.moved_bytes += sum(t.nbytes for t in (*inputs.values(), *written, *new))
        known = {t.untyped_storage()._cdata for t in inputs.values()} | set(self._live)
        for tensor in new:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                self._live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, storage._cdata, None)
        self.peak_bytes = max(self.peak_bytes, sum(self._live.values()))
        return output
