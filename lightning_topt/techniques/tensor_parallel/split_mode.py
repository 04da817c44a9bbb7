"""`SplitMode` sees every call of a torch function: arguments that are split are moved as a row of the function's kind needs
them, the function runs on local tensors, and its results carry their layouts.

The mode is on while user code runs forward. What is whole passes through untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_topt.graph.op_config import LAYOUT, Partial, Placement, Shard
from lightning_topt.techniques.tensor_parallel import moves
from lightning_topt.techniques.tensor_parallel.attributes import ATTRIBUTES, LOCAL
from lightning_topt.techniques.tensor_parallel.decisions import Decision, Known, call_on, decide, is_in_place
from lightning_topt.techniques.tensor_parallel.kind_table import KINDS
from lightning_topt.techniques.tensor_parallel.kinds import Placed, replaced, tensors_in
from lightning_topt.techniques.tensor_parallel.layout import REPLICATE, Layout, layout_of, with_layout
from lightning_topt.techniques.tensor_parallel.tensor_axes import TensorAxes

_MOVED = "_topt_moved"
_MAX_KNOWN = 10_000  # decisions: batches of ever new lengths


class SplitMode(TorchFunctionMode):
    """Runs forward code on the tensor axes `axes`. `rest` says where a summed tensor of a shape is left: whole, by default."""

    def __init__(
        self, axes: TensorAxes, *, rest: Callable[[tuple[int, ...], int], Placement] = lambda shape, axis: REPLICATE
    ) -> None:
        super().__init__()
        self.axes, self.rest = axes, rest
        self._whole: Layout = Layout((), (REPLICATE,) * len(axes))
        self._known: dict[Any, Decision] = {}

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for arg in args if kwargs is None else (*args, *kwargs.values()):
            if isinstance(arg, Tensor):
                if LAYOUT in arg.__dict__:
                    return self._on_split(func, args, kwargs or {})
            elif type(arg) in (list, tuple) and any(layout_of(each) is not None for each in tensors_in(arg)):
                return self._on_split(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _on_split(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (attribute := ATTRIBUTES.get(func)) is not None:
            return attribute(*args, **kwargs)
        if func in LOCAL:
            return func(*args, **kwargs)
        tensors = list(tensors_in((*args, *kwargs.values())))
        known = [self._known_of(tensor) for tensor in tensors]
        kind, in_place = KINDS.get(func), is_in_place(func, kwargs)
        key = _signature(func, args, kwargs, known)
        if key is None or (decision := self._known.get(key)) is None:
            call = call_on(func, args, kwargs, known, of=Tensor)
            decision = decide(kind, call, known, self.axes.sizes, in_place=in_place)
            if key is not None and len(self._known) < _MAX_KNOWN:
                self._known[key] = decision
        local = [
            tensor if index == decision.added else self._move(tensor, each.layout.placements, target, enters)
            for index, (tensor, each, target, enters) in enumerate(
                zip(tensors, known, decision.inputs, decision.enters, strict=True)
            )
        ]
        if in_place:
            tensors[0].__dict__.pop(_MOVED, None)
        result = self._placed(self._run(kind, func, args, kwargs, known, decision, local), decision, local)
        return iter(result) if func is Tensor.__iter__ else result

    def _known_of(self, tensor: Tensor) -> Known:
        layout = layout_of(tensor) or self._whole._replace(shape=tuple(tensor.shape))
        return Known(layout, tensor.requires_grad, isinstance(tensor, nn.Parameter))

    def _run(
        self,
        kind: Any,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known: Sequence[Known],
        decision: Decision,
        local: Sequence[Tensor],
    ) -> Any:
        given = [None if index == decision.added else tensor for index, tensor in enumerate(local)]
        new_args, new_kwargs = replaced((args, tuple(kwargs.values())), given, of=Tensor)
        new_kwargs = dict(zip(kwargs, new_kwargs, strict=True))
        if kind is None or kind.run is None or not decision.outputs:
            return func(*new_args, **new_kwargs)
        layouts = tuple(
            Layout(each.layout.shape, placements) for each, placements in zip(known, decision.inputs, strict=True)
        )
        call = call_on(func, args, kwargs, known, of=Tensor)
        return kind.run(Placed(call, new_args, new_kwargs, layouts, decision.outputs, self.axes))

    # ---- arguments --------------------------------------------------------------------------------------------------

    def _move(
        self, tensor: Tensor, source: tuple[Placement, ...], target: tuple[Placement, ...], enters: tuple[bool, ...]
    ) -> Tensor:
        """The local tensor at `target`, remembered where other calls may want it (queries, keys and values of one input)."""
        if source == target and not (any(enters) and tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        if tensor.is_leaf and tensor.requires_grad:  # its gradient would hold it, and it what is remembered
            return self._moved(tensor, source, target, enters)
        known = tensor.__dict__.setdefault(_MOVED, {})
        key = target, enters, torch.is_grad_enabled()
        if key not in known or known[key][0] != tensor._version:
            known[key] = tensor._version, self._moved(tensor, source, target, enters)
        moved: Tensor = known[key][1]
        return moved

    def _moved(
        self, tensor: Tensor, source: tuple[Placement, ...], target: tuple[Placement, ...], enters: tuple[bool, ...]
    ) -> Tensor:
        """Axis by axis: gathers from the inside out, then slices from the outside in."""
        now, axes = [*source], self.axes
        for axis in reversed(range(len(axes))):
            before, after = now[axis], target[axis]
            if not isinstance(before, Shard) or before == after:
                continue
            for inner in range(len(axes) - 1, axis, -1):
                placement = now[inner]
                if isinstance(placement, Shard) and placement.dim == before.dim:
                    tensor, now[inner] = moves.gather(tensor, placement, axes, inner, shared=False), REPLICATE
            if isinstance(after, Shard) and not any(_on(each, after.dim) for i, each in enumerate(now) if i != axis):
                tensor, now[axis] = moves.exchange(tensor, before, after, axes, axis), after
            else:
                shared = enters[axis]
                tensor, now[axis] = moves.gather(tensor, before, axes, axis, shared=shared), REPLICATE
        for axis, after in enumerate(target):
            if isinstance(after, Shard) and now[axis] != after:
                tensor, now[axis] = moves.take(tensor, after, axes, axis), after
            elif enters[axis] and source[axis] == REPLICATE:
                tensor = moves.enter(tensor, axes, axis)
        return tensor

    # ---- results ----------------------------------------------------------------------------------------------------

    def _placed(self, result: Any, decision: Decision, local: Sequence[Tensor]) -> Any:
        if not decision.outputs:
            return result
        if isinstance(result, Tensor):
            held = [result]
            del result  # while what follows it is made, nobody needs a summand
            return self._finished(held.pop(), decision.outputs[0], local, decision.added)
        results = list(tensors_in(result))
        outputs = [decision.outputs[min(index, len(decision.outputs) - 1)] for index in range(len(results))]
        new = [self._finished(each, placements, local, None) for each, placements in zip(results, outputs, strict=True)]
        if all(a is b for a, b in zip(results, new, strict=True)):
            return result
        return type(result)(new)

    def _finished(
        self, tensor: Tensor, placements: tuple[Placement, ...], local: Sequence[Tensor], added: int | None
    ) -> Tensor:
        """Sum what is partial, add what waits for that, and say where the result is."""
        now = [*placements]
        for axis, placement in enumerate(placements):
            if isinstance(placement, Partial):
                rest = self.rest(tuple(tensor.shape), axis)
                if isinstance(rest, Shard):
                    tensor, now[axis] = moves.scatter(tensor, rest, self.axes, axis), rest
                else:
                    tensor, now[axis] = moves.reduce(tensor, self.axes, axis), REPLICATE
        if added is not None:
            bias = local[added]
            for axis, placement in enumerate(placements):
                if isinstance(placement, Partial) and now[axis] != REPLICATE:
                    bias = moves.enter(bias, self.axes, axis)
            tensor = tensor + bias
        if any(placement != REPLICATE for placement in now):
            shape = [*tensor.shape]
            for placement, size in zip(now, self.axes.sizes, strict=True):
                if isinstance(placement, Shard):
                    shape[placement.dim] *= size
            with_layout(tensor, Layout(tuple(shape), tuple(now)))
        return tensor


def _on(placement: Placement, dim: int) -> bool:
    return isinstance(placement, Shard) and placement.dim == dim


def _signature(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], known: Sequence[Known]) -> Any:
    """All that the decision depends on; None where an argument cannot be compared."""
    plain = _plain((args, tuple(kwargs.items())))
    try:
        hash(plain)
    except TypeError:
        return None
    return func, plain, tuple(known)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Tensor
    if type(value) in (tuple, list):
        return tuple(map(_plain, value))
    if isinstance(value, slice):
        return slice, value.start, value.stop, value.step
    return value
