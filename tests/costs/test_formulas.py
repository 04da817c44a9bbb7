from dataclasses import replace

import pytest

from lightning_topt.costs.cluster import Cluster, CollectiveCurve, Device, Link
from lightning_topt.costs.communication import Group, estimate_collective_seconds, ranks_of_groups
from lightning_topt.costs.compute import (
    CAST_LAUNCHES,
    estimate_kernel_seconds,
    estimate_pass_seconds,
    kernel_dtype,
    kernel_key,
)
from lightning_topt.graph.op_graph import Amount, Kernel

NOTHING = Amount()
DEVICE = Device("d", 1, {"float32": 100.0, "bfloat16": 200.0}, 10.0, 0.5)


def cluster(**changes):
    arguments = {
        "devices_per_node": 4,
        "num_nodes": 2,
        "intra": Link(1.0, 100.0),
        "inter": Link(2.0, 10.0),
    } | changes
    return Cluster("c", DEVICE, **arguments)


@pytest.mark.parametrize(
    ("op", "group", "seconds"),
    [
        ("all_reduce", Group(4), 2 * 3 * (1 + 1000 / (4 * 100))),  # 21
        ("reduce_scatter", Group(4), 3 * (1 + 2.5)),
        ("all_gather", Group(4), 3 * (1 + 2.5)),
        ("broadcast", Group(4), 2 * 1 + 10),
        ("send_recv", Group(4), 1 + 10),
        ("all_to_all", Group(4), 3 * (1 + 1000 / (16 * 100))),
        # 4 devices share the network of a node: 40 bytes/s
        # a tree: three hops in the node, one between nodes
        ("all_reduce", Group(8), 2 * (3 * 1 + 2) + 2 * 7 * 1000 / (8 * 40)),
        # a ring: of seven hops two at most are between nodes
        ("all_gather", Group(8), 5 * 1 + 2 * 2 + 7 * 1000 / (8 * 40)),
        ("broadcast", Group(8), 3 * 2 + 25),
        ("send_recv", Group(8), 2 + 25),
        ("all_to_all", Group(8), 3 * (1 + 1000 / (64 * 100)) + 4 * (2 + 1000 / (64 * 10))),
        ("all_reduce", Group(2, 2), 2 * (1 + 5)),  # inside a node
        ("all_reduce", Group(2, 4), 2 * (2 + 50)),  # four such groups share the network of a node
        ("all_gather", Group(2, 4), 2 + 50),
        ("all_to_all", Group(2, 4), 2 + 1000 / (4 * 10)),
        ("send_recv", Group(2, 4), 2 + 100),
        ("all_reduce", Group(4, 2), 2 * (1 + 2) + 2 * 3 * 1000 / (4 * 20)),  # two such groups
        ("all_to_all", Group(4, 2), (1 + 1000 / (16 * 100)) + 2 * (2 + 1000 / (16 * 10))),
        ("all_reduce", Group(1, 8), 0),
    ],
)
def test_formulas_by_group(op, group, seconds):
    assert estimate_collective_seconds(cluster(), op=op, size=1000, group=group) == pytest.approx(
        seconds
    )


@pytest.mark.parametrize("group", [Group(8), Group(16), Group(4, 2), Group(4, 4), Group(8, 2)])
def test_latency_of_a_ring_is_that_of_messages_passed_on(group):
    """Parts that all ranks pass on at once, a clock each; gloo has no trees."""
    slow = cluster(num_nodes=4, backend="gloo")
    rings = ranks_of_groups(group, 16)
    last = 0.0
    for ring in rings:
        clocks = [0.0] * len(ring)
        hops = [
            1.0 if source // 4 == target // 4 else 2.0
            for source, target in zip(ring, [*ring[1:], ring[0]], strict=True)
        ]
        for _ in range(len(ring) - 1):
            arrivals = [clock + hop for clock, hop in zip(clocks, hops, strict=True)]
            clocks = [max(clock, arrivals[n - 1]) for n, clock in enumerate(clocks)]
        last = max(last, *clocks)
    seconds = estimate_collective_seconds(slow, op="all_gather", size=1e-9, group=group)
    assert seconds == pytest.approx(last)


def network_bytes(groups: list[list[int]], devices_per_node: int, *, size: float) -> float:
    """The most that a node sends to others in a reduce-scatter: all rings, hop by hop."""
    sent: dict[int, float] = {}
    for ranks in groups:
        for source, target in zip(ranks, [*ranks[1:], ranks[0]], strict=True):
            if source // devices_per_node != target // devices_per_node:
                node = source // devices_per_node
                sent[node] = sent.get(node, 0.0) + (len(ranks) - 1) * size / len(ranks)
    return max(sent.values())


@pytest.mark.parametrize(
    "group", [Group(16), Group(2, 8), Group(4, 4), Group(4, 2), Group(2, 4), Group(8, 2)]
)
def test_groups_share_a_node_as_rings_followed_hop_by_hop_do(group):
    slow = cluster(intra=Link(0.0, 1e9), inter=Link(0.0, 10.0), num_nodes=4)
    rings = ranks_of_groups(group, 16)
    assert sorted(rank for ring in rings for rank in ring) == list(range(16))
    seconds = estimate_collective_seconds(slow, op="reduce_scatter", size=1000, group=group)
    assert seconds == pytest.approx(network_bytes(rings, 4, size=1000) / (4 * 10.0))


def test_a_measurement_beats_the_formula_for_its_group_only():
    measured = cluster(collectives={("all_reduce", 2, 4): CollectiveCurve((1000.0,), (0.125,))})
    groups = Group(2, 4), Group(2), Group(2, 2), Group(8)
    seconds = [
        estimate_collective_seconds(measured, op="all_reduce", size=1000, group=group)
        for group in groups
    ]
    formula = [
        estimate_collective_seconds(cluster(), op="all_reduce", size=1000, group=group)
        for group in groups
    ]
    assert seconds == [0.125, *formula[1:]]


def kernel(name="aten.mm.default", *, flops=NOTHING, traffic=NOTHING, arguments=None, count=1):
    return Kernel(
        name, arguments or {"args": [{"tensor": [[2], [1], "float32"]}]}, flops, traffic, count
    )


def test_roofline():
    compute_bound = kernel(flops=Amount(100, 50), traffic=Amount(1, 0))
    memory_bound = kernel(flops=Amount(1, 0), traffic=Amount(20, 5))
    assert estimate_kernel_seconds(compute_bound, batch_size=4, device=DEVICE) == 3.0 + 0.5
    assert estimate_kernel_seconds(memory_bound, batch_size=4, device=DEVICE) == 4.0 + 0.5


def test_the_dtype_decides_the_rate():
    tensors = [{"tensor": [[2], [1], dtype]} for dtype in ("int64", "bfloat16", "float32")]
    half = kernel(flops=Amount(100, 0), arguments={"args": [3, tensors]})
    assert kernel_dtype(half) == "bfloat16"
    assert estimate_kernel_seconds(half, batch_size=1, device=DEVICE) == 0.5 + 0.5
    assert kernel_dtype(kernel(arguments={"args": [1]})) == "float32"


def test_a_measurement_scales_with_the_roofline():
    k = kernel(flops=Amount(0, 100))
    measured = {kernel_key(k): 9.0}
    same = estimate_kernel_seconds(
        k, batch_size=2, device=DEVICE, measured=measured, measured_batch_size=2
    )
    double = estimate_kernel_seconds(
        k, batch_size=4, device=DEVICE, measured=measured, measured_batch_size=2
    )
    assert same == 9.0
    assert double == pytest.approx(9.0 * 4.5 / 2.5)


def test_a_pass_takes_the_slower_of_device_and_host():
    # 6 s in 4 kernels
    kernels = [kernel(flops=Amount(100, 0), count=3), kernel(traffic=Amount(10, 0))]

    def seconds(**changes):
        return estimate_pass_seconds(kernels, batch_size=1, device=replace(DEVICE, **changes))

    assert seconds() == 6.0
    # the host's 4 x 30 s hide the device
    assert seconds(launch_seconds=30.0) == pytest.approx(120.0, rel=1e-3)
    assert seconds(launch_seconds=0.1) == pytest.approx(6.0, rel=1e-3)
    assert seconds(framework_seconds=0.25) == 7.0  # a CPU is its own host
    assert estimate_pass_seconds([], batch_size=1, device=DEVICE) == 0.0
    # the host takes more for kernels of passes that are run again
    again = estimate_pass_seconds(
        kernels, batch_size=1, device=replace(DEVICE, launch_seconds=30.0), launches=6.0
    )
    assert again == pytest.approx(720.0, rel=1e-3)
    # and less for casts, but where they are run again
    cast = replace(kernels[0], name="aten._to_copy.default")
    device = replace(DEVICE, launch_seconds=3000.0)
    for launches, expected in ((1.0, 3 * CAST_LAUNCHES + 1), (4.0, 16.0)):
        some = estimate_pass_seconds(
            [cast, kernels[1]], batch_size=1, device=device, launches=launches
        )
        assert some == pytest.approx(expected * 3000, rel=1e-3)
    more = estimate_pass_seconds(kernels, batch_size=1, device=device, more_launches=5.0)
    assert more == pytest.approx(9 * 3000, rel=1e-3)


def attention_kernel(positions: int, *, width: int = 128, backward: bool = False) -> Kernel:
    """A call on (1, 2, positions, width) in bfloat16 with 1e9 FLOPs and few bytes."""
    tensor = {"tensor": [[1, 2, positions, width], [1, 1, 1, 1], "bfloat16"]}
    name = f"aten._scaled_dot_product_flash_attention{'_backward' * backward}.default"
    count = 4 if backward else 3
    arguments = {"args": [*[tensor] * count, {"float": 0.0}, True], "kwargs": {}}
    return Kernel(name, arguments, Amount(1e9), Amount(1.0), 1)


def test_attention_has_a_rate_of_its_own():
    device = Device("d", 1, {"float32": 1e9, "bfloat16": 2e9}, 1e9, attention_flops=1e9)
    seconds = [
        estimate_kernel_seconds(attention_kernel(p), batch_size=1, device=device)
        for p in (600, 6000, 600_000)
    ]
    assert seconds == pytest.approx([2.0, 1.1, 1.001])
    narrow = estimate_kernel_seconds(attention_kernel(600, width=8), batch_size=1, device=device)
    assert narrow == pytest.approx(2 * 2.0)
    back = attention_kernel(600, backward=True)
    assert estimate_kernel_seconds(back, batch_size=1, device=device) == pytest.approx(2.0)
    # not known: half of the rate of products
    unknown = replace(device, attention_flops=0.0)
    assert estimate_kernel_seconds(
        attention_kernel(600), batch_size=1, device=unknown
    ) == pytest.approx(2.0)
