"""What the reports of commands have in common: the name of the model."""

from __future__ import annotations

from hydra.core.hydra_config import HydraConfig

from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plugins.plan_artifacts import sized_name


def model_name(graph: OpGraph) -> str:
    """Return the model as it was named on the command line, else its class; and its size."""
    # "own" stands for classes of the user's, and says nothing of them
    name = HydraConfig.get().runtime.choices.get("model")
    return sized_name(graph, None if name in ("null", "own") else name)
