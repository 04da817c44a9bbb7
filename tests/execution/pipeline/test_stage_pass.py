"""Every stage of every cut does as one process: loss, gradients, buffers, random numbers."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch

from tests.execution.pipeline.pipelined_models import MODELS
from tests.execution.pipeline.stages_in_turn import assert_same, run_plain, run_stages
from tests.models import GPT, batch_for


def cuts(blocks: list[str], count: int) -> list[list[list[str]]]:
    """Every cut of `blocks` into `count` stages."""
    bounds = [(0, *inner, len(blocks)) for inner in combinations(range(1, len(blocks)), count - 1)]
    return [[blocks[a:b] for a, b in pairwise(bound)] for bound in bounds]


def microbatches(module: Any, count: int = 3, size: int = 2) -> list[Any]:
    whole = batch_for(module, count * size)
    parts = [part.split(size) for part in whole] if isinstance(whole, tuple) else whole.split(size)
    return list(zip(*parts, strict=True)) if isinstance(whole, tuple) else list(parts)


GPT_BLOCKS = ["tokens", "blocks.0", "blocks.1", "blocks.2", "head"]


@pytest.mark.parametrize("split", [False, True])
def test_gpt_with_dropout_at_every_cut(split):
    """Ranks of their own, and all stages on one rank."""
    module = GPT(layers=3, dropout=0.1)
    batches = microbatches(module)
    plain = run_plain(module, batches)
    flow = None
    for count in (1, 2, 3, 4):
        for number, stages in enumerate(cuts(GPT_BLOCKS, count)):
            ranks = [0] * count if number % 2 else None
            done = run_stages(module, batches, stages, split=split, ranks=ranks, flow=flow)
            assert_same(done, plain)
            flow = done.flow


@pytest.mark.parametrize("model", MODELS)
def test_models_at_every_cut(model):
    torch.manual_seed(0)
    module = model()
    batches = [module.batch(2) for _ in range(2)]
    plain = run_plain(module, batches)
    flow = None
    for count in (2, 3, 4):
        for number, stages in enumerate(cuts(list(module.blocks), count)):
            done = run_stages(module, batches, stages, split=bool(number % 2), flow=flow)
            assert_same(done, plain)
            flow = done.flow
