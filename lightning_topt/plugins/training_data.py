"""Training data across checkpoints: a fit that goes on trains on every sample of the epoch once.

A strategy has a `TrainingData`, to which its hooks delegate:

    setup                `check_checkpoint`: all ranks go on from the same checkpoint
    process_dataloader   `track`: training loaders know what they have handed out
    save_checkpoint      `with_state`: what was trained on, and the random states of all ranks
    load_checkpoint      `take`
    on_train_start       `begin`: loaders go on, on any number of ranks, in batches of any size
    teardown             `end`

Batches that were fetched ahead come again. A signal that ends the fit does so between two
accumulation windows (`lightning_topt.plugins.preemption`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_topt.communication.collectives import values_if_different
from lightning_topt.data.resumable_loader import (
    TrackedLoader,
    make_tracked,
    random_states,
    set_random_states,
)
from lightning_topt.plugins.preemption import Preemption

# In checkpoints: what is ours, and of that where in its data a fit was.
CHECKPOINT_KEY, DATA_KEY = "lightning_topt", "training_data"
_COUNTS = ("ready", "started", "processed", "completed")


class TrainingData:
    """Knows what a fit under `strategy` was trained on, and lets the next fit go on from there.

    Where a signal ends the fit (`Preemption`), that is between two accumulation windows.
    """

    def __init__(self, strategy: DDPStrategy) -> None:
        self._strategy = strategy
        # what a checkpoint had, until training starts; None without a checkpoint
        self._loaded: dict[str, Any] | None = None
        self._reached: tuple[Any, Any] | None = None  # the epoch and step of that checkpoint
        # loaders that begin with the first batch: their positions are still to come
        self.waiting: list[Callable[[], None]] | None = None
        # the last epoch that loaders began, and the random states before that
        self._epoch: tuple[int, dict[str, Any]] | None = None
        self._ended_before: int | None = None  # how many epochs had ended when a batch was read
        self._undo = ExitStack()
        self._tracked: list[TrackedLoader] = []  # in this fit
        self._has_warned = False
        self._preemption = Preemption()

    @property
    def trainer(self) -> pl.Trainer:
        """The Trainer of the fit."""
        assert self._strategy.lightning_module is not None
        return self._strategy.lightning_module.trainer

    @property
    def _progress(self) -> Any:
        # Lightning's count of the batches of training
        return self.trainer.fit_loop.epoch_loop.batch_progress

    # ---- what loaders hand out -------------------------------------------------------------------

    def track(self, loader: object) -> None:
        """Let `loader` count what it hands out, if it is one of training."""
        module = self._strategy.lightning_module
        trainer = None if module is None else module._trainer
        if trainer is None or trainer.state.fn != TrainerFn.FITTING or not trainer.training:
            return
        parts = self._strategy.distributed_sampler_kwargs["num_replicas"]
        if make_tracked(loader, self, ranks=self._strategy.world_size, parts=parts):
            assert isinstance(loader, TrackedLoader)
            self._tracked.append(loader)

    @property
    def iterators(self) -> list[object]:
        """What Lightning reads the loaders of training through."""
        combined = self.trainer.fit_loop._combined_loader
        if combined is None or combined._iterator is None:
            return []
        return list(getattr(combined._iterator, "iterators", ()))

    @property
    def waited_seconds(self) -> float:
        """How long the loaders of this epoch have kept the fit waiting, as far as that is known."""
        return sum(getattr(each, "waited_seconds", 0.0) for each in self.iterators)

    @property
    def batches(self) -> int:
        """How many batches the fit was trained on."""
        return int(self._progress.total.processed)

    @property
    def lengths(self) -> list[float] | None:
        """How many batches of this rank's loaders an epoch has; None if a position is unknown."""
        combined = self.trainer.fit_loop._combined_loader
        if combined is None or not _are_tracked(combined):
            return None
        return _lengths(combined)

    @property
    def batches_of_window(self) -> int:
        """How many batches have gone into a window whose step is still to come."""
        trainer, progress = self.trainer, self._progress
        if progress.is_last_batch or not trainer.lightning_module.automatic_optimization:
            return 0
        return int(progress.current.processed % trainer.accumulate_grad_batches)

    def behind(self) -> int:
        """Return how many of the batches that were handed out are not trained on."""
        fetcher, trained = self.trainer.fit_loop._data_fetcher, self._progress.current.processed
        fetched = trained if fetcher is None else fetcher.fetched
        return int(max(0, fetched - trained))

    def before_epoch(self) -> None:
        """Know the random states before loaders draw of them for a new epoch."""
        if not self.trainer.training:
            return
        place = self._progress.total.processed
        is_new = self._epoch is None or self._epoch[0] != place
        if is_new and not self._progress.current.processed:
            self._epoch = place, self._random_states()
            self._ended_before = self._ended_epochs()

    def before_fetch(self) -> None:
        """Begin the loaders that wait: at once, in the order of an undisturbed epoch."""
        waiting, self.waiting = self.waiting, None
        for begin in waiting or ():
            begin()

    # ---- checkpoints -----------------------------------------------------------------------------

    def with_state(self, checkpoint: dict[str, Any], *, alone: bool = False) -> dict[str, Any]:
        """Return `checkpoint` with what was trained on.

        A collective call, where the checkpoint has the states of optimizers, which it goes with.
        Of a rank that saves `alone` it is none, and lacks the random states.
        """
        module = self._strategy.lightning_module
        if module is None or "optimizer_states" not in checkpoint:
            return checkpoint
        trainer, progress = module.trainer, self._progress
        combined = trainer.fit_loop._combined_loader
        if combined is None or trainer.state.fn != TrainerFn.FITTING:
            return checkpoint
        own = self._random_states()
        state: dict[str, Any] = {}
        if not self._is_epoch_over():
            behind = self.behind()
            positions = [
                loader.position(behind=behind) if tracked else None
                for loader, tracked in _with_tracked(combined)
            ]
            # An epoch of which nothing was read is begun anew, with the draws of its beginning.
            is_unread = not any(position and "random" in position for position in positions)
            if is_unread and self._epoch is not None and not progress.current.processed:
                own = self._epoch[1]
            state["loaders"] = positions
            self._warn_of_unknown(combined, batches=progress.current.processed)
        # After an exception the other ranks may be anywhere.
        state["random"] = [] if alone or trainer.interrupted else self._of_all_ranks(own)
        ours = {**checkpoint.get(CHECKPOINT_KEY, {}), DATA_KEY: state}
        return {**checkpoint, CHECKPOINT_KEY: ours}

    def take(self, checkpoint: dict[str, Any]) -> None:
        """Keep what `checkpoint` says of the data, if a fit goes on from it."""
        module = self._strategy.lightning_module
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            self._loaded = dict(checkpoint.get(CHECKPOINT_KEY, {}).get(DATA_KEY) or {})
            self.waiting = []
            self._reached = checkpoint.get("epoch"), checkpoint.get("global_step")

    def check_checkpoint(self, trainer: pl.Trainer) -> None:
        """Raise RuntimeError on all ranks if they do not go on from one checkpoint.

        A collective call, in a fit.
        """
        if trainer.state.fn != TrainerFn.FITTING or not dist.is_initialized():
            return
        found = values_if_different((self._reached, str(trainer.ckpt_path)))
        for rank, (reached, own) in enumerate(found):
            first, path = found[0]
            if reached != first:
                words = [
                    "no checkpoint"
                    if place is None
                    else f"{name} (epoch {place[0]}, step {place[1]})"
                    for place, name in ((first, path), (reached, own))
                ]
                raise RuntimeError(
                    f"ranks go on from different checkpoints: rank 0 found {words[0]}, rank {rank} "
                    f"{words[1]}. Use a folder that all nodes see, or copy rank 0's file there"
                )

    def begin(self) -> None:
        """Let a fit that is about to train go on where its checkpoint was. A collective call."""
        loop, loaded = self.trainer.fit_loop, self._loaded
        self._ended_before = None
        if loaded is not None:
            loop.setup_data()
        combined = loop._combined_loader
        if loaded is not None and combined is not None:
            self._resume(combined, loaded)
        if combined is not None:
            self._warn_of_division(combined)
            self._follow_fetches()
            self._preemption.begin(
                self.trainer,
                may_stop=lambda: not self.batches_of_window,
                asks_loaders=_are_tracked(combined),
            )

    def _resume(self, combined: CombinedLoader, loaded: dict[str, Any]) -> None:
        loop = self.trainer.fit_loop
        # The loaders may be older than the checkpoint's states: a hook of the user, or planning,
        # has asked for them when the fit was set up.
        loaders = combined.flattened
        begins_again = any(each.has_begun for each in loaders if isinstance(each, TrackedLoader))
        if loop.restarting and loop._combined_loader_states_to_load:
            loop._load_combined_loader_states()
            begins_again = True
        if "loaders" in loaded:
            self._go_on(combined, loaded["loaders"])
        elif self._progress.is_last_batch:
            self._end_epoch_of_checkpoint()
        if begins_again:
            assert loop._data_fetcher is not None
            self.waiting = []
            iter(loop._data_fetcher)
        self._loaded = None
        # Last: what came before has drawn from them.
        states = loaded.get("random", ())
        if len(states) == self._strategy.world_size:
            self._set_random_states(states[self._strategy.global_rank])

    def end(self) -> None:
        """Forget the fit."""
        self._preemption.end()
        self._undo.close()
        for loader in self._tracked:
            if loader.tracking is self:
                loader.let_go()
        self._tracked = []
        self._loaded = self._epoch = self._reached = self.waiting = None
        module = self._strategy.lightning_module
        if module is not None and module._trainer is not None and module._trainer.validating:
            # Where validation fails in a fit Lightning leaves the training loaders to the garbage
            # collection. That closes the queues of workers first, and waits 5 s for each worker.
            module._trainer.fit_loop.teardown()

    # ---- steps of it -----------------------------------------------------------------------------

    def _go_on(self, combined: CombinedLoader, positions: list[dict[str, Any] | None]) -> None:
        loaders = combined.flattened
        if len(loaders) != len(positions):
            raise ValueError(
                f"the checkpoint is of the middle of an epoch over {len(positions)} training "
                f"loaders, and there are {len(loaders)}: go on with the same ones, or from a "
                "checkpoint of the end of an epoch"
            )
        for (loader, tracked), position in zip(_with_tracked(combined), positions, strict=True):
            if tracked and position is not None:
                loader.go_to(position, stays_ended=combined._mode == "max_size")
        _count_as_batches_of_now(self.trainer.fit_loop, combined)
        if not _unknown(combined):
            warnings.filterwarnings(
                "ignore", "You're resuming from a checkpoint that ended before the epoch ended"
            )

    def _end_epoch_of_checkpoint(self) -> None:
        # Go on behind the last batch of an epoch. That epoch may have had fewer batches than one
        # has now, on more ranks or of another size
        loop, progress = self.trainer.fit_loop, self._progress
        if not loop.epoch_loop.restarted_on_train_batch_end:
            _set_batches(progress.current, loop.max_batches)  # hooks of its end are still to come
            return
        # Lightning has counted the epoch. It would begin the next one without its hook, and count
        # it wrong, so that a second resume could repeat it.
        progress.increment_completed()
        loop.epoch_loop._batches_that_stepped += 1
        loop.reset_restart_stage()
        loop.epoch_loop.reset_restart_stage()
        loop.restarting = False

    def _follow_fetches(self) -> None:
        # Know before each fetch in which epoch that is, and end there if a signal asks for it
        loop = self.trainer.fit_loop
        before_fetch = loop.epoch_loop._on_before_fetch

        def note_epoch() -> None:
            self._preemption.before_fetch()  # before any loader is read
            self._ended_before = self._ended_epochs()
            before_fetch()

        loop.epoch_loop._on_before_fetch = note_epoch  # type: ignore[method-assign]
        self._undo.callback(loop.epoch_loop.__dict__.pop, "_on_before_fetch", None)

    def _is_epoch_over(self) -> bool:
        # Whether Lightning has counted the epoch of the last batch as one that is over. That is so
        # after the last batch, and where `max_steps` or an early stop has ended it before
        was = self._ended_before
        return bool(self._progress.is_last_batch or was not in (None, self._ended_epochs()))

    def _ended_epochs(self) -> int:
        progress: Any = self.trainer.fit_loop.epoch_progress.total
        return int(progress.processed)

    def _warn_of_division(self, combined: CombinedLoader) -> None:
        # Where ranks share a batch, a size that was divided by all ranks makes a smaller step
        ranks = self._strategy.world_size
        share = ranks // self._strategy.distributed_sampler_kwargs["num_replicas"]
        size = getattr(self.trainer.datamodule, "hparams", {}).get("batch_size")  # type: ignore[attr-defined]
        own = getattr(combined.flattened[0], "batch_size", None)
        if share > 1 and own and size == ranks * own:
            rank_zero_warn(
                f"topt: the data module divided batch_size={size} by {ranks} ranks, and {share} of "
                f"them share each batch, so a step has {size // share} samples: set "
                f"batch_size={size * share}"
            )

    def _warn_of_unknown(self, combined: CombinedLoader, *, batches: int) -> None:
        if self._has_warned or not batches:
            return
        names = [type(getattr(each, "dataset", each)).__name__ for each in _unknown(combined)]
        if names:
            self._has_warned = True
            rank_zero_warn(
                "this checkpoint is of the middle of an epoch and does not say where the training "
                f"data are ({', '.join(names)}): a fit that goes on from it reads them from their "
                "beginning. Use torchdata's StatefulDataLoader, or torch's samplers"
            )

    def _random_states(self) -> dict[str, Any]:
        states, device = random_states(), self._strategy.root_device
        return (
            {**states, "cuda": torch.cuda.get_rng_state(device)}
            if device.type == "cuda"
            else states
        )

    def _set_random_states(self, states: dict[str, Any]) -> None:
        set_random_states(states)
        device = self._strategy.root_device
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], device)

    def _of_all_ranks(self, states: dict[str, Any]) -> list[dict[str, Any]]:
        # The states of all ranks, on rank 0. A collective call.
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks == 1:
            return [states]
        gathered: list[Any] | None = [None] * ranks if self._strategy.is_global_zero else None
        dist.gather_object(states, gathered)
        return gathered or []


def _with_tracked(combined: CombinedLoader) -> list[tuple[Any, bool]]:
    # The loaders, each with whether its position is known. One that is read in two places has two
    # positions, so that is not
    loaders = combined.flattened
    return [
        (
            loader,
            isinstance(loader, TrackedLoader)
            and loader.is_known
            and sum(each is loader for each in loaders) == 1,
        )
        for loader in loaders
    ]


def _are_tracked(combined: CombinedLoader) -> bool:
    return all(tracked for _, tracked in _with_tracked(combined))


def _unknown(combined: CombinedLoader) -> list[Any]:
    # The loaders that neither we nor they themselves know the position of
    return [
        loader
        for loader, tracked in _with_tracked(combined)
        if not tracked and not isinstance(loader, _Stateful)
    ]


def _lengths(combined: CombinedLoader) -> list[float]:
    # The batches of each loader in an epoch; infinity where its position is not known
    limits = combined.limits or [float("inf")] * len(combined.flattened)
    return [
        min(len(loader), limit) if tracked else float("inf")
        for (loader, tracked), limit in zip(_with_tracked(combined), limits, strict=True)
    ]


def _count_as_batches_of_now(loop: Any, combined: CombinedLoader) -> None:
    # Let Lightning's count of batches say how many of the present size were trained on. So that as
    # many follow as are left, also where a batch of all ranks has another size than before the
    # checkpoint
    lengths = _lengths(combined)
    # the loader that the length of an epoch follows from
    length = min(lengths) if combined._mode == "min_size" else max(lengths)
    loader, tracked = _with_tracked(combined)[lengths.index(length)]
    if not tracked:
        return
    # One batch is to come, or Lightning would begin this epoch anew.
    done = int(min(len(loader) - loader.batches_left(), length - 1))
    current = loop.epoch_loop.batch_progress.current
    if done != current.processed:
        rank_zero_info(
            f"{current.processed} batches of this epoch were trained on, as many samples as "
            f"{done} of the present size"
        )
        _set_batches(current, done)


def _set_batches(current: Any, processed: float) -> None:
    # Let Lightning's counts of an epoch's batches say that `processed` ones were, if known
    if processed != float("inf"):
        shift = int(processed) - current.processed
        for name in _COUNTS:
            setattr(current, name, getattr(current, name) + shift)
