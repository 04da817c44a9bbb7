import pytest
import torch

from lightning_topt.costs.cluster import Cluster, CollectiveCurve, Device, Link
from lightning_topt.costs.communication import estimate_collective_seconds
from lightning_topt.costs.compute import estimate_kernel_seconds, estimate_kernels_seconds, kernel_dtype, kernel_key
from lightning_topt.costs.page_faults import kernels_bytes, measure_page_faults
from lightning_topt.graph.op_graph import Amount, Kernel

NOTHING = Amount()
DEVICE = Device("d", 1, {"float32": 100.0, "bfloat16": 200.0}, 10.0, 0.5)


def cluster(**changes):
    arguments = {"devices_per_node": 4, "num_nodes": 2, "intra": Link(1.0, 100.0), "inter": Link(2.0, 10.0)} | changes
    return Cluster("c", DEVICE, **arguments)


@pytest.mark.parametrize(
    ("op", "world_size", "seconds"),
    [
        ("all_reduce", 4, 2 * 3 * (1 + 1000 / (4 * 100))),  # 21
        ("reduce_scatter", 4, 3 * (1 + 2.5)),
        ("all_gather", 4, 3 * (1 + 2.5)),
        ("broadcast", 4, 2 * 1 + 10),
        ("all_reduce", 8, 2 * 7 * (2 + 1000 / (8 * 40))),  # 4 devices share the network of a node: 40 bytes/s
        ("broadcast", 8, 3 * 2 + 25),
        ("all_reduce", 1, 0),
    ],
)
def test_ring(op, world_size, seconds):
    assert estimate_collective_seconds(cluster(), op=op, size=1000, world_size=world_size) == pytest.approx(seconds)


def test_a_fast_network_is_bound_inside_the_node():
    fast = cluster(inter=Link(2.0, 1000.0))
    assert estimate_collective_seconds(fast, op="all_gather", size=800, world_size=8) == pytest.approx(7 * (2 + 1))


def test_all_reduce_is_reduce_scatter_and_all_gather():
    whole, *parts = (
        estimate_collective_seconds(cluster(), op=op, size=77, world_size=3)
        for op in ("all_reduce", "reduce_scatter", "all_gather")
    )
    assert whole == pytest.approx(sum(parts))


def test_a_measurement_beats_the_formula_for_its_scope_and_size_only():
    measured = cluster(collectives={("all_reduce", "intra", 4): CollectiveCurve((1000.0,), (0.125,))})
    seconds = [estimate_collective_seconds(measured, op="all_reduce", size=1000, world_size=n) for n in (4, 2, 8)]
    formula = [estimate_collective_seconds(cluster(), op="all_reduce", size=1000, world_size=n) for n in (2, 8)]
    assert seconds == [0.125, *formula]


def test_wrong_collectives():
    with pytest.raises(ValueError, match="scan"):
        estimate_collective_seconds(cluster(), op="scan", size=1, world_size=2)
    with pytest.raises(ValueError, match="8 devices"):
        estimate_collective_seconds(cluster(), op="all_reduce", size=1, world_size=9)


def kernel(name="aten.mm.default", *, flops=NOTHING, traffic=NOTHING, arguments=None, count=1):
    return Kernel(name, arguments or {"args": [{"tensor": [[2], [1], "float32"]}]}, flops, traffic, count)


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
    same = estimate_kernel_seconds(k, batch_size=2, device=DEVICE, measured=measured, measured_batch_size=2)
    double = estimate_kernel_seconds(k, batch_size=4, device=DEVICE, measured=measured, measured_batch_size=2)
    assert same == 9.0
    assert double == pytest.approx(9.0 * 4.5 / 2.5)


def test_kernels_add_up_with_their_counts():
    kernels = [kernel(flops=Amount(100, 0), count=3), kernel(traffic=Amount(10, 0))]
    assert estimate_kernels_seconds(kernels, batch_size=1, device=DEVICE) == 3 * 1.5 + 1.5


def test_page_faults_cost_time_on_cpus_only():
    assert 0 <= measure_page_faults(torch.device("cpu")) < 1e-5  # seconds per byte
    assert measure_page_faults(torch.device("cuda", 0)) == 0.0


def test_kernels_take_their_large_results_anew():
    small, large = Amount(1000), Amount(0, 1 << 16)
    kernels = [Kernel("a", {}, Amount(), Amount(), 5, small), Kernel("b", {}, Amount(), Amount(), 3, large)]
    assert kernels_bytes(kernels, batch_size=2) == 3 * 2 * (1 << 16)
