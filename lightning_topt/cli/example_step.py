"""The step that commands look at without training: a batch of the user's data, and the graph of
what the model does with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_topt.graph.capture import CaptureError, capture, may_need_values
from lightning_topt.graph.meta_build import is_on_meta
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.graph.sample_counts import batch_sizes
from lightning_topt.graph.step_observer import observe_step
from lightning_topt.plugins.example_batch import batches_of
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.split_candidates import SplitModel


class NeedsValues(Exception):
    """The step depends on values of tensors, and the model has none."""


@dataclass(frozen=True)
class ExampleStep:
    """The graph of a rank's step on `batch`, its samples, and the same step as one that can be
    split, where that was asked for and the step does not depend on values; `reads_values` says
    whether it does.
    """

    graph: OpGraph
    samples: int
    split: SplitModel | None = None
    reads_values: bool = False
    batch: Any = None


def example_batches(
    model: pl.LightningModule, datamodule: pl.LightningDataModule, trainer: pl.Trainer
) -> tuple[Any, Any | None]:
    """Return a training batch and one of twice as many samples (None: there is none); `trainer` is
    the model's from then on.
    """
    # the hooks of a batch's transfer ask for it
    trainer._data_connector.attach_data(model, datamodule=datamodule)
    trainer.strategy.connect(model)
    datamodule.prepare_data()
    datamodule.setup("fit")
    return batches_of(CombinedLoader(datamodule.train_dataloader()), trainer)


def capture_example(
    model: pl.LightningModule,
    datamodule: pl.LightningDataModule,
    trainer: pl.Trainer,
    *,
    splits: bool = False,
) -> ExampleStep:
    """Return the step of `model` on a batch of its data. Raises NeedsValues for a model on the meta
    device.
    """
    return capture_batches(
        model, example_batches(model, datamodule, trainer), trainer, splits=splits
    )


def capture_batches(
    model: pl.LightningModule,
    batches: tuple[Any, Any | None],
    trainer: pl.Trainer,
    *,
    splits: bool = False,
) -> ExampleStep:
    """Return the step of `model` on what `example_batches` returned, with `splits` as one that can
    be split too.

    Raises NeedsValues for a model on the meta device.
    """
    batch, second_batch = batches
    trainer.precision_plugin.convert_module(model)
    given: dict[str, Any] = {
        "forward_context": trainer.precision_plugin.forward_context,
        "device": trainer.strategy.root_device.type,
    }
    trace, reads_values = FunctionTrace() if splits else None, False
    traced = {**given, "adapt": None if trace is None else trace.of}
    try:
        graph, sizes = (
            capture(model, batch, second_batch=second_batch, **traced),
            batch_sizes(batch, second_batch),
        )
    except Exception as error:
        # As it is, for the trainer's own number of ranks: how the step grows with the batch stays
        # unknown.
        reads_values = may_need_values(error)
        if not reads_values and not isinstance(error, CaptureError):
            raise
        if reads_values and is_on_meta(model):
            raise NeedsValues from error
        if reads_values:
            trace, graph = (
                None,
                observe_step(model, batch, forward_context=given["forward_context"]),
            )
        else:
            graph = capture(model, batch, batch_scaling=False, **traced)
        second_batch, sizes = None, (graph.batch_size, graph.batch_size)
    split = None if trace is None else SplitModel(model, batch, graph, trace, second_batch, **given)
    return ExampleStep(graph, sizes[0], split, reads_values=reads_values, batch=batch)
