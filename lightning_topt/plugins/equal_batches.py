"""Ranks end an epoch together: with the first one whose training data are over.

Under ``ddp`` a rank that has a batch more than others waits for them until a timeout. Samplers of
Lightning give all ranks equally many batches; samplers and streams of your own may not.

    all loaders have a length   ranks compare their numbers of batches when data are set up
    they differ, or one is a    ranks say with each batch whether another one follows
    stream
    a sharded evaluation        each step gathers parameters, so that ranks that differ get an error
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_choice
from lightning_topt.communication.collectives import largest_of_ranks, values_if_different
from lightning_topt.communication.topology import host_group

_NOTHING = object()
_UNKNOWN = float("inf")
_NO_BATCH, _LAST_BATCH, _MORE_BATCHES = range(3)  # what a rank says of its data


@contextmanager
def lent(owner: Any, name: str, ours: Callable[..., Any]) -> Generator[None]:
    """Let ``owner.name(*args)`` call ``ours(own, *args)`` within, where `own` is the method before.

    It is replaced on the object itself, such as a loop of Lightning's.
    """
    own, before = getattr(owner, name), vars(owner).get(name, _NOTHING)
    vars(owner)[name] = partial(ours, own)
    try:
        yield
    finally:
        vars(owner).pop(name, None)
        if before is not _NOTHING:
            vars(owner)[name] = before


class EqualBatches:
    """Lets the ranks of a Trainer have equally many batches.

    Args:
        uneven: ``"stop"``, or None: training is Lightning's alone.
        gathers: whether an evaluation step is a collective call of all ranks; None: never.

    Raises ValueError for another `uneven`.
    """

    def __init__(self, uneven: str | None, *, gathers: Callable[[], bool] | None = None) -> None:
        if uneven is not None:
            check_choice(uneven, name="uneven", allowed=("stop",))
        self._uneven, self._gathers = uneven, gathers
        self._lent = ExitStack()

    def begin(self, trainer: pl.Trainer) -> None:
        """Take the loops of `trainer` in hand, before their data are set up."""
        self.end()
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        if trainer.state.fn == TrainerFn.FITTING and self._uneven is not None:
            self._lent.enter_context(
                lent(trainer.fit_loop, "setup_data", lambda own: _set_up_training(own, trainer))
            )
        loops: list[Any] = [
            trainer.fit_loop.epoch_loop.val_loop,
            trainer.validate_loop,
            trainer.test_loop,
            trainer.predict_loop,
        ]
        for loop in loops if self._gathers is not None else ():
            self._lent.enter_context(
                lent(loop, "reset", lambda own, loop=loop: self._reset(own, loop))
            )

    def end(self) -> None:
        """Give the loops back."""
        self._lent.close()

    def _reset(self, own: Callable[[], None], loop: Any) -> None:
        # Begin an evaluation, whose steps are collective calls if parameters are in shards
        own()
        fetcher = loop._data_fetcher
        assert self._gathers is not None
        if not self._gathers() or not isinstance(fetcher, _PrefetchDataFetcher):
            return
        counts = _counts_of_ranks(fetcher, loop._combined_loader)
        if _UNKNOWN in counts:
            _let_agree(fetcher, may_stop=False)
        elif min(counts) < max(counts):
            raise ValueError(_uneven_evaluation())


def _set_up_training(own: Callable[[], None], trainer: pl.Trainer) -> None:
    # Set the training data up, and let all ranks have as many batches as the one with fewest
    loop: Any = trainer.fit_loop
    before = loop._data_fetcher
    own()
    fetcher = loop._data_fetcher
    if fetcher is before or not isinstance(fetcher, _PrefetchDataFetcher):
        return  # nothing is new, or the user's step takes batches by itself
    counts = _counts_of_ranks(fetcher, loop._combined_loader)
    least = min(counts)
    if least == max(counts) != _UNKNOWN:
        return
    _let_agree(fetcher, may_stop=True)
    if _UNKNOWN not in counts:
        rank_zero_warn(
            f"topt: ranks have {', '.join(f'{count:.0f}' for count in counts)} training batches: "
            "an epoch ends with the first of them"
        )
        loop.max_batches = int(least)
        # Lightning has set the share of an epoch by the batches of this rank.
        interval = getattr(trainer, "val_check_interval", None)
        if isinstance(interval, float):
            trainer.val_check_batch = max(1, int(least * interval))


def _counts_of_ranks(fetcher: Any, combined: Any) -> list[float]:
    # The number of batches of each rank, or that of all. A collective call.
    # A limit, or the length of a stream, is none (infinite): data may end before.
    is_known = all(
        sized_len(loader) is not None and not has_iterable_dataset(loader)
        for loader in combined.flattened
    )
    own = float(fetcher.length) if is_known else _UNKNOWN
    return values_if_different(own) or [own]


# ---- fetchers of Lightning's loops ---------------------------------------------------------------


class VotingFetcher(_PrefetchDataFetcher):
    """Reads a batch where all ranks have one: each says with its own whether another follows."""

    group: dist.ProcessGroup | None
    may_stop: bool  # else an error ends what some ranks would go on with

    @override
    def __next__(self) -> Any:
        batches = []
        with suppress(StopIteration):
            batches.append(super().__next__())
        said = (_LAST_BATCH if self.done else _MORE_BATCHES) if batches else _NO_BATCH
        most, least = largest_of_ranks(said, -said, group=self.group)
        least = -least
        if least < most and not self.may_stop:
            raise ValueError(_uneven_evaluation())
        self.done = least < _MORE_BATCHES
        if least == _NO_BATCH:
            raise StopIteration
        return batches[0]


def _let_agree(fetcher: Any, *, may_stop: bool) -> None:
    # Let ranks vote at each batch, on the host where they can. A collective call.
    fetcher.__class__ = VotingFetcher  # loops hold the object itself
    fetcher.group, fetcher.may_stop = host_group(), may_stop


def _uneven_evaluation() -> str:
    return (
        "ranks have different numbers of batches to evaluate, and each step gathers the shards of "
        "all ranks: use Lightning's sampler and a batch size by which all have equally many, or a "
        "plan that keeps parameters unsharded ('zero1')"
    )
