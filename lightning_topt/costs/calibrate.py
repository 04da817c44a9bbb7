"""Measure the machine this process runs on: a Cluster whose curves and rates are what programs get here, now.

Every rank of the default process group calls these functions at the same time: ranks of one machine share its memory
bandwidth and cores, so their rates are those of all of them working together. Results are averaged over ranks and equal
on all of them. Without a process group one process measures itself.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from lightning_topt.communication.collectives import all_gather_into, reduce_scatter_into
from lightning_topt.costs.cluster import Cluster, CollectiveCurve, CurveKey, Device, Link
from lightning_topt.costs.compute import KernelKey, kernel_key, roofline_seconds
from lightning_topt.costs.timing import synchronize, time_call, time_once
from lightning_topt.graph.kernels import make_call
from lightning_topt.graph.op_graph import Kernel, OpGraph

_SIZES = tuple(4 << shift for shift in (10, 13, 16, 19, 22, 24))  # 4 KiB to 64 MiB
_MATRIX_SIZES = {"cpu": (256, 512, 1024), "cuda": (2048, 4096, 8192)}
_MIN_SIZES, _MIN_REPEATS = 4, 3  # of collectives, however short the time is
_BYTES_MOVED = 1 << 26  # of the memory bandwidth measurement: far more than a cache holds
# Beside their tensors, training ranks of GPTs of 3 to 50 M parameters kept 4 to 14 MiB: objects of DDP and the optimizer,
# buffers of gloo, small blocks on the C heap (benchmarks/results/memory_limits.md). torch counts no such bytes on CUDA.
_CPU_PROCESS_BYTES = 9 << 20


def calibrate(*, device: torch.device | str = "cpu", num_nodes: int = 1, budget_seconds: float = 1.5) -> Cluster:
    """Measure device and links, in about `budget_seconds` altogether. Collective: every rank calls it.

    Half of the time goes to collectives of 4 KiB to 64 MiB over all ranks, as many sizes as it allows; the rest to
    matrix products per dtype, memory bandwidth, the cost of a small operator, and to what an all_reduce hides behind
    matrix products. `num_nodes` is how many machines the ranks are on; of several with several ranks each, the link inside
    is measured as well.

    Raises ValueError unless the ranks can be spread evenly over that many nodes.
    """
    device = torch.device(device)
    world_size = _world_size()
    if num_nodes < 1 or world_size % num_nodes:
        raise ValueError(f"{world_size} ranks cannot be spread evenly over {num_nodes} nodes")
    measured = measure_device(device, budget_seconds=budget_seconds * 0.35)
    curves = measure_collectives(device, num_nodes=num_nodes, budget_seconds=budget_seconds * 0.5)
    intra = inter = _fit_link(curves, world_size)
    local = world_size // num_nodes
    if num_nodes > 1 and local > 1:
        intra = _measure_node_link(device, ranks_per_node=local, budget_seconds=0.1 * budget_seconds)
        inter = Link(inter.latency_seconds, inter.bandwidth / local)  # the ring had the whole network of a node
    return Cluster(
        name=f"measured_{platform.node() or 'here'}",
        device=measured,
        devices_per_node=local,
        num_nodes=num_nodes,
        intra=intra,
        inter=inter if num_nodes > 1 else None,
        collectives=curves,
        overlap=_measure_overlap(device, budget_seconds=budget_seconds * 0.15),
        backend=dist.get_backend() if world_size > 1 else ("gloo" if device.type == "cpu" else "nccl"),
        source=f"measured by {world_size} rank(s) with torch {torch.__version__} on {measured.name}",
    )


def measure_device(device: torch.device, *, budget_seconds: float = 0.5) -> Device:
    """Rates of one device while all ranks are at work. Collective."""
    dtypes = [torch.float32, torch.bfloat16, *((torch.float16,) if device.type == "cuda" else ())]
    sizes = _MATRIX_SIZES["cpu" if device.type == "cpu" else "cuda"]
    each = 0.6 * budget_seconds / (len(dtypes) * len(sizes))
    flops = {}
    for dtype in dtypes:
        rates = [2 * n**3 / _time_matmul(n, dtype, device, each) for n in sizes]
        flops[str(dtype).removeprefix("torch.")] = max(rates)
    source = torch.rand(_BYTES_MOVED // 8, device=device)
    target = torch.empty_like(source)
    copying = time_call(lambda: target.copy_(source), device=device, budget_seconds=0.2 * budget_seconds)
    tiny = torch.zeros(1, device=device)
    overhead = time_call(lambda: tiny.add_(1), device=device, budget_seconds=0.2 * budget_seconds)
    agreed = _average([*flops.values(), 2 * source.nbytes / copying, overhead])
    return Device(
        name=_device_name(device),
        memory_bytes=_memory_bytes(device),
        flops=dict(zip(flops, agreed, strict=False)),
        memory_bandwidth=agreed[-2],
        op_overhead_seconds=agreed[-1],
        process_bytes=_CPU_PROCESS_BYTES if device.type == "cpu" else 0,
    )


def measure_collectives(
    device: torch.device, *, num_nodes: int = 1, budget_seconds: float = 0.75
) -> dict[CurveKey, CollectiveCurve]:
    """Seconds of each collective over all ranks by size of the whole tensor. Collective; empty for one rank.

    Sizes grow until the time is used up; all ranks stop at the same one. all_gather and reduce_scatter are those that
    sharded plans run (`communication.collectives`).
    """
    world_size = _world_size()
    if world_size == 1:
        return {}
    curves: dict[CurveKey, CollectiveCurve] = {}
    calls = _collective_calls(world_size)
    for op, make in calls.items():
        points: dict[float, float] = {}
        deadline = time.perf_counter() + budget_seconds / len(calls)
        for size, larger in zip(_SIZES, (*_SIZES[1:], 0), strict=True):
            call = make(torch.ones(max(size // 4 // world_size, 1) * world_size, device=device))
            points[float(size)] = _time_together(call, device=device, deadline=deadline)
            expected = points[float(size)] * larger / size * (_MIN_REPEATS + 1)
            if len(points) >= _MIN_SIZES and _average([deadline - time.perf_counter()])[0] < expected:
                break
        # A larger message never takes less time; what says otherwise is noise.
        seconds = np.maximum.accumulate(list(points.values()))
        curves[op, "intra" if num_nodes == 1 else "inter", world_size] = CollectiveCurve(
            tuple(points), tuple(float(value) for value in seconds)
        )
    return curves


def measure_kernels(
    graph: OpGraph, *, device: torch.device | str = "cpu", budget_seconds: float = 2.0
) -> dict[KernelKey, float]:
    """Seconds of the graph's kernels on `device` at ``graph.batch_size``, those expected to cost most first.

    Collective: all ranks measure the same kernels at the same time. It ends when `budget_seconds` are over, and leaves
    out kernels that cannot be made outside the model; formulas stand in for those (`estimate_kernel_seconds`).
    """
    device = torch.device(device)
    deadline = time.perf_counter() + budget_seconds
    seconds: dict[KernelKey, float] = {}
    for kernel in _by_cost(graph):
        call = _try_call(kernel, device)
        possible, left = _average([float(call is not None), deadline - time.perf_counter()])
        if left <= 0:
            break
        if possible == 1.0 and call is not None:
            seconds[kernel_key(kernel)] = time_call(call, device=device, budget_seconds=0.0, max_repeats=2)
    return dict(zip(seconds, _average([*seconds.values()]), strict=True))


# ---- parts ----------------------------------------------------------------------------------------------------------


def _collective_calls(world_size: int) -> dict[str, Callable[[torch.Tensor], Callable[[], Any]]]:
    def part(whole: torch.Tensor) -> torch.Tensor:
        return torch.ones(whole.numel() // world_size, device=whole.device)

    def gather(whole: torch.Tensor) -> Callable[[], Any]:
        local = part(whole)
        return lambda: all_gather_into(torch.empty_like(whole), local)  # FSDP2 allocates the result each time

    def reduce(whole: torch.Tensor) -> Callable[[], Any]:
        local = part(whole)
        return lambda: reduce_scatter_into(local, whole)

    return {
        "all_reduce": lambda whole: lambda: dist.all_reduce(whole),
        "reduce_scatter": reduce,
        "all_gather": gather,
        "broadcast": lambda whole: lambda: dist.broadcast(whole, 0),
    }


def _time_together(call: Callable[[], Any], *, device: torch.device, deadline: float) -> float:
    """Median seconds of a collective call, the same number of calls and the same result on every rank."""
    first = time_once(call, device=device)
    first, left = _average([first, deadline - time.perf_counter()])
    repeats = int(np.clip(left / 4 / max(first, 1e-6), _MIN_REPEATS, 20))
    return float(_average([float(np.median([time_once(call, device=device) for _ in range(repeats)]))])[0])


def _time_matmul(n: int, dtype: torch.dtype, device: torch.device, budget_seconds: float) -> float:
    left, right = (torch.rand(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return time_call(lambda: torch.mm(left, right, out=out), device=device, budget_seconds=budget_seconds)


def _measure_overlap(device: torch.device, *, budget_seconds: float) -> float:
    """Share of an all_reduce that runs beside matrix products which take about as long: the least of several rounds."""
    if _world_size() == 1:
        return 0.0
    n = _MATRIX_SIZES["cpu" if device.type == "cpu" else "cuda"][0]
    left, right = torch.rand(2, n, n, device=device)
    message = torch.ones(1 << 20, device=device)

    def exchange() -> None:
        dist.all_reduce(message)

    seconds = _time_together(exchange, device=device, deadline=time.perf_counter())
    product = _average([time_call(lambda: left @ right, device=device, budget_seconds=0.1 * budget_seconds)])[0]
    count = max(1, round(seconds / product))

    def compute() -> None:
        for _ in range(count):
            left @ right

    def both() -> None:
        work: Any = dist.all_reduce(message, async_op=True)
        compute()
        work.wait()

    repeats = int(np.clip(budget_seconds / (6 * seconds), _MIN_REPEATS, 10))
    times = [[time_once(call, device=device) for call in (exchange, compute, both)] for _ in range(repeats)]
    hidden = min((alone + computing - together) / min(alone, computing) for alone, computing, together in times)
    return float(np.clip(_average([hidden])[0], 0.0, 1.0))


def _measure_node_link(device: torch.device, *, ranks_per_node: int, budget_seconds: float) -> Link:
    """The link inside a node, from all_reduces of two sizes among its ranks, in all nodes at once."""
    ranks = range(_world_size())
    nodes = [dist.new_group(list(ranks[first : first + ranks_per_node])) for first in ranks[::ranks_per_node]]
    own, deadline = nodes[dist.get_rank() // ranks_per_node], time.perf_counter() + budget_seconds
    points: dict[float, float] = {}
    for size in (_SIZES[0], _SIZES[3]):
        tensor = torch.ones(size // 4, device=device)
        call = partial(dist.all_reduce, tensor, group=own)
        points[float(size)] = _time_together(call, device=device, deadline=deadline)
    dist.destroy_process_group(own)
    seconds = np.maximum.accumulate(list(points.values()))
    curve = CollectiveCurve(tuple(points), tuple(float(value) for value in seconds))
    return _fit_link({("all_reduce", "intra", ranks_per_node): curve}, ranks_per_node)


def _fit_link(curves: Mapping[CurveKey, CollectiveCurve], world_size: int) -> Link:
    """The link whose ring formula gives the smallest and the largest measured all_reduce."""
    curve = next((curve for (op, _, _), curve in curves.items() if op == "all_reduce"), None)
    if curve is None:  # one rank: no exchange will ever be estimated
        return Link(latency_seconds=0.0, bandwidth=1.0)
    steps = 2 * (world_size - 1)
    size, seconds = curve.sizes[-1] - curve.sizes[0], curve.seconds[-1] - curve.seconds[0]
    if seconds <= 0:  # a single size, or no difference to be seen
        size, seconds = curve.sizes[-1], curve.seconds[-1]
    return Link(curve.seconds[0] / steps, size * steps / (world_size * seconds))


def _by_cost(graph: OpGraph) -> Iterable[Kernel]:
    """Distinct kernels, the ones that a rough roofline expects to cost most altogether first."""
    rough = Device("any", 1, {"float32": 5e10}, 1e10, 2e-6)
    totals: dict[KernelKey, float] = {}
    kernels: dict[KernelKey, Kernel] = {}
    for op in graph.ops:
        for kernel in (*op.forward, *op.backward):
            key = kernel_key(kernel)
            kernels[key] = kernel
            totals[key] = totals.get(key, 0.0) + kernel.count * roofline_seconds(
                kernel, batch_size=graph.batch_size, device=rough
            )
    return [kernels[key] for key in sorted(totals, key=lambda key: (-totals[key], key))]


def _try_call(kernel: Kernel, device: torch.device) -> Callable[[], None] | None:
    try:
        call = make_call(kernel, device)
        call()
    except (ValueError, RuntimeError, IndexError, TypeError):
        return None
    synchronize(device)
    return call


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _average(values: list[float]) -> list[float]:
    """The mean over ranks, bit for bit the same on all of them."""
    if _world_size() == 1 or not values:
        return values
    device = "cpu" if dist.get_backend() == "gloo" else "cuda"
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)  # an all_reduce need not give all ranks the same last bit
    return [float(value) / _world_size() for value in tensor.tolist()]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} thread(s) per rank"


def _memory_bytes(device: torch.device) -> int:
    """What one rank may use: the device's memory, or an equal share of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total // _world_size())
