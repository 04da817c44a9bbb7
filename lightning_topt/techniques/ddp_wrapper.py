"""torch's DistributedDataParallel (DDP) around a module: buckets, ignored parameters, user hook.

[Note: buckets] DDP sends a bucket once it is full. With torch's 25 MiB a model of 15 M parameters
sends nearly nothing before the middle of its backward pass. A quarter of all goes after its end,
which a slow network cannot hide. With 16 buckets it hides all but a sixteenth. Inside one node
there is little to hide, and more calls wait for one another (benchmarks/results/bucket_sizes.md).
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from lightning_topt.communication.exchange_method import averaged_parameters
from lightning_topt.communication.topology import Topology

if TYPE_CHECKING:
    from lightning_topt.techniques.technique import RunOptions

_BUCKETS = 16
# torch 2.13 `distributed.py`, `_BucketCapacityConfig`
_SMALLEST_BUCKET, _TORCH_BUCKET = 1 << 20, 25 << 20
_MESSAGE_BYTES = 250 << 20  # of a broadcast of buffers
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # torch's name for it, an attribute of the module
_BUCKET_ARGUMENTS = {"bucket_cap_mb", "bucket_cap_mb_list"}


def names_to_ignore(module: nn.Module) -> frozenset[str]:
    """Return the parameters and buffers that the user keeps out of DDP: each rank has its own."""
    return frozenset(getattr(module, _IGNORED, ()))


def bucket_limits(gradients: int, topology: Topology | None = None) -> list[int]:
    """Return the bytes from which a bucket of DDP is full, for so many bytes of gradients.

    On several nodes of `topology` that is a sixteenth of all, at least 1 MiB. On one node, and if a
    sixteenth is more, it is torch's own pair: 1 MiB for the first bucket, 25 MiB for the others.
    """
    size = max(gradients // _BUCKETS, _SMALLEST_BUCKET)
    if size < _TORCH_BUCKET and topology is not None and topology.num_nodes > 1:
        return [size]
    return [_SMALLEST_BUCKET, _TORCH_BUCKET]


def bytes_of_buckets(ddp: DistributedDataParallel) -> int:
    """Return the bytes of the buckets of `ddp` that are not its gradients' own memory."""
    if ddp.gradient_as_bucket_view:
        return 0
    return sum(p.nbytes for p in ddp._module_parameters if p.requires_grad)


def wrap_in_ddp(
    module: nn.Module, options: RunOptions, *, device: torch.device, ignored: Collection[str] = ()
) -> DistributedDataParallel:
    """Return `module` in torch's DDP, without the parameters named `ignored`.

    Args:
        module: on `device` already
        options: of the run, with arguments of DDP; unless these set bucket sizes, those of
            `bucket_limits` are taken, see [Note: buckets]
        device: where it runs
        ignored: names of parameters that DDP leaves alone
    """
    arguments, device_ids = options.ddp, None if device.type == "cpu" else [device.index]
    if not _BUCKET_ARGUMENTS & set(arguments):
        averaged = averaged_parameters(module, {*names_to_ignore(module), *ignored})
        # DDP says what is wrong with lazy ones.
        nbytes = sum(p.nbytes for p in averaged.values() if not is_lazy(p))
        limits = bucket_limits(nbytes, options.topology)
        if len(limits) == 1:
            arguments = {**arguments, "bucket_cap_mb": limits[0] / (1 << 20)}
    # the module tells DDP what to ignore, while it is made
    with _ignoring(module, ignored):
        ddp = DistributedDataParallel(module, device_ids=device_ids, **arguments)
    if options.hook is not None:
        ddp.register_comm_hook(options.hook_state, options.hook)
    return ddp


def send_buffers(buffers: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give all ranks of `group` the buffers of its first one, as DDP does. A collective call."""
    if sent := [buffer for buffer in buffers if buffer.numel()]:
        ranks: Any = group or dist.group.WORLD
        dist._broadcast_coalesced(ranks, sent, _MESSAGE_BYTES, 0)  # type: ignore[attr-defined]


@contextmanager
def _ignoring(module: nn.Module, names: Collection[str]) -> Generator[None]:
    # Tell DDP what to ignore, through an attribute of the module; the user's value comes back
    before = dict(vars(module))
    if names:
        setattr(module, _IGNORED, [*names_to_ignore(module), *names])
    try:
        yield
    finally:
        if names and _IGNORED in before:
            setattr(module, _IGNORED, before[_IGNORED])
        elif names:
            delattr(module, _IGNORED)
