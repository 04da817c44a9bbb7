"""A report is what `topt plan` prints and writes of one plan and its frontier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_topt.cli.searched_pipelines import drawn_step
from lightning_topt.plan.explanation import explain_plan, explain_stages, unsplit_operators
from lightning_topt.plan.frontier_report import print_table, save_html, save_png
from lightning_topt.plan.plan_report import (
    print_explanation,
    print_schedule,
    print_stages,
    save_schedule_png,
    whole_sentences,
)
from lightning_topt.plan.plan_search import SearchRequest
from lightning_topt.plugins.planning import Planning


def report_plan(
    planning: Planning,
    search: SearchRequest,
    *,
    memory_limit: float | None,
    folder: Path,
    notes: Sequence[str],
    ends: bool = True,
) -> None:
    """Write the frontier and the plan to `folder`, and print them; with `ends` the notes and the
    folder as well.
    """
    frontier, plan = planning.frontier, planning.chosen.plan
    points, title = frontier.shown_with(planning.chosen), planning.graph.model
    explained = (
        explain_plan(search, plan) if plan.mesh.tensor_axes and plan.schedule is None else None
    )
    whole = whole_sentences(
        unsplit_operators(search, plan) if explained is None else explained.whole
    )
    lines = [*notes, *whole]
    given: dict[str, Any] = {"memory_limit": memory_limit, "title": title}
    save_png(folder / "frontier.png", points, planning.chosen, **given)
    page = folder / "frontier.html"
    step = drawn_step(search, plan)
    save_html(page, points, planning.chosen, **given, exact=frontier.exact, notes=lines, step=step)
    if step is not None:
        save_schedule_png(folder / "schedule.png", step)
    plan.save(folder / "plan.yaml")
    console = Console()
    print_table(points, planning.chosen, console=console)
    console.print(f"{plan.summary()}\n{plan.reason}", highlight=False)
    if plan.mesh.size > plan.mesh.data_parallel_size:
        console.print(
            f"Ranks of its {'pipelines' if plan.schedule else 'tensor axis'} get the same samples: "
            f"with batches of {plan.batch_size} in the loader a step has "
            f"{search.global_batch_size}.",
            highlight=False,
        )
    if step is not None:
        print_schedule(step, console=console)
        print_stages(explain_stages(search, plan), console=console)
        for line in whole:
            console.print(line, highlight=False, markup=False)
    if explained is not None:
        print_explanation(explained, console=console)
    for note in notes if ends else ():
        console.print(note, highlight=False, markup=False)
    if ends:
        console.print(f"run folder: {folder}", highlight=False, soft_wrap=True)
