"""Calls that are skipped in a recording and put back, against recordings of every call."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_topt.graph.capture import StepRun, _graph, capture, repeated_layers
from lightning_topt.graph.errors import CaptureError
from lightning_topt.graph.op_graph import OpGraph
from tests.models import GPT, batch_for

X = torch.linspace(-1, 1, 32).reshape(4, 8)
LAYERS = 8
AUX: list[Tensor] = []


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
        mask = (x.detach() > 0).to(x.dtype)
        for block in self.blocks:
            x, _ = block(x, mask=mask, scale=0.5)
        return x


class EncoderDecoder(Net):
    """Every layer of the decoder reads the encoder's result, whose gradient is a sum."""

    def __init__(self) -> None:
        super().__init__(layers=0)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
            LAYERS,
            enable_nested_tensor=False,
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), LAYERS
        )

    def run(self, x: Tensor) -> Tensor:
        return self.decoder(x[None], self.encoder(x[None]))[0]


LEFT_OUT = {
    "gpt-tied": lambda: GPT(LAYERS, tied=True, dropout=0.1),
    "block": Net,
    "saved-result": lambda: Net(Ends),
    "running-statistics": lambda: Net(Normalized),
    "frozen": lambda: Net(Frozen),
    "arguments": lambda: Arguments(Masked),
    "holds": lambda: Net(Holds),
}

# ---- what only looks alike -----------------------------------------------------------------------


class AppendsToGlobal(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        AUX.append(y.square().mean())
        return y


class Collects(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        AUX.clear()
        loss = super().training_step(batch, batch_idx)
        return loss + sum(AUX)


class OddOne(Block):
    """One attribute of the last block is another."""

    def prepare(self, index: int) -> None:
        self.power = 3 if index == LAYERS - 1 else 2

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) ** self.power


class TiedWeight(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[4].up.weight = self.blocks[3].up.weight


class Twice(Net):
    def run(self, x: Tensor) -> Tensor:
        return super().run(super().run(x))


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


RUN = {
    "appends-to-global": lambda: Collects(AppendsToGlobal),
    "odd-one": lambda: Net(OddOne),
    "tied-weight": TiedWeight,
    "twice": Twice,
    "hidden": Hidden,
    "penalty": Penalty,
    "checkpointed": Checkpointed,
    "hooked": Hooked,
    "differently": Differently,
    "counts": lambda: ReadsCounts(Counts),
    "encoder-decoder": EncoderDecoder,
}


# runs of equal layers that do odd things, each the same
ODD_BUT_ALIKE = {"odd-one", "checkpointed", "counts"}


def full(module: Any, batch: Any, **kwargs: Any) -> OpGraph:
    """The graph of a capture in which every layer runs."""
    return capture(module, batch, stacks=(), **kwargs)


def batch_of(module: Any) -> Any:
    return batch_for(module) if isinstance(module, GPT) else X


def left_out(
    module: Any, *, batch_scaling: bool = True, forward_context: Any = nullcontext
) -> OpGraph | None:
    """The graph of a capture in which layers were left out; None if that says too little."""
    stacks = repeated_layers(module, batch_of(module))
    step = StepRun(module, forward_context, stacks=stacks)
    made = partial(_graph, step, batch=batch_of(module), batch_scaling=batch_scaling)
    try:
        return made() if stacks else None
    except Exception:
        return None


@pytest.mark.parametrize("name", LEFT_OUT)
def test_layers_that_are_left_out_are_those_that_run(name: str) -> None:
    half = {"batch_scaling": False, "forward_context": bfloat16}
    for kwargs in ({}, half) if name in ("gpt-tied", "block") else (half,):
        module = LEFT_OUT[name]()
        short = left_out(module, **kwargs)
        assert short is not None
        assert short == full(module, batch_of(module), **kwargs)


@pytest.mark.parametrize("name", RUN)
def test_what_is_not_alike_is_run(name: str) -> None:
    module = RUN[name]()
    short = left_out(module, batch_scaling=False)
    assert (short is None) == (name not in ODD_BUT_ALIKE)
    if short is not None:
        assert short == full(module, X, batch_scaling=False)


def test_a_failing_step_raises_its_own_error() -> None:
    class Fails(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            super().training_step(batch, batch_idx)
            raise KeyError("the user's")

    with pytest.raises(CaptureError, match="the user's"):
        capture(Fails(), X)
