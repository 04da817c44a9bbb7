"""Sharded plans in 16 bits: what their gathers move, and losses beside ddp's and Lightning's."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_topt import AutoParallelStrategy
from lightning_topt.communication.collectives import AllGather, ReduceScatter
from lightning_topt.costs.optimizer import read_optimizer
from lightning_topt.graph.capture import capture
from lightning_topt.plan.parallel_plan import ParallelPlan
from tests.execution.observed_ranks import Recorder, autocast, priced
from tests.plugins.trainer_ranks import OwnShare, RecordingGPT, make_trainer, on_ranks

LAYERS, STEPS = 3, 4
DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class Sampling(RecordingGPT):
    """Runs itself outside of a step, where Lightning has no autocast on."""

    def __init__(self) -> None:
        super().__init__(layers=LAYERS, width=64)

    @torch.no_grad()
    def on_train_epoch_end(self) -> None:
        assert self(torch.zeros(1, 8, dtype=torch.int64)).isfinite().all()


class Lightnings(Sampling):
    """Sharded by its own code, for Lightning's strategy."""

    def configure_model(self) -> None:
        policy = MixedPrecisionPolicy(DTYPES[str(self.trainer.precision)], torch.float32)
        for module in (*self.blocks, self):
            sharded = fully_shard(module, mesh=self.device_mesh["data_parallel"], mp_policy=policy)
            sharded.set_custom_all_gather(AllGather())  # which are counted
            sharded.set_custom_reduce_scatter(ReduceScatter())


def fits(rank: int, precision: Any) -> dict[str, tuple[list[float], Counter[tuple[str, float]]]]:
    """Losses, and how often FSDP2 exchanged tensors of so many bytes."""
    found = {}
    for plan in ("zero3", "zero3+float32_gathers", None):
        torch.manual_seed(0)
        scaler = torch.amp.GradScaler("cpu") if precision == "16-mixed" else None
        plugins, recorder = MixedPrecision(precision, "cpu", scaler), Recorder()
        module = Sampling() if plan else Lightnings()
        strategy = AutoParallelStrategy(plan=plan) if plan else ModelParallelStrategy(2, 1)
        trainer = make_trainer(strategy, devices=2, plugins=plugins, limit_train_batches=STEPS)
        with recorder.watching("fit"):
            trainer.fit(module, OwnShare(8))
        calls = Counter((op, nbytes) for _, op, _, nbytes in recorder.calls)
        found[str(plan)] = module.losses, calls
    return found


@pytest.mark.parametrize("precision", DTYPES)
def test_blocks_move_8_bytes_of_a_parameter_and_train_as_with_12(precision: str) -> None:
    parameters = sum(p.numel() for p in Sampling().blocks[0].parameters())
    # each block in forward and in backward, and once where the module samples
    times = {"all_gather": (2 * STEPS + 1) * LAYERS, "reduce_scatter": STEPS * LAYERS}
    for found in on_ranks(fits, precision):
        for (_, calls), moved in zip(found.values(), (8, 12, 8), strict=True):
            (gather,), (reduce,) = (
                [nbytes for (op, nbytes), n in calls.items() if (op, n) == (name, count)]
                for name, count in times.items()
            )
            # vectors, 1.7 % of a block this narrow, travel in float32: 8.07 bytes
            assert (2 * gather + reduce) / parameters == pytest.approx(moved, rel=0.01)
        losses, exact, theirs = (of_plan for of_plan, _ in found.values())
        assert losses == exact and len(losses) == STEPS
        # Lightning's also rounds embeddings, norms and what is between layers to 8 bits
        assert losses == pytest.approx(theirs, rel=2e-3)


# ---- which parameters travel in 16 bits ----------------------------------------------------------


# processors without instructions for bfloat16 have no LSTM in it
_HAS_LSTM = torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Recurrent(nn.LSTM if _HAS_LSTM else nn.GRU):
    pass


class Uses(nn.Module):
    """Matrices (width, width) that autocast rounds before they are used, and such that it does not.

    The latter begin with ``wide``.
    """

    def __init__(self, width: int) -> None:
        super().__init__()

        def matrix(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape) / 8)

        self.linear, self.wide_twice = nn.Linear(width, width), matrix(width, width)
        self.wide_penalized, self.wide_apart = nn.Linear(width, width), nn.Linear(width, width)
        self.bias, self.wide_scale, self.wide_table = (
            matrix(width),
            matrix(1, width),
            matrix(8, width),
        )
        self.addmm, self.experts, self.routed = (
            matrix(width, width),
            matrix(2, width, width),
            matrix(2, width, width),
        )
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.wide_recurrent = Recurrent(width, width, batch_first=True)
        self.wide_expanded, self.wide_frozen = matrix(1, width, width), matrix(width, width)
        self.wide_frozen.requires_grad_(False)  # for a while
        self.wide_masked = matrix(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.addmm(self.bias, x.flatten(0, 1), self.addmm).view_as(x)
        x = x + torch.bmm(torch.stack([x.flatten(0, 1)] * 2), self.experts).sum(0).view_as(x)
        x = x + x @ self.routed[0] - (x @ self.routed[1]).relu()
        x = x + self.wide_scale * ((self.linear(x) @ self.wide_twice).relu() @ self.wide_twice)
        x = x + (x @ self.wide_frozen).relu() @ self.wide_frozen
        masked = self.wide_masked.to(torch.bfloat16)
        masked[0] = 0
        x = x + x @ masked + torch.bmm(x, self.wide_expanded.expand(len(x), -1, -1))
        x = x + self.wide_table[torch.arange(x.shape[1])] + self.wide_penalized(x)
        x = x + self.attention(x, x[:, :1], x[:, :1])[0] + self.wide_recurrent(x)[0]
        with torch.autocast("cpu", enabled=False):
            return nn.functional.layer_norm(x.float() + self.wide_apart(x.float()), x.shape[-1:])


class OnlyHere(OwnShare):
    """Cannot be read in a copy of the process."""

    def __init__(self, global_batch: int) -> None:
        super().__init__(global_batch)
        self.process = os.getpid()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        assert os.getpid() == self.process
        return super().__iter__()


class UsesGPT(RecordingGPT):
    """Positions are added, the head is tied, layers are `Uses`."""

    def __init__(self) -> None:
        super().__init__(layers=0, width=64, tied=True)
        del self.positions
        self.wide_positions = nn.Parameter(torch.randn(8, 64) / 8)
        self.middle = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(Uses(64) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.middle(self.tokens(tokens) + self.wide_positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        decay = sum(block.wide_penalized.weight.square().sum() for block in self.blocks)
        return super().training_step(batch, batch_idx) + 1e-2 * decay


def fits_of_uses(rank: int) -> dict[str, tuple[list[float], Any, float]]:
    """Losses, the plan, and bytes that a step gathers."""
    found: dict[str, tuple[list[float], Any, float]] = {}
    given: dict[str, Any] = {}
    for plan in ("ddp", "zero2", "zero3", "file"):
        torch.manual_seed(0)
        module, recorder = UsesGPT(), Recorder()
        strategy = AutoParallelStrategy(plan=given if plan == "file" else plan)
        trainer = make_trainer(
            strategy, devices=2, precision="bf16-mixed", limit_train_batches=STEPS
        )
        with recorder.watching("fit"):
            trainer.fit(module, OnlyHere(8))
        assert strategy.parallel_plan is not None
        values = strategy.parallel_plan.to_dict()
        gathered = sum(nbytes for _, op, _, nbytes in recorder.calls if op == "all_gather")
        found[plan] = module.losses, values, gathered / STEPS
        # a file that somebody has written does not say what is gathered
        given = {name: value for name, value in values.items() if name != "float32_gathers"}
    return found


def test_what_autocast_rounds_travels_in_16_bits_and_losses_are_those_of_ddp() -> None:
    module = UsesGPT()
    matrices = [name for name, p in module.named_parameters() if p.dim() > 1]
    wide = [name for name in matrices if "wide" in name or name == "tokens.weight"]
    context = partial(autocast, torch.bfloat16)
    graph = capture(module, next(iter(OwnShare(4))), forward_context=context)
    optimizers = [module.configure_optimizers()["optimizer"]]
    profile = read_optimizer(optimizers, named_parameters=module.named_parameters())
    for found in on_ranks(fits_of_uses):
        losses, *_ = found.pop("ddp")
        for of_plan, values, nbytes in found.values():
            assert of_plan == losses and [*values["float32_gathers"]] == wide
            calls = priced(ParallelPlan.from_dict(values), graph, profile)
            predicted = sum(size for (_, op, _), (_, size) in calls.items() if op == "all_gather")
            assert nbytes == pytest.approx(predicted, rel=0.01)
