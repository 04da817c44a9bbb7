"""Every row of every kind gives the results and gradients of the function on whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_topt.graph.op_config import Replicate, Shard
from lightning_topt.techniques.tensor_parallel.op_rules import KINDS
from tests.techniques.tensor_parallel.samples import SAMPLES, r
from tests.techniques.tensor_parallel.simulated import Sample, assert_row, copies

WITH_COLLECTIVES = {"cross entropy"}  # on real ranks


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_every_row(sample: Sample) -> None:
    rows = [(ranks, *found) for ranks in (2, 4) for found in sample.rows(ranks)]
    assert rows, "no row, so nothing to compare"
    for ranks, call, row in rows:
        if KINDS[sample.func].name == "norm" and row.inputs[0] == Shard(2):
            continue  # sums over ranks: `test_norms_of_split_features`
        assert any(placement != Replicate() for placement in row.inputs)
        assert_row(sample, call, row, ranks)


ELEMENTWISE = [func for func in KINDS[torch.add].functions if func is not torch.empty_like]


def sample_of(func: Any) -> Sample | None:
    """A call of an elementwise function with as many tensors as it takes."""
    for tensors in ([r(4, 8)], [r(4, 8), r(8)], [r(4, 8), r(4, 1), r(8)]):
        for kind in (torch.float64, torch.int64, torch.bool):
            for extra in ((), (2,), (2, 3)):
                given = [
                    (tensor * 10).to(kind) if kind is not torch.float64 else tensor
                    for tensor in tensors
                ]
                sample = Sample(func, *given, *extra, fixed=(0, 1, 2))
                try:
                    if isinstance(sample.run(copies(sample, given)), torch.Tensor):
                        return sample
                except (TypeError, RuntimeError, ValueError, AssertionError):
                    continue
    return None


def test_every_elementwise_function() -> None:
    left = set()
    for func in ELEMENTWISE:
        sample = sample_of(func)
        if sample is None:
            left.add(func.__name__)
            continue
        for call, row in sample.rows(2):
            assert_row(sample, call, row, 2)
    assert left <= {"cuda", "type"}  # where there is none; a type is given by name


def test_every_kind_has_a_sample() -> None:
    tried = {KINDS[sample.func].name for sample in SAMPLES}
    assert {kind.name for kind in KINDS.values()} - tried == WITH_COLLECTIVES
