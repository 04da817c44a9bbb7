"""Gradients of the step before are given back before the passes of a pipeline where Lightning would
clear them anyway.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from lightning_topt.execution.engine import Engine
from tests.plugins.test_pipeline_care import alone
from tests.plugins.test_pipeline_fits import in_order, pipeline
from tests.plugins.trainer_ranks import RecordingGPT, make_trainer, on_ranks


class Zeroed(RecordingGPT):
    """Wants gradients of zeros instead of none."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


Found = tuple[list[float], list[bool]]


def fit(kind: Any, **options: Any) -> Found:
    """The losses of a fit in two stages, and whether gradients of the step before were there when
    the passes of each step but the first began.
    """
    module, former, kept = kind(), list[Any](), list[bool]()
    strategy = pipeline(2)
    run_step, backward = Engine.run_step, strategy.backward

    def watched_step(engine: Engine, *args: Any, **given: Any) -> Any:
        if former:
            kept.append(not all(each.expired() for each in former))
        return run_step(engine, *args, **given)

    def watched_backward(*args: Any, **given: Any) -> Any:
        result = backward(*args, **given)
        gradients = (parameter.grad for parameter in module.parameters())
        former[:] = [
            StorageWeakRef(each.untyped_storage()) for each in gradients if each is not None
        ]  # type: ignore[no-untyped-call]
        return result

    strategy.backward = watched_backward  # type: ignore[method-assign]
    Engine.run_step = watched_step  # type: ignore[method-assign, assignment]
    try:
        make_trainer(strategy, devices=2, **options).fit(module, in_order(8))
    finally:
        Engine.run_step = run_step  # type: ignore[method-assign]
    return module.losses, kept


def fits(rank: int) -> dict[str, Found]:
    found = {}
    for name, kind, options in (
        ("plain", RecordingGPT, {}),
        ("accumulated", RecordingGPT, {"accumulate_grad_batches": 2}),
        ("zeroed", Zeroed, {}),
    ):
        torch.manual_seed(0)
        found[name] = fit(kind, **options)
    return found


def test_former_gradients_are_kept_only_where_they_are_needed() -> None:
    expected = {
        "plain": [False] * 7,
        "accumulated": [True, False, True, False, True, False, True],
        "zeroed": [True] * 7,
    }
    losses = {"plain": alone(RecordingGPT, in_order(8)), "zeroed": alone(Zeroed, in_order(8))}
    for found in on_ranks(fits):
        assert {name: kept for name, (_, kept) in found.items()} == expected
        for name, own in losses.items():
            assert found[name][0] == pytest.approx(own, rel=1e-5), name
