"""What a fit leaves behind: a plain module, and optimizers with their state, or where it is."""

from __future__ import annotations

import contextlib
import gc
import os
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from tests.plugins.trainer_ranks import (
    RecordingGPT,
    loader,
    make_trainer,
    on_ranks,
    once_on_ranks,
    topt_trainer,
)

PLANS = ["zero1", "zero3+recompute", "tensor", "pipeline"]


def left_on(module: nn.Module) -> dict[str, Any]:
    """What modules and parameters have beside their values."""
    found: dict[str, Any] = {}
    for name, submodule in module.named_modules():
        hooks = {
            key: len(value) for key, value in vars(submodule).items() if "_hooks" in key and value
        }
        found[name] = (type(submodule), sorted(vars(submodule)), hooks)
    for name, parameter in module.named_parameters():
        hooks = [
            parameter._backward_hooks or {},
            getattr(parameter, "_post_accumulate_grad_hooks", None) or {},
        ]
        found[f"parameter {name}"] = (
            type(parameter),
            sorted(vars(parameter)),
            [len(each) for each in hooks],
        )
    return found


def fit(rank: int, plan: str, kind: type[RecordingGPT]) -> tuple[dict[str, Any], Any]:
    torch.manual_seed(0)
    module = kind()
    trainer = (
        make_trainer("ddp", devices=2, max_steps=3)
        if plan == "ddp"
        else topt_trainer(plan, max_steps=3)
    )
    trainer.fit(module, loader(4))
    (optimizer,) = trainer.optimizers
    try:
        state = optimizer.state_dict()["state"]
        told: Any = {
            index: (sorted(values), tuple(values["exp_avg"].shape))
            for index, values in state.items()
        }
    except RuntimeError as error:
        told = str(error)
    return {name: value for name, value in left_on(module).items() if name}, told


@pytest.mark.parametrize("plan", PLANS)
def test_modules_are_left_as_under_ddp_and_optimizers_say_where_their_state_is(plan: str) -> None:
    (expected, _), _ = once_on_ranks(fit, "ddp", RecordingGPT)
    for found, told in on_ranks(fit, plan, RecordingGPT):
        assert found == expected
        assert "trainer.save_checkpoint" in told


def open_after_each_fit(rank: int, plan: str) -> list[Counter[str]]:
    """How many descriptors of each kind this process has after each of two fits."""
    found = []
    for _ in range(2):
        fit(rank, plan, RecordingGPT)
        gc.collect()
        kinds = Counter[str]()
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # of the listing itself
                kinds[os.readlink(f"/proc/self/fd/{number}").partition(":")[0]] += 1
        found.append(kinds)
    return found


@pytest.mark.parametrize("plan", ["zero3", "pipeline"])
def test_fits_leave_no_descriptors_open(plan: str) -> None:
    for first, last in on_ranks(open_after_each_fit, plan):
        assert not last - first, "the last fit left more than the first"
