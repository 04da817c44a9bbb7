"""Tables of costs -> frontier: every plan that no other plan beats in step time and peak memory."""

from lightning_topt.frontier.chain_search import (
    Frontier,
    FrontierPoint,
    search_chain,
    search_meshes,
)
from lightning_topt.frontier.stage_search import StageFrontier, StagePoint, search_stages

__all__ = [
    "Frontier",
    "FrontierPoint",
    "StageFrontier",
    "StagePoint",
    "search_chain",
    "search_meshes",
    "search_stages",
]
