"""All-gather and reduce-scatter as fast as each backend allows.

gloo's own `reduce_scatter_tensor` is one all-reduce per rank, and its `all_gather_into_tensor`
copies too often. For 100 MB on two ranks of one machine they took 111 ms and 92 ms. Exchanging
slices and adding them locally takes 56 ms, one broadcast per slice 28 ms. On every other backend
these functions are torch's.

A process group may have one backend per type of device ("cpu:gloo,cuda:nccl"): `backend_of` says
which one runs a tensor, `travel_device` where tensors must be that any group takes.

FSDP2 takes the same two as objects (`AllGather`, `ReduceScatter`). What is in flight anywhere in
the package is a `Waitable`.

Small values travel by `values_of_group`, those that are mostly equal by `values_if_different`. The
state of all ranks comes into one checkpoint by `gather_state`, and `own_state` gives each rank its
part of what was saved. Ranks that have slices of parameters (`Slices`) save the state of full
parameters: `unsharded_state`, and `sharded_state` on the way back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

# received slices of a reduce-scatter are added so many elements at a time: bounds its memory
CHUNK_ELEMENTS = 1 << 20
T = TypeVar("T")
State = dict[str, dict[str, Tensor]]  # kind -> parameter name -> (numel,) in memory order

# torch 2.13 renamed them, and warns of the old names
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def backend_of(device: torch.device, group: dist.ProcessGroup | None = None) -> str:
    """Return the backend of `group` for tensors of `device`; an empty text where it has none."""
    pairs = (part.split(":") for part in dist.get_backend_config(group).split(","))
    return dict(pairs).get(device.type, "")


def travel_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return where tensors must be that `group` sends and receives.

    Host memory if it takes that, as gloo does (whose sends take nothing else); NCCL takes memory of
    the rank's device only.
    """
    host = torch.device("cpu")
    if backend_of(host, group):
        return host
    return torch.device("cuda", torch.cuda.current_device())


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work; nothing to wait for on CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def mark(device: torch.device) -> Any:
    """Mark the place that the calling thread has reached, for `seconds_between`.

    On CUDA that is an event of the current stream, for which the host does not wait.
    """
    if device.type != "cuda":
        synchronize(device)
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Any, stop: Any) -> float:
    """Return the seconds from one `mark` to another; the host waits for both."""
    if isinstance(start, float):
        return float(stop - start)
    start.synchronize()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def all_gather_into(
    output: Tensor, local: Tensor, *, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Concatenate every rank's `local` (n,) into `output` (world size * n,) on every rank.

    `local` may be this rank's slice of `output`. Returns something to `wait` for with `async_op`,
    else None.
    """
    if backend_of(output.device, group) != "gloo":
        return _all_gather_single(output, local, group=group, async_op=async_op)
    # gloo: one broadcast per slice
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    slices = output.view(world_size, -1)
    if slices[rank].data_ptr() != local.data_ptr():
        slices[rank].copy_(local.view(-1))
    pending = Pending(
        [
            dist.broadcast(slices[owner], group=group, group_src=owner, async_op=True)
            for owner in range(world_size)
        ]
    )
    if async_op:
        return pending
    pending.wait()
    return None


def ring_all_gather(rows: Tensor, local: Tensor, *, group: dist.ProcessGroup | None = None) -> Any:
    """Gather every rank's `local` (n,) into `rows` (world size, n), around a ring.

    Each rank sends only to the next, so a link between nodes carries (world size - 1) * n; the
    broadcasts of `all_gather_into` carry more. Returns something to `wait` for.
    """
    if backend_of(rows.device, group) == "gloo":
        return dist.all_gather(list(rows), local, group=group, async_op=True)
    return _all_gather_single(rows.view(-1), local, group=group, async_op=True)


def reduce_scatter_into(
    output: Tensor,
    whole: Tensor,
    *,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Sum or average `whole` (world size * n,) over ranks into each rank's `output` (n,).

    On gloo the terms are added in rank order, through buffers of `CHUNK_ELEMENTS` per rank.

    Raises:
        ValueError: for another `op` than SUM or AVG, on gloo.
    """
    if backend_of(output.device, group) != "gloo":
        _reduce_scatter_single(output, whole, op=op, group=group)
        return
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise ValueError(f"reduce_scatter_into on gloo sums or averages; got {op}")
    # gloo: exchange pieces of all slices, add each piece while the next is on its way
    world_size = dist.get_world_size(group)
    rows = whole.view(world_size, -1)
    slices = torch.split(rows, CHUNK_ELEMENTS, dim=1)
    received = torch.empty(slices[0].numel(), dtype=whole.dtype, device=whole.device)
    sent = torch.empty_like(received) if len(slices) > 1 else whole.view(-1)
    for part, total in zip(slices, torch.split(output, CHUNK_ELEMENTS), strict=True):
        size = part.numel()
        if len(slices) > 1:
            sent[:size].view_as(part).copy_(part)
        # The form with lists copies both ways once more, and holds the copies for a while.
        dist.all_to_all_single(received[:size], sent[:size], group=group)
        torch.sum(received[:size].view_as(part), dim=0, out=total)
        if op == dist.ReduceOp.AVG:
            total.div_(world_size)


def ring_bytes(nbytes: int, ranks: int, *, passes: int) -> int:
    """Return what a rank sends of `nbytes`: in a gather (1 of `passes`) or an all-reduce (2)."""
    # each pass sends (W - 1) / W of the whole
    return passes * (ranks - 1) * nbytes // ranks


class Waitable(Protocol):
    """Something in flight; ``torch.distributed.Work`` is one."""

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once, or raise."""

    def wait(self) -> object:
        """Block until it is done; raise where it failed."""


class PendingResult(ABC, Generic[T]):
    """A `Waitable` with a result, to be asked for once, after `wait`."""

    @abstractmethod
    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""

    @abstractmethod
    def wait(self) -> None:
        """Block until it is done; raise where it failed."""

    @abstractmethod
    def result(self) -> T:
        """Return the result; valid until its reader yields to the worker again."""


class HostCopy(PendingResult[list[Any]]):
    """Values of a device on their way to the host, which waits for these alone.

    They are of the current stream: work that is enqueued later does not delay them.
    """

    def __init__(self, values: Tensor) -> None:
        self._values, self._event = values, None
        if values.device.type == "cuda":
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values, self._event = pinned.copy_(values, non_blocking=True), torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(values.device))

    def is_completed(self) -> bool:
        """Return whether they are there."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Block until they are there."""
        if self._event is not None:
            self._event.synchronize()

    def result(self) -> list[Any]:
        """Return the values, as ``tolist`` gives them."""
        self.wait()
        values: list[Any] = self._values.tolist()
        return values


class Pending:
    """Several works in flight, waited for together."""

    def __init__(self, works: Sequence[Any]) -> None:
        self.works = works

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        """Block until all are done."""
        for work in self.works:
            work.wait()


class _Allocates:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the result."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Allocates):
    """`all_gather_into` in the form that FSDP2's ``set_custom_all_gather`` takes."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Gather `input_tensor` of all ranks of `group` into `output_tensor`."""
        return all_gather_into(output_tensor, input_tensor, group=group, async_op=async_op)


class ReduceScatter(_Allocates):
    """`reduce_scatter_into` in the form that FSDP2's ``set_custom_reduce_scatter`` takes."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any = dist.ReduceOp.SUM,
        async_op: bool = False,
    ) -> None:
        """Reduce `input_tensor` over `group` into `output_tensor`."""
        if async_op:
            raise ValueError("reduce_scatter_into does not run asynchronously")
        reduce_scatter_into(output_tensor, input_tensor, op=op, group=group)


# ---- small values --------------------------------------------------------------------------------


def values_of_group(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Collective call: return every rank's small `value`, in the order of the group."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def largest_of_ranks(*numbers: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """Collective call: return the largest of each of the `numbers`, of at most 63 bits."""
    largest = torch.tensor(numbers, dtype=torch.int64, device=travel_device(group))
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return [int(number) for number in largest]


def values_if_different(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Collective call: return every rank's plain `value` where they differ, else nothing.

    One number travels, a hash of the text of `value`, and the values where these differ.
    """
    number = _text_hash(value)
    most, least = largest_of_ranks(number, -number, group=group)
    return [] if most == -least else values_of_group(value, group)


def check_equal_on_ranks(
    options: Mapping[str, Any], *, of: str, more: Sequence[int] = ()
) -> list[int]:
    """Collective call: raise ValueError, on all ranks, where `options` differ from rank 0's.

    Returns the largest of each of the numbers in `more`, which travel along.
    """
    number = _text_hash(options)
    most, least, *others = largest_of_ranks(number, -number, *more)
    if most == -least:
        return others
    everyone = values_of_group(options)
    for rank, theirs in enumerate(everyone):
        for name in {**everyone[0], **theirs}:
            own, first = theirs.get(name), everyone[0].get(name)
            if own != first:
                raise ValueError(
                    f"all ranks need the same {of}: {name} is {own!r} on rank {rank} and "
                    f"{first!r} on rank 0"
                )
        for own, first in zip(theirs, everyone[0], strict=True):
            if own != first:
                raise ValueError(
                    f"all ranks need the same {of}, in the same order: rank {rank} has {own} where "
                    f"rank 0 has {first}"
                )
    return others


def _text_hash(value: object) -> int:
    return xxhash.xxh3_64_intdigest(repr(value).encode()) >> 1  # of 63 bits


# ---- the state of all ranks ----------------------------------------------------------------------


class Slices(Protocol):
    """Parameters of which a rank has a slice, by name.

    What has as many elements as a parameter is cut like it. All methods take and give flat tensors;
    for a parameter that is not cut they give back what they got.
    """

    @property
    def uncut(self) -> Collection[str]:
        """Names of the parameters that are not cut, and so equal on all ranks of the slices."""

    def numel(self, name: str, own: int) -> int:
        """Return the number of elements of the full parameter, of which this rank has `own`."""

    def whole(self, name: str, own: Tensor) -> Tensor:
        """Return the full parameter on every rank. A collective call of the ranks of the slices."""

    def own(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's slice."""


def unsharded_state(state: State, slices: Slices | None) -> State:
    """Return the state of full parameters. A collective call of the ranks that have the slices."""
    if slices is None:
        return state
    return {
        kind: {name: slices.whole(name, tensors[name]) for name in sorted(tensors)}
        for kind, tensors in state.items()
    }


def sharded_state(state: State, slices: Slices | None) -> State:
    """Return the state of this rank's `slices` from that of full parameters.

    A residual of an uncut parameter is left out: it is sent in full in each step, so that it
    stays equal.
    """
    if slices is None:
        return state
    return {
        kind: {
            name: slices.own(name, tensor)
            for name, tensor in tensors.items()
            if name not in slices.uncut
        }
        for kind, tensors in state.items()
    }


def gather_state(state: State, *, senders: Sequence[int], group: dist.ProcessGroup) -> list[State]:
    """Collective call on `group`: on its rank 0 the state of each of `senders`, on CPU.

    `senders` are ranks of the group; [] is returned elsewhere. One tensor travels at a time: no
    rank but 0 needs memory for it.
    """
    rank = dist.get_rank(group)
    # everyone says what it will send
    own = [
        (kind, name, tensor.shape, tensor.dtype)
        for kind in state
        for name, tensor in state[kind].items()
    ]
    everyone = values_of_group(own, group)
    gathered: list[State] = []
    device = travel_device(group)  # exchanges keep some state on the device, some in host memory
    # one tensor after another
    for sender in senders:
        received: State = {}
        for kind, name, shape, dtype in everyone[sender]:
            if rank == 0:
                if sender == 0:
                    tensor = state[kind][name]
                else:
                    tensor = torch.empty(shape, dtype=dtype, device=device)
                    dist.recv(tensor, group=group, group_src=sender)
                received.setdefault(kind, {})[name] = tensor.detach().cpu().clone()
            elif rank == sender:
                dist.send(state[kind][name].to(device).contiguous(), group=group, group_dst=0)
        if rank == 0:
            gathered.append(received)
    return gathered


def check_saved_method(state: Mapping[str, Any], name: str) -> None:
    """Raise ValueError where the exchange that saved `state` has another method than `name`."""
    if state["method"] != name:
        raise ValueError(
            f"the saved exchange state is of method={state['method']!r}, this exchange has {name!r}"
        )


def own_state(
    saved: Sequence[State], *, position: int, holders: int, numels: Mapping[str, int]
) -> State:
    """Return the state of holder `position` of `holders`, from those that were `saved`.

    With another number of holders everyone gets the mean: what the model still has to receive on
    average stays the same.

    Raises:
        ValueError: for unknown parameters or other sizes.
    """
    for state in saved:
        for kind, tensors in state.items():
            _check_known(tensors, numels, sized=kind == "residual")
    if len(saved) == holders:
        return saved[position]
    # another number of ranks: the mean of what was saved
    mean: State = {}
    for state in saved:
        for kind, tensors in state.items():
            into = mean.setdefault(kind, {})
            for name, tensor in tensors.items():
                share = tensor / len(saved)
                into[name] = into[name] + share if name in into else share
    return mean


def _check_known(tensors: Mapping[str, Tensor], numels: Mapping[str, int], *, sized: bool) -> None:
    for name, tensor in tensors.items():
        if name not in numels:
            raise ValueError(
                f"the saved exchange state has a parameter that the model lacks: {name}"
            )
        if sized and tensor.numel() != numels[name]:
            raise ValueError(
                f"the saved exchange state of {name} has {tensor.numel()} elements, the parameter "
                f"{numels[name]}"
            )
