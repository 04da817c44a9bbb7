"""`SplitMode` sees every call of a torch function while user code runs forward.

What is not split passes through untouched. For a call on split tensors:

    1  its signature finds what is known of such calls (`PreparedCall`), or that is worked out
    2  arguments are moved to where the row of the function's rule needs them
    3  the function runs on local tensors
    4  Partial results are summed, or scattered where the rule of the block says so
    5  results get their layouts
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from typing_extensions import override

from lightning_topt.graph.op_config import LAYOUT, Partial, Placement, Placements, Shard
from lightning_topt.techniques.tensor_parallel import moves
from lightning_topt.techniques.tensor_parallel.layout import (
    REPLICATE,
    Layout,
    TensorAxes,
    layout_at,
    layout_of,
    local_shard,
    whole_shape,
    with_layout,
)
from lightning_topt.techniques.tensor_parallel.op_rules import KINDS
from lightning_topt.techniques.tensor_parallel.op_rules.rules import (
    CallDecision,
    Kind,
    OpCall,
    Placed,
    call_of,
    decide,
    is_in_place,
    known_of,
    replaced,
    tensors_in,
)
from lightning_topt.techniques.tensor_parallel.split_layouts import BlockRule, at_border, rest_of
from lightning_topt.techniques.tensor_parallel.user_code import (
    ALIASES,
    ATTRIBUTES,
    COPIED,
    LOCAL,
    SET_DATA,
    PythonFunctionMode,
    body_of,
    gradients,
    hook_of_slices,
    note_copies,
    read_only,
    refuse_copies,
    refuse_transforms,
    set_data,
    transforms_are_on,
    written_besides,
)

PLAIN = BlockRule()
LOWERED_KINDS = ("linear", "addmm", "matmul")  # which autocast runs in lower precision
_MAX_KNOWN = 10_000  # prepared calls: batches may have ever new lengths


class SplitMode(PythonFunctionMode):
    """Runs forward code on the tensor axes `axes`.

    `rule` holds outside of the blocks that have rules of their own.
    """

    def __init__(self, axes: TensorAxes, *, rule: BlockRule = PLAIN) -> None:
        super().__init__()
        self.axes, self.mover = axes, TensorMover(axes)
        self._whole = self.mover.whole_layout
        self._tables: dict[Any, dict[Any, PreparedCall]] = {}
        self._rests: dict[Any, Placement] = {}
        self._follow(rule, None)

    def _follow(self, rule: BlockRule, rows: tuple[int, ...] | None) -> None:
        # Run by `rule` from now on; decisions depend on it, so each rule has its own table
        self.rule, self._rows = rule, rows
        self._known = self._tables.setdefault((rule.splits, rule.gathered), {})
        self.mover.gathers_again = not rule.is_plain
        self.mover.forget()

    @property
    def prepared(self) -> list[PreparedCall]:
        """All that is known of calls on split tensors, by signature, in order of first calls."""
        return [each for known in self._tables.values() for each in known.values()]

    @contextmanager
    def on(self) -> Generator[None]:
        """Turn the mode on where it is off.

        That is outside of all, and where torch turned it off: in backward, which may recompute.
        """
        if self.is_on:
            yield
            return
        with self:
            yield
        self.mover.forget()

    @override
    def whole(self, value: object) -> Any:
        """Return `value`, a tensor or a tree of tensors, with split tensors unsharded."""
        return self.mover.whole(value)

    def run_block(
        self,
        rule: BlockRule,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return what `forward` returns, run by `rule`; it places tensors at the border."""
        # 1-D tensor parallelism: at most the border has to be unsharded
        if rule.is_plain and self.rule.is_plain:
            if not rule.has_border:
                return forward(*args, **kwargs)
            return self.whole(forward(*self.whole(args), **self.whole(kwargs)))
        if rule.has_border:
            args, kwargs = self.mover.at_border(rule, rule.inputs, (args, kwargs))
        # the rows of the block: of the first tensor with more than one dim
        shapes = (
            self.mover.shape(each)
            for each in tree_leaves((args, kwargs))
            if isinstance(each, Tensor)
        )
        with self.following(rule, next((shape[:-1] for shape in shapes if len(shape) > 1), None)):
            result = forward(*args, **kwargs)
        return self.mover.at_border(rule, rule.outputs, result) if rule.has_border else result

    @contextmanager
    def following(self, rule: BlockRule, rows: tuple[int, ...] | None) -> Generator[None]:
        """Run by `rule` within it.

        `rows` are the dims but for the last of tensors at the border, see `rest_of`.
        """
        before = self.rule, self._rows
        self._follow(rule, rows)
        try:
            yield
        finally:
            self._follow(*before)

    @override
    def as_now(self) -> Callable[[], AbstractContextManager[None]]:
        """Return what makes a context in which calls run by the present rule."""
        return partial(self.following, self.rule, self._rows)

    @property
    def is_on(self) -> bool:
        """True if calls are seen here."""
        return self in _get_current_function_mode_stack()

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # the fast path of calls without split tensors: one look at each argument
        for arg in args if not kwargs else (*args, *kwargs.values()):
            if isinstance(arg, Tensor):
                if (notes := arg.__dict__) and (LAYOUT in notes or COPIED in notes):
                    return self._on_split(func, args, kwargs or {})
            elif isinstance(arg, list | tuple) and any(
                layout_of(each) is not None for each in tensors_in(arg)
            ):
                return self._on_split(func, args, kwargs or {})
        if transforms_are_on():
            refuse_transforms(tensors_in((*args, *(kwargs or {}).values())))
        return func(*args, **(kwargs or {}))

    def _on_split(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # Run a call that has split tensors among its arguments
        # what user code asks for beside computations
        if (attribute := ATTRIBUTES.get(func)) is not None:
            return attribute(*args, **kwargs)
        if func is Tensor.register_hook and (layout := layout_of(args[0])) is not None:
            return func(args[0], hook_of_slices(args[1], layout, self.axes))
        if func in LOCAL:
            return func(*args, **kwargs)
        if func is torch.autograd.grad:
            return gradients(self.whole, *args, **kwargs)
        if func == SET_DATA and layout_of(args[0]) is not None:
            return set_data(args[0], args[1], self.axes)
        # known by its signature, or prepared
        tensors: list[Tensor] = []
        key = signature(func, args, kwargs, tensors)
        if key is None or (prepared := self._known.get(key)) is None:
            if func not in KINDS and (body := body_of(func)) is not None:
                with self:
                    return body(*args, **kwargs)
            prepared = prepare_call(
                func,
                args,
                kwargs,
                tensors,
                rule=self.rule,
                whole=self._whole,
                sizes=self.axes.sizes,
            )
            if key is not None and len(self._known) < _MAX_KNOWN:
                self._known[key] = prepared
        # move, run, place
        local = self._moved_arguments(prepared, tensors)
        result = self._placed(prepared, self._run(prepared, args, kwargs, tensors, local), local)
        if prepared.decision.writes_back:
            # The slice of what the unsharded tensor became in place goes into the split one.
            tensors[0].copy_(moves.sliced(local[0], prepared.sources[0], self.axes))
            return None if prepared.call.func is Tensor.__setitem__ else tensors[0]
        if func in ALIASES and local:
            note_copies(tensors, local, result)
        return iter(result) if func is Tensor.__iter__ else read_only(result)

    def _run(
        self,
        prepared: PreparedCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[Tensor],
        local: Sequence[Tensor],
    ) -> Any:
        added = prepared.decision.added
        if local is not tensors or added is not None:
            args, kwargs = with_tensors(args, kwargs, local, without=added)
        # operands that were gathered are saved as slices
        if self.mover.gathers_again and prepared.moving and (gathered := gathered_among(local)):
            with saved_as_slices(gathered):
                return self._called(prepared, args, kwargs)
        return self._called(prepared, args, kwargs)

    def _called(self, prepared: PreparedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind, outputs = prepared.kind, prepared.decision.outputs
        if kind is None or kind.run is None or not outputs:
            return prepared.call.func(*args, **kwargs)
        return kind.run(
            Placed(prepared.call, args, kwargs, prepared.inputs, outputs, self.axes, prepared.memo)
        )

    # ---- arguments -------------------------------------------------------------------------------

    def _moved_arguments(self, prepared: PreparedCall, tensors: list[Tensor]) -> list[Tensor]:
        # The local tensors; the list itself if none moves
        # what was remembered of it is out of date, and a view of a copy must not change
        if prepared.in_place:
            tensors[0].__dict__.pop(MOVED, None)
            refuse_copies(prepared.call.func, tensors[0])
        if not prepared.moving:
            return tensors
        local = [*tensors]
        decision = prepared.decision
        is_product = prepared.kind is not None and prepared.kind.name in LOWERED_KINDS
        for place in prepared.moving:
            where = prepared.sources[place], decision.inputs[place], decision.enters[place]
            # what autocast lowers anyway is sent, and saved for backward, as it is then
            gathers = is_product and where[0] != where[1]
            given = self.mover.lowered(tensors[place]) if gathers else tensors[place]
            local[place] = self.mover.move(given, *where)
        if decision.writes_back:
            if prepared.call.func.__name__ in REFUSED:
                raise refusal(prepared.call.func, prepared.sources[0])
            local[0] = local[0].clone()
        return local

    # ---- results ---------------------------------------------------------------------------------

    def _placed(self, prepared: PreparedCall, result: object, local: Sequence[Tensor]) -> Any:
        # The result of a call with its tensors finished
        if not prepared.decision.outputs:
            return result
        if isinstance(result, Tensor):
            held = [result]
            del result  # the summand is freed before the tensor after it is made
            return self._finished(prepared, held.pop(), 0, local)
        if not isinstance(result, list | tuple):
            return result
        results = list(tensors_in(result))
        new = [self._finished(prepared, each, index, local) for index, each in enumerate(results)]
        if all(a is b for a, b in zip(results, new, strict=True)):
            return result
        return type(result)(replaced([*result], new, of=Tensor))

    def _finished(
        self, prepared: PreparedCall, tensor: Tensor, index: int, local: Sequence[Tensor]
    ) -> Tensor:
        # Sum what is partial, add what waits for that, and attach the layout of the result
        outputs, added = prepared.decision.outputs, prepared.decision.added
        index = min(index, len(outputs) - 1)
        placements = outputs[index]
        if not prepared.summed[index] and added is None:
            # the common case: the layout is known by result and local shape
            key, layouts = (index, tensor.shape), prepared.layouts
            if key not in layouts:
                layouts[key] = layout_at(placements, tensor.shape, self.axes.sizes)
            if (known := layouts[key]) is not None:
                tensor.__dict__[LAYOUT] = known
            return tensor
        # Partial: scatter the sum where the rule lets it rest, else reduce it
        now = [*placements]
        for axis, placement in enumerate(placements):
            if isinstance(placement, Partial):
                rest = self._rest(prepared.kind, tensor, now, axis)
                if isinstance(rest, Shard):
                    now[axis] = rest
                    tensor = moves.scatter(
                        tensor, local_shard(now, self.axes.sizes, axis), self.axes, axis
                    )
                else:
                    tensor, now[axis] = moves.reduce(tensor, self.axes, axis), REPLICATE
        # a bias is added once, after the sum
        if added is not None:
            along = prepared.decision.along
            bias = moves.bias_for(
                local[added], placements, now, self.axes, ndim=tensor.ndim, along=along
            )
            tensor = tensor + bias
        layout = layout_at(now, tensor.shape, self.axes.sizes)
        return tensor if layout is None else with_layout(tensor, layout)

    def _rest(
        self, kind: Kind | None, tensor: Tensor, now: list[Placement], axis: int
    ) -> Placement:
        # Where a sum along `axis` is left
        if not self.rule.sums or kind is None or not kind.sums_rest:
            return REPLICATE
        key = self.rule.sums, self._rows, tensor.shape, *now, axis
        if (found := self._rests.get(key)) is None:
            others = [*now]
            others[axis] = REPLICATE
            sizes = self.axes.sizes
            shape = whole_shape(others, tensor.shape, sizes)
            found = self._rests[key] = rest_of(
                self.rule, self._rows, shape, others, axis=axis, sizes=sizes
            )
        return found


# they give a tensor another storage or shape
_RESHAPING = (
    "__set__ set_ resize_ resize_as_ swapaxes_ swapdims_ transpose_ t_ squeeze_ unsqueeze_ "
    "as_strided_ apply_ map_"
)
REFUSED = frozenset(_RESHAPING.split())


@dataclass(frozen=True)
class PreparedCall:
    """All about a call on split tensors that is equal for calls of the same signature.

    Args:
        kind: of the function; None: it gets unsharded tensors
        call: with full shapes
        decision: placements of arguments and results
        in_place: whether it changes its first argument
        sources: where arguments are, by argument and axis
        moving: places of arguments that may have to move
        inputs: layouts of the arguments in the call
        summed: by result, whether it is Partial
        layouts: by result and its local shape, as far as known
        memo: for `Kind.run`
    """

    kind: Kind | None
    call: OpCall
    decision: CallDecision
    in_place: bool
    sources: tuple[tuple[Placement, ...], ...]
    moving: tuple[int, ...]  # places of arguments that may have to move
    inputs: tuple[Layout, ...]
    summed: tuple[bool, ...]  # by result
    layouts: dict[Any, Layout | None] = field(default_factory=dict)  # by result and its local shape
    memo: dict[str, Any] = field(default_factory=dict)


def prepare_call(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Sequence[Tensor],
    *,
    rule: BlockRule,
    whole: Layout,
    sizes: Sequence[int],
) -> PreparedCall:
    """Return what a call does on axes of these sizes.

    Args:
        func: the function
        args: of the call
        kwargs: of the call
        tensors: the arguments that are tensors
        rule: of the block
        whole: the layout of what is replicated
        sizes: of the axes

    Raises:
        ValueError: the call would change a split tensor unseen
    """
    # what cannot be split, or must not be changed
    known = [known_of(tensor, whole) for tensor in tensors]
    kind = KINDS.get(func)
    call = call_of(func, args, kwargs, known)
    in_place = is_in_place(func, kwargs)
    if kwargs.get("out") is not None:
        kind = None
    for tensor in tensors_in(written_besides(func, args, kwargs, in_place=in_place)):
        if (layout := layout_of(tensor)) is not None:
            raise refusal(func, layout.placements)
    # where tensors are to be, and what has to move for that
    decision = decide(
        kind, call, known, sizes, in_place=in_place, splits=rule.splits, gathers=rule.gathered
    )
    sources = tuple(each.layout.placements for each in known)
    moving = tuple(
        place
        for place, (source, target, enters) in enumerate(
            zip(sources, decision.inputs, decision.enters, strict=True)
        )
        if source != target or any(enters)
    )
    inputs = tuple(
        Layout(each.layout.shape, placements)
        for each, placements in zip(known, decision.inputs, strict=True)
    )
    summed = tuple(any(isinstance(each, Partial) for each in output) for output in decision.outputs)
    return PreparedCall(kind, call, decision, in_place, sources, moving, inputs, summed)


def refusal(func: Callable[..., Any], placements: Sequence[Placement]) -> ValueError:
    """Return the error for a call that changes a tensor in place that is at `placements`."""
    return ValueError(
        f"{func.__name__} changes a tensor in place that is split "
        f"{' x '.join(map(str, placements))}, which is not known for such a tensor; write it "
        "without the in-place call, or keep the tensor's block whole"
    )


def signature(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
) -> Any:
    """Return the key of a call, and put its tensors into `tensors`, in order.

    The key holds all that the decision depends on. None if it cannot be compared.
    """
    key: list[Any] = [func]
    known = _collect(args, key, tensors)
    if kwargs:
        key.append(tuple(kwargs))
        known &= _collect(kwargs.values(), key, tensors)
    return tuple(key) if known else None


def _collect(values: Iterable[object], key: list[Any], tensors: list[Tensor]) -> bool:
    # Append to `key` and `tensors` what `values` have; return whether they can be compared
    # types are part of the key: 1 is not True, and a list no tuple
    known = True
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
            layout = layout_of(value)
            key += (
                value.shape if layout is None else layout,
                value.requires_grad,
                type(value),
                value.dtype,
            )
        elif isinstance(value, list | tuple):
            key += (type(value), len(value))
            known &= _collect(value, key, tensors)
        elif isinstance(value, slice):
            bounds = value.start, value.stop, value.step
            known &= not any(isinstance(bound, Tensor) for bound in bounds)
            key += (slice, *bounds)
        else:
            known &= getattr(value, "__hash__", None) is not None
            key += (type(value), value)  # 1 is not True
    return known


def with_tensors(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor], *, without: int | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with `tensors` in place of theirs, and None at place `without`."""
    given: list[Tensor | None] = [*tensors]
    if without is not None:
        given[without] = None
    if any(isinstance(arg, list | tuple) for arg in args) or kwargs:
        args, values = replaced((args, tuple(kwargs.values())), given, of=Tensor)
        return args, dict(zip(kwargs, values, strict=True))
    rest = iter(given)
    return tuple([next(rest) if isinstance(arg, Tensor) else arg for arg in args]), kwargs


# ---- moved tensors, remembered -------------------------------------------------------------------

# Operands that were gathered are saved for backward as the slices they were gathered from, and
# gathered again there (Korthikanti et al., arXiv 2205.05198, section 4.2.2). So activations cost a
# slice on each rank. What several calls share is gathered once more for all of them, and kept until
# the backward of the gather itself.


MOVED = "_topt_moved"
_LOWERED = "_topt_lowered"
_GATHERED = "_topt_gathered"


class TensorMover:
    """Moves tensors along `axes`.

    If it `gathers_again`, what it gathers is saved for backward as a slice.
    """

    def __init__(self, axes: TensorAxes) -> None:
        self.axes, self.gathers_again = axes, False
        self.whole_layout: Layout = Layout((), (REPLICATE,) * len(axes))
        self._alike = (False,) * len(axes)
        # the last tensor gathered, which the next call may want too
        self._shared: Tensor | None = None

    def forget(self) -> None:
        """Release what was gathered last."""
        self._shared = None

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the full shape of `tensor`."""
        if (layout := layout_of(tensor)) is not None:
            return layout.shape
        return tuple(tensor.shape)

    def move(
        self, tensor: Tensor, source: Placements, target: Placements, enters: tuple[bool, ...]
    ) -> Tensor:
        """Return the local tensor at `target`, remembered if other calls may want it.

        Examples are queries, keys and values of one input. `enters` is as in `moves.move`.
        """
        if source == target and not (
            any(enters) and tensor.requires_grad and torch.is_grad_enabled()
        ):
            return tensor
        # Not remembered: the gradient of a leaf would keep it alive, and it what is remembered.
        # Changes of inference tensors are not counted.
        if (tensor.is_leaf and tensor.requires_grad) or tensor.is_inference():
            return self._made(tensor, source, target, enters)[0]
        # remembered on the tensor, as long as neither has changed
        known = tensor.__dict__.setdefault(MOVED, {})
        key = target, enters, torch.is_grad_enabled()
        if (found := known.get(key)) is not None:
            # Of gathered copies only the last: ranks must not differ by when Python frees others.
            kept = found[2]
            again: Tensor | None = kept if isinstance(kept, Tensor) else kept()
            if not isinstance(kept, Tensor) and again is not self._shared:
                again = None
            if again is not None and found[:2] == (tensor._version, again._version):
                return again
        moved, is_copy = self._made(tensor, source, target, enters)
        if is_copy:  # the full copy must not live as long as the slice: a weak reference
            self._shared = moved
        known[key] = tensor._version, moved._version, weakref.ref(moved) if is_copy else moved
        return moved

    def lowered(self, tensor: Tensor) -> Tensor:
        """Return a slice in the dtype of autocast, where that is on and would lower it.

        It is remembered as what `move` returns is: several calls share one.
        """
        kind = tensor.device.type
        if tensor.dtype != torch.float32 or not torch.is_autocast_enabled(kind):
            return tensor
        # parameters are cast, and remembered, by autocast
        if tensor.is_leaf and tensor.requires_grad:
            return tensor
        key = torch.get_autocast_dtype(kind), torch.is_grad_enabled()
        known = tensor.__dict__.get(_LOWERED)
        if known is not None and known[:2] == (key, tensor._version):
            found: Tensor = known[2]
            return found
        with torch._C.DisableTorchFunction():
            found = tensor.to(key[0])
        if (layout := layout_of(tensor)) is not None:
            with_layout(found, layout)
        if not tensor.is_inference():
            tensor.__dict__[_LOWERED] = key, tensor._version, found
        return found

    def _made(
        self, tensor: Tensor, source: Placements, target: Placements, enters: tuple[bool, ...]
    ) -> tuple[Tensor, bool]:
        # The tensor at `target`, and whether backward gathers it again
        moved = moves.move(tensor, source, target, enters, self.axes)
        if not self.gathers_again or moved.numel() <= tensor.numel() or not torch.is_grad_enabled():
            return moved, False
        # in the gather of backward, ranks use the tensor alike
        axes, alike = self.axes, self._alike
        again = Gathered(
            moved, tensor, lambda local: moves.move(local, source, target, alike, axes)
        )
        moved.__dict__[_GATHERED] = again
        return moved, True

    def whole(self, value: object) -> Any:
        """Return `value`, a tensor or a tree of tensors, with split tensors unsharded."""
        if isinstance(value, Tensor):
            if (layout := layout_of(value)) is None:
                return value
            with torch._C.DisableTorchFunction():  # the calls that move it are not user code
                return self.move(
                    value, layout.placements, self.whole_layout.placements, self._alike
                )
        if any(
            isinstance(leaf, Tensor) and layout_of(leaf) is not None for leaf in tree_leaves(value)
        ):
            return tree_map(
                lambda leaf: self.whole(leaf) if isinstance(leaf, Tensor) else leaf, value
            )
        return value

    def at_border(self, rule: BlockRule, wanted: Sequence[Placements], value: object) -> Any:
        """Return `value`, a tree of tensors, moved to where `rule` has them at a border.

        `wanted` are its inputs or outputs.
        """
        leaves, tree = tree_flatten(value)
        index = 0
        with torch._C.DisableTorchFunction():
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor):
                    leaves[place] = self._at_border(rule, wanted, index, leaf)
                    index += 1
        return tree_unflatten(leaves, tree)

    def _at_border(
        self, rule: BlockRule, wanted: Sequence[Placements], index: int, tensor: Tensor
    ) -> Tensor:
        layout = layout_of(tensor)
        shape = self.shape(tensor)
        axes = self.axes
        whole = self.whole_layout.placements
        target = at_border(rule, wanted, index, shape, names=axes.names, sizes=axes.sizes)
        source = whole if layout is None else layout.placements
        if source == target:
            return tensor
        moved = self.move(tensor, source, target, self._alike)
        return moved if target == whole else with_layout(moved, Layout(shape, target))


def gathered_among(tensors: Sequence[Tensor]) -> list[Gathered]:
    """Return what backward gathers again of `tensors`."""
    return [tensor.__dict__[_GATHERED] for tensor in tensors if _GATHERED in tensor.__dict__]


_CHECKPOINT = "torch.utils.checkpoint"


class Gathered:
    """A tensor that `gather`, given `local`, made as `whole`.

    `local` is kept until the backward of the gather, and `whole` made again once.
    """

    def __init__(self, whole: Tensor, local: Tensor, gather: Callable[[Tensor], Tensor]) -> None:
        self.address = whole.untyped_storage()._cdata
        self.local: Tensor | None = local.detach()
        self._gather = gather
        self._again: Tensor | None = None
        self._waits = whole.grad_fn is not None
        if whole.grad_fn is not None:
            whole.grad_fn.register_hook(lambda *_: self._forget())

    def again(self, local: Tensor) -> Tensor:
        """Return the unsharded tensor, from what `local` was saved as."""
        if self._again is not None:
            return self._again
        with torch.no_grad(), torch._C.DisableTorchFunction():
            whole = self._gather(local)
        if self._waits:
            self._again = whole
        return whole

    def _forget(self) -> None:
        self._again = self.local = None  # the graph, which refers to this, may live on


@contextmanager
def saved_as_slices(gathered: Sequence[Gathered]) -> Generator[None]:
    """Save these tensors as slices within it; recomputation, which keeps nothing, is left alone."""
    # hooks that are there already see what is kept
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if not torch.is_grad_enabled() or (outer is not None and outer[0].__module__ == _CHECKPOINT):
        yield
        return
    # what is saved is recognized by its memory: views of it too
    by_address = {each.address: each for each in gathered}

    def pack(tensor: Tensor) -> Any:
        found = (
            by_address.get(tensor.untyped_storage()._cdata)
            if tensor.layout is torch.strided
            else None
        )
        local = None if found is None else found.local
        found, kept = (None, tensor) if local is None else (found, local)
        view = None if found is None else (tensor.size(), tensor.stride(), tensor.storage_offset())
        return found, view, kept if outer is None else outer[0](kept)

    def unpack(saved: Any) -> Tensor:
        found, view, kept = saved
        tensor: Tensor = kept if outer is None else outer[1](kept)
        return tensor if found is None else found.again(tensor).as_strided(*view)

    with saved_tensors_hooks(pack, unpack):
        yield
