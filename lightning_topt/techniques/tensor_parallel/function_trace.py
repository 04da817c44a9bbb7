"""The calls of torch functions that a forward pass makes, as `SplitMode` would see them.

The search of splits walks along them.

    trace = FunctionTrace()
    graph = capture(module, batch, adapt=trace.of)
    trace.calls_of("blocks.0", blocks)

Tensors are replaced by references; nothing of the pass is kept alive. A capture may leave calls of
equal modules out. Then only the first of them are in the trace: one block stands for all of its
group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_topt.graph.repetition import address_of
from lightning_topt.graph.structures import tensors_in as tensors_anywhere
from lightning_topt.techniques.tensor_parallel.op_rules import KINDS
from lightning_topt.techniques.tensor_parallel.op_rules.rules import (
    Arguments,
    is_in_place,
    replaced,
    tensors_in,
)
from lightning_topt.techniques.tensor_parallel.user_code import ATTRIBUTES, LOCAL, body_of

_NUMBERS = "_topt_numbers"  # attribute: numbers of a tensor and of its memory


class Ref(NamedTuple):
    """A reference to a tensor: what it was at a call.

    Args:
        number: of the tensor
        memory: number of its memory, which views share
        shape: in full
        dtype: of the tensor
        needs_grad: whether it has a gradient
        parameter: its name, of a parameter
    """

    number: int
    memory: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    parameter: str | None = None

    @property
    def is_mask(self) -> bool:
        """True if it holds truth values."""
        return self.dtype == torch.bool

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class TracedCall(Arguments):
    """One call of a torch function.

    Args:
        func: the function
        args: with references
        kwargs: with references
        inputs: these references, in order
        outputs: what it returned
        saved: for backward, (memory, bytes); None for memory that only autograd knows
        stack: the modules around it, outermost first
        in_place: whether it changed its first tensor
        with_grad: whether autograd was on
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    saved: tuple[tuple[int | None, int], ...]
    stack: tuple[str, ...]
    in_place: bool
    with_grad: bool

    @property
    def is_view(self) -> bool:
        """True if it touches no element.

        Then all results are in the memory of arguments, and nothing is written.
        """
        memories = {ref.memory for ref in self.inputs}
        return not self.in_place and all(ref.memory in memories for ref in self.outputs)


class Border(NamedTuple):
    """The begin of a module's call, or its end (`is_end`), before call `position` of the trace.

    Args:
        position: of the next call
        module: path of the module
        is_end: whether the call ends
        numbers: of the tensors that cross
        shapes: of these
    """

    position: int
    module: str
    is_end: bool
    numbers: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass
class FunctionTrace:
    """The last forward pass that ran in the context of `of`.

    Args:
        calls: in order
        borders: of module calls
    """

    calls: list[TracedCall] = field(default_factory=list)
    borders: list[Border] = field(default_factory=list)

    def of(self, module: nn.Module) -> Any:
        """Return a context that traces the forward pass of `module`, a copy that is thrown away."""
        self.calls, self.borders = [], []
        return _Tracer(self, module)

    def calls_of(self, block: str, blocks: Sequence[str]) -> list[TracedCall]:
        """Return the calls of `block`; those of ``""`` are in none of `blocks`."""
        if block:
            return [call for call in self.calls if block in call.stack]
        named = {*blocks} - {""}
        return [call for call in self.calls if named.isdisjoint(call.stack)]

    def results(self) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
        """Return module and shapes of results of every call, in the order in which they ended."""
        return [(border.module, border.shapes) for border in self.borders if border.is_end]

    def whole_at(self, block: str, blocks: Sequence[str]) -> set[int]:
        """Return the numbers of the tensors that cross the border of `block`, in or out.

        For ``""`` those of all other blocks.
        """
        named = {block} if block else {*blocks} - {""}
        crossing = {
            number for border in self.borders if border.module in named for number in border.numbers
        }
        # tensors made on one side and read on the other
        inside = [bool(named.intersection(call.stack)) for call in self.calls]
        made = {
            r.number: i
            for call, i in zip(self.calls, inside, strict=True)
            for r in call.outputs
            if not call.in_place
        }
        for call, is_inside in zip(self.calls, inside, strict=True):
            crossing.update(
                ref.number for ref in call.inputs if made.get(ref.number, is_inside) != is_inside
            )
        return crossing


class _Tracer(TorchFunctionMode):
    # The mode that fills a `FunctionTrace`.

    def __init__(self, trace: FunctionTrace, module: nn.Module) -> None:
        super().__init__()
        self._trace, self._stack, self._count = trace, list[str](), 0
        self._names: dict[int, str] = {}
        for name, parameter in module.named_parameters():
            self._names[id(parameter)] = name
        for path, submodule in module.named_modules():
            if path:
                submodule.register_forward_pre_hook(self._enter(path), with_kwargs=True)
                submodule.register_forward_hook(
                    self._exit(path), with_kwargs=True, always_call=True
                )

    # ---- modules ---------------------------------------------------------------------------------

    def _enter(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._stack.append(path)
            self._border(path, (args, kwargs), is_end=False)

        return hook

    def _exit(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: object) -> None:
            if path in self._stack:  # else backward runs it again
                # modules inside that ended by an exception have no end of their own
                while self._stack.pop() != path:
                    pass
                self._border(path, output, is_end=True)

        return hook

    def _border(self, path: str, values: object, *, is_end: bool) -> None:
        tensors = list(tensors_anywhere(values))
        numbers = (tensor.__dict__.get(_NUMBERS) for tensor in tensors)
        known = tuple(found[0] for found in numbers if found is not None)
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        self._trace.borders.append(Border(len(self._trace.calls), path, is_end, known, shapes))

    # ---- functions -------------------------------------------------------------------------------

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in ATTRIBUTES or func in LOCAL:
            return func(*args, **kwargs)
        if func not in KINDS and (body := body_of(func)) is not None:
            with self:  # as in the run, its calls are what can be split
                return body(*args, **kwargs)
        # references to arguments come first: an in-place call changes what they are
        given = list(tensors_in((*args, *kwargs.values())))
        inputs = tuple(map(self._ref, given))
        with _packed() as packed:
            result = func(*args, **kwargs)
        if func is Tensor.__iter__:
            result = tuple(result)
        made = list(tensors_in((result,)))
        if made:
            self._note(func, args, kwargs, inputs, (given, made, packed))
        return iter(result) if func is Tensor.__iter__ else result

    def _note(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: tuple[Ref, ...],
        tensors: tuple[list[Tensor], list[Tensor], list[tuple[int, int]]],
    ) -> None:
        given, made, packed = tensors
        # views share the number of their memory
        memories = {
            address_of(tensor): ref.memory for tensor, ref in zip(given, inputs, strict=True)
        }
        outputs = tuple(
            self._ref(tensor, memory=memories.get(address_of(tensor))) for tensor in made
        )
        memories |= {
            address_of(tensor): ref.memory for tensor, ref in zip(made, outputs, strict=True)
        }
        new_args, new_kwargs = replaced((args, tuple(kwargs.values())), inputs, of=Tensor)
        saved = dict.fromkeys((memories.get(address), size) for address, size in packed)
        self._trace.calls.append(
            TracedCall(
                func,
                new_args,
                dict(zip(kwargs, new_kwargs, strict=True)),
                inputs,
                outputs,
                tuple(saved),
                tuple(self._stack),
                is_in_place(func, kwargs),
                torch.is_grad_enabled(),
            )
        )

    def _ref(self, tensor: Tensor, *, memory: int | None = None) -> Ref:
        numbers = tensor.__dict__.get(_NUMBERS)
        if numbers is None:
            self._count += 1
            numbers = tensor.__dict__[_NUMBERS] = (
                self._count,
                self._count if memory is None else memory,
            )
        number, place = numbers
        return Ref(
            number,
            place,
            tuple(tensor.shape),
            tensor.dtype,
            tensor.requires_grad,
            self._names.get(id(tensor)),
        )


@contextmanager
def _packed() -> Iterator[list[tuple[int, int]]]:
    # Give what autograd saves meanwhile, (address, bytes); hooks that are there still see it
    found: list[tuple[int, int]] = []
    if not torch.is_grad_enabled():
        yield found
        return
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)

    # parameters are saved anyway, and sparse tensors have no address
    def pack(tensor: Tensor) -> Any:
        if not isinstance(tensor, nn.Parameter) and tensor.layout is torch.strided:
            found.append((address_of(tensor), tensor.nbytes))
        return tensor if outer is None else outer[0](tensor)

    with saved_tensors_hooks(pack, (lambda tensor: tensor) if outer is None else outer[1]):
        yield found
