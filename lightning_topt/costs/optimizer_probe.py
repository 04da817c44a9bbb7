"""Watch a copy of the user's optimizer step on small real tensors: its state, traffic, operator
calls, temporaries.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_topt.costs.global_state import kept_global_state
from lightning_topt.costs.optimizer_copy import OptimizerCopy, OptimizerError, no_global_hooks

# Distinct, so that a dim of a state tensor tells which dim of the parameter it follows (torch's
# limit is 64 dims).
_PRIMES = tuple(n for n in range(5, 320) if all(n % d for d in range(2, math.isqrt(n) + 1)))
_PROBE_NUMEL, _PROBE_COUNT = 4096, 4
_MAX_DIMS = 6  # of a parameter; the product of seven primes is too many elements for a trial
_SEED = 20131


@dataclass(frozen=True)
class ParameterUpdate:
    """The optimizer's share of one parameter: bytes of its state and, per step, bytes read and
    written, operator calls and temporaries. `temporaries_add` says whether temporaries of different
    parameters are alive together (foreach).
    """

    state_bytes: int
    moved_bytes: float
    calls: float
    temporary_bytes: float
    temporaries_add: bool


@dataclass(frozen=True)
class Probe:
    """A `Probe` says what one group's step does to a parameter of one number of dims and dtype."""

    dims: tuple[int, ...]
    # (shape, bytes per element) of each state tensor
    states: tuple[tuple[tuple[int, ...], float], ...]
    moved_bytes: float  # per element of the parameter
    calls: float
    temporaries: float  # in bytes per element
    temporaries_add: bool

    def state_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of the state of a parameter of `shape`, which has the probe's number of
        dims.
        """
        real = dict(zip(self.dims, shape, strict=True))
        return round(
            sum(
                math.prod(real.get(dim, dim) for dim in dims) * itemsize
                for dims, itemsize in self.states
            )
        )

    def update(self, parameter: Tensor) -> ParameterUpdate:
        """Return what the step does to `parameter`, which has the probe's number of dims and
        dtype.
        """
        state = self.state_bytes(parameter.shape)
        numel = parameter.numel()
        moved, temporaries = self.moved_bytes * numel, self.temporaries * numel
        return ParameterUpdate(state, moved, self.calls, temporaries, self.temporaries_add)


@kept_global_state()
def probe_group(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    *,
    ndim: int,
    dtype: torch.dtype,
    device_type: str,
) -> Probe:
    """Step copies of `optimizer` with the options of `group` and watch; the optimizer and what it
    refers to stay as they are.

    Raises OptimizerError when the step fails, needs a closure or sparse gradients, or cannot be
    tried on a copy.
    """
    if isinstance(optimizer, optim.LBFGS):
        return lbfgs_probe(group, ndim, dtype)
    _check_can_be_tried(optimizer, ndim=ndim)
    dims = _PRIMES[:ndim]
    states = _state_shapes(
        _copy(optimizer, group, shapes=[dims], dtype=dtype, device_type=device_type)
    )
    shape = (64, _PROBE_NUMEL // 64) if ndim >= 2 else (_PROBE_NUMEL,)
    watched = []
    for count in (1, _PROBE_COUNT):
        copy = _copy(optimizer, group, shapes=[shape] * count, dtype=dtype, device_type=device_type)
        copy.step()
        with _Watch() as watch:
            copy.step()
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


def _check_can_be_tried(optimizer: Optimizer, *, ndim: int) -> None:
    name, way_out = type(optimizer).__name__, "Give the plan explicitly, for instance plan='ddp'"
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise OptimizerError(
            f"the step of {name} needs a closure: it runs the model itself, as often as it wants, "
            "so the cost of a step is "
            f"not known. {way_out}"
        )
    check_dense(optimizer)
    if ndim > _MAX_DIMS:
        raise OptimizerError(
            f"{name} updates a parameter of {ndim} dims; trial steps are made with at most "
            f"{_MAX_DIMS}. {way_out}"
        )


def check_dense(optimizer: Optimizer) -> None:
    """Raise OptimizerError for an optimizer that is made for sparse gradients."""
    if isinstance(optimizer, optim.SparseAdam):
        raise OptimizerError(
            f"{type(optimizer).__name__} updates the rows of one batch from sparse gradients, so "
            "the cost of a step is not "
            "known. Give the plan explicitly, for instance plan='ddp'"
        )


def _state_shapes(copy: _Steps) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Shape and bytes per element of every tensor that the first step makes and keeps."""
    before = {id(leaf) for leaf in copy.kept()}
    copy.step()
    leaves = {id(leaf): leaf for leaf in copy.kept() if id(leaf) not in before}
    return tuple((tuple(leaf.shape), leaf.element_size()) for leaf in leaves.values())


def lbfgs_probe(group: Mapping[str, Any], ndim: int, dtype: torch.dtype) -> Probe:
    """Return what one step of LBFGS with the options of `group` does, by formula: the step runs the
    model as it likes.
    """
    # torch.optim.LBFGS, once its history is full: `old_dirs` and `old_stps` of history_size vectors
    # each, `d`, `prev_flat_grad`; an inner iteration reads the history twice; flat copies of
    # gradients and direction come and go.
    vectors, itemsize = 2 * group["history_size"] + 2, torch.empty(0, dtype=dtype).element_size()
    dims = _PRIMES[:ndim]
    moved = 2 * vectors * itemsize * group["max_iter"]
    return Probe(
        dims, ((dims, itemsize),) * vectors, moved, 4.0 * group["max_iter"], 3.0 * itemsize, True
    )


def _copy(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    *,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device_type: str,
    device: torch.device | None = None,
) -> _Steps:
    """Return `optimizer` over fresh parameters of `shapes` with the options of `group`, not yet
    stepped.
    """
    device = device or torch.device("cpu")
    try:
        parameters = [nn.Parameter(_random(shape, dtype, device)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = _random(parameter.shape, dtype, device)
    except RuntimeError as error:
        raise OptimizerError(
            f"a trial step of {type(optimizer).__name__} on parameters of {dtype} is not possible: "
            f"{error}. Give the plan "
            "explicitly, for instance plan='ddp'"
        ) from error
    copy = OptimizerCopy(optimizer, group, parameters=parameters)
    for options in copy.optimizer.param_groups:
        if options.get("capturable"):
            # needs an accelerator; changes where `step` lives, not what is kept
            options["capturable"] = False
        if (
            device_type != "cpu"
            and "foreach" in options
            and options["foreach"] is None
            and not options.get("fused")
        ):
            options["foreach"] = True  # torch's default there
    return _Steps(copy)


def _random(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    drawn = dtype if dtype.is_complex else torch.float32
    generator = torch.Generator(device).manual_seed(_SEED)
    return torch.rand(tuple(shape), dtype=drawn, device=device, generator=generator).to(dtype)


class _Steps:
    """A copied optimizer whose failures name it."""

    def __init__(self, copy: OptimizerCopy) -> None:
        self.optimizer, self.states = copy.optimizer, copy.states

    def kept(self) -> list[Tensor]:
        """Return the tensors of the states, and those that the optimizer has beside them."""
        own = [
            value
            for name, value in vars(self.optimizer).items()
            if name not in ("state", "param_groups")
        ]
        leaves = tree_leaves([*map(dict, self.states), own])
        return [
            leaf
            for leaf in leaves
            if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)
        ]

    def step(self) -> None:
        try:
            with no_global_hooks():
                self.optimizer.step()
        except Exception as error:
            raise OptimizerError(
                f"a trial step of {type(self.optimizer).__name__} failed, so its memory is not "
                f"known: {error}. Give "
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
    """Return a call that steps a copy of `optimizer`, its state made, on a tensor of about `numel`
    elements in 1 or 2 dims.

    Raises OptimizerError when the step fails.
    """
    shape = (math.isqrt(numel), numel // math.isqrt(numel)) if ndim == 2 else (numel,)
    _check_can_be_tried(optimizer, ndim=ndim)
    copy = _copy(
        optimizer, group, shapes=[shape], dtype=dtype, device_type=device.type, device=device
    )
    copy.step()
    return copy.step


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
