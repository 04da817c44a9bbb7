"""Every stage of every cut does what one process does: loss, gradients, buffers and random numbers."""

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
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_gpt_with_dropout_at_every_cut(count, split):
    module = GPT(layers=3, dropout=0.1)
    batches = microbatches(module)
    plain = run_plain(module, batches)
    for stages in cuts(GPT_BLOCKS, count):
        assert_same(run_stages(module, batches, stages, split=split), plain)
        assert_same(run_stages(module, batches, stages, split=split, ranks=[0] * count), plain)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_models_at_every_cut(model, count):
    torch.manual_seed(0)
    module = model()
    batches = [module.batch(2) for _ in range(2)]
    plain = run_plain(module, batches)
    for number, stages in enumerate(cuts(list(module.blocks), count)):
        assert_same(run_stages(module, batches, stages, split=bool(number % 2)), plain)
        assert_same(run_stages(module, batches, stages, split=not number % 2), plain)
