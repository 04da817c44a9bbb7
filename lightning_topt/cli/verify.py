"""`topt verify`: would a plan run, and what would each rank hold?

Nothing is trained and no rank is started: `verify_plan` looks at the plan, for any number of ranks.
The model is built without memory, unless its step reads values of tensors.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import lightning.pytorch as pl
from hydra.utils import instantiate
from lightning.pytorch.core.optimizer import _configure_optimizers
from omegaconf import DictConfig
from rich.console import Console
from torch import Tensor
from torch.optim import Optimizer

from lightning_topt.basics.argument_checks import check_whole
from lightning_topt.cli.example_step import (
    ExampleStep,
    NeedsValues,
    capture_batches,
    example_batches,
    one_device_trainer,
    plain_value,
)
from lightning_topt.communication.started_ranks import leave_to_rank_0
from lightning_topt.costs.cluster import Cluster
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.execution.verify_plan import print_verification, verify_plan
from lightning_topt.graph.capture import call_training_step, loss_of
from lightning_topt.graph.module_copy import build_on_meta
from lightning_topt.plan.parallel_plan import ParallelPlan, preset_plan
from lightning_topt.plugins.microbatches import split_batch
from lightning_topt.plugins.plan_options import (
    MeshPlan,
    PipelinePlan,
    UniformPlan,
    read_cluster,
    read_plan_option,
)


def run(config: DictConfig) -> None:
    """Verify what `config` describes, print it, and end with exit code 1 unless it would run.

    Raises:
        ValueError: options contradict one another.
        PlanError: the plan cannot be read.
    """
    leave_to_rank_0()
    pl.seed_everything(config.seed, workers=True)
    cluster = read_cluster(instantiate(config.cluster, _convert_="all"))
    subject = Subject.of(config)
    plan = _plan(config, subject, cluster)
    verification = verify_plan(
        plan,
        subject.model,
        optimizers_of=_optimizers_of,
        graph=None if subject.example is None else subject.example.graph,
        cluster=cluster,
        global_batch_size=config.global_batch_size,
        batch_size=None if subject.example is None else subject.example.samples,
        example=_stage_example(plan, subject),
    )
    # the report, and the exit code
    print_verification(verification, console=Console())
    if config.json is not None:
        Path(config.json).write_text(json.dumps(verification.to_dict(), indent=1))
    if not verification.would_run:
        sys.exit(1)


class Subject(NamedTuple):
    """The model that is verified, and a batch.

    Attributes:
        model: on the meta device where it can be.
        trainer: that of the model, on one device.
        batch: a training batch.
        example: the captured step, where that was asked.
    """

    model: pl.LightningModule
    trainer: pl.Trainer
    batch: object
    example: ExampleStep | None

    @classmethod
    def of(cls, config: DictConfig) -> Subject:
        """Build what `config` describes."""
        make_model = functools.partial(instantiate, config.model)
        datamodule: pl.LightningDataModule = instantiate(config.data)
        model: pl.LightningModule = build_on_meta(make_model)
        trainer = one_device_trainer(config)
        batches = example_batches(model, datamodule, trainer)
        # without a capture, activations and the samples of the batch are not known
        example = None
        if config.capture:
            try:
                example = capture_batches(model, batches, trainer)
            except NeedsValues:  # a real model, on the same batches
                model = make_model()
                trainer._data_connector.attach_data(model, datamodule=datamodule)
                example = capture_batches(model, batches, trainer)
        else:
            trainer.precision_plugin.convert_module(model)
        return cls(model, trainer, batches[0], example)


def _plan(config: DictConfig, subject: Subject, cluster: Cluster | None) -> ParallelPlan:
    """Return the plan that is verified, from its file or its name, with ranks and nodes."""
    plan = read_plan_option(plain_value(config.plan))
    if plan is None:
        raise ValueError(
            "say which plan is to be verified: plan=<file>, or a name such as plan=zero3 with "
            "ranks=<number>"
        )
    if isinstance(plan, MeshPlan | PipelinePlan):
        raise ValueError(
            "the splits of a mesh and the stages of a pipeline are found when a fit begins: give "
            "the plan that it took, which its checkpoints hold, or a plan file, such as topt plan "
            "'mesh={data:2,tensor:4}' writes"
        )

    # by name: for so many ranks
    if isinstance(plan, UniformPlan):
        ranks, nodes = _ranks(config, cluster)
        mesh = plan.mesh(ranks, num_nodes=nodes)
        if subject.example is not None:
            plan = plan.of(subject.example.graph, mesh)
        elif plan.recompute:
            raise ValueError(
                "which blocks can be recomputed is known from the captured step: leave out "
                "capture=false"
            )
        else:
            plan = preset_plan(plan.preset, mesh=mesh)
    elif config.ranks is not None and config.ranks != plan.mesh.size:
        raise ValueError(
            f"ranks={config.ranks}, but the plan is for {plan.mesh.size}; leave out ranks"
        )
    return plan


def _ranks(config: DictConfig, cluster: Cluster | None) -> tuple[int, int]:
    """Return the numbers of ranks and nodes that a plan by name is for.

    As asked, else all of the cluster.
    """
    # nodes are as full as can be
    ranks, nodes = config.ranks, config.nodes
    if ranks is None and cluster is not None:
        ranks = cluster.num_devices
    if ranks is None:
        raise ValueError(
            "a plan by name is for any number of ranks: say ranks=<number>, or cluster=<name> for "
            "all its devices"
        )
    if nodes is None:
        nodes = 1 if cluster is None else max(ranks // cluster.devices_per_node, 1)
    check_whole(ranks, name="ranks")
    check_whole(nodes, name="nodes")
    if ranks % nodes:
        raise ValueError(
            f"{ranks} ranks cannot be divided over {nodes} nodes: choose numbers that divide"
        )
    return ranks, nodes


def _optimizers_of(module: pl.LightningModule) -> Sequence[Optimizer]:
    optimizers, _, _ = _configure_optimizers(
        module.configure_optimizers()  # type: ignore[arg-type]
    )
    return optimizers


def _stage_example(plan: ParallelPlan, subject: Subject) -> Example | None:
    """Return a microbatch of a plan with stages, and the step on it; None for other plans."""
    if plan.schedule is None:
        return None

    def loss(model: object, part: object) -> Tensor:
        with subject.trainer.precision_plugin.forward_context():
            return loss_of(call_training_step(model, part))

    # a part of a batch, or a batch of each rank, which are all alike here
    batch = subject.batch
    if not plan.own_batches:
        batch = split_batch(batch, plan.num_microbatches).batches[0]
    return Example(loss, batch)
