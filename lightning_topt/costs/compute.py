"""Seconds of kernels on one device: a measurement where there is one, else the roofline.

    equation                                                function
    t = max((flops + f) / F, bytes / M) + o                 roofline_seconds [1]
    t = max(flops (1 + s / S) / A, bytes / M) + o           of attention on accelerators [3]
    t(B) = measured(B0) * roofline(B) / roofline(B0)        estimate_kernel_seconds
    device T = sum of t and of collectives, host H = h n
    T = T + H             where host and device are one     estimate_pass_seconds (CPUs)
    T = (T^q + H^q)^(1/q) where the host runs ahead         host_bound_seconds [2]

[1] Williams, Waterman & Patterson, CACM 52(4), 2009 (roofline); f is Hockney's half-performance
length, 1988. [2] benchmarks/prediction/gpu_cost_model.py. [3] Dao, arXiv 2307.08691, figures 4 to
6: causal attention of 2,048 positions runs at three quarters of the rate of 16,384.

The host issues kernels while the device runs earlier ones: a pass takes as long as the slower of
the two, and a little more where they are close (q). h is `Device.launch_seconds` on accelerators,
`Device.framework_seconds` on CPUs. F FLOP/s of the dtype, f FLOPs of a matrix product that runs at
half of F (`Device.half_rate_flops`; 0 for what is no product), A FLOP/s of attention over many
positions (`Device.attention_flops`), S positions and s those at half of A, M memory bandwidth in
bytes/s, o seconds a kernel costs at least, n kernels and collectives, B batch size per rank, B0 the
batch size at which the kernel was measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_topt.basics import once_per_object
from lightning_topt.costs.cluster import Device
from lightning_topt.graph.op_graph import Kernel, OpGraph

KernelKey = tuple[str, str]  # name, JSON of the arguments
SHARPNESS = 4.0  # q
# Launches that the host takes for a kernel of a forward pass that is run again: torch's checkpoint
# calls Python for every tensor that is kept, and again where backward asks for it. On an H100 the
# host took 2.6 (ConvNeXt) to 4.4 (GPT) in bfloat16, 4 in the median of six models and dtypes.
RECOMPUTED_LAUNCHES = 4.0
# The same for a change of dtype, which autocast and autograd make without Python: bfloat16 added 4
# and 11 us for each to the host of a GPT and a ConvNeXt, whose other kernels took it 31
# (benchmarks/results/gpu_report.md).
CAST_LAUNCHES = 0.25
HALF_RATE_POSITIONS = 600  # s
_ENDLESS = 2**40  # positions
ATTENTION_SHARE = 0.5  # of F, where A is not known [3]
WIDE_HEAD, NARROW_HEADS = 128, 0.25  # heads of 64 run at 0.84 of the rate of 128 [3]
DTYPES = ("float64", "float32", "float16", "bfloat16")


def kernel_key(kernel: Kernel) -> KernelKey:
    """Return what identifies a kernel's measurement: its name and arguments."""
    return kernel.name, json.dumps(kernel.arguments, sort_keys=True)


def roofline_seconds(kernel: Kernel, *, batch_size: float, device: Device) -> float:
    """Return the seconds of one call at `batch_size` samples.

    Bound by arithmetic or by memory, whichever takes longer.
    """
    flops = max(kernel.flops.at(batch_size), 0.0)
    positions, width = attention_sizes(kernel)
    rate = device.flops_of(kernel_dtype(kernel))
    if positions:
        rate = device.attention_flops or ATTENTION_SHARE * rate
        rate *= float(min(width / WIDE_HEAD, 1.0) ** NARROW_HEADS)
        arithmetic = flops * (1 + HALF_RATE_POSITIONS / positions) / rate
    else:
        arithmetic = (flops + device.half_rate_flops * (flops > 0)) / rate
    traffic = max(kernel.bytes.at(batch_size), 0.0) / device.memory_bandwidth
    return max(arithmetic, traffic) + device.op_overhead_seconds


@once_per_object
def kernel_dtype(kernel: Kernel) -> str:
    """Return the first floating-point dtype among the arguments; float32 when there is none."""
    return next((text for text in _texts(kernel.arguments) if text in DTYPES), "float32")


@once_per_object
def attention_sizes(kernel: Kernel) -> tuple[int, int]:
    """Return positions and the width of a head of attention in half precision; else zeros."""
    if "_scaled_dot_product_" not in kernel.name or kernel_dtype(kernel) == "float32":
        return 0, 0
    shapes = [each["tensor"][0] for each in kernel.arguments["args"] if _is_tensor(each)]
    # keys come after queries, in backward after the gradient of the output too
    place = 2 if "backward" in kernel.name else 1
    if len(shapes) <= place:  # a bound of kernels on slices, which knows no shapes
        return _ENDLESS, WIDE_HEAD
    keys = shapes[place]
    return int(keys[-2]), int(keys[-1])


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Mapping) and "tensor" in value


def estimate_kernel_seconds(
    kernel: Kernel,
    *,
    batch_size: float,
    device: Device,
    measured: Mapping[KernelKey, float] | None = None,
    measured_batch_size: float | None = None,
) -> float:
    """Return the seconds of one call at `batch_size`.

    `measured` holds seconds by `kernel_key` at `measured_batch_size` samples (None: at
    `batch_size`); a measurement beats the formula and is scaled by the ratio of the rooflines.
    """
    estimate = roofline_seconds(kernel, batch_size=batch_size, device=device)
    seconds = measured.get(kernel_key(kernel)) if measured else None
    if seconds is None:
        return estimate
    if measured_batch_size is None or measured_batch_size == batch_size:
        return seconds
    reference = roofline_seconds(kernel, batch_size=measured_batch_size, device=device)
    return seconds * estimate / reference if reference > 0 else seconds


def estimate_kernels_seconds(kernels: Iterable[Kernel], **options: Any) -> float:
    """Return the seconds of all calls one after another; see `estimate_kernel_seconds`."""
    return sum(kernel.count * estimate_kernel_seconds(kernel, **options) for kernel in kernels)


def estimate_pass_seconds(
    kernels: Iterable[Kernel],
    *,
    device: Device,
    collectives: Sequence[float] = (),
    launches: float = 1.0,
    more_launches: float = 0.0,
    **options: Any,
) -> float:
    """Return the seconds of one pass of a block whose kernels are `kernels`.

    Forward or backward, with the host that issues them. Give whole blocks: a host that is late for
    one operator may be ahead again at the next.

    Args:
        kernels: in any order.
        device: that runs them.
        collectives: seconds of each of those in the pass, which later kernels wait for.
        launches: what the host takes for a kernel, in launches.
        more_launches: what it does besides.
        options: of `estimate_kernel_seconds`.
    """
    kernels = list(kernels)
    seconds = estimate_kernels_seconds(kernels, device=device, **options)
    calls = sum(kernel.count for kernel in kernels)
    # kernels that run again are measured with their casts
    own = calls * launches if launches != 1 else launches_of(kernels)
    host = (own + len(collectives) * launches + more_launches) * device.launch_seconds
    ahead = host_bound_seconds(seconds + sum(collectives), host_seconds=host)
    return ahead + calls * device.framework_seconds


def launches_of(kernels: Iterable[Kernel]) -> float:
    """Return what the host takes to issue `kernels` once, in launches."""
    return sum(
        kernel.count * (CAST_LAUNCHES if kernel.name.startswith("aten._to_copy.") else 1.0)
        for kernel in kernels
    )


@once_per_object
def launches_of_step(graph: OpGraph) -> float:
    """Return what the host takes to issue all kernels of a step once, in launches."""
    return sum(launches_of((*op.forward, *op.backward)) for op in graph.ops)


def host_bound_seconds(
    device_seconds: float, *, host_seconds: float, sharpness: float = SHARPNESS
) -> float:
    """Return the seconds of work that a host issues ahead of a device.

    It takes the device `device_seconds`, and the host `host_seconds` to issue.
    """
    longer = max(device_seconds, host_seconds)
    if longer <= 0:
        return 0.0
    # so that no power is too small or too large
    shares = device_seconds / longer, host_seconds / longer
    return longer * float(sum(share**sharpness for share in shares) ** (1 / sharpness))


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value.removeprefix("torch.")
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, Iterable):
        for item in value:
            yield from _texts(item)
