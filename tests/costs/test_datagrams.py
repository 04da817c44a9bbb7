"""Seconds of exchanges that may lose datagrams: against a simulation of rounds, and in searches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_topt.communication import BoundedLoss, Topology
from lightning_topt.costs import communication
from lightning_topt.costs.cluster import (
    Cluster,
    ClusterError,
    CollectiveCurve,
    DatagramPath,
    Device,
    Link,
)
from lightning_topt.costs.communication import (
    DATAGRAM_BYTES,
    Group,
    bounded_loss_seconds,
    make_exchange_model,
    path_of,
    phase_seconds,
    resent_rounds,
)
from lightning_topt.plan.plan_search import SearchRequest, search_plans
from tests.costs.graphs import profile_of, random_graph

DEVICE = Device("toy", 10**6, {"float32": 1e6}, 1e6)
PATH = DatagramPath(2e-3, 0.05, 1e6)


def simulated_phase(path: DatagramPath, *, sent: float, tolerance: float) -> tuple[float, int]:
    """Bytes sent and rounds of asking, until few enough datagrams are missing."""
    missing, on_network, rounds = sent, sent, 0
    missing *= path.loss
    while missing > max(tolerance * sent, DATAGRAM_BYTES):
        rounds += 1
        on_network += missing
        missing *= path.loss
    return on_network, rounds


@pytest.mark.parametrize("loss", [0.0, 0.001, 0.05, 0.4])
@pytest.mark.parametrize("tolerance", [0.0, 0.01, 0.05])
def test_a_phase_is_that_of_rounds_of_asking(loss: float, tolerance: float) -> None:
    path, sent = replace(PATH, loss=loss), 2e6
    on_network, rounds = simulated_phase(path, sent=sent, tolerance=tolerance)
    assert resent_rounds(path, sent=sent, tolerance=tolerance) == rounds
    seconds = phase_seconds(path, sent=sent, tolerance=tolerance)
    # A receiver that has enough says so at once: what is sent in the last round is not all of what
    # is missing.
    assert seconds <= 1.001 * (
        on_network / path.bandwidth + path.round_trip_seconds * (0.5 + rounds)
    )
    assert seconds >= (1 - tolerance) * on_network / path.bandwidth


def test_paths_of_groups() -> None:
    intra, inter = Link(1e-4, 1e7, DatagramPath(1e-4, 0.0, 8e6)), Link(1e-3, 1e6)
    cluster = Cluster("toy", DEVICE, 2, 3, intra, inter)
    assert path_of(cluster, group=Group(2)) == intra.datagrams
    # not measured: as the link
    assert path_of(cluster, group=Group(3, 2)) == DatagramPath(2e-3, 0.0, 1e6)
    # Of six ranks on three nodes four of the five others are elsewhere.
    assert path_of(cluster, group=Group(6)) == DatagramPath(2e-3, 0.0, 1e6 / 0.8)


def test_files_have_datagrams() -> None:
    cluster = Cluster("toy", DEVICE, 1, 2, Link(1e-4, 1e7), Link(1e-3, 1e6, PATH))
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    data = cluster.to_dict()
    data["inter"]["datagrams"] = {"round_trip_seconds": "2ms", "bandwidth": "8Mb/s"}
    assert Cluster.from_dict(data).inter == Link(1e-3, 1e6, DatagramPath(2e-3, 0.0, 1e6))
    for wrong, says in (
        ({"loss": 1.0}, "loss a share"),
        ({"rate": 3}, "unknown entries"),
        ({"loss": "x"}, "loss"),
    ):
        data["inter"]["datagrams"] = {"round_trip_seconds": "2ms", "bandwidth": "8Mb/s", **wrong}
        with pytest.raises(ClusterError, match=says):
            Cluster.from_dict(data)


def machines(path: DatagramPath, *, seconds_per_byte: float) -> Cluster:
    """Four nodes of one rank, whose all-reduce takes what was measured."""
    sizes = (1e2, 1e6)
    curve = CollectiveCurve(sizes, tuple(1e-5 + seconds_per_byte * size for size in sizes))
    cluster = Cluster("toy", DEVICE, 1, 4, Link(1e-5, 1e7), Link(1e-4, 1e6, path), overlap=0.0)
    return replace(cluster, collectives={("all_reduce", 4, 1): curve})


def test_the_model_adds_datagrams_up(monkeypatch: pytest.MonkeyPatch) -> None:
    # each block has a bucket of its own
    monkeypatch.setattr(communication, "FIRST_BUCKET_BYTES", 0)
    monkeypatch.setattr(communication, "BUCKET_BYTES", 1)
    graph, method = random_graph(3), BoundedLoss(tolerance=0.02)
    cluster = machines(PATH, seconds_per_byte=1e-6)
    model = make_exchange_model(
        method.choices(Topology(4, 1, 0))[0], graph=graph, cluster=cluster, world_size=4
    )
    for block in graph.blocks:
        size = sum(4 * p.numel for p in graph.block_parameters(block.name) if p.trainable)
        expected = bounded_loss_seconds(PATH, size=size, ranks=4, tolerance=0.02) if size else 0.0
        launches = model.work[block.name].calls * DEVICE.op_overhead_seconds
        assert model.worker_seconds(block.name) - launches == pytest.approx(expected)


def test_it_is_chosen_where_the_all_reduce_suffers_and_datagrams_do_not() -> None:
    graph = random_graph(3)

    def fastest(cluster: Cluster) -> object:
        # Views, so that exchanges alone decide: copies out of buckets would make hybrid ZeRO-2
        # faster by 2 %.
        request = SearchRequest(
            graph,
            cluster,
            profile_of(graph),
            (4,),
            8,
            exchanges=(BoundedLoss(),),
            gradient_views=(True,),
        )
        plan = min(search_plans(request).points, key=lambda point: point.step_seconds).plan
        return plan.gradient_exchange

    good = DatagramPath(1e-4, 0.01, 1e6)
    assert fastest(machines(good, seconds_per_byte=1e-4)) == BoundedLoss(hierarchical=False)
    assert fastest(machines(good, seconds_per_byte=1e-9)) is None
    assert fastest(machines(replace(good, bandwidth=1.0), seconds_per_byte=1e-4)) is None
