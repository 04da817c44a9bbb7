"""The step that commands reason about without training: a batch of the user's data, and its graph.

    trainer = one_device_trainer(config)
    example = capture_example(model, datamodule, trainer)     # NeedsValues: the model must be real
    example.graph, example.samples, example.batch

A model on the meta device is captured without memory. One whose step reads values of tensors
(`NeedsValues`) is built for real and captured again; the command decides about that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from hydra.utils import instantiate
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from omegaconf import DictConfig, OmegaConf

from lightning_topt.costs.cluster import Cluster
from lightning_topt.graph.accelerator_kernels import OnAccelerator
from lightning_topt.graph.capture import capture
from lightning_topt.graph.errors import CaptureError, may_need_values
from lightning_topt.graph.fused_chains import fused
from lightning_topt.graph.module_copy import is_on_meta
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.graph.step_observer import observe_step
from lightning_topt.graph.structures import batch_sizes
from lightning_topt.plugins.planning import batches_of
from lightning_topt.plugins.requirements import noted_reads
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.split_model import SplitModel

# what kind of step was predicted, by `OpGraph.predicted_as`
PREDICTED_AS = {
    "eager": "Predicted as eager: each operator is a kernel (compiled=true: as torch.compile).",
    "compiled": (
        "Predicted as compiled: chains of elementwise operators are one kernel, as torch.compile "
        "makes them; memory is that of the eager step."
    ),
}


class NeedsValues(Exception):
    """The step depends on values of tensors, and the model has none."""


@dataclass(frozen=True)
class ExampleStep:
    """One rank's step on a batch, captured.

    Args:
        graph: the step.
        samples: those of `batch`.
        split: the same step as one that can be split, where that was asked for and the step does
            not depend on values.
        reads_values: the step depends on values of tensors.
        batch: what the step was captured on.
    """

    graph: OpGraph
    samples: int
    split: SplitModel | None = None
    reads_values: bool = False
    batch: object = None
    reads: frozenset[str] = frozenset()  # of the rank and the fit, see `requirements.noted_reads`


def capture_example(
    model: pl.LightningModule,
    datamodule: pl.LightningDataModule,
    trainer: pl.Trainer,
    *,
    splits: bool = False,
    accelerator: bool = False,
    compiled: bool = False,
) -> ExampleStep:
    """Return the step of `model` on a batch of its data; see `capture_batches`.

    Raises:
        NeedsValues: for a model on the meta device.
    """
    batches = example_batches(model, datamodule, trainer)
    kind = {"accelerator": accelerator, "compiled": compiled}
    return capture_batches(model, batches, trainer, splits=splits, **kind)


def example_batches(
    model: pl.LightningModule, datamodule: pl.LightningDataModule, trainer: pl.Trainer
) -> tuple[object, object | None]:
    """Return a training batch, and one of twice as many samples or None.

    `trainer` is the model's from then on.
    """
    # the hooks of a batch's transfer ask for it
    trainer._data_connector.attach_data(model, datamodule=datamodule)
    trainer.strategy.connect(model)
    datamodule.prepare_data()
    datamodule.setup("fit")
    return batches_of(CombinedLoader(datamodule.train_dataloader()), trainer)


def capture_batches(
    model: pl.LightningModule,
    batches: tuple[object, object | None],
    trainer: pl.Trainer,
    *,
    splits: bool = False,
    accelerator: bool = False,
    compiled: bool = False,
) -> ExampleStep:
    """Return the step of `model` on what `example_batches` returned.

    Args:
        model: the LightningModule.
        batches: a batch, and one of twice as many samples or None.
        trainer: that of the model.
        splits: return it as a step that can be split as well.
        accelerator: it will run on accelerators, whatever this machine has.
        compiled: it will run as `torch.compile` runs it (`graph.fused_chains`).

    Raises:
        NeedsValues: for a model on the meta device.
    """
    # the second batch may be None: then it is taken to be twice the first
    batch, second_batch = batches
    # the model computes in the trainer's precision, on its kind of device
    trainer.precision_plugin.convert_module(model)
    device = trainer.strategy.root_device.type
    precision = trainer.precision_plugin.forward_context

    elsewhere = accelerator and device == "cpu"
    given: dict[str, Any] = {
        "forward_context": OnAccelerator(precision) if elsewhere else precision,
        "device": device,
    }
    trace, reads_values, reads = FunctionTrace() if splits else None, False, set[str]()
    traced = {**given, "adapt": None if trace is None else trace.of}
    try:
        # two batches tell how the step grows with the batch
        with noted_reads() as reads:
            graph = capture(model, batch, second_batch=second_batch, **traced)
        sizes = batch_sizes(batch, second_batch)
    except Exception as error:
        reads_values = may_need_values(error)
        if not reads_values and not isinstance(error, CaptureError):
            raise
        if reads_values and is_on_meta(model):
            raise NeedsValues from error
        # As it is, for the trainer's own number of ranks: how the step grows with the batch stays
        # unknown. A step that reads values runs on real tensors, and cannot be split.
        if reads_values:
            trace = None
            graph = observe_step(model, batch, forward_context=precision)
        else:
            graph = capture(model, batch, batch_scaling=False, **traced)
        second_batch, sizes = None, (graph.batch_size, graph.batch_size)
    # a split model reuses the trace of the functions that the capture has called
    given["compiled"] = compiled
    split = None if trace is None else SplitModel(model, batch, graph, trace, second_batch, **given)
    graph = fused(graph) if compiled else graph
    return ExampleStep(
        graph, sizes[0], split, reads_values=reads_values, batch=batch, reads=frozenset(reads)
    )


def has_accelerators(*clusters: Cluster | None) -> bool:
    """Return whether any of these clusters has accelerators; None is this machine."""
    return any(cluster is not None and cluster.backend == "nccl" for cluster in clusters)


# ---- what commands read of a configuration


def one_device_trainer(config: DictConfig) -> pl.Trainer:
    """Return the trainer of `config` on one device, without logs and checkpoints."""
    given = {
        "strategy": "auto",
        "devices": 1,
        "num_nodes": 1,
        "logger": False,
        "enable_checkpointing": False,
        **plugins_of_planning(config.trainer),
    }
    trainer: pl.Trainer = instantiate(config.trainer, **given, _convert_="all")
    return trainer


def plugins_of_planning(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return plugins for a Trainer that trains nothing; of none but `trainer`'s own, if any.

    In a job of SLURM it is no rank. Else Lightning takes the batch script for rank 0 of the job's
    tasks, and refuses ``--ntasks``.
    """
    if "SLURM_JOB_ID" not in os.environ or trainer.get("plugins") is not None:
        return {}
    return {"plugins": [LightningEnvironment()]}


def plain_value(value: object) -> Any:
    """Return an entry of a configuration as plain dictionaries, lists and scalars."""
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
