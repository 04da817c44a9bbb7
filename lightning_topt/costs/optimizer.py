"""Profiles of the user's optimizers: what they keep, move and allocate per parameter.

    profile = read_optimizer([optimizer], named_parameters=module.named_parameters())
    profile.state_bytes("layers.0.weight")
    times = time_updates([optimizer], named_parameters=..., device=device)

Nothing is looked up in a table of optimizers: a copy of the same optimizer object, over small real
tensors, is stepped and watched: its state, traffic, operator calls, temporaries. So every option
(fused, foreach, momentum, amsgrad, several groups) counts as it is. Only whether the update treats
elements one by one cannot be seen from outside; see `optim.update_rule`.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_topt.basics.core_wait import CoreWait
from lightning_topt.costs.cluster import Device
from lightning_topt.costs.measuring import kept_global_state, time_kernel
from lightning_topt.graph.kernels import is_collective, skip_collective
from lightning_topt.optim.shard_step import count_exchanges
from lightning_topt.optim.update_rule import (
    BY_PARAMETER,
    ELEMENTWISE,
    collective_in_step,
    copied_apart,
    empty_states,
    enter_numbers,
    is_one_of,
)

# Options of Adam and its kin, Adafactor, Adagrad, Adadelta, RMSprop.
_ADAPTIVE = {"betas", "beta2_decay", "initial_accumulator_value", "rho", "centered"}
# Distinct, so that a dim of a state tensor tells which dim of the parameter it follows (torch's
# limit is 64 dims).
_PRIMES = tuple(n for n in range(5, 320) if all(n % d for d in range(2, math.isqrt(n) + 1)))
_PROBE_NUMEL, _PROBE_COUNT = 4096, 4
_MAX_DIMS = 6  # of a parameter; the product of seven primes is too many elements for a trial
_SEED = 20131
_WAY_OUT = "Give the plan explicitly, for instance plan='ddp'"
_LEFT_OUT = ("params", "param_names", "consolidate_state_dict")
# elements of an update that is timed; memory of a step in tensors of as many elements, with room
_MAX_NUMEL, _TENSORS = {"cpu": 1 << 22, "cuda": 1 << 27}, 16


class OptimizerError(ValueError):
    """An optimizer that cannot be profiled, with the reason."""


@dataclass(frozen=True)
class OptimizerProfile:
    """All optimizers of a module together.

    Attributes:
        name: of all of them.
        elementwise: slices of parameters may be updated by different ranks (ZeRO 2 and 3 are
            exact).
        by_parameter: whole parameters may (ZeRO 1).
        updates: by the name of each trained parameter.
        seconds_per_element: measurements by parameter name, if there are any
            (`time_updates`).
        probes: what trial steps have shown, by the name of each trained parameter.
        adaptive: one of them divides by running means of squares, as Adam does.
        whole: parameters that ranks do not cut for their update, by name: how often the shards of
            one travel to or from its owner in a step. 0: no rank owns it, all step on their shards.
    """

    name: str
    elementwise: bool
    by_parameter: bool
    updates: Mapping[str, ParameterUpdate]
    seconds_per_element: Mapping[str, float] = field(default_factory=dict)
    probes: Mapping[str, Probe] = field(default_factory=dict, compare=False)
    adaptive: bool = False
    whole: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def kinds(self) -> dict[str, int]:
        """A number for each parameter by name, equal where updates are.

        Those that are not here have none.
        """
        numbers: dict[tuple[object, ...], int] = {}
        every = self.updates, self.seconds_per_element, self.whole
        keys = {name: tuple(of.get(name) for of in every) for of in every for name in of}
        return {name: numbers.setdefault(key, len(numbers)) for name, key in keys.items()}

    @cached_property
    def owned(self) -> frozenset[str]:
        """Names of the parameters that have owners where they are in shards."""
        return frozenset(name for name, count in self.whole.items() if count)

    def state_bytes_of(self, name: str, shape: Sequence[int]) -> int:
        """Return the bytes of the state of a part of parameter `name`; 0 without updates.

        The part has `shape`, with as many dims as the parameter.
        """
        if name not in self.probes:
            return self.state_bytes(name)  # of a frozen parameter, as it is
        return self.probes[name].state_bytes(shape)

    def of_slices(self, shares: Mapping[str, float]) -> OptimizerProfile:
        """Return the profile of an optimizer over slices of parameters.

        `shares` of the full ones, by name.
        """
        known: dict[tuple[ParameterUpdate, float], ParameterUpdate] = {}
        updates = {}
        for name, update in self.updates.items():
            share = shares.get(name, 1.0)
            key = update, share
            if key not in known:
                known[key] = replace(
                    update,
                    state_bytes=round(update.state_bytes * share),
                    moved_bytes=update.moved_bytes * share,
                    temporary_bytes=update.temporary_bytes * share,
                )
            updates[name] = known[key]
        return replace(self, updates=updates)

    def state_bytes(self, name: str) -> int:
        """Return the bytes of the state of parameter `name`; 0 where no optimizer updates it."""
        update = self.updates.get(name)
        return 0 if update is None else update.state_bytes

    def moved_bytes(self, name: str) -> float:
        """Return the bytes that an update of parameter `name` reads and writes; 0 without one."""
        update = self.updates.get(name)
        return 0.0 if update is None else update.moved_bytes

    def update_seconds(self, name: str, *, numel: int, device: Device, share: float = 1.0) -> float:
        """Return the seconds to update the given share of parameter `name`.

        It has `numel` elements in all. As measured, else bytes moved over bandwidth; 0 for a
        parameter that no optimizer updates.
        """
        update = self.updates.get(name)
        if update is None:
            return 0.0
        measured = self.seconds_per_element.get(name)
        streaming = (
            update.moved_bytes / device.memory_bandwidth if measured is None else measured * numel
        )
        return streaming * share + update.calls * device.op_overhead_seconds


@kept_global_state()
def read_optimizer(
    optimizers: Iterable[Optimizer],
    *,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    device_type: str = "cpu",
) -> OptimizerProfile:
    """Profile optimizers that were built over `named_parameters`.

    Fake tensors will do: only shapes are read. Optimizers, their state and parameters and all
    random generators stay as they are; what their steps change elsewhere stays. `device_type` is
    where they will run; it decides torch's default between the for-loop and the foreach step.

    Raises:
        OptimizerError: for a parameter that is not among `named_parameters`, and for an optimizer
            that cannot be tried on a copy.
    """
    optimizers = list(optimizers)
    updates: dict[str, ParameterUpdate] = {}
    probes: dict[Any, Probe] = {}
    by_name: dict[str, Probe] = {}
    whole: dict[str, int] = {}
    exchanges = {id(optimizer): exchanges_of_whole(optimizer) for optimizer in optimizers}
    for optimizer, group, parameter, name in updated_parameters(optimizers, named_parameters):
        if not parameter.requires_grad:
            continue
        # one trial for all parameters that a step treats alike
        key = (id(optimizer), options_key(group), parameter.ndim, parameter.dtype)
        if key not in probes:
            ndim, dtype = parameter.ndim, parameter.dtype
            probes[key] = probe_group(
                optimizer, group, ndim=ndim, dtype=dtype, device_type=device_type
            )
        updates[name] = probes[key].update(parameter)
        by_name[name] = probes[key]
        if (count := exchanges[id(optimizer)]) is not None:
            whole[name] = count
    return OptimizerProfile(
        name=" + ".join(type(optimizer).__name__ for optimizer in optimizers),
        elementwise=all(is_one_of(optimizer, ELEMENTWISE) for optimizer in optimizers),
        by_parameter=all(is_one_of(optimizer, BY_PARAMETER) for optimizer in optimizers),
        updates=updates,
        probes=by_name,
        adaptive=any(map(is_adaptive, optimizers)),
        whole=whole,
    )


def exchanges_of_whole(optimizer: Optimizer) -> int | None:
    """Return the entry in `OptimizerProfile.whole` of an optimizer's parameters; None: none.

    Rules that are not known are tried. The optimizer stays as it is.
    """
    if is_one_of(optimizer, ELEMENTWISE):
        return None
    with kept_global_state(), _no_global_hooks():
        return count_exchanges(optimizer)


def is_adaptive(optimizer: Optimizer) -> bool:
    """Return whether the optimizer divides by running means of squares, as Adam does.

    Known by the options of its groups.
    """
    return any(not _ADAPTIVE.isdisjoint(group) for group in optimizer.param_groups)


# ---- Seconds of updates, timed on copies


@dataclass(frozen=True)
class UpdateTime:
    """Seconds per element of the updates of the parameters `names`; `key` as in `UpdateKind`.

    `waited` is the share of its measuring that had no core; None: it was known.
    """

    key: str
    names: tuple[str, ...]
    seconds: float
    waited: float | None = None


def time_updates(
    optimizers: Iterable[Optimizer],
    *,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    device: torch.device,
    known: Callable[[str], float | None] = lambda _: None,
    budget_seconds: float = 0.5,
) -> list[UpdateTime]:
    """Return what updates take: as `known` by the keys of their kinds, else as measured now.

    Every kind of update (`update_kinds`) that is not known is timed, in about `budget_seconds` in
    all (but at least five steps per kind), on copies: optimizers, parameters and random generators
    stay as they are. Raises OptimizerError as `read_optimizer` does.
    """
    kinds = update_kinds(optimizers, named_parameters=named_parameters, device_type=device.type)
    found = [known(kind.key) if kind.key else None for kind in kinds]
    budget = budget_seconds / max(found.count(None), 1)
    times = []
    for kind, seconds in zip(kinds, found, strict=True):
        if seconds is not None:
            times.append(UpdateTime(kind.key, kind.names, seconds))
            continue
        watch = CoreWait(threads=torch.get_num_threads())
        value = measure_kind(kind, device=device, budget_seconds=budget)
        times.append(UpdateTime(kind.key, kind.names, value, watch.share()))
    return times


def update_kinds(
    optimizers: Iterable[Optimizer],
    *,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    device_type: str = "cpu",
) -> list[UpdateKind]:
    """Sort the trained parameters into kinds.

    `numel` is that of a kind's largest parameter, at most 4 M (128 M on CUDA). On CUDA, which
    updates many small parameters at once, it is that of all vectors of a kind together, and of all
    parameters where the optimizer's kernels take lists of them: one parameter of 2 M elements keeps
    a third of an H100 busy. Left out are those of LBFGS, whose step runs the model several times,
    and those of optimizers that communicate in their step: ranks measure for a time, and may do so
    with different numbers of steps. Raises OptimizerError
    as `read_optimizer` does.
    """
    optimizers = list(optimizers)
    most = _MAX_NUMEL["cuda" if device_type == "cuda" else "cpu"]
    untimed = {
        id(each) for each in optimizers if isinstance(each, optim.LBFGS) or _communicates(each)
    }
    by_kind: dict[Any, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    first: dict[Any, tuple[Optimizer, Mapping[str, Any]]] = {}
    for optimizer, group, parameter, name in updated_parameters(optimizers, named_parameters):
        if parameter.requires_grad and id(optimizer) not in untimed:
            ndim = min(parameter.ndim, 2)
            if device_type == "cuda" and _updates_all_at_once(optimizer, group):
                ndim = 1
            key = (id(optimizer), options_key(group), ndim, parameter.dtype)
            by_kind[key].append((name, parameter))
            first.setdefault(key, (optimizer, group))
    kinds = []
    for key, named in by_kind.items():
        (optimizer, group), (_, options, ndim, dtype) = first[key], key
        sizes = [parameter.numel() for _, parameter in named]
        # one launch updates many small parameters there
        together = device_type == "cuda" and ndim <= 1
        numel = max(1, min(most, sum(sizes) if together else max(sizes)))
        code = code_key(type(optimizer))
        text = json.dumps([code, options, ndim, str(dtype), numel]) if code else ""
        kinds.append(
            UpdateKind(text, optimizer, group, ndim, dtype, numel, tuple(name for name, _ in named))
        )
    return kinds


def _updates_all_at_once(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    # Whether kernels take lists of parameters, whose shapes make no difference
    if isinstance(optimizer, optim.Adafactor):  # rows and columns of matrices
        return False
    return bool(group.get("fused")) or group.get("foreach", False) is not False


@kept_global_state()
def measure_kind(kind: UpdateKind, *, device: torch.device, budget_seconds: float) -> float:
    """Return the seconds per element of the update of `kind`.

    Timed on a copy in about `budget_seconds`, but in at least five steps. Raises OptimizerError
    when its step fails.
    """
    ndim, dtype, numel = kind.ndim, kind.dtype, kind.numel
    if device.type == "cuda":
        # no more than the free memory takes, with gradient, state and temporaries
        numel = min(numel, torch.cuda.mem_get_info(device)[0] // (_TENSORS * dtype.itemsize))
    step = make_step(kind.optimizer, kind.group, ndim=ndim, dtype=dtype, device=device, numel=numel)
    return time_kernel(step, device=device, budget_seconds=budget_seconds) / numel


@dataclass(frozen=True)
class UpdateKind:
    """Parameters, by `names`, whose updates cost the same per element.

    One measurement stands for all of them, taken with the options of `group` on a parameter of
    `numel` elements. `key` names the kind in any process: it is made of the optimizer's class and
    code, the options and `numel`; empty where the code is in no file.
    """

    key: str
    optimizer: Optimizer
    group: Mapping[str, Any]
    ndim: int
    dtype: torch.dtype
    numel: int
    names: tuple[str, ...]


@kept_global_state()
def _communicates(optimizer: Optimizer) -> bool:
    with _no_global_hooks():
        return collective_in_step(optimizer) is not None


# ---- Parameters and what their updates have in common


def updated_parameters(
    optimizers: Iterable[Optimizer], named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> Iterator[tuple[Optimizer, Mapping[str, Any], nn.Parameter, str]]:
    """Yield every parameter of every group with its name.

    Raises OptimizerError for one that has none, or no shape yet.
    """
    names = {parameter: name for name, parameter in named_parameters}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, UninitializedParameter):
                    raise OptimizerError(
                        f"{type(optimizer).__name__} updates a parameter of a lazy module that has "
                        "no shape yet; run the module once on a batch before training"
                    )
                if parameter not in names:
                    raise OptimizerError(
                        f"{type(optimizer).__name__} updates a parameter of shape "
                        f"{tuple(parameter.shape)} that is not a parameter of the module; build "
                        "optimizers from module.parameters()"
                    )
                yield optimizer, group, parameter, names[parameter]


def options_key(group: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the options of a group as far as they decide what a step costs.

    Of rates, whether they are zero.
    """
    options = (
        (name, value)
        for name, value in group.items()
        if name not in ("params", "param_names", "initial_lr")
    )
    return tuple(sorted((str(name), _option_key(value)) for name, value in options))


def _option_key(value: Any) -> str:
    if isinstance(value, bool | int | str | None):
        return repr(value)
    if isinstance(value, float):
        return "a number" if value else "zero"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_option_key, value))}]"
    return type(value).__name__


def code_key(cls: type) -> str:
    """Return a text that changes when the file in which `cls` is defined does.

    Empty where there is no such file.
    """
    for base in cls.__mro__:
        if base.__module__ == "builtins":
            break
        # a class of the user's program has no name that other processes share
        if base.__module__ == "__main__":
            return ""  # may be any program, or a notebook
    try:
        status = Path(inspect.getfile(cls)).stat()
    except (TypeError, OSError):
        return ""
    return f"{cls.__module__}.{cls.__qualname__} {status.st_size} {status.st_mtime_ns}"


# ---- Trial steps that are watched


@dataclass(frozen=True)
class ParameterUpdate:
    """The optimizer's share of one parameter.

    Attributes:
        state_bytes: of its state.
        moved_bytes: read and written in a step.
        calls: of operators in a step.
        temporary_bytes: of temporaries.
        temporaries_add: temporaries of different parameters are alive together (foreach).
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
    # (shape, bytes per element) of each state tensor
    states: tuple[tuple[tuple[int, ...], float], ...]
    moved_bytes: float  # per element of the parameter
    calls: float
    temporaries: float  # in bytes per element
    temporaries_add: bool

    def state_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of the state of a parameter of `shape`, with as many dims."""
        # dims of the probe are distinct primes: each names the real dim that it stands for
        real = dict(zip(self.dims, shape, strict=True))
        return round(
            sum(
                math.prod(real.get(dim, dim) for dim in dims) * itemsize
                for dims, itemsize in self.states
            )
        )

    def update(self, parameter: Tensor) -> ParameterUpdate:
        """Return what the step does to `parameter`, of the probe's number of dims and dtype."""
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
    """Step copies of `optimizer` with the options of `group` and watch.

    The optimizer stays as it is. Raises OptimizerError when the step fails, needs a closure or
    sparse gradients, or cannot be tried on a copy.
    """
    if isinstance(optimizer, optim.LBFGS):
        return lbfgs_probe(group, ndim, dtype)
    _check_can_be_tried(optimizer, ndim=ndim)
    # where it trains, if that is here: some optimizers run on CUDA only
    device = torch.device("cpu")
    if device_type == "cuda" and torch.cuda.is_available():
        device = torch.device("cuda")
    copied = partial(
        _TrialCopy, optimizer, group, dtype=dtype, device_type=device_type, device=device
    )
    dims = _PRIMES[:ndim]
    # the first step on a parameter of distinct dims shows the shapes of its state
    with _SkippedCollectives():  # type: ignore[no-untyped-call]
        states = copied(shapes=[dims]).first_states()
    shape = (64, _PROBE_NUMEL // 64) if ndim >= 2 else (_PROBE_NUMEL,)
    # the second step on one and on several parameters shows traffic, calls and temporaries
    watched = []
    for count in (1, _PROBE_COUNT):
        trial = copied(shapes=[shape] * count)
        with _SkippedCollectives():  # type: ignore[no-untyped-call]
            trial.step()
            with _KernelCounter() as watch:
                trial.step()
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


def lbfgs_probe(group: Mapping[str, Any], ndim: int, dtype: torch.dtype) -> Probe:
    """Return what one step of LBFGS does, by formula: the step runs the model as it likes."""
    # torch.optim.LBFGS, once its history is full: `old_dirs` and `old_stps` of history_size vectors
    # each, `d`, `prev_flat_grad`; an inner iteration reads the history twice; flat copies of
    # gradients and direction come and go.
    vectors, itemsize = 2 * group["history_size"] + 2, torch.empty(0, dtype=dtype).element_size()
    dims = _PRIMES[:ndim]
    moved = 2 * vectors * itemsize * group["max_iter"]
    return Probe(
        dims, ((dims, itemsize),) * vectors, moved, 4.0 * group["max_iter"], 3.0 * itemsize, True
    )


def make_step(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    *,
    ndim: int,
    dtype: torch.dtype,
    device: torch.device,
    numel: int,
) -> Callable[[], None]:
    """Return a call that steps a copy of `optimizer`, its state made.

    On a tensor of about `numel` elements in 1 or 2 dims. Raises OptimizerError when the step fails.
    """
    shape = (math.isqrt(numel), numel // math.isqrt(numel)) if ndim == 2 else (numel,)
    _check_can_be_tried(optimizer, ndim=ndim)
    trial = _TrialCopy(
        optimizer, group, shapes=[shape], dtype=dtype, device_type=device.type, device=device
    )
    trial.step()
    return trial.step


def _check_can_be_tried(optimizer: Optimizer, *, ndim: int) -> None:
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise OptimizerError(
            f"the step of {name} needs a closure: it runs the model itself, as often as it wants, "
            f"so the cost of a step is not known. {_WAY_OUT}"
        )
    if isinstance(optimizer, optim.SparseAdam):
        raise OptimizerError(
            f"{name} updates the rows of one batch from sparse gradients, so the cost of a step is "
            f"not known. {_WAY_OUT}"
        )
    if ndim > _MAX_DIMS:
        raise OptimizerError(
            f"{name} updates a parameter of {ndim} dims; trial steps are made with at most "
            f"{_MAX_DIMS}. {_WAY_OUT}"
        )


class _TrialCopy:
    """A copy of `optimizer` over fresh parameters of `shapes`, with the options of `group`.

    Stepping it cannot reach the original: what that refers to is copied too, its state is empty.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: Mapping[str, Any],
        *,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device_type: str,
        device: torch.device,
    ) -> None:
        self._name = type(optimizer).__name__
        self.states: list[Any] = []  # of it and of all optimizers that it wraps
        try:
            parameters = [nn.Parameter(_random(shape, dtype, device)) for shape in shapes]
            self._gradients = [(p, _random(p.shape, dtype, device)) for p in parameters]
            # parameters of other groups stay out of the trial; a rate in a tensor may have no value
            groups, outside = optimizer.param_groups, nn.Parameter(torch.zeros(1), False)
            memo = _Memo({id(p): outside for every in groups for p in every["params"]})
            memo |= {id(p): new for p, new in zip(group["params"], parameters, strict=False)}
            values = [
                v for every in (*groups, getattr(optimizer, "defaults", {})) for v in every.values()
            ]
            memo |= {id(value): 0.5 for value in values if isinstance(value, Tensor)}
            options = {
                name: copy.deepcopy(value, memo)
                for name, value in group.items()
                if name not in _LEFT_OUT
            }
            if options.get("capturable") and device.type == "cpu":
                # needs an accelerator; changes where `step` lives, not what is kept
                options["capturable"] = False
            if device_type != "cpu" and options.get("foreach", 0) is None:
                options["foreach"] = None if options.get("fused") else True  # torch's default
            memo[id(groups)] = [{**options, "params": parameters}]
            self.optimizer: Any = self._copied(optimizer, memo)
        except Exception as error:
            raise OptimizerError(
                f"{self._name} cannot be copied for a trial step on parameters of {dtype}, so what "
                f"it needs is not known: {error}. {_WAY_OUT}"
            ) from error
        self._ask_for_gradients()
        # some of those that nobody knows ask for the gradients again
        is_known = is_one_of(self.optimizer, BY_PARAMETER)
        takes_closure = "closure" in inspect.signature(type(self.optimizer).step).parameters
        asks = takes_closure and not is_known
        self._closure = {"closure": self._ask_for_gradients} if asks else {}

    def _copied(self, original: Any, memo: _Memo) -> Any:
        kind: Any = type(original)
        made = memo[id(original)] = kind.__new__(kind)
        enter_numbers([value for name, value in vars(original).items() if name != "state"], memo)
        for name, value in vars(original).items():
            # methods on the instance are a scheduler's or a wrapper's; hooks are of the real run
            if name.endswith("_hooks"):
                vars(made)[name] = OrderedDict()
            elif name == "state":
                if id(value) not in memo:  # wrappers share the state of what they wrap
                    memo[id(value)] = empty_states(made)
                    self.states.append(memo[id(value)])
                vars(made)[name] = memo[id(value)]
            elif isinstance(value, Optimizer):
                vars(made)[name] = memo.get(id(value)) or self._copied(value, memo)
            elif not (callable(value) and hasattr(type(original), name)) and name not in _LEFT_OUT:
                vars(made)[name] = copied_apart(value, memo)
        return made

    def _ask_for_gradients(self) -> Tensor:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return torch.ones(())

    def kept(self) -> list[Tensor]:
        """Return the tensors of the states, and those that the optimizer has beside them."""
        beside = [
            value
            for name, value in vars(self.optimizer).items()
            if name not in ("state", "param_groups")
        ]
        leaves = tree_leaves([*map(dict, self.states), beside])
        return [
            leaf
            for leaf in leaves
            if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)
        ]

    def first_states(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Take the first step; return shape and bytes per element of what it makes and keeps."""
        # some optimizers make state when they are built: only new tensors are counted
        before = {id(leaf) for leaf in self.kept()}
        self.step()
        leaves = {id(leaf): leaf for leaf in self.kept() if id(leaf) not in before}
        return tuple((tuple(leaf.shape), leaf.element_size()) for leaf in leaves.values())

    def step(self) -> None:
        """Take a step, without the hooks of the real run."""
        try:
            with _no_global_hooks():
                self.optimizer.step(**self._closure)
        except Exception as error:
            raise OptimizerError(
                f"a trial step of {self._name} failed, so its memory is not known: {error}. "
                f"{_WAY_OUT}"
            ) from error


class _Memo(dict[int, Any]):
    # of `copy.deepcopy`, which enters a copy before it fills it: modules are not copied
    def __setitem__(self, key: int, value: Any) -> None:
        if isinstance(value, nn.Module):
            raise ValueError(f"it refers to a module, {type(value).__name__}")
        super().__setitem__(key, value)


@contextmanager
def _no_global_hooks() -> Iterator[None]:
    # hooks on the steps of all optimizers belong to the real run
    registries: tuple[Any, ...] = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    hooks_before = [dict(hooks) for hooks in registries]
    for hooks in registries:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(registries, hooks_before, strict=True):
            hooks.update(before)


def _random(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    drawn = dtype if dtype.is_complex else torch.float32
    generator = torch.Generator(device).manual_seed(_SEED)
    return torch.rand(tuple(shape), dtype=drawn, device=device, generator=generator).to(dtype)


class _SkippedCollectives(TorchDispatchMode):
    """Lets the step of one rank alone send nothing: others are not in this trial."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_collective(func):
            return skip_collective(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _KernelCounter(TorchDispatchMode):
    """Counts operator calls, the bytes they read and write, and the peak of what they allocate."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls, self.moved_bytes, self.peak_bytes = 0, 0, 0
        self._live: dict[int, int] = {}  # storages allocated here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        # traffic: inputs are read, what is written in place is written too, new outputs are written
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
        # memory: storages that are made here live until they are freed
        known = {t.untyped_storage()._cdata for t in inputs.values()} | set(self._live)
        for tensor in new:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                self._live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, storage._cdata, None)
        self.peak_bytes = max(self.peak_bytes, sum(self._live.values()))
        return output
