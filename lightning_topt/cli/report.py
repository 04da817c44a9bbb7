"""What the reports of commands have in common: the model, the limit of memory, the page.

    limit = memory_limit_of(request, cluster)
    save_frontier_page(folder, planning, where=cluster.name, memory_limit=limit)

`topt plan` writes the page of what it has searched, `topt train` that of the search of its fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from lightning_topt.basics.units import format_count
from lightning_topt.costs.cluster import Cluster
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plan.frontier_report import MemoryLimit, save_html
from lightning_topt.plan.report_page import report_title
from lightning_topt.plugins.plan_request import PlanRequest
from lightning_topt.plugins.planning import Planning


def model_name(graph: OpGraph) -> str:
    """Return the model as it was named on the command line, else its class; and its size."""
    # "own" stands for classes of the user's, and says nothing of them
    name = HydraConfig.get().runtime.choices.get("model")
    name = graph.model if name in (None, "null", "own") else name
    return f"{name} ({format_count(sum(p.numel for p in graph.parameters))} parameters)"


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
    where: str,
    memory_limit: MemoryLimit | None,
    notes: Sequence[str] = (),
    **more: Any,
) -> tuple[Path, str]:
    """Write ``frontier.html`` to `folder`; return its path and its title.

    Args:
        folder: of the run.
        planning: what was searched and chosen.
        where: the cluster, for the title.
        memory_limit: of a device.
        notes: lines on the chosen plan.
        more: further arguments of `save_html`.
    """
    frontier, path = planning.frontier, folder / "frontier.html"
    points = frontier.shown_with(planning.chosen)
    title = report_title(model_name(planning.graph), where, (point.devices for point in points))
    given: dict[str, Any] = {"memory_limit": memory_limit, "exact": frontier.exact, **more}
    save_html(path, points, planning.chosen, title=title, notes=notes, **given)
    return path, title
