"""The step that commands reason about without training: a batch of the user's data, and its graph.

    setup = ModelSetup.of(config)           # model, data and trainer; the model has no memory
    example = setup.capture()
    example.graph, example.samples, example.batch

A model on the meta device is captured without memory. One whose step reads values of tensors is
built for real and captured again.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import psutil
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from omegaconf import DictConfig, OmegaConf

from lightning_topt.basics.argument_checks import check_whole
from lightning_topt.basics.units import format_bytes, format_count
from lightning_topt.costs.cluster import Cluster
from lightning_topt.graph.capture import capture, observe_step
from lightning_topt.graph.errors import CaptureError, may_need_values
from lightning_topt.graph.kernels import OnAccelerator
from lightning_topt.graph.module_copy import build_on_meta, is_on_meta
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.graph.structures import batch_size
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plugins.plan_options import (
    MeshPlan,
    PipelinePlan,
    UniformPlan,
    read_plan_option,
)
from lightning_topt.plugins.planning import first_batch
from lightning_topt.plugins.requirements import noted_reads
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.split_model import SplitModel


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
    capture_seconds: float = 0.0


@dataclass
class ModelSetup:
    """What a configuration builds; `model` has no memory until its values are needed."""

    model: pl.LightningModule
    make_model: Callable[[], pl.LightningModule]
    datamodule: pl.LightningDataModule
    trainer: pl.Trainer

    @classmethod
    def of(cls, config: DictConfig, **options: Any) -> ModelSetup:
        """Build what `config` describes, with these options of the trainer or on one device."""
        datamodule: pl.LightningDataModule = instantiate(config.data)
        make_model: Callable[[], pl.LightningModule] = functools.partial(instantiate, config.model)
        model: pl.LightningModule = build_on_meta(make_model)
        one = {"strategy": "auto", "devices": 1, "num_nodes": 1, "enable_checkpointing": False}
        trainer: pl.Trainer = instantiate(
            config.trainer,
            logger=False,
            **(options or one),
            **plugins_of_planning(config.trainer),
            _convert_="all",
        )
        return cls(model, make_model, datamodule, trainer)

    def capture(self, *, splits: bool = False, accelerator: bool = False) -> ExampleStep:
        """Return the step of the model on a batch of its data.

        The trainer is the model's from then on.

        Args:
            splits: return it as a step that can be split as well.
            accelerator: it will run on accelerators, whatever this machine has.

        Raises:
            ValueError: the model must be real, and is larger than the memory of this machine.
        """
        # the hooks of a batch's transfer ask for the trainer
        trainer = self.trainer
        trainer._data_connector.attach_data(self.model, datamodule=self.datamodule)
        trainer.strategy.connect(self.model)
        self.datamodule.prepare_data()
        self.datamodule.setup("fit")
        batch = first_batch(CombinedLoader(self.datamodule.train_dataloader()), trainer)
        try:
            return _capture(self.model, batch, trainer, splits=splits, accelerator=accelerator)
        except NeedsValues as reason:
            # parameters and their gradients
            size = 2 * sum(p.nbytes for p in self.model.parameters())
            free = psutil.virtual_memory().available
            if size > free:
                raise ValueError(
                    f"the step reads values of tensors ({reason.__cause__}), so it runs on real "
                    f"weights to be planned; these take {format_bytes(size)} with their "
                    f"gradients, of which this machine has {format_bytes(free)} free: plan a "
                    "smaller model of the same kind"
                ) from reason
        # a real model, whose step cannot be split, on the same batches
        self.model = self.make_model()
        trainer._data_connector.attach_data(self.model, datamodule=self.datamodule)
        trainer.strategy.connect(self.model)
        return _capture(self.model, batch, trainer, splits=False, accelerator=accelerator)


def _capture(
    model: pl.LightningModule,
    batch: object,
    trainer: pl.Trainer,
    *,
    splits: bool,
    accelerator: bool,
) -> ExampleStep:
    start = time.perf_counter()
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
        # a batch twice as large tells how the step grows with the batch
        with noted_reads() as reads:
            graph = capture(model, batch, **traced)
        samples = batch_size(batch)
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
        samples = graph.batch_size
    # a split model reuses the trace of the functions that the capture has called
    split = None if trace is None else SplitModel(model, batch, graph, trace, **given)
    return ExampleStep(
        graph,
        samples,
        split,
        reads_values=reads_values,
        batch=batch,
        reads=frozenset(reads),
        capture_seconds=time.perf_counter() - start,
    )


def has_accelerators(*clusters: Cluster | None) -> bool:
    """Return whether any of these clusters has accelerators; None is this machine."""
    return any(cluster is not None and cluster.backend == "nccl" for cluster in clusters)


# ---- what commands read of a configuration


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


def model_name(graph: OpGraph) -> str:
    """Return the model as it was named on the command line, else its class; and its size."""
    # "own" stands for classes of the user's, and says nothing of them
    name = HydraConfig.get().runtime.choices.get("model")
    name = graph.model if name in (None, "null", "own") else name
    return f"{name} ({format_count(sum(p.numel for p in graph.parameters))} parameters)"


# ---- the plan that a command is about


def read_given_plan(config: DictConfig) -> UniformPlan | ParallelPlan:
    """Return the plan of the entry `plan`: that of a file, or one by name.

    Raises:
        ValueError: there is none, or one that a search completes.
    """
    plan = read_plan_option(plain_value(config.plan))
    if plan is None:
        raise ValueError("say which plan: plan=<file>, or a name such as plan=zero3")
    if isinstance(plan, MeshPlan | PipelinePlan):
        raise ValueError(
            "the splits of a mesh and the stages of a pipeline are found by a search: give a plan "
            "file, such as topt plan writes, or a name such as plan=zero3"
        )
    return plan


def on_ranks(
    plan: UniformPlan | ParallelPlan,
    graph: OpGraph,
    cluster: Cluster | None,
    *,
    ranks: int | None,
    nodes: int | None = None,
) -> ParallelPlan:
    """Return `plan` with ranks and nodes: those asked for, else all of the cluster.

    Raises:
        ValueError: the numbers are not known, or contradict one another.
    """
    # a file says everything
    if isinstance(plan, ParallelPlan):
        if ranks not in (None, plan.mesh.size):
            raise ValueError(
                f"ranks={ranks}, but the plan is for {plan.mesh.size}; leave out ranks"
            )
        return plan
    if ranks is None and cluster is None:
        raise ValueError(
            "a plan by name is for any number of ranks: say ranks=<number>, or cluster=<name> for "
            "all its devices"
        )
    count = check_whole(cluster.num_devices if ranks is None and cluster else ranks, name="ranks")
    # nodes are as full as can be
    if nodes is None:
        nodes = 1 if cluster is None else max(count // cluster.devices_per_node, 1)
    check_whole(nodes, name="nodes")
    if count % nodes:
        raise ValueError(
            f"{count} ranks cannot be divided over {nodes} nodes: choose numbers that divide"
        )
    return plan.of(graph, plan.mesh(count, num_nodes=nodes))
