"""A DataLoader that resumes in the middle of an epoch, at the next sample and in the same order.

    TrackedLoader   knows where it is, and goes on from there; a strategy saves that
    Deal            how an order of samples is dealt to ranks, in batches

The skipped batches are not read. Of torch's own samplers the order of all samples follows from a
few values, the recipe, and from random states. So a checkpoint holds these and a count, whatever
the number of samples. Only the order is restored: random augmentation in workers differs from a run
that was never interrupted.

What is left of an order can be dealt to any number of ranks, in batches of any size. Sample ``i``
of the rest goes to rank ``i % ranks``, as `DistributedSampler` does it. Where the ranks would not
get equally many it adds samples from the order's beginning, or leaves the last ones out
(``drop_last``).
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol, SupportsIndex

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

_POSITION = "_topt_position"
# Their order is that of one process; a recipe of the last two is drawn by the same sampler only.
_UNSHARED = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Tracking(Protocol):
    """What a `TrackedLoader` knows of the program that trains on its batches."""

    @property
    def iterators(self) -> Sequence[object]:
        """What the program reads its batches from.

        Others may read a loader too. That changes no position.
        """
        ...

    @property
    def waiting(self) -> list[Callable[[], None]] | None:
        """What begins the loaders when the first batch of any is read; None where each has begun.

        They wait where a position is still to come.
        """
        ...

    def before_epoch(self) -> None:
        """Know that an epoch is about to begin, of which no loader has read anything."""
        ...

    def before_fetch(self) -> None:
        """Know that a batch is about to be read."""
        ...


class TrackedLoader(DataLoader[Any]):
    """A DataLoader, for map-style data sets, that knows its position in the epoch.

    A position counts the batches that were handed out, not those that workers have prepared ahead.
    It can be loaded with ``weights_only``. `tracking` is None until `make_tracked` sets it.
    `is_known` says that it has found an order that all ranks know, in this fit or the last one.
    """

    tracking: Tracking | None = None
    is_known = False

    @property
    def _index_sampler(self) -> Any:
        return self._position

    @property
    def _position(self) -> _Position:
        if _POSITION not in vars(self):  # a DataLoader may have become tracked later
            sampler = self.sampler if self.batch_sampler is None else self.batch_sampler
            vars(self)[_POSITION] = _Position(sampler, self.generator)
        return vars(self)[_POSITION]  # type: ignore[no-any-return]

    def __iter__(self) -> Any:
        batches, tracking = _Batches(self), self.tracking
        if tracking is None:
            batches.begin(resumes=True)
        elif tracking.waiting is None:
            batches.begin()
        else:
            tracking.waiting.append(batches.begin_waiting)
        return batches

    def _begin(self, *, resumes: bool) -> tuple[Any, _Epoch]:
        """Start an epoch, in a program that `resumes` before it.

        Its random states are those of the program that was interrupted: this draws what that drew.
        What others read begins an epoch of its own, and leaves a loaded position alone.
        """
        epoch = self._position.begin(resumes=resumes)
        # The rest of an epoch draws nothing for its beginning, which was before.
        if epoch.is_rest and self.tracking is not None:
            with restored_random_states():
                return super().__iter__(), epoch
        if self.tracking is not None:
            self.tracking.before_epoch()
        # Workers that have lived since an earlier epoch get no new seed.
        if self.tracking is not None and resumes and self.persistent_workers:
            own, self.generator = self.generator, torch.Generator()
            try:
                return super().__iter__(), epoch
            finally:
                self.generator = own
        return super().__iter__(), epoch

    def position(self, *, behind: int = 0) -> dict[str, Any]:
        """Return the position before the last `behind` batches: tensors and plain values.

        ``batches`` is 0 at the beginning; ``ended`` says that it is the end.
        """
        # loaded and not begun: the position is still that one
        if self._position.to_resume is not None:
            return self._position.to_resume
        epochs = self._epochs
        for epoch in reversed(epochs):
            if behind <= epoch.batches - epoch.first or epoch is epochs[0]:
                return epoch.position(max(epoch.first, epoch.batches - behind))
            behind -= epoch.batches - epoch.first
        return {"batches": 0}

    def go_to(self, position: dict[str, Any], *, stays_ended: bool = False) -> None:
        """Let the next epoch be the rest of the one that `position` is of.

        Of one that has ended that is nothing, where it `stays_ended`; else a new epoch. There is a
        warning where the order cannot be drawn again, for the data have changed.
        """
        self._position.go_to(position, stays_ended=stays_ended)

    def batches_left(self) -> int:
        """Return how many batches the next epoch has."""
        return self._position.batches_left()

    @property
    def has_begun(self) -> bool:
        """Whether an epoch has begun."""
        return self._position.drawing is not None

    def let_go(self) -> None:
        """End the tracking; the position stays."""
        self._position.epochs, self.tracking = self._epochs, None

    @property
    def _epochs(self) -> list[_Epoch]:
        # The last two epochs of what is trained on; without `tracking`, of the last reader
        if self.tracking is None:
            return self._position.epochs
        for each in self.tracking.iterators:
            if isinstance(each, _Batches) and each.loader is self:
                return each.epochs
        return []

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Copy the user's loader; where a fit is in it stays with the fit."""
        ours = ("tracking", "is_known", _POSITION)
        state = {name: value for name, value in vars(self).items() if name not in ours}
        # where Lightning has noted what was set while it made the loader
        if record := state.get("__pl_attrs_record"):
            state["__pl_attrs_record"] = [each for each in record if each[0][0] not in ours]
        return _loader, (), state


def _loader() -> DataLoader[Any]:
    return DataLoader.__new__(DataLoader)


def make_tracked(loader: object, tracking: Tracking, *, ranks: int, parts: int) -> bool:
    """Let `tracking` know of what `loader` hands out; returns whether its order is known exactly.

    It is for plain DataLoaders of map-style data sets, which change in place: only the class does,
    so the loader stays the object that the user holds. `ranks` is how many ranks there are, and
    `parts` among how many of them samples are split.
    """
    can_be = isinstance(loader, TrackedLoader) or (
        type(loader) is DataLoader
        and not isinstance(loader.dataset, IterableDataset)
        and loader.in_order
    )
    if not can_be or not _is_order_known(loader, ranks=ranks, parts=parts):
        if isinstance(loader, TrackedLoader):  # of an earlier fit
            loader.tracking, loader.is_known = None, False
        return False
    assert isinstance(loader, DataLoader)
    loader.__class__ = TrackedLoader
    assert isinstance(loader, TrackedLoader)
    # of an earlier fit
    vars(loader).pop(_POSITION, None)
    loader.tracking, loader.is_known = tracking, True
    return True


def _is_order_known(loader: Any, *, ranks: int, parts: int) -> bool:
    # Whether the order of all ranks follows from what one of them knows
    deal = Deal.of(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
    if deal is None:
        return False
    if type(deal.sampler) is DistributedSampler:
        return deal.ranks == parts
    # Ranks that draw at random without it have orders of their own.
    return ranks == 1 or type(deal.sampler) is SequentialSampler


class _Position:
    """Replaces a loader's sampler (of batches, or else of samples), and starts its epochs."""

    def __init__(self, sampler: Any, generator: torch.Generator | None) -> None:
        deal = Deal.of(sampler)
        assert deal is not None, "only loaders of known orders are tracked"
        self.sampler, self.deal = sampler, deal
        # each once, though the loader and its sampler may share one
        found = [generator, getattr(deal.sampler, "generator", None)]
        self.generators = list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
        self.drawing: _Epoch | None = None  # the epoch that was begun last
        self.epochs: list[_Epoch] = []  # of what was begun or read last
        self.to_resume: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[object]:
        return iter(self.sampler) if self.drawing is None else self.drawing.indices()

    def begin(self, *, resumes: bool) -> _Epoch:
        """Start a new epoch, or if it `resumes` the rest of the one that was loaded."""
        resumed = None
        if resumes:
            resumed, self.to_resume = self.to_resume, None
        self.drawing = _Epoch(self, resumed)
        return self.drawing

    def go_to(self, position: dict[str, Any], *, stays_ended: bool) -> None:
        has_order = "order" in position and "random" in position
        if has_order and not self.deal.can_draw(position["order"]):
            warnings.warn(
                "the order of the interrupted epoch cannot be drawn again, for there is another "
                "data set or sampler: this epoch begins anew, and samples may come twice",
                stacklevel=3,
            )
            has_order = False
        is_end = stays_ended and position.get("ended")
        self.to_resume = dict(position) if has_order or is_end else None
        self.epochs = []
        # A Trainer sets the sampler's epoch only after workers have drawn their first batches.
        if has_order and "epoch" in position["order"] and hasattr(self.deal.sampler, "set_epoch"):
            self.deal.sampler.set_epoch(position["order"]["epoch"])

    def batches_left(self) -> int:
        state = self.to_resume
        if state is None:
            return len(self.sampler)
        if state.get("ended"):
            return 0
        return self.deal.batches(self.deal.length(state["order"]) - state["used"])

    def remember(self) -> dict[str, Any]:
        """Return the state that the next order depends on."""
        return {
            "random": random_states(),
            "generators": [generator.get_state() for generator in self.generators],
            "order": self.deal.recipe(),
        }

    def rest(self, state: dict[str, Any]) -> Iterator[object]:
        """Draw the order of an interrupted epoch again, and return an iterator over its rest."""
        with restored_random_states():
            set_random_states(state["random"])
            for generator, value in zip(self.generators, state["generators"], strict=False):
                generator.set_state(value)
            return self.deal.rest(self.deal.draw(state["order"]), used=state["used"])


class _Epoch:
    """One pass over the sampler: its initial state, and how much was handed out."""

    def __init__(self, of: _Position, resumed: dict[str, Any] | None) -> None:
        self.of, self.is_rest = of, resumed is not None
        self.origin: dict[str, Any] = resumed or {}
        # the batches and the samples of all ranks that came before this loader
        self.first = self.batches = int(self.origin.get("batches", 0))
        self.used = int(self.origin.get("used", 0))
        self.is_over = False

    def indices(self) -> Iterator[object]:
        """Yield the sampler's batches (or samples); nothing happens before the first one."""
        if not self.is_rest:
            self.origin = self.of.remember()
            yield from self.of.sampler
        elif not self.origin.get("ended"):
            yield from self.of.rest(self.origin)

    def position(self, batches: int) -> dict[str, Any]:
        """Return the position after `batches` batches."""
        if "order" not in self.origin:  # nothing was drawn
            return {"batches": 0, "ended": True} if self.is_over else {"batches": 0}
        deal = self.of.deal
        used = self.used + (batches - self.first) * deal.samples_per_batch
        left = deal.batches(deal.length(self.origin["order"]) - used)
        if left <= 0 or (self.is_over and batches == self.batches):
            return {"batches": 0, "ended": True}
        return {**self.origin, "batches": batches, "used": used}


class _Batches(Iterator[object]):
    """A DataLoader's iterator that counts batches."""

    def __init__(self, loader: TrackedLoader) -> None:
        self.loader = loader
        self.epochs: list[_Epoch] = []  # the one before, and the one that is read
        self.waited_seconds = 0.0
        self._batches: Iterator[object] | None = None

    def begin(self, *, resumes: bool = False) -> None:
        """Start workers, and draw what an epoch draws at its beginning."""
        before = self.loader._epochs[-1:]
        self._batches, epoch = self.loader._begin(resumes=resumes)
        self.epochs = self.loader._position.epochs = [*before, epoch]

    def begin_waiting(self) -> None:
        """Begin now that the position is known, if this is what is trained on."""
        if self._batches is None and self._counts():
            self.begin(resumes=True)

    def _counts(self) -> bool:
        tracking = self.loader.tracking
        return tracking is not None and any(each is self for each in tracking.iterators)

    def __len__(self) -> int:
        return len(self.loader)

    def __next__(self) -> object:
        if self._counts():
            assert self.loader.tracking is not None
            self.loader.tracking.before_fetch()
        if self._batches is None:
            self.begin()
        assert self._batches is not None
        start = perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration:
            self.epochs[-1].is_over = True
            raise
        self.waited_seconds += perf_counter() - start
        self.epochs[-1].batches += 1
        self.loader._position.epochs = self.epochs
        return batch


@dataclass(frozen=True)
class Deal:
    """How a loader deals an order: by `sampler`, in batches of `batch_size`.

    `batch_size` is None for a loader that gives single samples. `drops_batch` says whether a batch
    that is not full is left out.
    """

    sampler: Any
    batch_size: int | None
    drops_batch: bool

    @classmethod
    def of(cls, sampler: Any) -> Deal | None:
        """Return how `sampler`, of batches or else of samples, deals; None for unknown kinds."""
        if type(sampler) is BatchSampler:
            deal = cls(sampler.sampler, sampler.batch_size, sampler.drop_last)
        else:
            deal = cls(sampler, None, drops_batch=False)
        return deal if type(deal.sampler) in (DistributedSampler, *_UNSHARED) else None

    @property
    def ranks(self) -> int:
        """Among how many ranks samples are split."""
        return getattr(self.sampler, "num_replicas", 1)

    @property
    def samples_per_batch(self) -> int:
        """How many samples all ranks take together for a batch each."""
        return self.ranks * (self.batch_size or 1)

    # ---- the order -------------------------------------------------------------------------------

    def recipe(self) -> dict[str, Any]:
        """Return what the order of the present epoch follows from, but for random states."""
        sampler = self.sampler
        recipe = {"kind": type(sampler).__name__}
        if isinstance(sampler, DistributedSampler):
            return {
                **recipe,
                "length": len(sampler.dataset),  # type: ignore[arg-type]
                "shuffle": sampler.shuffle,
                "seed": sampler.seed,
                "epoch": sampler.epoch,
            }
        if isinstance(sampler, RandomSampler):
            own = sampler.generator
            return {
                **recipe,
                "length": len(sampler.data_source),
                "replacement": sampler.replacement,
                "num_samples": sampler.num_samples,
                "generator": None if own is None else own.get_state(),
            }
        return {**recipe, "length": len(sampler)}

    def can_draw(self, recipe: dict[str, Any]) -> bool:
        """Return whether the order of `recipe` can be drawn for the present data set."""
        sampler, kind = self.sampler, recipe["kind"]
        if isinstance(sampler, DistributedSampler):
            length = len(sampler.dataset)  # type: ignore[arg-type]
        elif isinstance(sampler, RandomSampler):
            length = len(sampler.data_source)
        else:
            length = len(sampler)
        known = {each.__name__ for each in (DistributedSampler, SequentialSampler, RandomSampler)}
        return bool(length == recipe["length"]) and (
            kind in known or kind == type(sampler).__name__
        )

    def draw(self, recipe: dict[str, Any]) -> Sequence[int]:
        """Return the order of `recipe`, of all ranks together.

        The global random states are those at the epoch's beginning.
        """
        kind, samples = recipe["kind"], range(recipe["length"])
        if kind == SequentialSampler.__name__:
            return samples
        if kind == DistributedSampler.__name__:
            one: DistributedSampler[int] = DistributedSampler(
                samples,  # type: ignore[arg-type]
                num_replicas=1,
                rank=0,
                shuffle=recipe["shuffle"],
                seed=recipe["seed"],
            )
            one.set_epoch(recipe["epoch"])
            return list(one)
        # By the sampler itself, whose generator then goes on from there.
        if kind == type(self.sampler).__name__:
            return list(self.sampler)
        generator = None
        if recipe["generator"] is not None:
            generator = torch.Generator()
            generator.set_state(recipe["generator"])
        options = {"replacement": recipe["replacement"], "num_samples": recipe["num_samples"]}
        return list(RandomSampler(samples, generator=generator, **options))

    # ---- its rest --------------------------------------------------------------------------------

    def length(self, recipe: dict[str, Any]) -> int:
        """Return how many samples the order of `recipe` has."""
        return int(recipe.get("num_samples", recipe["length"]))

    def batches(self, left: int) -> int:
        """Return in how many batches each rank gets `left` samples of all ranks."""
        drops = getattr(self.sampler, "drop_last", False)
        own = left // self.ranks if drops else -(-left // self.ranks)
        size = self.batch_size or 1
        return max(0, own // size if self.drops_batch else -(-own // size))

    def rest(self, order: Sequence[int], *, used: int) -> Iterator[Any]:
        """Return this rank's batches (or samples) of `order` without its first `used` samples."""
        own: Sequence[int] = order[used:]
        if self.ranks > 1:
            extra = len(own) % self.ranks
            if extra and self.sampler.drop_last:
                own = own[: len(own) - extra]
            elif extra:
                missing = self.ranks - extra
                own = [*own, *(order[i % len(order)] for i in range(missing))]
            own = own[self.sampler.rank :: self.ranks]
        if self.batch_size is None:
            return iter(own)
        return iter(BatchSampler(own, self.batch_size, self.drops_batch))


# ---- random states -------------------------------------------------------------------------------


def random_states() -> dict[str, Any]:
    """Return the global random states: Python's, NumPy's, and torch's of the CPU.

    They are tensors and plain values, which can be loaded with ``weights_only``.
    """
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Set the global random states to what `random_states` has returned."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])


@contextlib.contextmanager
def restored_random_states() -> Iterator[None]:
    """Restore the global random states afterwards."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)
