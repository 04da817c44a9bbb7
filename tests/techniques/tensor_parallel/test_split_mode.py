"""What user code may do with split tensors beside calling layers is right."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import Placement, Replicate, Shard
from lightning_topt.techniques.tensor_parallel import moves
from lightning_topt.techniques.tensor_parallel.layout import (
    Layout,
    TensorAxes,
    layout_of,
    pieces,
    with_layout,
)
from lightning_topt.techniques.tensor_parallel.split_mode import SplitMode
from lightning_topt.techniques.tensor_parallel.split_parameters import SplitTensor
from tests.launch import run_on_pool
from tests.techniques.tensor_parallel.on_ranks import check, compare

OUT, IN = (Shard(0),), (Shard(1),)
MESH = Mesh((Axis("tensor", 2),))


class Scaled(torch.autograd.Function):
    """As users write them: what it saves meets the gradient in backward, and it reads along the
    last dim.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.cumsum(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cumsum(-1) + (gradient * x).flip(-1).cumsum(-1).flip(-1)


class Block(nn.Module):
    """Two layers with `between`."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(8, 16), nn.Linear(16, 8), between
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self, self.first(x)))


def loss_of(module: nn.Module) -> Tensor:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    return F.mse_loss(module(x), x)


def again(module: nn.Module, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(
        lambda h: F.dropout(h.tanh() * h.softmax(-1), 0.3), x * 2, use_reentrant=reentrant
    )


def counted(module: nn.Module, x: Tensor) -> Tensor:
    module.seen.add_(x.detach().mean(0))
    return x


def written(module: nn.Module, x: Tensor) -> Tensor:
    """In place along the dim that is split: on whole tensors, and the slices are copied back."""
    x = x.clone()
    x[:, torch.tensor([3, 5])] *= 2
    x.cumsum_(1)
    return x.index_add_(1, torch.tensor([0, 8]), x[:, :2] * 2)


def masked(module: nn.Module, x: Tensor) -> Tensor:
    x = x + 1
    x[:2] = 0
    x *= 2
    return x.masked_fill(x > 1, 0.5)


def ranked(module: nn.Module, x: Tensor) -> Tensor:
    top = x.topk(2, dim=0)
    return x + top.values.sum(0) + x.max(0)[0] + torch.stack(x.min(0)[:1])


BLOCKS: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], int]] = {
    "function": (lambda module, x: Scaled.apply(x), 0),
    "checkpoint": (lambda module, x: again(module, x, False), 0),
    "reentrant checkpoint": (lambda module, x: again(module, x, True), 0),
    "written": (written, 3),
    "buffer": (counted, 1),
    "masked": (masked, 0),
    "ranked": (ranked, 0),
    "random": (lambda module, x: x + torch.rand_like(x), 0),
    "norms": (lambda module, x: F.normalize(x, dim=0) + x.norm(dim=0) + x.std(0), 0),
    "values": (lambda module, x: x * float(x.detach().sum()) if x.sum() > -1e9 else x, 0),
    "layers of other sizes": (lambda module, x: F.pad(x, (0, 0, 0, 1))[:4], 0),
}


def several(rank: int) -> dict[str, dict[str, float]]:
    splits = {"first.weight": OUT, "first.bias": OUT, "second.weight": IN}
    return {
        name: compare(rank, partial(Block, between), loss_of, splits, MESH)
        for name, (between, _) in BLOCKS.items()
    }


def test_user_code_between_layers() -> None:
    results = run_on_pool(several, 2)
    for name, (_, whole_calls) in BLOCKS.items():
        check([found[name] for found in results], whole_calls=whole_calls)


# ---- recurrent layers ----------------------------------------------------------------------------


class Layers(nn.Module):
    """An LSTM whose weights rest split: they are gathered."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layer = kind(8, 8, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[None])[0][0, :, :8]


def recurrent(rank: int) -> list[dict[str, float]]:
    split = {"weight_ih_l0": OUT, "weight_hh_l1": OUT}
    return [
        compare(rank, lambda: Layers(nn.LSTM), loss_of, split, MESH),
        compare(rank, lambda: Layers(nn.GRU), loss_of, split, MESH),
    ]


def test_recurrent_layers() -> None:
    results = run_on_pool(recurrent, 2)
    for index in range(2):
        check([found[index] for found in results], whole_calls=1)


# ---- evaluation ----------------------------------------------------------------------------------


def evaluation(rank: int) -> float:
    """Outputs of torch's layers in eval mode, where kernels would see all weights."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    module = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, 6, 32), torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    with torch.no_grad():
        expected = module(x, src_key_padding_mask=padding)
    axes = TensorAxes.with_groups(MESH)
    fused = Shard(0, parts=3)
    ends = {"in_proj_weight": fused, "in_proj_bias": fused, "out_proj.weight": Shard(1)}
    ends |= {"linear1.weight": Shard(0), "linear1.bias": Shard(0), "linear2.weight": Shard(1)}
    for name, parameter in module.named_parameters():
        placement = next((each for end, each in ends.items() if name.endswith(end)), None)
        if placement is not None:
            split = SplitTensor(Layout(tuple(parameter.shape), (placement,)), axes)
            parameter.data = split.own(parameter.data)
            with_layout(parameter, split.layout)
    mode = SplitMode(axes)
    worst = 0.0
    for no_gradients in (torch.no_grad, torch.inference_mode):
        with no_gradients(), mode:
            got = module(x, src_key_padding_mask=padding)
        worst = max(worst, float((got - expected)[~padding].abs().max()))
    assert all(each.decision.outputs for each in mode.prepared)
    return worst


def test_layers_of_torch_in_eval_mode() -> None:
    assert max(run_on_pool(evaluation, 2)) < 1e-5


# ---- moves ---------------------------------------------------------------------------------------


def moves_between_all(rank: int) -> None:
    """Every placement to every other on two axes: values, and gradients of what all ranks compute
    alike.
    """
    mesh = Mesh((Axis("tensor_rows", 2), Axis("tensor_columns", 2)))
    axes = TensorAxes.with_groups(mesh)
    whole = torch.randn(16, 48, generator=torch.Generator().manual_seed(0))
    weights = torch.randn(16, 48, generator=torch.Generator().manual_seed(1))
    single: list[Placement] = [Replicate(), Shard(0), Shard(1), Shard(1, 3), Shard(1, 6)]
    both = [pair for pair in itertools.product(single, single) if pieces(pair, (2, 2)) is not None]
    for source, target in itertools.product(both, both):
        at_source, at_target = (
            SplitTensor(Layout((16, 48), each), axes) for each in (source, target)
        )
        local = at_source.own(whole).requires_grad_()
        moved = moves.move(local * 1, source, target, (False, False), axes)
        assert torch.equal(moved, at_target.own(whole)), (source, target)
        (gradient,) = torch.autograd.grad((moved * at_target.own(weights)).sum(), local)
        assert torch.equal(gradient, at_source.own(weights)), (source, target)


def test_every_move() -> None:
    run_on_pool(moves_between_all, 4)


# ---- the loss ------------------------------------------------------------------------------------


def losses(rank: int, mesh: Mesh, placements: tuple[Placement, ...]) -> None:
    axes = TensorAxes.with_groups(mesh)
    logits = torch.randn(8, 12, generator=torch.Generator().manual_seed(0)) * 3
    target = torch.tensor([0, 11, 5, -100, 6, 3, -100, 8])
    split = SplitTensor(Layout((8, 12), placements), axes)
    for options in (
        *({}, {"reduction": "sum"}, {"reduction": "none"}, {"ignore_index": 5}),
        *({"label_smoothing": 0.1}, {"weight": torch.rand(12)}),
    ):
        torch.manual_seed(0)
        alone = logits.clone().requires_grad_()
        expected = F.cross_entropy(
            alone, target.clamp(min=0 if "ignore_index" in options else -100), **options
        )
        expected.square().sum().backward()
        mode, own = SplitMode(axes), split.own(logits).requires_grad_()
        with mode:
            x = with_layout(own * 1, split.layout)
            loss = F.cross_entropy(
                x, target.clamp(min=0 if "ignore_index" in options else -100), **options
            )
            total = loss.square().sum()
        total.backward()
        torch.testing.assert_close(
            total, expected.square().sum(), msg=lambda text, options=options: f"{options}: {text}"
        )
        torch.testing.assert_close(
            own.grad, split.own(alone.grad), msg=lambda text, options=options: f"{options}: {text}"
        )
        unsharded = sum(not each.decision.outputs for each in mode.prepared)
        assert unsharded == ("weight" in options or "label_smoothing" in options)


def test_cross_entropy_of_split_logits() -> None:
    for placement in (Shard(0), Shard(1)):
        run_on_pool(losses, 2, MESH, (placement,))
    both = Mesh((Axis("tensor_rows", 2), Axis("tensor_columns", 2)))
    run_on_pool(several_losses, 4, both)


def norms(rank: int, mesh: Mesh, placements: tuple[Placement, ...]) -> None:
    axes = TensorAxes.with_groups(mesh)
    whole = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0)) * 3 + 50
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        for function, count, eps in (
            (F.layer_norm, 2, 1e-5),
            (F.rms_norm, 1, None),
            (F.layer_norm, 0, 1e-3),
        ):
            x = whole.to(dtype, copy=True).requires_grad_()
            split = SplitTensor(Layout((4, 6, 8), placements), axes)
            own, mode = split.own(x.detach()).requires_grad_(), SplitMode(axes)
            affine = [
                torch.linspace(0.5, 2, 8, dtype=dtype).requires_grad_() for _ in range(2 * count)
            ]
            expected = function(x, (8,), *affine[:count], **({} if eps is None else {"eps": eps}))
            with mode:
                y = function(
                    with_layout(own * 1, split.layout),
                    (8,),
                    *affine[count:],
                    **({} if eps is None else {"eps": eps}),
                )
            weights = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
            (expected * weights).sum().backward()
            (y * split.own(weights)).sum().backward()
            assert layout_of(y) == split.layout and y.dtype == dtype
            close = {"rtol": tolerance, "atol": tolerance}
            torch.testing.assert_close(y, split.own(expected), **close)
            torch.testing.assert_close(own.grad, split.own(x.grad), **close)
            for a, b in zip(affine[:count], affine[count:], strict=True):
                torch.testing.assert_close(b.grad, a.grad, rtol=tolerance, atol=10 * tolerance)


def several_norms(rank: int) -> None:
    both = Mesh((Axis("tensor_rows", 2), Axis("tensor_columns", 2)))
    for placements in ((Shard(0), Shard(2)), (Shard(2), Shard(2)), (Shard(2), Replicate())):
        norms(rank, both, placements)


def test_norms_of_split_features() -> None:
    run_on_pool(several_norms, 4)


def several_losses(rank: int, mesh: Mesh) -> None:
    for placements in ((Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(1), Shard(1))):
        losses(rank, mesh, placements)
