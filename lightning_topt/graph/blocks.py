"""Which modules a plan decides about.

[Note: choice of blocks] From the root down:
1. Siblings (children of one module, also in a ModuleList or Sequential) of one structure, that is the same tree of
   classes, parameter shapes and dtypes, are blocks of one group when at least two of them are eligible and together
   they are large. Repetitions inside them are not looked at.
2. Any other eligible module that is called exactly once and is large becomes a block of its own, the outermost first.
   A module that holds more than half of the parameters or kept activations, or in which rule 1 finds blocks, is opened
   instead, unless nothing inside it becomes a block.
3. All the rest is block "".

Eligible: called through forward, with parameters that no operator outside of it reads and that no module outside of it
has (tied weights). Large: at least 5 % of the parameter bytes, or at least 10 % of the activation bytes kept for
backward; without parameters only if recomputing it frees that much.

Recomputable: called exactly once, its output needs a gradient, and it changes no tensor that is older than the call
(running a module with running statistics or an in-place operator on its input again gives another result). Modules that
keep state in Python are found by a second call afterwards ([Note: second calls] in `second_calls`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from functools import cached_property

from torch import nn

from lightning_topt.graph.op_graph import Block
from lightning_topt.graph.recording import Call, Recording

MIN_PARAMETER_SHARE = 0.05
MIN_KEPT_SHARE = 0.10
MAX_SHARE = 0.5


def choose_blocks(module: nn.Module, recording: Recording) -> list[Block]:
    """The blocks of `module`, ``""`` first, then in the order of their first call; see [Note: choice of blocks]."""
    chooser = _Chooser(module, recording)
    chooser.open("")
    first = {path: chooser.calls[path][0].enter for path in chooser.chosen}
    blocks = [Block("", group=0, recomputable=False)]
    numbers: dict[object, int] = {}
    for path in sorted(chooser.chosen, key=lambda path: first[path]):
        group = numbers.setdefault(chooser.chosen[path], len(numbers) + 1)
        blocks.append(Block(path, group=group, recomputable=chooser.is_recomputable(path)))
    return blocks


def output_bytes(recording: Recording, call: Call) -> int:
    """Bytes that stay when `call` is recomputed: its kept outputs, and its inputs that nothing else keeps."""
    kept = {storage for storage in call.outputs if recording.is_kept(storage) and storage.born >= call.enter}
    inputs = {storage for storage in call.inputs if not recording.is_kept(storage)}
    return sum(storage.bytes for storage in (*kept, *inputs))


class _Chooser:
    """`chosen` maps the path of a block to the key of its group."""

    def __init__(self, module: nn.Module, recording: Recording) -> None:
        self.root, self.recording = module, recording
        self.chosen: dict[str, Hashable] = {}
        self.calls: dict[str, list[Call]] = defaultdict(list)
        for call in recording.calls:
            self.calls[call.path].append(call)
        self.names: dict[int, list[str]] = defaultdict(list)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self.names[id(parameter)].append(name)
        self.total_parameters = sum(p.nbytes for p in module.parameters()) or 1
        self.total_kept = recording.kept_bytes(0, recording.backward_start) or 1

    def open(self, path: str) -> None:
        """Choose blocks among the modules below `path`."""
        children = self._children(path)
        repeated = self._repeated(children)
        self.chosen.update(repeated)
        for child in children:
            if child not in repeated:
                self._visit(child)

    def is_recomputable(self, path: str) -> bool:
        """Whether the forward of the module at `path` may run again in the backward pass."""
        calls = self.calls[path]
        return len(calls) == 1 and calls[0].needs_grad and not self._writes_outside(calls[0])

    def _visit(self, path: str) -> None:
        fits = self._is_candidate(path)
        opens = not fits or self._has_repetitions(path) or max(self._shares(path)) > MAX_SHARE
        before = len(self.chosen)
        if opens:
            self.open(path)
        if fits and len(self.chosen) == before:
            self.chosen[path] = path

    def _is_candidate(self, path: str) -> bool:
        if len(self.calls[path]) != 1 or not self._is_eligible(path):
            return False
        parameters, kept = self._shares(path)
        if parameters == 0:
            kept -= output_bytes(self.recording, self.calls[path][0]) / self.total_kept
        return parameters >= MIN_PARAMETER_SHARE or kept >= MIN_KEPT_SHARE

    def _repeated(self, children: Iterable[str]) -> dict[str, Hashable]:
        groups: dict[Hashable, list[str]] = defaultdict(list)
        for child in children:
            if self.calls[child] and self._shares(child)[0] > 0 and self._is_eligible(child):
                groups[_structure(self.root.get_submodule(child))].append(child)
        chosen: dict[str, Hashable] = {}
        for paths in groups.values():
            parameters, kept = (sum(shares) for shares in zip(*map(self._shares, paths), strict=True))
            if len(paths) > 1 and (parameters >= MIN_PARAMETER_SHARE or kept >= MIN_KEPT_SHARE):
                chosen.update(dict.fromkeys(paths, paths[0]))
        return chosen

    def _has_repetitions(self, path: str) -> bool:
        children = self._children(path)
        return bool(self._repeated(children)) or any(self._has_repetitions(child) for child in children)

    def _children(self, path: str) -> list[str]:
        module = self.root.get_submodule(path)
        return [f"{path}.{name}" if path else name for name, _ in module.named_children()]

    def _shares(self, path: str) -> tuple[float, float]:
        """Its share of the parameter bytes and of the kept activation bytes."""
        parameters = sum(p.nbytes for p in self.root.get_submodule(path).parameters())
        kept = sum(self.recording.kept_bytes(call.enter, call.exit) for call in self.calls[path])
        return parameters / self.total_parameters, kept / self.total_kept

    def _is_eligible(self, path: str) -> bool:
        inside = {*self.root.get_submodule(path).parameters()}
        if any(not name.startswith(path + ".") for parameter in inside for name in self.names[id(parameter)]):
            return False
        names = {self.names[id(parameter)][0] for parameter in inside}
        return bool(self.calls[path]) and not any(path not in stack for name in names for stack in self._readers[name])

    @cached_property
    def _readers(self) -> dict[str, set[tuple[str, ...]]]:
        """Call stacks of the operators that read a parameter, by its name."""
        readers: dict[str, set[tuple[str, ...]]] = defaultdict(set)
        for op in self.recording.ops:
            for name in op.parameters:
                readers[name].add(op.stack)
        return readers

    def _writes_outside(self, call: Call) -> bool:
        return any(call.enter <= tick < call.exit and born < call.enter for tick, born in self.recording.writes)


def _structure(module: nn.Module) -> Hashable:
    return (
        type(module),
        tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in module._parameters.items() if p is not None),
        tuple((name, _structure(child)) for name, child in module.named_children()),
    )
