"""Which modules may run again in the backward pass: those whose second call does the same.

    repeatable = find_repeatable(copied, batch, run, candidates=paths)

[Note: second calls] A forward pass runs on a fresh copy. When it is over, every candidate is called
again with the arguments of its first call, the last one first, as in a backward pass. Its forward
may be recomputed if this call
- runs the same operators on the same memory: tensors that the call makes count as the same when
  they are made at the same place; a tensor left by the first call, or memory that was written to
  meanwhile, does not;
- leaves attributes, arguments and the globals of its file as they were; a new tensor of the same
  shape counts as the same (a loss that each call stores);
- draws no random numbers but those of torch's default generators, which a recomputation sets back;
- talks to no other rank, and raises nothing.
"""

from __future__ import annotations

import collections
import functools
import random
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_topt.graph.errors import is_users
from lightning_topt.graph.kernels import (
    QUERIES,
    Frozen,
    freeze,
    is_collective,
    is_strided,
    skip_collective,
    written_tensors,
)
from lightning_topt.graph.structures import tensors_in

MAX_OBJECTS, MAX_ITEMS = 20_000, 10_000  # all beyond, and in larger containers, counts as equal
LEAVES = (int, str, bytes, type(None), torch.dtype, torch.device)
SEQUENCES = (list, tuple, collections.deque)
# described by their class alone
OPAQUE = (
    *(type, types.ModuleType, types.FunctionType, types.MethodType, functools.partial),
    *(nn.Module, Dataset, DataLoader, Sampler),
)
OWN_NAMES = ("_parameters", "_modules", "forward")  # compared otherwise, or replaced by us
CHANGEABLE = (int, float, str, type(None), list, dict, set, Tensor, collections.deque)


Seen = dict[int, tuple[int, object]]  # by id: numbers, and the objects


def find_repeatable(
    module: nn.Module,
    batch: object,
    run: Callable[[], object],
    *,
    candidates: Iterable[str],
    first: Callable[[], AbstractContextManager[object]] = nullcontext,
    second: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> set[str]:
    """Return those of `candidates` whose second call does what the first did.

    See [Note: second calls]. Raises whatever `run` raises.

    Args:
        module: a copy that is of no use afterwards.
        batch: what `run` gives to it.
        run: a forward pass of `module`.
        candidates: paths of its submodules.
        first: makes a context around the forward pass.
        second: makes one around second calls.
    """
    trace = CallTracer([*module.parameters(), *module.buffers(), *tensors_in(batch)])
    # first calls: one forward pass, with hooks of ours in the place of `forward`
    calls = {path: _Candidate(module.get_submodule(path)) for path in candidates}
    order: list[_Candidate] = []
    for candidate in calls.values():
        candidate.watch(trace, order)
    with first(), trace:
        run()
    for candidate in reversed(calls.values()):
        candidate.module.forward = candidate.forward
    # second calls, of the modules that were called once
    counts = Counter(map(id, order))
    once = [candidate for candidate in order if counts[id(candidate)] == 1]
    with second(), trace:
        passed = {id(candidate) for candidate in reversed(once) if candidate.repeats(trace)}
    return {path for path, candidate in calls.items() if id(candidate) in passed}


@dataclass(eq=False)
class _Candidate:
    """A module, and its first call."""

    module: nn.Module
    args: tuple[object, ...] = ()
    kwargs: dict[str, object] = field(default_factory=dict)
    first: CallTrace | None = None
    around: _Around | None = None
    forward: Any = None

    def watch(self, trace: CallTracer, order: list[_Candidate]) -> None:
        """Note every call of the module in `order`, and its arguments."""
        self.forward = self.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            order.append(self)
            self.args, self.kwargs, self.around = args, kwargs, _Around()
            with trace.call() as self.first:
                return self.forward(*args, **kwargs)

        # hooks stay outside, as in a recomputation
        self.module.forward = forward

    def repeats(self, trace: CallTracer) -> bool:
        """Return whether a call with the same arguments does the same."""
        assert self.first is not None and self.around is not None
        roots = [self.module, self.args, self.kwargs]
        before, drawn = describe(roots), host_random_state()
        try:
            with self.around.again(), torch.enable_grad(), trace.call() as second:
                self.forward(*self.args, **self.kwargs)
        except Exception:
            return False
        same_python = describe(roots) == before and host_random_state() == drawn
        return same_python and not second.has_effects and second.operators == self.first.operators


class _Around:
    """What `torch.utils.checkpoint` sets back before it calls again: autocast, random numbers."""

    def __init__(self) -> None:
        uses_cuda = torch.cuda.is_initialized()
        kinds = ("cpu", "cuda") if uses_cuda else ("cpu",)
        self.casts = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
        ]
        with _disable_current_modes():
            self.drawn = torch.get_rng_state()

    @contextmanager
    def again(self) -> Iterator[None]:
        with _disable_current_modes():
            torch.set_rng_state(self.drawn)
        with ExitStack() as stack:
            for kind, enabled, dtype in self.casts:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
            yield


# ---- what one call does, to be compared ----------------------------------------------------------


@dataclass
class CallTrace:
    """The operators that one call runs, with their arguments and the memory that they read.

    Memory that the call made is known by its place among all that it made, other memory by its
    number and how often it was written to before. `has_effects`: the call drew from a generator of
    its own or talked to other ranks.
    """

    operators: list[tuple[OpOverload, Frozen, tuple[object, ...]]] = field(default_factory=list)
    made: dict[int, int] = field(default_factory=dict)  # place by number of the memory
    has_effects: bool = False


class CallTracer(TorchDispatchMode):
    """A mode that traces the calls within `call`; `outside` are tensors that exist before."""

    def __init__(self, outside: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._open: list[CallTrace] = []
        # of memory by address, as long as it is alive: its number, a reference
        self._numbers: dict[int, tuple[int, object]] = {}
        self._versions: Counter[int] = Counter()  # writes by number
        self._count = 0
        self._outside = [tensor for tensor in outside if is_strided(tensor)]
        for tensor in self._outside:
            self._number(tensor)

    @contextmanager
    def call(self) -> Iterator[CallTrace]:
        """Trace what runs inside, also what runs in calls inside of it."""
        self._open.append(CallTrace())
        try:
            yield self._open[-1]
        finally:
            self._open.pop()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run `func` and note what it reads and writes."""
        kwargs = kwargs or {}
        if func._schema.name in QUERIES:  # made by some calls of a module and not by others
            return func(*args, **kwargs)
        written = written_tensors(func, args, kwargs)
        tensors: list[Tensor] = []
        arguments = freeze((args, tuple(kwargs.items())), tensors)
        draws = any(isinstance(v, torch.Generator) for v in (*args, *kwargs.values()))
        if func._schema.name == "aten::lift_fresh":  # a constant, which every call writes anew
            tensors = []
        for call in self._open:
            read = tuple(self._source(call, tensor) for tensor in tensors)
            call.operators.append((func, arguments, read))
            call.has_effects |= draws or is_collective(func)
        out = skip_collective(func, args, kwargs) if is_collective(func) else func(*args, **kwargs)
        # a write makes a new version of the memory; new memory belongs to all calls under way
        for tensor in written:
            self._versions[self._number(tensor)] += 1
        for tensor in tensors_in(out):
            if is_strided(tensor):
                self._number(tensor, is_new=True)
        return out

    def _source(self, call: CallTrace, tensor: Tensor) -> tuple[object, ...]:
        number = self._number(tensor)
        if number in call.made:
            return "made", call.made[number], tensor.storage_offset()
        return number, self._versions[number], tensor.storage_offset()

    def _number(self, tensor: Tensor, *, is_new: bool = False) -> int:
        # The number of the memory of `tensor`; what was not seen before is older, unless `is_new`
        memory = tensor.untyped_storage()
        address = memory._cdata
        if address not in self._numbers:
            self._count += 1
            for call in self._open if is_new else ():
                call.made[self._count] = len(call.made)
            gone = weakref.ref(memory, lambda _: self._numbers.pop(address, None))
            self._numbers[address] = self._count, gone
        return self._numbers[address][0]


# ---- what Python objects hold --------------------------------------------------------------------
#
# Descriptions of two moments are equal for objects that would behave the same. Nothing of the user
# is called.


def describe(roots: Iterable[object]) -> object:
    """Return the state of `roots`, tensors by their shapes.

    A module stands for its submodules and what their code can change.
    """
    seen: Seen = {}
    found: list[object] = []
    for root in roots:
        if isinstance(root, nn.Module):
            for part in root.modules():
                own = {name: v for name, v in vars(part).items() if name not in OWN_NAMES}
                found.append(_describe(own, seen))
            found.append(_describe(_surroundings(map(type, root.modules())), seen))
        else:
            found.append(_describe(root, seen))
    return found


def host_random_state() -> tuple[object, ...]:
    """Return the states of Python's and NumPy's default generators, to be compared."""
    # the second entry is the array of the generator, which == would compare element by element
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2:]


def _describe(value: Any, seen: Seen) -> object:
    # The state of a value; objects in `seen` are referred to by number
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, LEAVES):
        return value
    if isinstance(value, (float, complex)):
        return repr(value)  # not-a-number equals itself
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype, value.tobytes() if value.nbytes < 1 << 16 else b""
    if id(value) in seen or len(seen) >= MAX_OBJECTS:
        return "seen", seen.get(id(value), (MAX_OBJECTS,))[0]
    seen[id(value)] = len(seen), value  # held, so that no other object gets its id
    inside: object = None
    if isinstance(value, torch.Generator):
        inside = value.get_state().tolist()
    elif isinstance(value, (dict, set, frozenset, *SEQUENCES)) and len(value) > MAX_ITEMS:
        inside = len(value)
    elif isinstance(value, (set, frozenset)):  # without an order: of other items the number counts
        inside = len(value), sorted(map(repr, (v for v in value if isinstance(v, (int, str)))))
    elif isinstance(value, SEQUENCES):
        inside = [_describe(item, seen) for item in value]
    elif isinstance(value, dict) or not isinstance(value, OPAQUE):
        items = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        inside = [
            (key if isinstance(key, str) else type(key), _describe(v, seen))
            for key, v in items.items()
        ]
    return type(value).__qualname__, inside


def _surroundings(classes: Iterable[type]) -> list[object]:
    # What the code of users' classes can change: globals, attributes, closures
    return [pair for cls in sorted(set(classes), key=str) for pair in _names_around(cls)]


def _names_around(cls: type) -> Iterator[object]:
    for base in cls.__mro__:
        if not is_users(base.__module__):
            continue
        # `forward` of this class itself: its bases have their own turn
        for cell in getattr(vars(base).get("forward"), "__closure__", None) or ():
            try:
                yield None if isinstance(cell.cell_contents, nn.Module) else cell.cell_contents
            except ValueError:  # not filled yet
                yield None
        for namespace in (vars(sys.modules[base.__module__]), vars(base)):
            for name, value in namespace.items():
                if not name.startswith("__") and isinstance(value, CHANGEABLE):
                    yield name, value
