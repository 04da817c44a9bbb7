"""An update rule says what one element's update depends on: the question before an optimizer's work
is split between ranks.

torch's optimizers and this package's are known. Of every other one a copy is stepped on small
tensors: all parameters at once, against some of them at a time, against blocks of rows. What agrees
to rounding over several steps may be split so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from torch import Tensor, optim
from torch.optim import Optimizer

from lightning_topt.optim.lamb import LAMB
from lightning_topt.optim.lars import LARS
from lightning_topt.optim.pieces import num_rows
from lightning_topt.optim.trial_steps import (
    CollectiveInStep,
    Outcome,
    Select,
    Sketch,
    TrialError,
    initial_parameters,
    make_sketch,
    run_trial,
    same,
)

# "elements": an element's update reads that element's parameter, gradient and state, and numbers of
# its group: rows of a parameter may be updated by different ranks. "parameters": every parameter is
# updated by itself, as a whole.
UpdateRule = Literal["elements", "parameters"]

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    *(
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.ASGD,
        optim.NAdam,
        optim.RAdam,
    ),
    *(optim.RMSprop, optim.Rprop, optim.SGD),
)
# Those that treat each parameter by itself, but not each element.
BY_PARAMETER: tuple[type[Optimizer], ...] = (
    *ELEMENTWISE,
    *(LARS, LAMB, optim.Adafactor, *((optim.Muon,) if hasattr(optim, "Muon") else ())),
)


class UnsplittableOptimizer(ValueError):
    """An optimizer whose step cannot be shared between ranks, with the `reason`, a clause, and the
    way out.
    """

    def __init__(self, reason: str, way_out: str = "") -> None:
        super().__init__(f"{reason}. {way_out}" if way_out else reason)
        self.reason = reason


def is_one_of(optimizer: Optimizer, classes: tuple[type[Optimizer], ...]) -> bool:
    """Return whether it is one of `classes`, or a subclass that steps as they do."""
    return any(isinstance(optimizer, cls) and type(optimizer).step is cls.step for cls in classes)


def update_rule(optimizer: Optimizer, *, declared: UpdateRule | None = None) -> UpdateRule:
    """Return how the step of `optimizer` may be split, as known, as `declared`, or else as tried on
    a copy.

    A trial takes well below a second for element-wise methods; the optimizer, its parameters, its
    state and the random generators stay as they are. It runs on the device of the parameters. A
    declaration is taken at its word, except for what is known to be wrong. Raises
    UnsplittableOptimizer where the step asks its closure twice, communicates, or needs sparse
    gradients, where what happens to one parameter depends on others, and where no trial is
    possible; ValueError for an unknown declaration.
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


def calls_may_repeat(optimizer: Optimizer) -> bool:
    """Return whether one step may be made of several calls, each on other parameters, from the same
    `Counters`.

    Known for torch's optimizers, else tried. False where no trial is possible, and where hooks
    would see every call.
    """
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    if is_one_of(optimizer, BY_PARAMETER):
        return True
    sketch = make_sketch(optimizer)
    try:
        whole = run_trial(optimizer, sketch)
        repeated = run_trial(optimizer, sketch, calls=[[i] for i in range(len(sketch.groups_of))])
    except TrialError:
        return False
    return _difference(whole, repeated, sketch, chosen=range(len(sketch.groups_of))) is None


def check_by_parameter(optimizer: Optimizer) -> None:
    """Raise UnsplittableOptimizer unless every parameter is updated by itself, also in a step that
    asks its closure again.
    """
    if isinstance(optimizer, optim.LBFGS):
        raise _asks_again("LBFGS")
    if not is_one_of(optimizer, BY_PARAMETER) and not isinstance(optimizer, optim.SparseAdam):
        _tried_rule(optimizer, asks_once=False)


def collective_in_step(optimizer: Optimizer) -> str | None:
    """Return that the step of `optimizer` communicates with other ranks, as a clause; None where no
    trial shows it.
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


def _asks_again(name: str) -> UnsplittableOptimizer:
    return UnsplittableOptimizer(
        f"the step of {name} cannot be split: it needs a closure and evaluates the model several "
        "times per step",
        "Leave the parallel optimizer step out, or use an optimizer that steps once per gradient",
    )


def _tried_rule(optimizer: Optimizer, *, asks_once: bool = True) -> UpdateRule:
    """Return how the step may be split, as trials on copies show; `asks_once`: it may not ask its
    closure twice.
    """
    sketch, name = make_sketch(optimizer), type(optimizer).__name__
    try:
        whole = run_trial(optimizer, sketch)
        if asks_once and whole.closure_calls > 1:
            raise _asks_again(name)
        if asks_once and whole.moves_first:
            raise UnsplittableOptimizer(
                f"the step of {name} cannot be split: it moves parameters, and asks its closure "
                "then",
                "Leave the parallel optimizer step out, or use an optimizer that asks for the loss "
                "first",
            )
        if all(
            same(whole.parameters[i], p, change=0.0)
            for i, p in enumerate(initial_parameters(sketch))
        ):
            raise TrialError("a trial step changed none of its parameters")
        for chosen in _subsets(sketch.groups_of):
            difference = _difference(
                whole, run_trial(optimizer, sketch, chosen=chosen), sketch, chosen=chosen
            )
            if difference is not None:
                raise UnsplittableOptimizer(
                    f"the step of {name} cannot be split: its result for some parameters depends "
                    "on which others are "
                    f"updated with them, or on random numbers ({difference})",
                    "Leave the parallel optimizer step out; if you know better, declare its update "
                    "rule ('parameters' or "
                    "'elements')",
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
            "'parameters' if every parameter is; "
            "if neither, leave the parallel optimizer step out",
        ) from error
    return "elements" if _rows_are_independent(optimizer, sketch, whole) else "parameters"


def _rows_are_independent(optimizer: Optimizer, sketch: Sketch, whole: Outcome) -> bool:
    tall = [i for i, parameter in whole.parameters.items() if num_rows(parameter) > 1]
    for i in tall:
        shape = whole.parameters[i].shape
        for value in whole.states[i].values():
            if not isinstance(value, int | float | None) and not _has_rows_or_is_number(
                value, shape
            ):
                return False
    for select in (_first_rows, _last_rows):
        try:
            part = run_trial(optimizer, sketch, chosen=tall, select=select)
        except TrialError:
            return False
        if _difference(whole, part, sketch, chosen=tall, select=select) is not None:
            return False
    return bool(tall)


def _has_rows_or_is_number(value: Any, shape: Sequence[int]) -> bool:
    return isinstance(value, Tensor) and (value.shape == shape or value.numel() == 1)


def _first_rows(tensor: Tensor) -> Tensor:
    return tensor[: max(1, len(tensor) // 3)]


def _last_rows(tensor: Tensor) -> Tensor:
    return tensor[max(1, len(tensor) // 3) :]


def _subsets(groups_of: Sequence[int]) -> Iterator[list[int]]:
    """Trial parameters that a rank may have: every other one, the rest; and none of the first or of
    the last groups.
    """
    everything = range(len(groups_of))
    yield from (list(everything[::2]), list(everything[1::2]))
    if groups_of and groups_of[-1] > 0:
        yield from ([i for i in everything if groups_of[i] == g] for g in (0, groups_of[-1]))


def _difference(
    whole: Outcome,
    part: Outcome,
    sketch: Sketch,
    *,
    chosen: Sequence[int],
    select: Select | None = None,
) -> str | None:
    """Return where `part`, over the `chosen` parameters or the `select`-ed rows of them, differs
    from `whole`; None if nowhere.
    """
    start = initial_parameters(sketch)
    for i in chosen:
        moved = float((whole.parameters[i] - start[i]).abs().max()) if start[i].numel() else 0.0
        expected = select(whole.parameters[i]) if select else whole.parameters[i]
        shape = tuple(start[i].shape)
        if not same(expected, part.parameters[i], change=moved):
            return f"a parameter of shape {shape}"
        if (
            key := _different_key(_rows_of_state(whole.states[i], shape, select), part.states[i])
        ) is not None:
            return f"{key!r} in the state of a parameter of shape {shape}"
    used = {sketch.groups_of[i] for i in chosen}
    for number, (group, twin) in enumerate(zip(whole.groups, part.groups, strict=True)):
        if number in used and (key := _different_key(group, twin)) is not None:
            return f"{key!r} in the options of a parameter group"
    if (key := _different_key(whole.shared, part.shared)) is not None:
        return f"{key!r}, which all groups share"
    return None


def _rows_of_state(
    state: Mapping[str, Any], shape: Sequence[int], select: Select | None
) -> Mapping[str, Any]:
    if select is None:
        return state
    return {
        k: select(v) if isinstance(v, Tensor) and v.dim() and v.shape == shape else v
        for k, v in state.items()
    }


def _different_key(values: Mapping[str, Any], twins: Mapping[str, Any]) -> str | None:
    different = [
        k
        for k in {**values, **twins}
        if k not in values or k not in twins or not same(values[k], twins[k])
    ]
    return different[0] if different else None
