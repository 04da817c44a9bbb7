"""Gradients by datagrams that may be lost: what arrives, and what is held back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication import BoundedLoss, Dense, GradientMethod
from lightning_topt.communication.methods import bounded_loss
from lightning_topt.communication.topology import Topology
from tests.communication.buckets import (
    SHAPES,
    TWO_BUCKETS,
    exchange_step,
    gradients_of,
    make_exchange,
)
from tests.communication.exchange_ranks import assert_equal_on_all_ranks, train, wrap
from tests.communication.lossy_transport import LossyTransport
from tests.launch import run_on_pool, run_ranks

STEPS, EXEMPT = 6, ("bias", "embedding")
LOSS = 0.4


def lossy(method: GradientMethod, rank: int, world_size: int, *, nodes: int = 1) -> Any:
    """An exchange of `method` over `LossyTransport`."""

    def connect(
        store: Any, *, rank: int, world_size: int, timeout_seconds: float, bits: int
    ) -> LossyTransport:
        return LossyTransport(group)

    group = None
    if nodes > 1:
        local = world_size // nodes
        groups = [dist.new_group([*range(place, world_size, local)]) for place in range(local)]
        group = groups[rank % local]
    bounded_loss.connect_over_store = connect
    return make_exchange(method, rank, world_size, nodes=nodes)


def all_lost(exchange: Any, steps: range, rank: int, **options: Any) -> list[dict[str, Tensor]]:
    return [
        exchange_step(
            exchange,
            gradients_of(rank, step),
            step=step,
            exempt=EXEMPT,
            buckets=TWO_BUCKETS,
            **options,
        )
        for step in steps
    ]


def kept(
    rank: int, world_size: int, nodes: int, options: dict[str, Any]
) -> tuple[list[Any], float, float]:
    """Means of all steps; how far what came and is held back is off; what is held back."""
    exchange = lossy(BoundedLoss(tolerance=LOSS, **options), rank, world_size, nodes=nodes)
    means = all_lost(exchange, range(STEPS), rank)
    held, norm = exchange.state_dict()["residual"], exchange.residual_norm()
    worst = 0.0
    for name in SHAPES:
        given = sum(gradients_of(rank, step)[name] for step in range(STEPS)).view(-1) / world_size
        pending = held[name].view(-1) / (world_size if nodes == 1 else nodes * world_size // nodes)
        pair = torch.stack([given, pending])
        dist.all_reduce(pair)
        received = sum(step[name] for step in means).view(-1)
        worst = max(worst, float((received + pair[1] - pair[0]).abs().max()))
        assert name not in EXEMPT or not held[name].any()
    return means, worst, norm


@pytest.mark.parametrize(
    ("world_size", "nodes", "options"), [(3, 1, {}), (4, 2, {})], ids=["flat", "by nodes"]
)
def test_what_came_and_what_is_held_back_is_all_there_was(world_size, nodes, options) -> None:
    results = run_on_pool(kept, world_size, world_size, nodes, options)
    for means, worst, norm in results:
        assert worst < 3e-5 and norm > 1
        for ours, first in zip(means, results[0][0], strict=True):
            assert all(torch.equal(ours[name], first[name]) for name in SHAPES)


def parts(rank: int, options: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The second step (the first is dense), and what this rank's part of it was counted as."""
    exchange = lossy(BoundedLoss(tolerance=LOSS, error_feedback=False, **options), rank, 2)
    mean = all_lost(exchange, range(2), rank)[1]
    assert not exchange.state_dict() and exchange.residual_norm() == 0
    return mean, gradients_of(rank, 1)


def test_without_feedback_a_lost_gradient_counts_as_zero() -> None:
    (mean, first), (_, second) = run_on_pool(parts, 2, {})
    complete = lost_one = 0
    for name in SHAPES:
        both, singles = (first[name] + second[name]) / 2, (first[name] / 2, second[name] / 2)
        close = [torch.isclose(mean[name], each, atol=1e-6) for each in (both, *singles)]
        assert (torch.stack(close).any(0) | (mean[name] == 0)).all()
        assert name not in EXEMPT or close[0].all()
        complete += int(close[0].sum())
        lost_one += int(torch.stack(close[1:]).any(0).sum())
    assert complete > 100 and lost_one > 100


def states(rank: int, world_size: int, nodes: int) -> tuple[bool, float]:
    """A state from before the last step is settled goes on alike; a lost step is held back."""
    exchange = lossy(BoundedLoss(tolerance=LOSS), rank, world_size, nodes=nodes)
    all_lost(exchange, range(3), rank)
    state = {
        kind: {n: t.clone() for n, t in of.items()} for kind, of in exchange.state_dict().items()
    }
    other = lossy(BoundedLoss(tolerance=LOSS), rank, world_size, nodes=nodes)
    other.load_state_dict(state)
    other.transport.starts = exchange.transport.starts
    names = {name for step in (3, 4) for name in all_lost_alike(exchange, other, step, rank)}
    before = exchange.state_dict()["residual"]
    all_lost(exchange, range(5, 6), rank)
    exchange.put_back()
    after, worst = exchange.state_dict()["residual"], 0.0
    for name in SHAPES:
        change = after[name].view(-1) - before[name].view(-1) - gradients_of(rank, 5)[name].view(-1)
        dist.all_reduce(change)
        worst = max(worst, float(change.abs().max()) * (name not in EXEMPT))
    return names == set(SHAPES), worst


def all_lost_alike(exchange: Any, other: Any, step: int, rank: int) -> list[str]:
    first, second = (
        all_lost(exchange, range(step, step + 1), rank)[0],
        all_lost(other, range(step, step + 1), rank)[0],
    )
    return [name for name in first if torch.equal(first[name], second[name])]


@pytest.mark.parametrize(("world_size", "nodes"), [(2, 1), (4, 2)], ids=["flat", "by nodes"])
def test_state_continues_alike_and_skipped_steps_are_held_back(world_size: int, nodes: int) -> None:
    for equal, worst in run_on_pool(states, world_size, world_size, nodes):
        assert equal and worst < 1e-4


BIG = {"first": (300, 400), "bias": (700,), "second": (200_000,)}


def over_datagrams(rank: int, tolerance: float) -> tuple[float, list[float], bool]:
    """All that came and is held back against all there was, and the largest share of a parameter
    that was lost in a step.
    """
    exchange = make_exchange(BoundedLoss(tolerance=tolerance), rank, 3)
    given = {name: torch.zeros(shape) for name, shape in BIG.items()}
    came, shares, equal = {name: torch.zeros(shape) for name, shape in BIG.items()}, [], True
    for step in range(6):
        generator = torch.Generator().manual_seed(10 * step + rank)
        gradients = {name: torch.randn(shape, generator=generator) for name, shape in BIG.items()}
        for name, mean in exchange_step(
            exchange, gradients, step=step, buckets=[list(BIG)], exempt=("bias",)
        ).items():
            came[name] += mean
            given[name] += gradients[name] / 3
            first = mean.clone()
            dist.broadcast(first, 0)
            equal = equal and torch.equal(first, mean)
        held = exchange.state_dict().get("residual", {})
        shares += [float((held[name] != 0).float().mean()) for name in held]
        assert not held or not held["bias"].any()
    worst = 0.0
    for name in BIG:
        total = given[name].view(-1) - held[name].view(-1) / 3
        dist.all_reduce(total)
        worst = max(worst, float((total - came[name].view(-1)).abs().max()))
    exchange.close()
    return worst, shares, equal


def test_what_real_datagrams_lose_is_held_back_and_bounded_for_each_parameter() -> None:
    for worst, shares, equal in run_ranks(over_datagrams, 3, 0.2):
        assert worst < 1e-4 and equal and max(shares) <= 0.2


def trained(
    rank: int, method: GradientMethod, shape: tuple[int, int]
) -> tuple[list[Any], dict[str, float], float]:
    """Gradients of some steps over real datagrams, and what the exchange says of itself."""
    ddp, exchange = wrap(method, topology=Topology(*shape, rank))
    gradients = list(train(ddp, rank=rank, steps=range(5)))
    assert_equal_on_all_ranks(ddp)
    statistics = exchange.statistics()
    exchange.close()
    return gradients, dict(statistics.details), statistics.bytes_sent / statistics.dense_bytes


@pytest.mark.parametrize("shape", [(3, 1), (2, 2)], ids=["flat", "by nodes"])
def test_with_loss_0_it_is_the_mean_to_the_order_of_additions(shape: tuple[int, int]) -> None:
    ranks = shape[0] * shape[1]
    exact = run_ranks(trained, ranks, Dense(hierarchical=False), shape)[0][0]
    for ours, details, share in run_ranks(trained, ranks, BoundedLoss(tolerance=0.0), shape):
        for step, expected in zip(ours, exact, strict=True):
            for name, gradient in step.items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)
        assert (
            details["lost_share"] == 0
            and details["rejected_datagrams"] == 0
            and details["bytes_per_second"] > 0
        )
        assert 0.8 < share < 2  # small buckets: headers and control messages count


def test_16_bits_send_half_and_differ_by_rounding() -> None:
    exact = run_ranks(trained, 2, Dense(), (2, 1))[0][0]
    for ours, _, share in run_ranks(trained, 2, BoundedLoss(tolerance=0.0, bits=16), (2, 1)):
        for step, expected in zip(ours[1:], exact[1:], strict=True):  # the first is dense
            for name, gradient in step.items():
                torch.testing.assert_close(gradient, expected[name], rtol=2e-2, atol=2e-2)
                assert torch.equal(gradient, gradient.bfloat16().float())
        assert share < 1
