"""A DataLoader that goes on in the middle of an epoch: at the next batch, in the same order,
without reading those before it.

The order is drawn again from the random states that it was first drawn from, so a checkpoint holds
these and a count, whatever the number of samples. Only the order is restored: what workers draw for
augmentation differs from a run that never stopped.
"""

from __future__ import annotations

import random
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset

from lightning_topt.data.cache.determinism import other_randomness
from lightning_topt.data.loading.lookahead import Lookahead, can_look_ahead

_POSITION = "_topt_position"


class ResumableLoader(DataLoader[Any]):
    """A `ResumableLoader` is a `torch.utils.data.DataLoader` with ``state_dict`` and
    ``load_state_dict``, for map-style data sets and batches in order.

    The state counts the batches that were handed out, not those that workers have prepared ahead.
    It can be loaded with ``weights_only``. `is_epoch_over` says, when the state is taken, that no
    more batches are wanted of this epoch although there are some; None: every epoch goes to the
    end. `lookahead` is told of batches before they are read, where that changes nothing: without
    workers, which read ahead by themselves, and for torch's own samplers.

    A sampler's order can be drawn again if it depends on the random states (Python, NumPy, torch,
    its or the loader's `generator`) when it begins, on its ``epoch`` or on its ``state_dict``.
    Where that was not enough there is a warning.
    """

    def __init__(
        self,
        *args: Any,
        is_epoch_over: Callable[[], bool] | None = None,
        lookahead: Lookahead | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.is_epoch_over, self.lookahead = is_epoch_over, lookahead

    @property
    def _index_sampler(self) -> Any:
        return self._position

    @property
    def _position(self) -> _Position:
        if _POSITION not in vars(self):  # a DataLoader may have been made resumable afterwards
            sampler = self.sampler if self.batch_sampler is None else self.batch_sampler
            vars(self)[_POSITION] = _Position(sampler, self.generator)
        return vars(self)[_POSITION]  # type: ignore[no-any-return]

    def __iter__(self) -> Any:
        looks = self.num_workers == 0 and all(map(can_look_ahead, self._position.parts))
        epoch = self._position.begin(self.lookahead if looks else None)
        return _Batches(super().__iter__(), epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where this loader is in its epoch: tensors and plain values. ``batches`` is 0
        where it is at its beginning or end.
        """
        position = self._position
        over = self.is_epoch_over is not None and self.is_epoch_over()
        return {"batches": 0} if over and position.to_resume is None else position.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next epoch be the rest of the one that `state` was taken in."""
        self._position.load_state_dict(state)


def make_resumable(
    loader: DataLoader[Any],
    *,
    is_epoch_over: Callable[[], bool] | None = None,
    lookahead: Lookahead | None = None,
) -> bool:
    """Turn a plain DataLoader into a ResumableLoader where it is; whether it could be.

    Not subclasses, which may be resumable themselves, nor iterable data sets, nor loaders that give
    batches out of order.
    """
    if (
        type(loader) is not DataLoader
        or isinstance(loader.dataset, IterableDataset)
        or not loader.in_order
    ):
        return False
    loader.__class__ = ResumableLoader
    loader.is_epoch_over, loader.lookahead = is_epoch_over, lookahead
    return True


class _Position:
    """Stands in for a loader's sampler (of batches, or of samples where there are no batches) and
    begins its epochs.
    """

    def __init__(self, sampler: Any, generator: torch.Generator | None) -> None:
        self.sampler = sampler
        inner = getattr(sampler, "sampler", None)
        self.parts = [part for part in (sampler, inner) if part is not None]
        found = [generator, *(getattr(part, "generator", None) for part in self.parts)]
        self.generators = list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
        self.epoch: _Epoch | None = None
        self.to_resume: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sampler) if self.epoch is None else self.epoch.indices()

    def begin(self, lookahead: Lookahead | None) -> _Epoch:
        """Begin a new epoch, or the rest of the one that was loaded."""
        self.epoch, self.to_resume = _Epoch(self, self.to_resume, lookahead), None
        return self.epoch

    def state_dict(self) -> dict[str, Any]:
        if self.to_resume is not None:
            return self.to_resume
        return {"batches": 0} if self.epoch is None else self.epoch.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.to_resume = dict(state) if state["batches"] else None
        # A Trainer tells samplers the epoch's number only after workers have asked them for their
        # first batches.
        for part, number in zip(self.parts, state.get("epochs", ()), strict=False):
            if number is not None:
                part.set_epoch(number)

    def remember(self) -> dict[str, Any]:
        """Return what the order that is drawn next depends on."""
        return {
            "random": _random_states(),
            "generators": [generator.get_state() for generator in self.generators],
            "epochs": [part.epoch if hasattr(part, "set_epoch") else None for part in self.parts],
            "samplers": [
                deepcopy(part.state_dict()) if hasattr(part, "state_dict") else None
                for part in self.parts
            ],
            "rank": getattr(self.parts[-1], "rank", 0),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Bring the same state back. The global random states are the caller's to put back."""
        _set_random_states(state["random"])
        for generator, value in zip(self.generators, state["generators"], strict=False):
            generator.set_state(value)
        for part, value in zip(self.parts, state["samplers"], strict=False):
            if value is not None:
                part.load_state_dict(value)


class _Epoch:
    """One pass over the sampler: what it was drawn from, and how much of it was handed out."""

    def __init__(
        self, position: _Position, resumed: dict[str, Any] | None, lookahead: Lookahead | None
    ) -> None:
        self.position, self.resumed, self.lookahead = position, resumed, lookahead
        self.origin: dict[str, Any] = {} if resumed is None else resumed
        self.batches = 0 if resumed is None else int(resumed["batches"])
        self.check = 0 if resumed is None else int(resumed["check"])  # of the order up to here
        self.is_over = False
        self._drawn: deque[int] = deque()  # the check after each batch that is still on its way

    def indices(self) -> Iterator[Any]:
        """Yield the sampler's batches (or samples). What comes before the first one is not done
        until that is asked for.
        """
        if self.resumed is None:
            self.origin = self.position.remember()
            iterator, check = iter(self.position.sampler), 0
        else:
            iterator, check = self._skipped(), self.check
        for chosen in iterator if self.lookahead is None else self.lookahead.over(iterator):
            check = _check(chosen, check)
            self._drawn.append(check)
            yield chosen

    def _skipped(self) -> Iterator[Any]:
        """The order of the interrupted epoch, drawn again, after the batches that were handed
        out.
        """
        check, done = 0, 0
        with other_randomness(0):
            self.position.restore(self.origin)
            iterator: Iterator[Any] = iter(self.position.sampler)
            for chosen in _first(iterator, self.batches):
                check, done = _check(chosen, check), done + 1
        # A checkpoint holds rank 0's order; the others' begin at the same place.
        own = self.origin["rank"] == getattr(self.position.parts[-1], "rank", 0)
        if done < self.batches or (own and check != self.check):
            warnings.warn(
                "the order of the interrupted epoch could not be drawn again (another data set, "
                "batch size or seed, or a "
                f"sampler with a state of its own): after {self.batches} batches that were used, "
                "samples of this epoch may "
                "come twice or not at all. Give the sampler a generator, set_epoch or state_dict",
                stacklevel=2,
            )
        return iterator

    def handed_out(self) -> None:
        """Count one more batch."""
        self.batches += 1
        self.check = self._drawn.popleft()
        if self.lookahead is not None and self.batches >= _length(self.position.sampler):
            self.lookahead.finish()

    def state_dict(self) -> dict[str, Any]:
        if self.is_over or not self.batches or self.batches >= _length(self.position.sampler):
            return {"batches": 0}
        return {**self.origin, "batches": self.batches, "check": self.check}


class _Batches(Iterator[Any]):
    """A DataLoader's iterator, counted."""

    def __init__(self, batches: Any, epoch: _Epoch) -> None:
        self._batches, self._epoch = batches, epoch

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._epoch.is_over = True
            raise
        self._epoch.handed_out()
        return batch


def _check(chosen: Any, before: int) -> int:
    """Return 63 bits of a batch of indices and all before it."""
    try:
        data = array("q", chosen if isinstance(chosen, list | tuple) else [chosen]).tobytes()
    except (TypeError, OverflowError):  # other keys than numbers
        data = repr(chosen).encode()
    return xxhash.xxh3_64_intdigest(data, seed=before) >> 1


def _first(iterator: Iterator[Any], number: int) -> Iterable[Any]:
    """Up to `number` items; unlike `zip` with a range it takes no more than that from
    `iterator`.
    """
    for _ in range(number):
        try:
            yield next(iterator)
        except StopIteration:
            return


def _length(sampler: Any) -> float:
    try:
        return len(sampler)
    except TypeError:  # it has none; the end is known when it comes
        return float("inf")


def _random_states() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }


def _set_random_states(states: dict[str, Any]) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
