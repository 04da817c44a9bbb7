"""What a Transformer layer sends and keeps on each rank equals the formulas, in one, two and three
dimensions.

T tokens, h features, P = q^3 ranks. Elements that a rank sends in a step, of products alone:

    1-D           8 (P-1)/P Th                                Shoeybi et al., arXiv 1909.08053,
                                                              section 3
    1-D by step   the same, and 2 gathers again in backward   Korthikanti et al., arXiv 2205.05198,
                                                              section 4.2.2
    3-D           2 (q-1)/q^3 (16 Th + 12 h^2)                Bian et al., arXiv 2105.14450,
                  and (q-1)/q^3 (7 Th + 12 h^2) again in      section 3
                  backward, so that activations are kept
                  in slices

Norms add all-reduces of a number or two per row, which are counted by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_topt.graph.op_config import Placement, Replicate, Shard
from lightning_topt.techniques.tensor_parallel.block_rules import BlockRule
from lightning_topt.techniques.tensor_parallel.layout import (
    CollectiveCall,
    Layout,
    TensorAxes,
    with_layout,
)
from lightning_topt.techniques.tensor_parallel.split_mode import SplitMode
from lightning_topt.techniques.tensor_parallel.split_parameters import SplitTensor

WHOLE = Replicate()
BATCH, STEPS, WIDTH, HEADS = 8, 16, 32, 4
TOKENS = BATCH * STEPS
Placed = tuple[Placement, ...]
ONE = {"qkv": (Shard(0, 3),), "project": (Shard(1),), "up": (Shard(0),), "down": (Shard(1),)}
THREE = {
    "qkv": (Shard(0, 6), Shard(0, 3), Shard(1)),
    "project": (Shard(0, 2), Shard(1), Shard(0)),
    "up": (Shard(0, 2), Shard(0), Shard(1)),
    "down": (Shard(0, 2), Shard(1), Shard(0)),
}
BY_STEP = BlockRule("", ((Shard(1),),), ((Shard(1),),), (Shard(1),))
CUBE_BORDER = (Shard(0), Shard(0), Shard(2))
CUBE = BlockRule("", (CUBE_BORDER,), (CUBE_BORDER,), (Shard(0),) * 3, (True, False, False))


class Layer(nn.Module):
    """The matrices of a layer, and nothing else that is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.project = (
            nn.Linear(WIDTH, 3 * WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )
        self.up, self.down = (
            nn.Linear(WIDTH, 4 * WIDTH, bias=False),
            nn.Linear(4 * WIDTH, WIDTH, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.qkv(F.layer_norm(x, (width,))).chunk(3, -1)
        q, k, v = (each.view(batch, time, HEADS, width // HEADS).transpose(1, 2) for each in heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(F.layer_norm(x, (width,)))))


class Seen:
    """The collective calls of a step of several layers, the bytes kept for backward and those of
    the parameters.
    """

    def __init__(
        self,
        layers: int,
        sizes: tuple[int, ...] = (),
        placements: Mapping[str, Placed] | None = None,
        rule: BlockRule = BY_STEP,
    ) -> None:
        count = len(sizes)
        calls: list[CollectiveCall] = []
        axes = TensorAxes(("a", "b", "c")[:count], sizes, (0,) * count, (None,) * count, calls)
        module = nn.ModuleList(Layer() for _ in range(layers))
        for name, parameter in module.named_parameters():
            if placements is not None:
                split = SplitTensor(
                    Layout(tuple(parameter.shape), placements[name.split(".")[1]]), axes
                )
                with_layout(parameter, split.layout)
                parameter.data = split.own(parameter.data)
        self.state = sum(parameter.nbytes for parameter in module.parameters())
        self.kept: dict[int, Tensor] = {}
        own = {parameter.untyped_storage()._cdata for parameter in module.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage()._cdata not in own:
                self.kept[tensor.untyped_storage()._cdata] = tensor
            return tensor

        x = torch.randn(BATCH, STEPS, WIDTH, requires_grad=True)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            if not count:
                for layer in module:
                    x = layer(x)
            else:
                mode = SplitMode(axes)
                with mode:
                    for layer in module:
                        x = mode.run_block(rule, layer, (x,), {})
        x.sum().backward()
        self.calls = calls

    @property
    def bytes_kept(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.kept.values())

    def elements(self, op: str, sizes: tuple[int, ...]) -> float:
        """Elements that a rank sends in the calls of `op`."""
        share = 2 if op == "all_reduce" else 1
        return sum(
            share * each.size / 4 * (sizes[each.axis] - 1) / sizes[each.axis]
            for each in self.calls
            if each.op == op
        )


def of_a_layer(
    op: str, sizes: tuple[int, ...], placements: Mapping[str, Placed], rule: BlockRule
) -> float:
    """One layer more, so without the ends."""
    more, less = (Seen(layers, sizes, placements, rule).elements(op, sizes) for layers in (3, 2))
    return more - less


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_dimension(ranks: int) -> None:
    moved = (ranks - 1) / ranks * TOKENS * WIDTH
    assert of_a_layer("all_reduce", (ranks,), ONE, BlockRule(is_repeated=True)) == 8 * moved
    assert of_a_layer("all_reduce", (ranks,), ONE, BY_STEP) == 0
    assert of_a_layer("reduce_scatter", (ranks,), ONE, BY_STEP) == 4 * moved
    assert of_a_layer("all_gather", (ranks,), ONE, BY_STEP) == (4 + 2) * moved


WHOLE_MATRICES = dict.fromkeys(ONE, (WHOLE,))


@pytest.mark.parametrize("ranks", [2, 4])
def test_context_by_heads(ranks: int) -> None:
    """Queries, keys, values and what attention makes of them change from steps to heads and back,
    with their gradients.
    """
    assert (
        of_a_layer("all_to_all", (ranks,), WHOLE_MATRICES, BY_STEP)
        == 8 * (ranks - 1) / ranks**2 * TOKENS * WIDTH
    )
    assert of_a_layer("all_gather", (ranks,), WHOLE_MATRICES, BY_STEP) == 0
    assert of_a_layer("reduce_scatter", (ranks,), WHOLE_MATRICES, BY_STEP) == 0
    assert (
        of_a_layer("all_reduce", (ranks,), WHOLE_MATRICES, BY_STEP)
        == 2 * (ranks - 1) / ranks * 12 * WIDTH**2
    )


def test_context_where_heads_do_not_divide() -> None:
    """Keys and values are gathered, again in backward, and their gradients scattered."""
    ranks = STEPS  # more than samples
    moved = (ranks - 1) / ranks * TOKENS * WIDTH
    assert of_a_layer("all_gather", (ranks,), WHOLE_MATRICES, BY_STEP) == (2 + 2) * moved
    assert of_a_layer("reduce_scatter", (ranks,), WHOLE_MATRICES, BY_STEP) == 2 * moved
    assert of_a_layer("all_to_all", (ranks,), WHOLE_MATRICES, BY_STEP) == 0


def test_three_dimensions() -> None:
    sizes, q = (2, 2, 2), 2
    found = [
        of_a_layer(op, sizes, THREE, CUBE)
        for op in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
    ]
    once = 2 * (q - 1) / q**3 * (16 * TOKENS * WIDTH + 12 * WIDTH**2)
    again = (q - 1) / q**3 * (7 * TOKENS * WIDTH + 12 * WIDTH**2)
    assert sum(found[:2]) == once + again
    assert found[2] == 0
    rows = TOKENS / q**2
    assert found[3] == 2 * (1 + 1 + 2) * 2 * (q - 1) / q * rows  # of two norms


def kept_by_a_layer(*given: object) -> float:
    return Seen(3, *given).bytes_kept - Seen(2, *given).bytes_kept  # type: ignore[arg-type]


def test_a_rank_keeps_its_share() -> None:
    alone, whole = Seen(2), kept_by_a_layer()
    assert Seen(2, (4,), ONE, BlockRule(is_repeated=True)).state == alone.state / 4
    assert Seen(2, (2, 2, 2), THREE, CUBE).state == alone.state / 8
    assert kept_by_a_layer((4,), ONE, BY_STEP) == pytest.approx(whole / 4, rel=0.05)
    assert kept_by_a_layer((2, 2, 2), THREE, CUBE) == pytest.approx(whole / 8, rel=0.05)
