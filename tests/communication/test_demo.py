"""DeMo and its cosine transform against their definitions; what only this method promises."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from lightning_topt.communication import DeMo
from lightning_topt.communication.bucket import ExchangeContext
from lightning_topt.communication.methods.demo import Tiles, tile_length
from lightning_topt.communication.topology import Topology, make_groups
from tests.communication.buckets import (
    SHAPES,
    TWO_BUCKETS,
    exchange_step,
    gradients_of,
    make_exchange,
)
from tests.communication.exchange_ranks import assert_equal_on_all_ranks, loss_of, train, wrap
from tests.launch import run_on_pool

METHOD = DeMo(density=0.1, chunk=8, decay=0.9, bits=16)
STEPS = range(1, 6)


class Twin:
    """All holders in one process, float64: momentum in the basis of the parameters, one tile at a
    time.
    """

    def __init__(self, method, holders):
        self.method = method
        self.momentum = [
            {n: torch.zeros(s).double() for n, s in SHAPES.items()} for _ in range(holders)
        ]

    def step(self, gradients):
        """Sign of the sum, and the sum, by name; gradients by holder and name."""
        sums = {}
        for name in SHAPES:
            sums[name] = 0.0
            for own, of_holder in zip(self.momentum, gradients, strict=True):
                own[name] = self.method.decay * own[name] + of_holder[name].double()
                sent = self._largest(own[name])
                own[name] = own[name] - sent
                sums[name] = sums[name] + sent
        return sums

    def _largest(self, momentum):
        tiles = Tiles.of_shape(momentum.shape, limit=self.method.chunk)
        coefficients = tiles.encode(momentum.reshape(-1).float()).view(-1, tiles.numel)
        k = min(tiles.numel, max(1, round(self.method.density * tiles.numel)))
        kept = torch.zeros_like(coefficients)
        places = coefficients.abs().topk(k, dim=1).indices
        kept.scatter_(1, places, coefficients.gather(1, places).bfloat16().float())
        return tiles.decode(kept.view(-1)).view(momentum.shape).double()


def _check_signs(found, sums):
    """Where a sum is not all but zero, its sign arrived."""
    for name, total in sums.items():
        clear = total.abs() > 5e-3
        assert clear.float().mean() > 0.3
        assert torch.equal(found[name][clear], total.sign()[clear].float())
        assert set(found[name].unique().tolist()) <= {-1.0, 0.0, 1.0}


def _flat(rank):
    exchange = make_exchange(METHOD, rank, 2)
    return [exchange_step(exchange, gradients_of(rank, step), step=step) for step in STEPS]


def test_flat_is_the_definition():
    first, second = run_on_pool(_flat, 2)
    twin = Twin(METHOD, 2)
    for step, ours, theirs in zip(STEPS, first, second, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in SHAPES)
        _check_signs(ours, twin.step([gradients_of(rank, step) for rank in range(2)]))


def _by_nodes(rank):
    topology = Topology(2, 2, rank)
    groups = make_groups(topology, num_stages=1, hierarchical=True, timeout_seconds=30)
    exchange = METHOD.make_exchange(
        ExchangeContext(topology, groups, torch.device("cpu"), timeout_seconds=30)
    )
    results = [exchange_step(exchange, gradients_of(rank, step), step=step) for step in (0, *STEPS)]
    return results, exchange.state_dict(), exchange.bytes_sent


def test_by_nodes_the_momentum_is_the_nodes():
    results = run_on_pool(_by_nodes, 4)
    twin = Twin(METHOD, 2)
    for index, step in enumerate(STEPS, start=1):
        found = [result[0][index] for result in results]
        assert all(torch.equal(found[0][name], other[name]) for other in found for name in SHAPES)
        gradients = [gradients_of(rank, step) for rank in range(4)]
        nodes = [{n: (gradients[i][n] + gradients[i + 1][n]) / 2 for n in SHAPES} for i in (0, 2)]
        _check_signs(found[0], twin.step(nodes))
    for first, second in ((0, 1), (2, 3)):
        for name, own in results[first][1]["momentum_8"].items():
            assert torch.equal(own, results[second][1]["momentum_8"][name])


def _first(rank):
    exchange = make_exchange(METHOD, rank, 2)
    return exchange_step(exchange, gradients_of(rank, 0), step=0), exchange.residual_norm()


def test_the_first_step_is_the_sign_of_the_mean_and_leaves_nothing():
    for found, norm in run_on_pool(_first, 2):
        for name in SHAPES:
            assert torch.equal(
                found[name], (gradients_of(0, 0)[name] + gradients_of(1, 0)[name]).sign()
            )
        assert norm == 0


def _dense_after_sparse(rank):
    """What a dense step after sparse ones sends is all that is left."""
    exchange = make_exchange(METHOD, rank, 2)
    exchange_step(exchange, gradients_of(rank, 1), step=1)
    left = {n: t.clone() for n, t in exchange.state_dict()["momentum_8"].items()}
    zero = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    found = exchange_step(exchange, zero, step=0)
    everyone = {}
    for name, shape in SHAPES.items():
        everyone[name] = Tiles.of_shape(torch.Size(shape), limit=8).decode(left[name]).view(shape)
        dist.all_reduce(everyone[name])
        clear = everyone[name].abs() > 1e-4
        assert torch.equal(found[name][clear], everyone[name].sign()[clear])
    return exchange.residual_norm()


def test_a_dense_step_sends_what_is_left():
    assert run_on_pool(_dense_after_sparse, 2) == [0, 0]


def _thrown_away(rank):
    exchange = make_exchange(DeMo(density=0.1, chunk=8), rank, 2)
    exchange_step(exchange, gradients_of(rank, 1), step=1, buckets=TWO_BUCKETS)
    before = {n: t.clone() for n, t in exchange.state_dict()["momentum_8"].items()}
    exchange_step(exchange, gradients_of(rank, 2), step=2, buckets=TWO_BUCKETS)
    exchange.put_back()
    exchange.put_back()  # twice is once
    for name, after in exchange.state_dict()["momentum_8"].items():
        gradient = gradients_of(rank, 2)[name]
        added = Tiles.of_shape(gradient.shape, limit=8).encode(gradient.view(-1))
        torch.testing.assert_close(after, 0.999 * before[name] + added, rtol=0, atol=1e-5)


def test_what_a_skipped_step_sent_is_in_the_momentum_again():
    run_on_pool(_thrown_away, 2)


def _another_chunk(rank):
    exchange = make_exchange(METHOD, rank, 1)
    exchange_step(exchange, gradients_of(rank, 1), step=1)
    with pytest.raises(ValueError, match=r"chunk=8, this exchange has 4"):
        make_exchange(DeMo(chunk=4), rank, 1).load_state_dict(exchange.state_dict())


def test_coefficients_of_other_tiles_are_refused():
    run_on_pool(_another_chunk, 1)


def _trained(rank, world_size, nodes):
    method = DeMo(density=0.05, decay=0.9)
    ddp, exchange = wrap(method, topology=Topology(nodes, world_size // nodes, rank))
    before = float(loss_of(ddp.module, 0, 0))
    for _ in train(ddp, rank=rank, steps=range(60), lr=3e-3):
        pass
    assert_equal_on_all_ranks(ddp)
    after, statistics = float(loss_of(ddp.module, 0, 0)), exchange.statistics()
    state = exchange.state_dict()
    exchange.close()
    return before, after, statistics.bytes_sent / statistics.dense_bytes, len(state["ranks"])


@pytest.mark.parametrize(("world_size", "nodes", "states"), [(3, 1, 3), (4, 2, 2)])
def test_signs_train(world_size, nodes, states):
    results = run_on_pool(_trained, world_size, world_size, nodes)
    before, after, share, found = results[0]
    assert after < 0.6 * before and share < 0.3 and found == states


def _other_ranks(rank, state):
    ddp, exchange = wrap(METHOD)
    if state is not None:
        exchange.load_state_dict(state)
        return exchange.state_dict()["ranks"]
    for _ in train(ddp, rank=rank, steps=range(4), lr=1e-3):
        pass
    return exchange.state_dict()


def test_momentum_on_another_number_of_ranks_is_the_mean():
    saved = run_on_pool(_other_ranks, 2, None)[0]
    found = run_on_pool(_other_ranks, 3, saved)[0]
    assert len(saved["ranks"]) == 2 and len(found) == 3
    first, second = (rank["momentum_8"] for rank in saved["ranks"])
    assert any(value.abs().max() > 0 for value in first.values())
    for rank in found:
        for name, value in rank["momentum_8"].items():
            torch.testing.assert_close(value, (first[name] + second[name]) / 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.0}, "decay is at least 0 and below 1"),
        ({"bits": 3}, "bits is one of 1, 2, 4, 8, 16"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        DeMo(**options)


# ---- the cosine transform of tiles, against its definition as a sum


def _twin(tile):
    """Coefficients of one tile by the double sum, float64."""
    height, width = tile.shape
    result = torch.zeros(height, width, dtype=torch.float64)
    for f in range(height):
        for g in range(width):
            total = 0.0
            for i in range(height):
                for j in range(width):
                    total += (
                        float(tile[i, j])
                        * math.cos(math.pi * (2 * i + 1) * f / (2 * height))
                        * math.cos(math.pi * (2 * j + 1) * g / (2 * width))
                    )
            result[f, g] = (
                total * math.sqrt((1 + (f > 0)) / height) * math.sqrt((1 + (g > 0)) / width)
            )
    return result


@pytest.mark.parametrize("shape", [(6, 8), (4, 3, 5), (10,), (1, 7)])
def test_coefficients_are_the_sums(shape):
    torch.manual_seed(0)
    tensor = torch.randn(shape)
    tiles = Tiles.of_shape(tensor.shape, limit=4)
    found = tiles.encode(tensor.view(-1)).view(-1, tiles.height, tiles.width)
    matrix = tensor.view(tiles.rows, tiles.columns)
    place = 0
    for top in range(0, tiles.rows, tiles.height):
        for left in range(0, tiles.columns, tiles.width):
            expected = _twin(matrix[top : top + tiles.height, left : left + tiles.width])
            torch.testing.assert_close(found[place].double(), expected, rtol=1e-5, atol=1e-5)
            place += 1
    assert place == len(found)


@pytest.mark.parametrize("shape", [(96, 64), (50, 7), (33,), (128, 3, 3, 3)])
def test_comes_back(shape):
    tensor = torch.randn(2, math.prod(shape))
    tiles = Tiles.of_shape(torch.Size(shape), limit=32)
    coefficients = tiles.encode(tensor)
    torch.testing.assert_close(tiles.decode(coefficients), tensor, rtol=1e-5, atol=1e-5)
    # orthonormal
    torch.testing.assert_close(coefficients.norm(), tensor.norm(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("length", "limit", "expected"),
    [(96, 64, 48), (50257, 64, 29), (7, 64, 7), (128, 64, 64), (13, 4, 1)],
)
def test_tiles_divide(length, limit, expected):
    assert tile_length(length, limit) == expected
