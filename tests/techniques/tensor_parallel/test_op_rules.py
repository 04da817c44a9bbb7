"""Every row of every kind gives what the function gives on whole tensors: results and gradients, on
simulated ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_topt.graph.op_config import Placement, Replicate, Shard
from lightning_topt.techniques.tensor_parallel.decisions import (
    Argument,
    CallDecision,
    call_of,
    decide,
)
from lightning_topt.techniques.tensor_parallel.layout import Layout
from lightning_topt.techniques.tensor_parallel.op_rules import KINDS
from tests.techniques.tensor_parallel.samples import SAMPLES, i, r
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


# ---- decisions -----------------------------------------------------------------------------------


def decided(
    func: Any, *given: tuple[torch.Tensor, Placement], parameters: tuple[int, ...] = ()
) -> CallDecision:
    tensors = tuple(tensor for tensor, _ in given)
    known = [
        Argument(
            Layout(tuple(tensor.shape), (placement,)),
            tensor.is_floating_point(),
            place in parameters,
        )
        for place, (tensor, placement) in enumerate(given)
    ]
    return decide(KINDS[func], call_of(func, tensors, {}, known), known, (2,), in_place=False)


def test_parameters_stay_where_they_are() -> None:
    """However large the activations are that move."""
    x, weight, bias = r(64, 512, 8), r(16, 8), r(16)
    for place in (Replicate(), Shard(0), Shard(1), Shard(2)):
        for split in (Shard(0), Shard(1)):
            found = decided(
                F.linear, (x, place), (weight, split), (bias, Replicate()), parameters=(1, 2)
            )
            assert found.inputs[1] == (split,)
    vocabulary = decided(F.embedding, (i(8, 4, 64), Shard(0)), (r(8, 4), Shard(0)), parameters=(1,))
    assert vocabulary.inputs == ((Replicate(),), (Shard(0),))


def test_what_is_split_alike_does_not_move() -> None:
    x = r(4, 8, 6)
    for placement in (Shard(0), Shard(1), Shard(2)):
        found = decided(torch.add, (x, placement), (x, placement))
        assert found.inputs == ((placement,), (placement,)) and found.outputs == ((placement,),)


def test_a_residual_is_sliced_not_the_result_gathered() -> None:
    found = decided(torch.add, (r(4, 8, 6), Replicate()), (r(4, 8, 6), Shard(1)))
    assert found.outputs == ((Shard(1),),)


def test_a_bias_of_a_sum_is_used_alike_by_all() -> None:
    found = decided(
        F.linear, (r(4, 8), Shard(1)), (r(6, 8), Shard(1)), (r(6), Replicate()), parameters=(1, 2)
    )
    assert found.added == 2 and found.enters[2] == (False,)


def test_a_split_bias_of_a_sum_is_gathered() -> None:
    """It was added as a slice."""
    found = decided(
        F.linear, (r(4, 8), Shard(1)), (r(6, 8), Shard(1)), (r(6), Shard(0)), parameters=(1, 2)
    )
    assert found.inputs[2] == (Replicate(),)
