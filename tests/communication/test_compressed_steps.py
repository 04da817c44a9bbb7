"""Outer steps whose deltas travel in few bits: SparseLoCo and quantized steps, flat and between
nodes.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_topt.communication import LocalSteps, OuterSteps, QuantizedSteps, SparseLoCo
from lightning_topt.communication.local_sgd import OuterGradient
from lightning_topt.communication.methods import local_steps
from lightning_topt.communication.topology import Topology
from lightning_topt.communication.wire import GROUP, LevelFormat, LevelMessage
from tests.launch import run_on_pool, run_ranks

SHAPES = {"weight": (30, 9), "bias": (13,)}  # not a multiple of any chunk or group
NUMEL, STEPS = 283, 7
METHODS = [
    SparseLoCo(every=2, density=0.1, chunk=64, bits=2),
    SparseLoCo(
        every=3, density=0.3, chunk=4096, bits=8, residual_decay=1.0, outer_learning_rate=0.7
    ),
    QuantizedSteps(every=2, bits=4),
    QuantizedSteps(every=3, bits=1, outer_momentum=0.5),
]


def _initial(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in SHAPES.items()
    }


def _gradient(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(NUMEL, generator=generator)


def _local_step(parameters, gradient):
    """What a rank's own optimizer does."""
    with torch.no_grad():
        for (name, parameter), part in zip(
            parameters.items(), gradient.split([270, 13]), strict=True
        ):
            parameter.mul_(0.9).sub_(0.1 * part.view(SHAPES[name]))


def _train(rank, method, part=local_steps.PART):
    local_steps.PART = part  # elements of SparseLoCo's parts
    parameters = _initial(seed=rank)  # only those of rank 0 count
    outer = OuterSteps(parameters.items(), method)
    for step in range(STEPS):
        _local_step(parameters, _gradient(rank, step))
        outer.after_step()
    outer.synchronize()
    return _flat(parameters), outer.residual, outer.statistics


def _flat(parameters):
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters.values()])


class Twin:
    """All ranks in one process: sorting and plain loops, float64."""

    def __init__(self, method, ranks, part):
        self.method, self.ranks, self.part = method, ranks, part
        self.residuals = [np.zeros(NUMEL) for _ in range(ranks)]

    def mean(self, deltas):
        sparse = isinstance(self.method, SparseLoCo)
        return self._sparse(deltas) if sparse else self._quantized(deltas)

    def _sparse(self, deltas):
        method, total = self.method, np.zeros(NUMEL)
        for rank, delta in enumerate(deltas):
            pending = method.residual_decay * self.residuals[rank] + delta
            places = []
            chunk = min(method.chunk, NUMEL)
            k = max(1, round(method.density * chunk))
            for start in range(0, NUMEL, chunk):
                part = np.abs(pending[start : start + chunk])
                taken = -(-k * len(part) // chunk)
                places.extend(start + np.sort(np.argsort(-part)[:taken]))
            sent = np.zeros(NUMEL)
            for start in range(0, NUMEL, self.part):  # groups of values begin anew in each part
                those = [place for place in places if start <= place < start + self.part]
                sent[those] = self._rounded(pending[those], group=LevelMessage.group)
            self.residuals[rank] = pending - sent
            total += sent
        return total / self.ranks

    def _quantized(self, deltas):
        size = -(-NUMEL // (self.ranks * 128)) * 128
        places = [slice(rank * size, (rank + 1) * size) for rank in range(self.ranks)]
        total, result = np.zeros(NUMEL), np.zeros(NUMEL)
        for rank, delta in enumerate(deltas):
            pending = self.residuals[rank] + delta
            sent = np.concatenate([self._rounded(pending[place]) for place in places])
            self.residuals[rank] = pending - sent
            total += sent
        for rank, place in enumerate(places):
            part = total[place] / self.ranks
            result[place] = self._rounded(part)
            self.residuals[rank][place] += self.ranks * (part - result[place])
        return result

    def _rounded(self, values, group=GROUP):
        return (
            LevelFormat(len(values), self.method.bits, group)
            .round(torch.tensor(values).float())
            .double()
            .numpy()
        )


def _twin(method, ranks, part=NUMEL):
    theta, momentum, twin = (
        _flat(_initial(seed=0)).double().numpy(),
        np.zeros(NUMEL),
        Twin(method, ranks, part),
    )
    replicas = [theta.copy() for _ in range(ranks)]
    for step in range(STEPS):
        replicas = [
            0.9 * own - 0.1 * _gradient(rank, step).numpy() for rank, own in enumerate(replicas)
        ]
        if (step + 1) % method.every == 0 or step + 1 == STEPS:
            mean = twin.mean([theta - own for own in replicas])
            momentum = method.outer_momentum * momentum + mean
            theta = theta - method.outer_learning_rate * (mean + method.outer_momentum * momentum)
            replicas = [theta.copy() for _ in range(ranks)]
    return theta, twin.residuals


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_equals_the_slow_twin(method):
    results = run_on_pool(_train, 3, method)
    theta, residuals = _twin(method, 3)
    for rank, (parameters, residual, statistics) in enumerate(results):
        assert torch.equal(parameters, results[0][0])
        # another order of a sum may round another way
        np.testing.assert_allclose(parameters, theta, atol=2e-3)
        np.testing.assert_allclose(residual, residuals[rank], atol=2e-3)
        assert 0 < statistics.bytes_sent < 0.25 * statistics.dense_bytes


@pytest.mark.parametrize("part", [64, 128])  # of chunks of 64: five parts, three
def test_parts_equal_the_slow_twin(part):
    method = SparseLoCo(every=3, density=0.2, chunk=64, outer_momentum=0.5)
    results = run_ranks(_train, 3, method, part)
    theta, residuals = _twin(method, 3, part)
    for rank, (parameters, residual, _) in enumerate(results):
        assert torch.equal(parameters, results[0][0])
        np.testing.assert_allclose(parameters, theta, atol=1e-5)
        np.testing.assert_allclose(residual, residuals[rank], atol=1e-5)


def _conserved(rank, method):
    """Without outer optimizer and decay: what arrived and what is held back is all there was."""
    parameters = _initial(seed=0)
    outer = OuterSteps(parameters.items(), method)
    start, total = outer.anchor.clone(), torch.zeros(NUMEL)
    for step in range(6):
        _local_step(parameters, _gradient(rank, step))
        if step % 2:
            total += OuterGradient(outer.parameters, outer.anchor).whole()
        outer.after_step()
    pair = torch.stack([total, outer.residual])
    dist.all_reduce(pair)
    return float((pair[0] / 2 - (start - outer.anchor) - pair[1] / 2).abs().max())


@pytest.mark.parametrize(
    "method",
    [
        SparseLoCo(every=2, density=0.1, residual_decay=1.0),
        QuantizedSteps(every=2, bits=2),
        QuantizedSteps(every=2, bits=1),
    ],
    ids=str,
)
def test_rounding_loses_nothing(method):
    assert max(run_on_pool(_conserved, 2, method)) < 5e-6


def _nodes(rank, method):
    """Plain SGD with averaged gradients inside each node; parameters and residual after three outer
    steps.
    """
    parameters = _initial(seed=rank)
    outer = OuterSteps(parameters.items(), method, topology=Topology(2, 2, rank))
    for step in range(6):
        for parameter, part in zip(
            parameters.values(), _gradient(rank, step).split([270, 13]), strict=True
        ):
            parameter.grad = part.view(parameter.shape).clone()
        outer.average_gradients()
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.sub_(parameter.grad, alpha=0.1)
        outer.after_step()
    return _flat(parameters), outer.state_dict(), outer.holders


def _of_nodes(rank, method):
    """The same with one rank for each node, which has the mean of the node's gradients."""
    parameters = _initial(seed=0)
    outer = OuterSteps(parameters.items(), method)
    for step in range(6):
        mean = (_gradient(2 * rank, step) + _gradient(2 * rank + 1, step)) / 2
        with torch.no_grad():
            for parameter, part in zip(parameters.values(), mean.split([270, 13]), strict=True):
                parameter.sub_(part.view(parameter.shape), alpha=0.1)
        outer.after_step()
    return _flat(parameters), outer.state_dict()


def test_a_node_is_one_replica():
    """Dense, so that shards do not matter."""
    method = LocalSteps(every=2, hierarchical=True)
    nodes, ranks = run_on_pool(_nodes, 4, method), run_on_pool(_of_nodes, 2, method)
    for parameters, _, holders in nodes:
        assert torch.equal(parameters, nodes[0][0]) and holders == [0, 2]
        torch.testing.assert_close(parameters, ranks[0][0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "method", [SparseLoCo(every=2, density=1.0, bits=8), QuantizedSteps(every=2, bits=8)], ids=str
)
def test_between_nodes_shards_travel(method):
    nodes, ranks = run_on_pool(_nodes, 4, method), run_on_pool(_of_nodes, 2, method)
    for rank, (parameters, state, _) in enumerate(nodes):
        assert torch.equal(parameters, nodes[0][0])
        torch.testing.assert_close(parameters, ranks[0][0], rtol=0, atol=0.01)
        for name in SHAPES:  # every rank of a node can save what the node holds back
            assert torch.equal(state["residual"][name], nodes[rank // 2 * 2][1]["residual"][name])


def _shards_resumed(rank):
    method = SparseLoCo(every=1, density=0.2, hierarchical=True)
    parameters = _initial(seed=0)
    outer = OuterSteps(parameters.items(), method, topology=Topology(2, 2, rank))
    for step in range(3):
        _local_step(parameters, _gradient(rank // 2, step))
        outer.after_step()
    state = outer.state_dict()
    second = OuterSteps(_initial(seed=0).items(), method, topology=Topology(2, 2, rank))
    second.load_state_dict(state)
    return torch.equal(second.residual, outer.residual) and float(outer.residual.abs().sum()) > 0


def test_shards_of_a_residual_are_found_again():
    assert run_on_pool(_shards_resumed, 4) == [True] * 4


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (SparseLoCo, {"bits": 3}, "bits is one of 1, 2, 4, 8"),
        (SparseLoCo, {"residual_decay": 1.5}, "residual_decay is from 0 to 1"),
        (QuantizedSteps, {"hierarchical": "yes"}, "hierarchical is True or False"),
    ],
)
def test_options_out_of_range(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
