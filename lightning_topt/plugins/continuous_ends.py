"""The places in a fit where a pipeline that never flushes has to: what Lightning's loop does after
a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint


def is_end(trainer: pl.Trainer) -> bool:
    """Return whether the loop validates, saves or ends its epoch after the batch that it has just
    trained on.

    Asked where callbacks are told of the end of the batch. Validation and saving that depend on
    later callbacks are not seen.
    """
    loop = trainer.fit_loop.epoch_loop
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    return loop._is_training_done or loop._should_check_val_fx(fetcher) or _saves(trainer)


def _saves(trainer: pl.Trainer) -> bool:
    return any(trainer.global_step % every == 0 for every in _saved_every(trainer))


def _saved_every(trainer: pl.Trainer) -> Iterator[int]:
    for callback in trainer.checkpoint_callbacks:
        every = callback._every_n_train_steps if isinstance(callback, ModelCheckpoint) else 0
        if every >= 1 and getattr(callback, "_last_global_step_saved", None) != trainer.global_step:
            yield every


class NextEnd(NamedTuple):
    """`batches` come after the one that begins before such a place, None where nothing tells;
    `updates`: an update follows the last of them.
    """

    batches: int | None
    updates: bool


def next_end(trainer: pl.Trainer) -> NextEnd:
    """Return where the next such place is. Asked during `training_step`."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    batches = max(min(_batches_left(trainer), default=math.inf), 0)
    if not math.isfinite(batches):
        return NextEnd(None, updates=True)
    last = progress.current.ready + int(batches)
    is_last_of_epoch = last == trainer.num_training_batches or (
        batches == 0 and progress.is_last_batch
    )
    return NextEnd(
        int(batches), updates=is_last_of_epoch or last % trainer.accumulate_grad_batches == 0
    )


def _batches_left(trainer: pl.Trainer) -> Iterator[int]:
    loop, each = trainer.fit_loop.epoch_loop, trainer.accumulate_grad_batches
    ready = loop.batch_progress.current.ready  # with this one
    if loop.batch_progress.is_last_batch:
        yield 0
    if math.isfinite(trainer.num_training_batches):
        yield int(trainer.num_training_batches) - ready

    def after_steps(count: int) -> int:
        return count * each - 1 - (ready - 1) % each

    if loop.max_steps is not None and loop.max_steps >= 0:
        yield after_steps(loop.max_steps - trainer.global_step)
    for every in _saved_every(trainer):
        yield after_steps(every - trainer.global_step % every)
    every_batch = trainer.val_check_batch
    if loop._should_check_val_epoch() and every_batch is not None and math.isfinite(every_batch):
        place = loop.total_batch_idx if trainer.check_val_every_n_epoch is None else loop.batch_idx
        yield int(-(place + 1) % every_batch)
