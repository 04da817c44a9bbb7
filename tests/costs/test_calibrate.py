import os
import random

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from lightning_topt.costs import calibrate as calibrations
from lightning_topt.costs.calibrate import (
    USUAL_COLLECTIVES,
    calibrate,
    collective_timers,
    fastest,
    fit_link,
    measure_kernels,
    measure_page_faults,
    process_groups,
    repeat_parts,
    usual,
)
from lightning_topt.costs.cluster import COLLECTIVES, Cluster
from lightning_topt.costs.communication import Group, mesh_groups, ranks_of_groups
from lightning_topt.costs.measuring import (
    free_memory_bytes,
    gather,
    on_every_rank,
    usable_memory_bytes,
)
from lightning_topt.graph.kernels import encode_arguments
from lightning_topt.graph.op_graph import Amount, Block, Kernel, Op, OpGraph, Step
from tests.launch import run_ranks


def graph():
    def kernel(name, *shapes, flops=0.0):
        arguments = encode_arguments(tuple(torch.empty(shape) for shape in shapes), {})
        return Kernel(name, arguments, Amount(flops), Amount(1e3))

    kernels = (
        kernel("aten.mm.default", (64, 64), (64, 64), flops=2 * 64**3),
        kernel("aten.mm.default", (256, 256), (256, 256), flops=2 * 256**3),
        kernel("aten.relu.default", (64, 64)),
        kernel("aten.mm.default", (3, 4), (5, 6)),  # cannot run
        kernel("nowhere.op.default", (1,)),  # does not exist
    )
    op = Op("o", "X", "", "", (), (), kernels, (kernels[0],), Amount())
    return OpGraph("M", 1, (op,), (), (), (Block("", 0, False),), Step((1, 1)), 0, Amount())


def on_rank(rank):
    before = dict(dist.distributed_c10d._world.pg_map)
    cluster = calibrate(device="cpu", budget_seconds=0.3)
    assert dict(dist.distributed_c10d._world.pg_map) == before
    kernels = measure_kernels(graph(), budget_seconds=30.0)
    # one rank has no memory left while others measure
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as error:
        if rank == 1:
            patch.setattr(calibrations, "measure_page_faults", full)
        on_every_rank(lambda: calibrate(budget_seconds=0.05))
    return cluster.to_dict(), kernels, str(error.value), gather(rank)


def full(device):
    raise torch.OutOfMemoryError("the device is full")


def test_two_ranks_measure_the_same_sane_cluster(monkeypatch):
    monkeypatch.setattr(calibrations, "_WORK_SECONDS", 2e-3)
    (data, kernels, *first), (other, other_kernels, *second) = run_ranks(on_rank, 2)
    assert data == other and kernels == other_kernels
    said = "planning failed on rank 1: OutOfMemoryError: the device is full"
    assert (first, second) == ([said, [0, 1]], ["the device is full", [0, 1]])
    cluster = Cluster.from_dict(data)
    assert set(cluster.collectives) == {(op, 2, 1) for op in USUAL_COLLECTIVES}
    for found in cluster.collectives.values():
        assert len(found.sizes) >= 2
        assert all(0 < a <= b < 10 for a, b in zip(found.seconds, found.seconds[1:], strict=False))
    assert 1e8 < cluster.device.flops["float32"] < 1e14
    assert 1e8 < cluster.device.memory_bandwidth < 1e13
    assert 0 < cluster.device.op_overhead_seconds < 1e-3
    assert 0 <= cluster.overlap <= 1
    assert (cluster.num_devices, cluster.backend) == (2, "gloo")
    assert 1e5 < cluster.intra.bandwidth < 1e13 and 0 < cluster.intra.latency_seconds < 1
    assert len(kernels) == 3  # the two that cannot be made are left out
    seconds = {key: value for key, value in kernels.items() if "mm" in key[0]}
    assert max(seconds, key=seconds.get)[1].count("256") == 6  # the larger product
    assert all(0 < value < 1 for value in kernels.values())


def test_one_process_needs_no_group(short_measurements):
    cluster = calibrate(budget_seconds=0.1)
    assert cluster.num_devices == 1 and not cluster.collectives and cluster.overlap == 0
    assert str(os.getpid()) not in cluster.source and "1 rank(s)" in cluster.source
    assert Cluster.from_dict(cluster.to_dict()) == cluster


def inter_on_rank(rank, collectives):
    before = dict(dist.distributed_c10d._world.pg_map)
    cluster = calibrate(num_nodes=2, budget_seconds=0.1, collectives=collectives)
    assert dict(dist.distributed_c10d._world.pg_map) == before
    return cluster


def test_several_ranks_on_two_nodes_measure_the_link_inside_too(short_measurements):
    two = COLLECTIVES[:2]  # every kind of group and of collective is timed below
    clusters = run_ranks(inter_on_rank, 4, two)
    cluster = clusters[0]
    assert all(other.intra == cluster.intra for other in clusters)
    assert (cluster.devices_per_node, cluster.num_nodes) == (2, 2)
    assert cluster.device.memory_bytes == psutil.virtual_memory().total // 2  # of ranks of a node
    groups = Group(4), Group(2), Group(2, 2)
    assert set(cluster.collectives) == {
        (op, group.size, group.stride) for op in two for group in groups
    }
    links = [fit_link(cluster.collectives, group) for group in groups[1:]]
    assert [cluster.intra, cluster.inter] == links


def usable_on_rank(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda _: (70 - rank, 80))
        patch.setattr(torch.cuda, "memory_reserved", lambda _: 2 + 3 * rank)
        device = torch.device("cuda", rank)
        return usable_memory_bytes(device), free_memory_bytes(device)


def test_what_is_free_is_that_of_the_fullest_device():
    """What torch keeps is free for it, what others hold is not."""
    assert run_ranks(usable_on_rank, 2) == [(72, 69), (74, 69)]


def kinds_on_rank(rank):
    """A calibration on devices that fill up once a second kind of group is open."""
    made, opened = dist.distributed_c10d._world.pg_map, []
    before = len(made)

    def free(device):
        opened.append(len(made) - before)
        return 1e12 if max(opened) == 0 else 5e8

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrations, "backend_of", lambda device: "nccl")
        patch.setattr(calibrations, "free_memory_bytes", free)
        cluster = calibrate(num_nodes=2, budget_seconds=0.05, collectives=["all_reduce"])
    return max(opened), opened[-1], cluster


def test_one_kind_of_groups_is_open_at_a_time_on_devices_and_none_without_room(short_measurements):
    for most, last, cluster in run_ranks(kinds_on_rank, 4):
        assert (most, last) == (1, 0)
        assert set(cluster.collectives) == {("all_reduce", 4, 1), ("all_reduce", 2, 1)}
        links = [fit_link(cluster.collectives, group) for group in (Group(2), Group(4))]
        assert [cluster.intra, cluster.inter] == links


def timers_on_rank(rank):
    groups = mesh_groups(4, devices_per_node=2)
    with process_groups(groups) as made:
        found = {
            group: dist.get_process_group_ranks(process_group)
            for group, process_group in made.items()
        }
        timers = collective_timers(
            made, ops=COLLECTIVES, device=torch.device("cpu"), budgets=dict.fromkeys(groups, 0.0)
        )
        values = {}
        for key in (
            (op, group.size, group.stride) for op in ("all_reduce", "broadcast") for group in groups
        ):
            value = torch.full((4,), 10.0**rank)
            timers[key].make(value)()
            values[key] = value.tolist()
        return found, values, {key: timer() for key, timer in timers.items()}


def test_every_kind_of_group_is_timed_in_its_own_ranks(short_measurements):
    for rank, (found, values, times) in enumerate(run_ranks(timers_on_rank, 4)):
        assert found == {
            group: next(ranks for ranks in ranks_of_groups(group, 4) if rank in ranks)
            for group in (Group(4), Group(2), Group(2, 2))
        }
        for group, ranks in found.items():
            assert (
                values["all_reduce", group.size, group.stride] == [sum(10.0**r for r in ranks)] * 4
            )
            assert values["broadcast", group.size, group.stride] == [10.0 ** ranks[0]] * 4
        assert all(
            len(points) == 4 and all(size % 16 == 0 for size in points) for points in times.values()
        )


def test_page_faults_cost_time_on_cpus_only():
    assert 0 <= measure_page_faults(torch.device("cpu")) < 1e-5  # seconds per byte
    assert measure_page_faults(torch.device("cuda", 0)) == 0.0


def states():
    generators = (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    )
    return *generators, torch.is_grad_enabled(), torch.get_default_dtype()


def test_generators_and_modes_are_as_before(short_measurements):
    drawn = Kernel("aten.rand.default", encode_arguments(([4],), {}), Amount(), Amount(16))
    op = Op("o", "X", "", "", (), (), (drawn,), (), Amount())
    before = states()
    calibrate(budget_seconds=0.1)
    assert states() == before
    assert (
        len(
            measure_kernels(
                OpGraph("M", 1, (op,), (), (), (Block("", 0, False),), Step((1, 1)), 0, Amount())
            )
        )
        == 1
    )
    assert states() == before


# ---- Measurements are repeated until they agree


def part(*rounds, order=None, name=""):
    """A measurement that returns one after the other of `rounds`."""
    left = [times if isinstance(times, dict) else {"t": times} for times in rounds]

    def measure():
        if order is not None:
            order.append(name)
        return left.pop(0)

    return measure


def test_a_part_is_repeated_until_its_two_fastest_rounds_agree():
    order = []
    parts = {
        "quiet": part(1.0, 1.0, order=order, name="quiet"),
        "noisy": part(9.0, 3.0, 1.1, 1.0, order=order, name="noisy"),
    }
    noisy = repeat_parts(parts, seconds_left=lambda: 1.0)["noisy"]
    assert fastest(noisy) == {"t": 1.0} and usual(noisy) == {"t": 2.05}
    assert order == ["quiet", "noisy", "quiet", "noisy", "noisy", "noisy"]


def test_repeating_is_bounded_by_rounds_and_by_time():
    count = []
    never = [2.0**-i for i in range(9)]
    parts = {"a": part(*never, order=count)}
    assert (
        fastest(repeat_parts(parts, seconds_left=lambda: 1.0)["a"]) == {"t": 2.0**-4}
        and len(count) == 5
    )
    assert fastest(repeat_parts({"a": part(*never)}, seconds_left=lambda: -1.0)["a"]) == {"t": 0.5}


def test_a_calibration_among_other_programs_is_marked(monkeypatch, short_measurements):
    monkeypatch.setattr(calibrations, "is_busy", lambda share, **_: share > 0.2)
    monkeypatch.setattr(calibrations.CoreWait, "share", lambda self: 0.4)
    cluster = calibrate(budget_seconds=0.1)
    assert cluster.busy_share == 0.4
    assert Cluster.from_dict(cluster.to_dict()) == cluster
