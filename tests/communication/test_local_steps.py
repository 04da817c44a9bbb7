"""Local steps with an outer optimizer, against one process that sorts and loops in float64."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_topt.communication import LocalMethod, LocalSteps, OuterSteps, SparseLoCo
from lightning_topt.communication import bucket as buckets
from lightning_topt.communication.local_sgd import NodeReplicas, OuterGradient
from lightning_topt.communication.methods import local_steps
from lightning_topt.communication.methods.local_steps import Chunks
from lightning_topt.communication.rank_watch import PeerLostError
from lightning_topt.communication.topology import Topology
from lightning_topt.communication.wire import GROUP, LevelFormat
from tests.launch import run_on_pool, run_ranks

SHAPES = {"first": (30, 9), "second": (13,)}  # not a multiple of any chunk or group
NUMEL, STEPS, RANKS = 283, 7, 3
METHODS: list[LocalMethod] = [
    LocalSteps(every=3),
    LocalSteps(every=3, outer_learning_rate=0.5, outer_momentum=0.0),
    LocalSteps(every=1),
    LocalSteps(every=100),
    SparseLoCo(every=2, density=0.1, chunk=64, bits=2),
    SparseLoCo(every=3, density=0.3, bits=8, residual_decay=1.0, outer_learning_rate=0.7),
]


def initial(seed: int, dtype: torch.dtype = torch.float32) -> nn.ParameterDict:
    generator = torch.Generator().manual_seed(seed)
    return nn.ParameterDict(
        {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    )


def flat(parameters: nn.ParameterDict) -> torch.Tensor:
    return nn.utils.parameters_to_vector(parameters[name] for name in SHAPES).detach().float()


def gradient(rank: int, step: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * step + rank))


@torch.no_grad()
def local_step(parameters: nn.ParameterDict, rank: int, step: int) -> None:
    """What a rank's own optimizer does."""
    for name, part in zip(SHAPES, gradient(rank, step).split([270, 13]), strict=True):
        parameters[name].mul_(0.9).sub_(0.1 * part.view(SHAPES[name]).to(parameters[name].dtype))


def trained(
    rank: int, method: LocalMethod, part: int = local_steps.PART, dtype: torch.dtype = torch.float32
) -> Any:
    local_steps.PART = part  # elements of SparseLoCo's parts
    parameters = initial(rank, dtype)  # only those of rank 0 count
    outer = OuterSteps(parameters, method)
    for step in range(STEPS):
        local_step(parameters, rank, step)
        assert outer.after_step() == ((step + 1) % method.every == 0)
    outer.synchronize()
    outer.synchronize()  # nothing left to do
    outer.close()
    return flat(parameters), outer.residual, outer.statistics(), outer.anchor


def test_buckets_of_a_node_travel_together(monkeypatch):
    """A bucket is on its way while the next ones are filled."""
    log, replicas = [], NodeReplicas.__new__(NodeReplicas)
    monkeypatch.setattr(buckets, "OWN_BUCKET_BYTES", 100)
    monkeypatch.setattr(dist, "all_reduce", lambda flat, **_: log.append(len(flat)))
    replicas.topology, replicas.node = Topology(1, 2, 0), None
    replicas._buckets = buckets.OwnBuckets(list(initial(0).values()))
    replicas.average_gradients(wait=lambda _: log.append("wait"))
    assert log == [270, 13, "wait"]


class Twin:
    """The mean that the ranks of a method agree on."""

    def __init__(self, method: Any, part: int) -> None:
        self.method, self.part = method, part
        self.residuals = [np.zeros(NUMEL) for _ in range(RANKS)]

    def mean(self, deltas: list[Any]) -> Any:
        if isinstance(self.method, LocalSteps):
            return sum(deltas) / RANKS
        method, total = self.method, np.zeros(NUMEL)
        for rank, delta in enumerate(deltas):
            pending = method.residual_decay * self.residuals[rank] + delta
            places: list[int] = []
            chunk = min(method.chunk, NUMEL)
            k = max(1, round(method.density * chunk))
            for start in range(0, NUMEL, chunk):
                part = np.abs(pending[start : start + chunk])
                taken = -(-k * len(part) // chunk)
                places.extend(start + np.sort(np.argsort(-part)[:taken]))
            sent = np.zeros(NUMEL)
            for start in range(0, NUMEL, self.part):  # groups of values begin anew in each part
                those = [place for place in places if start <= place < start + self.part]
                form = LevelFormat(len(those), method.bits, GROUP)
                sent[those] = form.round(torch.tensor(pending[those]).float()).double().numpy()
            self.residuals[rank] = pending - sent
            total += sent
        return total / RANKS


def in_one_process(method: Any, part: int = NUMEL) -> Any:
    """Parameters at the end, and residuals, of all ranks in one process."""
    theta, momentum, twin = flat(initial(0)).double().numpy(), np.zeros(NUMEL), Twin(method, part)
    replicas = [theta.copy() for _ in range(RANKS)]
    for step in range(STEPS):
        replicas = [
            0.9 * own - 0.1 * gradient(rank, step).numpy() for rank, own in enumerate(replicas)
        ]
        if (step + 1) % method.every == 0 or step + 1 == STEPS:
            mean = twin.mean([theta - own for own in replicas])
            momentum = method.outer_momentum * momentum + mean
            theta = theta - method.outer_learning_rate * (mean + method.outer_momentum * momentum)
            replicas = [theta.copy() for _ in range(RANKS)]
    return theta, twin.residuals


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_equals_the_slow_twin(method: LocalMethod) -> None:
    results = run_on_pool(trained, RANKS, method)
    theta, residuals = in_one_process(method)
    for rank, (parameters, residual, statistics, _) in enumerate(results):
        assert torch.equal(parameters, results[0][0])
        # another order of a sum may round another way
        np.testing.assert_allclose(parameters, theta, atol=2e-3)
        if residual is not None:
            np.testing.assert_allclose(residual, residuals[rank], atol=2e-3)
            assert 0 < statistics.bytes_sent < 0.25 * statistics.dense_bytes
    # what is priced: 4 bytes of each rank say whether parameters are finite
    work, statistics = method.work(NUMEL, RANKS), results[0][2]
    ring = {"all_reduce": 2, "all_gather": 1}
    priced = sum(ring[op] * size * (RANKS - 1) / RANKS for _, op, size in work.collectives)
    meetings = -(-STEPS // method.every)
    assert statistics.steps == STEPS
    assert statistics.bytes_sent == pytest.approx(meetings * priced, abs=2 * meetings)


@pytest.mark.parametrize("part", [64, 128])  # of chunks of 64: five parts, three
def test_parts_equal_the_slow_twin(part: int) -> None:
    method = SparseLoCo(every=3, density=0.2, chunk=64, outer_momentum=0.5)
    results = run_ranks(trained, RANKS, method, part)
    theta, residuals = in_one_process(method, part)
    for rank, (parameters, residual, *_) in enumerate(results):
        assert torch.equal(parameters, results[0][0])
        np.testing.assert_allclose(parameters, theta, atol=1e-5)
        np.testing.assert_allclose(residual, residuals[rank], atol=1e-5)


@pytest.mark.parametrize(
    ("numel", "chunk", "density"),
    [(1000, 64, 0.05), (4096, 1024, 0.01), (10, 64, 0.5), (300, 7, 1.0), (257, 256, 0.1)],
)
def test_chunks_take_what_sorting_takes(numel: int, chunk: int, density: float) -> None:
    chunks = Chunks.of_density(numel, chunk=chunk, density=density)
    start = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    before = start * 0.5 + start.flip(0)
    expected = []
    for first in range(0, numel, chunks.chunk):
        part = before[first : first + chunks.chunk].abs()
        k = -(-chunks.per_chunk * len(part) // chunks.chunk)
        expected.extend((first + part.argsort(descending=True)[:k].sort().values).tolist())
    for take in (chunks.take, chunks.take_in_torch):
        residual = start.clone()
        values, indices = take(residual, start.flip(0), decay=0.5)
        assert indices.tolist() == expected and len(expected) == chunks.k
        assert torch.equal(values, before[indices]) and not residual[indices].any()
        assert torch.equal(residual.index_add(0, indices, values), before)


def conserved(rank: int) -> float:
    """Without outer optimizer and decay: what arrived and what is held back is all there was."""
    parameters = initial(0)
    outer = OuterSteps(parameters, SparseLoCo(every=2, density=0.1, residual_decay=1.0))
    start, total = outer.anchor.clone(), torch.zeros(NUMEL)
    for step in range(6):
        local_step(parameters, rank, step)
        if step % 2:
            total += OuterGradient(outer.parameters, outer.anchor).whole()
        outer.after_step()
    pair = torch.stack([total, outer.residual])
    dist.all_reduce(pair)
    return float((pair[0] / 2 - (start - outer.anchor) - pair[1] / 2).abs().max())


def test_rounding_loses_nothing() -> None:
    assert max(run_on_pool(conserved, 2)) < 5e-6


def test_parameters_of_16_bits_keep_a_float32_anchor() -> None:
    method = LocalSteps(every=3)
    results = run_on_pool(trained, RANKS, method, local_steps.PART, torch.bfloat16)
    exact = run_on_pool(trained, RANKS, method)
    for parameters, _, _, anchor in results:
        assert torch.equal(parameters, results[0][0])
        assert torch.equal(parameters, anchor.bfloat16().float())
        torch.testing.assert_close(parameters, exact[0][0], rtol=0, atol=0.1)


# ---- ranks of a node train one replica -----------------------------------------------------------


def of_nodes(rank: int, method: LocalMethod, nodes: bool) -> Any:
    """Three outer steps of SGD. Without `nodes` a rank has the mean gradient of a node's two."""
    parameters = initial(rank)
    topology = Topology(2, 2, rank) if nodes else None
    outer = OuterSteps(parameters, method, topology=topology)
    for step in range(6):
        mean = gradient(rank, step)
        if not nodes:
            mean = (gradient(2 * rank, step) + gradient(2 * rank + 1, step)) / 2
        for name, part in zip(SHAPES, mean.split([270, 13]), strict=True):
            parameters[name].grad = part.view(SHAPES[name]).clone()
        outer.average_gradients()
        torch.optim.SGD(parameters.parameters(), lr=0.1).step()
        outer.after_step()
    state = outer.state_dict()
    saved = [state]
    dist.broadcast_object_list(saved)
    second = OuterSteps(initial(0), method, topology=topology)
    second.load_state_dict(saved[0])
    same = outer.residual is None or torch.equal(second.residual, outer.residual)
    return flat(parameters), outer.holders, same


@pytest.mark.parametrize(
    ("method", "tolerance"),
    [
        (LocalSteps(every=2, hierarchical=True), 1e-5),  # dense, so that shards do not matter
        (SparseLoCo(every=2, density=1.0, bits=8), 0.01),
    ],
    ids=str,
)
def test_a_node_is_one_replica(method: LocalMethod, tolerance: float) -> None:
    nodes = run_on_pool(of_nodes, 4, method, True)
    ranks = run_on_pool(of_nodes, 2, method, False)
    for parameters, holders, same in nodes:
        assert torch.equal(parameters, nodes[0][0]) and holders == [0, 2] and same
        torch.testing.assert_close(parameters, ranks[0][0], rtol=0, atol=tolerance)


# ---- modules, optimizers, states -----------------------------------------------------------------


def model(rank: int) -> nn.Module:
    torch.manual_seed(rank)  # rank 0's values count
    module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    module.register_buffer("rank", torch.tensor(rank))
    return module


def resumed(rank: int, method: LocalMethod) -> Any:
    """A run that goes on with a new exchange after step 5, and one that does not."""
    found = []
    for stops in (False, True):
        module = model(rank)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        outer = OuterSteps(module, method)
        outer.follow(optimizer)
        for index in range(STEPS):
            batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * index + rank))
            optimizer.zero_grad()
            module(batch).square().mean().backward()
            optimizer.step()
            if index == 4:
                saved = [outer.state_dict()]
                dist.broadcast_object_list(saved)
                if stops:
                    outer.leave()
                    outer.close()
                    outer = OuterSteps(module, method)
                    outer.load_state_dict(saved[0])
                    outer.follow(optimizer)
        outer.leave()
        optimizer.step()  # nothing follows any more
        assert outer.local_steps == STEPS
        outer.close()
        found.append({name: value.clone() for name, value in module.state_dict().items()})
    return found


@pytest.mark.parametrize("method", [METHODS[0], METHODS[4]], ids=str)
def test_a_saved_state_goes_on_as_if_nothing_had_happened(method: LocalMethod) -> None:
    results = run_on_pool(resumed, 2, method)
    for whole, stopped in results:
        assert all(torch.equal(whole[name], value) for name, value in stopped.items())
        # running statistics become their mean over ranks, other buffers those of rank 0
        for name in ("1.running_mean", "1.num_batches_tracked", "rank"):
            assert torch.equal(whole[name], results[0][0][name])


def as_saved_by_0_1_0(rank: int) -> tuple[int, bool]:
    outer = OuterSteps(initial(0), LocalSteps(every=2))
    assert outer.momentum is not None
    ones = {name: torch.ones_like(each) for name, each in outer.parameters.tensors.items()}
    # momentum and steps were beside `ranks`
    outer.load_state_dict(
        {"method": "local_steps", "local_steps": 7, "momentum": ones, "ranks": [{}]}
    )
    outer.close()
    return outer.local_steps, bool((outer.momentum == 1).all())


def test_states_of_release_0_1_0_go_on() -> None:
    assert run_on_pool(as_saved_by_0_1_0, 1) == [(7, True)]


# ---- what goes wrong on a rank -------------------------------------------------------------------


def not_finite(rank: int) -> bool:
    parameters = initial(0)
    outer = OuterSteps(parameters, LocalSteps(every=2))
    local_step(parameters, rank, 0)
    outer.after_step()
    if rank == 1:
        parameters["second"].data[3] = torch.nan
    before = flat(parameters)
    with pytest.raises(FloatingPointError, match="rank 1 have NaN"):
        outer.after_step()
    return torch.equal(before.nan_to_num(), flat(parameters).nan_to_num())


def test_nan_is_named_on_all_ranks_and_nothing_changes() -> None:
    assert run_on_pool(not_finite, 3) == [True] * 3


def waits_too_long(rank: int) -> None:
    outer = OuterSteps(initial(0), LocalSteps(every=1), timeout_seconds=0.3)
    if rank == 0:
        with pytest.raises(PeerLostError, match=r"all ranks are alive.* longer than 0.3 s"):
            outer.after_step()
    else:
        time.sleep(2)


def test_timeout() -> None:
    run_ranks(waits_too_long, 2)
