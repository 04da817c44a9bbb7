"""Calls that are skipped in a recording and put back, against recordings in which every call
runs.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_topt.graph import capture as capturing
from lightning_topt.graph.capture import capture
from lightning_topt.graph.errors import CaptureError
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.graph.recording import Recording
from tests.models import GPT, batch_for

X = torch.linspace(-1, 1, 32).reshape(4, 8)
LAYERS = 5
AUX: list[Tensor] = []
SCALE = 1.0


def bfloat16() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


class Block(nn.Module):
    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.1)
        self.prepare(index)

    def prepare(self, index: int) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.up(x).relu()))


class Net(L.LightningModule):
    def __init__(self, block: Any = Block, layers: int = LAYERS) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(block(index) for index in range(layers))

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.run(self.first(batch))).square().mean()


class Ends(Block):
    """Saves its own result."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class Normalized(Block):
    """Writes to buffers of its own."""

    def prepare(self, index: int) -> None:
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x)).relu_()


class Nested(Block):
    """The number of a layer tells blocks apart, what is inside them is alike."""

    def prepare(self, index: int) -> None:
        self.index, self.inner = index, Block()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.inner(x)) + self.index


class Frozen(Block):
    """Only its norms are trained."""

    def prepare(self, index: int) -> None:
        self.up.requires_grad_(False)


class Doubled(torch.autograd.Function):
    """Holds its result until backward without saving it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.held = (x * 2).detach()
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        ctx.held = None
        return gradient * 2


class Holds(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Doubled.apply(x))


class Masked(Block):
    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0
    ) -> tuple[Tensor, None]:
        return super().forward(x) * mask * scale, None


class Arguments(Net):
    def run(self, x: Tensor) -> Tensor:
        mask = (x.detach() > 0).float()
        for block in self.blocks:
            x, _ = block(x, mask=mask, scale=0.5)
        return x


class EncoderDecoder(Net):
    """Every layer of the decoder reads the encoder's result, whose gradient is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3, enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 3
        )

    def run(self, x: Tensor) -> Tensor:
        return self.decoder(x[None], self.encoder(x[None]))[0]


LEFT_OUT = {
    "gpt": lambda: GPT(LAYERS),
    "gpt-tied": lambda: GPT(LAYERS, tied=True, dropout=0.1),
    "block": Net,
    "saved-result": lambda: Net(Ends),
    "running-statistics": lambda: Net(Normalized),
    "nested": lambda: Net(Nested),
    "frozen": lambda: Net(Frozen),
    "arguments": lambda: Arguments(Masked),
    "holds": lambda: Net(Holds),
}

# ---- what only looks alike -----------------------------------------------------------------------


class Appends(Block):
    """Its third call would have appended as well."""

    def prepare(self, index: int) -> None:
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.seen.append(y.mean())
        return y


class AppendsToGlobal(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        AUX.append(y.square().mean())
        return y


class Collects(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        AUX.clear()
        loss = super().training_step(batch, batch_idx)
        seen = [tensor for block in self.blocks for tensor in getattr(block, "seen", [])]
        return loss + sum(AUX) + sum(seen)


class ReadsGlobal(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2 if SCALE > 1 else super().forward(x)


class WritesGlobal(Net):
    def run(self, x: Tensor) -> Tensor:
        global SCALE
        for index, block in enumerate(self.blocks):
            SCALE = 2.0 if index == LAYERS - 1 else 1.0
            x = block(x)
        return x


class OddOne(Block):
    """One attribute of the last block is another."""

    def prepare(self, index: int) -> None:
        self.power = 3 if index == LAYERS - 1 else 2

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) ** self.power


class SharedPart(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.down = self.blocks[0].down


class TiedWeight(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[4].up.weight = self.blocks[3].up.weight


class Twice(Net):
    def run(self, x: Tensor) -> Tensor:
        return super().run(super().run(x))


class Regularized(Net):
    """Parameters are read outside of the blocks too."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + sum(
            p.square().sum() for p in self.parameters()
        )


class Skips(Net):
    """Every block's input is read once more."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + x.sin()
        return x


class Hidden(Net):
    """All results are kept by Python and read in the end."""

    def run(self, x: Tensor) -> Tensor:
        seen = [x]
        for block in self.blocks:
            seen.append(block(seen[-1]))
        return torch.stack(seen).mean(0)


class Penalty(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.run(x).sum(), x, create_graph=True)
        return gradient.square().sum() + super().training_step(batch, batch_idx)


class Checkpointed(Net):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].register_forward_hook(lambda module, args, out: out * 2)


class Differently(Net):
    """One block runs under autocast."""

    def run(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            with torch.autocast("cpu", torch.bfloat16, enabled=index == 3):
                x = block(x)
        return x


class Remembers(Block):
    """An older call has left a tensor of the same shape where this one leaves its own."""

    def prepare(self, index: int) -> None:
        self.aux = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.aux = y.square().mean()
        return y


KEEP = partial(collections.deque[Tensor](maxlen=1).append)  # what is in it is not looked at


class Keeps(Block):
    """Python holds what it made until the next block runs, where nobody sees it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            KEEP(x * 3)
        return super().forward(x)


class Remembered(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + sum(block.aux for block in self.blocks)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class SameInput(Net):
    """All blocks read one tensor."""

    def run(self, x: Tensor) -> Tensor:
        return sum(block(x) for block in self.blocks)


class Scaled(Block):
    def prepare(self, index: int) -> None:
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale if self.scale > 1 else super().forward(x)


class ScalesLast(Net):
    """The step changes a block before it calls it."""

    def run(self, x: Tensor) -> Tensor:
        self.blocks[3].scale = 2.0
        self.blocks[4].up.requires_grad_(False)
        return super().run(x)


class Counts(Block):
    def prepare(self, index: int) -> None:
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class ReadsCounts(Net):
    def run(self, x: Tensor) -> Tensor:
        x = super().run(x)
        return x.exp() if all(block.calls for block in self.blocks) else x


class Unused(Net):
    """The results of two blocks are dropped."""

    def run(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = x if index > 2 and block(x) is None else block(x) if index < 3 else x
        return x


RUN = {
    "appends": lambda: Collects(Appends),
    "appends-to-global": lambda: Collects(AppendsToGlobal),
    "global": lambda: WritesGlobal(ReadsGlobal),
    "odd-one": lambda: Net(OddOne),
    "shared-part": SharedPart,
    "tied-weight": TiedWeight,
    "twice": Twice,
    "regularized": Regularized,
    "skips": Skips,
    "hidden": Hidden,
    "penalty": Penalty,
    "checkpointed": Checkpointed,
    "hooked": Hooked,
    "differently": Differently,
    "remembers": lambda: Remembered(Remembers),
    "keeps": lambda: Net(Keeps),
    "in-place": lambda: Net(InPlace),
    "same-input": SameInput,
    "scales-last": lambda: ScalesLast(Scaled),
    "counts": lambda: ReadsCounts(Counts),
    "unused": Unused,
    "encoder-decoder": EncoderDecoder,
}


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The paths of modules whose calls were copied."""
    found: list[str] = []
    expand = capturing.expand

    def counting(recording: Recording) -> Recording:
        whole = expand(recording)
        found.extend(whole.repetitions)
        return whole

    monkeypatch.setattr(capturing, "expand", counting)
    yield found


def slow(module: Any, batch: Any, **kwargs: Any) -> OpGraph:
    """The graph of a capture in which every call runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing, "find_equal", lambda module: {})
        return capture(module, batch, **kwargs)


def batch_of(module: Any) -> Any:
    return batch_for(module) if isinstance(module, GPT) else X


@pytest.mark.parametrize("name", LEFT_OUT)
def test_copied_calls_are_those_that_run(name: str, copied: list[str]) -> None:
    for kwargs in ({}, {"batch_scaling": False, "forward_context": bfloat16}):
        module, before = LEFT_OUT[name](), len(copied)
        expected = slow(module, batch_of(module), **kwargs)
        assert len(copied) == before
        assert capture(module, batch_of(module), **kwargs) == expected
        assert len(copied) > before and {"blocks.3", "blocks.4"} & {
            ".".join(c.split(".")[:2]) for c in copied[before:]
        }


@pytest.mark.parametrize("name", RUN)
def test_what_is_not_alike_is_run(name: str, copied: list[str]) -> None:
    module = RUN[name]()
    assert capture(module, X, batch_scaling=False) == slow(module, X, batch_scaling=False)


def test_what_is_not_alike_is_run_at_both_sizes() -> None:
    module = RUN["skips"]()
    assert capture(module, X) == slow(module, X)


def test_all_but_two_calls_of_a_deep_model_are_left_out(copied: list[str]) -> None:
    module = GPT(24)
    graph = capture(module, batch_for(module), batch_scaling=False)
    assert copied == [f"blocks.{index}" for index in range(2, 24)]
    assert all(block.recomputable for block in graph.blocks if block.name.startswith("blocks."))


def test_an_error_that_leaving_out_may_have_caused_is_tried_again() -> None:
    class Looks(Net):
        def run(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                assert x.grad_fn is not None and "Skipped" not in type(x.grad_fn).__name__
            return x

    assert capture(Looks(), X) == slow(Looks(), X)


def test_a_failing_step_raises_its_own_error() -> None:
    class Fails(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            super().training_step(batch, batch_idx)
            raise KeyError("the user's")

    with pytest.raises(CaptureError, match="the user's"):
        capture(Fails(), X)
