"""`SplitMode` sees every call of a torch function: arguments that are split are moved as a row of
the function's kind needs them, the function runs on local tensors, and its results carry their
layouts.

The mode is on while user code runs forward. What is whole passes through untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_topt.graph.op_config import LAYOUT, Partial, Placement, Shard
from lightning_topt.techniques.tensor_parallel import moves
from lightning_topt.techniques.tensor_parallel.attributes import ALIASES, ATTRIBUTES, LOCAL
from lightning_topt.techniques.tensor_parallel.block_rules import BlockRule, rest_of
from lightning_topt.techniques.tensor_parallel.composites import body_of
from lightning_topt.techniques.tensor_parallel.copied_views import (
    COPIED,
    note_copies,
    refuse_copies,
)
from lightning_topt.techniques.tensor_parallel.kind_table import KINDS
from lightning_topt.techniques.tensor_parallel.kinds import Kind, Placed, replaced, tensors_in
from lightning_topt.techniques.tensor_parallel.layout import (
    REPLICATE,
    layout_at,
    layout_of,
    local_shard,
    whole_shape,
    with_layout,
)
from lightning_topt.techniques.tensor_parallel.prepared_call import (
    REFUSED,
    PreparedCall,
    prepare_call,
    refusal,
)
from lightning_topt.techniques.tensor_parallel.python_functions import PythonFunctionMode
from lightning_topt.techniques.tensor_parallel.regather import saved_as_slices
from lightning_topt.techniques.tensor_parallel.sample_rows import refuse_draws
from lightning_topt.techniques.tensor_parallel.signatures import signature, with_tensors
from lightning_topt.techniques.tensor_parallel.tensor_axes import TensorAxes
from lightning_topt.techniques.tensor_parallel.tensor_mover import (
    MOVED,
    TensorMover,
    gathered_among,
)
from lightning_topt.techniques.tensor_parallel.user_access import (
    SET_DATA,
    gradients,
    hook_of_slices,
    read_only,
    refuse_transforms,
    set_data,
    transforms_are_on,
)

PLAIN = BlockRule()
_MAX_KNOWN = 10_000  # decisions: batches of ever new lengths


class SplitMode(PythonFunctionMode):
    """Runs forward code on the tensor axes `axes`, by `rule` outside of the blocks that have rules
    of their own.
    """

    def __init__(self, axes: TensorAxes, *, rule: BlockRule = PLAIN) -> None:
        super().__init__()
        self.axes, self.mover = axes, TensorMover(axes)
        self._whole = self.mover.whole_layout
        self._tables: dict[Any, dict[Any, PreparedCall]] = {}
        self._rests: dict[Any, Placement] = {}
        self._follow(rule, None)

    def _follow(self, rule: BlockRule, rows: tuple[int, ...] | None) -> None:
        self.rule, self._rows = rule, rows
        self._known = self._tables.setdefault((rule.splits, rule.gathered, rule.is_joint), {})
        self.mover.gathers_again = not rule.is_plain and not rule.is_joint
        self.mover.sums_later = rule.is_joint
        self.mover.forget()

    @property
    def prepared(self) -> list[PreparedCall]:
        """All that is known of calls on split tensors, once for each signature, in the order in
        which they came first.
        """
        return [each for known in self._tables.values() for each in known.values()]

    @property
    def whole_calls(self) -> list[str]:
        """Names of functions that got whole tensors because no row fits, once for each
        signature.
        """
        return [each.call.func.__name__ for each in self.prepared if not each.decision.outputs]

    @contextmanager
    def on(self) -> Generator[None, None, None]:
        """Turn the mode on where it is not: outside of all, and where torch turned it off
        (backward, which may recompute).
        """
        if self.is_on:
            yield
            return
        with self:
            yield
        self.mover.forget()

    @override
    def whole(self, value: Any) -> Any:
        """Return `value`, a tensor or anything that holds tensors, with whole tensors in the place
        of split ones.
        """
        return self.mover.whole(value)

    def run_block(
        self,
        rule: BlockRule,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return what `forward` returns, run by `rule`: its tensors are moved to where they cross
        the border.
        """
        if rule.is_plain and self.rule.is_plain:
            if not rule.has_border:
                return forward(*args, **kwargs)
            return self.whole(forward(*self.whole(args), **self.whole(kwargs)))
        if rule.has_border:
            args, kwargs = self.mover.at_border(rule, rule.inputs, (args, kwargs))
        shapes = (
            self.mover.shape(each)
            for each in tree_leaves((args, kwargs))
            if isinstance(each, Tensor)
        )
        with self.following(rule, next((shape[:-1] for shape in shapes if len(shape) > 1), None)):
            result = forward(*args, **kwargs)
        return self.mover.at_border(rule, rule.outputs, result) if rule.has_border else result

    @contextmanager
    def following(
        self, rule: BlockRule, rows: tuple[int, ...] | None
    ) -> Generator[None, None, None]:
        """Run by `rule`, `rows` being the dims but for the last of tensors at the border (see
        `rest_of`).
        """
        before = self.rule, self._rows
        self._follow(rule, rows)
        try:
            yield
        finally:
            self._follow(*before)

    @override
    def as_now(self) -> Callable[[], AbstractContextManager[None]]:
        """Return what makes a context in which calls run by the rule that is followed now."""
        return partial(self.following, self.rule, self._rows)

    @property
    def is_on(self) -> bool:
        """Whether calls are seen here."""
        return self in _get_current_function_mode_stack()  # type: ignore[no-untyped-call]

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for arg in args if not kwargs else (*args, *kwargs.values()):
            if isinstance(arg, Tensor):
                if (notes := arg.__dict__) and (LAYOUT in notes or COPIED in notes):
                    return self._on_split(func, args, kwargs or {})
            elif isinstance(arg, list | tuple) and any(
                layout_of(each) is not None for each in tensors_in(arg)
            ):
                return self._on_split(func, args, kwargs or {})
        if self.rule.is_joint:
            refuse_draws(func, args, kwargs or {})
        if transforms_are_on():
            refuse_transforms(tensors_in((*args, *(kwargs or {}).values())))
        return func(*args, **(kwargs or {}))

    def _on_split(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
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
        local = self._moved_arguments(prepared, tensors)
        result = self._placed(prepared, self._run(prepared, args, kwargs, tensors, local), local)
        if prepared.decision.writes_back:
            return self._written_back(prepared, tensors[0], local[0])
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
        if self.mover.gathers_again and prepared.moving and (gathered := gathered_among(local)):
            with saved_as_slices(gathered):
                return self._called(prepared, args, kwargs)
        return self._called(prepared, args, kwargs)

    def _called(self, prepared: PreparedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind, outputs = prepared.kind, prepared.decision.outputs
        if kind is None or kind.run is None or not (outputs or (kind.draws and prepared.batches)):
            return prepared.call.func(*args, **kwargs)
        return kind.run(
            Placed(prepared.call, args, kwargs, prepared.inputs, outputs, self.axes, prepared.memo)
        )

    # ---- arguments -------------------------------------------------------------------------------

    def _moved_arguments(self, prepared: PreparedCall, tensors: list[Tensor]) -> list[Tensor]:
        """The local tensors; the list itself where none moves."""
        if prepared.in_place:
            tensors[0].__dict__.pop(MOVED, None)
            refuse_copies(prepared.call.func, tensors[0])
        if not prepared.moving:
            return tensors
        local = [*tensors]
        decision = prepared.decision
        for place in prepared.moving:
            where = prepared.sources[place], decision.inputs[place], decision.enters[place]
            local[place] = self.mover.move(tensors[place], *where)
        if decision.writes_back:
            if prepared.call.func.__name__ in REFUSED:
                raise refusal(prepared.call.func, prepared.sources[0])
            local[0] = local[0].clone()
        return local

    def _written_back(self, prepared: PreparedCall, tensor: Tensor, whole: Tensor) -> Tensor | None:
        """Copy the slice of what a whole tensor became in place into the split one."""
        everywhere, target = self._whole.placements, prepared.sources[0]
        tensor.copy_(moves.move(whole, everywhere, target, (False,) * len(everywhere), self.axes))
        return None if prepared.call.func is Tensor.__setitem__ else tensor

    # ---- results ---------------------------------------------------------------------------------

    def _placed(self, prepared: PreparedCall, result: Any, local: Sequence[Tensor]) -> Any:
        if not prepared.decision.outputs and not prepared.batches:
            return result
        if isinstance(result, Tensor):
            held = [result]
            del result  # while what follows it is made, nobody needs a summand
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
        """Sum what is partial, add what waits for that, and say where the result is."""
        batch = (
            prepared.batches[min(index, len(prepared.batches) - 1)] if prepared.batches else None
        )
        outputs, added = prepared.decision.outputs, prepared.decision.added
        index = min(index, max(len(outputs) - 1, 0))
        placements = outputs[index] if outputs else self._whole.placements
        if not (outputs and prepared.summed[index]) and added is None:
            key, layouts = (index, tensor.shape), prepared.layouts
            if key not in layouts:
                layouts[key] = layout_at(placements, tensor.shape, self.axes.sizes, batch=batch)
            if (known := layouts[key]) is not None:
                tensor.__dict__[LAYOUT] = known
            return tensor
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
        if added is not None:
            along = prepared.decision.along
            later = self.mover.sums_later
            bias = moves.bias_for(
                local[added],
                placements,
                now,
                self.axes,
                ndim=tensor.ndim,
                along=along,
                sums_later=later,
            )
            tensor = tensor + bias
        layout = layout_at(now, tensor.shape, self.axes.sizes, batch=batch)
        return tensor if layout is None else with_layout(tensor, layout)

    def _rest(
        self, kind: Kind | None, tensor: Tensor, now: list[Placement], axis: int
    ) -> Placement:
        """Return where a sum along `axis` is left."""
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
