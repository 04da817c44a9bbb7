"""Sharded plans in 16 bits: what their gathers move, and losses beside Lightning's FSDP2."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_topt import AutoParallelStrategy
from lightning_topt.communication.collectives import AllGather, ReduceScatter
from tests.execution.observed_ranks import Recorder
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
