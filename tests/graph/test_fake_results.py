"""What a call on fake tensors returns the second time is what torch returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from lightning_topt.graph.module_copy import ShapeMode
from lightning_topt.graph.recorder import FakeResults, FrozenCall, makes_new_tensors

aten = torch.ops.aten


def tensors(mode: ShapeMode, *shapes: tuple[int, ...], **options: Any) -> list[Tensor]:
    with mode:
        return [torch.empty(shape, **options) for shape in shapes]


def facts(out: Any) -> list[Any]:
    made = out if isinstance(out, tuple) else (out,)
    return [
        (t.shape, t.stride(), t.dtype, t.fake_device, t.untyped_storage().nbytes()) for t in made
    ]


CALLS: list[tuple[OpOverload, list[tuple[int, ...]], tuple[Any, ...], dict[str, Any]]] = [
    (aten.mm.default, [(8, 4), (4, 2)], (), {}),
    (aten.add.Tensor, [(8, 1), (1, 4)], (), {"alpha": 2}),
    (aten._to_copy.default, [(8, 4)], (), {"dtype": torch.bfloat16}),
    (aten.native_layer_norm.default, [(2, 8, 4)], ([4], None, None, 1e-5), {}),
    (aten.sum.dim_IntList, [(8, 4)], ([0], True), {}),
    (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        [(2, 4, 8, 16)] * 3,
        (0.0, True),
        {},
    ),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: str(call[0]))
def test_the_second_call_returns_new_tensors_like_the_first(call: Any) -> None:
    func, shapes, more, kwargs = call
    mode, other, results = ShapeMode(), ShapeMode(), FakeResults()
    assert makes_new_tensors(func)
    outs = []
    for each in (mode, mode, other):
        args = (*tensors(each, *shapes), *more)
        with each:
            outs.append(results.of(FrozenCall.of(func, args, kwargs), func, args, kwargs))
            assert facts(outs[-1]) == facts(func(*args, **kwargs))
    (likes,) = results._known.values()
    assert likes is not None and type(outs[1]) is type(outs[0])
    first, second, third = (out[0] if isinstance(out, tuple) else out for out in outs)
    assert isinstance(second, FakeTensor) and second.fake_mode is mode and third.fake_mode is other
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata


@pytest.mark.parametrize(
    "func",
    [
        aten.view.default,
        aten._unsafe_view.default,
        aten.add_.Tensor,
        aten.detach.default,
        aten.nonzero.default,
        aten._local_scalar_dense.default,
        aten.split.Tensor,
        torch.ops.topt.collective_.default,
    ],
    ids=str,
)
def test_writes_views_and_values_are_left_to_torch(func: OpOverload) -> None:
    assert not makes_new_tensors(func)


def test_what_a_key_does_not_tell_is_left_to_torch() -> None:
    mode, results = ShapeMode(allow_non_fake_inputs=True), FakeResults()

    def of(func: OpOverload, *args: Any) -> Any:
        with mode:
            return results.of(FrozenCall.of(func, args, {}), func, args, {})

    (x,) = tensors(mode, (4, 4))
    # a value that torch knows, a tensor of another mode, complex numbers, results that are shared
    with mode:
        known = torch.tensor(2.0)
    assert known.constant is not None  # type: ignore[attr-defined]
    for arguments in ((x, known), (x, torch.ones(4, 4))):
        of(aten.mul.Tensor, *arguments)
    (c,) = tensors(mode, (4, 4), dtype=torch.complex64)
    of(aten.mul.Tensor, c, c)
    assert not results._known
    # the default dtype decides what whole numbers become
    (n,) = tensors(mode, (4,), dtype=torch.int64)
    assert of(aten.div.Tensor, n, n).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert of(aten.div.Tensor, n, n).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    # other strides are another call
    assert of(aten.clone.default, x).stride() == (4, 1)
    assert of(aten.clone.default, x.t()).stride() == (1, 4)
