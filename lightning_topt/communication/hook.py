"""The DDP communication hook: gradients averaged by an exchange of one's choice.

    exchange = CompressedExchange(ddp, TopK(density=0.01))   # before the first backward pass
    loss.backward()               # gradients are now averaged by the method

What happens to a bucket: DDP gives it to `_hook`, `submit` gives its stages to the exchange's
worker, and `finish_step`, queued at the end of the backward pass, waits until the buckets of the
step are back. Under `TopK`, where each rank sends for itself, the stages are

    SparseExchange.stages    all of it, in the worker; other buckets run while it waits
    start_feedback           adds the gradient to what is left over and takes the k largest out
    SparseMessage.pack       the values and their indices as bytes
    ring_all_gather          the messages of all ranks to all ranks
    ScatterMean.add          reads a message (`SparseMessage.unpack`) and adds it into the bucket

in `bucket`, `methods.top_k`, `selection`, `wire` and `collectives`. What is compiled for a CPU, in
`selection_kernels` and at the end of `wire`, does what plain torch does elsewhere, so it need not
be read.

Gradients of a module that no DDP wraps, those in ``.grad``, are exchanged by `average`.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with classes.
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from math import inf
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.nn.parallel import DistributedDataParallel

from lightning_topt.communication.bucket import (
    Bucket,
    BucketExchange,
    BucketLayout,
    ExchangeContext,
    ExchangeSettings,
    GivenBucket,
    OwnBuckets,
    Stages,
    StepChecks,
)
from lightning_topt.communication.collectives import (
    HostCopy,
    Slices,
    State,
    Waitable,
    check_equal_on_ranks,
    check_saved_method,
    gather_state,
    mark,
    own_state,
    ring_bytes,
    seconds_between,
    sharded_state,
    unsharded_state,
    values_of_group,
)
from lightning_topt.communication.exchange_method import (
    GradientMethod,
    averaged_parameters,
    exempt_names,
)
from lightning_topt.communication.rank_watch import (
    POLL_SECONDS,
    RankWatch,
    named_errors,
    wait_watched,
    watch_ranks,
    within_limit,
)
from lightning_topt.communication.topology import Topology, make_groups

Merge = Callable[[list[State]], list[State]]
MOST_WAITS = 64  # pairs of marks that are kept before they are added up
SHORTEST_PAUSE, LONGEST_PAUSE = 2e-5, 1e-3  # seconds between two checks of works in flight
_made = itertools.count()  # exchanges are made in the same order on all ranks


@dataclass(frozen=True)
class ExchangeStatistics:
    """What was exchanged since the last reset; bytes and seconds are sums over `steps`.

    - `bytes_sent`: payload that left this node for others (with one node: this rank);
      `dense_bytes`: the same for DDP's own ring all-reduce;
    - `exposed_seconds`: the wait at the end of backward passes; `exchange_seconds`: from a step's
      first bucket until its last one is back;
    - `residual_norm`: L2, of this rank, now, in units of the unscaled gradient;
    - `density`: that of the next step;
    - `details`: more of some methods (`BucketExchange.telemetry`).
    """

    steps: int
    bytes_sent: int
    dense_bytes: int
    exposed_seconds: float
    exchange_seconds: float
    residual_norm: float
    density: float
    details: Mapping[str, float] = field(default_factory=dict)


@dataclass
class _Step:
    """One backward pass."""

    begun: Any  # when its first bucket came
    futures: list[torch.futures.Future[Tensor]] = field(default_factory=list)
    ended: bool = False
    callback: bool = False  # queued at the end of the backward pass
    checks: StepChecks = field(default_factory=StepChecks)


class CompressedExchange:
    """Exchanges the gradients of one module by `method`. Making one is a collective call.

    Made alike on all ranks. It is the communication hook of a DistributedDataParallel `module`,
    from before its first backward pass; gradients of another module are exchanged by `average`.
    Set `loss_scale` to the GradScaler's scale before each backward pass.

    Args:
        module: whose gradients are averaged.
        method: how gradients are exchanged.
        topology: which ranks share a node; from the environment if None.
        device: where the gradients are.
        nonfinite: as in `ExchangeSettings`.
        timeout_seconds: as in `ExchangeSettings`; no longer than the run's own time limit.
        ignored: names of parameters that are left alone, besides those that DDP ignores.
        slices: of which parameters this rank has slices, where the module is one of several parts
            of the run; the state that is saved is of full parameters.
        merge: for parts that have different parameters: a collective call that gives rank 0 the
            states of all.
        watch: over all ranks of the run, where there is one; None: one is made, until `end`.

    Raises:
        ValueError: for a world size that is not nodes x ranks per node, where ranks differ in their
            options or topology, and for a SyncBatchNorm beside a thread that uses NCCL.
    """

    # as ranks do between the outer steps of `OuterSteps`
    trains_alone = False

    def __init__(
        self,
        module: nn.Module,
        method: GradientMethod,
        *,
        topology: Topology | None = None,
        device: torch.device | None = None,
        nonfinite: str = ExchangeSettings.nonfinite,
        timeout_seconds: float = ExchangeSettings.timeout_seconds,
        ignored: Collection[str] = (),
        slices: Slices | None = None,
        merge: Merge | None = None,
        watch: RankWatch | None = None,
    ) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        # Nobody waits for a lost rank longer than the run allows its collective calls.
        given = ExchangeSettings(nonfinite, timeout_seconds)
        self.settings = ExchangeSettings(nonfinite, within_limit(given.timeout_seconds))
        device = device or torch.device("cpu")
        self.topology = topology or Topology.from_environment(rank=rank, world_size=world_size)
        self.topology.check(world_size)
        self.method = method.on(self.topology)
        self.slices, self._merge = slices, merge
        self.loss_scale = 1.0
        check_equal_on_ranks(
            {
                **self.method.as_mapping(),
                **asdict(self.settings),
                "num_nodes": self.topology.num_nodes,
                "ranks_per_node": self.topology.ranks_per_node,
            },
            of="options of the gradient exchange",
        )
        # parameters by name, and which of them are exempt. Those that no part has slices of are
        # never compressed: other choices of entries in each part would make them differ.
        ddp = module if isinstance(module, DistributedDataParallel) else None
        if ddp is not None:
            module, ignored = ddp.module, {*ignored, *ddp.parameters_to_ignore}
        elif any(isinstance(each, DistributedDataParallel) for each in module.modules()):
            raise TypeError("give the DistributedDataParallel itself, not a module around it")
        self.parameters = averaged_parameters(module, ignored)
        self._names = {id(parameter): n for n, parameter in self.parameters.items()}
        rules = method.exempt_rules
        uncut = () if slices is None else slices.uncut
        self._exempt = exempt_names(module, () if rules is None else (*rules, *uncut))
        self.streams = Streams(device)
        on_stream = self.streams.stream is not None and method.in_stream_order
        is_synced = any(isinstance(each, nn.SyncBatchNorm) for each in module.modules())
        if self.streams.stream is not None and not on_stream and is_synced:
            raise ValueError(
                f"method {self.method.name!r} has a thread of its own, whose collectives NCCL may "
                "run in another order than those of SyncBatchNorm on each rank: choose another "
                "method, or BatchNorm"
            )
        # the method's exchange, with process groups and keys of the store of its own
        self.groups = make_groups(
            self.topology,
            num_stages=method.num_stages(self.topology),
            hierarchical=method.sums_in_nodes(self.topology),
            timeout_seconds=self.settings.timeout_seconds,
            with_exempt=rules is not None,
        )
        key = f"lightning_topt/exchange/{next(_made)}/{self.topology.part}"
        context = ExchangeContext(
            self.topology,
            self.groups,
            device,
            self.settings.timeout_seconds,
            PrefixStore(key, _get_default_store()),
        )
        self.exchange = self.method.make_exchange(context)
        # what runs it: on CUDA the calling thread, where streams do the waiting
        own_watch = watch_ranks() if watch is None else None
        self.worker = (StreamWorker if on_stream else ExchangeWorker)(
            streams=self.streams,
            watch=watch or own_watch,
            timeout_seconds=self.settings.timeout_seconds,
        )
        # Also when the exchange is dropped and at exit: a thread inside torch while the interpreter
        # ends can abort the process.
        self._finalizer = weakref.finalize(self, _close, self.worker, self.exchange, own_watch)
        self.exchange.warm_up()
        # by bucket index: identities of the parameters, layout
        self.layouts: dict[int, tuple[list[int], BucketLayout]] = {}
        self.step = 0  # exchanged steps that are over
        self.current: _Step | None = None
        self._dense_bytes, self._exposed, self._exchanged = 0, 0.0, 0.0  # bytes, seconds
        # marks: the first bucket comes, a backward pass ends, its gradients are there
        self._waits: list[tuple[Any, Any, Any]] = []
        self._reset_at = (0, 0, 0)  # steps, bytes sent, bytes of DDP
        if ddp is None:
            self._buckets = OwnBuckets(list(self.parameters.values()))
        else:
            ddp.register_comm_hook(state=self, hook=_hook)

    # ---- one step; called from the training (autograd) thread

    def average(self) -> None:
        """Collective call: average the gradients that are in ``.grad``; without DDP."""
        for bucket in self._buckets.filled():
            self.submit(bucket)
        self.finish_step()
        self._buckets.write_back()

    def submit(self, given: GivenBucket) -> torch.futures.Future[Tensor]:
        """Start the exchange of one bucket; return the future of its buffer.

        Raises what ended the exchange.
        """
        if given.index == 0:  # a new step
            self.finish_step()
            self.current = _Step(mark(self.streams.device))
        assert self.current is not None
        step = self.current
        bucket = Bucket(
            given.index,
            given.buffer,
            self._layout(given),
            given.is_last,
            self.step,
            self.loss_scale,
            step.checks,
        )
        # Where DDP laid out its buckets anew, residuals move to them first.
        if not self.exchange.prepare(bucket):
            self.worker.drain()
            self.exchange.relayout()
        self._dense_bytes += ring_bytes(bucket.buffer.nbytes, self.exchange.world_size, passes=2)
        # The worker takes it from here.
        future = self.worker.submit(self.exchange.stages(bucket))
        step.futures.append(future)
        # The step ends with the backward pass, where errors of the worker are raised.
        # The graph task is -1 where DDP hands out buckets of unused parameters in the forward pass.
        if not step.callback and torch._C._current_graph_task_id() != -1:
            step.callback = True
            Variable._execution_engine.queue_callback(self.finish_step)
        return future

    def finish_step(self) -> None:
        """Wait until the buckets of this step are back; ends the backward pass, before DDP does.

        Raises here because a future could only hand torch the text of an error.
        """
        step = self.current
        if step is None or step.ended:
            return
        step.ended = True
        self.step += 1
        # wait, and mark how long
        start = mark(self.streams.device)
        self.worker.drain()
        with self.streams.worker():
            self._waits.append((step.begun, start, mark(self.streams.device)))
        for future in step.futures:
            future.wait()
        # They hold DDP's buckets, of which it makes others after the first step.
        step.futures.clear()
        failed = step.checks.failed(self.worker.wait_for)
        if len(self._waits) >= MOST_WAITS:
            self._add_up_waits()
        if failed:
            self.exchange.put_back()
            if self.settings.nonfinite == "error":
                self._raise_nonfinite(*failed[0])
            for bucket, _ in failed:
                bucket.buffer.fill_(torch.nan)

    def _raise_nonfinite(self, bucket: Bucket, is_ours: bool) -> None:
        # On all ranks, which learn from each other whose gradient it is
        with named_errors(self.worker.watch):
            flags = values_of_group(is_ours, self.groups.state)
        ranks = [rank for rank, flag in zip(self.topology.members, flags, strict=True) if flag]
        names = bucket.layout.names
        raise FloatingPointError(
            f"the gradient on rank {', '.join(map(str, ranks))} has NaN or infinities in a "
            f"bucket of {len(names)} parameters, {names[0]} to {names[-1]}; with a GradScaler "
            "use nonfinite='skip'"
        )

    def _layout(self, given: GivenBucket) -> BucketLayout:
        # The layout; the same object as long as the bucket holds the same parameters
        parameters = given.parameters
        before, layout = self.layouts.get(given.index, ([], None))
        identities = [id(parameter) for parameter in parameters]
        if layout is None or before != identities:
            # gradients are views of the bucket's buffer
            names = tuple(self._names[identity] for identity in identities)
            first = given.buffer.storage_offset()
            layout = BucketLayout(
                names,
                tuple(int(gradient.storage_offset() - first) for gradient in given.gradients()),
                tuple(parameter.numel() for parameter in parameters),
                tuple(parameter.shape for parameter in parameters),
                tuple(name in self._exempt for name in names),
            )
            assert sum(layout.numels) == given.buffer.numel()
            self.layouts[given.index] = identities, layout
        return layout

    def synchronize(self) -> None:
        """Nothing: ranks have equal parameters after every step."""

    def step_skipped(self) -> None:
        """Put back into the residual what was sent: the last step's gradients were thrown away.

        A GradScaler does so. Doing it twice is doing it once.
        """
        self.finish_step()
        self.exchange.put_back()

    @property
    def error(self) -> Exception | None:
        """Why the exchange ended (`PeerLostError`, ...), None while it works.

        `backward` raises it.
        """
        return self.worker.error

    def statistics(self, *, reset: bool = True) -> ExchangeStatistics:
        """Return what was exchanged since the last reset."""
        self._add_up_waits()
        now = self.step, self.exchange.bytes_sent, self._dense_bytes
        steps, sent, dense = (
            value - before for value, before in zip(now, self._reset_at, strict=True)
        )
        exposed, exchanged = self._exposed, self._exchanged
        if reset:
            self._reset_at, self._exposed, self._exchanged = now, 0.0, 0.0
        return ExchangeStatistics(
            steps=steps,
            bytes_sent=sent,
            dense_bytes=dense,
            exposed_seconds=exposed,
            exchange_seconds=exchanged,
            residual_norm=self.exchange.residual_norm(),
            density=self.method.density_at(self.step),
            details=self.exchange.telemetry(steps=max(1, steps), reset=reset),
        )

    def _add_up_waits(self) -> None:
        # How long the training thread waited for gradients, and how long they were on their way
        for begun, start, stop in self._waits:
            self._exposed += max(0.0, seconds_between(start, stop))
            self._exchanged += seconds_between(begun, stop)
        self._waits.clear()

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Collective call: the state of all ranks, complete on rank 0 (elsewhere `ranks` is empty).

        `ranks` has one entry per rank, per node where hierarchical: kind ("residual", ...) ->
        parameter name -> tensor.
        """
        self.finish_step()
        own = unsharded_state(self.exchange.state_dict(), self.slices)
        # Without `merge` all parts have the same state: the first one gathers it.
        ranks: list[State] = []
        if self._merge is not None or not self.topology.part:
            ranks = gather_state(own, senders=self._holders(), group=self.groups.state)
        if self._merge is not None:
            ranks = self._merge(ranks)
        return {"step": self.step, "method": self.method.name, "ranks": ranks}

    def own_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of `state_dict`: its entry of `ranks` as `state`.

        `position` says which of the `holders` entries that is. It is None, and `state` empty, where
        another rank of the node, or of another part, has it. Collective where there are slices.
        """
        holders, rank = self._holders(), self.topology.rank
        self.finish_step()
        position = holders.index(rank) if rank in holders else None
        state: State = {}
        if position is not None:
            state = unsharded_state(self.exchange.state_dict(), self.slices)
        if self.topology.part and self._merge is None:
            position, state = None, {}
        return {
            "step": self.step,
            "method": self.method.name,
            "holders": len(holders),
            "position": position,
            "state": state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what rank 0 saved, given to all ranks.

        On another number of ranks each gets the mean of the residuals.

        Raises:
            ValueError: for the state of another method or model.
        """
        check_saved_method(state, self.method.name)
        # this rank's entry of what was saved, for full parameters, then cut to its slices
        holders, rank = self._holders(), self.topology.rank
        position = self.topology.node if len(holders) < self.topology.world_size else rank
        numels = {name: parameter.numel() for name, parameter in self.parameters.items()}
        if self.slices is not None:
            numels = {name: self.slices.numel(name, own) for name, own in numels.items()}
        ranks = state["ranks"]
        if self._merge is not None:
            # other parts have parameters that this one lacks
            ranks = [
                {kind: {n: t for n, t in of.items() if n in numels} for kind, of in each.items()}
                for each in ranks
            ]
        full = own_state(ranks, position=position, holders=len(holders), numels=numels)
        own = sharded_state(full, self.slices)
        self.finish_step()
        if own:
            self.exchange.load_state_dict(own)
        self.step = state["step"]
        self._reset_at = (state["step"], *self._reset_at[1:])

    def _holders(self) -> list[int]:
        # One rank for each separate state
        by_nodes = self.method.sums_in_nodes(self.topology)
        step = self.topology.ranks_per_node if by_nodes else 1
        return list(range(0, self.topology.world_size, step))

    # ---- the end

    def close(self) -> None:
        """Do what `end` does, and destroy the process groups of the exchange.

        To be called on all ranks alike: with NCCL destroying a group may wait for its ranks. Where
        the exchange has failed the groups are left to the end of the run's.
        """
        self.end()
        if self.error is None:
            self.groups.destroy()

    def end(self) -> None:
        """End the exchange's thread and release shared memory; the hook cannot be used any more.

        Its process groups stay until `close` or the end of the run's, so a rank may do so alone.
        """
        self._finalizer()


def _hook(exchange: CompressedExchange, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    # Start the exchange of a bucket; what DDP calls
    index, buffer, is_last = bucket.index(), bucket.buffer(), bucket.is_last()
    return exchange.submit(
        GivenBucket(index, buffer, bucket.parameters(), bucket.gradients, is_last)
    )


def _close(
    worker: "ExchangeWorker | StreamWorker", exchange: BucketExchange, watch: RankWatch | None
) -> None:
    # End the thread, then release what the exchange holds
    worker.close()
    exchange.close()
    if watch is not None:
        watch.stop()


# ---- workers -------------------------------------------------------------------------------------
#
# A worker carries all buckets of an exchange, in order and overlapped. A bucket's exchange is a
# generator that yields what it waits for (`bucket.Stages`). While one bucket waits for the network,
# the worker starts the next:
#
#     bucket 0   select | all-gather ......... | decode
#     bucket 1            select | all-gather ......... | decode
#
# After an error, or a wait longer than `timeout_seconds`, a worker is over: `error` says why, and
# every future and every later call raises it.


class StreamWorker:
    """Runs `Stages` in the calling thread, on a stream of their own: on CUDA.

    When a bucket comes, it is begun, and then the buckets before it enter their next stages, the
    last ones when the backward pass ends. So all ranks issue the works of all process groups in one
    order, those of the backward pass itself (SyncBatchNorm) among them, as NCCL needs it. The
    stream waits for what other ranks send; the host waits for a `HostCopy` alone, which was on its
    way while the backward pass reached the next bucket.
    """

    def __init__(
        self, *, streams: "Streams", watch: RankWatch | None, timeout_seconds: float
    ) -> None:
        self.streams, self.watch, self.timeout_seconds = streams, watch, timeout_seconds
        self.error: Exception | None = None
        self._tasks: list[_Task] = []

    def submit(self, stages: Stages) -> torch.futures.Future[Tensor]:
        """Begin one bucket; return the future of its result. Raises the worker's `error`."""
        if self.error:
            raise self.error
        task = _Task(stages, self.streams.future(), mark(self.streams.device))
        self._tasks.append(task)
        self._advance(self._tasks[::-1])  # what the newest computes covers what others wait for
        return task.future

    def drain(self) -> None:
        """Let the stream run all buckets to their ends. Raises the worker's `error`."""
        if self.error:
            raise self.error
        while self._tasks:
            self._advance(self._tasks)

    def wait_for(self, copy: HostCopy) -> None:
        """Let the host wait for `copy`. Raises what ended the worker then."""
        limit = self.timeout_seconds
        with self._last_errors():
            wait_watched(copy, self.watch, timeout_seconds=limit, pause=SHORTEST_PAUSE)

    def close(self) -> None:
        """Let go of what is in flight."""
        self._tasks.clear()

    def _advance(self, tasks: "list[_Task]") -> None:
        # Let each of these enter its next stage
        with self._last_errors(), self.streams.worker():
            for task in tasks:
                if isinstance(task.waits_for, HostCopy):
                    self.wait_for(task.waits_for)
                task.advance(self.streams)
        self._tasks = [task for task in self._tasks if task.waits_for is not None]

    @contextmanager
    def _last_errors(self) -> Generator[None]:
        # an error is the end
        try:
            with named_errors(self.watch):
                yield
        except Exception as error:
            self._tasks.clear()
            self.error = error
            raise


class ExchangeWorker:
    """Runs `Stages` one after the other in one daemon thread, which starts with the first.

    All ranks must issue the works of one process group in the same order whatever the timing, so
    each stage has its own group and a bucket enters a stage only after the bucket before it has. No
    collective runs in a callback (on gloo those abort the process), no thread is started per
    bucket.
    """

    def __init__(
        self, *, streams: "Streams", watch: RankWatch | None, timeout_seconds: float
    ) -> None:
        self.streams, self.watch, self.timeout_seconds = streams, watch, timeout_seconds
        self.error: Exception | None = None
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        self._in_flight = 0  # under `_lock`
        self._thread: threading.Thread | None = None

    def submit(self, stages: Stages) -> torch.futures.Future[Tensor]:
        """Queue one bucket; return the future of its result. Raises the worker's `error`."""
        task = _Task(stages, self.streams.future(), mark(self.streams.device))
        with self._lock:
            if self.error:
                raise self.error
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="gradient-exchange", daemon=True
                )
                self._thread.start()
            self._in_flight += 1
            self._idle.clear()
            self._queue.put(task)
        return task.future

    def drain(self) -> None:
        """Block until no bucket is in flight. Raises the worker's `error`."""
        self._idle.wait()  # the thread's own deadline bounds this
        if self.error:
            raise self.error

    def wait_for(self, copy: HostCopy) -> None:
        """Let the host wait for `copy`, which no other rank delays any more."""
        copy.wait()

    def close(self) -> None:
        """End the thread, after what is in flight; at most a few seconds."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            # not where the thread itself drops the last reference
            if thread is not threading.current_thread():
                thread.join(timeout=5)

    def _run(self) -> None:
        tasks: list[_Task] = []
        pause = SHORTEST_PAUSE
        with self.streams.worker():
            while self._receive(tasks, pause if tasks else POLL_SECONDS):
                try:
                    moved = self._advance_all(tasks)
                    if not moved and self.watch is not None and self.watch.others_failed():
                        raise RuntimeError("another rank reported a failure")
                except Exception as error:
                    self._fail(tasks, self.watch.diagnose(error) if self.watch else error)
                    return
                pause = SHORTEST_PAUSE if moved else min(2 * pause, LONGEST_PAUSE)

    def _receive(self, tasks: "list[_Task]", seconds: float) -> bool:
        # Take what was submitted, waiting up to `seconds` for the first; False: end the thread
        try:
            task = self._queue.get(timeout=seconds)
            while task is not None:
                tasks.append(task)
                task = self._queue.get_nowait()
        except queue.Empty:
            return True
        return False

    def _advance_all(self, tasks: "list[_Task]") -> bool:
        # Advance buckets that are ready by a stage, oldest first; return whether any was
        moved, reached = False, inf  # reached: the stage of the bucket before
        for task in tasks[:]:
            if task.stage + 1 <= reached and self._is_ready(task):
                moved = True
                task.advance(self.streams)
                task.deadline = monotonic() + self.timeout_seconds
                if task.waits_for is None:
                    tasks.remove(task)
                    self._finished()
            reached = task.stage
        return moved

    def _is_ready(self, task: "_Task") -> bool:
        # Whether the bucket waits for nothing. Raises TimeoutError after its deadline.
        if task.waits_for is None or task.waits_for.is_completed():
            return True
        if monotonic() > task.deadline:
            raise TimeoutError(f"waited longer than {self.timeout_seconds:g} s for another rank")
        return False

    def _finished(self) -> None:
        # Count a bucket that is back; wake `drain` after the last
        with self._lock:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    def _fail(self, tasks: "list[_Task]", error: Exception) -> None:
        # Give `error` to every bucket in flight or queued, and to all later calls
        with self._lock:
            self.error = error
            self._receive(tasks, SHORTEST_PAUSE)
            for task in tasks:
                task.future.set_exception(error)  # type: ignore[arg-type]
            self._in_flight = 0
            self._idle.set()


@dataclass
class _Task:
    """One bucket in a worker."""

    stages: Stages
    future: torch.futures.Future[Tensor]
    mark: Any  # when the gradients are there
    stage: float = -1  # the stage it has entered
    waits_for: Waitable | None = None
    deadline: float = inf

    def advance(self, streams: "Streams") -> None:
        """Run one stage; afterwards `waits_for` is None where it was the last."""
        try:
            if self.waits_for is None:
                streams.after(self.mark)
            else:
                self.waits_for.wait()
            # until it yields what it waits for
            self.waits_for = next(self.stages)
            self.stage += 1
        except StopIteration as stop:
            self.waits_for, self.stage = None, inf
            self.future.set_result(stop.value)


class Streams:
    """The order of operations between the calling thread and the worker.

    The worker's operations come after the gradient's, the optimizer's after the worker's. On a CPU
    they are done when they return; on CUDA the worker has a stream of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def after(self, reached: Any) -> None:
        """Let the worker's next operations start when this `mark` has been reached."""
        if self.stream is not None:
            self.stream.wait_event(reached)

    def worker(self) -> AbstractContextManager[Any]:
        """Return the context around everything that the worker does."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def future(self) -> torch.futures.Future[Tensor]:
        """Return a future that is complete once the worker's operations before it are done."""
        return torch.futures.Future(devices=None if self.stream is None else [self.device])
