"""`topt verify`: would a plan run, and what would each rank hold?

Nothing is trained and no rank is started: `verify_plan` looks at the plan, for any number of ranks.
The model is built without memory, unless its step reads values of tensors.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
from hydra.utils import instantiate
from lightning.pytorch.core.optimizer import _configure_optimizers
from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch.optim import Optimizer

from lightning_topt.basics.units import format_bytes
from lightning_topt.cli.example_step import ModelSetup, on_ranks, read_given_plan
from lightning_topt.communication.started_ranks import leave_to_rank_0
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.execution.verify_plan import KINDS, Verification, verify_plan
from lightning_topt.graph.capture import call_training_step, loss_of
from lightning_topt.plan.frontier_report import ranges
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plugins.microbatches import split_batch
from lightning_topt.plugins.plan_options import read_cluster

_ROWS = 8  # that are printed


def run(config: DictConfig) -> None:
    """Verify what `config` describes, print it, and end with exit code 1 unless it would run.

    Raises:
        ValueError: options contradict one another.
        PlanError: the plan cannot be read.
    """
    leave_to_rank_0()
    pl.seed_everything(config.seed, workers=True)
    cluster = read_cluster(instantiate(config.cluster, _convert_="all"))
    given, setup = read_given_plan(config), ModelSetup.of(config)
    example = setup.capture()
    plan = on_ranks(given, example.graph, cluster, ranks=config.ranks, nodes=config.nodes)
    verification = verify_plan(
        plan,
        setup.model,
        optimizers_of=_optimizers_of,
        graph=example.graph,
        cluster=cluster,
        global_batch_size=config.global_batch_size,
        batch_size=example.samples,
        example=_stage_example(plan, setup.trainer, example.batch),
    )
    # The report, the file, and the exit code.
    _print(verification, Console())
    if config.json is not None:
        Path(config.json).write_text(json.dumps(verification.to_dict(), indent=1))
    if not verification.would_run:
        sys.exit(1)


def _optimizers_of(module: pl.LightningModule) -> Sequence[Optimizer]:
    optimizers, _, _ = _configure_optimizers(
        module.configure_optimizers()  # type: ignore[arg-type]
    )
    return optimizers


# a microbatch of a plan with stages, and the step on it
def _stage_example(plan: ParallelPlan, trainer: pl.Trainer, batch: object) -> Example | None:
    if plan.schedule is None:
        return None

    def loss(model: object, part: object) -> Tensor:
        with trainer.precision_plugin.forward_context():
            return loss_of(call_training_step(model, part))

    # a part of a batch, or a batch of each rank, which are all alike here
    if not plan.own_batches:
        batch = split_batch(batch, plan.num_microbatches).batches[0]
    return Example(loss, batch)


# what ranks hold, then the problems, then the answer
def _print(verification: Verification, console: Console) -> None:
    plan, groups = verification.plan, verification.equal_ranks()
    console.print(f"{plan.summary()}, {plan.mesh.size} rank(s)", highlight=False, markup=False)
    if groups:
        table = Table("ranks", *(kind.replace("_", " ") for kind in KINDS), "together")
        for column in table.columns[1:]:
            column.justify, column.no_wrap = "right", True
        for ranks, one in groups[:_ROWS]:
            sizes = verification.held_by_rank[one].tolist()
            table.add_row(ranges(ranks), *map(format_bytes, (*sizes, sum(sizes))))
        if len(groups) > _ROWS:
            table.caption = f"{len(groups) - _ROWS} more kinds of ranks, which hold less"
        console.print(table)
    for note in verification.notes:
        console.print(f"note: {escape(note)}", highlight=False)
    for problem in verification.problems:
        console.print(f"[bold red]problem[/]: {escape(problem)}", highlight=False)
    console.print(
        "[bold green]would run[/]" if verification.would_run else "[bold red]would not run[/]"
    )
