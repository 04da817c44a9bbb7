"""What one real step of an optimizer reads, writes and allocates, for each parameter.

`StepRecording` is a dispatch mode that is pushed around the step of `observed_optimizer`; it is a
module of its own because it knows operators and memory and nothing of profiles.

    operators   whose tensors they are given and return: bytes and calls go to that parameter,
                or are shared among those of the operator (`_Shares`)
    memory      every storage that the step deals with, and whose it is (`_Memory`)
    afterwards  `work`: bytes, calls and temporaries by parameter; `kept`: memory that lives on
                outside of `optimizer.state`
"""

from __future__ import annotations

import functools
import gc
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from lightning_topt.graph.kernels import is_collective, is_strided, written_tensors

# Operators that look at no more than the shape of what they are given.
_SHAPE_ONLY = {
    f"aten::{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn")
} | {f"aten::new_{name}" for name in ("empty", "empty_strided", "zeros", "ones", "full")}
Shape = tuple[int, ...]
_Operator = OpOverload | HigherOrderOperator


class StepRecording(TorchDispatchMode):
    """Notes the operators of one step: whose tensors they read and write, what they allocate."""

    supports_higher_order_operators = True  # they raise under a mode that does not say so

    def __init__(self, optimizer: Optimizer, kept: Iterable[KeptMemory]) -> None:
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
        """Note whose all memory is that is there before the step."""
        numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        # parameters and gradients, the optimizer's state, what earlier steps kept elsewhere
        for number, parameter in enumerate(self.parameters):
            for tensor in (parameter, parameter.grad):
                self._track(tensor, owner=number)
        for key, leaves in state_tensors(self.optimizer):
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
        """Share the bytes that one operator reads and writes.

        They go to the parameters whose tensors they are.
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
        # calls go to the parameters whose tensors are given
        uses = {key: self._use(tensor) for key, tensor in inputs.items()}
        owners = {use.owner for use in uses.values() if use.owner is not None}
        self._calls.add(1.0, None, owners)

        written = _written(func, args, kwargs, inputs, new) if kind.may_write else {}
        only = next(iter(owners)) if len(owners) == 1 else None
        for key, tensor in written.items():
            if uses[key].address not in self._known:
                self._track(tensor, owner=only, is_state=True)

        # results that have memory of their own are made, and written to
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
        # bytes written, then bytes read
        for key in written:
            self._moved.add(uses[key].nbytes, uses[key].owner, owners)
            if key not in positional:  # `out=`
                del uses[key]
        if not kind.reads_shapes:
            for use in uses.values():
                self._moved.add(use.nbytes, use.owner, owners)

    def work(self, *, is_first: bool) -> dict[Tensor, StepWork]:
        """Return what the step did, for each parameter that it updated.

        What the first step (`is_first`) leaves behind is state: no temporary.
        """
        # what belongs to no parameter is shared by those that the step updated
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
        # groups are stepped one after the other, so each has a peak of its own
        temporaries: dict[int, tuple[float, bool]] = {}
        for sizes in groups.values():
            temporaries |= _temporaries(events, sizes)
        states = {id(key): leaves for key, leaves in state_tensors(self.optimizer)}
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
            work[parameter] = StepWork(
                round(nbytes), round(calls[number], 3), round(temporary), adds
            )
        return work

    def kept(self) -> list[KeptMemory]:
        """Return the memory that the step has made or written, and that lives on.

        But for what parameters, gradients and states explain.
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

    def _unexplained(self) -> list[KeptMemory]:
        # by address
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
            kept.append(KeptMemory(weakref.ref(storage), parameter, shape, itemsize))
        return kept


@dataclass(frozen=True)
class StepWork:
    """What a step does for one parameter, in all."""

    moved_bytes: int
    calls: float
    temporary_bytes: int
    temporaries_add: bool


@dataclass(frozen=True, eq=False)
class KeptMemory:
    """A storage that the optimizer keeps outside of `optimizer.state`.

    `parameter` is the one that it was made from.
    """

    reference: Callable[[], torch.UntypedStorage | None]
    parameter: Tensor | None
    shape: Shape
    itemsize: int


@dataclass(eq=False)
class _Memory:
    """A storage that a recorded step deals with.

    Parameters are numbers here. `owner` None: unknown, or several.
    """

    nbytes: int
    owner: int | None
    shape: Shape
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
    """Return the arguments that an operator writes to, by their ids."""
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
        # in proportion to their weights
        total = sum(self._weights[number] for number in others)
        for number in others:
            self.amounts[number] += amount * self._weights[number] / total

    def settle(self, numbers: Collection[int]) -> None:
        """Share what is left among the parameters `numbers`."""
        rest, self._rest = self._rest, 0.0
        self.add(rest, None, numbers)


def _makers(args: tuple[Any, ...], output: Any, uses: Mapping[int, _Use]) -> dict[int, int | None]:
    """Return whose the results of an operator on lists are, by their ids.

    The i-th comes from the i-th tensor of the first list.
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
    """Return bytes of temporaries and whether these add up, for each parameter of one group.

    `sizes` are elements. The sum, or where temporaries do not add up the largest, is the peak that
    was seen for the group.
    """
    # replay: bytes alive of each parameter and of all, and the most of both
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
    # each its own, and of what is nobody's its part
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
    """Return the memory of a tensor.

    None for one that has none of its own (sparse, or of a subclass).
    """
    try:
        return tensor.untyped_storage() if is_strided(tensor) else None
    except (RuntimeError, NotImplementedError):
        return None


def _nbytes(tensor: Tensor) -> int:
    return tensor.nbytes if is_strided(tensor) else 0


def state_tensors(
    optimizer: Any, known: set[int] | None = None
) -> Iterator[tuple[Any, list[Tensor]]]:
    """Yield the keys of `optimizer.state`, parameters as a rule, with their tensors.

    Also of optimizers that this one wraps.
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
            yield from state_tensors(value, known)


def _of_parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the tensors of the state that are of one parameter."""
    for key, leaves in state_tensors(optimizer):
        if isinstance(key, Tensor):
            yield from leaves
