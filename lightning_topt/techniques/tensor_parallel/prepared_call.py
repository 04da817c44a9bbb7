"""A `PreparedCall` is all about a call of a torch function on split tensors that does not change
between two of the same signature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_topt.graph.op_config import Partial, Placement
from lightning_topt.techniques.tensor_parallel.block_rules import BlockRule
from lightning_topt.techniques.tensor_parallel.decisions import Decision, decide
from lightning_topt.techniques.tensor_parallel.kind_table import KINDS
from lightning_topt.techniques.tensor_parallel.kinds import Call, Kind, tensors_in
from lightning_topt.techniques.tensor_parallel.layout import Layout, layout_of
from lightning_topt.techniques.tensor_parallel.sample_rows import Batches, batches_after
from lightning_topt.techniques.tensor_parallel.signatures import call_of, is_in_place, known_of
from lightning_topt.techniques.tensor_parallel.user_access import written_besides

REFUSED = {  # they give a tensor another storage or shape
    *(
        "__set__",
        "set_",
        "resize_",
        "resize_as_",
        "swapaxes_",
        "swapdims_",
        "transpose_",
        "t_",
        "squeeze_",
        "unsqueeze_",
    ),
    *("as_strided_", "apply_", "map_"),
}


@dataclass(frozen=True)
class PreparedCall:
    """A `PreparedCall` says where arguments and results of a call are, and what is to be moved and
    summed.
    """

    kind: Kind | None
    call: Call
    decision: Decision
    in_place: bool
    sources: tuple[tuple[Placement, ...], ...]
    moving: tuple[int, ...]  # places of arguments that may have to move
    inputs: tuple[Layout, ...]
    summed: tuple[bool, ...]  # by result
    batches: Batches = ()  # by result; see `Layout`
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
    """Return what a call does on axes of these sizes, of which `tensors` are the arguments that are
    tensors.

    `whole` is the layout of what is whole. Raises ValueError for a call that would change a split
    tensor unseen, and where samples of the batches of several ranks would meet.
    """
    known = [known_of(tensor, whole) for tensor in tensors]
    kind, call, in_place = (
        KINDS.get(func),
        call_of(func, args, kwargs, known),
        is_in_place(func, kwargs),
    )
    if kwargs.get("out") is not None:
        kind = None
    for tensor in tensors_in(written_besides(func, args, kwargs, in_place=in_place)):
        if (layout := layout_of(tensor)) is not None:
            raise refusal(func, layout.placements)
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
        Layout(each.layout.shape, placements, each.layout.batch)
        for each, placements in zip(known, decision.inputs, strict=True)
    )
    summed = tuple(any(isinstance(each, Partial) for each in output) for output in decision.outputs)
    batches = batches_after(kind, call, known, sizes[0], in_place=in_place) if rule.is_joint else ()
    return PreparedCall(kind, call, decision, in_place, sources, moving, inputs, summed, batches)


def refusal(func: Callable[..., Any], placements: Sequence[Placement]) -> ValueError:
    """Return the error for a call that changes a tensor in place that is at `placements`."""
    return ValueError(
        f"{func.__name__} changes a tensor in place that is split "
        f"{' x '.join(map(str, placements))}, which is not known for such a tensor; write it "
        "without the in-place call, or keep the tensor's block whole"
    )
