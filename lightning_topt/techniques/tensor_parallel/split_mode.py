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

from lightning_topt.graph.op_config import Partial, Placement, Shard
from lightning_topt.techniques.tensor_parallel import moves
from lightning_topt.techniques.tensor_parallel.attributes import ATTRIBUTES, LOCAL
from lightning_topt.techniques.tensor_parallel.composites import body_of
from lightning_topt.techniques.tensor_parallel.decisions import Decision, Known, decide
from lightning_topt.techniques.tensor_parallel.kind_table import KINDS
from lightning_topt.techniques.tensor_parallel.kinds import Call, Operand, Placed, replaced, tensors_in
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
                if "_topt_layout" in arg.__dict__:
                    return self._on_split(func, args, kwargs or {})
            elif isinstance(arg, list | tuple) and any(layout_of(each) is not None for each in tensors_in(arg)):
                return self._on_split(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _on_split(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (attribute := ATTRIBUTES.get(func)) is not None:
            return attribute(*args, **kwargs)
        if func in LOCAL:
            return func(*args, **kwargs)
        kind = KINDS.get(func)
        if kind is None and (body := body_of(func)) is not None:
            with self:
                return body(*args, **kwargs)
        tensors = list(tensors_in((*args, *kwargs.values())))
        known = [self._known_of(tensor) for tensor in tensors]
        in_place = _is_in_place(func, kwargs)
        key = _signature(func, args, kwargs, known)
        if key is None or (decision := self._known.get(key)) is None:
            call = _call(func, args, kwargs, known)
            decision = decide(kind, call, known, self.axes.sizes, in_place=in_place)
            if key is not None and len(self._known) < _MAX_KNOWN:
                self._known[key] = decision
        local = [
            self._move(tensor, each.layout.placements, target, enters)
            for tensor, each, target, enters in zip(tensors, known, decision.inputs, decision.enters, strict=True)
        ]
        if in_place:
            tensors[0].__dict__.pop(_MOVED, None)
        result = self._placed(self._run(kind, func, args, kwargs, known, decision, local), decision, local)
        return iter(result) if func is Tensor.__iter__ else result

    def _known_of(self, tensor: Tensor) -> Known:
        layout = layout_of(tensor) or self._whole._replace(shape=tuple(tensor.shape))
        return Known(layout, tensor.requires_grad, isinstance(tensor, nn.Parameter), tensor.dtype == torch.bool)

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
        call = _call(func, args, kwargs, known)
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
            others = (each for index, each in enumerate(now) if index != axis)
            if (
                isinstance(after, Shard)
                and after.dim != before.dim
                and not any(_on(each, after.dim) for each in others)
            ):
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
            return self._finished(result, decision.outputs[0], local, decision.added, decision.along)
        if not isinstance(result, list | tuple):
            return result
        results = list(tensors_in(result))
        outputs = [decision.outputs[min(index, len(decision.outputs) - 1)] for index in range(len(results))]
        new = [self._finished(each, placements, local) for each, placements in zip(results, outputs, strict=True)]
        if all(a is b for a, b in zip(results, new, strict=True)):
            return result
        return type(result)(replaced([*result], new, of=Tensor))

    def _finished(
        self,
        tensor: Tensor,
        placements: tuple[Placement, ...],
        local: Sequence[Tensor],
        added: int | None = None,
        along: int = -1,
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
            tensor = tensor + self._bias(local[added], placements, now, at=tensor.ndim + along, after=-1 - along)
        if any(placement != REPLICATE for placement in now):
            shape = [*tensor.shape]
            for placement, size in zip(now, self.axes.sizes, strict=True):
                if isinstance(placement, Shard):
                    shape[placement.dim] *= size
            with_layout(tensor, Layout(tuple(shape), tuple(now)))
        return tensor

    def _bias(
        self, bias: Tensor, summed: Sequence[Placement], now: Sequence[Placement], *, at: int, after: int
    ) -> Tensor:
        """The bias along dim `at` of a sum, `after` dims before its end, for what each rank keeps of the sum."""
        for axis, (placement, kept) in enumerate(zip(summed, now, strict=True)):
            if isinstance(placement, Partial) and isinstance(kept, Shard):
                along = kept.dim == at
                bias = (
                    moves.take(bias, Shard(0, kept.parts), self.axes, axis)
                    if along
                    else moves.enter(bias, self.axes, axis)
                )
        return bias.view(-1, *(1 for _ in range(after)))


def _on(placement: Placement, dim: int) -> bool:
    return isinstance(placement, Shard) and placement.dim == dim


def _is_in_place(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    changes = (name.endswith("_") and not name.startswith("__")) or name in _CHANGES
    return changes or "out" in kwargs or kwargs.get("inplace") is True


_CHANGES = {
    "__setitem__",
    "__iadd__",
    "__isub__",
    "__imul__",
    "__idiv__",
    "__itruediv__",
    "__ipow__",
    "__iand__",
    "__ior__",
    "__ixor__",
    "__imod__",
    "__ifloordiv__",
    "__ilshift__",
    "__irshift__",
    "__imatmul__",
    "__set__",
}


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], known: Sequence[Known]) -> Call:
    operands = tuple(Operand(index, each.layout.shape) for index, each in enumerate(known))
    new_args, new_kwargs = _with_operands((args, tuple(kwargs.values())), operands)
    placements = (placement for each in known for placement in each.layout.placements)
    parts = {1, *(placement.parts for placement in placements if isinstance(placement, Shard))}
    masks = frozenset(index for index, each in enumerate(known) if each.is_mask)
    return Call(func, new_args, dict(zip(kwargs, new_kwargs, strict=True)), operands, tuple(sorted(parts)), masks)


def _with_operands(value: Any, operands: Sequence[Operand]) -> Any:
    return replaced(value, operands, of=Tensor)


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
