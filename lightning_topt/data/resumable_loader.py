"""A DataLoader that resumes in the middle of an epoch, at the next sample and in the same order.

    TrackedLoader     knows where it is, and goes on from there; a strategy saves that
    ResumableLoader   the same with ``state_dict``, by which Lightning saves and loads it

The skipped batches are not read. The order is drawn again from the same random states. So a
checkpoint holds these and a count, whatever the number of samples. Only the order is restored:
random augmentation in workers differs from a run that was never interrupted.

Of torch's own samplers the order of all samples follows from a few values, the recipe (`Deal`).
What is left of it can be dealt to any number of ranks, in batches of any size. Sample ``i`` of the
rest goes to rank ``i % ranks``, as `DistributedSampler` does it. Where the ranks would not get
equally many it adds samples from the order's beginning, or leaves the last ones out
(``drop_last``).

The loader also looks ahead (`lightning_topt.data.lookahead`): caches that prefetch from other nodes
learn which items are read next.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol, SupportsIndex, TypeAlias

import numpy as np
import torch
import xxhash
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
# after each batch that may still be taken back: its epoch, batches of that, their check
Marks: TypeAlias = "deque[tuple[_Epoch, int, int]]"
# Their order is that of one process; a recipe of the last two is drawn by the same sampler only.
_UNSHARED = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
# These draw all randomness of an epoch at its start: drawing the rest earlier changes nothing.
_SAMPLERS = (BatchSampler, DistributedSampler, *_UNSHARED)


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

    def behind(self) -> int:
        """Return how many of the batches that were handed out are not trained on."""
        ...

    def before_epoch(self) -> None:
        """Know that an epoch is about to begin, of which no loader has read anything."""
        ...

    def before_fetch(self) -> None:
        """Know that a batch is about to be read."""
        ...


class LooksAhead(Protocol):
    """Learns of batches before they are read (`lightning_topt.data.lookahead`)."""

    def over(self, chosen: Iterator[object]) -> Iterator[object]:
        """Yield the same batches of indices, later than they are drawn."""
        ...

    def finish(self) -> None:
        """End the epoch, whose last batch has been read."""
        ...


class TrackedLoader(DataLoader[Any]):
    """A DataLoader, for map-style data sets, that knows its position in the epoch.

    A position counts the batches that were handed out, not those that workers have prepared ahead.
    It can be loaded with ``weights_only``. There is a warning where the order could not be drawn
    again. It can if it depends on nothing but these:

    - the random states at its start: Python's, NumPy's, torch's, its or the loader's `generator`;
    - the sampler's ``epoch``;
    - the sampler's ``state_dict``.

    `tracking` is None until `make_tracked` sets it. `is_known` says that it has found an order that
    all ranks know, in this fit or the last one. A lookahead learns of batches before they are read,
    where that changes nothing: without workers, which read ahead by themselves, and for torch's own
    samplers.
    """

    tracking: Tracking | None = None
    is_known = False
    lookahead: LooksAhead | None = None

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
        # looking ahead draws the order earlier: only where that changes nothing
        looks = self.num_workers == 0 and all(map(can_look_ahead, self._position.parts))
        epoch = self._position.begin(self.lookahead if looks else None, resumes=resumes)
        # The rest of an epoch draws nothing for its beginning, which was before.
        if epoch.resumed is not None and self.tracking is not None:
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
        return self._position.state_dict(self.marks, behind)

    def go_to(self, position: dict[str, Any], *, stays_ended: bool = False) -> None:
        """Let the next epoch be the rest of the one that `position` is of.

        Of one that has ended that is nothing, where it `stays_ended`; else a new epoch.
        """
        self._position.load_state_dict(position, stays_ended=stays_ended)

    def batches_left(self) -> float:
        """Return how many batches the next epoch has."""
        return self._position.batches_left()

    @property
    def has_begun(self) -> bool:
        """Whether an epoch has begun."""
        return self._position.epoch is not None

    def let_go(self) -> None:
        """End the tracking; the position stays."""
        self._position.marks, self.tracking = self.marks, None

    @property
    def marks(self) -> Marks:
        """The last positions of what is trained on; without `tracking`, of the last reader."""
        if self.tracking is None:
            return self._position.marks
        for each in self.tracking.iterators:
            if isinstance(each, _Batches) and each.loader is self:
                return each.marks
        return deque()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Copy what the user has made; where a fit is in it stays with the fit."""
        ours = ("tracking", "is_known", _POSITION)
        state = {name: value for name, value in vars(self).items() if name not in ours}
        # where Lightning has noted what was set while it made the loader
        if record := state.get(_RECORD):
            state[_RECORD] = [each for each in record if each[0][0] not in ours]
        kind: type[DataLoader[Any]] = type(self)
        if kind is TrackedLoader:  # which a fit has made of it
            state.pop("lookahead", None)
            kind = DataLoader
        return _loader_of, (kind,), state


_RECORD = "__pl_attrs_record"  # of lightning.fabric.utilities.data


def _loader_of(kind: type[DataLoader[Any]]) -> DataLoader[Any]:
    return kind.__new__(kind)


class ResumableLoader(TrackedLoader):
    """A `TrackedLoader` with ``state_dict`` and ``load_state_dict``.

    Args:
        is_epoch_over: says, when the state is taken, that the epoch ends although there are more
            batches. None: every epoch is read to its end.
        lookahead: see `TrackedLoader`.
    """

    def __init__(
        self,
        *args: Any,
        is_epoch_over: Callable[[], bool] | None = None,
        lookahead: LooksAhead | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.is_epoch_over, self.lookahead = is_epoch_over, lookahead

    def state_dict(self) -> dict[str, object]:
        """Return the position in the epoch; at its end, and before it, that has no batches."""
        over = self.is_epoch_over is not None and self.is_epoch_over()
        state = self.position(behind=0 if self.tracking is None else self.tracking.behind())
        if state.get("ended") or (over and self._position.to_resume is None):
            return {"batches": 0}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next epoch be the rest of the one that `state` is of."""
        self.go_to(state)


def make_resumable(
    loader: DataLoader[Any],
    *,
    is_epoch_over: Callable[[], bool] | None = None,
    lookahead: LooksAhead | None = None,
) -> bool:
    """Turn a plain DataLoader into a ResumableLoader in place; returns whether that was possible.

    It is not for subclasses, which may be resumable themselves, nor for iterable data sets, nor for
    loaders that return batches out of order.
    """
    if not _can_be_tracked(loader):
        return False
    # only the class changes, so the loader stays the object that the user holds
    loader.__class__ = ResumableLoader
    assert isinstance(loader, ResumableLoader)
    loader.is_epoch_over, loader.lookahead = is_epoch_over, lookahead
    return True


def make_tracked(loader: object, tracking: Tracking, *, ranks: int, parts: int) -> bool:
    """Let `tracking` know of what `loader` hands out; returns whether its order is known exactly.

    It is for plain DataLoaders, which change in place, and for resumable ones. `ranks` is how many
    ranks there are, and `parts` among how many of them samples are split.
    """
    can_be = _can_be_tracked(loader) or isinstance(loader, TrackedLoader)
    if not can_be or not _is_order_known(loader, ranks=ranks, parts=parts):
        if isinstance(loader, TrackedLoader):  # of an earlier fit
            loader.tracking, loader.is_known = None, False
        return False
    if not isinstance(loader, TrackedLoader):
        loader.__class__ = TrackedLoader
    assert isinstance(loader, TrackedLoader)
    # of an earlier fit
    vars(loader).pop(_POSITION, None)
    loader.tracking, loader.is_known = tracking, True
    return True


def _can_be_tracked(loader: object) -> bool:
    return (
        type(loader) is DataLoader
        and not isinstance(loader.dataset, IterableDataset)
        and loader.in_order
    )


def _is_order_known(loader: Any, *, ranks: int, parts: int) -> bool:
    """Return whether the order of all ranks follows from what one of them knows."""
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
        self.sampler = sampler
        # of a batch sampler, the sampler of single samples inside of it
        inner = getattr(sampler, "sampler", None)
        self.parts = [part for part in (sampler, inner) if part is not None]
        self.deal = Deal.of(sampler)
        found = [generator, *(getattr(part, "generator", None) for part in self.parts)]
        # each once, though the loader and its samplers may share one
        self.generators = list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
        self.epoch: _Epoch | None = None
        self.to_resume: dict[str, Any] | None = None
        self.marks: Marks = deque()  # of what was begun or read last

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[object]:
        return iter(self.sampler) if self.epoch is None else self.epoch.indices()

    def begin(self, lookahead: LooksAhead | None, *, resumes: bool) -> _Epoch:
        """Start a new epoch, or if it `resumes` the rest of the one that was loaded."""
        resumed = None
        if resumes:
            resumed, self.to_resume = self.to_resume, None
        self.epoch = _Epoch(self, resumed, lookahead)
        return self.epoch

    def state_dict(self, marks: Marks, behind: int = 0) -> dict[str, Any]:
        # loaded and not begun: the position is still that one
        if self.to_resume is not None:
            return self.to_resume
        if not marks:
            return {"batches": 0}
        epoch, batches, check = marks[max(0, len(marks) - 1 - behind)]
        return epoch.state_dict(batches, check)

    def load_state_dict(self, state: dict[str, Any], *, stays_ended: bool = False) -> None:
        begun = "random" in state and (state["batches"] or "used" in state)
        self.to_resume = dict(state) if begun or (stays_ended and state.get("ended")) else None
        self.marks = deque()
        # A Trainer sets the samplers' epoch only after workers have drawn their first batches.
        for part, number in zip(self.parts, state.get("epochs", ()), strict=False):
            if number is not None and hasattr(part, "set_epoch"):
                part.set_epoch(number)

    def batches_left(self) -> float:
        length, state = _length(self.sampler), self.to_resume
        if state is None:
            return length
        if state.get("ended"):
            return 0
        deal = self.deal
        # An order that cannot be drawn is of data of this rank's own, or of data that have grown.
        if deal is None or "used" not in state or not deal.can_draw(state["order"]):
            return max(0, length - int(state["batches"]))
        return deal.batches(deal.length(state["order"]) - state["used"])

    def remember(self) -> dict[str, object]:
        """Return the state that the next order depends on."""
        state = {
            "random": random_states(),
            "generators": [generator.get_state() for generator in self.generators],
            "epochs": [_epoch_of(part) for part in self.parts],
            "samplers": [_state_of(part) for part in self.parts],
            "rank": getattr(self.parts[-1], "rank", 0),
        }
        return state if self.deal is None else {**state, "order": self.deal.recipe()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore that state.

        The caller puts the global random states back afterwards.
        """
        set_random_states(state["random"])
        for generator, value in zip(self.generators, state["generators"], strict=False):
            generator.set_state(value)
        for part, value in zip(self.parts, state["samplers"], strict=False):
            if value is not None:
                part.load_state_dict(value)


class _Epoch:
    """One pass over the sampler: its initial state, and how much was handed out."""

    def __init__(
        self, position: _Position, resumed: dict[str, Any] | None, lookahead: LooksAhead | None
    ) -> None:
        self.position, self.resumed, self.lookahead = position, resumed, lookahead
        self.origin: dict[str, Any] = {} if resumed is None else resumed
        self.batches = 0 if resumed is None else int(resumed["batches"])
        self.check = 0 if resumed is None else int(resumed.get("check", 0))  # of the order so far
        # the batches and the samples of all ranks that came before this loader
        self.first, self.used = self.batches, 0 if resumed is None else int(resumed.get("used", 0))
        self.is_over = False
        self._drawn: deque[int] = deque()  # the check after each batch that is still in flight

    def indices(self) -> Iterator[object]:
        """Yield the sampler's batches (or samples).

        Nothing happens before the first one is requested.
        """
        if self.resumed is None:
            self.origin = self.position.remember()
            iterator, check = iter(self.position.sampler), 0
        elif self.resumed.get("ended"):
            return
        else:
            iterator, check = self._rest(), self.check
        for chosen in iterator if self.lookahead is None else self.lookahead.over(iterator):
            check = _check(chosen, check)
            # in flight: drawn from the sampler, not yet handed out by the loader
            self._drawn.append(check)
            yield chosen

    def _rest(self) -> Iterator[object]:
        """Draw the order of the interrupted epoch again, and return an iterator over its rest."""
        deal, recipe = self.position.deal, self.origin.get("order")
        with restored_random_states():
            self.position.restore(self.origin)
            if deal is None or recipe is None or not deal.can_draw(recipe):
                return self._skipped()
            return deal.rest(deal.draw(recipe), used=self.used)

    def _skipped(self) -> Iterator[object]:
        """Return the sampler's own iterator, after the batches that were handed out."""
        check, done = 0, 0
        iterator: Iterator[object] = iter(self.position.sampler)
        for chosen in _first(iterator, self.batches):
            check, done = _check(chosen, check), done + 1
        # A checkpoint holds rank 0's order; only the position applies to other ranks.
        own = self.origin["rank"] == getattr(self.position.parts[-1], "rank", 0)
        if done < self.batches or (own and check != self.check):
            warnings.warn(
                "the order of the interrupted epoch could not be drawn again (another data set, "
                f"batch size or seed, or a sampler with a state of its own): after {self.batches} "
                "batches that were used, samples of this epoch may come twice or not at all. Give "
                "the sampler a generator, set_epoch or state_dict",
                stacklevel=2,
            )
        return iterator

    def count(self) -> None:
        """Count one more batch."""
        self.batches += 1
        # None is in flight where persistent workers were begun again by another reader.
        self.check = self._drawn.popleft() if self._drawn else self.check
        if self.lookahead is not None and self.batches >= _length(self.position.sampler):
            self.lookahead.finish()

    def state_dict(self, batches: int, check: int) -> dict[str, Any]:
        """Return the position after `batches` batches, whose order has the hash `check`."""
        deal, state = self.position.deal, {**self.origin, "batches": batches, "check": check}
        ended = self.is_over and batches == self.batches
        if deal is not None and "order" in self.origin:
            state["used"] = self.used + (batches - self.first) * deal.samples_per_batch
            ended |= deal.batches(deal.length(self.origin["order"]) - state["used"]) <= 0
        else:
            ended |= batches >= _length(self.position.sampler)
        # Nothing to go on with: the next epoch is drawn anew.
        return {"batches": 0, "ended": True} if ended else state if self.origin else {"batches": 0}


class _Batches(Iterator[object]):
    """A DataLoader's iterator that counts batches."""

    def __init__(self, loader: TrackedLoader) -> None:
        self.loader = loader
        self.marks: Marks = deque()
        self._begun: tuple[Any, _Epoch] | None = None
        self.waited_seconds = 0.0

    def begin(self, *, resumes: bool = False) -> None:
        """Start workers, and draw what an epoch draws at its beginning."""
        # where the last epoch ended this one begins
        before = list(self.loader.marks)[:-1]
        _, epoch = self._begun = self.loader._begin(resumes=resumes)
        self.marks.extend([*before, (epoch, epoch.batches, epoch.check)])
        self.loader._position.marks = self.marks

    def begin_waiting(self) -> None:
        """Begin now that the position is known, if this is what is trained on."""
        if self._begun is None and self._counts():
            self.begin(resumes=True)

    def _counts(self) -> bool:
        tracking = self.loader.tracking
        return tracking is not None and any(each is self for each in tracking.iterators)

    def __len__(self) -> int:
        return len(self.loader)

    def __next__(self) -> object:
        tracking = self.loader.tracking if self._counts() else None
        if tracking is not None:
            tracking.before_fetch()
        if self._begun is None:
            self.begin()
        assert self._begun is not None
        batches, epoch = self._begun
        start = perf_counter()
        try:
            batch = next(batches)
        except StopIteration:
            epoch.is_over = True
            raise
        self.waited_seconds += perf_counter() - start
        epoch.count()
        self.marks.append((epoch, epoch.batches, epoch.check))
        behind = 0 if tracking is None else tracking.behind()
        while len(self.marks) > behind + 3:  # the batch itself, and one that is not counted yet
            self.marks.popleft()
        self.loader._position.marks = self.marks
        return batch


def _check(chosen: object, before: int) -> int:
    """Return a 63-bit hash of a batch of indices and all before it."""
    try:
        data = array("q", chosen if isinstance(chosen, list | tuple) else [chosen]).tobytes()
    except (TypeError, OverflowError):  # other keys than numbers
        data = repr(chosen).encode()
    return xxhash.xxh3_64_intdigest(data, seed=before) >> 1


def _first(iterator: Iterator[object], number: int) -> Iterable[object]:
    """Yield up to `number` items.

    Unlike `zip` with a range it takes no more than that from `iterator`.
    """
    for _ in range(number):
        try:
            yield next(iterator)
        except StopIteration:
            return


def _epoch_of(sampler: Any) -> int | None:
    """Return the number that `set_epoch` gave `sampler`, if it shows that."""
    number = getattr(sampler, "epoch", None) if hasattr(sampler, "set_epoch") else None
    return number if isinstance(number, int) else None


def _state_of(sampler: Any) -> Any:
    """Return a copy of the state that `sampler` shows, if it can be had."""
    try:
        return deepcopy(sampler.state_dict()) if hasattr(sampler, "state_dict") else None
    except Exception as error:
        warnings.warn(
            f"{type(sampler).__name__} gives no state_dict ({type(error).__name__}: {error}): "
            "another order may follow a checkpoint",
            stacklevel=2,
        )
        return None


def _length(sampler: Any) -> float:
    try:
        return len(sampler)
    except TypeError:  # it has no length
        return float("inf")


def can_look_ahead(sampler: object) -> bool:
    """Return whether drawing earlier from `sampler` changes nothing.

    Subclasses, Lightning's among them, may do anything.
    """
    return type(sampler) in _SAMPLERS


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
        known = type(deal.sampler) in (DistributedSampler, *_UNSHARED)
        return deal if known else None

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
