"""Choose the modules that a plan decides about, from the graph alone.

[Note: choice of blocks] From the root down:
1. Siblings (children of one module, also in a ModuleList or Sequential) with the same tree of
   classes, parameter shapes and dtypes have one structure. They are blocks of one group when at
   least two of them are eligible and together they are large. Repetitions inside them are not
   searched.
2. Any other eligible module that is called exactly once and is large becomes a block of its own,
   the outermost first. A module is opened instead if it holds more than half of the parameters or
   kept activations, or if rule 1 finds blocks in it. It stays whole if nothing inside it becomes a
   block.
3. All the rest is block "".

Of a step that optimizes manually, modules may be called several times (a critic is), and are large
from 1 % on: block "" stays whole there ([Note: manual optimization] in `fsdp`).

Eligible: called through forward, with parameters that no operator outside of it reads and that no
module outside of it has (tied weights). Large: at least 5 % of the parameter bytes, or at least 10
% of the activation bytes kept for backward; without parameters only if recomputing it frees that
much.

Recomputable: called exactly once, and its output needs a gradient. The call changes no tensor that
is older than itself, as running statistics or an in-place operator on its input do. A second call
with the same arguments did the same ([Note: second calls] in `second_calls`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Hashable, Iterable
from dataclasses import replace
from functools import cached_property

from torch import nn

from lightning_topt.graph.op_graph import Block, ModuleCall, OpGraph, StepMemory

MIN_PARAMETER_SHARE = 0.05
MIN_KEPT_SHARE = 0.10
MAX_SHARE = 0.5
_MANUAL_SHARE = 0.01


def choose_blocks(
    graph: OpGraph,
    *,
    min_parameter_share: float = MIN_PARAMETER_SHARE,
    min_kept_share: float = MIN_KEPT_SHARE,
    max_share: float = MAX_SHARE,
) -> tuple[Block, ...]:
    """Return the blocks of `graph`, ``""`` first, then in the order of their first call.

    See [Note: choice of blocks]; ``graph.with_blocks`` takes the result.

    Args:
        graph: of one training step.
        min_parameter_share: share of all parameter bytes from which a module is large.
        min_kept_share: share of all kept activation bytes from which it is large.
        max_share: of either, above which a module is opened.
    """
    if graph.is_manual:
        min_parameter_share = min(min_parameter_share, _MANUAL_SHARE)
    chooser = _Chooser(graph, (min_parameter_share, min_kept_share), max_share)
    chooser.open("")
    # in the order of forward; equal keys share a group
    order = sorted(chooser.chosen, key=lambda path: chooser.calls[path][0].first)
    blocks = [Block("", group=0, recomputable=False)]
    numbers: dict[object, int] = {}
    for path in order:
        group = numbers.setdefault(chooser.chosen[path], len(numbers) + 1)
        blocks.append(Block(path, group=group, recomputable=chooser.is_recomputable(path)))
    return tuple(blocks)


_CHANGES_BUFFERS = "change tensors that are older than their call, such as statistics of batch norm"
_DIFFERS = (
    "do not do the same when they are called again: they count, are called several times, or "
    "append to a cache (models of transformers do not with use_cache=False)"
)


class _Chooser:
    """One choice of blocks; `chosen` maps the path of a block to the key of its group."""

    def __init__(self, graph: OpGraph, large: tuple[float, float], max_share: float) -> None:
        self.graph, self.large, self.max_share = graph, large, max_share
        self.memory = StepMemory(graph.step, graph.batch_size)
        self.modules = {module.path: module for module in graph.step.modules}
        self.chosen: dict[str, Hashable] = {}
        # calls of each module in the order of the step, and modules by the one around them
        self.calls: dict[str, list[ModuleCall]] = defaultdict(list)
        for call in graph.step.calls:
            self.calls[call.module].append(call)
        self.children: dict[str, list[str]] = defaultdict(list)
        for path in self.modules:
            self.children[path.rpartition(".")[0]].append(path)
        # at least 1, to divide by
        self.total_parameters = sum(p.nbytes for p in graph.parameters) or 1
        self.total_kept = self.memory.kept(0, graph.step.backward_start) or 1

    def open(self, path: str) -> None:
        """Choose blocks among the modules below `path`."""
        # rule 1 first
        repeated = self._repeated(self.children[path])
        self.chosen.update(repeated)
        for child in self.children[path]:
            if child not in repeated:
                self._visit(child)

    def is_recomputable(self, path: str) -> bool:
        """Return whether the forward of the module at `path` may run again in the backward pass."""
        calls = self.calls[path]
        # `repeatable` was found by calling it twice; the rest is read off the graph
        return len(calls) == 1 and may_repeat(calls[0]) and self.modules[path].repeatable

    def _visit(self, path: str) -> None:
        # Choose the module at `path` as one block, or blocks inside of it
        # rule 2, for a module that is no repetition
        fits = self._is_candidate(path)
        # what holds more than half would leave a plan little to decide
        opens = not fits or self._has_repetitions(path) or max(self._shares(path)) > self.max_share
        # an opened module becomes a block after all where nothing inside it did
        before = len(self.chosen)
        if opens:
            self.open(path)
        if fits and len(self.chosen) == before:
            self.chosen[path] = path

    def _is_candidate(self, path: str) -> bool:
        is_once = len(self.calls[path]) == 1
        if not (is_once or self.graph.is_manual) or not self._is_eligible(path):
            return False
        parameters, kept = self._shares(path)
        if parameters == 0:  # only memory can be gained, by recomputing it
            kept -= self.memory.output(self.calls[path][0]) / self.total_kept
        return self._is_large(parameters, kept)

    def _is_large(self, parameters: float, kept: float) -> bool:
        return parameters >= self.large[0] or kept >= self.large[1]

    def _repeated(self, children: Iterable[str]) -> dict[str, Hashable]:
        # Those of `children` that repeat one structure, with the key of their group
        # children of one structure that have parameters and are called
        groups: dict[int, list[str]] = defaultdict(list)
        for child in children:
            if self.calls[child] and self._shares(child)[0] > 0 and self._is_eligible(child):
                groups[self.modules[child].structure].append(child)
        chosen: dict[str, Hashable] = {}
        # large together, though each layer of a deep model is small
        for paths in groups.values():
            parameters, kept = (
                sum(shares) for shares in zip(*map(self._shares, paths), strict=True)
            )
            # one structure is one group: its first path is the key
            if len(paths) > 1 and self._is_large(parameters, kept):
                chosen.update(dict.fromkeys(paths, paths[0]))
        return chosen

    def _has_repetitions(self, path: str) -> bool:
        children = self.children[path]
        return bool(self._repeated(children)) or any(
            self._has_repetitions(child) for child in children
        )

    def _shares(self, path: str) -> tuple[float, float]:
        # Its share of the parameter bytes and of the kept activation bytes
        parameters = sum(self.graph.parameters[index].nbytes for index in self._inside[path])
        kept = sum(self.memory.kept(call.first, call.end) for call in self.calls[path])
        return parameters / self.total_parameters, kept / self.total_kept

    def _is_eligible(self, path: str) -> bool:
        # its parameters are its own: no other name, no reader outside of it
        inside = [self.graph.parameters[index] for index in self._inside[path]]
        # a tied weight has a name elsewhere
        if any(not name.startswith(path + ".") for p in inside for name in (p.name, *p.aliases)):
            return False
        # all readers lie in this module: it is among the modules around each of them
        return bool(self.calls[path]) and not any(
            path not in stack for p in inside for stack in self._readers[p.name]
        )

    @cached_property
    def _inside(self) -> dict[str, dict[int, None]]:
        # Indices of the parameters in each module, by its path
        found: dict[str, dict[int, None]] = defaultdict(dict)
        # under all names, also those of tied weights, in all modules around
        for index, parameter in enumerate(self.graph.parameters):
            for name in (parameter.name, *parameter.aliases):
                while name := name.rpartition(".")[0]:
                    found[name][index] = None
        return found

    @cached_property
    def _readers(self) -> dict[str, set[tuple[str, ...]]]:
        # Modules around the operators that read a parameter, by its name
        readers: dict[str, set[tuple[str, ...]]] = defaultdict(set)
        for op in self.graph.ops:
            for name in op.parameters:
                readers[name].add(op.stack)
        return readers


def child_blocks(module: nn.Module) -> list[str]:
    """Return the names of children with parameters, where no step says more.

    Containers, which nobody calls, are opened.
    """
    found: list[str] = []
    for name, child in module.named_children():
        if type(child) in (nn.ModuleList, nn.ModuleDict):
            found += [f"{name}.{inner}" for inner in child_blocks(child)]
        elif isinstance(child, nn.ParameterList | nn.ParameterDict):
            continue
        elif next(child.parameters(), None) is not None:
            found.append(name)
    return found


def layers_of(module: nn.Module) -> list[str]:
    """Return the names of what containers in `module` hold, as far as it has parameters.

    These are the layers that most models call one after the other.
    """
    found: list[str] = []
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            parts = child.named_children()
            inside = [inner for inner, part in parts if any(True for _ in part.parameters())]
        else:
            inside = layers_of(child)
        found += [f"{name}.{inner}" for inner in inside]
    return found


def may_repeat(call: ModuleCall) -> bool:
    """Return whether recomputing `call` makes sense and changes no tensor that is older."""
    return call.needs_grad and not call.writes_outside


def repeat_candidates(graph: OpGraph) -> list[str]:
    """Return the modules that are called once, by a call that may be repeated."""
    calls = Counter(call.module for call in graph.step.calls)
    return [
        call.module for call in graph.step.calls if calls[call.module] == 1 and may_repeat(call)
    ]


def mark_repeatable(graph: OpGraph, paths: Collection[str]) -> OpGraph:
    """Return `graph` with the modules at `paths`, and no others, marked as repeatable."""
    modules = tuple(replace(m, repeatable=m.path in paths) for m in graph.step.modules)
    return replace(graph, step=replace(graph.step, modules=modules))


def why_not_recomputed(graph: OpGraph) -> str | None:
    """Return which blocks cannot run their forward again in the backward pass, and why.

    The result is a clause; None where all can.
    """
    calls = {call.module: call for call in graph.step.calls}
    reasons: dict[str, list[str]] = defaultdict(list)
    # without a gradient there is nothing to recompute, and nothing to explain
    for block in graph.blocks:
        if block.name and not block.recomputable and calls[block.name].needs_grad:
            writes = calls[block.name].writes_outside
            reasons[_CHANGES_BUFFERS if writes else _DIFFERS].append(block.name)
    clauses = [
        f"{len(names)} ({names[0]!r}{', ...' if names[1:] else ''}) {why}"
        for why, names in reasons.items()
    ]
    return f"of {len(graph.blocks) - 1} blocks, {' and '.join(clauses)}" if clauses else None


def block_of(parameter: str, blocks: Container[str]) -> str:
    """Return the name of the block that the parameter of this name lies in.

    ``""`` for one in no named block.
    """
    parts = parameter.split(".")
    # the longest prefix first: the innermost block
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in blocks:
            return ".".join(parts[:end])
    return ""
