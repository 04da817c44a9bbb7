"""Every row of a kind on simulated ranks, against the function on whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_topt.graph.op_config import Partial, Replicate, Shard
from lightning_topt.techniques.tensor_parallel.layout import Layout, TensorAxes, cut, joined
from lightning_topt.techniques.tensor_parallel.op_rules import KINDS
from lightning_topt.techniques.tensor_parallel.op_rules.rules import (
    Argument,
    Placed,
    Row,
    call_of,
    replaced,
    tensors_in,
)


class Sample:
    """A call as users write it; `parts`: what shards have, `fixed`: no gradient."""

    def __init__(
        self,
        func: Callable[..., Any],
        *args: Any,
        parts: tuple[int, ...] = (1,),
        fixed: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> None:
        self.fixed = fixed
        self.func, self.args, self.kwargs, self.parts = func, args, kwargs, parts
        self.tensors = list(tensors_in((*args, *kwargs.values())))

    def __repr__(self) -> str:
        args, kwargs = self.given(
            [f"[{', '.join(map(str, tensor.shape))}]" for tensor in self.tensors]
        )
        return f"{self.func.__name__}{args}{kwargs or ''}"

    def run(self, tensors: list[Tensor], func: Callable[..., Any] | None = None) -> Any:
        args, kwargs = self.given(tensors)
        return (func or self.func)(*args, **kwargs)

    def given(self, tensors: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, values = replaced((self.args, tuple(self.kwargs.values())), tensors, of=Tensor)
        return args, dict(zip(self.kwargs, values, strict=True))

    def rows(self, ranks: int) -> Iterator[tuple[Any, Row]]:
        known = [
            Argument(Layout(tuple(t.shape), (Replicate(),)), False, False, t.dtype == torch.bool)
            for t in self.tensors
        ]
        call = call_of(self.func, self.args, self.kwargs, known)
        call = type(call)(call.func, call.args, call.kwargs, call.operands, self.parts, call.masks)
        for row in KINDS[self.func].rows(call, ranks):
            yield call, row


def leaves(sample: Sample, tensors: list[Tensor]) -> list[Tensor]:
    new = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
    for index, tensor in enumerate(new):
        tensor.requires_grad_(tensor.is_floating_point() and index not in sample.fixed)
    return new


def copies(sample: Sample, tensors: list[Tensor]) -> list[Tensor]:
    """What a function changes in place is no leaf."""
    name = sample.func.__name__
    in_place = (
        (name.endswith("_") and name[:2] != "__") or name.startswith("__i") or name == "__setitem__"
    )
    in_place |= sample.kwargs.get("inplace", False) is True
    return [tensors[0].clone(), *tensors[1:]] if in_place and name != "__invert__" else tensors


def results(sample: Sample, returned: Any, given: list[Tensor]) -> list[Tensor]:
    if returned is None:
        return [given[0]]
    return list(tensors_in((returned,) if isinstance(returned, Tensor) else returned))


def assert_row(sample: Sample, call: Any, row: Row, ranks: int) -> None:
    kind = KINDS[sample.func]
    whole = leaves(sample, sample.tensors)
    torch.manual_seed(0)
    given = copies(sample, whole)
    expected = results(sample, sample.run(given), given)
    local = [leaves(sample, _cut(sample.tensors, row, rank, ranks)) for rank in range(ranks)]
    outputs = []
    for rank in range(ranks):
        axes = TensorAxes(("tensor",), (ranks,), (rank,), (None,))
        mine = copies(sample, local[rank])
        passed = [None if index == row.added else tensor for index, tensor in enumerate(mine)]
        torch.manual_seed(0)
        args, kwargs = sample.given(passed)
        layouts = tuple(
            Layout(tuple(t.shape), (p,)) for t, p in zip(sample.tensors, row.inputs, strict=True)
        )
        placed = Placed(call, args, kwargs, layouts, tuple((p,) for p in row.outputs), axes)
        returned = kind.run(placed) if kind.run is not None else sample.func(*args, **kwargs)
        outputs.append(results(sample, returned, mine))
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64)
    totals = [torch.zeros((), dtype=torch.float64) for _ in range(ranks)]
    assert {len(each) for each in outputs} == {len(expected)}
    for index, want in enumerate(expected):
        placement = row.outputs[min(index, len(row.outputs) - 1)]
        pieces = [each[index] for each in outputs]
        got = _together(pieces, placement)
        if row.added is not None:
            got = got + whole[row.added].view(-1, *(1 for _ in range(-1 - row.along)))
        what = f"{sample} {row} result {index}"
        torch.testing.assert_close(
            got, want, msg=lambda found, what=what: f"{what}: {found}", equal_nan=True
        )
        if not (want.is_floating_point() and want.requires_grad):
            continue
        weights = torch.rand(want.shape, generator=generator, dtype=want.dtype)
        total = total + (want * weights).nan_to_num().sum()
        for rank in range(ranks):
            own = (
                cut(weights, placement, index=rank, count=ranks)
                if isinstance(placement, Shard)
                else weights
            )
            totals[rank] = totals[rank] + (pieces[rank] * own).nan_to_num().sum()
    if total.requires_grad:
        _assert_gradients(sample, row, whole, local, total, totals)


def _assert_gradients(
    sample: Sample,
    row: Row,
    whole: list[Tensor],
    local: list[list[Tensor]],
    total: Tensor,
    totals: list[Tensor],
) -> None:
    total.backward()
    for each in totals:
        if each.requires_grad:
            each.backward()
    for index, (tensor, placement) in enumerate(zip(whole, row.inputs, strict=True)):
        if not tensor.requires_grad or tensor.grad is None or index == row.added:
            continue
        slices = [mine[index].grad for mine in local]
        slices = [torch.zeros_like(local[0][index]) if grad is None else grad for grad in slices]
        got = (
            joined(slices, placement)
            if isinstance(placement, Shard)
            else sum(slices[1:], slices[0])
        )
        text = f"{sample} {row} gradient of argument {index}"
        torch.testing.assert_close(
            got, tensor.grad, msg=lambda found, text=text: f"{text}: {found}", equal_nan=True
        )


def _cut(tensors: list[Tensor], row: Row, rank: int, ranks: int) -> list[Tensor]:
    return [
        cut(tensor, placement, index=rank, count=ranks) if isinstance(placement, Shard) else tensor
        for tensor, placement in zip(tensors, row.inputs, strict=True)
    ]


def _together(pieces: list[Tensor], placement: Any) -> Tensor:
    if isinstance(placement, Shard):
        return joined(pieces, placement)
    if isinstance(placement, Partial):
        return sum(pieces[1:], pieces[0])
    for piece in pieces[1:]:
        torch.testing.assert_close(piece, pieces[0])
    return pieces[0]
