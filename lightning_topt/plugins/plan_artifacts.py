"""The plan of a fit as an artifact of its loggers, and what was searched as a page.

    MLflow         ``topt/plan.json`` and ``topt/frontier.html`` of the run
    W&B            both in an artifact of type ``plan``, also offline
    TensorBoard    the plan as the text ``topt/plan``

The page is there where a plan was searched. Commands write it to their folders, too.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_warn

from lightning_topt.basics.units import format_count
from lightning_topt.costs.cluster import Cluster
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plan.frontier_report import MemoryLimit, save_html
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.report_table import report_title
from lightning_topt.plan.step_factors import left_out_sentence
from lightning_topt.plugins.plan_request import PlanRequest
from lightning_topt.plugins.planning import Planning


def log_plan(trainer: pl.Trainer) -> None:
    """Give the plan of a fit under ``"topt"`` to the loggers of rank 0 that take such files.

    What a logger raises is a warning: no fit ends with it.
    """
    strategy: Any = trainer.strategy
    plan: ParallelPlan | None = strategy.parallel_plan
    if plan is None or not trainer.is_global_zero:
        return
    for logger in trainer.loggers:
        try:
            if isinstance(logger, TensorBoardLogger):
                text = json.dumps(plan.to_dict(), indent=2)
                logger.experiment.add_text(
                    "topt/plan", f"```json\n{text}\n```", trainer.global_step
                )
            elif isinstance(logger, MLFlowLogger | WandbLogger):
                with tempfile.TemporaryDirectory() as folder:
                    _log_files(logger, _write(strategy, plan, Path(folder)))
        except Exception as error:
            rank_zero_warn(f"topt: {type(logger).__name__} did not take the plan: {error}")


def _write(strategy: Any, plan: ParallelPlan, folder: Path) -> list[Path]:
    # Write what is known of the plan to `folder`; return the files
    files, planning = [folder / "plan.json"], strategy.planning
    files[0].write_text(json.dumps(plan.to_dict(), indent=2) + "\n")
    if planning is not None:
        limit = memory_limit_of(strategy.request, strategy.request.cluster)
        page, _ = save_frontier_page(
            folder,
            planning,
            model=sized_name(planning.graph),
            where=planning.chosen.plan.cluster,
            memory_limit=limit,
        )
        files.append(page)
    return files


def _log_files(logger: Logger, files: Sequence[Path]) -> None:
    # Hand `files` to a logger that has artifacts; they may go afterwards
    if isinstance(logger, MLFlowLogger):
        for path in files:
            logger.experiment.log_artifact(logger.run_id, str(path), "topt")
        return
    assert isinstance(logger, WandbLogger)
    run: Any = logger.experiment
    artifact = importlib.import_module("wandb").Artifact(f"topt-plan-{run.id}", type="plan")
    for path in files:
        artifact.add_file(str(path))  # copies it
    run.log_artifact(artifact)


# ---- the page ------------------------------------------------------------------------------------


def sized_name(graph: OpGraph, name: str | None = None) -> str:
    """Return the name of a model, by default its class, and its size."""
    count = format_count(sum(p.numel for p in graph.parameters))
    return f"{name or graph.model} ({count} parameters)"


def memory_limit_of(request: PlanRequest, cluster: Cluster | None) -> MemoryLimit | None:
    """Return the limit that was given, else the memory of a device; None: neither is known."""
    if request.memory_limit is not None:
        return MemoryLimit(request.memory_limit, request.margin_on(cluster))
    if cluster is None:
        return None
    margin = request.margin_on(cluster)
    return MemoryLimit(cluster.device.memory_bytes, margin, "memory of a device")


def save_frontier_page(
    folder: Path,
    planning: Planning,
    *,
    model: str,
    where: str,
    memory_limit: MemoryLimit | None,
    notes: Sequence[str] = (),
    **more: Any,
) -> tuple[Path, str]:
    """Write ``frontier.html`` to `folder`; return its path and its title.

    Args:
        folder: of the run.
        planning: what was searched and chosen.
        model: its name, for the title.
        where: the cluster, for the title.
        memory_limit: of a device.
        notes: lines on the chosen plan.
        more: further arguments of `save_html`.
    """
    frontier, path = planning.frontier, folder / "frontier.html"
    points = frontier.shown_with(planning.chosen)
    title = report_title(model, where, (point.devices for point in points))
    if frontier.left_out and (left := left_out_sentence(frontier.left_out)) not in notes:
        notes = [*notes, left]
    given: dict[str, Any] = {"memory_limit": memory_limit, "exact": frontier.exact, **more}
    save_html(path, points, planning.chosen, title=title, notes=notes, **given)
    return path, title
