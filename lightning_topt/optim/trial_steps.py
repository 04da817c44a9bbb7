"""Steps of a copy of the user's optimizer on small tensors, to see what one parameter's update
depends on.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_topt.optim.counters import Counters

_MAX_DIM = 160  # thresholds on sizes (Adafactor's "factor from 128 on") are usually below
_MAX_KERNEL_DIM = 3  # dims after the second
_MAX_GROUPS = 8
_MIN_STEPS, _MAX_STEPS = 4, 50
# of trial parameters: small, so that rounding of the parameter hides little of its change
_SCALE = 0.1
# two results are the same within this part of the change, and this many roundings
_RELATIVE, _ULPS = 1e-3, 8.0
_SEED = 20101
_CURVATURE = 1e3  # of the loss of a trial: large, so that gradients show how far a step moved
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"})


class TrialError(ValueError):
    """The copy could not be made or stepped."""


class CollectiveInStep(TrialError):
    """The step communicates with other ranks; nothing was sent."""


@dataclass(frozen=True)
class Sketch:
    """A `Sketch` says what is tried: the options of each group and the shapes of a few of its
    parameters; and for how many steps.
    """

    options: tuple[dict[str, Any], ...]
    shapes: tuple[tuple[torch.Size, ...], ...]
    device: torch.device
    num_steps: int

    @property
    def groups_of(self) -> list[int]:
        """The group of each trial parameter."""
        return [group for group, shapes in enumerate(self.shapes) for _ in shapes]


@dataclass(frozen=True)
class Outcome:
    """After the last step: each tried parameter, its state, what the optimizer keeps per group, and
    for all of them.

    `closure_calls`: how often one call asked its closure, at most. `moves_first`: parameters had
    changed when it did.
    """

    parameters: dict[int, Tensor]
    states: dict[int, dict[str, Any]]
    groups: list[dict[str, Any]]
    shared: dict[str, Any]
    closure_calls: int = 0
    moves_first: bool = False


# the rows of a tensor shaped like a trial parameter that are tried
Select = Callable[[Tensor], Tensor]


def make_sketch(optimizer: Optimizer) -> Sketch:
    """Return two parameters of each number of dims in each group (of more than eight, eight
    different ones), in their real shapes up to a size, and as many steps as the largest integer
    option (below 50) plus one: methods that start or refresh something every so many steps have
    that number among their options.
    """
    groups = optimizer.param_groups
    if len(groups) > _MAX_GROUPS:
        groups = list(
            {
                repr(_options_of(group, without=("lr", "initial_lr"))): group for group in groups
            }.values()
        )
    groups = groups[:_MAX_GROUPS]
    options = [_options_of(group) for group in groups]
    # larger ones are sizes
    numbers = [v for o in options for v in o.values() if type(v) is int and v < _MAX_STEPS]
    device = next((p.device for group in groups for p in group["params"]), torch.device("cpu"))
    return Sketch(
        options=tuple({**o, **_nonzero_rate(o)} for o in options),
        shapes=tuple(_trial_shapes(group["params"]) for group in groups),
        device=torch.device("cpu") if device.type == "meta" else device,
        num_steps=max(_MIN_STEPS, 1 + max(numbers, default=0)),
    )


def _options_of(group: Mapping[str, Any], *, without: Sequence[str] = ()) -> dict[str, Any]:
    return {
        key: value for key, value in group.items() if key not in ("params", "param_names", *without)
    }


def _nonzero_rate(options: Mapping[str, Any]) -> dict[str, float]:
    """The learning rate before any warm-up, as a number: a rate of 0 would show nothing."""
    if "lr" not in options:
        return {}
    rates = [float(options[key]) for key in ("initial_lr", "lr") if options.get(key) is not None]
    return {"lr": next((rate for rate in rates if rate > 0), 1e-2)}


def _trial_shapes(parameters: Sequence[Tensor]) -> tuple[torch.Size, ...]:
    by_dims: dict[int, list[torch.Size]] = defaultdict(list)
    for parameter in parameters:
        limits = (_MAX_DIM, _MAX_DIM, *[_MAX_KERNEL_DIM] * parameter.dim())
        by_dims[parameter.dim()].append(
            torch.Size(min(d, m) for d, m in zip(parameter.shape, limits, strict=False))
        )
    return tuple(
        shape for shapes in by_dims.values() for shape in (max(shapes, key=_numel), shapes[-1])
    )


def _numel(shape: torch.Size) -> int:
    return shape.numel()


def run_trial(
    optimizer: Optimizer,
    sketch: Sketch,
    *,
    chosen: Sequence[int] | None = None,
    select: Select | None = None,
    calls: Sequence[Sequence[int]] | None = None,
) -> Outcome:
    """Step a copy of `optimizer` over the `chosen` trial parameters (all), or over `select`-ed rows
    of them.

    `calls`: instead of one call per step, one for each of these sets of parameters, all from the
    same `Counters`. A step that takes a closure gets one (`_Closure`). The user's optimizer, its
    parameters and the random generators stay as they are. Raises TrialError when the copy cannot be
    made or stepped, CollectiveInStep where it communicates.
    """
    devices = [sketch.device] if sketch.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        torch.manual_seed(_SEED)  # for methods that draw numbers
        whole = initial_parameters(sketch)
        chosen = range(len(whole)) if chosen is None else chosen
        select = select or (lambda tensor: tensor)
        parameters = {i: nn.Parameter(select(whole[i]).clone()) for i in chosen}
        clone, asked = _copy(optimizer, sketch, parameters), 0
        moves_first = False
        for number in range(1, sketch.num_steps + 1):
            gradients, counters = _draw(sketch, number), Counters(clone)
            for call in calls or [chosen]:
                counters.restore()
                present = {i: parameters[i] for i in call}
                _set_parameters(clone, sketch, present)
                closure = _Closure(
                    [(p, select(gradients[i]).clone()) for i, p in present.items()],
                    device=sketch.device,
                )
                closure()
                _step(clone, closure)
                asked, moves_first = (
                    max(asked, closure.calls - 1),
                    moves_first or closure.found_moved,
                )
        _set_parameters(clone, sketch, parameters)
        groups = [_options_of(group) for group in clone.param_groups]
        states = {i: dict(clone.state.get(parameter, {})) for i, parameter in parameters.items()}
        tried = {i: p.detach() for i, p in parameters.items()}
        return Outcome(
            tried, states, groups, _shared(clone), closure_calls=asked, moves_first=moves_first
        )


def _shared(clone: Optimizer) -> dict[str, Any]:
    state = {str(key): value for key, value in clone.state.items() if not isinstance(key, Tensor)}
    return {
        **state,
        **{key: value for key, value in vars(clone).items() if type(value) in (int, float)},
    }


def initial_parameters(sketch: Sketch) -> list[Tensor]:
    """Return the trial parameters before the first step."""
    return [_SCALE * tensor for tensor in _draw(sketch, 0)]


def _draw(sketch: Sketch, number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(_SEED + number)
    shapes = [shape for group in sketch.shapes for shape in group]
    return [torch.randn(shape, generator=generator).to(sketch.device) for shape in shapes]


def _copy(
    optimizer: Optimizer, sketch: Sketch, parameters: Mapping[int, nn.Parameter]
) -> Optimizer:
    clone: Optimizer = type(optimizer).__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): clone}
    # Methods on the instance are a scheduler's or a wrapper's; hooks belong to the real run.
    hooks = {name for name in vars(optimizer) if name.endswith("_hooks")}
    methods = {
        name
        for name, value in vars(optimizer).items()
        if callable(value) and hasattr(type(optimizer), name)
    }
    left_out = {"state", "param_groups", "consolidate_state_dict", *hooks, *methods}
    try:
        kept = {k: copy.deepcopy(v, memo) for k, v in vars(optimizer).items() if k not in left_out}
        options = [copy.deepcopy(options, memo) for options in sketch.options]
        vars(clone).update(kept, **{name: OrderedDict() for name in hooks})
        clone.state = defaultdict(dict)
        clone.param_groups = [{**group, "params": []} for group in options]
    except Exception as error:
        raise TrialError(f"it cannot be copied for a trial ({error})") from error
    _set_parameters(clone, sketch, parameters)
    return clone


def _set_parameters(
    clone: Optimizer, sketch: Sketch, parameters: Mapping[int, nn.Parameter]
) -> None:
    for number, group in enumerate(clone.param_groups):
        group["params"] = [
            parameters[i] for i, g in enumerate(sketch.groups_of) if g == number and i in parameters
        ]


class _Closure:
    """Returns a loss, with `gradients` that follow parameters where a step moves these in between,
    and counts its `calls`.

    `found_moved`: parameters had changed at the second of them, the first by the step; the trial
    makes one itself.
    """

    def __init__(
        self, gradients: Sequence[tuple[nn.Parameter, Tensor]], *, device: torch.device
    ) -> None:
        self.calls, self.found_moved, self._device = 0, False, device
        self._given = [(p, p.detach().clone(), gradient) for p, gradient in gradients]

    def __call__(self) -> Tensor:
        self.calls += 1
        for parameter, before, gradient in self._given:
            moved = parameter.detach() - before
            self.found_moved |= self.calls == 2 and bool(moved.any())
            parameter.grad = gradient + _CURVATURE * moved
        return torch.ones((), device=self._device)


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Ranks may be in other trials, or in none: a collective call would wait for them."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _COLLECTIVES:
            raise CollectiveInStep(f"its step calls {func}")
        return func(*args, **(kwargs or {}))


def _step(clone: Optimizer, closure: _Closure) -> None:
    takes_closure = "closure" in inspect.signature(type(clone).step).parameters
    try:
        with _NoCollectives():  # type: ignore[no-untyped-call]
            clone.step(closure) if takes_closure else clone.step()  # type: ignore[arg-type]
    except CollectiveInStep:
        raise
    except Exception as error:
        raise TrialError(f"a trial step failed ({type(error).__name__}: {error})") from error


def same(value: Any, twin: Any, *, change: float | None = None) -> bool:
    """Return whether two results are equal to rounding; `change`: how far the parameter has moved
    (else the value's own size).
    """
    if not isinstance(value, Tensor) or not isinstance(twin, Tensor):
        if isinstance(value, float) and isinstance(twin, float):
            return abs(value - twin) <= 1e-6 * max(abs(value), abs(twin)) or value != value
        return _same_structure(value, twin)
    if value.shape != twin.shape or value.dtype != twin.dtype:
        return False
    if torch.equal(value, twin) or not value.numel():
        return True
    if not value.is_floating_point():
        return False
    value, twin = value.double(), twin.double()
    largest = float(value.abs().max())
    allowed = (
        _RELATIVE * (largest if change is None else change)
        + _ULPS * torch.finfo(torch.float32).eps * largest
    )
    return bool((value - twin).abs().max() <= allowed)


def _same_structure(value: Any, twin: Any) -> bool:
    if type(value) is not type(twin):
        return False
    if isinstance(value, Mapping):
        return value.keys() == twin.keys() and all(same(v, twin[k]) for k, v in value.items())
    if isinstance(value, list | tuple):
        return len(value) == len(twin) and all(map(same, value, twin))
    # Of other objects every trial makes its own: not held against it, since what they do shows in
    # the parameters.
    return type(value).__module__ != "builtins" or bool(value == twin)
