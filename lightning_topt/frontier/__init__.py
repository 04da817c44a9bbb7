"""CostTable -> Frontier: every plan that no other plan beats in both step time and peak memory."""

from lightning_topt.frontier.block_frontier import eliminate_block
from lightning_topt.frontier.frontier import Frontier, FrontierPoint
from lightning_topt.frontier.frontier_search import search_chain, search_frontier
from lightning_topt.frontier.mesh_frontier import MeshFrontier, search_meshes

__all__ = [
    "Frontier",
    "FrontierPoint",
    "MeshFrontier",
    "eliminate_block",
    "search_chain",
    "search_frontier",
    "search_meshes",
]
