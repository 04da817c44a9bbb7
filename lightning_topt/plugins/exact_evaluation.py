"""Validation, tests and predictions on ranks with different numbers of batches.

A rank without a batch waits for the others at the end of the loader, and takes part in the gathers
of parameters in shards. What was logged is then reduced among all ranks, weighted by samples.

The sampler that Lightning would give a loader repeats samples until all ranks have equally many.
`ExactSampler` does not: every sample counts once, where the user asks for that. Code of the user
that talks to other ranks by itself may count on equally many batches.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _DatasetSamplerWrapper
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.trainer.states import RunningStage
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from lightning_topt.plugins.lent_methods import LentMethods
from lightning_topt.plugins.loader_lengths import LoaderLengths, are_known
from lightning_topt.plugins.logged_results import lend_syncs, share_results
from lightning_topt.plugins.presence import Presence, Ranks, Votes, gather_counts

_NEVER = float("inf")


class ExactSampler(DistributedSampler[Any]):
    """Every `num_replicas`-th sample from `rank` on; none is repeated, some ranks may have none."""

    def __init__(
        self, dataset: Any, *, num_replicas: int, rank: int, shuffle: bool, seed: int = 0
    ) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed)
        self.total_size = len(dataset)
        self.num_samples = len(range(rank, self.total_size, num_replicas))

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's indices, in order or shuffled alike on all ranks."""
        indices = list(range(self.total_size))
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            indices = torch.randperm(self.total_size, generator=generator).tolist()
        return iter(indices[self.rank :: self.num_replicas])


class ExactSamplerOf(ExactSampler):
    """The same of what another sampler yields."""

    def __init__(self, sampler: Any, **options: Any) -> None:
        super().__init__(_DatasetSamplerWrapper(sampler), **options)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's part of what the sampler yields now."""
        dataset: Any = self.dataset
        dataset.reset()
        return (dataset[index] for index in super().__iter__())


class ExactEvaluation:
    """Lets the loops of a Trainer evaluate where ranks have different numbers of batches.

    Args:
        presence: of the ranks, which averages of user code ask.
        gathers: whether an evaluation step is a collective call of all ranks.
        join: takes part in such a step of the others, by its name.
        pads: whether samplers are Lightning's, which repeat samples; else each counts once.
    """

    def __init__(
        self,
        presence: Presence,
        *,
        gathers: Callable[[], bool],
        join: Callable[[str], None],
        pads: bool = False,
    ) -> None:
        self.presence, self.gathers, self._join = presence, gathers, join
        self.pads = pads
        self._lent, self._metrics = LentMethods(), LentMethods()
        self._without: dict[Any, list[float]] = {}  # limits of loops that this rank has no data of

    def begin(self, trainer: pl.Trainer) -> None:
        """Take the loops of `trainer` in hand, before their data are set up."""
        self.end()
        if not self.pads:
            self._lent.lend(trainer._data_connector, "_resolve_sampler", self._sampler)
        loops: list[Any] = [
            trainer.fit_loop.epoch_loop.val_loop,
            trainer.validate_loop,
            trainer.test_loop,
            trainer.predict_loop,
        ]
        for loop in loops:
            self._lent.lend(loop, "setup_data", lambda own, loop=loop: self._set_up_data(own, loop))
            self._lent.lend(loop, "reset", lambda own, loop=loop: self._reset(own, loop))
            self._lent.lend(loop, "on_run_end", self._end_run)
            if loop is not trainer.predict_loop:
                store = partial(self._store, loop)
                self._lent.lend(loop, "_store_dataloader_outputs", store)

    def end(self) -> None:
        """Give the loops back."""
        self._lent.give_back()
        self._metrics.give_back()
        self.presence.differs_in_evaluation = False

    def _sampler(
        self, own: Callable[..., Any], dataloader: DataLoader[Any], shuffle: bool, mode: Any = None
    ) -> Any:
        """Return the sampler of this rank."""
        trainer = own.__self__.trainer  # type: ignore[attr-defined]
        evaluates = mode is not None and mode is not RunningStage.TRAINING
        if not evaluates or not trainer._data_connector._requires_distributed_sampler(dataloader):
            return own(dataloader, shuffle=shuffle, mode=mode)
        options = {
            **trainer.distributed_sampler_kwargs,
            "shuffle": shuffle and not trainer.overfit_batches,
            "seed": int(os.getenv("PL_GLOBAL_SEED", 0)),
        }
        sampler: Any = dataloader.sampler
        is_plain = isinstance(sampler, RandomSampler | SequentialSampler)
        if mode is RunningStage.PREDICTING:
            # As Lightning: each sample once, in the order of the loader's own sampler.
            return ExactSamplerOf(sampler, **options)
        if is_plain:
            return ExactSampler(dataloader.dataset, **options)
        return ExactSamplerOf(sampler, **options)

    def _set_up_data(self, own: Callable[[], None], loop: Any) -> None:
        """Set the data up; a rank without any runs the loop like the others."""
        name = _limits_of(loop)
        before = getattr(loop, name)
        lengths, device = LoaderLengths(), loop.trainer.strategy.root_device
        with lengths.alone():
            own()
        lengths.agree(limit=_limit_of(loop), device=device)
        batches = getattr(loop, name)
        if batches is before:
            return
        self._without.pop(loop, None)
        gathered = gather_counts(batches, device=device)
        if sum(batches) == 0:
            self._without[loop] = batches
            longest = [max(column) for column in zip(*gathered, strict=True)]
            setattr(loop, name, [n if n == _NEVER else int(n) for n in longest])

    def _reset(self, own: Callable[[], None], loop: Any) -> None:
        """Begin a run of `loop`; agree on its batches."""
        name, limits = _limits_of(loop), self._without.get(loop)
        longest = getattr(loop, name)
        setattr(loop, name, longest if limits is None else limits)
        try:
            own()
        finally:
            setattr(loop, name, longest)
        fetcher, combined = loop._data_fetcher, loop._combined_loader
        if isinstance(fetcher, _DataLoaderIterDataFetcher):
            return  # the user's step takes batches by itself
        device = loop.trainer.strategy.root_device
        own_ones = [*_counts_of(fetcher, combined, combined.limits), _has_other_sizes(combined)]
        rows = gather_counts(own_ones, device=device)
        counts = [row[:-1] for row in rows]
        is_known = not any(_NEVER in row for row in counts)
        is_even = is_known and all(row == counts[0] for row in counts)
        if not is_even or any(row[-1] for row in rows):
            self.presence.differs_in_evaluation = True
            lend_syncs(loop.trainer.lightning_module, self._metrics)
        if is_even:
            return
        votes = None if is_known else self.presence.votes(loop.trainer.strategy)
        if is_known or votes is not None:
            loop._data_fetcher = EvaluationFetcher(fetcher, loop, self, counts, votes=votes)

    def _end_run(self, own: Callable[..., Any]) -> Any:
        """End a run of a loop, with the hooks of the user that gather what it found."""
        result = own()
        self.presence.differs_in_evaluation = False
        return result

    def _store(self, loop: Any, own: Callable[[], None]) -> None:
        """Store what was logged of a loader, once: the fetcher may have done so already."""
        fetcher = loop._data_fetcher
        if isinstance(fetcher, EvaluationFetcher) and fetcher.has_stored:
            fetcher.has_stored = False
        else:
            own()

    def join(self, loop: Any) -> None:
        """Take part in a step of others in `loop`, for which this rank has no batch."""
        if self.gathers():
            self._join(_step_of(loop))


def _has_other_sizes(combined: Any) -> bool:
    """Return whether this rank's share of a loader is not as large as that of each other rank."""
    samplers = [getattr(loader, "sampler", None) for loader in combined.flattened]
    return any(
        isinstance(sampler, ExactSampler) and sampler.total_size % sampler.num_replicas
        for sampler in samplers
    )


def _counts_of(fetcher: Any, combined: Any, limits: Iterable[float]) -> list[float]:
    """Return how many batches this rank will have of each loader; infinite if not known."""
    is_sequential = combined._mode == "sequential"
    if not are_known(combined):
        return [_NEVER] * (len(combined.flattened) if is_sequential else 1)
    if not is_sequential:
        return [fetcher.length]
    return [
        min(len(loader), limit) for loader, limit in zip(combined.flattened, limits, strict=True)
    ]


def _limits_of(loop: Any) -> str:
    """Return the name of what a loop keeps its batches in."""
    return "max_batches" if "max_batches" in vars(loop) else "_max_batches"


def _limit_of(loop: Any) -> str:
    """Return the name of the Trainer's option that limits the batches of `loop`."""
    kind = {"validation_step": "val", "test_step": "test", "predict_step": "predict"}
    return f"limit_{kind[_step_of(loop)]}_batches"


def _step_of(loop: Any) -> str:
    """Return the name of the module's step that `loop` calls."""
    if not hasattr(loop, "_results") or loop._results is None:
        return "predict_step"
    return "test_step" if loop.trainer.testing else "validation_step"


class EvaluationFetcher:
    """Lightning's fetcher of one rank in a loop whose ranks have different numbers of batches.

    Ranks go through the loaders in rounds: in each, those take part that have a batch of the loader
    that is under way. Ranks without one are not asked, unless parameters are in shards.
    """

    def __init__(
        self,
        fetcher: Any,
        loop: Any,
        evaluation: ExactEvaluation,
        counts: list[list[float]],
        *,
        votes: Votes | None,
    ) -> None:
        self._own, self._loop, self._evaluation = fetcher, loop, evaluation
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._counts, self._votes = counts, votes  # votes where counts are not known
        self._position = (0, 0)  # the loader, and how many rounds it has had
        self._loader: int | None = None  # that has begun
        self._first: Ranks = ()  # the ranks that had batches of it
        self._held: list[Any] = []
        self._within = ExitStack()
        self.has_stored = False  # what was logged of the loader before

    @property
    def done(self) -> bool:
        """Whether this rank has had its last batch."""
        return not self._held and bool(self._own.done)

    def teardown(self) -> None:
        """End, as Lightning's fetcher."""
        self._within.close()
        self._own.teardown()

    def __iter__(self) -> EvaluationFetcher:
        return self

    def __next__(self) -> Any:
        """Return the next batch of this rank: (batch, index, loader).

        Raises StopIteration once no rank has any.
        """
        while True:
            self._within.close()
            self._hold()
            loader, ranks = self._round()
            if loader != self._loader:
                self._change_loader(loader, ranks)
            if loader is None:
                raise StopIteration
            if len(ranks) < self._size:
                self._enter(ranks)
            if self._rank in ranks:
                if not self._held:
                    raise RuntimeError(
                        f"the data of rank {self._rank} for evaluation ended before as many "
                        "batches as their length says: correct __len__ of the data set or of the "
                        "loader, or leave it out"
                    )
                return self._held.pop()
            self._evaluation.join(self._loop)

    # ---- steps of it -----------------------------------------------------------------------------

    def _hold(self) -> None:
        """Have this rank's next batch at hand, if there is one."""
        if not self._held:
            with suppress(StopIteration):
                self._held.append(next(self._own))

    def _round(self) -> tuple[int | None, Ranks]:
        """Return the loader of the next round, None after the last one, and who has a batch."""
        if self._votes is not None:
            # The loader of the batch at hand, counted from 1.
            self._votes.send(1 + self._held[0][2] if self._held else 0)
            next_ones = self._votes.read()
            first = min((each for each in next_ones if each), default=None)
            if first is None:
                return None, ()
            return first - 1, tuple(r for r in range(self._size) if next_ones[r] == first)
        (loader_index, rounds), counts = self._position, self._counts
        while loader_index < len(counts[0]):
            ranks = tuple(r for r in range(self._size) if counts[r][loader_index] > rounds)
            if ranks:
                self._position = (loader_index, rounds + 1)
                return loader_index, ranks
            loader_index, rounds = loader_index + 1, 0
        return None, ()

    def _change_loader(self, loader: int | None, ranks: Ranks) -> None:
        """Finish a loader, and begin the next one: as Lightning's loop does on each rank."""
        loop, before = self._loop, self._loader
        has_results = getattr(loop, "_results", None) is not None
        if before is not None and has_results:
            without = [rank for rank in range(self._size) if rank not in self._first]
            if without:
                module = loop.trainer.lightning_module
                share_results(loop._results, module, without=without)
            # Among all ranks, before some of them go on with the next loader. The loop does so when
            # a batch of that comes, and at its end.
            if loader is not None:
                loop._store_dataloader_outputs()
                self.has_stored = self._rank in ranks
        self._loader, self._first = loader, ranks
        if loader is not None and has_results and self._rank not in ranks:
            has_several = loop._is_sequential and loop.num_dataloaders > 1
            loop._results.dataloader_idx = loader if has_several else None

    def _enter(self, ranks: Ranks) -> None:
        """Let only `ranks` take part in what comes, up to the next call."""
        trainer = self._loop.trainer
        strategy, among = trainer.strategy, self._evaluation.presence.among
        self._within.enter_context(
            among(ranks, trainer.lightning_module, timeout=strategy._timeout)
        )
        self._within.enter_context(_own_calls(self._evaluation.presence, strategy))
        if isinstance(strategy.model, DistributedDataParallel) and not self._evaluation.gathers():
            self._within.enter_context(_without_buffers(strategy.model))


@contextmanager
def _without_buffers(model: DistributedDataParallel) -> Generator[None, None, None]:
    """Let DDP send no buffers while some ranks have no batch: evaluation changes none."""
    before, model.require_forward_param_sync = model.require_forward_param_sync, False
    try:
        yield
    finally:
        model.require_forward_param_sync = before


@contextmanager
def _own_calls(presence: Presence, strategy: Any) -> Generator[None, None, None]:
    """Let calls of user code to all ranks end, in a step that only some have a batch for.

    Barriers and broadcasts are among those ranks. Other functions of ``torch.distributed`` that are
    given no group raise ValueError: they would wait for ranks that do not come.
    """
    lent, ranks, group = LentMethods(), presence.ranks, presence.group
    if ranks is not None and group is not None:
        for name in _COLLECTIVES:
            lent.lend(dist, name, partial(_refused, name, ranks))
        lent.lend(dist, "barrier", partial(_among_these, group))
        lent.lend(strategy, "broadcast", partial(_broadcast, group))
    try:
        yield
    finally:
        lent.give_back()


# What user code may call in a step, by its name in torch.distributed.
_COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "broadcast_object_list",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "gather",
    "gather_object",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
)


def _refused(name: str, ranks: Ranks, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if inspect.signature(own).bind(*args, **kwargs).arguments.get("group") is not None:
        return own(*args, **kwargs)
    raise ValueError(
        f"torch.distributed.{name} was called in a step for which only ranks "
        f"{', '.join(map(str, ranks))} have a batch, because every sample is evaluated once: use "
        "self.all_gather, self.log(..., sync_dist=True) or torchmetrics, call it at the end of the "
        "epoch, or set pad_evaluation=True"
    )


def _among_these(
    present: dist.ProcessGroup,
    own: Callable[..., Any],
    group: dist.ProcessGroup | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    return own(present if group is None else group, *args, **kwargs)


def _broadcast(present: dist.ProcessGroup, own: Callable[..., Any], obj: Any, src: int = 0) -> Any:
    found = [obj]
    dist.broadcast_object_list(found, src, group=present)
    return found[0]
