"""A backward pass in two parts, for zero-bubble schedules (Qi et al., arXiv 2401.10241).

The first part computes the gradients of inputs, which other stages wait for. The second computes
those of parameters, and may run later. A module of its own, since it knows nothing of pipelines:

    backward = SplitBackward(roots, gradients, inputs)
    found = backward.inputs()
    backward.parameters()          # adds to `.grad`

[Note: the two parts] Nodes of the autograd graph that lead to an input are on the way. The first
part runs these nodes, which compute no gradients of parameters then, and keeps what arrives at
those of them that also lead to parameters by another edge. The second part runs each of these nodes
once more from what has arrived, to its parameters alone. Nodes that lead to one parameter together
run together, since they may lead to one another. What arrives at each then replaces what the
autograd engine adds up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = tuple[Tensor | None, ...]


class SplitBackward:
    """The backward pass of a graph from its roots, with their gradients, in two parts.

    Call `inputs` once, then `parameters` once.
    """

    def __init__(
        self,
        roots: Sequence[GradientEdge],
        gradients: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
    ) -> None:
        self._roots, self._gradients, self._inputs = list(roots), list(gradients), list(inputs)
        self._arrived: dict[Node, Gradients] = {}

    def inputs(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs, None for those that the roots do not depend on."""
        targets = {get_gradient_edge(tensor).node for tensor in self._inputs}
        on_way, leads_to = _walk([root.node for root in self._roots], targets)
        self._leads_to = {node: leads_to[node] for node in on_way if leads_to[node]}
        # Roots that lead to parameters alone are left to the second part.
        pairs = list(zip(self._roots, self._gradients, strict=True))
        on_way_roots = [(root, given) for root, given in pairs if root.node in on_way]
        rest = [(root, given) for root, given in pairs if root.node not in on_way]
        self._roots, self._gradients = [root for root, _ in rest], [given for _, given in rest]
        if not on_way_roots:
            return (None,) * len(self._inputs)
        # Hooks keep what arrives at nodes that lead to parameters as well.
        handles = [node.register_prehook(self._keep(node)) for node in self._leads_to]
        try:
            return torch.autograd.grad(
                [root for root, _ in on_way_roots],
                self._inputs,
                [given for _, given in on_way_roots],
                retain_graph=True,
                allow_unused=True,
            )
        finally:
            for handle in handles:
                handle.remove()
            self._inputs = []

    def _keep(self, node: Node) -> Callable[[Any], None]:
        # A hook that keeps what arrives at `node`

        def keep(gradients: Gradients) -> None:
            self._arrived[node] = gradients

        return keep

    def parameters(self) -> None:
        """Add the gradients of the parameters to their `grad`, and let go of the graph."""
        if self._roots:
            torch.autograd.backward(self._roots, self._gradients, retain_graph=bool(self._arrived))
        arrived, leads_to = self._arrived, self._leads_to
        self._arrived, self._leads_to, self._roots, self._gradients = {}, {}, [], []
        for nodes in _groups({node: leads_to[node] for node in arrived}):
            parameters = {id(p): p for node in nodes for p in leads_to[node]}
            _run_to_parameters(nodes, arrived, list(parameters.values()))


def _run_to_parameters(
    nodes: Iterable[Node], arrived: dict[Node, Gradients], parameters: list[Tensor]
) -> None:
    # Run `nodes` from what has arrived at each, to `parameters` alone
    edges = [
        (GradientEdge(node, n), g)
        for node in nodes
        for n, g in enumerate(arrived[node])
        if g is not None
    ]
    # A node that another one leads to would get their sum: it gets what arrived at it alone.
    handles = [node.register_prehook(_replace_by(arrived[node])) for node in nodes]
    try:
        if edges:
            torch.autograd.backward(
                [edge for edge, _ in edges],
                [g for _, g in edges],
                retain_graph=True,
                inputs=parameters,
            )
    finally:
        for handle in handles:
            handle.remove()


def _replace_by(gradients: Gradients) -> Callable[[Any], Any]:
    return lambda _: gradients


def _walk(
    roots: list[Node], targets: set[Node]
) -> tuple[set[Node], dict[Node, tuple[Tensor, ...]]]:
    # Return the nodes from which a target is reached, and what other paths lead to.
    # That are for every node the parameters that it reaches by edges off the nodes on the way.
    on_way: set[Node] = set()
    reached: dict[Node, tuple[Tensor, ...]] = {}
    # Depth first: a node is left (True) once all that follow it are done.
    open_nodes = [(node, False) for node in roots]
    while open_nodes:
        node, is_left = open_nodes.pop()
        if node in reached and not is_left:
            continue
        following = [following for following, _ in node.next_functions if following is not None]
        if not is_left:
            reached[node] = ()
            open_nodes.append((node, True))
            open_nodes += [(other, False) for other in following if other not in reached]
            continue
        if node in targets or any(other in on_way for other in following):
            on_way.add(node)
        own = getattr(node, "variable", None) if not following and node not in targets else None
        found = {id(p): p for other in following if other not in on_way for p in reached[other]}
        reached[node] = tuple(found.values()) if own is None else (own,)
    return on_way, reached


def _groups(leads_to: dict[Node, tuple[Tensor, ...]]) -> list[list[Node]]:
    # The nodes in groups that have no parameter in common
    group_of: dict[int, list[Node]] = {}
    for node, parameters in leads_to.items():
        joined = [node]
        for old in {
            id(group): group for p in parameters if (group := group_of.get(id(p)))
        }.values():
            joined += old
        for other in joined:
            group_of |= {id(p): joined for p in leads_to[other]}
    return list({id(group): group for group in group_of.values()}.values())
