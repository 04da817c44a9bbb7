"""The DDP communication hook: gradients averaged by an exchange of one's choice.

    exchange = CompressedExchange(TopK(density=0.01))
    exchange.register(ddp)        # before the first backward pass
    loss.backward()               # gradients are now averaged by the method

What happens to a bucket: DDP gives it to `_hook`, `ModuleExchange.submit` starts its stages in the
exchange's worker (`exchange_worker`), and `finish_step`, queued at the end of the backward pass,
waits until the buckets of the step are back. Under `TopK`, where each rank sends for itself, the
stages are

    SparseExchange.stages    all of it, in the worker's thread; other buckets run while it waits
    BucketResidual.select    adds the gradient to what is left over and takes the k largest out
    feedback_top_k           the same in one pass, what `select` calls by default
    MessageFormat.pack       the values and their indices as bytes
    ring_all_gather          the messages of all ranks to all ranks
    ScatterMean.add          reads a message (`MessageFormat.unpack`) and adds it into the bucket

in `methods.top_k`, `residual`, `selection.vector_top_k`, `wire` and `collectives`; the worker's
side of a bucket is in `exchange_worker` and `bucket`. What is compiled
for a CPU, `selection.kernels` and `wire_kernels`, does what plain torch does elsewhere
(`_feedback_torch`, `MessageFormat._pack_indices`), so it need not be read.

A module that no DDP wraps is taken over with `take_over`; `average` then exchanges the gradients
that are in ``.grad``.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with classes.
import itertools
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
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
    NonFiniteGradient,
    OwnBucket,
    OwnBuckets,
    Stages,
    StepChecks,
)
from lightning_topt.communication.checkpoint import (
    Slices,
    gather_state,
    own_state,
    sharded_state,
    unsharded_state,
)
from lightning_topt.communication.collectives import check_equal_on_ranks, ring_all_gather
from lightning_topt.communication.exchange_method import GradientMethod, exempt_names
from lightning_topt.communication.exchange_worker import ExchangeWorker, make_streams
from lightning_topt.communication.rank_watch import PeerMonitor, ranks_that, within_limit
from lightning_topt.communication.topology import Topology, make_groups

Merge = Callable[[list[dict[str, dict[str, Tensor]]]], list[dict[str, dict[str, Tensor]]]]
MOST_WAITS = 64  # pairs of marks that are kept before they are added up
_made = itertools.count()  # exchanges are made in the same order on all ranks


@dataclass(frozen=True)
class ExchangeStatistics:
    """What was exchanged since the last reset; bytes and seconds are sums over `steps`.

    - `bytes_sent`: payload that left this node for others (with one node: this rank);
      `dense_bytes`: the same for DDP's own ring all-reduce;
    - `exposed_seconds`: the wait at the end of backward passes; `exchange_seconds`: the time with a
      bucket in flight;
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


class CompressedExchange:
    """Exchanges the gradients of one DistributedDataParallel module by `method`.

    Made alike on all ranks. Set `loss_scale` to the GradScaler's scale before each backward pass.

    Args:
        method: how gradients are exchanged.
        topology: which ranks share a node; from the environment if None.
        device: where the gradients are.
        nonfinite: as in `ExchangeSettings`.
        timeout_seconds: as in `ExchangeSettings`; no longer than the run's own time limit.
        debug: as in `ExchangeSettings`.
        slices: of which parameters this rank has slices, where the module is one of several parts
            of the run; the state that is saved is of full parameters.
        merge: for parts that have different parameters: a collective call that gives rank 0 the
            states of all.

    Raises:
        ValueError: for a world size that is not nodes x ranks per node.
    """

    # as ranks do between the outer steps of a `LocalExchange`
    trains_alone = False

    def __init__(
        self,
        method: GradientMethod,
        *,
        topology: Topology | None = None,
        device: torch.device | None = None,
        nonfinite: str = ExchangeSettings.nonfinite,
        timeout_seconds: float = ExchangeSettings.timeout_seconds,
        debug: bool = ExchangeSettings.debug,
        slices: Slices | None = None,
        merge: Merge | None = None,
    ) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        given = ExchangeSettings(nonfinite, timeout_seconds, debug)
        # Nobody waits for a lost rank longer than the run allows its collective calls.
        self.settings = ExchangeSettings(nonfinite, within_limit(given.timeout_seconds), debug)
        self.device = device or torch.device("cpu")
        self.topology = topology or Topology.from_environment(rank=rank, world_size=world_size)
        self.topology.check(world_size)
        self.method = method.on(self.topology)
        self.slices, self._merge = slices, merge
        self.loss_scale = 1.0
        self._name = f"lightning_topt/exchange/{next(_made)}/{self.topology.part}"
        self._loaded: Mapping[str, Any] | None = None
        self._module: ModuleExchange | None = None
        self._reset_at = (0, 0, 0, 0.0)  # steps, bytes sent, bytes of DDP, busy seconds

    def synchronize(self) -> None:
        """Nothing: ranks have equal parameters after every step."""

    def register(self, ddp: DistributedDataParallel) -> None:
        """Collective call: take over the gradients of `ddp`, once, before its first backward pass.

        Raises:
            TypeError: for another wrapper.
            ValueError: where ranks differ in their options or topology.
        """
        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(
                f"gradients of a {type(ddp).__name__} cannot be exchanged compressed: this needs "
                "torch.nn.parallel.DistributedDataParallel (FSDP shards its gradients by "
                "reduce-scatter and has no such hook); wrap the module in DistributedDataParallel"
            )
        if self._module is not None:
            raise ValueError(
                "this exchange is registered already: make one per DistributedDataParallel module"
            )
        # Parameters that no part has slices of are sent whole: another choice of entries in each
        # part would make them differ.
        uncut = () if self.slices is None else self.slices.uncut
        self._start(ddp.module, ignored=ddp.parameters_to_ignore, exempt=uncut)
        ddp.register_comm_hook(state=self, hook=_hook)
        if self._loaded is not None:
            self.load_state_dict(self._loaded)

    def take_over(self, module: nn.Module, *, ignored: Collection[str] = ()) -> None:
        """Collective call: prepare to `average` the gradients of `module`, which no DDP wraps.

        Parameters named in `ignored` are left out.
        """
        started = self._start(module, ignored=ignored)
        self._buckets = OwnBuckets(list(started.parameters.values()))

    def _start(
        self, module: nn.Module, *, ignored: Collection[str], exempt: Collection[str] = ()
    ) -> "ModuleExchange":
        check_equal_options(self.method, self.settings, topology=self.topology)
        self._module = ModuleExchange(
            module,
            self.method,
            self.settings,
            topology=self.topology,
            device=self.device,
            name=self._name,
            ignored=ignored,
            exempt=exempt,
        )
        return self._module

    def average(self) -> None:
        """Collective call: average the gradients that are in ``.grad``, after `take_over`."""
        module = self._needed()
        for bucket in self._buckets.filled():
            module.submit(bucket, loss_scale=self.loss_scale)
        module.finish_step()
        self._buckets.write_back()

    @property
    def error(self) -> Exception | None:
        """Why the exchange ended (`PeerLostError`, ...), None while it works.

        `backward` raises it.
        """
        return self._module.worker.error if self._module else None

    @property
    def monitor(self) -> PeerMonitor:
        """Says who is gone, also when a collective outside of the exchange fails."""
        return self._needed().worker.monitor

    def sign_in(self) -> None:
        """Tell ranks that wait in the exchange that this one is alive, but does not come."""
        self.monitor.sign_in()

    def step_skipped(self) -> None:
        """Put back into the residual what was sent: the last step's gradients were thrown away.

        A GradScaler does so.
        """
        self._needed().put_back()

    def check_parameters(self) -> None:
        """Collective call: raise RuntimeError naming the first parameter that differs."""
        self._needed().check_parameters()

    def statistics(self, *, reset: bool = True) -> ExchangeStatistics:
        """Return what was exchanged since the last reset."""
        module = self._needed()
        steps, sent = module.step, module.exchange.bytes_sent
        dense, busy = module.dense_bytes, module.worker.busy_seconds
        before = self._reset_at
        exposed = module.exposed_seconds(reset=reset)
        if reset:
            self._reset_at = (steps, sent, dense, busy)
        return ExchangeStatistics(
            steps=steps - before[0],
            bytes_sent=sent - before[1],
            dense_bytes=dense - before[2],
            exposed_seconds=exposed,
            exchange_seconds=busy - before[3],
            residual_norm=module.exchange.residual_norm(),
            density=self.method.density_at(steps),
            details=module.exchange.telemetry(steps=max(1, steps - before[0]), reset=reset),
        )

    def state_dict(self) -> dict[str, Any]:
        """Collective call: the state of all ranks, complete on rank 0 (elsewhere `ranks` is empty).

        `ranks` has one entry per rank, per node where hierarchical: kind ("residual", ...) ->
        parameter name -> tensor.
        """
        module = self._needed()
        module.finish_step()
        own = unsharded_state(module.exchange.state_dict(), self.slices)
        # Without `merge` all parts have the same state: the first one gathers it.
        ranks: list[dict[str, dict[str, Tensor]]] = []
        if self._merge is not None or not self.topology.part:
            ranks = gather_state(own, senders=self._holders(), group=module.groups.state)
        if self._merge is not None:
            ranks = self._merge(ranks)
        return {"step": module.step, "method": self.method.name, "ranks": ranks}

    def own_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of `state_dict`: its entry of `ranks` as `state`.

        `position` says which of the `holders` entries that is. It is None, and `state` empty, where
        another rank of the node, or of another part, has it. Collective where there are slices.
        """
        module, holders = self._needed(), self._holders()
        module.finish_step()
        position = holders.index(self.topology.rank) if self.topology.rank in holders else None
        state = (
            {} if position is None else unsharded_state(module.exchange.state_dict(), self.slices)
        )
        if self.topology.part and self._merge is None:
            position, state = None, {}
        return {
            "step": module.step,
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
        if self._module is None:
            self._loaded = state
            return
        if state["method"] != self.method.name:
            raise ValueError(
                f"the saved exchange state is of method={state['method']!r}, this exchange has "
                f"{self.method.name!r}"
            )
        # this rank's entry of what was saved, for full parameters, then cut to its slices
        holders, rank = self._holders(), self.topology.rank
        position = self.topology.node if len(holders) < self.topology.world_size else rank
        numels = {name: parameter.numel() for name, parameter in self._module.parameters.items()}
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
        self._module.finish_step()
        if own:
            self._module.exchange.load_state_dict(own)
        self._module.step = state["step"]
        self._reset_at = (state["step"], *self._reset_at[1:])

    def close(self) -> None:
        """Do what `end` does, and destroy the process groups of the exchange.

        To be called on all ranks alike: with NCCL destroying a group may wait for its ranks. Where
        the exchange has failed the groups are left to the end of the run's.
        """
        if self._module is not None:
            self._module.close()

    def end(self) -> None:
        """End the exchange's thread and release shared memory; the hook cannot be used any more.

        Its process groups stay until `close` or the end of the run's, so a rank may do so alone.
        """
        if self._module is not None:
            self._module.end()

    def _holders(self) -> list[int]:
        # One rank for each separate state
        by_nodes = self.method.sums_in_nodes(self.topology)
        step = self.topology.ranks_per_node if by_nodes else 1
        return list(range(0, self.topology.world_size, step))

    def _needed(self) -> "ModuleExchange":
        if self._module is None:
            raise ValueError("register the exchange on a DistributedDataParallel module first")
        return self._module


def _hook(exchange: CompressedExchange, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    # Start the exchange of a bucket; what DDP calls
    return exchange._needed().submit(bucket, loss_scale=exchange.loss_scale)


# ---- one module, step by step


@dataclass
class _Step:
    """One backward pass."""

    futures: list[torch.futures.Future[Tensor]] = field(default_factory=list)
    finite: bool = True  # set by the worker's thread
    ended: bool = False
    callback: bool = False  # queued at the end of the backward pass
    checks: StepChecks | None = None


class ModuleExchange:
    """Exchanges the gradients of one module. Making one is a collective call.

    Methods are called from the training (autograd) thread, except where they say otherwise.

    Args:
        module: has the parameters.
        method: how gradients are exchanged.
        settings: how the run waits and checks.
        topology: which ranks share a node.
        device: where the gradients are.
        name: unused so far, and alike on all ranks.
        ignored: names of parameters that this exchange leaves alone.
        exempt: names of parameters that are sent whole, by methods that exempt any.
    """

    def __init__(
        self,
        module: nn.Module,
        method: GradientMethod,
        settings: ExchangeSettings,
        *,
        topology: Topology,
        device: torch.device,
        name: str,
        ignored: Collection[str] = (),
        exempt: Collection[str] = (),
    ) -> None:
        # parameters by name, and which of them are exempt
        self.settings, self.topology = settings, topology
        self.parameters = averaged_parameters(module, ignored)
        self.names = {id(parameter): n for n, parameter in self.parameters.items()}
        rules = method.exempt_rules
        self.exempt = exempt_names(module, () if rules is None else (*rules, *exempt))
        # the method's exchange, with process groups and keys of the store of its own
        self.store = PrefixStore(name, _get_default_store())
        timeout_seconds = settings.timeout_seconds
        self.groups = make_groups(
            topology,
            num_stages=method.num_stages(topology),
            hierarchical=method.sums_in_nodes(topology),
            timeout_seconds=timeout_seconds,
            with_exempt=rules is not None,
        )
        own_store = PrefixStore("exchange", self.store)
        context = ExchangeContext(topology, self.groups, device, timeout_seconds, own_store)
        self.exchange = method.make_exchange(context)
        # the thread that runs it
        self.streams = make_streams(device)
        ranks = topology.members  # in the run
        monitor = PeerMonitor(
            self.store, rank=ranks[topology.rank], world_size=topology.world_size, ranks=ranks
        )
        self.worker = ExchangeWorker(
            streams=self.streams, monitor=monitor, timeout_seconds=timeout_seconds
        )
        # Also when the module is dropped and at exit: a thread inside torch while the interpreter
        # ends can abort the process.
        self._finalizer = weakref.finalize(self, _close, self.worker, self.exchange)
        self.exchange.warm_up()
        # by bucket index: identities of the parameters, layout
        self.layouts: dict[int, tuple[list[int], BucketLayout]] = {}
        # On CUDA a check makes the host wait: once in a step, at its end.
        self.checks_at_end = device.type == "cuda"
        self.step = 0  # exchanged steps that are over
        self.current: _Step | None = None
        self.dense_bytes = 0
        self.exposed = 0.0
        # pairs of marks: a backward pass ends, its gradients are there
        self.waits: list[tuple[Any, Any]] = []

    def submit(
        self, given: GradBucket | OwnBucket, *, loss_scale: float
    ) -> torch.futures.Future[Tensor]:
        """Start the exchange of one bucket; return the future of its buffer.

        Raises what ended the exchange.
        """
        if given.index() == 0:  # a new step
            self.finish_step()
            if self.settings.debug and self.step:
                self.check_parameters()
            self.current = _Step(checks=StepChecks() if self.checks_at_end else None)
        assert self.current is not None
        step = self.current
        bucket = Bucket(
            given.index(),
            given.buffer(),
            self._layout(given),
            given.is_last(),
            self.step,
            loss_scale,
            step.checks,
        )
        # Where DDP laid out its buckets anew, residuals move to them first.
        if not self.exchange.prepare(bucket):
            self.worker.drain()
            self.exchange.relayout()
        world_size = self.topology.world_size
        self.dense_bytes += 2 * (world_size - 1) * bucket.buffer.nbytes // world_size
        # The worker's thread takes it from here.
        future = self.worker.submit(self._guarded(bucket, step))
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
        start = self.streams.mark()
        self.worker.drain()
        with self.streams.worker():
            self.waits.append((start, self.streams.mark()))
        if len(self.waits) >= MOST_WAITS:
            self.exposed_seconds(reset=False)
        for future in step.futures:
            future.wait()
        # They hold DDP's buckets, of which it makes others after the first step.
        step.futures.clear()
        if step.checks is not None:
            for bucket, own in step.checks.failed().values():
                try:
                    self._nonfinite(bucket, step, own=own)
                except (RuntimeError, TimeoutError) as error:
                    raise self.worker.monitor.diagnose(error) from error
        if not step.finite:
            self.exchange.put_back()

    def _guarded(self, bucket: Bucket, step: _Step) -> Stages:
        """Run the stages of `bucket`, and do what `settings.nonfinite` asks for.

        In the worker's thread.
        """
        try:
            return (yield from self.exchange.stages(bucket))
        except NonFiniteGradient as error:
            return self._nonfinite(bucket, step, own=error.own)

    def _nonfinite(self, bucket: Bucket, step: _Step, *, own: bool) -> Tensor:
        # Do what `settings.nonfinite` asks for; on all ranks. `own`: this rank's is not finite.
        step.finite = False
        if self.settings.nonfinite == "skip":
            return bucket.buffer.fill_(torch.nan)
        # All ranks get here: by the store they learn whose gradient it is.
        positions = ranks_that(
            own,
            store=self.store,
            rank=self.topology.rank,
            world_size=self.topology.world_size,
            key=f"nonfinite/{bucket.step}/{bucket.index}",
            seconds=self.settings.timeout_seconds,
        )
        ranks = [self.topology.members[position] for position in positions]
        names = bucket.layout.names
        raise FloatingPointError(
            f"the gradient on rank {', '.join(map(str, ranks))} has NaN or infinities in a "
            f"bucket of {len(names)} parameters, {names[0]} to {names[-1]}; with a GradScaler "
            "use nonfinite='skip'"
        ) from None

    def _layout(self, given: GradBucket | OwnBucket) -> BucketLayout:
        # The layout; the same object as long as the bucket holds the same parameters
        parameters = given.parameters()
        known, layout = self.layouts.get(given.index(), ([], None))
        identities = [id(parameter) for parameter in parameters]
        if layout is None or known != identities:
            # gradients are views of the bucket's buffer
            names = tuple(self.names[identity] for identity in identities)
            first = given.buffer().storage_offset()
            layout = BucketLayout(
                names,
                tuple(int(gradient.storage_offset() - first) for gradient in given.gradients()),
                tuple(parameter.numel() for parameter in parameters),
                tuple(parameter.shape for parameter in parameters),
                tuple(name in self.exempt for name in names),
            )
            assert sum(layout.numels) == given.buffer().numel()
            self.layouts[given.index()] = identities, layout
        return layout

    def put_back(self) -> None:
        """Put back into the residual what the last step sent: that step was thrown away.

        Doing it twice is doing it once.
        """
        self.finish_step()
        self.exchange.put_back()

    def check_parameters(self) -> None:
        """Collective call: raise RuntimeError where parameters differ between ranks."""
        check_equal_parameters(self.parameters, group=self.groups.state, step=self.step)

    def exposed_seconds(self, *, reset: bool) -> float:
        """Return how long the training thread waited for gradients since the last reset."""
        self.exposed += sum(
            max(0.0, self.streams.seconds_between(start, stop)) for start, stop in self.waits
        )
        self.waits.clear()
        seconds = self.exposed
        if reset:
            self.exposed = 0.0
        return seconds

    def end(self) -> None:
        """End the thread and release shared memory."""
        self._finalizer()

    def close(self) -> None:
        """Do so, and destroy the groups; all ranks alike. Groups that failed are left alone."""
        self.end()
        if self.worker.error is None:
            self.groups.destroy()


def _close(worker: ExchangeWorker, exchange: BucketExchange) -> None:
    # End the thread, then release what the exchange holds
    worker.close()
    exchange.close()


# ---- parameters that DDP has


def averaged_parameters(module: nn.Module, ignored: Collection[str]) -> dict[str, nn.Parameter]:
    """Return the trained parameters whose gradients DDP averages, where it ignores `ignored`.

    DDP asks for a parameter of the module itself as ``".scale"`` here, and as ``"scale"`` where it
    broadcasts values.
    """
    averaged = {
        parameter
        for prefix, submodule in module.named_modules()
        for name, parameter in submodule.named_parameters(recurse=False)
        if parameter.requires_grad and f"{prefix}.{name}" not in ignored
    }
    return {
        name: parameter for name, parameter in module.named_parameters() if parameter in averaged
    }


def equal_parameters(module: nn.Module, ignored: Collection[str]) -> dict[str, nn.Parameter]:
    """Return the trained parameters that DDP keeps equal on all ranks.

    It broadcasts them, and averages their gradients.
    """
    return {
        name: parameter
        for name, parameter in averaged_parameters(module, ignored).items()
        if name not in ignored
    }


# ---- checks that all ranks agree, which name who does not


def check_equal_options(
    method: GradientMethod, settings: ExchangeSettings, *, topology: Topology
) -> None:
    """Collective call: raise ValueError where a rank's options or topology differ from rank 0's.

    It is raised on all ranks.
    """
    options: dict[str, Any] = {"method": method.name, **asdict(method), **asdict(settings)}
    options |= {"num_nodes": topology.num_nodes, "ranks_per_node": topology.ranks_per_node}
    check_equal_on_ranks(options, doing="the gradient exchange")


def check_equal_parameters(
    parameters: Mapping[str, nn.Parameter], *, group: dist.ProcessGroup, step: int
) -> None:
    """Collective call on `group`: raise RuntimeError naming the first parameter that differs.

    It is raised on all ranks. All bits are compared.
    """
    # (ranks, parameters, 2)
    own = torch.stack([_checksum(parameter) for parameter in parameters.values()])
    everyone = torch.empty(
        (dist.get_world_size(group), *own.shape), dtype=own.dtype, device=own.device
    )
    ring_all_gather(everyone, own, group=group).wait()
    for index, name in enumerate(parameters):
        for rank, sums in enumerate(everyone[:, index]):
            if not torch.equal(sums, everyone[0, index]):
                raise RuntimeError(
                    f"parameter {name} differs between rank 0 and rank {rank} after {step} "
                    "exchanged steps: something other than the averaged gradient changes it, or a "
                    "rank steps when others do not"
                )


def _checksum(tensor: Tensor) -> Tensor:
    # Two int64 sums (2,) over the bits of `tensor`: of all, and of every second element
    flat = tensor.detach().contiguous().view(-1)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    bits = bits.view(integers[bits.element_size()])
    return torch.stack([bits.sum(dtype=torch.int64), bits[::2].sum(dtype=torch.int64)])
