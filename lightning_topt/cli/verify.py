"""`topt verify`: would a plan run, and what would each rank hold and exchange?

Nothing is trained, and no ranks are needed. Three checks, each closer than the one before:

    the plan            any number of ranks, nothing is started      verify_plan
    a fake group        the code of one rank, nothing is sent        rehearse_rank (rehearse=true)
    ranks here          steps on `devices` ranks of this machine     ObservedRun (devices=N)
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import lightning.pytorch as pl
import torch
from hydra.utils import instantiate
from lightning.pytorch.core.optimizer import _configure_optimizers
from omegaconf import DictConfig
from rich.console import Console
from torch import Tensor
from torch.multiprocessing.spawn import ProcessRaisedException
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
from lightning_topt.cli.local_processes import run_on_ranks
from lightning_topt.communication.started_ranks import leave_to_rank_0
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.measuring import device_memory_bytes, gather
from lightning_topt.execution.observed_step import (
    CannotRehearseError,
    Observation,
    ObservedRun,
    rehearse_rank,
    with_observations,
)
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.execution.verify_plan import Verification, print_verification, verify_plan
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
    if config.devices is None:  # else ranks of torchrun or srun try a step together
        leave_to_rank_0()
    pl.seed_everything(config.seed, workers=True)
    cluster = read_cluster(instantiate(config.cluster, _convert_="all"))
    subject = Subject.of(config)

    # the plan alone
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

    # a fake group, then ranks of this machine
    if verification.would_run and config.rehearse:
        verification = _rehearsed(verification, subject, rank=config.rank)
    if verification.would_run and config.devices is not None:
        try:
            # this process has computed with several threads: a forked rank has one
            seen = run_on_ranks(
                _observe_rank,
                plan,
                subject,
                config.seed,
                accelerator="cpu",
                devices=config.devices,
                threads=1,
            )
        except ProcessRaisedException as error:
            sys.stderr.write(f"{error}\n")
            problem = (
                f"a step on {config.devices} ranks of this machine failed: "
                f"{str(error).strip().splitlines()[-1]}"
            )
            verification = replace(verification, problems=(*verification.problems, problem))
        else:
            if seen is None:  # another rank of torchrun or srun goes on
                return
            verification = with_observations(verification, seen, where="of this machine")

    # the report, and the exit code
    print_verification(verification, console=Console())
    if config.json is not None:
        Path(config.json).write_text(json.dumps(verification.to_dict(), indent=1))
    if not verification.would_run:
        sys.exit(1)


@dataclass(frozen=True)
class Subject:
    """The model that is verified, and a batch.

    Args:
        make_model: builds the model for real.
        model: on the meta device where it can be.
        datamodule: gives the batch.
        trainer: that of the model, on one device.
        batch: a training batch.
        example: the captured step, where that was asked.
    """

    make_model: Callable[[], pl.LightningModule]
    model: pl.LightningModule
    datamodule: pl.LightningDataModule
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
        # without a capture, activations and the batch are not known
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
        return cls(make_model, model, datamodule, trainer, batches[0], example)


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
    # ranks that are started here are all ranks of the plan
    if config.devices is not None and config.devices != plan.mesh.size:
        raise ValueError(
            f"devices={config.devices}, but the plan is for {plan.mesh.size} ranks: start "
            f"{plan.mesh.size}, or verify a plan by its name (plan=zero3 devices={config.devices})"
        )
    check_whole(config.rank, name="rank", least=0)
    if config.rank >= plan.mesh.size:
        raise ValueError(
            f"rank={config.rank}, but the plan has the ranks 0 to {plan.mesh.size - 1}"
        )
    return plan


def _ranks(config: DictConfig, cluster: Cluster | None) -> tuple[int, int]:
    """Return the numbers of ranks and nodes that a plan by name is for.

    As asked, else those that are started here, else all of the cluster.
    """
    # ranks: as asked, as many as are started, or the whole cluster; nodes as full as can be
    ranks, nodes = config.ranks, config.nodes
    if config.devices is not None:
        check_whole(config.devices, name="devices")
    if ranks is None:
        ranks = config.devices or (cluster.num_devices if cluster is not None else None)
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

    return Example(loss, _microbatches(plan, subject.batch)[0])


def _microbatches(plan: ParallelPlan, batch: object) -> Sequence[object]:
    """Return the microbatches of a plan with stages; none for other plans.

    They are parts of a batch, or a batch of each rank, which are all alike here.
    """
    if plan.schedule is None:
        return ()
    if plan.own_batches:
        return (batch,) * plan.num_microbatches
    return split_batch(batch, plan.num_microbatches).batches


# ---- closer checks


def _rehearsed(verification: Verification, subject: Subject, *, rank: int) -> Verification:
    """Add what the step of one rank does in a fake group."""
    plan, where = verification.plan, f"of a fake group of {verification.plan.mesh.size} ranks"
    try:
        seen = rehearse_rank(
            plan,
            subject.model,
            subject.batch,
            optimizers_of=_optimizers_of,
            rank=rank,
            # a real step of one rank: it shall not take all memory of this machine
            memory_limit=device_memory_bytes(torch.device("cpu")) / 4,
            forward_context=subject.trainer.precision_plugin.forward_context,
        )
    except CannotRehearseError as error:
        return replace(
            verification, notes=(*verification.notes, f"not tried on a fake group: {error}")
        )
    except Exception as error:  # of the user's model or of the plan: a result, not a failure here
        problem = (
            f"the step of rank {rank} {where} failed: {type(error).__name__}: "
            f"{' '.join(str(error).split())}"
        )
        return replace(verification, problems=(*verification.problems, problem))
    return with_observations(verification, [seen], where=where)


def _observe_rank(
    device: torch.device, num_nodes: int, plan: ParallelPlan, subject: Subject, seed: int
) -> list[Observation]:
    """Run steps of the plan on this rank; rank 0 returns what all have observed."""
    # equal weights on all ranks, as after a broadcast
    pl.seed_everything(seed, workers=True, verbose=False)
    model, trainer = subject.make_model(), subject.trainer
    trainer._data_connector.attach_data(model, datamodule=subject.datamodule)
    trainer.precision_plugin.convert_module(model)
    run = ObservedRun(
        plan,
        model,
        subject.batch,
        _optimizers_of,
        device=device,
        forward_context=trainer.precision_plugin.forward_context,
        parts=_microbatches(plan, subject.batch),
    )
    return gather(run.observe())
