"""One plan of a model, priced as the search would price it, and what its time is made of."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from lightning_topt.basics.argument_checks import check_whole
from lightning_topt.basics.units import format_bytes, format_seconds
from lightning_topt.cli.example_step import ExampleStep, NeedsValues, capture_example
from lightning_topt.costs.cluster import Cluster, sentence_of
from lightning_topt.costs.optimizer import OptimizerProfile, read_optimizer
from lightning_topt.graph.meta_build import build_on_meta
from lightning_topt.plan.explanation import PricedPlan, price_plan
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.plan_report import print_explanation, print_stages
from lightning_topt.plan.plan_search import SearchRequest
from lightning_topt.plugins.given_plans import MeshPlan, PipelinePlan, UniformPlan
from lightning_topt.plugins.planning import make_fake_optimizers
from lightning_topt.plugins.read_options import read_plan_option


def predict_plan(config: DictConfig, cluster: Cluster, *, console: Console) -> None:
    """Price the plan that `config` names, and print it.

    Raises ValueError for options that contradict one another, PlanError for a plan that is not one
    of the model.
    """
    pl.seed_everything(config.seed, workers=True)
    value: Any = (
        OmegaConf.to_container(config.plan) if OmegaConf.is_config(config.plan) else config.plan
    )
    given = read_plan_option(value)
    if given is None or isinstance(given, MeshPlan | PipelinePlan):
        raise ValueError(
            "the splits of a mesh and the stages of a pipeline are found by a search: give a plan "
            "file, such as topt plan writes, or a name such as plan=zero3"
        )
    example, profile = _example(
        config, splits=isinstance(given, ParallelPlan) and bool(given.mesh.tensor_axes)
    )
    plan = _plan(given, config.ranks, example, cluster)
    priced = price_plan(request_of(plan, example, cluster, profile), plan)
    print_priced(priced, cluster, console=console)
    if config.out is not None:
        out = Path(config.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        priced.plan.save(out)
        console.print(f"plan with its prediction: {out}", highlight=False, soft_wrap=True)


def request_of(
    plan: ParallelPlan, example: ExampleStep, cluster: Cluster, profile: OptimizerProfile
) -> SearchRequest:
    """Return what a search that finds `plan`, which has a batch, would be asked for."""
    assert plan.batch_size is not None
    own = plan.schedule is None and plan.num_microbatches > 1
    return SearchRequest(
        example.graph,
        cluster,
        profile,
        device_counts=(plan.mesh.size,),
        global_batch_size=plan.batch_size
        * (plan.mesh.size if plan.brings_batches else plan.data_parallel_size),
        split=example.split,
        own_batches=own,
    )


def print_priced(priced: PricedPlan, cluster: Cluster, *, console: Console) -> None:
    """Print what a plan is predicted to cost, the kinds of work, and its blocks or stages."""
    predicted, plan = priced.predicted, priced.plan
    console.print(
        f"{plan.summary()}, batches of {plan.batch_size} on {cluster.name}", highlight=False
    )
    console.print(
        f"step time {format_seconds(predicted.step_seconds)}, peak memory "
        f"{format_bytes(predicted.peak_bytes)} of each rank",
        highlight=False,
    )
    console.print(sentence_of(cluster.accuracy), highlight=False)
    table = Table("of a step", "seconds", "share", caption=_CAPTION, caption_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for kind, seconds in sorted(priced.seconds.items(), key=lambda item: -item[1]):
        if seconds > 0:
            table.add_row(
                kind,
                format_seconds(seconds),
                f"{100 * seconds / max(predicted.step_seconds, 1e-30):.1f} %",
            )
    console.print(table)
    if priced.blocks is not None:
        print_explanation(priced.blocks, console=console)
    if priced.stages:
        print_stages(priced.stages, console=console)


_CAPTION = (
    "work of the rank that works longest; exchanges run beside other work, so shares may add up to "
    "more than 100 %"
)


def _example(config: DictConfig, *, splits: bool) -> tuple[ExampleStep, OptimizerProfile]:
    make_model = functools.partial(instantiate, config.model)
    datamodule: pl.LightningDataModule = instantiate(config.data)
    model: pl.LightningModule = build_on_meta(make_model)
    given: dict[str, Any] = {"strategy": "auto", "devices": 1, "num_nodes": 1, "logger": False}
    trainer: pl.Trainer = instantiate(
        config.trainer, **given, enable_checkpointing=False, _convert_="all"
    )
    try:
        example = capture_example(model, datamodule, trainer, splits=splits)
    except NeedsValues:
        model = make_model()
        example = capture_example(model, datamodule, trainer)
    optimizers, named = make_fake_optimizers(model, device=torch.device("cpu"))
    return example, read_optimizer(optimizers, named_parameters=named)


def _plan(
    given: UniformPlan | ParallelPlan, ranks: int | None, example: ExampleStep, cluster: Cluster
) -> ParallelPlan:
    if isinstance(given, ParallelPlan):
        if ranks not in (None, given.mesh.size):
            raise ValueError(
                f"ranks={ranks}, but the plan is for {given.mesh.size}; leave out ranks"
            )
        return given if given.batch_size is not None else replace(given, batch_size=example.samples)
    count = cluster.num_devices if ranks is None else ranks
    check_whole(count, name="ranks")
    nodes = max(count // cluster.devices_per_node, 1)
    if count % nodes:
        raise ValueError(
            f"{count} ranks cannot be divided over {nodes} nodes: choose numbers that divide"
        )
    plan = given.of(example.graph, given.mesh(count, num_nodes=nodes))
    return replace(plan, batch_size=example.samples)
