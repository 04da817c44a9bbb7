"""Measure the machine this process runs on: a Cluster with the rates that programs get here, now.

Every rank of the default process group calls these functions at the same time. Results are averaged
over ranks and equal on all of them. Without a process group one process measures itself. Random
generators stay as they are.

    timer                 what it times                             what it becomes
    ProductTimer          products of square matrices by size       Device.flops
    device_timers         copies, a small kernel, the host          other fields of Device
    measure_page_faults   memory taken anew                         page_fault_seconds_per_byte
    CollectiveTimer       a collective by size, back to back        CollectiveCurve
    WaitTimer             ranks that wait for one another before    CollectiveCurve.wait_seconds
    measure_overlap       what computation hides of an all_reduce   Cluster.overlap

Ranks of one machine share its memory bandwidth and cores, so their rates are those of all working
together. A busy moment must not decide about a plan: each part is measured in two halves, with all
others between them, and again while the two fastest differ, or a rank had no core for too long
(`repeat_parts`). What was busy in every round is marked: `Cluster.busy_share`.
"""

from __future__ import annotations

import math
import mmap
import platform
import statistics
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_topt.basics.core_wait import CoreWait, is_busy
from lightning_topt.communication.collectives import (
    all_gather_into,
    backend_of,
    reduce_scatter_into,
    synchronize,
)
from lightning_topt.communication.topology import destroy_groups, own_group, whole_run
from lightning_topt.costs.cluster import (
    COLLECTIVES,
    Cluster,
    CollectiveCurve,
    CurveKey,
    Device,
    Link,
)
from lightning_topt.costs.communication import Group, mesh_groups, ranks_of_groups
from lightning_topt.costs.compute import KernelKey, kernel_key, roofline_seconds
from lightning_topt.costs.measuring import (
    average,
    free_memory_bytes,
    gather,
    kept_global_state,
    measure_host_copies,
    most,
    time_call,
    time_issue,
    time_kernel,
    time_once,
    usable_memory_bytes,
    world_size,
)
from lightning_topt.costs.reserved_memory import COMMUNICATOR_BYTES
from lightning_topt.graph.kernels import make_call
from lightning_topt.graph.op_graph import Kernel, OpGraph

USUAL_COLLECTIVES = COLLECTIVES[:4]  # of data parallelism
_GROUP_SHARE = 0.15  # of the time, for each kind of group beside that of all ranks
_MANY_LAUNCHES = 2e-4  # seconds of the host for a call: those of one kernel are 30 us
_SMALL_SHARE, _LATEST = 0.1, 3  # of the kernels' expected seconds; of the time to measure them in
_AGREE = 1.2  # two times are the same within this factor
_MAX_ROUNDS = 5
_LEAST_ROOM = 1 << 28  # bytes of a device to measure in
Part = TypeVar("Part", bound=Hashable)
Times = Mapping[Any, float]  # seconds by what was measured
# one device
_MATRIX_SIZES = {"cpu": (256, 512, 1024), "cuda": (2048, 4096, 8192)}
# of the memory bandwidth measurement: far more than a cache holds
_BYTES_MOVED = {"cpu": 1 << 26, "cuda": 1 << 31}
# Beside their tensors, training ranks of GPTs of 3 to 50 M parameters kept 4 to 14 MiB: objects of
# DDP and the optimizer, buffers of gloo, small blocks on the C heap
# (benchmarks/results/memory_limits.md). torch counts no such bytes on CUDA.
_CPU_PROCESS_BYTES = 9 << 20
# the step of small layers; kernels of each: product, norm, activation, in backward two products, a
# sum, and those of norm and activation
_LAYERS, _WIDTH, _ROWS, _KERNELS = 24, 8, 4, 8
_LEAST = 1e-6  # seconds of the framework around a layer
_BLOCK_BYTES, _BLOCKS, _FAULT_ROUNDS = 1 << 20, 16, 9  # of page faults
# links
SIZES = tuple(4 << shift for shift in (10, 13, 16, 19, 22, 24))  # 4 KiB to 64 MiB
CUDA_SIZES = (*SIZES, 4 << 26)  # to 256 MiB: NVLink reaches its rate there
_BACK_TO_BACK_SECONDS = 2e-3  # of collectives that a device waits for once
_MIN_SIZES, _MIN_REPEATS = 4, 2  # of collectives, however short the time is
# of the time of the other collectives, which steps have more of
_SHARES = {"broadcast": 0.5, "all_to_all": 0.25, "send_recv": 0.25}
# at most, of one exchange beside computation
_OVERLAP_BYTES, _OVERLAP_SECONDS = {"cpu": 4 << 20, "cuda": 256 << 20}, 0.05
_MATRIX = {"cpu": 256, "cuda": 2048}
# what ranks compute between the exchanges of a step; the bytes of an activation
_WORK_SECONDS, _WAIT_BYTES, _WAIT_PARTS = 0.02, 1 << 18, 4
Call = Callable[[], Any]
Points = dict[float, float]  # seconds by bytes of the whole tensor
ProcessGroups = Mapping[Group, dist.ProcessGroup]  # this rank's, of each kind of group


@kept_global_state()
def calibrate(
    *,
    device: torch.device | str = "cpu",
    num_nodes: int = 1,
    budget_seconds: float = 1.5,
    collectives: Collection[str] = USUAL_COLLECTIVES,
) -> Cluster:
    """Measure device and links, in about `budget_seconds` altogether, 2 s on a busy machine.

    Collective: every rank calls it. The least that is measured takes longer than that over slow
    links.

    Half of the time goes to `collectives` of 4 KiB to 64 MiB (CUDA: 256 MiB) over all ranks, as
    many sizes as it allows; the rest to matrix products per dtype, memory bandwidth, the cost of a
    small operator, and to what an all_reduce hides behind matrix products. Each other kind of group
    that a mesh of these ranks can have (`mesh_groups`; two ranks have none) takes a sixth of the
    time more, all groups of a kind at once. Making groups and opening their connections comes
    before, and is not counted. Each part is measured in two halves, with all the others between
    them. Where a time of the halves differs by more than 20 %, or other programs had the cores of
    CPU ranks, that part is measured again, until 1.4 times the time is over; of all rounds the
    fastest counts, of waits the median.

    Groups that take memory of devices (NCCL) are made and destroyed kind by kind. Kinds and sizes
    for which a device has no room are left out: formulas stand in.

    Args:
        device: what ranks train on.
        num_nodes: how many machines the ranks are on.
        budget_seconds: as above.
        collectives: those that are measured, all_reduce among them.

    Raises:
        ValueError: unless the ranks can be spread evenly over that many nodes.
        RuntimeError: a device has less than 256 MiB free.
    """
    assert "all_reduce" in collectives and set(collectives) <= set(COLLECTIVES)
    device, ranks = torch.device(device), world_size()
    if num_nodes < 1 or ranks % num_nodes:
        raise ValueError(f"{ranks} ranks cannot be spread evenly over {num_nodes} nodes")
    if (room := free_memory_bytes(device)) < _LEAST_ROOM:
        raise RuntimeError(
            f"a device has {room / 2**20:.0f} MiB free, which is too little to measure it: free "
            "memory before the fit, or give a cluster (cluster=FILE)"
        )
    local = ranks // num_nodes
    half = 0.5 * budget_seconds
    computing = device_timers(device, budget_seconds=0.35 * half, room=room)
    # an accelerator's times are its own, whoever has the cores
    watched = {
        name: WatchedPart(measure, ranks=local)
        for name, measure in computing.items()
        if device.type == "cpu"
    }
    groups = mesh_groups(ranks, devices_per_node=local)
    # groups of gloo take no memory of a device: all at once, so that halves of a part lie apart
    at_once = not groups or backend_of(device) == "gloo"
    rounds: dict[Any, list[Times]] = {}
    for kinds in [groups] if at_once else [(group,) for group in groups]:
        if rounds and free_memory_bytes(device) < 2 * COMMUNICATOR_BYTES:
            break  # that of all ranks, which is open, came first
        rounds |= _rounds(
            {} if rounds else computing | watched,
            kinds,
            collectives=collectives,
            device=device,
            budget_seconds=budget_seconds,
        )
    # from times to curves, links and rates; a link that was not seen alone is that of all ranks
    times = {name: fastest(found) for name, found in rounds.items()}
    keys = [key for key in rounds if isinstance(key, tuple) and key[0] in collectives]
    curves = {key: curve(times[key], wait_seconds=_wait(rounds, key)) for key in keys}
    inter, intra = (
        fit_link(curves, group if ("wait", group) in rounds else Group(ranks))
        for group in (Group(num_nodes, local), Group(local))
    )
    # All ranks begin together: that they take memory at the same time costs each a third more, as
    # in a step.
    average([0.0])
    faults, to_host = average([measure_page_faults(device), measure_host_copies(device)])
    measured = measured_device(
        device, times, ranks=local, page_fault_seconds_per_byte=faults, host_bandwidth=to_host
    )
    return Cluster(
        name=f"measured_{platform.node() or 'here'}",
        device=measured,
        devices_per_node=local,
        num_nodes=num_nodes,
        intra=intra if local > 1 else inter,
        inter=inter if num_nodes > 1 else None,
        collectives=curves,
        overlap=measure_overlap(
            device,
            all_reduce=curves.get(("all_reduce", ranks, 1)),
            budget_seconds=0.1 * budget_seconds,
        ),
        backend=backend_of(device) if ranks > 1 else ("gloo" if device.type == "cpu" else "nccl"),
        source=f"measured by {ranks} rank(s) with torch {torch.__version__} on {measured.name}",
        busy_share=max((part.busy_share for part in watched.values()), default=0.0),
    )


def _rounds(
    computing: Mapping[Any, Callable[[], Times]],
    kinds: Sequence[Group],
    *,
    collectives: Collection[str],
    device: torch.device,
    budget_seconds: float,
) -> dict[Any, list[Times]]:
    # Rounds of every part: device, collectives in `kinds` of groups, waits
    shares = {kind: 0.45 if kind.size == world_size() else _GROUP_SHARE for kind in kinds}
    budgets = {kind: 0.5 * share * budget_seconds for kind, share in shares.items()}
    allowed = 1.4 * budget_seconds * (sum(shares.values()) + 0.55 * bool(computing))
    with process_groups(kinds) as made:
        timers = collective_timers(made, ops=collectives, device=device, budgets=budgets)
        waits = {
            ("wait", kind): WaitTimer(found, device=device, budget_seconds=budgets[kind] / 4)
            for kind, found in made.items()
        }
        # connections are open by now
        deadline = time.perf_counter() + allowed
        return repeat_parts(
            {**computing, **timers, **waits},
            seconds_left=lambda: average([deadline - time.perf_counter()])[0],
            busy=lambda name: getattr(computing.get(name), "busy_share", 0.0) > 0,
        )


def _wait(rounds: Mapping[Any, Sequence[Mapping[Any, float]]], key: CurveKey) -> float:
    # What ranks wait for one another before a collective. Of messages between two ranks, schedules
    # say it.
    op, *group = key
    return 0.0 if op == "send_recv" else next(iter(usual(rounds["wait", Group(*group)]).values()))


# ---- Repeat measurements until they agree


class WatchedPart:
    """A part in which ranks compute, and how long other programs had their cores meanwhile.

    `ranks` of them are on one machine; `measure` returns the times of a round. `busy_share` is that
    of the quietest round, where that is one of a busy machine; else 0.
    """

    def __init__(self, measure: Callable[[], Times], *, ranks: int) -> None:
        self._measure, self._ranks = measure, ranks
        self._least, self.busy_share = math.inf, 0.0

    def __call__(self) -> Times:
        """Return the times of a round. Collective."""
        watch = CoreWait(threads=torch.get_num_threads())
        times = self._measure()
        # the same on all ranks
        self._least = min(self._least, most(watch.share()))
        self.busy_share = busy_share(self._least, ranks=self._ranks)
        return times


def busy_share(share: float, *, ranks: int) -> float:
    """Return `share`, of `CoreWait`, where it is one of a busy machine with `ranks`; else 0."""
    return min(share, 1.0) if is_busy(share, ranks=ranks, threads=torch.get_num_threads()) else 0.0


def repeat_parts(
    parts: Mapping[Part, Callable[[], Times]],
    *,
    seconds_left: Callable[[], float],
    busy: Callable[[Part], bool] = lambda _: False,
) -> dict[Part, list[Times]]:
    """Return the rounds of every part, repeated while they differ.

    Every part is measured in two halves, one after all others, and again while the two fastest
    differ: when a time in one is more than 20 % above the same time in the other. A part that is
    still `busy` is measured again too. There are at most five rounds, and no more when
    `seconds_left` returns less than 0. `fastest` and `usual` make one time of them.

    All ranks must get the same times and seconds (`measuring.average`), as they then repeat the
    same parts.
    """
    rounds: dict[Part, list[Times]] = {name: [] for name in parts}
    for _ in range(2):
        for name, measure in parts.items():
            rounds[name].append(measure())
    for _ in range(_MAX_ROUNDS - 2):
        again = [name for name, times in rounds.items() if not agree(times) or busy(name)]
        if not again or seconds_left() < 0:
            break
        for name in again:
            rounds[name].append(parts[name]())
    return rounds


def agree(rounds: Sequence[Times]) -> bool:
    """Return whether of every time the two least are within 20 %."""
    by_key = (sorted(_of(key, rounds)) for key in fastest(rounds))
    return all(len(times) > 1 and times[1] <= _AGREE * times[0] for times in by_key)


def fastest(rounds: Sequence[Times]) -> dict[Any, float]:
    """Return the least of every time, of work that other programs can only make slower."""
    return {key: min(_of(key, rounds)) for times in rounds for key in times}


def usual(rounds: Sequence[Times]) -> dict[Any, float]:
    """Return the median of every time, of what varies by itself: how long ranks wait."""
    return {key: statistics.median(_of(key, rounds)) for times in rounds for key in times}


def _of(key: Any, rounds: Sequence[Times]) -> list[float]:
    return [times[key] for times in rounds if key in times]


# ---- One device, while all ranks are at work


def device_timers(
    device: torch.device, *, budget_seconds: float, room: float
) -> dict[Any, Callable[[], Times]]:
    """Return timers of `device`, each of which every rank calls at the same time.

    Seconds of products by dtype and size, per byte moved, per small operator, and what the host
    takes around a kernel. They take at most half of `room`, in bytes.
    """

    def copies() -> dict[Any, float]:
        nbytes = int(min(_BYTES_MOVED[device.type], room / 4))
        source = torch.ones(nbytes // 8, device=device)
        target = torch.empty_like(source)
        copying = time_kernel(
            lambda: target.copy_(source), device=device, budget_seconds=0.2 * budget_seconds
        )
        return {"byte": average([copying / (2 * source.nbytes)])[0]}

    def small() -> dict[Any, float]:
        tiny = torch.zeros(1, device=device)
        overhead = time_kernel(
            lambda: tiny.add_(1), device=device, budget_seconds=0.2 * budget_seconds
        )
        return {"call": average([overhead])[0]}

    host = partial(measure_host, device, budget_seconds=0.2 * budget_seconds)
    products = ProductTimer(device, budget_seconds=0.6 * budget_seconds, room=room)
    return {"products": products, "copies": copies, "small": small, "host": host}


def measured_device(
    device: torch.device,
    times: Mapping[Any, Mapping[Any, float]],
    *,
    ranks: int,
    page_fault_seconds_per_byte: float,
    host_bandwidth: float = 0.0,
) -> Device:
    """Return the device with the rates that `times`, of `device_timers`, say.

    The rate of a dtype is that of its best size, the memory that of the rank with the least.
    Collective.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.machine()} CPU, {torch.get_num_threads()} thread(s) per rank"
    rates: dict[str, float] = {}
    for (dtype, size), seconds in times["products"].items():
        rates[dtype] = max(rates.get(dtype, 0.0), 2.0 * size**3 / seconds)
    return Device(
        name=name,
        memory_bytes=min(gather(usable_memory_bytes(device, ranks=ranks))),
        flops=rates,
        memory_bandwidth=1 / times["copies"]["byte"],
        op_overhead_seconds=times["small"]["call"],
        page_fault_seconds_per_byte=page_fault_seconds_per_byte,
        framework_seconds=times["host"].get("kernel", 0.0),
        launch_seconds=times["host"].get("launch", 0.0),
        process_bytes=_CPU_PROCESS_BYTES if device.type == "cpu" else 0,
        caching_allocator=device.type == "cuda",
        host_bandwidth=host_bandwidth,
    )


class ProductTimer:
    """Times products of square matrices by dtype and size.

    Of as many sizes as five calls each take less than five times the budget, and as three matrices
    of float32 take half of `room`, in bytes. The first call finds out which.
    """

    def __init__(self, device: torch.device, *, budget_seconds: float, room: float) -> None:
        self.device = device
        possible = _MATRIX_SIZES[device.type]
        self._possible = [size for size in possible if 3 * 4 * size**2 <= room / 2]
        self.dtypes = [
            torch.float32,
            torch.bfloat16,
            *((torch.float16,) if device.type == "cuda" else ()),
        ]
        self._each = budget_seconds / len(self.dtypes)
        self._sizes: dict[torch.dtype, list[int]] = {}

    def __call__(self) -> dict[Any, float]:
        """Return the seconds by dtype and size, the same on every rank. Collective."""
        found: dict[Any, float] = {}
        for dtype in self.dtypes:
            name = str(dtype).removeprefix("torch.")
            for size in self._sizes.get(dtype, self._possible):
                found[name, size] = seconds = self._seconds(dtype, size)
                # the next size has twice the rows and columns
                if dtype not in self._sizes and seconds * 8 > self._each:
                    break
            self._sizes.setdefault(dtype, [n for found_name, n in found if found_name == name])
        return found

    def _seconds(self, dtype: torch.dtype, size: int) -> float:
        left, right = (torch.rand(size, size, device=self.device).to(dtype) for _ in range(2))
        product = partial(torch.mm, left, right, out=torch.empty_like(left))
        budget = self._each / len(_MATRIX_SIZES["cpu"])
        return average([time_kernel(product, device=self.device, budget_seconds=budget)])[0]


# ---- What the host takes for a kernel of a training step
#
# t = (step of small layers - their kernels alone) / kernels    CPUs: beside the kernel itself
# h = step of small layers / kernels                            accelerators: ahead of the kernel
#
# A kernel that is measured alone (`calibrate.measure_kernels`) is called without a module around it
# and without a graph. On accelerators the host does this ahead of the device, and it costs nothing
# while the device is busy (`compute`): layers so small that the device waits for the host show how
# long it takes.


def measure_host(device: torch.device, *, budget_seconds: float = 0.05) -> Times:
    """Return the host's seconds per kernel, from a step of small layers.

    On CPUs beside the kernel itself (`kernel`), on accelerators ahead of it (`launch`).
    """
    linear, step = _small_layers(device)
    if device.type != "cpu":
        seconds = time_call(step, device=device, budget_seconds=budget_seconds)
        return {"launch": average([seconds / (_LAYERS * _KERNELS)])[0]}
    together = time_call(step, device=device, budget_seconds=0.7 * budget_seconds)
    kernels = _kernels_of(linear, torch.ones(_ROWS, _WIDTH))
    alone = time_call(kernels, device=device, budget_seconds=0.3 * budget_seconds)
    return {"kernel": average([max(together / _LAYERS - alone, _LEAST) / _KERNELS])[0]}


def _small_layers(device: torch.device) -> tuple[nn.Linear, Callable[[], None]]:
    # One of the layers, and a forward and backward pass through all of them
    linears = [nn.Linear(_WIDTH, _WIDTH, device=device) for _ in range(_LAYERS)]
    norms = [nn.LayerNorm(_WIDTH, device=device) for _ in range(_LAYERS)]
    pairs = zip(linears, norms, strict=True)
    model = nn.Sequential(
        *(module for linear, norm in pairs for module in (linear, norm, nn.GELU()))
    )
    x = torch.ones(_ROWS, _WIDTH, device=device)

    def step() -> None:
        with torch.inference_mode(False), torch.enable_grad():
            torch.autograd.backward(model(x).sum())
        model.zero_grad()

    return linears[0], step


def _kernels_of(linear: nn.Linear, x: Tensor) -> Callable[[], None]:
    aten, weight, bias = torch.ops.aten, linear.weight.detach(), linear.bias.detach()
    ones = torch.ones(_WIDTH)
    _, mean, deviation = aten.native_layer_norm(x, [_WIDTH], ones, ones, 1e-5)

    def call() -> None:
        with torch.no_grad():
            aten.addmm(bias, x, weight)
            aten.native_layer_norm(x, [_WIDTH], ones, ones, 1e-5)
            aten.gelu(x)
            aten.gelu_backward(x, x)
            aten.native_layer_norm_backward(
                x, x, [_WIDTH], mean, deviation, ones, ones, [True, True, True]
            )
            aten.mm(x, weight)
            aten.mm(x.t(), x)
            aten.sum(x, [0])

    return call


# ---- Memory that is taken anew


def measure_page_faults(device: torch.device) -> float:
    """Return the seconds that a byte costs which is taken anew, above writing it again.

    It is written once and given back. In blocks of 1 MiB, a tenth of a second in all. They are
    taken one after another before they are given back, as in a step: a block that has just been
    given back is still in the processor's cache and takes a fifth less. 0 on devices other than
    CPUs, whose allocator keeps what it has, and where the platform cannot map private memory.
    """
    if device.type != "cpu" or not hasattr(mmap, "MAP_PRIVATE"):
        return 0.0
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    costs = []
    for _ in range(_FAULT_ROUNDS):
        start = time.perf_counter()
        taken = [
            torch.frombuffer(mmap.mmap(-1, _BLOCK_BYTES, flags=flags), dtype=torch.uint8).fill_(1)
            for _ in range(_BLOCKS)
        ]
        middle = time.perf_counter()
        for block in taken:
            block.fill_(1)
        again = time.perf_counter()
        del taken, block
        costs.append((middle - start) + (time.perf_counter() - again) - (again - middle))
    return max(statistics.median(costs), 0.0) / (_BLOCKS * _BLOCK_BYTES)


# ---- Links: collectives in the groups that meshes of these ranks have
#
# Curves are of calls back to back. In a step ranks compute before they exchange, so they come one
# after another, to threads that wait for busy cores. An all_reduce of 1.5 MiB by two ranks of two
# shared cores took 0.7 ms at best, on average 2.7 ms after 3 ms of products, 4.4 ms after 6 to 25
# ms and 5.1 ms after 50 to 100 ms; by four ranks 2.3 ms at best, 11 ms after 3 ms, 14 to 17 ms
# after 10 to 50 ms. But ranks that share cores compute faster while one of them waits, so
# `WaitTimer` times whole rounds. What it measures does not grow with the size.


@contextmanager
def process_groups(groups: Sequence[Group]) -> Iterator[ProcessGroups]:
    """Yield this rank's process group of each kind in `groups`, as long as the context lasts.

    Collective. All ranks make all groups of a kind, those beside their own too, as torch demands.
    """
    made: dict[Group, dist.ProcessGroup] = {}
    try:
        for group in groups:
            parts = ranks_of_groups(group, world_size())
            made[group] = whole_run() if len(parts) == 1 else own_group(parts)
        yield made
    finally:
        destroy_groups([made[group] for group in made if group.size != world_size()])


def collective_timers(
    groups: ProcessGroups,
    *,
    ops: Collection[str],
    device: torch.device,
    budgets: Mapping[Group, float],
) -> dict[CurveKey, CollectiveTimer]:
    """Return a timer of each of `ops` in each kind of group.

    All timers of a group together have the seconds in `budgets`. all_gather and reduce_scatter are
    those that sharded plans run (`communication.collectives`).
    """
    timers = {}
    for group, process_group in groups.items():
        calls = {
            op: make
            for op, make in _collective_calls(group.size, process_group).items()
            if op in ops
        }
        each = budgets[group] / sum(_SHARES.get(op, 1.0) for op in calls)
        for op, make in calls.items():
            # of an all_to_all every rank sends a part of its part to every other
            elements = group.size ** (2 if op == "all_to_all" else 1)
            seconds = each * _SHARES.get(op, 1.0)
            timers[op, group.size, group.stride] = CollectiveTimer(
                make, elements=elements, device=device, budget_seconds=seconds
            )
    return timers


class CollectiveTimer:
    """Times one collective by size of the whole tensor, in all groups of one kind at once.

    That is how they train. `make` is given a tensor of a multiple of `elements` elements. The first
    call finds out how many sizes the time allows; of a size there are up to three tensors, which
    take no more than half of what is free. Making one is collective: it opens connections.
    """

    def __init__(
        self,
        make: Callable[[Tensor], Call],
        *,
        elements: int,
        device: torch.device,
        budget_seconds: float,
    ) -> None:
        self.make, self.elements = make, elements
        self.device, self.budget_seconds = device, budget_seconds
        self.sizes: Sequence[int] = ()
        # NCCL and gloo open connections in the first call of a kind
        time_once(make(torch.ones(elements, device=device)), device=device)
        self._room = free_memory_bytes(device) / 2

    def __call__(self) -> Points:
        """Return the seconds by size, the same on every rank. Collective."""
        points: Points = {}
        deadline = time.perf_counter() + self.budget_seconds
        possible = SIZES if self.device.type == "cpu" else CUDA_SIZES
        sizes = self.sizes or [size for size in possible if 3 * size <= self._room]
        for size, larger in zip(sizes, (*sizes[1:], 0), strict=True):
            numel = max(size // 4 // self.elements, 1) * self.elements  # float32
            whole = torch.ones(numel, device=self.device)
            call = self.make(whole)
            gather(None)  # all ranks have their tensors
            seconds = _time_together(call, device=self.device, deadline=deadline)
            points[float(whole.nbytes)] = seconds
            expected = seconds * larger / size * (_MIN_REPEATS + 1)
            if (
                not self.sizes
                and len(points) >= _MIN_SIZES
                and average([deadline - time.perf_counter()])[0] < expected
            ):
                break
        self.sizes = [int(size) for size in points]
        return points


class WaitTimer:
    """Times what 20 ms of products and an all_reduce take more than both apart.

    The mean, for a step takes the sum of all. Where ranks share cores, a rank that waits leaves
    them to the others, which makes up for much of it. Making one is collective.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, device: torch.device, budget_seconds: float
    ) -> None:
        self.group, self.device, self.budget_seconds = group, device, budget_seconds
        self.message = torch.ones(_WAIT_BYTES // 4, device=device)
        product = average(
            [time_kernel(_products(device, 1), device=device, budget_seconds=0.1 * budget_seconds)]
        )[0]
        self.work = _products(device, max(1, round(_WORK_SECONDS / product)))

    def __call__(self) -> Points:
        """Return the seconds at the size of the message, the same on every rank. Collective."""

        def call() -> None:
            dist.all_reduce(self.message, group=self.group)

        def after_work() -> None:
            self.work()
            call()

        def repeat(part: Call, times: int) -> None:
            for _ in range(times):
                part()

        first = average([time_once(after_work, device=self.device)])[0]
        repeats = int(np.clip(self.budget_seconds / max(2 * first, 1e-6), _WAIT_PARTS, 40))
        of_part, more = repeats // _WAIT_PARTS, 0.0
        for _ in range(_WAIT_PARTS):  # alternately: a machine may change its speed meanwhile
            for sign, part in ((1, after_work), (-1, self.work)):
                call()
                more += sign * time_once(partial(repeat, part, of_part), device=self.device)
        alone = min(time_once(call, device=self.device) for _ in range(repeats))
        return {float(_WAIT_BYTES): max(average([more / (_WAIT_PARTS * of_part) - alone])[0], 0.0)}


def curve(points: Mapping[Any, float], *, wait_seconds: float = 0.0) -> CollectiveCurve:
    """Return the curve through seconds by size.

    A larger message never takes less time: neighbours that say otherwise get their geometric mean
    (pool adjacent violators; Ayer et al., Ann. Math. Statist. 26(4), 1955).
    """
    sizes = sorted(points)
    pools: list[list[float]] = []
    for size in sizes:
        pools.append([math.log(points[size])])
        while len(pools) > 1 and statistics.mean(pools[-2]) > statistics.mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    seconds = tuple(math.exp(statistics.mean(pool)) for pool in pools for _ in pool)
    return CollectiveCurve(tuple(sizes), seconds, wait_seconds)


def fit_link(curves: Mapping[CurveKey, CollectiveCurve], group: Group) -> Link:
    """Return the link whose ring formula gives the smallest and the largest all_reduce.

    Those that were measured in groups like `group`.
    """
    found = curves.get(("all_reduce", group.size, group.stride))
    if found is None:  # one rank: no exchange will ever be estimated
        return Link(latency_seconds=0.0, bandwidth=1.0)
    steps = 2 * (group.size - 1)
    size, seconds = found.sizes[-1] - found.sizes[0], found.seconds[-1] - found.seconds[0]
    if seconds <= 0:  # a single size, or no difference to be seen
        size, seconds = found.sizes[-1], found.seconds[-1]
    return Link(found.seconds[0] / steps, size * steps / (group.size * seconds))


def measure_overlap(
    device: torch.device, *, all_reduce: CollectiveCurve | None, budget_seconds: float
) -> float:
    """Return the share of an all_reduce that runs beside matrix products of about its length.

    The least of several rounds; collective. The message has 4 MiB (CUDA: 256 MiB), less where
    `all_reduce`, the measured curve, says that this takes more than 50 ms; 0 for a single rank,
    which has no curve.
    """
    if all_reduce is None:
        return 0.0
    short = [size for size in all_reduce.sizes if all_reduce.seconds_at(size) <= _OVERLAP_SECONDS]
    most = min(_OVERLAP_BYTES[device.type], free_memory_bytes(device) / 4)
    message = torch.ones(
        int(min(most, max(short, default=all_reduce.sizes[0]))) // 4, device=device
    )

    def exchange() -> None:
        dist.all_reduce(message)

    seconds = _time_together(exchange, device=device, deadline=time.perf_counter())
    product = average(
        [time_call(_products(device, 1), device=device, budget_seconds=0.1 * budget_seconds)]
    )[0]
    compute = _products(device, max(1, round(seconds / product)))

    def both() -> None:
        work: Any = dist.all_reduce(message, async_op=True)
        compute()
        work.wait()

    repeats = int(np.clip(budget_seconds / (6 * seconds), 3, 10))
    times = [
        [time_once(call, device=device) for call in (exchange, compute, both)]
        for _ in range(repeats)
    ]
    hidden = min(
        (alone + computing - together) / min(alone, computing)
        for alone, computing, together in times
    )
    return float(np.clip(average([hidden])[0], 0.0, 1.0))


def _collective_calls(ranks: int, group: dist.ProcessGroup) -> dict[str, Callable[[Tensor], Call]]:
    def part(whole: Tensor) -> Tensor:
        return torch.ones(whole.numel() // ranks, device=whole.device)

    def collect(whole: Tensor) -> Call:
        local = part(whole)
        # FSDP2 allocates the result each time
        return lambda: all_gather_into(torch.empty_like(whole), local, group=group)

    def reduce(whole: Tensor) -> Call:
        local = part(whole)
        return lambda: reduce_scatter_into(local, whole, group=group)

    def exchange(whole: Tensor) -> Call:
        sent, received = part(whole), part(whole)
        return lambda: dist.all_to_all_single(received, sent, group=group)

    def pass_on(whole: Tensor) -> Call:
        """Return a call that sends from every rank to the next one of its group."""
        received, rank = torch.empty_like(whole), dist.get_rank(group)
        send = dist.P2POp(dist.isend, whole, group=group, group_peer=(rank + 1) % ranks)
        receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % ranks)

        def call() -> None:
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()

        return call

    return {
        "all_reduce": lambda whole: lambda: dist.all_reduce(whole, group=group),
        "reduce_scatter": reduce,
        "all_gather": collect,
        "broadcast": lambda whole: lambda: dist.broadcast(whole, group=group, group_src=0),
        "all_to_all": exchange,
        "send_recv": pass_on,
    }


def _products(device: torch.device, count: int) -> Call:
    n = _MATRIX[device.type]
    left, right = torch.rand(2, n, n, device=device)

    def compute() -> None:
        for _ in range(count):
            left @ right

    return compute


def _time_together(call: Call, *, device: torch.device, deadline: float) -> float:
    # The median seconds of a collective call, the same result on every rank. Every rank makes the
    # same number of calls. A device gets short ones back to back: it would wait for the host else,
    # as it does not in a step.
    first = time_once(call, device=device)
    first, left = average([first, deadline - time.perf_counter()])
    repeats = int(np.clip(left / 4 / max(first, 1e-6), _MIN_REPEATS, 20))
    at_once = 1
    if device.type != "cpu":
        at_once = int(np.clip(_BACK_TO_BACK_SECONDS / max(first, 1e-6), 1, repeats))

    def calls() -> None:
        for _ in range(at_once):
            call()

    rounds = max(repeats // at_once, _MIN_REPEATS)
    times = [time_once(calls, device=device) / at_once for _ in range(rounds)]
    return float(average([float(np.median(times))])[0])


# ---- Kernels of a graph


@kept_global_state()
def measure_kernels(
    graph: OpGraph,
    *,
    device: torch.device | str = "cpu",
    budget_seconds: float = 2.0,
    known: Collection[KernelKey] = (),
) -> dict[KernelKey, float]:
    """Return the seconds of the graph's kernels on `device` at ``graph.batch_size``.

    Collective: all ranks measure the same kernels at the same time, those expected to cost most
    first. It ends when `budget_seconds` are over, or up to twice that later, once what is left is
    expected to be less than a tenth of the step. Left out are kernels that cannot be made outside
    the model, for which formulas stand in (`estimate_kernel_seconds`), and those that are `known`.
    """
    device = torch.device(device)
    start = time.perf_counter()
    by_cost = _by_cost(graph)
    ahead = sum(cost for _, cost in by_cost.values())
    enough = _SMALL_SHARE * ahead
    seconds: dict[KernelKey, float] = {}
    for key, (kernel, cost) in by_cost.items():
        ahead -= cost
        if key in known:
            continue
        call = _try_call(kernel, device)
        possible, spent = average([float(call is not None), time.perf_counter() - start])
        if spent >= budget_seconds * (1 if ahead + cost < enough else _LATEST):
            break
        if possible == 1.0 and call is not None:
            seconds[key] = time_kernel(call, device=device, budget_seconds=0.0, max_repeats=2)
            # cuDNN's recurrent layers launch hundreds of kernels in a call, which ends with them
            if device.type != "cpu" and (issue := time_issue(call, device=device)) > _MANY_LAUNCHES:
                seconds[key] = max(seconds[key], issue)
    return dict(zip(seconds, average([*seconds.values()]), strict=True))


def _by_cost(graph: OpGraph) -> dict[KernelKey, tuple[Kernel, float]]:
    # Distinct kernels and their expected seconds, most seconds altogether first. Expected by a
    # rough roofline.
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
    return {
        key: (kernels[key], totals[key])
        for key in sorted(totals, key=lambda key: (-totals[key], key))
    }


def _try_call(kernel: Kernel, device: torch.device) -> Callable[[], None] | None:
    # A call of the kernel that has worked once; None where it cannot be made
    try:
        call = make_call(kernel, device)
        call()
    except (ValueError, RuntimeError, IndexError, TypeError):
        return None
    synchronize(device)
    return call
