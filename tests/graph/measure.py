"""What a real step on real CPU tensors does, measured without the code under test."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_topt.graph.op_graph import Kernel, Op


def flops_of(op: Op, direction: str, batch_size: float) -> float:
    """Floating-point operations of an operator in one direction."""
    kernels: tuple[Kernel, ...] = getattr(op, direction)
    return sum(kernel.flops.at(batch_size) * kernel.count for kernel in kernels)


def run_step(module: Any, batch: Any) -> Tensor:
    """The loss of one training step, with `log` silent."""
    module.log = module.log_dict = lambda *args, **kwargs: None
    takes_index = type(module).__name__ != "MLP"
    output = module.training_step(batch, 0) if takes_index else module.training_step(batch)
    return output["loss"] if isinstance(output, dict) else output


def allocator_peaks(module: nn.Module, batch: Any) -> tuple[int, int]:
    """Highest bytes allocated since the start of the step in its forward and in its backward, by
    torch's profiler.

    On one thread: kernels with several take memory for each.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _allocator_peaks(module, batch)
    finally:
        torch.set_num_threads(threads)


def _allocator_peaks(module: nn.Module, batch: Any) -> tuple[int, int]:
    run_step(module, batch).backward()
    module.zero_grad(set_to_none=True)
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True
    ) as profiler:
        with record_function("FORWARD"):
            loss = run_step(module, batch)
        with record_function("BACKWARD"):
            loss.backward()
    events: list[tuple[int, int]] = []
    spans: dict[str, tuple[int, int]] = {}

    def walk(event: Any) -> None:
        if event.tag == _EventType.Allocation:
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
        spans[event.name] = (event.start_time_ns, event.end_time_ns)
        for child in event.children:
            walk(child)

    for event in profiler.profiler.kineto_results.experimental_event_tree():
        walk(event)
    peaks, live = {"FORWARD": 0, "BACKWARD": 0}, 0
    for time, change in sorted(events):
        if time < spans["FORWARD"][0]:
            continue
        live += change
        for name in peaks:
            if spans[name][0] <= time <= spans[name][1]:
                peaks[name] = max(peaks[name], live)
    return peaks["FORWARD"], peaks["BACKWARD"]


def saved_bytes(module: nn.Module, batch: Any) -> int:
    """Bytes of the distinct storages that autograd saves, without parameters and the batch."""
    from lightning_topt.graph.structures import tensors_in

    seen = {
        t.untyped_storage()._cdata
        for t in (*module.parameters(), *module.buffers(), *tensors_in(batch))
    }
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # the graph lives to the end of this line, so no address is used twice
        run_step(module, batch)
    return sum(sizes.values())


class BlockMemory(TorchDispatchMode):
    """Live bytes of activations on real tensors: the highest of each block, and afterwards."""

    def __init__(self, module: nn.Module, outside: list[Tensor], blocks: list[str]) -> None:
        super().__init__()
        self.outside = {
            t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers(), *outside)
        }
        self.live: dict[int, int] = {}
        self.references: dict[int, Any] = {}
        self.current = ""
        self.forward_peaks: dict[str, int] = {}
        for name in blocks:
            module.get_submodule(name).register_forward_pre_hook(
                lambda *_, name=name: self.enter(name)
            )
            module.get_submodule(name).register_forward_hook(lambda *_: self.enter(""))

    def enter(self, name: str) -> None:
        self.current = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.track(tensor)
        self.forward_peaks[self.current] = max(
            self.forward_peaks.get(self.current, 0), sum(self.live.values())
        )
        return out

    def track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.live and key not in self.outside:
            self.live[key] = storage.nbytes()
            self.references[key] = weakref.ref(
                storage, lambda _: (self.live.pop(key), self.references.pop(key))
            )
