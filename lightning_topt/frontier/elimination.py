"""Elimination: a graph of operators with costs on nodes and edges becomes a list of independent parts, exactly.

F(j)[s] is the frontier of operator j in configuration s, F(ij)[s, t] that of the edge from i in s to j in t
(TensorOpt, arXiv 2004.10856, frontier tracking [recalled]; * is `product`, "best of" is `union`):

    branch   j has one neighbour k        F(k)[t]     *= best of s: F(j)[s] * F(jk)[s, t]
    node     j has two neighbours i, k    F(ik)[s, u] *= best of t: F(ij)[s, t] * F(j)[t] * F(jk)[t, u]
    edge     two edges join i and j       F(ij)[s, t]  = their product (done whenever an edge is added)
    condition  nothing else applies       for every configuration of the operator with most neighbours: fold it into
                                          them, search the rest, and take the best of all (exact, where the paper
                                          fixes one configuration and loses optimality)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_topt.frontier.frontier import Frontier, gather, pairs, product, reduce, thin_to

Cells = list[Frontier]  # one frontier per configuration; an empty one is forbidden
Grid = list[Cells]  # [configuration of the first operator][configuration of the second]


@dataclass(frozen=True)
class Limits:
    """How large things may grow: points of one frontier, and branches of conditioning. The scales are for `thin`."""

    max_points: int
    max_branches: int
    seconds_scale: float
    bytes_scale: float

    def apply(self, frontier: Frontier) -> Frontier:
        """`frontier`, thinned if it has too many points. Raises ValueError where no relative error could be stated."""
        if len(frontier) > self.max_points and not (self.seconds_scale > 0 and self.bytes_scale > 0):
            raise ValueError(
                f"a frontier has {len(frontier)} points, more than max_points={self.max_points}, and cannot be thinned "
                "because plans may cost nothing; allow more points"
            )
        scales = {"seconds_scale": self.seconds_scale, "bytes_scale": self.bytes_scale}
        return thin_to(frontier, self.max_points, **scales)


class Graph:
    """Operators (`nodes`: name -> cells) and the edges between them. Elimination takes them out one by one."""

    def __init__(self, nodes: Mapping[str, Cells]) -> None:
        self.nodes = dict(nodes)
        self.neighbours: dict[str, dict[str, Grid]] = {name: {} for name in nodes}

    def join(self, source: str, target: str, grid: Grid, *, limits: Limits) -> None:
        """Add an edge; where there is one already, both become one (edge elimination)."""
        if target in self.neighbours[source]:
            old = self.neighbours[source][target]
            rows = zip(old, grid, strict=True)
            grid = [[limits.apply(product(*two)) for two in zip(*both, strict=True)] for both in rows]
        self.neighbours[source][target] = grid
        self.neighbours[target][source] = [list(column) for column in zip(*grid, strict=True)]

    def remove(self, name: str) -> dict[str, Grid]:
        """Take an operator out; its edges, seen from it."""
        edges = self.neighbours.pop(name)
        for other in edges:
            del self.neighbours[other][name]
        del self.nodes[name]
        return edges

    def part(self, names: Iterable[str]) -> Graph:
        """The operators `names` with the edges among them."""
        chosen = [name for name in names if name in self.nodes]
        part = Graph({name: self.nodes[name] for name in chosen})
        for name in chosen:
            edges = self.neighbours[name].items()
            part.neighbours[name] = {other: grid for other, grid in edges if other in part.nodes}
        return part

    def components(self) -> list[Graph]:
        """The connected parts, each in the order of `nodes`."""
        parts, seen = [], set[str]()
        for name in self.nodes:
            reached, waiting = set[str](), [name] if name not in seen else []
            while waiting:
                current = waiting.pop()
                reached.add(current)
                waiting.extend(other for other in self.neighbours[current] if other not in reached)
            if reached:
                parts.append(self.part(other for other in self.nodes if other in reached))
                seen |= reached
        return parts


def eliminate(graph: Graph, *, limits: Limits, branches: int = 1) -> list[Frontier]:
    """The frontier of every connected part of `graph`; a plan is one point of each.

    Raises ValueError when conditioning would search more than ``limits.max_branches`` graphs.
    """
    return [_eliminate_component(component, limits, branches) for component in graph.components()]


def _eliminate_component(graph: Graph, limits: Limits, branches: int) -> Frontier:
    while len(graph.nodes) > 1:
        degrees = {name: len(edges) for name, edges in graph.neighbours.items()}
        smallest = min(degrees.values())
        if smallest == 1:
            _eliminate_branch(graph, next(name for name, degree in degrees.items() if degree == 1), limits)
        elif smallest == 2:
            candidates = [name for name, degree in degrees.items() if degree == 2]
            _eliminate_node(graph, min(candidates, key=lambda name: _work(graph, name)), limits)
        else:
            return _condition(graph, max(degrees, key=lambda name: degrees[name]), limits, branches)
    (cells,) = graph.nodes.values()
    return limits.apply(_best(cells))


def _eliminate_branch(graph: Graph, name: str, limits: Limits) -> None:
    cells = graph.nodes[name]
    ((other, grid),) = graph.remove(name).items()
    merged = []
    for mine, column in zip(graph.nodes[other], zip(*grid, strict=True), strict=True):
        best = _best([_sum(cell, edge) for cell, edge in zip(cells, column, strict=True)])
        merged.append(limits.apply(product(mine, best)))
    graph.nodes[other] = merged


def _eliminate_node(graph: Graph, name: str, limits: Limits) -> None:
    cells = graph.nodes[name]
    (left, left_grid), (right, right_grid) = graph.remove(name).items()
    merged = []
    for to_left in zip(*left_grid, strict=True):  # for every configuration of `left`: edges by configuration of `name`
        half = [_sum(cell, edge) for cell, edge in zip(cells, to_left, strict=True)]
        best = (
            _best([_sum(*two) for two in zip(half, column, strict=True)]) for column in zip(*right_grid, strict=True)
        )
        merged.append([limits.apply(frontier) for frontier in best])
    graph.join(left, right, merged, limits=limits)


def _condition(graph: Graph, name: str, limits: Limits, branches: int) -> Frontier:
    cells = graph.nodes[name]
    branches *= len(cells)
    if branches > limits.max_branches:
        raise ValueError(
            f"operator {name!r} and its neighbours are joined in too many ways: an exact frontier needs {branches} or "
            f"more searches, max_branches is {limits.max_branches}; raise it, or give fewer operators costs on edges"
        )
    edges = graph.remove(name)
    found = []
    for config, cell in enumerate(cells):
        rest = graph.part(graph.nodes)
        for other, grid in edges.items():
            rest.nodes[other] = [_sum(mine, edge) for mine, edge in zip(rest.nodes[other], grid[config], strict=True)]
        total = cell
        for part in eliminate(rest, limits=limits, branches=branches) if len(cell) else []:
            total = limits.apply(product(total, part))
        found.append(total)
    return limits.apply(_best(found))


def _sum(left: Frontier, right: Frontier) -> Frontier:
    """`product`, but where one side is a single point (most edges are) the reduction is left to who takes the best."""
    if len(left) == 1 or len(right) == 1:
        return pairs(left, right, np.indices((len(left), len(right))).reshape(2, -1).T)
    return product(left, right)


def _best(alternatives: Sequence[Frontier]) -> Frontier:
    """`union` of the allowed `alternatives`; an empty frontier when all are forbidden."""
    allowed = [frontier for frontier in alternatives if len(frontier)]
    return reduce(gather(allowed)) if allowed else alternatives[0]


def _work(graph: Graph, name: str) -> int:
    """Products it takes to eliminate a node."""
    return len(graph.nodes[name]) * int(np.prod([len(graph.nodes[other]) for other in graph.neighbours[name]]))
