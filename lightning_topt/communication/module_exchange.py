"""An exchange at work on one module: takes buckets from the backward pass, step by step."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from lightning_topt.communication.agreement import check_equal_parameters
from lightning_topt.communication.bucket import (
    Bucket,
    BucketExchange,
    BucketLayout,
    NonFiniteGradient,
    Stages,
)
from lightning_topt.communication.exchange_context import ExchangeContext, ExchangeSettings
from lightning_topt.communication.exchange_method import GradientMethod
from lightning_topt.communication.exchange_worker import ExchangeWorker
from lightning_topt.communication.exempt import exempt_names
from lightning_topt.communication.named_tensors import averaged_parameters
from lightning_topt.communication.own_buckets import OwnBucket
from lightning_topt.communication.peers import PeerMonitor, ranks_that
from lightning_topt.communication.streams import make_streams
from lightning_topt.communication.topology import Topology, make_groups


def _close(worker: ExchangeWorker, exchange: BucketExchange) -> None:
    worker.close()
    exchange.close()


@dataclass
class _Step:
    """One backward pass."""

    futures: list[torch.futures.Future[Tensor]] = field(default_factory=list)
    finite: bool = True  # set by the worker's thread
    ended: bool = False
    callback: bool = False  # queued at the end of the backward pass


class ModuleExchange:
    """Exchanges the gradients of one module. Making one is a collective call; `name` is unused so
    far and alike on all ranks.

    Parameters named in `ignored` are somebody else's; those in `exempt` are sent whole by methods
    that exempt any.

    Methods are called from the training (autograd) thread, except where they say otherwise.
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
        self.settings, self.topology = settings, topology
        self.parameters = averaged_parameters(module, ignored)
        self.names = {id(parameter): n for n, parameter in self.parameters.items()}
        rules = method.exempt_rules
        self.exempt = exempt_names(module, () if rules is None else (*rules, *exempt))
        self.store = PrefixStore(name, _get_default_store())
        timeout_seconds, hierarchical = settings.timeout_seconds, method.sums_in_nodes(topology)
        self.groups = make_groups(
            topology,
            num_stages=method.num_stages(topology),
            hierarchical=hierarchical,
            timeout_seconds=timeout_seconds,
        )
        self.exchange = method.make_exchange(
            ExchangeContext(
                topology, self.groups, device, timeout_seconds, PrefixStore("exchange", self.store)
            )
        )
        self.streams = make_streams(device)
        members = topology.members
        monitor = PeerMonitor(
            self.store, rank=members[topology.rank], world_size=topology.world_size, members=members
        )
        self.worker = ExchangeWorker(
            streams=self.streams, monitor=monitor, timeout_seconds=timeout_seconds
        )
        # Also when the module is dropped and at exit: a thread inside torch while the interpreter
        # ends can abort the process.
        self._finalizer = weakref.finalize(self, _close, self.worker, self.exchange)
        self.exchange.warm_up()
        self.layouts: dict[int, tuple[list[int], BucketLayout]] = {}
        self.step = 0  # exchanged steps that are over
        self.current: _Step | None = None
        self.dense_bytes = 0
        self.exposed = 0.0
        # marks: a backward pass ends, its gradients are there
        self.waits: list[tuple[Any, Any]] = []

    def submit(
        self, given: GradBucket | OwnBucket, *, loss_scale: float
    ) -> torch.futures.Future[Tensor]:
        """Start the exchange of one bucket; the future of its buffer. Raises what ended the
        exchange.
        """
        if given.index() == 0:
            self._begin_step()
        assert self.current is not None
        step = self.current
        bucket = Bucket(
            given.index(),
            given.buffer(),
            self._layout(given),
            given.is_last(),
            self.step,
            loss_scale,
        )
        if not self.exchange.prepare(bucket):
            self.worker.drain()
            self.exchange.relayout()
        world_size = self.topology.world_size
        self.dense_bytes += 2 * (world_size - 1) * bucket.buffer.nbytes // world_size
        future = self.worker.submit(self._guarded(bucket, step))
        step.futures.append(future)
        # The graph task is -1 where DDP hands out buckets of unused parameters in the forward pass.
        if not step.callback and torch._C._current_graph_task_id() != -1:
            step.callback = True
            Variable._execution_engine.queue_callback(self.finish_step)
        return future

    def _begin_step(self) -> None:
        self.finish_step()
        if self.settings.debug and self.step:
            self.check_parameters()
        self.current = _Step()

    def finish_step(self) -> None:
        """Wait until the buckets of this step are back; runs at the end of the backward pass,
        before DDP's own end.

        Raises here because a future could only hand torch the text of an error.
        """
        step = self.current
        if step is None or step.ended:
            return
        step.ended = True
        self.step += 1
        start = self.streams.mark()
        self.worker.drain()
        with self.streams.worker():
            self.waits.append((start, self.streams.mark()))
        if len(self.waits) >= 64:
            self.exposed_seconds(reset=False)
        for future in step.futures:
            future.wait()
        # they have DDP's buckets, of which it makes others after the first step
        step.futures.clear()
        if not step.finite:
            self.exchange.put_back()

    def _guarded(self, bucket: Bucket, step: _Step) -> Stages:
        """The stages of `bucket`, with what `settings.nonfinite` asks for; in the worker's
        thread.
        """
        try:
            return (yield from self.exchange.stages(bucket))
        except NonFiniteGradient as error:
            step.finite = False
            if self.settings.nonfinite == "skip":
                return bucket.buffer.fill_(torch.nan)
            positions = ranks_that(
                error.own,
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
                f"bucket of {len(names)} "
                f"parameters, {names[0]} to {names[-1]}; with a GradScaler use nonfinite='skip'"
            ) from None

    def _layout(self, given: GradBucket | OwnBucket) -> BucketLayout:
        """The same object as long as the bucket holds the same parameters."""
        parameters = given.parameters()
        known, layout = self.layouts.get(given.index(), ([], None))
        identities = [id(parameter) for parameter in parameters]
        if layout is None or known != identities:
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
        """Put back into the residual what the last step sent: that step was thrown away. Twice is
        once.
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

    def close(self) -> None:
        """End the thread and release shared memory."""
        self._finalizer()
