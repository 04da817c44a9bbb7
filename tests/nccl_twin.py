"""A backend for tests on the CPU whose groups order their works as NCCL's do.

    run_ranks(function, 4, backend=TWIN)

Each group has a thread that runs what its rank has begun, one work after the other: collectives,
sends and receives alike. A send ends once its receive has begun, as gloo's do. What belongs
together (`batch_isend_irecv`) is one work. A group is taken for another backend than gloo, so that
the package does what it does on NCCL. Ranks that wait for one another in a circle get an error
within the group's time limit.

`share_device` gives a rank's groups one queue, as on a GPU that has room for one kernel at a time.
As NCCL, it knows few dtypes. Others are refused where they are sent, while the other rank waits.

`wait_for_device` waits for all that this rank has begun, in all groups, as what waits for a whole
GPU does: `torch.cuda.synchronize`, memory that is freed, a kernel that is loaded.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

TWIN = "nccl_twin"
WORKS = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "barrier",
    "gather",
    "scatter",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "all_gather_single",
    "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced",
    "send",
    "recv",
)
DTYPES = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
DTYPES = (*DTYPES, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_dtypes(tensors: Any, *, takes_complex: bool) -> None:
    """Raise what NCCL's group raises; collectives take complex numbers for pairs of real ones."""
    for each in tree_leaves(tensors):
        is_pair = takes_complex and isinstance(each, torch.Tensor) and each.is_complex()
        if isinstance(each, torch.Tensor) and each.dtype not in DTYPES and not is_pair:
            raise TypeError(
                f"Input tensor data type is not supported for NCCL process group: {each.dtype}"
            )


class TwinWork(dist.Work):
    """A work in the queue of its group."""

    def __init__(self, run: Callable[[], Any], outputs: Any, limit: float) -> None:
        super().__init__()
        self.run, self.outputs, self._limit = run, outputs, limit
        self.error: Exception | None = None
        self._over = threading.Event()
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def end(self, error: Exception | None) -> None:
        """Let those go on who wait."""
        if self._over.is_set():  # the group was aborted
            return
        self.error = error
        self._over.set()
        if error is None:
            self._future.set_result(self.outputs)
        else:
            self._future.set_exception(error)  # type: ignore[arg-type]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it is over. Raises RuntimeError where it failed or comes to no end."""
        if not self._over.wait(self._limit):
            raise RuntimeError("ProcessGroup: a work did not end in time")
        if self.error is not None:
            raise RuntimeError(f"ProcessGroup: {self.error}") from self.error
        return True

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._over.is_set()

    def is_success(self) -> bool:
        """Whether it is over without an error."""
        return self._over.is_set() and self.error is None

    def get_future(self) -> torch.futures.Future[Any]:
        """The future of its outputs."""
        return self._future


_groups: weakref.WeakSet[TwinGroup] = weakref.WeakSet()  # of this rank


def wait_for_device() -> None:
    """Block until all that this rank has begun to send, receive and reduce is over."""
    for group in list(_groups):
        group.wait_for_all()


def is_under_way() -> bool:
    """Whether something is that this rank has begun."""
    return any(not work.is_completed() for group in _groups for work in group.begun)


_device: list[queue.SimpleQueue[Any]] = []  # that all groups of this rank share


def share_device() -> None:
    """Run what this rank begins from now on in one order, whatever its group."""
    _device[:] = [queue.SimpleQueue()]
    threading.Thread(target=_work, args=(_device[0],), name="nccl-twin", daemon=True).start()


def _work(works: queue.SimpleQueue[Any]) -> None:
    while (begun := works.get()) is not None:
        group, work = begun
        group.run(work)


class TwinGroup(dist.ProcessGroup):
    """A group of ranks whose works run in the order in which they are begun."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._limit, self._name, self._is_aborted = timeout.total_seconds(), "", False
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self.inner = dist.ProcessGroup(store, rank, size)
        self.inner._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._broken: Exception | None = None
        self.begun: list[TwinWork] = []  # not known to be over
        _groups.add(self)
        self._thread = threading.Thread(
            target=_work, args=(self._queue,), name="nccl-twin", daemon=True
        )
        self._thread.start()

    def getBackendName(self) -> str:
        """The name."""
        return TWIN

    @property
    def group_name(self) -> str:
        """What torch calls the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        """The same for C++."""
        return self._name

    def begin(self, run: Callable[[], Any], outputs: Any) -> TwinWork:
        """Put a work into the queue."""
        work = TwinWork(run, outputs, self._limit + 5)
        self.begun = [*(each for each in self.begun if not each.is_completed()), work]
        (_device[0] if _device else self._queue).put((self, work))
        return work

    def wait_for_all(self) -> None:
        """Block until all that was begun is over."""
        for work in self.begun:
            work.wait()
        self.begun = []

    def run(self, work: TwinWork) -> None:
        """Run a work to its end, in the thread of a queue."""
        error = self._broken
        try:
            if error is None:
                work.run()
        except Exception as raised:
            # one work that does not end is the end of a communicator
            error = self._broken = raised
        work.run = _nothing
        work.end(error)

    def shutdown(self) -> None:
        """End the thread, after what has begun."""
        self._queue.put(None)
        if not self._is_aborted:
            self._thread.join(timeout=self._limit)
            self.inner.shutdown()

    def abort(self) -> None:
        """Let nobody wait any more for what has begun."""
        self._is_aborted, self._broken = True, RuntimeError("the group was aborted")
        for work in self.begun:
            work.end(self._broken)
        self.begun = []


def _nothing() -> None:
    """Hold no tensors."""


def _work_of(name: str) -> Callable[..., TwinWork]:
    """The method of `TwinGroup` that begins this kind of work."""

    def method(self: TwinGroup, *args: Any, **kwargs: Any) -> TwinWork:
        given = [*args, *kwargs.values()]
        check_dtypes(given, takes_complex=name not in ("send", "recv"))
        # gloo takes no averages
        averaged = next(
            (each for each in given if getattr(each, "reduceOp", None) == dist.ReduceOp.AVG), None
        )
        if averaged is not None:
            averaged.reduceOp = dist.ReduceOp.SUM

        def run() -> None:
            work = getattr(self.inner, name)(*args, **kwargs)
            if work is not None:
                work.wait()
            if averaged is not None:
                for tensor in outputs:
                    tensor.div_(self.size())

        first = args[0] if args and not hasattr(args[0], "timeout") else []
        outputs = [first] if isinstance(first, torch.Tensor) else list(first)
        return self.begin(run, outputs)

    return method


for _name in WORKS:
    if hasattr(dist.ProcessGroup, _name):
        setattr(TwinGroup, _name, _work_of(_name))


def _batch(operations: Sequence[dist.P2POp]) -> list[Any]:
    """`batch_isend_irecv` of twins: all begin at once and are one work."""
    group = operations[0].group
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, TwinGroup):
        return _of_torch(list(operations))
    check_dtypes([each.tensor for each in operations], takes_complex=False)

    def run() -> None:
        works = [
            (group.inner.send if each.op is dist.isend else group.inner.recv)(
                [each.tensor], each.group_peer, each.tag
            )
            for each in operations
        ]
        for work in works:
            work.wait()

    return [group.begin(run, [each.tensor for each in operations])]


_of_torch = dist.batch_isend_irecv
dist.batch_isend_irecv = _batch
dist.Backend.register_backend(TWIN, TwinGroup, devices=["cpu"])
