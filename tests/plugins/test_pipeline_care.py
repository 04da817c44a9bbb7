"""What a pipeline does not run is refused with a reason; an error in one ends every rank."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.nn.utils.parametrizations import spectral_norm

from tests.plugins.test_pipeline_fits import in_order, pipeline
from tests.plugins.trainer_ranks import RecordingGPT, Tokens, loader, make_trainer, on_ranks


class Sums(RecordingGPT):
    """A loss that is a sum over samples; the step wants no index."""

    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        loss = F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")
        self.log("total", loss)
        return loss


class Within(RecordingGPT):
    """A loss that compares the samples of a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = F.normalize(self(batch[0]).mean(1), dim=-1)
        return F.cross_entropy(features @ features.T * 4, torch.arange(len(features)))


class Normed(RecordingGPT):
    """Power iteration goes on in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        spectral_norm(self.blocks[0].up)


class ReadsRank(RecordingGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + self.global_rank)


class OwnBackward(RecordingGPT):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


class Manual(RecordingGPT):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class ReadsValue(RecordingGPT):
    """Looks at what a block returned before the next one."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
            if float(x.detach().abs().max()) > 1e9:
                x = x * 0
        return self.head(self.norm(x))


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "within": (Within, {}, r"microbatch_loss makes.*microbatches=1"),
    "spectral norm": (Normed, {}, "change the buffer 'blocks.0.up.parametrizations.weight.0._u'"),
    "value": (ReadsValue, {}, r"if float\(x.detach"),
    "rank": (ReadsRank, {}, "global_rank"),
    "backward": (OwnBackward, {}, "OwnBackward.backward"),
    "manual": (Manual, {}, "manual optimization"),
}


def refusals(rank: int) -> dict[str, str]:
    found = {}
    for name, (module, options, _) in REFUSED.items():
        try:
            make_trainer(pipeline(2, microbatches=2, **options), devices=2).fit(module(), loader(8))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = "the fit went through"
    return found


def test_what_cannot_be_a_pipeline_is_refused_on_every_rank() -> None:
    for found in on_ranks(refusals):
        for name, (_, _, says) in REFUSED.items():
            assert re.search(says, found[name], re.DOTALL), (name, found[name])


# ---- what is different between ranks, or batches -------------------------------------------------


class NormedWithin(Within, Normed):
    """What one microbatch alone allows."""


class Noisy(Sums):
    """Counts its calls for Lightning's hooks, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def on_before_backward(self, loss: Tensor) -> None:
        self.called.append("before backward" if loss.requires_grad and loss.dim() == 0 else "wrong")

    def on_after_backward(self) -> None:
        self.called.append("after backward")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.called.append("before zero grad")


class OtherOrder:
    """Batches of this rank in an order of its own."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(2):
            places = torch.randint(0, 64, (8,), generator=generator)
            tokens = Tokens().tokens[places]
            yield tokens[:, :-1], tokens[:, 1:]


def alike(rank: int) -> dict[str, Any]:
    def losses(module: RecordingGPT, data: Any, strategy: Any) -> list[float]:
        torch.manual_seed(0)
        trainer = make_trainer(strategy, devices=2)
        trainer.fit(module, data)
        return module.losses

    def seeded(kind: Any) -> Any:
        torch.manual_seed(0)
        return kind()

    hooks, data = seeded(Noisy), loader(8, length=16)
    found = {
        "sums": losses(hooks, data, pipeline(2, microbatches=3, microbatch_loss="sum")),
        "own order": losses(seeded(RecordingGPT), OtherOrder(rank), pipeline(2, microbatches=2)),
        "one microbatch": losses(seeded(NormedWithin), data, pipeline(2, microbatches=1)),
    }
    return {**found, "called": hooks.called}


def alone(kind: Any, data: Any) -> list[float]:
    torch.manual_seed(0)
    module = kind()
    make_trainer().fit(module, data)
    losses: list[float] = module.losses
    return losses


def test_losses_that_are_sums_and_batches_that_differ() -> None:
    expected = {
        "sums": alone(Sums, in_order(8, length=16)),
        "own order": alone(RecordingGPT, OtherOrder(0)),
        "one microbatch": alone(NormedWithin, in_order(8, length=16)),
    }
    for found in on_ranks(alike):
        for name, losses in expected.items():
            assert found[name] == pytest.approx(losses, rel=1e-4), name
        assert found["called"] == ["before zero grad", "before backward", "after backward"] * 2


class Overflows(RecordingGPT):
    """The third sample of the third batch has an infinite loss: one microbatch's alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch[:2], batch_idx) * batch[2].mean()


class WithFactors:
    """Batches with a factor for each sample; one of them is infinite."""

    def __iter__(self) -> Iterator[Any]:
        factors = torch.ones(4, 8)
        factors[2, 2] = float("inf")
        batches = loader(8, length=32)
        return ((*batch, factor) for batch, factor in zip(batches, factors, strict=True))

    def __len__(self) -> int:
        return 4


def overflows(strategy: Any, devices: int) -> tuple[list[float], float]:
    torch.manual_seed(0)
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    module = Overflows()
    make_trainer(strategy, devices=devices, plugins=[plugin]).fit(module, WithFactors())
    return module.losses, plugin.scaler.get_scale()


def overflows_in_one_microbatch(rank: int) -> tuple[list[float], float]:
    return overflows(pipeline(2, microbatches=4), 2)


def test_an_overflow_in_one_microbatch_skips_the_step_on_all_stages() -> None:
    expected, scale = overflows("auto", 1)
    assert scale == 512.0 and expected[2] == float("inf") and len(expected) == 4
    for losses, own_scale in on_ranks(overflows_in_one_microbatch):
        assert own_scale == scale and losses == pytest.approx(expected, rel=1e-3)
