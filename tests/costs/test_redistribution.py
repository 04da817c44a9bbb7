"""Redistributions by hand, every pair on two axes against all orders, and against what DTensor
sends.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.debug import CommDebugMode

from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.costs.communication import estimate_collective_seconds
from lightning_topt.costs.groups import Group
from lightning_topt.costs.redistribution import (
    estimate_edge,
    estimate_redistribution,
    gradient_placements,
    local_bytes,
)
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import Partial, Replicate, Shard
from tests.launch import run_ranks

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
M = 1000.0  # bytes/s of memory: a copied byte takes 2 / M
ROW, TWO = Mesh((Axis("tensor", 4),)), Mesh((Axis("data", 2, "inter"), Axis("tensor", 4)))


def cluster(*, backend="nccl", inter=Link(2.0, 10.0)):  # noqa: B008 a frozen value
    return Cluster(
        "c", Device("d", 1, {"float32": 1.0}, M), 4, 2, Link(1.0, 100.0), inter, backend=backend
    )


def moved(source, target, *, mesh=ROW, size=800.0, **options):
    return estimate_redistribution(
        cluster(**options), mesh=mesh, source=source, target=target, size=size
    )


@pytest.mark.parametrize(
    ("source", "target", "backend", "op", "copied", "peak"),
    [
        (P, R, "nccl", "all_reduce", 0, 800),
        (P, S0, "nccl", "reduce_scatter", 0, 200),
        (P, S1, "nccl", "reduce_scatter", 800, 800 + 200),
        (S0, R, "nccl", "all_gather", 0, 800),
        (S1, R, "nccl", "all_gather", 800, 1600),
        (S0, S1, "nccl", "all_to_all", 400, 600),
        (R, S1, "nccl", "", 200, 200),
        (R, P, "gloo", "", 800, 800),
    ],
)
def test_one_axis_by_hand(source, target, backend, op, copied, peak):
    found = moved((source,), (target,), backend=backend)
    (step,) = found.steps
    assert (step.axis, step.op, step.copied_bytes, found.peak_bytes) == (0, op, copied, peak)
    assert found.allocated_bytes == peak
    collective = (
        estimate_collective_seconds(cluster(), op=op, size=800, group=Group(4)) if op else 0.0
    )
    assert found.seconds == pytest.approx(collective + 2 * copied / M)


@pytest.mark.parametrize(("source", "target", "peak"), [(S0, S1, 800 + 200), (S1, S0, 1600)])
def test_gloo_gathers_and_cuts(source, target, peak):
    found = moved((source,), (target,), backend="gloo")
    assert [(step.op, step.result_bytes) for step in found.steps] == [
        ("all_gather", 800),
        ("", 200),
    ]
    assert found.peak_bytes == peak


@pytest.mark.parametrize("placement", [R, P, S0])
def test_what_is_in_place_costs_nothing(placement):
    found = moved((placement,), (placement,))
    assert (found.steps, found.seconds, found.peak_bytes, found.allocated_bytes) == ((), 0, 0, 0)


def test_an_axis_of_one_rank_has_nothing_to_move():
    assert moved((P, S0), (S0, S0), mesh=Mesh((Axis("data", 1), Axis("tensor", 4)))).steps == ()


def test_the_smaller_tensor_travels_between_nodes():
    """All-reduced between nodes while it is sharded inside them: a quarter of the bytes."""
    found = moved((P, S0), (R, R), mesh=TWO)
    assert [(step.axis, step.op, step.result_bytes) for step in found.steps] == [
        (0, "all_reduce", 200),
        (1, "all_gather", 800),
    ]
    assert found.seconds == pytest.approx(2 * (2 + 200 / (2 * 10)) + 3 * (1 + 800 / (4 * 100)))
    assert (found.peak_bytes, found.allocated_bytes) == (200 + 800, 1000)


def test_a_dim_that_an_inner_axis_cuts_is_gathered_first():
    found = moved((S0, S0), (R, S0), mesh=TWO)
    assert [(step.axis, step.op) for step in found.steps] == [
        (1, "all_gather"),
        (0, "all_gather"),
        (1, ""),
    ]
    assert [step.result_bytes for step in found.steps] == [400, 800, 200]
    assert found.peak_bytes == 400 + 800
    assert found.seconds == pytest.approx(3 * (1 + 400 / 400) + (2 + 800 / 20) + 2 * 200 / M)


def follow(placements, target, *, spent=0.0, steps=0):
    """The least seconds over all sequences of at most five changes to a target or Replicate, by
    trying them.
    """
    best = spent if placements == target else float("inf")
    for axis, new in itertools.product(range(2), (R, P, S0, S1)) if steps < 5 else ():
        old, other = placements[axis], placements[1 - axis]
        cut = axis == 0 and isinstance(other, Shard) and other in (new, old)  # by the inner axis
        if cut or new == old or new not in (R, target[axis]) or (new == P and old != R):
            continue
        size = 800 / (TWO.shape[1 - axis] if isinstance(other, Shard) else 1)
        (step,) = (
            one := moved((old,), (new,), mesh=Mesh((Axis("a", TWO.shape[axis]),)), size=size)
        ).steps
        group = Group(2, 4) if axis == 0 else Group(4)
        seconds = one.seconds - (
            estimate_collective_seconds(cluster(), op=step.op, size=size, group=Group(group.size))
            if step.op
            else 0.0
        )
        seconds += (
            estimate_collective_seconds(cluster(), op=step.op, size=size, group=group)
            if step.op
            else 0.0
        )
        changed = (new, other) if axis == 0 else (other, new)
        best = min(best, follow(changed, target, spent=spent + seconds, steps=steps + 1))
    return best


PAIRS = [
    (source, target)
    for source, target in itertools.product(itertools.product((R, P, S0, S1), repeat=2), repeat=2)
    if not any(isinstance(a, Shard) and b == P for a, b in zip(source, target, strict=True))
]


@pytest.mark.parametrize("target", sorted({target for _, target in PAIRS}, key=str), ids=str)
def test_the_order_is_the_best_of_all(target):
    for source in (source for source, wanted in PAIRS if wanted == target):
        assert moved(source, target, mesh=TWO).seconds == pytest.approx(follow(source, target)), (
            source
        )


def test_edges_price_the_gradient_too():
    column = estimate_edge(cluster(), mesh=ROW, source=(S0,), target=(R,), size=800, gradient=(P,))
    assert [step.op for step in column.forward.steps] == ["all_gather"]
    assert [step.op for step in column.backward.steps] == ["reduce_scatter"]
    assert column.seconds == column.forward.seconds + column.backward.seconds
    row = estimate_edge(cluster(), mesh=ROW, source=(P,), target=(S0,), size=800)
    # the gradient of every summand is whole
    assert [step.op for step in row.backward.steps] == ["all_gather"]
    same = estimate_edge(cluster(), mesh=ROW, source=(P,), target=(R,), size=800)
    assert same.forward.seconds > 0 and same.backward.steps == ()
    assert gradient_placements((P, S1, R)) == (R, S1, R)
    assert local_bytes(800, mesh=TWO, placements=(S1, S0)) == 100


def test_what_torch_does_not_do():
    with pytest.raises(ValueError, match="'tensor': a sharded tensor cannot become partial"):
        moved((R, S0), (R, P), mesh=TWO)
    with pytest.raises(ValueError, match="one placement for each"):
        moved((R,), (R, P), mesh=TWO)


TORCH = {R: TorchReplicate(), P: TorchPartial(), S0: TorchShard(0), S1: TorchShard(1)}
COLLECTIVES = {
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "all_gather": "all_gather",
}


def sent_by_dtensor(rank, pairs):
    """The collectives of each redistribution, and of its backward pass."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tensor",))
    found = []
    for source, target in pairs:
        shape = [8 // (4 if source == S0 else 1), 8 // (4 if source == S1 else 1)]
        x = DTensor.from_local(
            torch.ones(shape), mesh, [TORCH[source]], run_check=False
        ).requires_grad_()
        counts = []
        with CommDebugMode() as forward:
            y = x.redistribute(placements=[TORCH[target]])
        gradient = DTensor.from_local(
            torch.ones_like(y.to_local()), mesh, [TORCH[R if target == P else target]]
        )
        with CommDebugMode() as backward:
            y.backward(gradient)
        for mode in (forward, backward):
            counts.append(
                sorted(str(op) for op, n in mode.get_comm_counts().items() for _ in range(n))
            )
        found.append(counts)
    return found


def test_dtensor_sends_what_is_priced():
    pairs = [(a, b) for a, b in itertools.product((R, P, S0, S1), repeat=2) if b not in (a, P)]
    for (source, target), counts in zip(
        pairs, run_ranks(sent_by_dtensor, 4, pairs)[0], strict=True
    ):
        edge = estimate_edge(
            cluster(backend="gloo"), mesh=ROW, source=(source,), target=(target,), size=256
        )
        for part, sent in zip((edge.forward, edge.backward), counts, strict=True):
            ops = [step.op for step in part.steps if step.op]
            assert len(ops) == len(sent) and all(
                COLLECTIVES[op] in name for op, name in zip(ops, sent, strict=True)
            )
