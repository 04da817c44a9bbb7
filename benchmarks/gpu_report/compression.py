"""Part 7: what each method of exchange costs a device, on one bucket of 25 MiB.

The group has one rank (NCCL on CUDA): nothing travels, so that seconds are those of selection,
packing, decoding and the residual. Beside them stand the kernels that a bucket launches and the
waits of the host for the device, with the lines of code that wait; the same for an outer step of
methods that average parameters. `average_seconds` is one step through the exchange's own thread.
Rows "of 8" are of a fake group of eight, in which a rank decodes what eight send.
"""

from __future__ import annotations

import collections
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common import ROOT
from benchmarks.gpu_report.reporting import (
    Report,
    device_seconds,
    host_seconds,
    in_own_process,
    memory_columns,
    reset_peaks,
    run_part,
    synchronize,
)
from lightning_topt.communication import BoundedLoss, GradientMethod, LocalMethod, OuterSteps
from lightning_topt.communication.bucket import Bucket, BucketLayout, ExchangeContext, Stages
from lightning_topt.communication.exchange_method import exempt_names, method_classes
from lightning_topt.communication.hook import CompressedExchange
from lightning_topt.communication.topology import Topology, make_groups

SHAPES = [(1024, 4096), (1024,), (1024, 1024), (4096,), (1024, 1280)]  # 25 MiB of float32
SMALL_SHAPES = [(64, 256), (64,), (64, 64), (256,), (64, 80)]
ALONE, OF_EIGHT = Topology(1, 1, 0), Topology(8, 1, 0)
_WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize", "CtxSynchronize")
_LEAST_LEFT = 3.0
_made = itertools.count()  # buckets are exchanged in the same order on all ranks


class Matrices(nn.Module):
    """Parameters of some shapes, without a forward pass."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            kind = "weight" if len(shape) > 1 else "bias"
            self.register_parameter(f"{kind}{index}", nn.Parameter(torch.zeros(shape)))


def run(report: Report) -> None:
    """Time every method, alone and as one of eight, each in a process of its own."""
    # What a fake group does not fill may be an index out of range, and end the device's context;
    # and the communicators of all methods take long to destroy.
    in_own_process(report, "one rank", _alone)
    in_own_process(report, "one of eight", _of_eight)


def _alone(report: Report) -> None:
    device = torch.device("cuda", 0) if report.device.type == "cuda" else report.device
    shapes = SMALL_SHAPES if report.quick else SHAPES
    with one_rank(device):
        for name, kind in method_classes().items():
            if report.left() < _LEAST_LEFT:
                report.note("not begun", method=name, left=report.left())
                continue
            method = kind()
            with report.attempt(name) as row:
                if isinstance(method, GradientMethod):
                    bucket_columns(row, method, shapes, device, ALONE)
                elif isinstance(method, LocalMethod):
                    outer_columns(row, method, shapes, device)
        # The thread and its streams come last: a thread that hangs takes no figures with it.
        for name, kind in method_classes().items():
            method = kind()
            if isinstance(method, GradientMethod) and report.left() > _LEAST_LEFT:
                with report.attempt(f"{name}, through the thread") as row:
                    thread_columns(row, method, shapes, device)


def _of_eight(report: Report) -> None:
    device = torch.device("cuda", 0) if report.device.type == "cuda" else report.device
    shapes = SMALL_SHAPES if report.quick else SHAPES
    with eight_fake_ranks():
        for name, kind in method_classes().items():
            method, on_collectives = kind(), not issubclass(kind, BoundedLoss)
            is_next = on_collectives and report.left() > _LEAST_LEFT
            if is_next and isinstance(method, GradientMethod):
                with report.attempt(f"{name}, of 8") as row:
                    bucket_columns(row, method, shapes, device, OF_EIGHT)


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Make this process the one rank of a group."""
    given: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=dist.TCPStore("127.0.0.1", 0, 1, is_master=True),
        rank=0,
        world_size=1,
        **given,
    )
    try:
        yield
    finally:
        if device.type != "cuda":  # there its process ends instead
            dist.destroy_process_group()


@contextmanager
def eight_fake_ranks() -> Iterator[None]:
    """Make this process a rank of a group that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=OF_EIGHT.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def bucket_columns(
    row: dict[str, Any],
    method: GradientMethod,
    shapes: list[tuple[int, ...]],
    device: torch.device,
    topology: Topology,
) -> None:
    """Add what the exchange of one bucket takes."""
    legal = method.choices(topology)
    row["is_legal"] = bool(legal)
    method = legal[0] if legal else method
    with bucket_call(method, shapes, device, topology) as call:
        columns_of_exchange(row, call, device, nbytes=4 * sum(map(math.prod, shapes)))
    row["used_after_close_bytes"] = memory_columns(device).get("used_bytes")


@contextmanager
def bucket_call(
    method: GradientMethod, shapes: list[tuple[int, ...]], device: torch.device, topology: Topology
) -> Iterator[Callable[[], None]]:
    """Give the exchange of one bucket, without the exchange's thread. A collective call."""
    groups = make_groups(
        topology,
        num_stages=method.num_stages(topology),
        hierarchical=method.sums_in_nodes(topology),
        timeout_seconds=10,
    )
    default = dist.distributed_c10d._get_default_store()
    store = dist.PrefixStore(f"gpu_report/{method.name}/{next(_made)}", default)
    exchange = method.make_exchange(ExchangeContext(topology, groups, device, 10, store))
    exchange.warm_up()
    layout = layout_of(Matrices(shapes), method)
    generator = torch.Generator(device).manual_seed(0)
    gradient = torch.randn(sum(layout.numels), device=device, generator=generator)
    buffer = gradient.clone()
    # All methods are past the steps in which they send everything.
    bucket = Bucket(0, buffer, layout, True, 1000)

    def call() -> None:
        buffer.copy_(gradient)
        if not exchange.prepare(bucket):
            exchange.relayout()
        run_stages(exchange.stages(bucket))

    try:
        yield call
    finally:
        exchange.close()
        groups.destroy()


def outer_columns(
    row: dict[str, Any], method: LocalMethod, shapes: list[tuple[int, ...]], device: torch.device
) -> None:
    """Add what an outer step takes."""
    module = Matrices(shapes).to(device)
    outer = OuterSteps(module, method)
    generator = torch.Generator(device).manual_seed(0)
    updates = [
        1e-3 * torch.randn(parameter.shape, device=device, generator=generator)
        for parameter in module.parameters()
    ]

    def call() -> None:
        with torch.no_grad():
            torch._foreach_add_(list(module.parameters()), updates)
        outer.pending_steps = 1
        outer.synchronize()

    columns_of_exchange(row, call, device, nbytes=sum(update.nbytes for update in updates))
    outer.close()
    row["used_after_close_bytes"] = memory_columns(device).get("used_bytes")


def thread_columns(
    row: dict[str, Any], method: GradientMethod, shapes: list[tuple[int, ...]], device: torch.device
) -> None:
    """Add what one step of the exchange takes that training uses, with its thread and streams."""
    module = Matrices(shapes).to(device)
    exchange = CompressedExchange(module, method, topology=ALONE, device=device, timeout_seconds=10)
    gradients = [torch.randn_like(parameter) for parameter in module.parameters()]

    def call() -> None:
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        exchange.average()

    try:
        for _ in range(3):
            call()
        exchange.statistics()
        columns_of_call(row, call, device)
        row["average_seconds"] = row.pop("call_seconds")
        found = exchange.statistics()
        row["exchange_seconds"] = found.exchange_seconds / found.steps
    finally:
        exchange.close()
    row["used_after_close_bytes"] = memory_columns(device).get("used_bytes")


# ---- one call ------------------------------------------------------------------------------------


def columns_of_exchange(
    row: dict[str, Any], call: Callable[[], None], device: torch.device, *, nbytes: int
) -> None:
    """Add what the first and the later exchanges of `nbytes` take."""
    row["bucket_bytes"] = nbytes
    start = time.perf_counter()
    call()
    synchronize(device)
    row["first_seconds"] = time.perf_counter() - start
    reset_peaks(device)
    columns_of_call(row, call, device)
    row["gb_per_s"] = nbytes / row["call_seconds"] / 1e9
    row.update(memory_columns(device))


def columns_of_call(row: dict[str, Any], call: Callable[[], None], device: torch.device) -> None:
    """Add seconds, launches, waits and the lines that wait."""
    row["call_seconds"] = device_seconds(call, device, least_seconds=2e-2, batches=3)
    row["host_seconds"] = host_seconds(call, device, calls=5)
    if device.type == "cuda":
        with waiting_lines(row):
            call()
    with counted_events(row, device):
        call()


@contextmanager
def waiting_lines(row: dict[str, Any]) -> Iterator[None]:
    """Add the lines of code at which torch makes the host wait for the device, with counts."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = collections.Counter(
        f"{short(each.filename)}:{each.lineno}"
        for each in caught
        if "synchroniz" in str(each.message)
    )
    row["waits"] = sum(lines.values())
    row["waiting_lines"] = "; ".join(f"{line} x {n}" for line, n in lines.most_common(6))


def short(filename: str) -> str:
    """Return a file's name below this repository, or its last two parts."""
    path = Path(filename)
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path(*path.parts[-2:]))


@contextmanager
def counted_events(
    row: dict[str, Any], device: torch.device, *, trace: Path | None = None
) -> Iterator[None]:
    """Add the kernels launched within, copies to the host, and how often the host waits or reads.

    `trace`: a file for the profile itself.
    """
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiled:
        yield
        synchronize(device)
    if trace is not None:
        profiled.export_chrome_trace(str(trace))
    names = collections.Counter(str(event.name) for event in profiled.events() or ())
    row["reads"] = names["aten::_local_scalar_dense"]  # of a tensor's value
    if not cuda:
        row["operators"] = sum(n for name, n in names.items() if name.startswith("aten::"))
        return
    row["launches"] = sum(n for name, n in names.items() if "LaunchKernel" in name)
    row["device_events"] = sum(
        event.device_type == DeviceType.CUDA for event in profiled.events() or ()
    )
    row["copies"] = sum(n for name, n in names.items() if name.startswith("cudaMemcpy"))
    # That of the profile itself is one of them.
    row["runtime_waits"] = sum(n for name, n in names.items() if name.endswith(_WAITS)) - 1


# ---- a bucket without DDP ------------------------------------------------------------------------


def layout_of(module: nn.Module, method: GradientMethod) -> BucketLayout:
    """Return all parameters of `module` one after the other."""
    named = dict(module.named_parameters())
    numels = [parameter.numel() for parameter in named.values()]
    exempt = exempt_names(module, method.exempt_rules or ())
    return BucketLayout(
        tuple(named),
        tuple(sum(numels[:index]) for index in range(len(numels))),
        tuple(numels),
        tuple(parameter.shape for parameter in named.values()),
        tuple(name in exempt for name in named),
    )


def run_stages(stages: Stages) -> Tensor:
    """Run one bucket to its end."""
    try:
        while True:
            next(stages).wait()
    except StopIteration as stop:
        result: Tensor = stop.value
        return result


def main() -> None:
    run_part("compression", run, __doc__, forks=True)


if __name__ == "__main__":
    main()
