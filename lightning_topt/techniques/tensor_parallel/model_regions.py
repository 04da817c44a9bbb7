"""`ModelRegions`: the parts of a model that are split alike, with the traced calls of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace, TracedCall


@dataclass(frozen=True, eq=False)
class ModelRegions:
    """The regions of a model whose step was captured as `graph`, under `trace`."""

    graph: OpGraph
    trace: FunctionTrace
    _known: dict[str, tuple[list[TracedCall], set[int]]] = field(default_factory=dict)

    @cached_property
    def repeated(self) -> list[str]:
        """Blocks that are there several times."""
        groups = Counter(block.group for block in self.graph.blocks)
        return [block.name for block in self.graph.blocks if groups[block.group] > 1]

    @cached_property
    def all(self) -> list[list[str]]:
        """Blocks that are split alike, the one that is searched first: all that is there once, then
        every group.
        """
        groups: dict[int, list[str]] = {}
        for block in self.graph.blocks:
            if block.name in self.repeated:
                groups.setdefault(block.group, []).append(block.name)
        return [[""], *groups.values()]

    @cached_property
    def alike(self) -> list[list[str]]:
        """Blocks that are split alike and run alike: modules of one structure may be called
        differently.
        """
        ran: dict[str, list[Any]] = {}
        for op in self.graph.ops:  # kernels of equal calls are the same objects
            ran.setdefault(op.block, []).append((op.name.removeprefix(op.block), id(op.forward)))
        found: list[list[str]] = []
        for region in self.all:
            groups: dict[Any, list[str]] = {}
            for block in region:
                groups.setdefault(tuple(ran.get(block, ())), []).append(block)
            found += groups.values()
        return found

    def traced(self, block: str) -> tuple[list[TracedCall], set[int]]:
        """Return the calls of a block, or of all that is there once (``""``), and the numbers of
        the tensors that have to be whole.
        """
        if block not in self._known:
            calls, whole = (
                self.trace.calls_of(block, self.repeated),
                self.trace.whole_at(block, self.repeated),
            )
            self._known[block] = calls, whole
        return self._known[block]
