"""What an update depends on: the question before a step is split between ranks.

torch's optimizers are known. A copy of every other one is stepped on small
tensors: all parameters at once, and every second one. What agrees to rounding over several steps
may be split by parameters.

| rule | an update reads | a rank may own |
|---|---|---|
| "elements" | that element's parameter, gradient and state, and numbers of its group | rows |
| "parameters" | all of one parameter | whole parameters |
"""

from __future__ import annotations

import copy
import inspect
import types
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn, optim
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.pieces import (
    Piece,
    Share,
    assign_pieces,
    has_dense_rows,
    num_rows,
    update_work,
)

UpdateRule = Literal["elements", "parameters"]
ELEMENTWISE: tuple[type[Optimizer], ...] = (
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)
# Their rule needs whole parameters, but costs about the same per element. Others are taken for
# matrix functions (Muon, Shampoo).
_EVEN_WORK: tuple[type[Optimizer], ...] = (optim.Adafactor,)
# Those that treat each parameter by itself, but not each element.
BY_PARAMETER: tuple[type[Optimizer], ...] = (
    *ELEMENTWISE,
    *_EVEN_WORK,
    *((optim.Muon,) if hasattr(optim, "Muon") else ()),
)
_MAX_DIM = 256  # of trial parameters; Adafactor factors from 128 rows on
_MAX_KERNEL_DIM = 3  # dims after the second
_MAX_GROUPS = 8
_NUMBERS = 1 << 18  # bytes of a tensor beside the state that a trial makes
_MIN_STEPS, _MAX_STEPS = 4, 50
# of trial parameters: small, so that rounding of the parameter hides little of its change
_SCALE = 0.1
# two results are the same within this part of the change, and this many roundings
_RELATIVE, _ULPS = 1e-3, 8.0
_SEED = 20101
_CURVATURE = 1e3  # of the loss of a trial: large, so that gradients show how far a step moved
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"})


class UnsplittableOptimizer(ValueError):
    """An optimizer whose step cannot be shared between ranks.

    Its message has the `reason`, a clause, and the way out.
    """

    def __init__(self, reason: str, way_out: str = "") -> None:
        super().__init__(f"{reason}. {way_out}" if way_out else reason)
        self.reason = reason


def update_rule(optimizer: Optimizer, *, declared: UpdateRule | None = None) -> UpdateRule:
    """Return how the step of `optimizer` may be split.

    As known, as `declared`, or else as tried on a copy. A declaration is taken at its word, except
    for what is known to be wrong. The optimizer, its parameters, its state and the random
    generators stay as they are.

    Raises:
        UnsplittableOptimizer: where the step asks its closure twice, communicates, or needs sparse
            gradients, where what happens to one parameter depends on others, and where no trial is
            possible.
        ValueError: for an unknown declaration.
    """
    if declared is not None and declared not in get_args(UpdateRule):
        raise ValueError(f"the update rule is one of {get_args(UpdateRule)}; got {declared!r}")
    name = type(optimizer).__name__
    if isinstance(optimizer, optim.LBFGS):
        raise _asks_again(name)
    if isinstance(optimizer, optim.SparseAdam):
        raise UnsplittableOptimizer(
            f"the step of {name} cannot be split: its gradients are sparse",
            "Use dense gradients (sparse=False in nn.Embedding) and AdamW, or leave the parallel "
            "optimizer step out",
        )
    if is_one_of(optimizer, ELEMENTWISE):
        return declared or "elements"
    if is_one_of(optimizer, BY_PARAMETER):
        if declared == "elements":
            raise UnsplittableOptimizer(
                f"{name} was declared to update 'elements' by themselves, but it uses whole "
                "parameters",
                "Declare 'parameters', or nothing",
            )
        return "parameters"
    if declared is None:
        _check_tried(optimizer)
    return declared or "parameters"


def updates_whole(optimizer: Optimizer) -> bool:
    """Return whether updates read all of a parameter and nothing else; unknown ones are tried."""
    try:
        return update_rule(optimizer) == "parameters"
    except UnsplittableOptimizer:
        return False


def pieces_of(
    optimizer: Optimizer, shared: Collection[Tensor], *, ranks: int, rule: UpdateRule | None = None
) -> list[Piece]:
    """Return the rows of the optimizer's parameters that each of `ranks` ranks updates.

    Parameters that are not `shared` are left out. `rule` None: of optimizers that are not known,
    parameters are not cut.
    """
    cut = is_one_of(optimizer, ELEMENTWISE) if rule is None else rule == "elements"
    is_even = cut or is_one_of(optimizer, _EVEN_WORK)
    shares = [
        Share(
            index,
            num_rows(p),
            float(p.numel()) if is_even else update_work(p.shape),
            cut and has_dense_rows(p),
        )
        for index, p in enumerate(parameters_of(optimizer))
        if p in shared
    ]
    return assign_pieces(shares, world_size=ranks)


def why_not_shared(optimizer: Optimizer) -> str | None:
    """Return why its step is not shared where nobody asked for that; None where it may be.

    A clause. Shared are steps whose rule is known without a trial, over dense gradients, that no
    hook of the user's observes. Before the first backward pass sparse gradients are not seen.
    """
    name, parameters = type(optimizer).__name__, parameters_of(optimizer)
    if hasattr(optimizer, "consolidate_state_dict"):
        return f"{name} shards its state already"
    if any(isinstance(p, DTensor) for p in parameters):
        return "its parameters are sharded already"
    if isinstance(optimizer, optim.LBFGS):
        return f"{name} takes all parameters for one vector"
    if any(p.grad is not None and p.grad.is_sparse for p in parameters) or isinstance(
        optimizer, optim.SparseAdam
    ):
        return "its gradients are sparse"
    if len(set(parameters)) != len(parameters):
        return "it has a parameter twice"
    if not is_one_of(optimizer, BY_PARAMETER):
        return f"the update rule of {name} is not known: ParallelOptimizerStep(rule=...) shares it"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "it has step hooks: ParallelOptimizerStep() shares it all the same"
    return None


def check_by_parameter(optimizer: Optimizer) -> None:
    """Raise UnsplittableOptimizer unless every parameter is updated by itself.

    Unlike `update_rule` it accepts a step that asks its closure again.
    """
    if isinstance(optimizer, optim.LBFGS):
        raise _asks_again("LBFGS")
    if not is_one_of(optimizer, BY_PARAMETER) and not isinstance(optimizer, optim.SparseAdam):
        _check_tried(optimizer, asks_once=False)


def check_runs_on_shards(optimizer: Optimizer) -> None:
    """Raise UnsplittableOptimizer for a step that does not run on shards of parameters.

    Such are LBFGS, and steps that communicate, draw random numbers (others for shards) or keep
    states in tensors that cannot be gathered, as a trial shows. Where none is possible, all may.
    """
    if is_one_of(optimizer, (*BY_PARAMETER, optim.SparseAdam)):
        return
    name, reason = type(optimizer).__name__, ""
    if isinstance(optimizer, optim.LBFGS):
        reason = f"{name} takes them for one whole vector"
    else:
        try:
            outcome = run_trial(optimizer)
            if outcome.draws:
                reason = f"the step of {name} draws random numbers, which are others for shards"
            elif kind := outcome.tensor_class:
                reason = _of_own_class(name, kind)
        except CollectiveInStep as error:
            reason = f"the step of {name} is shared between ranks already ({error})"
        except TrialError:
            pass
    if reason:
        raise UnsplittableOptimizer(
            f"this plan shards parameters, but {reason}", "Choose plan='ddp'"
        )


def collective_in_step(optimizer: Optimizer) -> str | None:
    """Return the collective that the step of `optimizer` calls, as a clause.

    None where no trial shows one.
    """
    if is_one_of(optimizer, BY_PARAMETER) or isinstance(optimizer, optim.LBFGS | optim.SparseAdam):
        return None
    try:
        run_trial(optimizer)
    except CollectiveInStep as error:
        return str(error)
    except TrialError:
        pass
    return None


def is_one_of(optimizer: Optimizer, classes: tuple[type[Optimizer], ...]) -> bool:
    """Return whether it is one of `classes`, or a subclass that steps as they do."""
    return any(isinstance(optimizer, cls) and type(optimizer).step is cls.step for cls in classes)


def _asks_again(name: str) -> UnsplittableOptimizer:
    return UnsplittableOptimizer(
        f"the step of {name} cannot be split: it needs a closure and evaluates the model several "
        "times per step",
        "Leave the parallel optimizer step out, or use an optimizer that steps once per gradient",
    )


def _of_own_class(name: str, kind: str) -> str:
    return f"{name} keeps states in tensors of a class, {kind}, that cannot be gathered"


# ---- Compare trials


def _check_tried(optimizer: Optimizer, *, asks_once: bool = True) -> None:
    # `asks_once`: the step may not ask its closure twice
    name, way_out = type(optimizer).__name__, "Leave the parallel optimizer step out"
    try:
        whole = run_trial(optimizer)
        if asks_once and whole.closure_calls > 1:
            raise _asks_again(name)
        if asks_once and (kind := whole.tensor_class):
            raise UnsplittableOptimizer(_of_own_class(name, kind), way_out)
        if asks_once and whole.moves_first:
            raise UnsplittableOptimizer(
                f"the step of {name} cannot be split: it moves parameters before its closure",
                f"{way_out}, or use an optimizer that asks for the loss first",
            )
        if all(same(whole.parameters[i], p, change=0.0) for i, p in whole.before.items()):
            raise TrialError("a trial step changed none of its parameters")
        # every other parameter, and the rest, must give what all of them together gave
        for start in range(2):
            part = run_trial(optimizer, chosen=slice(start, None, 2))
            if difference := _difference(whole, part):
                raise UnsplittableOptimizer(
                    f"the step of {name} cannot be split: its result for some parameters depends "
                    f"on which others are updated with them, or on random numbers ({difference})",
                    f"{way_out}; if you know better, declare its update rule ('parameters' or "
                    "'elements')",
                )
    except CollectiveInStep as error:
        raise UnsplittableOptimizer(
            f"the step of {name} cannot be split: it is shared between ranks already ({error})",
            way_out,
        ) from error
    except TrialError as error:
        raise UnsplittableOptimizer(
            f"it is not known how the step of {name} may be split: {error}",
            "Declare its update rule: 'elements' if every element is updated by itself, "
            "'parameters' if every parameter is; if neither, leave the parallel optimizer step out",
        ) from error


def _difference(whole: TrialOutcome, part: TrialOutcome) -> str | None:
    # where a trial of some parameters differs from that of all
    for i, parameter in part.parameters.items():
        shape, moved = tuple(parameter.shape), whole.parameters[i] - whole.before[i]
        change = float(moved.abs().max()) if moved.numel() else 0.0
        if not same(whole.parameters[i], parameter, change=change):
            return f"a parameter of shape {shape}"
        if (key := _different_key(whole.states[i], part.states[i])) is not None:
            return f"{key!r} in the state of a parameter of shape {shape}"
    used = {whole.groups_of[i] for i in part.parameters}
    for number in sorted(used):
        if (key := _different_key(whole.groups[number], part.groups[number])) is not None:
            return f"{key!r} in the options of a parameter group"
    if (key := _different_key(whole.shared, part.shared)) is not None:
        return f"{key!r}, which all groups share"
    return None


def _different_key(values: Mapping[str, object], twins: Mapping[str, object]) -> str | None:
    for key in {**values, **twins}:
        if key not in values or key not in twins or not same(values[key], twins[key]):
            return key
    return None


def same(value: object, twin: object, *, change: float | None = None) -> bool:
    """Return whether two results are equal to rounding.

    `change` is how far the parameter has moved; without it, differences are compared with the
    value.
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
    # Whether two containers hold the same, and other values are equal
    if type(value) is not type(twin):
        return False
    if isinstance(value, Mapping):
        return value.keys() == twin.keys() and all(same(v, twin[k]) for k, v in value.items())
    if isinstance(value, list | tuple):
        return len(value) == len(twin) and all(map(same, value, twin))
    # Of other objects every trial makes its own: not held against it, since what they do shows in
    # the parameters.
    return type(value).__module__ != "builtins" or bool(value == twin)


# ---- Trials: steps of a copy of the user's optimizer on small tensors


class TrialError(ValueError):
    """The copy could not be made or stepped."""


class CollectiveInStep(TrialError):
    """The step communicates with other ranks; nothing was sent."""


@dataclass(frozen=True)
class TrialOutcome:
    """After the last step: each tried parameter, its state, and what else the optimizer keeps.

    Attributes:
        before: each tried parameter before the first step, by number.
        parameters: after the last one.
        states: of each parameter.
        groups_of: the number of the group of each trial parameter.
        groups: options of each group.
        shared: state and numbers for all groups.
        closure_calls: how often one call asked its closure, at most.
        moves_first: parameters had changed when it did.
        draws: a step has drawn random numbers.
    """

    before: dict[int, Tensor]
    parameters: dict[int, Tensor]
    states: dict[int, dict[str, Any]]
    groups_of: Sequence[int]
    groups: list[dict[str, Any]]
    shared: dict[str, Any]
    closure_calls: int
    moves_first: bool
    draws: bool

    @property
    def tensor_class(self) -> str:
        """A class of tensors of another package that states are kept in; "": none."""
        kinds = {type(leaf) for leaf in tree_leaves(self.states) if isinstance(leaf, Tensor)}
        return next((kind.__name__ for kind in kinds - {Tensor, nn.Parameter}), "")


def run_trial(optimizer: Optimizer, *, chosen: slice = slice(None)) -> TrialOutcome:
    """Step a copy of `optimizer` over trial parameters and return what came of it.

    The user's optimizer, its parameters and the random generators stay as they are. Of each group
    (of more than eight, eight different ones) the largest and the last parameter of each number of
    dims are tried, in their shapes up to a size. There are as many steps as the largest integer
    option (below 50) plus one: methods that start or refresh something every so many steps have
    that number among their options. A step that takes a closure gets one (`_Closure`).

    Args:
        optimizer: the user's.
        chosen: the trial parameters that are stepped.

    Raises:
        TrialError: when the copy cannot be made or stepped.
        CollectiveInStep: where the step communicates.
    """
    groups = optimizer.param_groups
    if len(groups) > _MAX_GROUPS:
        different = {repr(_options_of(group, "lr", "initial_lr")): group for group in groups}
        groups = list(different.values())[:_MAX_GROUPS]
    options = [{**_options_of(group), **_nonzero_rate(group)} for group in groups]
    shapes = [(g, shape) for g, group in enumerate(groups) for shape in _trial_shapes(group)]
    # larger numbers are sizes
    numbers = [v for o in options for v in o.values() if type(v) is int and v < _MAX_STEPS]
    device = next((p.device for group in groups for p in group["params"]), torch.device("cpu"))
    device = torch.device("cpu") if device.type == "meta" else device
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager"),  # a trial does not wait for compilers
    ):
        torch.manual_seed(_SEED)  # for methods that draw numbers
        random_state = _random_state(device)

        def draw(number: int) -> dict[int, Tensor]:
            # random tensors in the shapes of the trial parameters, the same for each number
            generator = torch.Generator().manual_seed(_SEED + number)
            drawn = [torch.randn(s, generator=generator).to(device) for _, s in shapes]
            return dict([*enumerate(drawn)][chosen])

        before = {i: _SCALE * tensor for i, tensor in draw(0).items()}
        parameters = {i: nn.Parameter(tensor.clone()) for i, tensor in before.items()}
        of_groups = [
            [p for i, p in parameters.items() if shapes[i][0] == g] for g in range(len(groups))
        ]
        clone = _copy(optimizer, options, of_groups)
        closure_calls, moves_first = 0, False
        for number in range(1, 1 + max(_MIN_STEPS, 1 + max(numbers, default=0))):
            closure = _Closure([(parameters[i], g) for i, g in draw(number).items()], device)
            closure()
            _step(clone, closure)
            closure_calls = max(closure_calls, closure.calls - 1)
            moves_first |= closure.found_moved
        draws = not torch.equal(random_state, _random_state(device))
    shared = {str(k): v for k, v in clone.state.items() if not isinstance(k, Tensor)}
    return TrialOutcome(
        before,
        {i: p.detach() for i, p in parameters.items()},
        {i: dict(clone.state.get(p, {})) for i, p in parameters.items()},
        [group for group, _ in shapes],
        [_options_of(group) for group in clone.param_groups],
        shared | {k: v for k, v in vars(clone).items() if type(v) in (int, float)},
        closure_calls,
        moves_first,
        draws,
    )


def _random_state(device: torch.device) -> Tensor:
    # of the default generators of the CPU and of `device`
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def _options_of(group: Mapping[str, object], *without: str) -> dict[str, Any]:
    left_out = ("params", "param_names", *without)
    return {key: value for key, value in group.items() if key not in left_out}


def _nonzero_rate(group: Mapping[str, Any]) -> dict[str, Any]:
    # the rate before any warm-up: a rate of 0 would show nothing
    if "lr" not in group:
        return {}
    try:
        given = [float(group[k]) for k in ("initial_lr", "lr") if group.get(k) is not None]
    except Exception as error:  # of a fake tensor
        raise TrialError(f"its learning rate has no value ({type(error).__name__})") from error
    rate, own = next((rate for rate in given if rate > 0), 1e-2), group["lr"]
    return {"lr": torch.full_like(own, rate) if isinstance(own, Tensor) else rate}


def _trial_shapes(group: Mapping[str, Any]) -> list[torch.Size]:
    by_dims: dict[int, list[torch.Size]] = defaultdict(list)
    for parameter in group["params"]:
        limits = (_MAX_DIM, _MAX_DIM, *[_MAX_KERNEL_DIM] * parameter.dim())
        tried = torch.Size(min(d, m) for d, m in zip(parameter.shape, limits, strict=False))
        by_dims[parameter.dim()].append(tried)
    return [
        shape
        for shapes in by_dims.values()
        for shape in (max(shapes, key=torch.Size.numel), shapes[-1])
    ]


def _copy(
    optimizer: Optimizer, options: Sequence[dict[str, Any]], of_groups: Sequence[list[nn.Parameter]]
) -> Optimizer:
    clone: Optimizer = type(optimizer).__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): clone}
    for name, value in vars(optimizer).items():
        if isinstance(value, ProcessGroup | DeviceMesh):
            if value.size() > 1:
                raise CollectiveInStep(f"its {name} is a group of {value.size()} ranks")
            memo[id(value)] = value  # it cannot be copied
    # Methods on the instance are a scheduler's or a wrapper's; hooks belong to the real run.
    hooks = {name for name in vars(optimizer) if name.endswith("_hooks")}
    methods = {
        name
        for name, value in vars(optimizer).items()
        if callable(value) and hasattr(type(optimizer), name)
    }
    left_out = {"state", "param_groups", "consolidate_state_dict", *hooks, *methods}
    try:
        beside = [value for name, value in vars(optimizer).items() if name not in left_out]
        enter_numbers([beside, *options], memo)
        kept = {k: copied_apart(v, memo) for k, v in vars(optimizer).items() if k not in left_out}
        copied = [copy.deepcopy(of_group, memo) for of_group in options]
        vars(clone).update(kept, **{name: OrderedDict() for name in hooks})
        clone.state = empty_states(clone)
        clone.param_groups = [
            {**group, "params": params} for group, params in zip(copied, of_groups, strict=True)
        ]
    except Exception as error:
        raise TrialError(f"it cannot be copied for a trial ({error})") from error
    return clone


def enter_numbers(values: Sequence[Any], memo: dict[int, Any]) -> None:
    """Let `memo` of a deep copy have numbers for tensors among `values` that have no elements.

    There are some where `configure_optimizers` ran on shapes, and torch crashes with their copies.
    """
    for leaf in tree_leaves(values):
        if isinstance(leaf, FakeTensor) and id(leaf) not in memo:
            if leaf.nbytes > _NUMBERS:
                raise ValueError(f"it keeps {leaf.nbytes} bytes in a tensor beside its state")
            memo[id(leaf)] = torch.full(leaf.shape, 0.5).to(leaf.dtype)


def copied_apart(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy; a function has closed over copies, such as that of the optimizer."""
    if not isinstance(value, types.FunctionType) or not value.__closure__:
        return copy.deepcopy(value, memo)
    cells = (types.CellType(copy.deepcopy(c.cell_contents, memo)) for c in value.__closure__)
    names = value.__globals__, value.__name__, value.__defaults__
    made = types.FunctionType(value.__code__, *names, tuple(cells))
    made.__kwdefaults__ = value.__kwdefaults__
    return made


def empty_states(optimizer: Optimizer) -> defaultdict[Any, Any]:
    """Return the states of a copy of `optimizer` over other parameters, which has not stepped."""
    return _AdagradStates(optimizer) if isinstance(optimizer, optim.Adagrad) else defaultdict(dict)


class _AdagradStates(defaultdict[Any, Any]):
    # States that torch 2.11 makes when Adagrad is built, and later releases in the first step.
    # Here a parameter's is made when it is first asked for.

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(dict)
        self.optimizer = optimizer

    def __missing__(self, parameter: Any) -> Any:
        group = next(
            group
            for group in self.optimizer.param_groups
            if any(parameter is own for own in group["params"])
        )
        start = group["initial_accumulator_value"]
        self[parameter] = {
            "step": torch.zeros((), device=parameter.device if group.get("fused") else "cpu"),
            "sum": torch.full_like(
                parameter,
                complex(start, start) if parameter.is_complex() else start,
                requires_grad=False,
            ),
        }
        return self[parameter]


class _Closure:
    """Returns a loss, sets gradients that follow how parameters have moved, counts its `calls`.

    `found_moved`: parameters had changed at the second call, the first by the step; the trial makes
    one itself.
    """

    def __init__(
        self, gradients: Sequence[tuple[nn.Parameter, Tensor]], device: torch.device
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


def _step(clone: Optimizer, closure: _Closure) -> None:
    takes_closure = "closure" in inspect.signature(type(clone).step).parameters
    try:
        with NoCollectives():  # type: ignore[no-untyped-call]
            clone.step(closure) if takes_closure else clone.step()  # type: ignore[arg-type]
    except CollectiveInStep:
        raise
    except Exception as error:
        raise TrialError(f"a trial step failed ({type(error).__name__}: {error})") from error


class NoCollectives(TorchDispatchMode):
    """Refuses collectives: ranks may be in other trials, or in none, and would not answer."""

    supports_higher_order_operators = True

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") in _COLLECTIVES:
            raise CollectiveInStep(f"it calls {func}")
        return func(*args, **(kwargs or {}))
