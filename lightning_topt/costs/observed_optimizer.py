"""Watch the steps that the user's optimizers take anyway; the profile is that of `read_optimizer`,
without a step more.

```python
observer = OptimizerObserver([optimizer], named_parameters=module.named_parameters())
# the first step shows the state, the last one recorded traffic and temporaries
with observer.recording(optimizer):
    optimizer.step(closure)
with observer.timing(optimizer):  # any number of later steps
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
import gc
import math
import statistics
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter, thread_time
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn, optim
from torch._ops import HigherOrderOperator, OpOverload
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from lightning_topt.costs.optimizer import (
    OptimizerProfile,
    frozen_update,
    is_adaptive,
    options_key,
    updated_parameters,
)
from lightning_topt.costs.optimizer_copy import OptimizerError
from lightning_topt.costs.optimizer_probe import ParameterUpdate, Probe, check_dense, lbfgs_probe
from lightning_topt.graph.collective_ops import is_collective
from lightning_topt.graph.writes import is_strided, written_tensors
from lightning_topt.optim.update_rule import BY_PARAMETER, ELEMENTWISE, is_one_of

# a step whose thread had the processor for less than this part of the time was kept from it by
# others
_BUSY = 0.7
# Operators that look at no more than the shape of what they are given.
_SHAPE_ONLY = {
    f"aten::{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn")
} | {f"aten::new_{name}" for name in ("empty", "empty_strided", "zeros", "ones", "full")}

_Shape = tuple[int, ...]
_Operator = OpOverload | HigherOrderOperator


class OptimizerObserver:
    """Watches real steps of `optimizers`, which were built over `named_parameters`; `profile` says
    what was seen.
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
        """Whether a recorded step has communicated: then nobody may change which ranks step which
        parameters.
        """
        return any(seen.collectives for seen in self._seen.values())

    def recorded(self, optimizer: Optimizer) -> int:
        """Return how many steps of `optimizer` were recorded: none that a GradScaler left out, and
        none of LBFGS.
        """
        return self._seen[id(optimizer)].recorded

    def timed(self, optimizer: Optimizer) -> int:
        """Return how many steps of `optimizer` were timed."""
        return len(self._seen[id(optimizer)].clocks)

    @contextmanager
    def recording(self, optimizer: Optimizer) -> Iterator[None]:
        """Record the operators and the memory of a step of `optimizer` that is taken inside."""
        seen = self._seen[id(optimizer)]
        with _watched_step(optimizer, lambda: _Recording(optimizer, seen.kept), seen.add_recording):
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
        for optimizer in self.optimizers:
            seen, parameters = self._seen[id(optimizer)], trained[id(optimizer)]
            found = _probes(optimizer, seen, parameters)
            updates |= {each.name: found[each.name].update(each.parameter) for each in parameters}
            probes |= found
            seconds |= _seconds_per_element(
                seen, parameters, found, op_overhead_seconds=op_overhead_seconds
            )
        splits = not self.collectives
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
        )


# --------------------------------------------------------------------------------------------------
# One step, called as it would be


class _Watch(Protocol):
    def resume(self) -> None: ...

    def pause(self) -> None: ...


_W = TypeVar("_W", bound=_Watch)


@contextmanager
def _watched_step(
    optimizer: Optimizer, make: Callable[[], _W], done: Callable[[_W], None]
) -> Iterator[None]:
    """Inside, each call of `optimizer.step` that returns is given to `done` as watched by what
    `make` returns.
    """
    if isinstance(optimizer, optim.LBFGS):  # known by formula
        yield
        return
    is_active, original, own = True, optimizer.step, vars(optimizer).get("step")

    @functools.wraps(original)  # GradScaler reads the signature
    def step(*args: Any, **kwargs: Any) -> Any:
        if not is_active:  # a scheduler that was made inside has wrapped this function
            return original(*args, **kwargs)
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


# --------------------------------------------------------------------------------------------------
# What one step reads, writes and allocates


@dataclass(eq=False)
class _Memory:
    """A storage that a recorded step deals with. Parameters are numbers here: owner None is
    unknown, or several.
    """

    nbytes: int
    owner: int | None
    shape: _Shape
    itemsize: int
    is_old: bool  # older than the step
    # old, but known neither as parameter, gradient nor from `optimizer.state`, and written to
    is_state: bool
    # owners by offset where several share it
    pieces: dict[int, int | None] = field(default_factory=dict)
    reference: Any = None


class _Use(NamedTuple):
    """A tensor that an operator is given: its memory, if it is strided, and whose it is."""

    address: int | None
    owner: int | None
    nbytes: int


@dataclass(frozen=True, eq=False)
class _Kept:
    """A storage that the optimizer keeps outside of `optimizer.state`, and which parameter it was
    made from.
    """

    reference: Callable[[], torch.UntypedStorage | None]
    parameter: Tensor | None
    shape: _Shape
    itemsize: int


@dataclass(frozen=True)
class _Work:
    """What a step does for one parameter, in all."""

    moved_bytes: int
    calls: float
    temporary_bytes: int
    temporaries_add: bool


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators of one step: whose tensors they read and write, and what they
    allocate.
    """

    supports_higher_order_operators = True  # they raise under a mode that does not say so

    def __init__(self, optimizer: Optimizer, kept: Iterable[_Kept]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives = False
        self.failure: Exception | None = None
        self.optimizer = optimizer
        self.parameters: list[Tensor] = [
            p for group in optimizer.param_groups for p in group["params"]
        ]
        self._group_of = [
            number for number, group in enumerate(optimizer.param_groups) for _ in group["params"]
        ]
        self._sizes = [max(p.numel(), 1) for p in self.parameters]
        self._moved, self._calls = _Shares(self._sizes), _Shares([1] * len(self._sizes))
        self._known: dict[int, _Memory] = {}  # by address
        self._memories: list[_Memory] = []
        self._events: list[tuple[_Memory, int]] = []  # bytes taken and, below 0, given back
        self._kept = list(kept)
        self._is_on, self._is_pushed, self._is_claimed = False, False, False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave a compiled step compiled."""
        return True

    def resume(self) -> None:
        """Watch from here on."""
        self._is_on, self._is_claimed = True, False
        if not self._is_pushed:
            self.__enter__()  # type: ignore[no-untyped-call]
            self._is_pushed = True

    def pause(self) -> None:
        """Watch no more; the mode only stays where one of the user's lies upon it."""
        self._is_on = False
        if self._is_pushed and _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._is_pushed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._is_on and self.failure is None:
            try:
                self._note(func, args, kwargs or {}, output)
            except Exception as error:  # must not reach the user's step
                self.failure = error
        return output

    def _claim(self) -> None:
        """Note whose the memory is that exists before the step; a closure that has run since makes
        new gradients.
        """
        numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        for number, parameter in enumerate(self.parameters):
            for tensor in (parameter, parameter.grad):
                self._track(tensor, owner=number)
        for key, leaves in _state_tensors(self.optimizer):
            for tensor in leaves:
                self._track(tensor, owner=numbers.get(id(key)), is_state=id(key) not in numbers)
        for each in self._kept:
            storage = each.reference()
            if storage is not None:
                owner = numbers.get(id(each.parameter))
                self._add(
                    storage, _Memory(storage.nbytes(), owner, each.shape, each.itemsize, True, True)
                )

    def _track(
        self,
        tensor: Tensor | None,
        *,
        owner: int | None,
        is_state: bool = False,
        is_old: bool = True,
    ) -> None:
        storage = None if tensor is None else _storage(tensor)
        if tensor is None or storage is None:
            return
        memory = self._known.get(storage._cdata)
        if memory is None:
            size = tensor.element_size()
            memory = _Memory(storage.nbytes(), owner, tuple(tensor.shape), size, is_old, is_state)
            self._add(storage, memory)
        elif memory.owner != owner:
            memory.owner = None  # DDP's buckets, flat parameters
        memory.pieces[int(tensor.storage_offset())] = owner

    def _add(self, storage: torch.UntypedStorage, memory: _Memory) -> None:
        address = storage._cdata
        if address in self._known:
            return
        self._known[address] = memory
        self._memories.append(memory)

        def freed(_: object) -> None:
            del self._known[address]
            memory.reference = None
            # a closure replaces gradients: the step gains nothing by it
            if self._is_on or not memory.is_old:
                self._events.append((memory, -memory.nbytes))

        memory.reference = weakref.ref(storage, freed)
        if not memory.is_old:
            self._events.append((memory, memory.nbytes))

    def _use(self, tensor: Tensor) -> _Use:
        storage = _storage(tensor)
        if storage is None:
            return _Use(None, None, 0)
        memory = self._known.get(storage._cdata)
        if memory is None:
            owner = None
        elif memory.owner is None:
            owner = memory.pieces.get(int(tensor.storage_offset()))
        else:
            owner = memory.owner
        return _Use(storage._cdata, owner, tensor.nbytes)

    def _note(
        self, func: _Operator, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Share the bytes that one operator reads and writes among the parameters whose tensors
        they are.
        """
        inputs: dict[int, Tensor] = {}
        outputs: dict[int, Tensor] = {}
        _collect(args, inputs)
        positional = set(inputs) if kwargs else inputs.keys()
        _collect(kwargs, inputs)
        _collect(output, outputs)
        new = {key: tensor for key, tensor in outputs.items() if key not in inputs}
        kind = _kind(func)
        self.collectives |= kind.communicates
        if not inputs and not new:
            return
        if not self._is_claimed:
            self._claim()
            self._is_claimed = True
        uses = {key: self._use(tensor) for key, tensor in inputs.items()}
        owners = {use.owner for use in uses.values() if use.owner is not None}
        self._calls.add(1.0, None, owners)

        written = _written(func, args, kwargs, inputs, new) if kind.may_write else {}
        only = next(iter(owners)) if len(owners) == 1 else None
        for key, tensor in written.items():
            if uses[key].address not in self._known:
                self._track(tensor, owner=only, is_state=True)
        makers = _makers(args, output, uses) if new else {}
        known = {use.address for use in uses.values()} if new else set()
        made = 0
        for key, tensor in new.items():
            use = self._use(tensor)
            if (
                use.address is not None
                and use.address not in known
                and use.address not in self._known
            ):
                made += 1
                owner = makers.get(key, only)
                self._track(tensor, owner=owner, is_old=False)
                self._moved.add(use.nbytes, owner, owners)
        if kind.is_view or (new and not made and not written):
            return  # looks at the same memory in another way
        for key in written:
            self._moved.add(uses[key].nbytes, uses[key].owner, owners)
            if key not in positional:  # `out=`
                del uses[key]
        if not kind.reads_shapes:
            for use in uses.values():
                self._moved.add(use.nbytes, use.owner, owners)

    def work(self, *, is_first: bool) -> dict[Tensor, _Work]:
        """Return what the step did, for each parameter that it updated.

        What the first step (`is_first`) leaves behind is state: no temporary.
        """
        moved, calls = self._moved.amounts, self._calls.amounts
        numbers = [n for n, p in enumerate(self.parameters) if moved[n] or p.grad is not None]
        self._moved.settle(numbers)
        self._calls.settle(numbers)
        events = [
            (memory.owner, nbytes)
            for memory, nbytes in self._events
            if not (is_first and not memory.is_old and memory.reference is not None)
        ]
        groups: dict[int, dict[int, int]] = defaultdict(dict)
        for number in numbers:
            groups[self._group_of[number]][number] = self._sizes[number]
        temporaries: dict[int, tuple[float, bool]] = {}
        for sizes in groups.values():
            temporaries |= _temporaries(events, sizes)
        states = {id(key): leaves for key, leaves in _state_tensors(self.optimizer)}
        work = {}
        for number in numbers:
            parameter = self.parameters[number]
            nbytes = moved[number]
            # by a kernel that no dispatcher sees, or in a compiled step
            if not nbytes and parameter.grad is not None:
                state = sum(map(_nbytes, states.get(id(parameter), ())))
                nbytes = float(2 * _nbytes(parameter) + _nbytes(parameter.grad) + 2 * state)
            # Rounded, so that parameters for which the same is done are equal.
            temporary, adds = temporaries[number]
            work[parameter] = _Work(round(nbytes), round(calls[number], 3), round(temporary), adds)
        return work

    def kept(self) -> list[_Kept]:
        """Return the memory that the step has made or written, that lives on, and that nothing else
        explains.
        """
        kept = self._unexplained()
        if kept:
            gc.collect(1)  # it may be in a cycle of what was the step's own
            kept = self._unexplained()
        return kept

    def close(self) -> None:
        """Let go of everything, without waiting for the garbage collector."""
        for memory in self._memories:
            memory.reference = None
        self._memories.clear()
        self._events.clear()

    def _unexplained(self) -> list[_Kept]:
        explained = {
            storage._cdata
            for tensor in (
                *self.parameters,
                *(p.grad for p in self.parameters),
                *_of_parameters(self.optimizer),
            )
            if tensor is not None and (storage := _storage(tensor)) is not None
        }
        kept = []
        for memory in self._memories:
            storage = memory.reference() if memory.reference is not None else None
            if (
                storage is None
                or storage._cdata in explained
                or (memory.is_old and not memory.is_state)
            ):
                continue
            parameter = None if memory.owner is None else self.parameters[memory.owner]
            shape, itemsize = memory.shape, memory.itemsize
            if math.prod(shape) * itemsize != memory.nbytes:  # seen through a view
                shape, itemsize = (memory.nbytes,), 1
            kept.append(_Kept(weakref.ref(storage), parameter, shape, itemsize))
        return kept


class _Kind(NamedTuple):
    """What is known about an operator without its arguments."""

    communicates: bool
    may_write: bool
    is_view: bool
    reads_shapes: bool


@functools.cache
def _kind(func: _Operator) -> _Kind:
    if not isinstance(func, OpOverload):
        return _Kind(communicates=False, may_write=True, is_view=False, reads_shapes=False)
    communicates, schema = is_collective(func), func._schema
    is_view = torch.Tag.inplace_view in func.tags
    return _Kind(
        communicates, communicates or schema.is_mutable, is_view, schema.name in _SHAPE_ONLY
    )


def _written(
    func: _Operator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: dict[int, Tensor],
    new: dict[int, Tensor],
) -> dict[int, Tensor]:
    """The arguments that an operator writes to, by their ids."""
    if isinstance(func, OpOverload):
        return {
            id(tensor): tensor
            for tensor in written_tensors(func, args, kwargs)
            if id(tensor) in inputs
        }
    return {} if new else inputs  # without results it has no other use


class _Shares:
    """Amounts by parameter; what is not of one parameter is shared by `weights`."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.amounts = [0.0] * len(weights)
        self._weights = weights
        self._rest = 0.0  # of nobody in particular

    def add(self, amount: float, owner: int | None, others: Collection[int]) -> None:
        """Give `amount` to its `owner`; where there is none, share it among `others`."""
        if owner is None and len(others) == 1:
            (owner,) = others
        if owner is not None:
            self.amounts[owner] += amount
            return
        if not others:
            self._rest += amount
            return
        total = sum(self._weights[number] for number in others)
        for number in others:
            self.amounts[number] += amount * self._weights[number] / total

    def settle(self, numbers: Collection[int]) -> None:
        """Share what is left among the parameters `numbers`."""
        rest, self._rest = self._rest, 0.0
        self.add(rest, None, numbers)


def _makers(args: tuple[Any, ...], output: Any, uses: Mapping[int, _Use]) -> dict[int, int | None]:
    """Whose the results of an operator on lists are, by their ids: the i-th comes from the i-th
    tensor of the first list.
    """
    if not isinstance(output, list | tuple) or not args or not isinstance(args[0], list | tuple):
        return {}
    if len(output) != len(args[0]):
        return {}
    return {
        id(made): uses[id(source)].owner
        for made, source in zip(output, args[0], strict=True)
        if id(source) in uses
    }


def _temporaries(
    events: Iterable[tuple[int | None, int]], sizes: Mapping[int, int]
) -> dict[int, tuple[float, bool]]:
    """Return bytes of temporaries and whether these add up, for each parameter of one group, of
    `sizes` elements.

    The sum, or where temporaries do not add up the largest, is the peak that was seen for the
    group.
    """
    alive: dict[int | None, int] = defaultdict(int)
    most: dict[int | None, int] = defaultdict(int)
    together = peak = 0
    for owner, nbytes in events:
        if owner is None or owner in sizes:
            alive[owner] += nbytes
            most[owner] = max(most[owner], alive[owner])
            together += nbytes
            peak = max(peak, together)
    of_none, total = most.pop(None, 0), sum(sizes.values())
    shares = {number: most[number] + of_none * size / total for number, size in sizes.items()}
    largest, everything = max(map(most.__getitem__, sizes), default=0), sum(shares.values())
    # In a for-loop the variables of one parameter still hold on while the next one's are made: up
    # to twice the largest.
    adds = peak > 2 * largest or peak - largest > 0.75 * (everything - largest)
    reached = everything if adds else max(shares.values(), default=0.0)
    scale = peak / reached if reached else 0.0
    return {number: (share * scale, adds) for number, share in shares.items()}


def _collect(value: Any, found: dict[int, Tensor]) -> None:
    """Put the tensors among the arguments or results of an operator into `found`, by their ids."""
    if isinstance(value, Tensor):
        found[id(value)] = value
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):  # of a higher-order operator
        _collect(tuple(value.values()), found)


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor; None for one that has none of its own (sparse, or of a subclass)."""
    try:
        return tensor.untyped_storage() if is_strided(tensor) else None
    except (RuntimeError, NotImplementedError):
        return None


def _nbytes(tensor: Tensor) -> int:
    return tensor.nbytes if is_strided(tensor) else 0


def _state_tensors(
    optimizer: Any, known: set[int] | None = None
) -> Iterator[tuple[Any, list[Tensor]]]:
    """The keys of `optimizer.state`, parameters as a rule, with their tensors; and of optimizers
    that this one wraps.
    """
    known = set() if known is None else known
    known.add(id(optimizer))
    state = getattr(optimizer, "state", {})
    if id(state) not in known:
        known.add(id(state))
        for key, value in state.items():
            yield (
                key,
                list(
                    {
                        id(leaf): leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)
                    }.values()
                ),
            )
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer) and id(value) not in known:
            yield from _state_tensors(value, known)


def _of_parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    """The tensors of the state that are of one parameter."""
    for key, leaves in _state_tensors(optimizer):
        if isinstance(key, Tensor):
            yield from leaves


# --------------------------------------------------------------------------------------------------
# Seconds of one step


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
        """Return the seconds of the step; `waits` says that it waits for other ranks, which takes
        time but no processor.
        """
        if self._events:
            self._events[-1].synchronize()
            pairs = zip(self._events[::2], self._events[1::2], strict=True)
            return sum(start.elapsed_time(end) for start, end in pairs) / 1e3
        return self._thread if self._thread < _BUSY * self._wall and not waits else self._wall


# --------------------------------------------------------------------------------------------------
# From steps to a profile


class _Seen:
    """What the steps of one optimizer have shown so far."""

    def __init__(self) -> None:
        self.recorded = 0
        self.collectives = False
        self.failure: Exception | None = None
        self.work: dict[Tensor, _Work] = {}
        self.kept: list[_Kept] = []
        self.clocks: list[_Clock] = []

    def add_recording(self, recording: _Recording) -> None:
        """Take over what one step has shown: its work stands for all later ones, what it keeps is
        added to what lives on.
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


_States = tuple[tuple[_Shape, float], ...]  # shape and bytes per element of each tensor


def _probes(optimizer: Optimizer, seen: _Seen, parameters: Sequence[_Trained]) -> dict[str, Probe]:
    """Return what the recorded steps of one optimizer say about each of its trained `parameters`,
    by name.
    """
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
            "Give the plan explicitly, "
            "for instance plan='ddp'"
        ) from seen.failure
    if parameters and not seen.recorded:
        raise OptimizerError(f"no step of {name} has been recorded yet, so its costs are not known")
    states = _states(optimizer, seen, parameters)
    kinds: dict[Any, list[_Trained]] = defaultdict(list)
    for each in parameters:
        kinds[options_key(each.group), each.parameter.ndim, each.parameter.dtype].append(each)
    probes: dict[str, Probe] = {}
    for members in kinds.values():
        probes |= _probes_of_kind(members, states, seen.work)
    return probes


def _states(
    optimizer: Optimizer, seen: _Seen, parameters: Sequence[_Trained]
) -> dict[str, _States]:
    """Return the tensors that the optimizer keeps for each parameter, in its state or elsewhere."""
    tensors: dict[int, list[Tensor]] = defaultdict(list)
    for key, leaves in _state_tensors(optimizer):
        tensors[id(key)] += leaves
    own: dict[int, list[tuple[_Shape, float]]] = defaultdict(list)
    for each in parameters:
        own[id(each.parameter)] = [
            (tuple(t.shape), t.element_size()) for t in tensors[id(each.parameter)]
        ]
    common = 0
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
    members: Sequence[_Trained], states: Mapping[str, _States], work: Mapping[Tensor, _Work]
) -> dict[str, Probe]:
    """Return the probes of parameters with the same options, dims and dtype.

    Those that got no gradient in the recorded steps are taken to be like the first one that did.
    """
    probes: dict[str, Probe] = {}
    updated = [each for each in members if each.parameter in work]
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
    for each in members:
        if each.name not in probes and updated:
            probes[each.name] = probes[updated[0].name]
        elif each.name not in probes:
            shape = tuple(each.parameter.shape)
            template = _follow(states[each.name], shape)
            probes[each.name] = Probe(_placeholders(len(shape)), template, 0.0, 0.0, 0.0, False)
    return probes


def _placeholders(ndim: int) -> _Shape:
    """Stand for the dims of a parameter in the shapes of its state: -1, -2, ..., which no size
    is.
    """
    return tuple(range(-1, -ndim - 1, -1))


def _templates(members: Sequence[tuple[_Shape, _States]]) -> list[_States]:
    """Return the states of parameters of the given shapes with the dims that follow the parameter's
    in their place.

    Where dims are equal it cannot be seen which one is followed: one rule that holds for all
    members is preferred.
    """
    own = [_follow(states, shape) for shape, states in members]
    for template in dict.fromkeys(own):
        if all(_filled(template, shape) == states for shape, states in members):
            return [template] * len(members)
    return own


def _follow(states: _States, shape: _Shape) -> _States:
    return tuple((_followed(each, shape), itemsize) for each, itemsize in states)


def _followed(state: _Shape, shape: _Shape) -> _Shape:
    """Return the dims of a state tensor, those that are a dim of the parameter replaced by its
    placeholder.
    """
    dims = _placeholders(len(shape))
    # the same elements, perhaps flat
    if state == shape or (math.prod(state) == math.prod(shape) > 1):
        return dims
    found, unused = list(state), list(range(len(shape)))

    def take(place: int, dim: int) -> None:
        found[place] = dims[dim]
        if dim in unused:
            unused.remove(dim)

    if len(state) == len(shape):
        for place, size in enumerate(state):
            if size == shape[place] != 1:
                take(place, place)
    for place, size in enumerate(state):
        if found[place] == size != 1 and size in shape:
            take(place, next((dim for dim in unused if shape[dim] == size), shape.index(size)))
    return tuple(found)


def _filled(template: _States, shape: _Shape) -> _States:
    """Return the states of a parameter of `shape`."""
    sizes = dict(zip(_placeholders(len(shape)), shape, strict=True))
    return tuple(
        (tuple(sizes.get(dim, dim) for dim in dims), itemsize) for dims, itemsize in template
    )


def _seconds_per_element(
    seen: _Seen,
    parameters: Sequence[_Trained],
    probes: Mapping[str, Probe],
    *,
    op_overhead_seconds: float,
) -> dict[str, float]:
    """Return the seconds per element, the same for all parameters of one optimizer; none without a
    timed step.
    """
    updated = [each for each in parameters if each.parameter in seen.work]
    numel = sum(each.parameter.numel() for each in updated)
    if not seen.clocks or not numel:
        return {}
    seconds = statistics.median(clock.seconds(waits=seen.collectives) for clock in seen.clocks)
    calls = sum(probes[each.name].calls for each in updated)
    return dict.fromkeys(
        (each.name for each in parameters), max(seconds - calls * op_overhead_seconds, 0.0) / numel
    )
