"""The tensors of a step: who makes them, how long they live; the memory of blocks."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_topt.graph.blocks import choose_blocks
from lightning_topt.graph.capture import capture
from lightning_topt.graph.op_graph import Block, Step, StepTensor
from tests.graph.test_capture import MODEL_IDS, MODELS
from tests.models import GPT, batch_for

every_model = pytest.mark.parametrize("module", MODELS, ids=MODEL_IDS)


def brute_force(
    step: Step, blocks: set[str], batch_size: float
) -> list[tuple[str, float, float, float, float]]:
    """Block and bytes (kept, output, forward peak, backward peak) of each segment in order."""
    owner, calls = {}, {}
    for number, call in enumerate(step.calls):
        if call.module in blocks and all(
            position not in owner for position in range(call.first, call.end)
        ):
            owner |= dict.fromkeys(range(call.first, call.end), number)
            calls[number] = call
    rows: list[list[int]] = []  # positions of each segment
    for position in range(step.backward_start):
        if not position or owner.get(position) != owner.get(position - 1):
            rows.append([])
        rows[-1].append(position)

    def size(tensor: StepTensor) -> float:
        return round(tensor.bytes.at(batch_size))

    def live(position: int) -> float:
        inside = sum(amount.at(batch_size) for p, amount in step.workspaces if p == position)
        own = (t for t in step.tensors if t.first <= position < t.end and t.gradient_of is None)
        return inside + sum(map(size, own))

    def kept(positions: list[int]) -> float:
        return sum(size(t) for t in step.tensors if t.first in positions and step.is_kept(t))

    segment_of_op = {
        step.order[p]: index for index, positions in enumerate(rows) for p in positions
    }
    backward: dict[int, float] = {}
    current = len(rows) - 1
    for position in range(step.backward_start, len(step.order)):
        current = segment_of_op.get(step.order[position], current)
        backward[current] = max(backward.get(current, 0), live(position))
    found, before = [], 0.0
    for index, positions in enumerate(rows):
        own = output = kept(positions)
        if call := calls.get(owner.get(positions[0], -1)):
            made = [step.tensors[i] for i in call.outputs]
            given = [step.tensors[i] for i in call.inputs]
            output = sum(size(t) for t in made if step.is_kept(t) and t.first >= call.first)
            output += sum(size(t) for t in given if not step.is_kept(t))
        peak = max(map(live, positions)) - before
        last = backward[index] - before - own if index in backward else 0.0
        found.append((call.module if call else "", own, output, peak, last))
        before += own
    return found


@every_model
def test_the_timeline_is_that_of_the_tensors(module: Any) -> None:
    graph = capture(module, batch_for(module))
    others = [
        [],
        [m.path for m in graph.step.modules if "." not in m.path],
        [b.name for b in graph.blocks],
    ]
    for names in others:
        blocks = [Block("", 0, False), *(Block(name, 1, False) for name in names if name)]
        timeline = graph.with_blocks(blocks).timeline
        for size in graph.step.batch_sizes:
            expected = brute_force(graph.step, set(names) - {""}, size)
            kinds = ("kept", "output", "forward_peak", "backward_peak")
            assert [
                (s.block, *(getattr(s, f"{k}_bytes").at(size) for k in kinds)) for s in timeline
            ] == expected


@every_model
def test_saved_tensors_are_the_saved_bytes_of_operators(module: Any) -> None:
    graph = capture(module, batch_for(module))
    saved = dict.fromkeys([op.name for op in graph.ops], 0.0)
    for tensor in graph.step.tensors:
        if tensor.saved_by:
            saved[tensor.saved_by] += tensor.bytes.at(4)
    assert saved == {op.name: op.saved_bytes.at(4) for op in graph.ops}


# ---- blocks --------------------------------------------------------------------------------------


def test_blocks_are_chosen_after_the_capture() -> None:
    graph = capture(GPT(4), batch_for(GPT(4)))
    assert graph.blocks == choose_blocks(graph)
    parts = graph.with_blocks(choose_blocks(graph, min_parameter_share=0.01))
    whole = graph.with_blocks([Block("", 0, False)])
    assert {op.block for op in whole.ops} == {p.block for p in whole.parameters} == {""}
    assert [segment.block for segment in whole.timeline] == [""]
    assert {"tokens", "head", "blocks.0"} < {block.name for block in parts.blocks}
    inner = graph.with_blocks([Block("", 0, False), Block("blocks.1.up", 1, True)])
    assert [op.name for op in inner.ops if op.block] == ["blocks.1.up"]
    assert [p.name for p in inner.parameters if p.block] == [
        "blocks.1.up.weight",
        "blocks.1.up.bias",
    ]
    assert whole.with_blocks(graph.blocks) == graph
    with pytest.raises(ValueError, match=r"'nothing' is not a module of GPT"):
        graph.with_blocks([Block("", 0, False), Block("nothing", 1, True)])
