"""What an element's update depends on: the question before a step is split between ranks.

torch's optimizers and this package's are known. Of every other one a copy is stepped on small
tensors: all parameters at once, against some of them at a time, against blocks of rows. What agrees
to rounding over several steps may be split so.

| rule | an update reads | a rank may own |
|---|---|---|
| "elements" | that element's parameter, gradient and state, and numbers of its group | rows |
| "parameters" | all of one parameter | whole parameters |

The module has three parts: the questions, how results of trials are compared, and the trials.

The copies here are made with `copy.deepcopy`: they have all groups, and are stepped on some of
their parameters at a time. `costs.optimizer_copy` copies one group for a profile, and refuses
optimizers that this module tries.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn, optim
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_topt.optim.adam_variants import LAMB
from lightning_topt.optim.lars import LARS
from lightning_topt.optim.pieces import num_rows

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
# Those that treat each parameter by itself, but not each element.
BY_PARAMETER: tuple[type[Optimizer], ...] = (
    *ELEMENTWISE,
    LARS,
    LAMB,
    optim.Adafactor,
    *((optim.Muon,) if hasattr(optim, "Muon") else ()),
)
# Of trial parameters, where the real ones have as many: thresholds on sizes are usually below.
# Adafactor factors from 128 rows on. States of 8 bits are kept from 4096 elements on, in blocks of
# 256, for instance.
_MAX_DIM, _MIN_NUMEL = 256, 8192
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
    for what is known to be wrong. A trial takes well below a second for element-wise methods, and
    runs on the device of the parameters. The optimizer, its parameters, its state and the random
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
            f"the step of {name} cannot be split: its gradients are sparse, so it reads only the "
            "rows of one batch",
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
    return declared or _tried_rule(optimizer)


def updates_whole(optimizer: Optimizer) -> bool:
    """Return whether updates read all of a parameter and nothing else; unknown ones are tried."""
    try:
        return update_rule(optimizer) == "parameters"
    except UnsplittableOptimizer:
        return False


def calls_may_repeat(optimizer: Optimizer) -> bool:
    """Return whether one step may be made of several calls, each on other parameters.

    All from the same `OptimizerCounters`. Known for torch's optimizers, else tried. False where no
    trial is possible. Hooks would see every call: `has_step_hooks`.
    """
    if is_one_of(optimizer, BY_PARAMETER):
        return True
    try:
        sketch = make_sketch(optimizer)
        whole = run_trial(optimizer, sketch)
        repeated = run_trial(optimizer, sketch, calls=[[i] for i in range(len(sketch.groups_of))])
    except TrialError:
        return False
    return _difference(whole, repeated, sketch, chosen=range(len(sketch.groups_of))) is None


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks run before or after its steps: its own, or those of all optimizers."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )


def why_not_shared(optimizer: Optimizer) -> str | None:
    """Return why its step is not shared where nobody asked for that; None where it may be.

    A clause. Shared are steps whose rule is known without a trial, over dense gradients, that no
    hook of the user's observes. Before the first backward pass sparse gradients are not seen.
    """
    name = type(optimizer).__name__
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
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
        _tried_rule(optimizer, asks_once=False)


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
            outcome = run_trial(optimizer, make_sketch(optimizer))
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


def _of_own_class(name: str, kind: str) -> str:
    return f"{name} keeps states in tensors of a class, {kind}, that cannot be gathered"


def collective_in_step(optimizer: Optimizer) -> str | None:
    """Return the collective that the step of `optimizer` calls, as a clause.

    None where no trial shows one.
    """
    if is_one_of(optimizer, BY_PARAMETER) or isinstance(optimizer, optim.LBFGS | optim.SparseAdam):
        return None
    try:
        run_trial(optimizer, make_sketch(optimizer))
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


# ---- Compare trials


def _tried_rule(optimizer: Optimizer, *, asks_once: bool = True) -> UpdateRule:
    """Return how the step may be split, as trials on copies show.

    `asks_once`: it may not ask its closure twice.
    """
    name = type(optimizer).__name__
    try:
        sketch = make_sketch(optimizer)
        whole = run_trial(optimizer, sketch)
        if asks_once and whole.closure_calls > 1:
            raise _asks_again(name)
        if asks_once and (kind := whole.tensor_class):
            raise UnsplittableOptimizer(
                _of_own_class(name, kind), "Leave the parallel optimizer step out"
            )
        if asks_once and whole.moves_first:
            raise UnsplittableOptimizer(
                f"the step of {name} cannot be split: it moves parameters, and asks its closure "
                "then",
                "Leave the parallel optimizer step out, or use an optimizer that asks for the loss "
                "first",
            )
        if all(  # a step that does nothing shows nothing
            same(whole.parameters[i], p, change=0.0)
            for i, p in enumerate(initial_parameters(sketch))
        ):
            raise TrialError("a trial step changed none of its parameters")
        # some parameters at a time must give what all of them together gave
        for chosen in _subsets(sketch.groups_of):
            difference = _difference(
                whole, run_trial(optimizer, sketch, chosen=chosen), sketch, chosen=chosen
            )
            if difference is not None:
                raise UnsplittableOptimizer(
                    f"the step of {name} cannot be split: its result for some parameters depends "
                    f"on which others are updated with them, or on random numbers ({difference})",
                    "Leave the parallel optimizer step out; if you know better, declare its update "
                    "rule ('parameters' or 'elements')",
                )
    except CollectiveInStep as error:
        raise UnsplittableOptimizer(
            f"the step of {name} cannot be split: it is shared between ranks already ({error})",
            "Leave the parallel optimizer step out",
        ) from error
    except TrialError as error:
        raise UnsplittableOptimizer(
            f"it is not known how the step of {name} may be split: {error}",
            "Declare its update rule: 'elements' if every element is updated by itself, "
            "'parameters' if every parameter is; if neither, leave the parallel optimizer step out",
        ) from error
    return "elements" if _rows_are_independent(optimizer, sketch, whole) else "parameters"


def _rows_are_independent(optimizer: Optimizer, sketch: Sketch, whole: TrialOutcome) -> bool:
    """Return whether the first and the last rows alone are updated as with all others."""
    selections: tuple[Select, ...] = (
        lambda tensor: tensor[: max(1, len(tensor) // 3)],
        lambda tensor: tensor[max(1, len(tensor) // 3) :],
    )
    with_rows = [i for i, parameter in whole.parameters.items() if num_rows(parameter) > 1]
    for i in with_rows:  # state has rows, or is one number
        shape = whole.parameters[i].shape
        for value in whole.states[i].values():
            if isinstance(value, int | float | None):
                continue
            if not isinstance(value, Tensor) or (value.shape != shape and value.numel() != 1):
                return False
    for select in selections:
        try:
            part = run_trial(optimizer, sketch, chosen=with_rows, select=select)
        except TrialError:
            return False
        if _difference(whole, part, sketch, chosen=with_rows, select=select) is not None:
            return False
    return bool(with_rows)


def _subsets(groups_of: Sequence[int]) -> Iterator[list[int]]:
    """Yield sets of trial parameters such as a rank may have.

    Every other one, the rest, and those of the first and of the last group alone.
    """
    everything = range(len(groups_of))
    yield from (list(everything[::2]), list(everything[1::2]))
    if groups_of and groups_of[-1] > 0:
        yield from ([i for i in everything if groups_of[i] == g] for g in (0, groups_of[-1]))


def _difference(
    whole: TrialOutcome,
    part: TrialOutcome,
    sketch: Sketch,
    *,
    chosen: Sequence[int],
    select: Select | None = None,
) -> str | None:
    """Return where `part` differs from `whole`; None if nowhere.

    `part` is a trial over the `chosen` parameters, or the `select`-ed rows of them.
    """
    start = initial_parameters(sketch)
    for i in chosen:
        moved = float((whole.parameters[i] - start[i]).abs().max()) if start[i].numel() else 0.0
        expected = select(whole.parameters[i]) if select else whole.parameters[i]
        shape = tuple(start[i].shape)
        if not same(expected, part.parameters[i], change=moved):
            return f"a parameter of shape {shape}"
        state: Mapping[str, Any] = whole.states[i]
        if select is not None:
            state = {
                k: select(v) if isinstance(v, Tensor) and v.dim() and v.shape == shape else v
                for k, v in state.items()
            }
        if (key := _different_key(state, part.states[i])) is not None:
            return f"{key!r} in the state of a parameter of shape {shape}"
    used = {sketch.groups_of[i] for i in chosen}
    for number, (group, twin) in enumerate(zip(whole.groups, part.groups, strict=True)):
        if number in used and (key := _different_key(group, twin)) is not None:
            return f"{key!r} in the options of a parameter group"
    if (key := _different_key(whole.shared, part.shared)) is not None:
        return f"{key!r}, which all groups share"
    return None


def _different_key(values: Mapping[str, object], twins: Mapping[str, object]) -> str | None:
    different = [
        k
        for k in {**values, **twins}
        if k not in values or k not in twins or not same(values[k], twins[k])
    ]
    return different[0] if different else None


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
    """Return whether two containers hold the same, and other values are equal."""
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
class Sketch:
    """What is tried: options of each group, shapes of a few of its parameters, number of steps."""

    options: tuple[dict[str, Any], ...]
    shapes: tuple[tuple[torch.Size, ...], ...]
    device: torch.device
    num_steps: int

    @property
    def groups_of(self) -> list[int]:
        """The group of each trial parameter."""
        return [group for group, shapes in enumerate(self.shapes) for _ in shapes]


# the rows of a tensor shaped like a trial parameter that are tried
Select = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TrialOutcome:
    """After the last step: each tried parameter, its state, and what else the optimizer keeps.

    Attributes:
        parameters: by number of the trial parameter.
        states: of each parameter.
        groups: options of each group.
        shared: state and numbers for all groups.
        closure_calls: how often one call asked its closure, at most.
        moves_first: parameters had changed when it did.
        draws: a step has drawn random numbers.
    """

    parameters: dict[int, Tensor]
    states: dict[int, dict[str, Any]]
    groups: list[dict[str, Any]]
    shared: dict[str, Any]
    closure_calls: int = 0
    moves_first: bool = False
    draws: bool = False

    @property
    def tensor_class(self) -> str:
        """A class of tensors of another package that states are kept in; "": none."""
        kinds = {type(leaf) for leaf in tree_leaves(self.states) if isinstance(leaf, Tensor)}
        return next((kind.__name__ for kind in kinds - {Tensor, nn.Parameter}), "")


def make_sketch(optimizer: Optimizer) -> Sketch:
    """Choose a few small parameters of each group, and a number of steps.

    Two parameters of each number of dims in each group (of more than eight groups, eight different
    ones), in their real shapes up to a size. As many steps as the largest integer option (below 50)
    plus one: methods that start or refresh something every so many steps have that number among
    their options.
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


def _options_of(group: Mapping[str, object], *, without: Sequence[str] = ()) -> dict[str, Any]:
    return {
        key: value for key, value in group.items() if key not in ("params", "param_names", *without)
    }


def _nonzero_rate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rate before any warm-up: a rate of 0 would show nothing."""
    if "lr" not in options:
        return {}
    try:
        given = [float(options[k]) for k in ("initial_lr", "lr") if options.get(k) is not None]
    except Exception as error:  # of a fake tensor
        raise TrialError(f"its learning rate has no value ({type(error).__name__})") from error
    rate, own = next((rate for rate in given if rate > 0), 1e-2), options["lr"]
    return {"lr": torch.full_like(own, rate) if isinstance(own, Tensor) else rate}


def _trial_shapes(parameters: Sequence[Tensor]) -> tuple[torch.Size, ...]:
    by_dims: dict[int, list[torch.Size]] = defaultdict(list)
    for parameter in parameters:
        by_dims[parameter.dim()].append(_trial_shape(parameter.shape))
    return tuple(
        shape
        for shapes in by_dims.values()
        for shape in (max(shapes, key=torch.Size.numel), shapes[-1])
    )


def _trial_shape(shape: Sequence[int]) -> torch.Size:
    limits = (_MAX_DIM, _MAX_DIM, *[_MAX_KERNEL_DIM] * len(shape))
    tried = [min(d, m) for d, m in zip(shape, limits, strict=False)]
    for i, dim in enumerate(shape):
        if 0 < math.prod(tried) < _MIN_NUMEL and tried[i] < dim:
            blocks = math.ceil(_MIN_NUMEL * tried[i] / math.prod(tried) / _MAX_DIM)
            tried[i] = min(dim, blocks * _MAX_DIM)
    return torch.Size(tried)


def run_trial(
    optimizer: Optimizer,
    sketch: Sketch,
    *,
    chosen: Sequence[int] | None = None,
    select: Select | None = None,
    calls: Sequence[Sequence[int]] | None = None,
) -> TrialOutcome:
    """Step a copy of `optimizer` over trial parameters and return what came of it.

    The user's optimizer, its parameters and the random generators stay as they are. A step that
    takes a closure gets one (`_Closure`).

    Args:
        optimizer: the user's.
        sketch: from `make_sketch`.
        chosen: the trial parameters that are stepped; None: all.
        select: takes the rows that are tried out of every tensor.
        calls: instead of one call per step, one for each of these sets of parameters, all from the
            same `OptimizerCounters`.

    Raises:
        TrialError: when the copy cannot be made or stepped.
        CollectiveInStep: where the step communicates.
    """
    devices = [sketch.device] if sketch.device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=devices),
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager"),  # a trial does not wait for compilers
    ):
        torch.manual_seed(_SEED)  # for methods that draw numbers
        before = _random_state(sketch.device)
        whole = initial_parameters(sketch)
        chosen = range(len(whole)) if chosen is None else chosen
        select = select or (lambda tensor: tensor)
        parameters = {i: nn.Parameter(select(whole[i]).clone()) for i in chosen}
        clone = _copy(optimizer, sketch, parameters)
        closure_calls, moves_first = 0, False
        for number in range(1, sketch.num_steps + 1):
            gradients, counters = _draw(sketch, number), OptimizerCounters(clone)
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
                closure_calls = max(closure_calls, closure.calls - 1)
                moves_first |= closure.found_moved
        draws = not torch.equal(before, _random_state(sketch.device))
        _set_parameters(clone, sketch, parameters)
        groups = [_options_of(group) for group in clone.param_groups]
        states = {i: dict(clone.state.get(parameter, {})) for i, parameter in parameters.items()}
        tried = {i: p.detach() for i, p in parameters.items()}
        shared = {str(k): v for k, v in clone.state.items() if not isinstance(k, Tensor)}
        shared |= {k: v for k, v in vars(clone).items() if type(v) in (int, float)}
        return TrialOutcome(
            tried,
            states,
            groups,
            shared,
            closure_calls=closure_calls,
            moves_first=moves_first,
            draws=draws,
        )


def _random_state(device: torch.device) -> Tensor:
    """Return the states of the default generators of the CPU and of `device`."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def initial_parameters(sketch: Sketch) -> list[Tensor]:
    """Return the trial parameters before the first step."""
    return [_SCALE * tensor for tensor in _draw(sketch, 0)]


def _draw(sketch: Sketch, number: int) -> list[Tensor]:
    """Return random tensors in the shapes of the trial parameters, the same for each `number`."""
    generator = torch.Generator().manual_seed(_SEED + number)
    shapes = [shape for group in sketch.shapes for shape in group]
    return [torch.randn(shape, generator=generator).to(sketch.device) for shape in shapes]


def _copy(
    optimizer: Optimizer, sketch: Sketch, parameters: Mapping[int, nn.Parameter]
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
        kept = {k: copy.deepcopy(v, memo) for k, v in vars(optimizer).items() if k not in left_out}
        options = [copy.deepcopy(options, memo) for options in sketch.options]
        vars(clone).update(kept, **{name: OrderedDict() for name in hooks})
        clone.state = empty_states(clone)
        clone.param_groups = [{**group, "params": []} for group in options]
    except Exception as error:
        raise TrialError(f"it cannot be copied for a trial ({error})") from error
    _set_parameters(clone, sketch, parameters)
    return clone


def empty_states(optimizer: Optimizer) -> defaultdict[Any, Any]:
    """Return the states of a copy of `optimizer` over other parameters, which has not stepped."""
    return _AdagradStates(optimizer) if isinstance(optimizer, optim.Adagrad) else defaultdict(dict)


class _AdagradStates(defaultdict[Any, Any]):
    """States that torch 2.11 makes when Adagrad is built, and later releases in the first step.

    Here a parameter's is made when it is first asked for.
    """

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


def _set_parameters(
    clone: Optimizer, sketch: Sketch, parameters: Mapping[int, nn.Parameter]
) -> None:
    for number, group in enumerate(clone.param_groups):
        group["params"] = [
            parameters[i] for i, g in enumerate(sketch.groups_of) if g == number and i in parameters
        ]


class _Closure:
    """Returns a loss, sets gradients that follow how parameters have moved, counts its `calls`.

    `found_moved`: parameters had changed at the second call, the first by the step; the trial makes
    one itself.
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


def _step(clone: Optimizer, closure: _Closure) -> None:
    takes_closure = "closure" in inspect.signature(type(clone).step).parameters
    try:
        with _NoCollectives():  # type: ignore[no-untyped-call]
            clone.step(closure) if takes_closure else clone.step()  # type: ignore[arg-type]
    except CollectiveInStep:
        raise
    except Exception as error:
        raise TrialError(f"a trial step failed ({type(error).__name__}: {error})") from error


class _NoCollectives(TorchDispatchMode):
    """Refuses collectives: ranks may be in other trials, or in none, and would not answer."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _COLLECTIVES:
            raise CollectiveInStep(f"its step calls {func}")
        return func(*args, **(kwargs or {}))


class OptimizerCounters:
    """The numbers of an optimizer and its groups before a step, outside of parameters' state.

    They count the calls of the step. Set back, they give each of several calls the same start.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.attributes = {
            k: v
            for k, v in vars(optimizer).items()
            if isinstance(v, int | float) and type(v) is not bool
        }
        self.options = [
            {
                k: v.clone() if isinstance(v, Tensor) else v
                for k, v in group.items()
                if isinstance(v, Tensor | int | float)
            }
            for group in optimizer.param_groups
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Set them back, tensors in place; what is new since then goes."""
        vars(self.optimizer).update(self.attributes)
        for group, options in zip(self.optimizer.param_groups, self.options, strict=True):
            for key in [
                k
                for k, v in group.items()
                if isinstance(v, Tensor | int | float) and k not in options
            ]:
                del group[key]
            for key, value in options.items():
                if isinstance(value, Tensor) and isinstance(group[key], Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value
