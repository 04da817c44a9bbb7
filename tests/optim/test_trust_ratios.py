"""Shared norms of LARS: the same parameters as without sharing, bit for bit, on every rank."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_topt.optim.adam_variants import LAMB
from lightning_topt.optim.lars import LARS, share_trust_ratios, unshare_trust_ratios
from lightning_topt.optim.parallel_step import install_parallel_step
from lightning_topt.optim.pieces import Piece, num_rows
from tests.launch import run_on_pool, run_ranks
from tests.optim.test_lars import SHAPES, make_parameters, set_gradients


def make_optimizer(dtype=torch.float32):
    parameters = make_parameters(dtype=dtype)
    options = {"lr": 1.0, "weight_decay": 0.01, "trust_coefficient": 0.01}
    groups = [
        {"params": parameters[:4]},
        {"params": parameters[4:], "adapt": "matrices", "nesterov": True},
    ]
    return parameters, LARS(groups, **options)


def train(rank, steps, share, dtype):
    parameters, optimizer = make_optimizer(dtype)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    shared = share_trust_ratios(optimizer) if share else None
    for step in range(steps):
        set_gradients(parameters, step=step)
        if 5 <= step < 10:  # frozen for a while
            parameters[0].grad = None
        optimizer.step()
        scheduler.step()
    own = None if shared is None else shared.own
    return [parameter.detach() for parameter in parameters], optimizer.state_dict(), own


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [
        (2, torch.float32),
        (3, torch.float32),
        (4, torch.float32),
        (2, torch.bfloat16),
        (2, torch.float64),
    ],
)
def test_bitwise_equal_to_the_unshared_step(ranks, dtype):
    expected, state, _ = train(0, 30, False, dtype)
    results = run_on_pool(train, ranks, 30, True, dtype)
    for parameters, own_state, _ in results:
        assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))
        assert own_state["param_groups"] == state["param_groups"]
        assert all(
            torch.equal(own_state["state"][index]["momentum_buffer"], values["momentum_buffer"])
            for index, values in state["state"].items()
        )
    # Two norms per adapted parameter, each computed once: the group of "matrices" leaves out one
    # without dims.
    owned = [own for *_, own in results]
    assert sorted(index for own in owned for index in own) == list(range(2 * (len(SHAPES) - 1)))
    # these are small: every call counts alike
    assert max(map(len, owned)) - min(map(len, owned)) <= 1 + ranks // 2


def groups_and_undo(rank):
    """Only ranks 1 and 2 share; afterwards each computes its own again."""
    pair = dist.new_group([1, 2])
    if rank == 0:
        return None
    parameters, optimizer = make_optimizer()
    share_trust_ratios(optimizer, group=pair)
    with pytest.raises(ValueError, match="already"):
        share_trust_ratios(optimizer, group=pair)
    set_gradients(parameters, step=0)
    optimizer.step()
    added = torch.nn.Parameter(torch.ones(4, 4))
    optimizer.add_param_group({"params": [added]})
    parameters.append(added)
    set_gradients(parameters, step=1)
    optimizer.step()
    unshare_trust_ratios(optimizer)
    unshare_trust_ratios(optimizer)
    assert "layer_norms" not in optimizer.__dict__
    if rank == 1:  # without the other rank
        set_gradients(parameters, step=2)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def test_groups_added_parameters_and_undo():
    parameters, optimizer = make_optimizer()
    for step in range(3):
        if step == 1:
            added = torch.nn.Parameter(torch.ones(4, 4))
            optimizer.add_param_group({"params": [added]})
            parameters.append(added)
        set_gradients(parameters, step=step)
        optimizer.step()
    _, first, _ = run_on_pool(groups_and_undo, 3)
    assert all(torch.equal(a, b) for a, b in zip(parameters, first, strict=True))


def disagreeing(rank):
    shapes = SHAPES if rank == 0 else [*SHAPES[:2], (33, 64), *SHAPES[3:]]
    messages = []
    for own in (shapes, SHAPES[: len(SHAPES) - rank]):
        try:
            share_trust_ratios(LARS(make_parameters(own), lr=1.0))
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_ranks_with_other_parameters():
    for shapes, number in run_on_pool(disagreeing, 2):
        assert (
            "parameter 2 of the optimizer is torch.float32 (33, 64)" in shapes
            and "on rank 1 and" in shapes
        )
        assert "parameter 6 of the optimizer is missing" in number


def missing_gradient(rank, everything):
    parameters, optimizer = make_optimizer()
    share_trust_ratios(optimizer)
    for step in range(2):
        set_gradients(parameters, step=step)
        if step == 1 and rank == 1:
            for parameter in parameters if everything else parameters[2:3]:
                parameter.grad = None
        try:
            optimizer.step()
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(("everything", "index"), [(False, 2), (True, 0)])
def test_ranks_with_other_gradients(everything, index):
    for message in run_on_pool(missing_gradient, 3, everything):
        assert f"parameter {index} " in message and "on 2 of 3 ranks" in message


def split_twice(rank):
    parameters, optimizer = make_optimizer()
    share_trust_ratios(optimizer)
    set_gradients(parameters, step=0)
    install_parallel_step(
        optimizer, pieces=[Piece(i, 0, num_rows(p), i % 2) for i, p in enumerate(parameters)]
    )
    with pytest.raises(ValueError, match="computes each norm once already"):
        optimizer.step()


def test_not_with_a_step_that_is_split_by_parameters():
    run_on_pool(split_twice, 2)


def alone(rank, dies):
    parameters, optimizer = make_optimizer()
    share_trust_ratios(
        optimizer, group=dist.new_group([0, 1], timeout=timedelta(seconds=60 if dies else 1))
    )
    start = 0.0
    for step in range(2):
        set_gradients(parameters, step=step)
        if step == 1 and rank == 1:
            if dies:
                # closes its connections, as the end of its process does
                dist.destroy_process_group()
            time.sleep(2)
            return None
        start = time.monotonic()
        try:
            optimizer.step()
        except RuntimeError:
            return time.monotonic() - start
    return None


@pytest.mark.parametrize("dies", [False, True])
def test_a_rank_that_does_not_answer_is_an_error(dies):
    seconds, _ = run_ranks(alone, 2, dies, timeout_seconds=60)
    assert seconds is not None and seconds < 30


def test_only_lars():
    with pytest.raises(ValueError, match="update itself"):
        share_trust_ratios(LAMB(make_parameters()))
    with pytest.raises(ValueError, match="AdamW"):
        share_trust_ratios(torch.optim.AdamW(make_parameters()))
