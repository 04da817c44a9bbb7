"""Which modules become blocks."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_topt.graph.blocks import why_not_recomputed
from lightning_topt.graph.capture import capture
from tests.models import GPT, MLP, CalledTwice, ConvNet, batch_for


def blocks(module: Any, batch: Any = None) -> dict[str, tuple[int, bool]]:
    graph = capture(module, batch_for(module) if batch is None else batch)
    assert graph.blocks[0].name == ""
    return {block.name: (block.group, block.recomputable) for block in graph.blocks}


class Net(L.LightningModule):
    """Calls its children one after the other."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for child in self.children():
            batch = child(batch)
        return batch.square().mean()


X = torch.zeros(4, 8)


def test_gpt() -> None:
    found = blocks(GPT(layers=4))
    repeated = {name: value for name, value in found.items() if name.startswith("blocks.")}
    assert list(repeated) == [f"blocks.{i}" for i in range(4)]
    assert len({group for group, _ in repeated.values()}) == 1 and all(
        value[1] for value in repeated.values()
    )
    assert set(found) == {"", *repeated}


def test_large_embedding_and_head_are_blocks_unless_tied() -> None:
    assert {"tokens", "head"} <= set(blocks(GPT(vocab=512)))
    assert not {"tokens", "head"} & set(blocks(GPT(vocab=512, tied=True)))


def test_cnn() -> None:
    found = blocks(ConvNet())
    assert {name for name in found if name} == {
        "conv1",
        "norm1",
        "conv2",
        "norm2",
        "hidden",
        "head",
    }
    # Running statistics would be updated twice.
    assert [name for name, (_, recomputable) in found.items() if not recomputable] == [
        "",
        "norm1",
        "norm2",
    ]


def test_module_called_twice_is_not_a_block_of_its_own() -> None:
    assert "shared" not in blocks(CalledTwice())


def test_repeated_module_called_twice_is_not_recomputable() -> None:
    class Twice(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.b(self.a(self.a(batch))).square().mean()

    found = blocks(Twice(a=nn.Linear(8, 8), b=nn.Linear(8, 8)), X)
    assert found["a"][0] == found["b"][0] and not found["a"][1] and found["b"][1]


def test_module_with_most_parameters_is_opened() -> None:
    inner = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    assert set(blocks(Net(inner=inner, last=nn.Linear(8, 2)), X)) == {"", "inner.0", "inner.2"}
    # Half of the parameters or less: the module as a whole.
    other = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 8))
    assert {"inner", "other"} <= set(blocks(Net(inner=inner, other=other, last=nn.Linear(8, 2)), X))


def test_parameters_read_from_outside_make_no_block() -> None:
    class Borrows(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (self.b(self.a(batch)) @ self.a.weight).square().mean()

    assert set(blocks(Borrows(a=nn.Linear(8, 8), b=nn.Linear(8, 8)), X)) == {"", "b"}


def test_module_used_without_forward_makes_no_block() -> None:
    class Direct(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.b(nn.functional.linear(batch, self.a.weight)).square().mean()

    assert set(blocks(Direct(a=nn.Linear(8, 8), b=nn.Linear(8, 8)), X)) == {"", "b"}


def test_block_without_gradient_or_with_in_place_input_is_not_recomputable() -> None:
    frozen = nn.Linear(8, 8).requires_grad_(False)
    found = blocks(
        Net(
            frozen=frozen,
            plain=nn.Linear(8, 8),
            inplace=nn.Sequential(nn.ReLU(True), nn.Linear(8, 8)),
        ),
        X,
    )
    assert not found["frozen"][1] and found["plain"][1] and not found["inplace"][1]


def test_large_loss_module_is_a_recomputable_block() -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp().sin().cos().tanh().square().mean()

    class WithLoss(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.loss(self.b(self.a(batch)))

    found = blocks(WithLoss(a=nn.Linear(8, 64), b=nn.Linear(64, 8), loss=Loss()), X)
    assert found["loss"][1]


class Counts(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


def test_the_blocks_that_cannot_run_again_are_named_with_the_reason() -> None:
    assert why_not_recomputed(capture(MLP(), batch_for(MLP()))) is None
    frozen = nn.Linear(8, 8).requires_grad_(False)
    normed = {f"norm{i}": nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for i in range(2)}
    net = Net(frozen=frozen, first=nn.Linear(8, 8), second=Counts(8, 8), **normed)
    why = why_not_recomputed(capture(net, torch.zeros(4, 8)))
    assert (
        why is not None and why.startswith("of ") and "'first'" not in why and "'frozen'" not in why
    )
    assert (
        "1 ('second') do not do the same" in why
        and "2 ('norm0', ...) change tensors that are older" in why
    )
