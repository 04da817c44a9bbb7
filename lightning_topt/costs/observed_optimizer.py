"""Watch the steps that the user's optimizers take anyway; the profile is that of `read_optimizer`.

```python
observer = OptimizerObserver([optimizer], named_parameters=module.named_parameters())
with observer.recording(optimizer):  # the first step shows the state,
    optimizer.step(closure)          # the last one recorded traffic and temporaries
with observer.timing(optimizer):     # any number of later steps
    optimizer.step(closure)
profile = observer.profile()
```

Inside the two contexts `optimizer.step` is replaced on the object by a function that calls it once
and watches from call to return, except while a closure runs. What comes around the step (unscaling,
clipping, a closure that a precision plugin has called already) is not seen, and a step that a
GradScaler leaves out is not counted. Nothing else of the optimizer is touched, and what goes wrong
while watching reaches the caller of `profile`, never the training.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_topt.costs.optimizer import (
    OptimizerProfile,
    ParameterUpdate,
    Probe,
    check_dense,
    exchanges_of_whole,
    frozen_update,
    is_adaptive,
    lbfgs_probe,
    options_key,
    updated_parameters,
)
from lightning_topt.costs.optimizer_copy import OptimizerError
from lightning_topt.costs.optimizer_recording import (
    KeptMemory,
    Shape,
    StepRecording,
    StepWork,
    state_tensors,
)
from lightning_topt.optim.update_rule import BY_PARAMETER, ELEMENTWISE, is_one_of

# a step whose thread had the processor for less than this part of the time was kept from it by
# others
_BUSY = 0.7


class OptimizerObserver:
    """Watches real steps of `optimizers`, which were built over `named_parameters`.

    `profile` says what was seen.
    """

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        *,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
    ) -> None:
        self.optimizers = list(optimizers)
        self._named_parameters = list(named_parameters)
        self._seen = {id(optimizer): _Seen() for optimizer in self.optimizers}

    @property
    def collectives(self) -> bool:
        """Whether a recorded step has communicated.

        Then nobody may change which ranks step which parameters.
        """
        return any(seen.collectives for seen in self._seen.values())

    def recorded(self, optimizer: Optimizer) -> int:
        """Return how many steps of `optimizer` were recorded.

        None that a GradScaler left out, and none of LBFGS.
        """
        return self._seen[id(optimizer)].recorded

    def timed(self, optimizer: Optimizer) -> int:
        """Return how many steps of `optimizer` were timed."""
        return len(self._seen[id(optimizer)].clocks)

    @contextmanager
    def recording(self, optimizer: Optimizer) -> Iterator[None]:
        """Record the operators and the memory of a step of `optimizer` that is taken inside."""
        seen = self._seen[id(optimizer)]
        with _watched_step(
            optimizer, lambda: StepRecording(optimizer, seen.kept), seen.add_recording
        ):
            yield

    @contextmanager
    def timing(self, optimizer: Optimizer) -> Iterator[None]:
        """Time a step of `optimizer` that is taken inside; nothing waits for a device."""
        with _watched_step(
            optimizer, lambda: _Clock(optimizer), self._seen[id(optimizer)].clocks.append
        ):
            yield

    def profile(self, *, op_overhead_seconds: float = 0.0) -> OptimizerProfile:
        """Return the profile of all optimizers, as far as their steps have shown it.

        `OptimizerProfile.update_seconds` adds the device's overhead for each call to the seconds
        per element. The timed steps contain that overhead already: what is given here is taken off
        per call, so that it counts once.

        Raises OptimizerError for a parameter that is not among the named ones or has no shape yet,
        for an optimizer without a recorded step, whose step could not be watched, or that is made
        for sparse gradients.
        """
        trained: dict[int, list[_Trained]] = {id(optimizer): [] for optimizer in self.optimizers}
        updates: dict[str, ParameterUpdate] = {}
        for optimizer, group, parameter, name in updated_parameters(
            self.optimizers, self._named_parameters
        ):
            updates[name] = frozen_update(optimizer, parameter)  # stands for now, to keep the order
            if parameter.requires_grad:
                trained[id(optimizer)].append(_Trained(name, parameter, group))
        probes: dict[str, Probe] = {}
        seconds: dict[str, float] = {}
        whole: dict[str, int] = {}
        # an optimizer that communicates in its step shares its parameters out already
        splits = not self.collectives
        for optimizer in self.optimizers:
            seen, parameters = self._seen[id(optimizer)], trained[id(optimizer)]
            found = _probes(optimizer, seen, parameters)
            updates |= {each.name: found[each.name].update(each.parameter) for each in parameters}
            probes |= found
            seconds |= _seconds_per_element(
                seen, parameters, found, op_overhead_seconds=op_overhead_seconds
            )
            count = exchanges_of_whole(optimizer) if splits else 0
            if count is not None:
                whole |= dict.fromkeys((each.name for each in parameters), count)
        return OptimizerProfile(
            name=" + ".join(type(optimizer).__name__ for optimizer in self.optimizers),
            elementwise=splits
            and all(is_one_of(optimizer, ELEMENTWISE) for optimizer in self.optimizers),
            by_parameter=splits
            and all(is_one_of(optimizer, BY_PARAMETER) for optimizer in self.optimizers),
            updates=updates,
            seconds_per_element=seconds,
            probes=probes,
            adaptive=any(map(is_adaptive, self.optimizers)),
            whole=whole,
        )


# ---- One step, called as it would be


class _Watch(Protocol):
    def resume(self) -> None: ...

    def pause(self) -> None: ...


_W = TypeVar("_W", bound=_Watch)


@contextmanager
def _watched_step(
    optimizer: Optimizer, make: Callable[[], _W], done: Callable[[_W], None]
) -> Iterator[None]:
    """Give `done` each call of `optimizer.step` inside that returns.

    As watched by what `make` returns.
    """
    if isinstance(optimizer, optim.LBFGS):  # known by formula
        yield
        return
    is_active, original, own = True, optimizer.step, vars(optimizer).get("step")

    @functools.wraps(original)  # GradScaler reads the signature
    def step(*args: Any, **kwargs: Any) -> Any:
        if not is_active:  # a scheduler that was made inside has wrapped this function
            return original(*args, **kwargs)
        # a closure runs the model, which is not the optimizer's work: the watch pauses meanwhile
        watch = make()
        args, kwargs = _with_pauses(watch, args, kwargs)
        watch.resume()
        try:
            result = original(*args, **kwargs)
        finally:
            watch.pause()
        done(watch)
        return result

    vars(optimizer)["step"] = step
    try:
        yield
    finally:
        is_active = False
        # else something has wrapped it meanwhile, and goes on to the original through it
        if vars(optimizer).get("step") is step:
            if own is None:
                del vars(optimizer)["step"]
            else:
                vars(optimizer)["step"] = own


def _with_pauses(
    watch: _Watch, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a step with a closure that is not watched while it runs."""

    def paused(closure: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(closure)
        def call(*args: Any, **kwargs: Any) -> Any:
            watch.pause()
            try:
                return closure(*args, **kwargs)
            finally:
                watch.resume()

        return call

    if callable(kwargs.get("closure")):
        kwargs = kwargs | {"closure": paused(kwargs["closure"])}
    if args and callable(args[0]) and not isinstance(args[0], nn.Module | Tensor):
        args = (paused(args[0]), *args[1:])
    return args, kwargs


# ---- Seconds of one step


class _Clock:
    """The time of one step, on the wall, of its thread, and of its accelerator."""

    def __init__(self, optimizer: Optimizer) -> None:
        device = next(
            (p.device for group in optimizer.param_groups for p in group["params"]),
            torch.device("cpu"),
        )
        self._device = None if device.type in ("cpu", "meta") else device
        self._wall, self._thread = 0.0, 0.0
        self._events: list[torch.Event] = []

    def resume(self) -> None:
        """Run from here on."""
        self._mark()
        self._wall -= perf_counter()
        self._thread -= thread_time()

    def pause(self) -> None:
        """Stand still from here on."""
        self._thread += thread_time()
        self._wall += perf_counter()
        self._mark()

    def _mark(self) -> None:
        if self._device is not None:
            event = torch.Event(self._device, enable_timing=True)
            event.record()
            self._events.append(event)

    def seconds(self, *, waits: bool) -> float:
        """Return the seconds of the step.

        `waits` says that it waits for other ranks, which takes time but no processor.
        """
        if self._events:
            # events come in pairs, start and stop, on the device's stream
            self._events[-1].synchronize()
            pairs = zip(self._events[::2], self._events[1::2], strict=True)
            return sum(start.elapsed_time(end) for start, end in pairs) / 1e3
        return self._thread if self._thread < _BUSY * self._wall and not waits else self._wall


# ---- From steps to a profile


class _Seen:
    """What the steps of one optimizer have shown so far."""

    def __init__(self) -> None:
        self.recorded = 0
        self.collectives = False
        self.failure: Exception | None = None
        self.work: dict[Tensor, StepWork] = {}
        self.kept: list[KeptMemory] = []
        self.clocks: list[_Clock] = []

    def add_recording(self, recording: StepRecording) -> None:
        """Take over what one step has shown.

        Its work stands for all later ones; what it keeps is added to what lives on.
        """
        try:
            if recording.failure is not None:
                raise recording.failure
            self.work = recording.work(is_first=self.recorded == 0)
            kept = {
                id(storage): each
                for each in recording.kept()
                if (storage := each.reference()) is not None
            }
            known = {
                id(storage): each for each in self.kept if (storage := each.reference()) is not None
            }
            self.kept = list((kept | known).values())
        except Exception as error:  # must not reach the user's step
            self.failure = error
        self.collectives |= recording.collectives
        self.recorded += 1
        recording.close()


@dataclass(frozen=True, eq=False)
class _Trained:
    name: str
    parameter: nn.Parameter
    group: Mapping[str, Any]


_States = tuple[tuple[Shape, float], ...]  # shape and bytes per element of each tensor


def _probes(optimizer: Optimizer, seen: _Seen, parameters: Sequence[_Trained]) -> dict[str, Probe]:
    """Return what recorded steps say about each trained parameter of one optimizer, by name."""
    check_dense(optimizer)
    if isinstance(optimizer, optim.LBFGS):
        return {
            each.name: lbfgs_probe(each.group, each.parameter.ndim, each.parameter.dtype)
            for each in parameters
        }
    name = type(optimizer).__name__
    if seen.failure is not None:
        raise OptimizerError(
            f"a step of {name} could not be watched, so its costs are not known: {seen.failure}. "
            "Give the plan explicitly, for instance plan='ddp'"
        ) from seen.failure
    if parameters and not seen.recorded:
        raise OptimizerError(f"no step of {name} has been recorded yet, so its costs are not known")
    states = _states(optimizer, seen, parameters)
    kinds: dict[Any, list[_Trained]] = defaultdict(list)
    for each in parameters:
        kinds[options_key(each.group), each.parameter.ndim, each.parameter.dtype].append(each)
    probes: dict[str, Probe] = {}
    for of_kind in kinds.values():
        probes |= _probes_of_kind(of_kind, states, seen.work)
    return probes


def _states(
    optimizer: Optimizer, seen: _Seen, parameters: Sequence[_Trained]
) -> dict[str, _States]:
    """Return the tensors that the optimizer keeps for each parameter, in its state or elsewhere."""
    tensors: dict[int, list[Tensor]] = defaultdict(list)
    for key, leaves in state_tensors(optimizer):
        tensors[id(key)] += leaves
    own: dict[int, list[tuple[Shape, float]]] = defaultdict(list)
    for each in parameters:
        own[id(each.parameter)] = [
            (tuple(t.shape), t.element_size()) for t in tensors[id(each.parameter)]
        ]
    common = 0
    # memory outside of `state`: of one parameter, or of all together, which then share it
    for kept in seen.kept:
        if kept.reference() is None:
            continue
        if id(kept.parameter) in own:
            own[id(kept.parameter)].append((kept.shape, kept.itemsize))
        else:
            common += math.prod(kept.shape) * kept.itemsize
    shared = [each.parameter for each in parameters if each.parameter in seen.work]
    total = sum(parameter.numel() for parameter in shared)
    for parameter in shared if common and total else ():
        own[id(parameter)].append((tuple(parameter.shape), common / total))
    return {each.name: tuple(own[id(each.parameter)]) for each in parameters}


def _probes_of_kind(
    parameters: Sequence[_Trained], states: Mapping[str, _States], work: Mapping[Tensor, StepWork]
) -> dict[str, Probe]:
    """Return the probes of parameters with the same options, dims and dtype.

    Those that got no gradient in the recorded steps are taken to be like the first one that did.
    """
    probes: dict[str, Probe] = {}
    updated = [each for each in parameters if each.parameter in work]
    # shapes of states, in the dims of their parameters
    templates = _templates([(tuple(each.parameter.shape), states[each.name]) for each in updated])
    for each, template in zip(updated, templates, strict=True):
        done, numel = work[each.parameter], max(each.parameter.numel(), 1)
        probes[each.name] = Probe(
            _placeholders(each.parameter.ndim),
            template,
            moved_bytes=done.moved_bytes / numel,
            calls=done.calls,
            temporaries=done.temporary_bytes / numel,
            temporaries_add=done.temporaries_add,
        )
    for each in parameters:
        if each.name not in probes and updated:
            probes[each.name] = probes[updated[0].name]
        elif each.name not in probes:
            shape = tuple(each.parameter.shape)
            template = _follow(states[each.name], shape)
            probes[each.name] = Probe(_placeholders(len(shape)), template, 0.0, 0.0, 0.0, False)
    return probes


def _seconds_per_element(
    seen: _Seen,
    parameters: Sequence[_Trained],
    probes: Mapping[str, Probe],
    *,
    op_overhead_seconds: float,
) -> dict[str, float]:
    """Return the seconds per element, the same for all parameters of one optimizer.

    None without a timed step.
    """
    updated = [each for each in parameters if each.parameter in seen.work]
    # one number for all: a timed step says nothing about single parameters
    numel = sum(each.parameter.numel() for each in updated)
    if not seen.clocks or not numel:
        return {}
    seconds = statistics.median(clock.seconds(waits=seen.collectives) for clock in seen.clocks)
    calls = sum(probes[each.name].calls for each in updated)
    return dict.fromkeys(
        (each.name for each in parameters), max(seconds - calls * op_overhead_seconds, 0.0) / numel
    )


# ---- Dims of a parameter in the shapes of its state


def _placeholders(ndim: int) -> Shape:
    """Return what stands for the dims of a parameter in the shapes of its state.

    -1, -2, ..., which no size is.
    """
    return tuple(range(-1, -ndim - 1, -1))


def _templates(parameters: Sequence[tuple[Shape, _States]]) -> list[_States]:
    """Return the states of parameters, with placeholders for dims that follow the parameter's.

    Where dims are equal it cannot be seen which one is followed: one rule that holds for all
    parameters is preferred.
    """
    own = [_follow(states, shape) for shape, states in parameters]
    # a non-square parameter may tell what a square one leaves open
    for template in dict.fromkeys(own):
        if all(_filled(template, shape) == states for shape, states in parameters):
            return [template] * len(parameters)
    return own


def _follow(states: _States, shape: Shape) -> _States:
    return tuple((_followed(each, shape), itemsize) for each, itemsize in states)


def _followed(state: Shape, shape: Shape) -> Shape:
    """Return the dims of a state tensor, a placeholder for each that is a dim of the parameter."""
    dims = _placeholders(len(shape))
    # the same elements, perhaps flat
    if state == shape or (math.prod(state) == math.prod(shape) > 1):
        return dims
    found, unused = list(state), list(range(len(shape)))

    def take(place: int, dim: int) -> None:
        found[place] = dims[dim]
        if dim in unused:
            unused.remove(dim)

    # dims at the same place first, then equal ones anywhere; sizes of 1 say nothing
    if len(state) == len(shape):
        for place, size in enumerate(state):
            if size == shape[place] != 1:
                take(place, place)
    for place, size in enumerate(state):
        if found[place] == size != 1 and size in shape:
            take(place, next((dim for dim in unused if shape[dim] == size), shape.index(size)))
    return tuple(found)


def _filled(template: _States, shape: Shape) -> _States:
    """Return the states of a parameter of `shape`."""
    sizes = dict(zip(_placeholders(len(shape)), shape, strict=True))
    return tuple(
        (tuple(sizes.get(dim, dim) for dim in dims), itemsize) for dims, itemsize in template
    )
