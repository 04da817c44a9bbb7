"""Ranks with different numbers of batches end their epoch together.

`UnevenRanks` stands between a strategy and Lightning's loop over training batches:

    "join"   a rank that has no batch left takes part in the collective calls of every step, with
             gradients of zero (`step_without_batch`); a step's gradients are the mean over the
             ranks that have a batch in it
    "stop"   all ranks end with the first one
    "error"  says which rank has how many batches

What belongs to a batch (``training_step``, its hooks, logs, metrics, random numbers, callbacks)
does not run on a rank without one. What belongs to the update (clipping, ``optimizer_step``,
learning rates) runs on every rank, and so do callbacks that save or stop by counting steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint, Timer, WeightAveraging
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.trainer import call
from torch import Tensor, nn

from lightning_topt.data.resumable_loader import TrackedLoader
from lightning_topt.plugins.lent_methods import LentMethods
from lightning_topt.plugins.loader_lengths import LoaderLengths, are_known
from lightning_topt.plugins.logged_results import share_results, share_step
from lightning_topt.plugins.presence import Presence, Ranks, Votes, gather_counts

_NEVER = float("inf")


class UnevenRanks:
    """Lets the ranks of a fit have different numbers of batches, as `uneven` says.

    Args:
        presence: of the ranks, which averages of user code ask.
        uneven: ``"join"``, ``"stop"`` or ``"error"``.
        join: takes part in the step of others: forward, then what it is given, then backward.
        why_not: why that cannot be under the present plan, as a clause; None if it can. It is asked
            whether the step is the present one.
    """

    def __init__(
        self,
        presence: Presence,
        *,
        uneven: str,
        join: Callable[[Callable[[], None]], None],
        why_not: Callable[[bool], str | None],
    ) -> None:
        self.uneven, self.presence = uneven, presence
        self._join, self._why_not = join, why_not
        self._lent = LentMethods()
        self._trainer: Any = None
        self._fetcher: SharedFetcher | None = None  # of the epoch under way
        self._within = ExitStack()  # of a step that only some ranks have a batch for
        # Whether an epoch of this fit can end on one rank before others, as all ranks know.
        self.may_end_apart = False

    # ---- a fit begins and ends -------------------------------------------------------------------

    def begin_fit(self, trainer: pl.Trainer) -> None:
        """Take the loop of `trainer` in hand, before its data are set up."""
        self.end_fit()
        self._trainer = trainer
        loop = trainer.fit_loop
        self._lent.lend(loop, "setup_data", self._set_up_data)
        self._lent.lend(loop.epoch_loop, "run", self._run_epoch)
        self._lent.lend(loop.epoch_loop, "on_run_start", self._begin_epoch)
        self._lent.lend(loop.epoch_loop, "advance", self._advance)
        self._lent.lend(loop.epoch_loop, "update_lr_schedulers", self._update_rates)
        callbacks: Any = vars(trainer)["callbacks"]
        for callback in callbacks:
            if isinstance(callback, _OF_THE_UPDATE):
                self._lent.lend(callback, "on_train_batch_end", self._with_all_ranks)

    def end_fit(self) -> None:
        """Give the loop back."""
        self._lent.give_back()
        self._trainer = self._fetcher = None
        self.presence.differs_in_training = self.may_end_apart = False

    # ---- the data --------------------------------------------------------------------------------

    def _set_up_data(self, own: Callable[[], None]) -> None:
        """Set the training data up: all ranks have as many batches as the epoch has steps."""
        trainer, loop = self._trainer, self._trainer.fit_loop
        before = loop._data_fetcher
        # None where validation comes by time: the trainer has no such attribute then.
        interval = getattr(trainer, "val_check_interval", None)
        lengths = LoaderLengths()
        # Lightning compares it with the batches of this rank alone.
        trainer.val_check_interval = 1.0
        try:
            with lengths.alone():
                own()
        finally:
            trainer.val_check_interval = interval
            if interval is None:
                del trainer.val_check_interval
        lengths.agree(limit="limit_train_batches", device=self._device)
        if loop._data_fetcher is before:
            return
        is_known = are_known(loop._combined_loader)
        rows = gather_counts([loop.max_batches, is_known], device=self._device)
        counts = [row[0] for row in rows]
        are_all_known = all(row[1] for row in rows)
        self.may_end_apart = len(set(counts)) > 1 or not are_all_known
        if self.uneven == "error" and len(set(counts)) > 1 and are_all_known:
            raise ValueError(_uneven_counts(counts))
        steps = min(counts) if self.uneven == "stop" else max(counts)
        loop.max_batches = steps if steps == _NEVER else int(steps)
        if loop.max_batches == 0:
            return
        loop._last_train_dl_reload_epoch = trainer.current_epoch
        if getattr(trainer, "_val_check_time_interval", None) is None:
            self._schedule_validation()

    def _schedule_validation(self) -> None:
        """Set after how many batches validation comes, as Lightning does for one rank."""
        trainer, steps = self._trainer, self._trainer.fit_loop.max_batches
        interval = trainer.val_check_interval
        if isinstance(interval, int):
            trainer.val_check_batch = interval
            is_by_epoch = trainer.check_val_every_n_epoch is not None
            if interval > steps and is_by_epoch and trainer.limit_val_batches > 0:
                raise ValueError(
                    f"`val_check_interval` ({interval}) must be less than or equal to the number "
                    f"of the training batches ({steps}) of the longest rank. If you want to "
                    "validate based on the total training batches, set "
                    "`check_val_every_n_epoch=None`."
                )
        elif interval == 1.0 and steps == _NEVER:
            trainer.val_check_batch = _NEVER  # at the end, wherever that is
        elif steps == _NEVER:
            raise ValueError(
                "some rank's training data have no length: val_check_interval must be a whole "
                "number, a time, or 1.0"
            )
        else:
            trainer.val_check_batch = max(1, int(steps * interval))

    # ---- an epoch --------------------------------------------------------------------------------

    def _run_epoch(self, own: Callable[[Any], None], fetcher: Any) -> None:
        """Run the loop over the batches of an epoch, whose end is that of all ranks."""
        if isinstance(fetcher, _DataLoaderIterDataFetcher):
            own(fetcher)  # the user's step takes batches by itself
            return
        self._fetcher = shared = SharedFetcher(fetcher, self.uneven, self._enter)
        own(shared)
        # What was logged by others only is reduced together, too.
        without = shared.ranks_without_any
        if without and len(without) < dist.get_world_size():
            module = self._trainer.lightning_module
            results = self._trainer.fit_loop.epoch_loop._results
            share_results(results, module, without=without)

    def _begin_epoch(self, own: Callable[[Any], None], fetcher: Any) -> None:
        """Agree on the batches of the epoch, once Lightning has begun it."""
        own(fetcher)
        if not isinstance(fetcher, SharedFetcher):
            return
        own_ones = [fetcher.count_left(), fetcher.may_end_early]
        rows = gather_counts(own_ones, device=self._device)
        counts = [row[0] for row in rows]
        if _NEVER not in counts:
            fetcher.agree(counts)
        elif (votes := self.presence.votes(self._trainer.strategy)) is None:
            fetcher.is_as_lightnings = True
        else:
            fetcher.vote(
                votes,
                are_sure=not any(row[1] for row in rows),
                # Within a window Lightning asks before the step whether it is the last one.
                may_wait=self._trainer.accumulate_grad_batches == 1,
            )
        self.presence.differs_in_training = fetcher.is_known_uneven
        # Before the limit of steps all may have a batch.
        if fetcher.is_known_uneven and self._trainer.max_steps == -1:
            self._check_join(is_now=False)

    def _advance(self, own: Callable[[Any], None], fetcher: Any) -> None:
        """Run a step: the user's, or that of a rank without a batch."""
        if not isinstance(fetcher, SharedFetcher) or fetcher.is_as_lightnings:
            own(fetcher)
            return
        fetcher.present = None
        with ExitStack() as self._within:
            try:
                own(fetcher)
            except NoBatchError:
                self._step_without_batch(fetcher)
        ranks = fetcher.present
        if ranks is None:
            return
        trainer = self._trainer
        # The hooks of one that had a batch may have decided to.
        trainer.should_stop = self._any(trainer.should_stop)
        if any(each.reduce_on_plateau for each in trainer.lr_scheduler_configs):
            self._share_step(ranks)  # what hooks have logged at the end of the batch

    def _enter(self, ranks: Ranks) -> None:
        """Let only `ranks` take part in the step that begins."""
        self._check_join(is_now=True)
        module, timeout = self._trainer.lightning_module, self._trainer.strategy._timeout
        self.presence.differs_in_training = True
        self._within.enter_context(self.presence.among(ranks, module, timeout=timeout))
        self._within.enter_context(self._skipping_together(module))

    def _check_join(self, *, is_now: bool) -> None:
        """Raise ValueError where ranks cannot take part in steps without a batch."""
        module = self._trainer.lightning_module
        why = self._why_not(is_now)
        if not module.automatic_optimization:
            why = "a step under manual optimization calls what the user's code says"
        if why is not None:
            raise ValueError(
                "the ranks have different numbers of training batches, and "
                f"{why}: take uneven='stop', or loaders with equally many batches"
            )

    def _step_without_batch(self, fetcher: SharedFetcher) -> None:
        """Count and update as Lightning's own `advance` does; no user code sees a batch."""
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop
        module, progress = trainer.lightning_module, loop.batch_progress
        batch_idx = loop.batch_idx + 1
        progress.is_last_batch = fetcher.done
        progress.increment_ready()
        trainer._logger_connector.on_batch_start(None)
        skips = self._any(False)
        call._call_strategy_hook(trainer, "on_train_batch_start", None, batch_idx)
        if skips:
            progress.increment_by(0, is_last_batch=True)
        else:
            progress.increment_started()
        optimization = loop.automatic_optimization
        with _not_logging(module):
            optimization._make_closure = lambda _, optimizer, index: _JoiningClosure(
                self._join, self._zero_gradients(optimizer, index)
            )
            try:
                if not skips:
                    optimization.run(trainer.optimizers[0], batch_idx, OrderedDict())
            finally:
                del optimization._make_closure
            progress.increment_processed()
            loop.update_lr_schedulers("step", update_plateau_schedulers=False)
            if loop._num_ready_batches_reached():
                loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if skips:
            raise StopIteration
        for callback in trainer.callbacks:
            if isinstance(callback, _OF_THE_UPDATE):
                nothing: Any = None
                callback.on_train_batch_end(trainer, module, nothing, nothing, batch_idx)
        trainer._logger_connector.on_batch_end()
        progress.increment_completed()
        trainer._logger_connector.update_train_step_metrics()

    def _zero_gradients(self, optimizer: Any, batch_idx: int) -> Callable[[], None]:
        def zero() -> None:
            if batch_idx % self._trainer.accumulate_grad_batches == 0:
                optimization = self._trainer.fit_loop.epoch_loop.automatic_optimization
                optimization._optimizer_zero_grad(batch_idx, optimizer)

        return zero

    def _any(self, decision: bool) -> bool:
        """Return whether a rank decides so, also of those without a batch."""
        decisions = torch.tensor(int(decision), device=self._device)
        dist.all_reduce(decisions, dist.ReduceOp.MAX)
        return bool(decisions)

    @contextmanager
    def _skipping_together(self, module: pl.LightningModule) -> Generator[None, None, None]:
        """Let ``on_train_batch_start`` end the epoch on all ranks where it does on one."""
        lent = LentMethods()

        def ask(own: Callable[..., Any], *args: Any) -> Any:
            lent.give_back()
            response = own(*args)
            return -1 if self._any(response == -1) else response

        lent.lend(module, "on_train_batch_start", ask)
        try:
            yield
        finally:
            lent.give_back()

    def _update_rates(
        self, own: Callable[..., None], interval: str, update_plateau_schedulers: bool
    ) -> None:
        """Update learning rates. The step is over: who has the next batch has long arrived.

        Ranks without a batch learn what was logged.
        """
        ranks, fetcher = self.presence.ranks, self._fetcher
        if interval == "step" and not update_plateau_schedulers:
            if fetcher is not None:
                self._learn_next(fetcher)
            if ranks is not None:
                self._share_step(ranks)
        own(interval, update_plateau_schedulers=update_plateau_schedulers)

    def _learn_next(self, fetcher: SharedFetcher) -> None:
        progress, before = self._trainer.fit_loop.epoch_loop.batch_progress, fetcher.done
        # A hook that ends the epoch here has said that this is its last batch.
        if fetcher.learn_next() and progress.is_last_batch == before:
            progress.is_last_batch = fetcher.done

    def _share_step(self, ranks: Ranks) -> None:
        trainer = self._trainer
        results = trainer.fit_loop.epoch_loop._results
        share_step(results, trainer.lightning_module, ranks=ranks)

    def _with_all_ranks(self, own: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Run the hook of a callback that runs on all ranks: it may talk to all."""
        with self.presence.everyone():
            own(*args, **kwargs)

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._trainer.strategy.root_device
        return device


# They save, stop and average on all ranks together.
_OF_THE_UPDATE = (Checkpoint, Timer, WeightAveraging)


class NoBatchError(Exception):
    """This rank has no batch for the step that others take."""


class SharedFetcher:
    """Lightning's fetcher of one rank, which is done when those of all ranks are.

    Lightning's loop over batches uses it as its own. `present` has the ranks that have a batch in
    the step under way, None for all; `enter` is called with them before a step of some.

    Where all have one known number of batches this fetcher is Lightning's. Where someone does not
    know, ranks vote at each batch. No batch is read earlier than under Lightning:

        all are sure   Lightning has the next batch at hand: what ranks say of it travels beside the
                       step, and is read after it
        else           a length may be wrong: ranks wait for one another when they have read
    """

    def __init__(self, fetcher: Any, uneven: str, enter: Callable[[Ranks], None]) -> None:
        self._own, self._uneven, self._enter = fetcher, uneven, enter
        self._size = dist.get_world_size()
        self._all: Ranks = tuple(range(self._size))
        self.done = False
        self.is_as_lightnings = False  # nothing is left to agree on in this epoch
        self.is_known_uneven = False
        self.ranks_without_any: Ranks = ()
        self.present: Ranks | None = None
        self._next: Ranks = ()  # the ranks that have the batch that comes
        self._position = 0
        self._counts: list[float] = []
        self._votes: Votes | None = None
        self._are_sure = self._may_wait = self._has_voted = False

    def agree(self, counts: list[float]) -> None:
        """Begin an epoch in which the ranks have so many batches. Raises ValueError."""
        self.is_as_lightnings = len(set(counts)) == 1
        if self._uneven == "error" and not self.is_as_lightnings:
            raise ValueError(_uneven_counts(counts))
        self._counts = [min(counts)] * self._size if self._uneven == "stop" else counts
        self.is_known_uneven = len(set(self._counts)) > 1
        self.ranks_without_any = tuple(rank for rank in self._all if not self._counts[rank])
        self._show(self._agreed([count > 0 for count in self._counts]))

    def vote(self, votes: Votes, *, are_sure: bool, may_wait: bool) -> None:
        """Begin an epoch whose length nobody knows. A collective call. Raises ValueError.

        Args:
            votes: how ranks tell one another.
            are_sure: whether each rank knows at a batch whether it has one more.
            may_wait: whether that of the others may become known after the step only.
        """
        self._votes, self._are_sure, self._may_wait = votes, are_sure, may_wait
        if are_sure:
            self._say_next()
            self.learn_next()
            self.ranks_without_any = tuple(rank for rank in self._all if rank not in self._next)

    def learn_next(self) -> bool:
        """Know who has the next batch, and so `done`; return whether that was voted for."""
        if not self._has_voted or self._votes is None:
            return False
        self._has_voted = False
        self._show(self._agreed([each > 0 for each in self._votes.read()]))
        return True

    # ---- what Lightning's loop uses --------------------------------------------------------------

    def count_left(self) -> float:
        """Return how many batches this rank has left in the epoch; infinite if that is not known.

        Loaders that are resumed with none left begin, and are at their end afterwards.
        """
        own = self._own
        if own.length is None or not are_known(own.combined_loader):
            return _NEVER
        # What is left of the epoch may fill no batch of the present size. Lightning counts one that
        # is to come, or it would begin the epoch anew.
        loaders = own.combined_loader.flattened
        if all(isinstance(each, TrackedLoader) and not each.batches_left() for each in loaders):
            with suppress(StopIteration):
                next(own)
            return 0
        count: float = max(0, own.length - own.fetched)
        return count

    @property
    def may_end_early(self) -> bool:
        """Whether the length of this rank's data may be wrong: that of a stream, or a limit."""
        return self._own.length is not None and not are_known(self._own.combined_loader)

    @property
    def fetched(self) -> int:
        """How many batches this rank has taken, and those of an epoch that is resumed."""
        fetched: int = self._own.fetched
        return fetched

    @fetched.setter
    def fetched(self, fetched: int) -> None:
        self._own.fetched = fetched

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning's profiler wraps each fetch.
        if name in ("_start_profiler", "_stop_profiler"):
            setattr(self._own, name, value)
        else:
            super().__setattr__(name, value)

    def __iter__(self) -> SharedFetcher:
        iter(self._own)
        return self

    def __next__(self) -> Any:
        """Return this rank's batch of the next step.

        Raises `NoBatchError` where only others have one, StopIteration where nobody does.
        """
        if self.is_as_lightnings:
            batch = next(self._own)
            self.done = self._own.done
            return batch
        batches: list[Any] = []
        if self._votes is not None and not self._are_sure:
            self._read_and_vote(batches, self._votes)
        ranks = self._next
        if not ranks:
            raise StopIteration
        self.present = None if len(ranks) == self._size else ranks
        if self.present is not None:
            self._enter(ranks)
        has_batch = dist.get_rank() in ranks
        if has_batch and not batches:
            batches.append(self._take())
        self._position += 1
        if self._votes is None:
            self._show(self._agreed([count > self._position for count in self._counts]))
        elif self._are_sure:
            self._say_next()
            if not self._may_wait:
                self.learn_next()
        if not has_batch:
            raise NoBatchError
        return batches[0]

    # ---- steps of it -----------------------------------------------------------------------------

    def _take(self) -> Any:
        try:
            return next(self._own)
        except StopIteration:
            rank, length = dist.get_rank(), self._own.length
            raise RuntimeError(
                f"the training data of rank {rank} ended after {self._position} batches, and "
                f"their length says {length}: correct __len__ of the data set or of the loader, "
                "or leave it out"
            ) from None

    def _say_next(self) -> None:
        """Send whether this rank has another batch; until all have said so, that counts alone."""
        assert self._votes is not None
        self.done = not self._has_more
        self._votes.send(not self.done)
        self._has_voted = True

    def _read_and_vote(self, batches: list[Any], votes: Votes) -> None:
        """Read this rank's batch, if there is one; learn who has one, and wants more."""
        with suppress(StopIteration):
            if not self._own.done:
                batches.append(next(self._own))
        votes.send(bool(batches) + 2 * self._has_more)
        found = votes.read()
        self._next = self._agreed([bool(each & 1) for each in found])
        more = [bool(each & 2) for each in found]
        self.done = not (all(more) if self._uneven == "stop" else any(more))
        if self._position == 0:
            self.ranks_without_any = tuple(rank for rank in self._all if rank not in self._next)

    @property
    def _has_more(self) -> bool:
        """Whether there is a batch after the last one that was read, as far as Lightning knows."""
        own = self._own
        return not own.done and (own.length is None or own.fetched < own.length)

    def _agreed(self, has_batch: Sequence[bool]) -> Ranks:
        """Return the ranks that take the next batch. Raises ValueError."""
        ranks = tuple(rank for rank in self._all if has_batch[rank])
        if len(ranks) in (0, self._size) or self._uneven == "join":
            return ranks
        if self._uneven == "error":
            ended = ", ".join(str(rank) for rank in self._all if rank not in ranks)
            raise ValueError(
                f"the training data of ranks {ended} ended after {self._position} batches, and "
                f"those of ranks {', '.join(map(str, ranks))} did not; {_ADVICE}"
            )
        return ()

    def _show(self, following: Ranks) -> None:
        self.done, self._next = not following, following


_ADVICE = "uneven='join' lets them go on together, uneven='stop' ends with the first"


def _uneven_counts(counts: Sequence[float]) -> str:
    named = ", ".join(f"rank {rank} has {count:.0f}" for rank, count in enumerate(counts))
    return f"the ranks have different numbers of training batches: {named}; {_ADVICE}"


class _JoiningClosure:
    """Forward and backward without a batch, in the place of Lightning's closure."""

    loss = None  # of the result, which is this object: there is none

    def __init__(
        self, join: Callable[[Callable[[], None]], None], zero_gradients: Callable[[], None]
    ) -> None:
        self._join, self._zero_gradients = join, zero_gradients

    @torch.enable_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self._join(self._zero_gradients)
        # None would tell a GradScaler that there were no gradients.
        return torch.zeros(())

    def consume_result(self) -> _JoiningClosure:
        """Return what Lightning asks for the loss."""
        return self


@contextmanager
def _not_logging(module: nn.Module) -> Generator[None, None, None]:
    """Let hooks around an update log nothing."""
    vars(module)["log"] = lambda *_, **__: None
    try:
        yield
    finally:
        with suppress(KeyError):
            del vars(module)["log"]
