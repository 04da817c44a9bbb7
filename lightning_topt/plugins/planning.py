"""What planning takes from a Trainer, and how ranks agree on its result.

    make_fake_optimizers                  the optimizers, on a fake copy before there are any
    example_batch, batches_of             a batch, without advancing the data
    check_agreement                       ranks start with equal versions, options and models
    on_rank_0, on_every_rank              one result on all ranks, or one error on all ranks

`Planning` is what is kept of a search, `PlanDecision` what a strategy gets.
"""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import lightning
import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.core.optimizer import _configure_optimizers
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map, tree_unflatten
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import worker

from lightning_topt.basics.forked_call import ForkedCall
from lightning_topt.communication.rank_watch import is_of_collective
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.intervals import LEVEL
from lightning_topt.data.resumable_loader import TrackedLoader
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint
from lightning_topt.plugins.plan_request import PlanRequest

if TYPE_CHECKING:  # what measures is not imported where nothing is planned
    from lightning_topt.graph.op_graph import OpGraph
    from lightning_topt.plan.plan_intervals import Intervals


@dataclass(frozen=True)
class Planning:
    """A frontier and the point chosen from it; its plan says why.

    `graph` is what was planned. `left_out` says which kinds of plans were not searched or not
    found, and why, by the sentence that a clause completes.
    """

    frontier: PlanFrontier
    chosen: PlanPoint
    graph: OpGraph
    left_out: Mapping[str, str] = field(default_factory=dict)

    def intervals(self, cluster: Cluster, *, level: float = LEVEL) -> Intervals:
        """Return the intervals of the chosen plan's seconds and bytes.

        None where its errors on `cluster` are not known, or nothing was predicted.
        """
        from lightning_topt.plan.plan_intervals import KnownErrors  # noqa: PLC0415 - fits rarely ask

        predicted = self.chosen.plan.predicted
        if predicted is None:
            return None, None
        costs = predicted.step_seconds, predicted.peak_bytes
        known = KnownErrors.of(cluster, self.graph)
        return known.intervals(self.chosen.plan, *costs, level=level)


class PlanDecision(NamedTuple):
    """The plan of a fit, what was searched, and where the plan comes from.

    `planning` is None without a search, and on ranks but 0. `planned_by` is ``"search"``,
    ``"given"``, or says why the plan is ``ddp``.
    """

    plan: ParallelPlan
    planning: Planning | None
    planned_by: str


_READ_SECONDS = 20.0  # for a batch
# and the parameters of their module, by name
Optimizers = tuple[list[Optimizer], list[tuple[str, nn.Parameter]]]


def make_fake_optimizers(module: pl.LightningModule, *, device: torch.device) -> Optimizers:
    """Return what the module's own `configure_optimizers` makes, run on a fake copy."""
    from lightning_topt.graph.module_copy import fake_copy  # noqa: PLC0415  (fits with a plan)

    # Parameters on the fake device take no memory, whatever state is built.
    copied, mode = fake_copy(module, device=device.type)
    with mode:
        optimizers, _, _ = _configure_optimizers(
            copied.configure_optimizers()  # type: ignore[arg-type]
        )
    # Modules may ask their trainer for the parameters (`self.trainer.model.parameters()`), which
    # are the original ones.
    return optimizers, [*copied.named_parameters(), *module.named_parameters()]


T = TypeVar("T")


# ---- several ranks -------------------------------------------------------------------------------


def check_agreement(request: PlanRequest, module: nn.Module) -> None:
    """Raise RuntimeError on every rank when ranks differ.

    Versions, options and the model are compared. A collective call.
    """
    # What must be equal: else plans, or shapes of exchanged tensors, differ.
    mine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "options of the strategy": repr(request),
        "parameters of the model": [
            (name, tuple(p.shape), str(p.dtype)) for name, p in module.named_parameters()
        ],
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, other in enumerate(everyone):
        for name, value in everyone[0].items():
            if other[name] != value:
                first, second = _first_difference(value, other[name])
                raise RuntimeError(
                    f"rank 0 and rank {rank} differ in {name}: {first} against {second}"
                )


def _first_difference(one: Any, two: Any) -> tuple[Any, Any]:
    if not isinstance(one, list):
        return one, two
    for a, b in zip(one, two, strict=False):
        if a != b:
            return a, b
    return f"{len(one)} entries", f"{len(two)} entries"


class RemotePlanningError(RuntimeError):
    """Planning failed on another rank, whose message this is."""


def on_rank_0(function: Callable[[], T]) -> T:
    """Run `function` on rank 0; every rank gets its result, or an error.

    A collective call.
    """
    return _share(function, only_rank_0=True)


def on_every_rank(function: Callable[[], T]) -> T:
    """Run `function` on every rank; when one fails, all raise.

    A collective call, and `function` may hold some.
    """
    return _share(function, only_rank_0=False)


def _share(function: Callable[[], T], *, only_rank_0: bool) -> T:
    result: Any = None
    error: BaseException | None = None
    if dist.get_rank() == 0 or not only_rank_0:
        try:
            result = function()
        except Exception as caught:
            # Not shared with the others.
            if is_of_collective(caught):
                raise  # a rank is gone: the next collective call would wait for it again
            error = caught
    # Everyone learns of all errors before anyone raises.
    mine = None if error is None else f"{type(error).__name__}: {error}"
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, mine)
    if error is not None:
        raise error
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise RemotePlanningError(f"planning failed on rank {rank}: {problem}")
    if only_rank_0:
        box = [result]
        dist.broadcast_object_list(box, 0)
        result = box[0]
    return cast(T, result)


# ---- example batches -----------------------------------------------------------------------------


def example_batch(trainer: pl.Trainer) -> Any:
    """Return a training batch of this rank as `training_step` will get it, on the CPU.

    A copy of this process reads it, so that data sets, iterators and generators stay as they are.
    What a copy cannot read (an open file, a queue that a thread fills) is read here. A batch of an
    iterator that cannot begin again is then put back before its first. The loaders are those of the
    fit, which `trainer.fit_loop.setup_data()` has made. Raises ValueError when the training data
    are empty.
    """
    combined = trainer.fit_loop._combined_loader
    if combined is None:
        raise ValueError(
            "planning needs a training batch, but there are no training data "
            "(limit_train_batches=0?)"
        )
    if hasattr(os, "fork"):
        with suppress(Exception):
            read = ForkedCall(partial(_read_in_copy, combined, trainer), isolated=True)
            return read.result(timeout_seconds=_READ_SECONDS)
    # A batch that is read here moves loaders with a state of their own, which the fit has begun to
    # read.
    moved = [
        (loader, loader.state_dict())
        for loader in combined.flattened
        if isinstance(loader, _Stateful) and not isinstance(loader, TrackedLoader)
    ]
    if any(isinstance(loader, Iterator) for loader in combined.flattened):
        combined.flattened = [
            _ReadAhead(loader) if isinstance(loader, Iterator) else loader
            for loader in combined.flattened
        ]
    batch = batches_of(combined, trainer)[0]
    for loader, state in moved:
        loader.load_state_dict(state)
    if moved:
        assert trainer.fit_loop._data_fetcher is not None
        iter(trainer.fit_loop._data_fetcher)
    return batch


def _read_in_copy(loaders: CombinedLoader, trainer: pl.Trainer) -> Any:
    for loader in loaders.flattened:
        if getattr(loader, "num_workers", 0) and loader.worker_init_fn is not None:
            loader.worker_init_fn(0)
    return batches_of(loaders, trainer)[0]


@contextmanager
def _as_worker(loader: Any) -> Iterator[None]:
    # Let the data set of `loader` be read as by its first worker, where it has workers
    count = getattr(loader, "num_workers", 0)
    before = worker._worker_info
    if count:
        worker._worker_info = worker.WorkerInfo(
            id=0, num_workers=count, seed=torch.initial_seed(), dataset=loader.dataset
        )
    try:
        yield
    finally:
        worker._worker_info = before


class _ReadAhead:
    """An iterator of which one item was read; it comes again, in its turn."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator, self._ahead = iterator, [*itertools.islice(iterator, 1)]
        self.first = self._ahead[0] if self._ahead else None

    def __iter__(self) -> Iterator[Any]:
        while self._ahead:
            yield self._ahead.pop()
        yield from self._iterator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def batches_of(loaders: CombinedLoader, trainer: pl.Trainer) -> tuple[Any, Any | None]:
    """Return the same for given training loaders.

    `trainer` has the module and the data module whose transfer hooks run.
    """
    # Transforms may draw.
    with isolate_rng():
        singles = [_samples(loader, 1) for loader in loaders.flattened]
        doubles = [_samples(loader, 2) for loader in loaders.flattened]
    single = tree_unflatten(singles, loaders._spec)
    double = (
        None if any(batch is None for batch in doubles) else tree_unflatten(doubles, loaders._spec)
    )
    return _transferred(trainer, single), None if double is None else _transferred(trainer, double)


def _samples(loader: Any, times: int) -> Any | None:
    """Return a batch of `loader` with `times` as many samples, or None.

    None where its size cannot be chosen.
    """
    dataset: Any = getattr(loader, "dataset", None)
    batch_size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    is_map_style = isinstance(loader, DataLoader) and not isinstance(dataset, IterableDataset)
    # The first samples, whatever the sampler's order.
    if is_map_style and isinstance(batch_size, int) and batch_size:
        size = len(dataset)
        if size == 0:
            raise ValueError("planning needs a training batch, but the training data set is empty")
        if times > 1 and size < 2 * batch_size:
            return None
        with _as_worker(loader):
            samples = [dataset[index % size] for index in range(times * min(batch_size, size))]
        return loader.collate_fn(samples)
    return _first(loader) if times == 1 else None


def _first(loader: Iterable[Any]) -> Any:
    if isinstance(loader, _ReadAhead):
        return loader.first
    if isinstance(loader, DataLoader) and loader.num_workers:
        return _first_without_workers(loader)
    for batch in loader:
        return batch
    raise ValueError("planning needs a training batch, but the training data are empty")


def _first_without_workers(loader: DataLoader[Any]) -> Any:
    # The first batch; workers would outlive this
    dataset: Any = loader.dataset
    with _as_worker(loader):
        if isinstance(dataset, IterableDataset):
            samples = [*itertools.islice(iter(dataset), loader.batch_size or 1)]
        else:
            index: Any = next(iter(loader.batch_sampler or loader.sampler), [])
            samples = [dataset[i] for i in index] if loader.batch_sampler else [dataset[index]]
    if not samples:
        raise ValueError("planning needs a training batch, but the training data are empty")
    is_batched = loader.batch_size is not None or loader.batch_sampler is not None
    return loader.collate_fn(samples if is_batched else samples[0])


def _transferred(trainer: pl.Trainer, batch: Any) -> Any:
    """Return `batch` after the module's transfer hooks, on the CPU.

    The loader's own tensors stay as they are.
    """
    # Hooks may change tensors in place.
    batch = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch)
    return trainer.strategy.batch_to_device(batch, device=torch.device("cpu"))
