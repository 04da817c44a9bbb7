"""CostTable -> Frontier: every plan that no other plan beats in both step time and peak memory."""

from lightning_topt.frontier.frontier import Frontier, FrontierPoint
from lightning_topt.frontier.search import search_frontier

__all__ = ["Frontier", "FrontierPoint", "search_frontier"]
